"""Forking a cache: the rows of caches of different length become one batch that goes on reading.

A linear layer's state has the same size for every row and is simply stacked. Keys and values of a softmax layer are
padded on the left, which a mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from supra.models import RecurrentLayer, SupraCache, SupraForCausalLM


@dataclass(frozen=True)
class Row:
    """One row of a cache that has read `length` tokens of it, without pads."""

    cache: Any
    index: int
    length: int


def new_cache(model: Any) -> Any:
    """An empty cache of the kind that the model uses."""
    if isinstance(model, SupraForCausalLM):
        return SupraCache(model.config)
    return DynamicCache(config=model.config)


def can_fork(model: Any) -> bool:
    """Whether every layer's memory can be forked: not where keys and values slide out of the cache."""
    return all(type(layer) in (RecurrentLayer, DynamicLayer) for layer in new_cache(model).layers)


def gather(model: Any, rows: Sequence[Row]) -> tuple[Any, Tensor | None]:
    """A new cache [B rows] with the memory of `rows`, and the mask [B, past] of its columns where keys are padded."""
    cache = new_cache(model)
    longest = max(row.length for row in rows)
    softmax = False
    for index, layer in enumerate(cache.layers):
        sources = [row.cache.layers[index] for row in rows]
        if isinstance(layer, RecurrentLayer):
            _gather_states(layer, sources, rows, longest)
        else:
            softmax = True
            _gather_keys(layer, sources, rows, longest)
    if not softmax or all(row.length == longest for row in rows):
        return cache, None
    lengths = torch.tensor([row.length for row in rows], device=model.device)
    columns = torch.arange(longest, device=model.device)
    return cache, (columns >= longest - lengths[:, None]).long()


def _gather_states(
    layer: RecurrentLayer, sources: list[RecurrentLayer], rows: Sequence[Row], longest: int
) -> None:
    def stack(tensors: list[Tensor | None]) -> Tensor | None:
        if tensors[0] is None:
            return None
        # Rows of one cache come in runs: one indexing for each instead of one for each row.
        pieces: list[Tensor] = []
        run: list[int] = []
        for number, row in enumerate(rows):
            run.append(row.index)
            if number + 1 == len(rows) or tensors[number + 1] is not tensors[number]:
                source = tensors[number]
                assert source is not None
                pieces.append(source[torch.tensor(run, device=source.device)])
                run = []
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    layer.recurrent_state = stack([source.recurrent_state for source in sources])
    layer.num_seen = stack([source.num_seen for source in sources])
    layer.window_streams, layer.sinks = (
        tuple(
            tensor
            for position in range(len(getattr(sources[0], name)))
            if (tensor := stack([getattr(source, name)[position] for source in sources])) is not None
        )
        for name in ("window_streams", "sinks")
    )
    layer.num_tokens, layer.is_initialized = longest, True


def _gather_keys(layer: DynamicLayer, sources: list[Any], rows: Sequence[Row], longest: int) -> None:
    first = sources[0]
    layer.lazy_initialization(first.keys, first.values)
    for name in ("keys", "values"):
        held = getattr(first, name)
        target = held.new_zeros(len(rows), held.shape[1], longest, held.shape[3])
        for number, (source, row) in enumerate(zip(sources, rows, strict=True)):
            target[number, :, longest - row.length :] = getattr(source, name)[row.index, :, -row.length :]
        setattr(layer, name, target)
