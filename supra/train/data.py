"""Batches as a pure function of (seed, step): there is no iterator whose state a resume could lose.

The documents lie end to end in one stream, cut into sequences of `length` tokens. Each epoch cuts from a
start of its own, so that what fills no sequence differs, and visits the sequences in an order of its own.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from supra.errors import UserError
from supra.train.tokens import TokenStore

IGNORED = -100  # label of a position that predicts nothing, as in torch's cross-entropy


@dataclass(frozen=True)
class Batch:
    """Packed sequences.

    `input_ids`, `position_ids`, `labels` [B, T] int64: positions start at 0 in each document (or row);
    `labels[:, t]` is the token after `input_ids[:, t]`, or `IGNORED` where a document or a row ends.
    `cu_seqlens` [N+1] int64: bounds of the documents among the B·T tokens in row order; a row starts one.
    `sequence_ids`: which (epoch, sequence) each row is.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    sequence_ids: tuple[tuple[int, int], ...]

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.labels.to(device),
            self.cu_seqlens.to(device),
            self.sequence_ids,
        )


class PackedData:
    """The sequences of one stage.

    Raises:
        UserError: there are fewer tokens than one sequence holds.
    """

    def __init__(self, store: TokenStore, *, length: int, seed: int) -> None:
        self.store, self.length, self.seed = store, length, seed
        self.num_sequences = len(store.tokens) // length
        if self.num_sequences == 0:
            raise UserError(
                "data",
                f"{len(store.tokens)} tokens are less than one sequence of {length}",
                "Add text or lower length.",
            )

    def batch(self, first: int, size: int) -> Batch:
        """Sequences number `first` to `first + size - 1` of the endless run over epochs."""
        ids = tuple(self._locate(number) for number in range(first, first + size))
        tokens = np.empty((size, self.length), dtype=np.int64)
        boundaries = [np.zeros(0, dtype=np.int64)]
        for row, (epoch, sequence) in enumerate(ids):
            start = self._first_start(epoch) + sequence * self.length
            tokens[row] = self.store.tokens[start : start + self.length]
            inner = self._documents_within(start) - start
            boundaries.append(np.concatenate(([0], inner)) + row * self.length)
        cu_seqlens = np.concatenate([*boundaries, [size * self.length]])
        return _batch(tokens, cu_seqlens, ids)

    def _locate(self, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, self.num_sequences)
        return epoch, int(_order(self.seed, epoch, self.num_sequences)[place])

    def _first_start(self, epoch: int) -> int:
        spare = len(self.store.tokens) - self.num_sequences * self.length
        return int(_generator(self.seed, epoch, 1).integers(spare + 1))

    def _documents_within(self, start: int) -> np.ndarray:
        """Document starts strictly inside the sequence at `start`."""
        offsets = self.store.offsets
        low = np.searchsorted(offsets, start, side="right")
        high = np.searchsorted(offsets, start + self.length, side="left")
        return np.unique(offsets[low:high])


def _batch(tokens: np.ndarray, cu_seqlens: np.ndarray, ids: tuple[tuple[int, int], ...]) -> Batch:
    flat = np.arange(tokens.size)
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    labels = np.append(tokens.reshape(-1)[1:], IGNORED)
    labels[cu_seqlens[1:] - 1] = IGNORED
    shape = tokens.shape
    return Batch(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy((flat - starts).reshape(shape)),
        labels=torch.from_numpy(labels.reshape(shape)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        sequence_ids=ids,
    )


def _generator(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, epoch, purpose]))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_sequences: int) -> np.ndarray:
    return _generator(seed, epoch, 0).permutation(num_sequences)
