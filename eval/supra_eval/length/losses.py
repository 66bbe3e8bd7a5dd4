"""Per-token losses of long sequences in fixed memory, the perplexity protocols, and what they are grouped by.

Losses are natural-log negative log-likelihoods. Everything is read in chunks through the model's own cache, and the
vocabulary's logits are made for a slice of a chunk at a time, so a recurrent model needs the same memory at any length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from supra.errors import SupraError, UserError
from supra.generate import cache_bytes

# Rows of logits made at a time, over the whole batch: 256 x 128k vocabulary in fp32 is 131 MB.
HEAD_TOKENS = 256
FIRST_BUCKET_TOKENS = 128


@dataclass(frozen=True)
class Mean:
    """A mean over scored tokens; `stderr` is its error over sequences, None where there is only one."""

    value: float
    stderr: float | None
    num_tokens: int


@torch.inference_mode()
def read_losses(
    model: Any, ids: Tensor, chunk_tokens: int = 512, *, first_scored: int = 1, batch_size: int = 1
) -> tuple[Tensor, int]:
    """Losses [N, T - first_scored] of the tokens ids[:, first_scored:] ([N, T]), and the bytes one row's cache held.

    Every row is read from an empty state, `batch_size` of them at a time. The losses are fp32 and on the CPU.

    Raises:
        UserError: a token id outside the model's vocabulary (another tokenizer's text).
        SupraError: a loss that is not finite.
    """
    if int(ids.max()) >= model.config.vocab_size:
        raise UserError(
            "the text",
            f"holds token {int(ids.max())} of another vocabulary",
            "Use this model's own tokenizer",
        )
    rows, num_bytes = [], 0
    for batch in ids.split(batch_size):
        losses, cache = _read_batch(model, batch.to(model.device), chunk_tokens, first_scored)
        rows.append(losses)
        num_bytes = max(num_bytes, cache_bytes(cache) // batch.shape[0])
    losses = torch.cat(rows)
    if not bool(losses.isfinite().all()):
        raise SupraError(
            "the model's loss",
            "is not finite on this text",
            "Look for NaN weights: supra inspect, or retrain",
        )
    return losses, num_bytes


def loss_by_position(model: Any, ids: Tensor, chunk_tokens: int = 512, *, batch_size: int = 1) -> Tensor:
    """Loss [N, T-1] of every token of ids [N, T] but the first; entry i belongs to the token at position i + 1."""
    return read_losses(model, ids, chunk_tokens, batch_size=batch_size)[0]


def _read_batch(model: Any, ids: Tensor, chunk_tokens: int, first_scored: int) -> tuple[Tensor, Any]:
    cache, parts = None, []
    targets, step = ids[:, 1:], max(1, HEAD_TOKENS // ids.shape[0])
    for start in range(0, targets.shape[1], chunk_tokens):
        chunk = ids[:, start : min(start + chunk_tokens, targets.shape[1])]
        output = model.model(chunk, cache=cache, use_cache=True)
        cache = output.cache
        # Column j of this chunk predicts the token at position start + j + 1.
        skipped = max(0, first_scored - 1 - start)
        hidden = output.last_hidden_state[:, skipped:]
        wanted = targets[:, start + skipped : start + chunk.shape[1]]
        for i in range(0, wanted.shape[1], step):
            logits = model.lm_head(hidden[:, i : i + step]).float()
            piece = wanted[:, i : i + step]
            parts.append(F.cross_entropy(logits.transpose(1, 2), piece, reduction="none").cpu())
    return torch.cat(parts, dim=1), cache


def non_overlapping(
    model: Any, ids: Tensor, context_tokens: int, chunk_tokens: int = 512, *, batch_size: int = 1
) -> Tensor:
    """Losses [N, blocks, context_tokens - 1] of ids [N, T] cut into blocks, each read from an empty state.

    A block's first token is not scored; tokens after the last whole block are left out. A token has half of
    `context_tokens` before it on average, so this protocol is worse than the context allows.
    """
    num_rows, num_blocks = ids.shape[0], ids.shape[1] // context_tokens
    blocks = ids[:, : num_blocks * context_tokens].reshape(-1, context_tokens)
    losses = loss_by_position(model, blocks, chunk_tokens, batch_size=batch_size)
    return losses.view(num_rows, num_blocks, context_tokens - 1)


def sliding(
    model: Any, ids: Tensor, context_tokens: int, chunk_tokens: int = 512,
    *, stride: int = 256, max_windows: int | None = None, batch_size: int = 1,
) -> Tensor:  # fmt: skip
    """Losses [N, windows * stride] of the last tokens of ids [N, T], each with nearly `context_tokens` before it.

    Windows of `context_tokens` are read from an empty state and only the last `stride` tokens of each are scored;
    they end at T, T - stride, … as many as fit (at most `max_windows`), so every context scores the same tokens.

    Raises:
        UserError: a stride that leaves no context.
    """
    if not 1 <= stride < context_tokens:
        raise UserError(
            f"a sliding window of {context_tokens} tokens",
            f"must be longer than its stride of {stride}",
            f"Use contexts above {stride}",
        )
    num_rows, length = ids.shape
    num_windows = (length - context_tokens) // stride + 1
    num_windows = num_windows if max_windows is None else min(num_windows, max_windows)
    first = length - context_tokens - (num_windows - 1) * stride
    windows = ids[:, first:].unfold(1, context_tokens, stride).reshape(-1, context_tokens)
    losses, _ = read_losses(
        model, windows, chunk_tokens, first_scored=context_tokens - stride, batch_size=batch_size
    )
    return losses.view(num_rows, num_windows * stride)


def position_buckets(length: int) -> list[tuple[int, int]]:
    """Buckets [start, end) of positions 0 … length - 1: 0–128, 128–256, 256–512, …, the last one cut at `length`."""
    edges = [0]
    end = FIRST_BUCKET_TOKENS
    while edges[-1] < length:
        edges.append(min(end, length))
        end *= 2
    return list(pairwise(edges))


def by_position(losses: Tensor) -> list[tuple[int, Mean]]:
    """(end of the bucket, mean loss) for losses [N, T-1] as `loss_by_position` returns them."""
    return [
        (end, clustered(losses[:, max(start - 1, 0) : end - 1]))
        for start, end in position_buckets(losses.shape[1] + 1)
        if end > 1
    ]


def mention_distances(ids: Tensor) -> Tensor:
    """For each token of ids [N, T], how many tokens ago the same token id stood last in its row; 0 for never."""
    rows = [_distances(row) for row in ids.cpu().numpy()]
    return torch.from_numpy(np.stack(rows))


def _distances(row: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(row, kind="stable")  # equal ids side by side, in order of position
    same = row[order[1:]] == row[order[:-1]]
    distances = np.zeros(row.shape, dtype=np.int64)
    distances[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distances


def by_last_mention(losses: Tensor, ids: Tensor) -> tuple[list[tuple[int, Mean]], Mean | None]:
    """Mean loss by the distance to the last mention: (1, …), (2–3, …), (4–7, …) under their first distance; and never.

    `losses` [N, T-1] belong to ids[:, 1:] of ids [N, T]; buckets without a token are left out.
    """
    distances = mention_distances(ids)[:, 1:]
    buckets, start = [], 1
    while start < ids.shape[1]:
        chosen = (distances >= start) & (distances < 2 * start)
        if bool(chosen.any()):
            buckets.append((start, clustered(losses, chosen)))
        start *= 2
    never = distances == 0
    return buckets, clustered(losses, never) if bool(never.any()) else None


def clustered(losses: Tensor, chosen: Tensor | None = None) -> Mean:
    """Mean over the `chosen` tokens of losses [N, ...]; its standard error is taken over the N sequences.

    The error is the ratio estimator's for clusters, √(N/(N−1) Σ_i (s_i − m·c_i)²) / Σ_i c_i with a sequence's sum s_i
    and count c_i (Cochran, Sampling Techniques, chapter 6); with equal counts it is that of the sequences' means.
    """
    flat = losses.reshape(losses.shape[0], -1).double()
    kept = torch.ones_like(flat) if chosen is None else chosen.reshape(flat.shape).double()
    sums, counts = (flat * kept).sum(1), kept.sum(1)
    total = float(counts.sum())
    mean = float(sums.sum()) / total
    num_rows = int((counts > 0).sum())
    stderr = None
    if num_rows > 1:
        squares = float(((sums - mean * counts) ** 2).sum())
        stderr = math.sqrt(num_rows / (num_rows - 1) * squares) / total
    return Mean(mean, stderr, int(total))
