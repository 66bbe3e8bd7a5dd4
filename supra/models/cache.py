"""The cache of a converted model: a state of fixed size per linear layer, keys and values where softmax stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from .configuration_supra import SupraConfig


class RecurrentLayer(CacheLayerMixin):
    """What one linear layer remembers, the same size after 1 token and after 1 million.

    - `recurrent_state` [B, S, K, V]: everything older than the window, fp32;
    - `window_streams`: the last w tokens' keys [B, w, G, D], mapped keys [B, w, G, K], values [B, w, G, D] and, where
      the decay is gated, log decays [B, w, S]; right-aligned (oldest first), all zero where no token has come yet;
    - `sinks`: the first tokens' keys and values [B, s, G, D], where the model keeps attention sinks;
    - `num_seen` [B]: real tokens seen by each row, pads left out.

    `num_tokens` counts the columns seen, pads included: that is what generation calls the sequence length.
    transformers' own linear-attention layer neither counts tokens nor reports a state that no convolution wrote.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self.recurrent_state: Tensor | None = None
        self.window_streams: tuple[Tensor, ...] = ()
        self.sinks: tuple[Tensor, ...] = ()
        self.num_seen: Tensor | None = None

    def store(
        self,
        num_new_tokens: int,
        recurrent_state: Tensor | None,
        window_streams: tuple[Tensor, ...],
        sinks: tuple[Tensor, ...],
        num_seen: Tensor | None,
    ) -> None:
        """Replace the memory after a segment of `num_new_tokens` columns."""
        self.recurrent_state = None if recurrent_state is None else _compact(recurrent_state)
        self.window_streams, self.sinks = tuple(map(_compact, window_streams)), tuple(map(_compact, sinks))
        self.num_seen = num_seen
        self.num_tokens += num_new_tokens
        self.is_initialized = True

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for counting bytes."""
        held = [self.recurrent_state, *self.window_streams, *self.sinks, self.num_seen]
        return [tensor for tensor in held if tensor is not None]

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Asked for by the mask of kept softmax layers when this layer comes first: they see every column.
        return self.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a linear layer stores a recurrent state, not keys and values")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise TypeError("a linear layer stores a recurrent state, not keys and values")

    def _map(self, change: Any) -> None:
        if self.recurrent_state is not None:
            self.recurrent_state = change(self.recurrent_state)
        self.window_streams = tuple(change(stream) for stream in self.window_streams)
        self.sinks = tuple(change(sink) for sink in self.sinks)
        if self.num_seen is not None:
            self.num_seen = change(self.num_seen)

    def reset(self) -> None:
        self.num_tokens = 0
        self.recurrent_state, self.window_streams, self.sinks, self.num_seen = None, (), (), None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        self._map(lambda tensor: tensor[indices, ...])

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        raise TypeError(
            "a recurrent state is too small to be worth offloading; use a cache without offloading"
        )

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise ValueError(
            "a recurrent state cannot be cropped: tokens already summed into it cannot be taken out. "
            "Use generation without assisted decoding, prompt lookup or contrastive search"
        )


class SupraCache(Cache):
    """One cache layer per model layer, chosen by `config.layer_types`."""

    def __init__(self, config: SupraConfig) -> None:
        layers: list[Any] = []
        for layer_type in config.layer_types or []:
            if layer_type == "linear_attention":
                layers.append(RecurrentLayer())
            elif layer_type == "sliding_attention":
                assert config.sliding_window is not None
                layers.append(DynamicSlidingWindowLayer(sliding_window=config.sliding_window))
            else:
                layers.append(DynamicLayer())
        super().__init__(layers=layers)

    def num_bytes(self) -> int:
        """Bytes held by all layers, each storage counted once and whole."""
        storages: dict[int, int] = {}
        for layer in self.layers:
            held = layer.tensors() if isinstance(layer, RecurrentLayer) else _keys_and_values(layer)
            for tensor in held:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


def _compact(tensor: Tensor) -> Tensor:
    """A copy where the tensor is a view of something larger: the last w tokens must not keep a whole prompt alive."""
    held = tensor.untyped_storage().nbytes()
    return tensor if held == tensor.numel() * tensor.element_size() else tensor.clone()


def _keys_and_values(layer: Any) -> list[Any]:
    """What transformers' own layers hold; None before the first token."""
    return [layer.keys, layer.values]
