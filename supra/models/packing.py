"""Sequences of different length laid end to end: how pads and document boundaries are kept out of the state.

A padded batch [B, T, ...] is turned into its real tokens in row order [1, total, ...] with `cu_seqlens`, so that a pad
neither enters the state or the normaliser nor decays it, wherever it stands. Packed documents are the same thing with
nothing to remove.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a batch are, computed once per forward pass and shared by all layers.

    `cu_seqlens` [N+1] int64: boundaries of the N sequences among the `total` real tokens.
    `token_index` [total] or None: which of the B·T columns are real; None when all are.
    `delay_index` [total]: for each token, the one `window` earlier in its own sequence, as an index into
    (real tokens, then N·window slots of the past).
    `tail_index` [N, window]: likewise the last `window` tokens of each sequence after this segment.
    `sequence` and `local` [total]: each token's sequence and its place in this segment of it.
    """

    cu_seqlens: Tensor
    token_index: Tensor | None
    delay_index: Tensor
    tail_index: Tensor
    sequence: Tensor
    local: Tensor

    def positions(self, num_seen: Tensor) -> Tensor:
        """Position [total] of each token in its own sequence, which has seen `num_seen` [N] tokens before."""
        return num_seen[self.sequence] + self.local

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence in this segment, [N]."""
        return self.cu_seqlens.diff()

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, total, ...]."""
        flat = x.flatten(0, 1)
        return (flat if self.token_index is None else flat.index_select(0, self.token_index)).unsqueeze(0)

    def unpack(self, x: Tensor, batch_size: int, num_columns: int) -> Tensor:
        """[1, total, ...] -> [B, T, ...] with zeros where the pads were."""
        if self.token_index is None:
            return x.view(batch_size, num_columns, *x.shape[2:])
        flat = x.new_zeros(batch_size * num_columns, *x.shape[2:])
        return flat.index_copy(0, self.token_index, x[0]).view(batch_size, num_columns, *x.shape[2:])

    def delay(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Shift x [1, total, ...] right by the window inside each sequence; past [N, w, ...] feeds the start.

        Returns the shifted x [1, total, ...] and the new past [N, w, ...].
        """
        both = torch.cat((x[0], past.flatten(0, 1)))
        return both.index_select(0, self.delay_index).unsqueeze(0), both[self.tail_index]


def packing_from_mask(mask: Tensor, window: int) -> Packing:
    """Packing of a padded batch, mask [B, T] non-zero at real tokens; each row is one sequence."""
    real = mask.bool()
    cu_seqlens = torch.nn.functional.pad(real.sum(dim=1).cumsum(0), (1, 0))
    return _packing(cu_seqlens, real.flatten().nonzero().squeeze(1), window)


def packing_from_boundaries(
    cu_seqlens: Tensor, batch_size: int, num_columns: int, window: int
) -> Packing | None:
    """Packing of documents laid end to end over the B·T tokens in row order; None where each row is one document.

    Raises:
        ValueError: boundaries that do not rise from 0 to B·T, or a row that does not start a document.
    """
    cu_seqlens = cu_seqlens.to(torch.int64)
    total = batch_size * num_columns
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != total or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens must rise from 0 to {total} (batch x columns), got {cu_seqlens.tolist()}"
        )
    row_starts = torch.arange(0, total + 1, max(num_columns, 1), device=cu_seqlens.device)
    if not bool(torch.isin(row_starts, cu_seqlens).all()):
        raise ValueError(
            "every row of a batch starts a document: cu_seqlens must hold each multiple of the row length"
        )
    if torch.equal(cu_seqlens, row_starts):
        return None
    return _packing(cu_seqlens, None, window)


def positions_from_boundaries(cu_seqlens: Tensor, batch_size: int, num_columns: int) -> Tensor:
    """Positions [B, T] that start at 0 in every document."""
    flat = torch.arange(batch_size * num_columns, device=cu_seqlens.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, flat, right=True) - 1]
    return (flat - starts).view(batch_size, num_columns)


def places_of_rising(position_ids: Tensor) -> Tensor:
    """Places 0, 1, … [B, T] of tokens in runs of rising positions: a jump forward is none, a fall begins another."""
    before = position_ids[:, :1] - 1
    falls = position_ids.diff(dim=1, prepend=before) <= 0
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    return columns - torch.where(falls, columns, 0).cummax(dim=1).values


def delay_rows(x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Shift x [B, T, ...] right by w; past [B, w, ...] feeds the start. Returns the shifted x and the new past."""
    both = torch.cat((past, x), dim=1)
    return both[:, : x.shape[1]], both[:, x.shape[1] :]


def _packing(cu_seqlens: Tensor, token_index: Tensor | None, window: int) -> Packing:
    lengths = cu_seqlens.diff()
    num_sequences, total = lengths.shape[0], int(cu_seqlens[-1])
    sequence = torch.repeat_interleave(torch.arange(num_sequences, device=cu_seqlens.device), lengths)
    flat = torch.arange(total, device=cu_seqlens.device)
    local = flat - cu_seqlens[sequence]
    delay_index = torch.where(local >= window, flat - window, total + sequence * window + local)
    slots = torch.arange(window, device=cu_seqlens.device)
    tail_local = lengths[:, None] - window + slots
    past_slot = (
        total + torch.arange(num_sequences, device=cu_seqlens.device)[:, None] * window + tail_local + window
    )
    tail_index = torch.where(tail_local >= 0, cu_seqlens[:-1, None] + tail_local, past_slot)
    return Packing(cu_seqlens, token_index, delay_index, tail_index, sequence, local)
