"""Batches as a pure function of (seed, step): there is no iterator whose state a resume could lose.

The documents lie end to end in one stream, cut into sequences of `length` tokens. Each epoch cuts from a
start of its own, so that what fills no sequence differs, and visits the sequences in an order of its own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from supra.errors import UserError
from supra.train.token_store import TokenStore

IGNORED = -100  # label of a position that predicts nothing, as in torch's cross-entropy


@dataclass(frozen=True)
class Batch:
    """Packed sequences.

    `input_ids`, `position_ids`, `labels` [B, T] int64: positions are 0, 1, … in each document (or row), or what the
    stage's `positions` draws there;
    `labels[:, t]` is the token after `input_ids[:, t]`, or `IGNORED` where a document or a row ends.
    `cu_seqlens` [N+1] int64: bounds of the documents among the B·T tokens in row order; a row starts one.
    `learned` [B, T] bool: positions whose prediction is learned, those before an answer's token in chats and all in
    other text; None: all. Where it is false, the label is `IGNORED`.
    `sequence_ids`: which (component of the mixture, epoch, sequence) each row is.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    sequence_ids: tuple[tuple[int, int, int], ...]
    learned: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.labels.to(device),
            self.cu_seqlens.to(device),
            self.sequence_ids,
            None if self.learned is None else self.learned.to(device),
        )


@dataclass(frozen=True)
class Sequence:
    """`tokens` [T] int64 of one sequence, and where documents start inside it, its own start left out.

    `answers` [T] bool: which tokens are part of an answer, if it is of chats.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray | None
    epoch: int
    number: int

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens of each document inside it."""
        return np.diff(self.starts, prepend=0, append=len(self.tokens))


class PackedData:
    """The sequences that one text gives to a stage.

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
        self._order = (
            -1,
            np.zeros(0, dtype=np.int64),
        )  # an epoch and its order, kept until another is asked for

    def batch(self, first: int, size: int) -> Batch:
        """Sequences number `first` to `first + size - 1` of this text alone."""
        return collate([(0, self.sequence(number)) for number in range(first, first + size)])

    def sequence(self, number: int) -> Sequence:
        """Sequence number `number` of the endless run over epochs."""
        epoch, place = divmod(number, self.num_sequences)
        index = int(self._order_of(epoch)[place])
        start = self._first_start(epoch) + index * self.length
        span = slice(start, start + self.length)
        answers = None if self.store.answers is None else self.store.answers[span] != 0
        starts = self._documents_within(start) - start
        return Sequence(self.store.tokens[span].astype(np.int64), starts, answers, epoch, index)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = epoch, _generator(self.seed, epoch, 0).permutation(self.num_sequences)
        return self._order[1]

    def _first_start(self, epoch: int) -> int:
        spare = len(self.store.tokens) - self.num_sequences * self.length
        return int(_generator(self.seed, epoch, 1).integers(spare + 1))

    def _documents_within(self, start: int) -> np.ndarray:
        """Document starts strictly inside the sequence at `start`."""
        offsets = self.store.offsets
        low = np.searchsorted(offsets, start, side="right")
        high = np.searchsorted(offsets, start + self.length, side="left")
        return np.unique(offsets[low:high])


def collate(sequences: list[tuple[int, Sequence]], positions: list[np.ndarray] | None = None) -> Batch:
    """A batch of (component, sequence) pairs, one a row; `positions` [T] of each, unless they are 0, 1, …."""
    tokens = np.stack([sequence.tokens for _, sequence in sequences])
    size, length = tokens.shape
    bounds = [np.concatenate(([0], s.starts)) + row * length for row, (_, s) in enumerate(sequences)]
    cu_seqlens = np.concatenate([*bounds, [size * length]])
    if positions is None:
        positions = [np.concatenate([np.arange(n) for n in s.document_lengths]) for _, s in sequences]
    shifted = np.append(tokens.reshape(-1)[1:], IGNORED)
    shifted[cu_seqlens[1:] - 1] = IGNORED
    labels = shifted.reshape(tokens.shape)
    learned = None
    if any(sequence.answers is not None for _, sequence in sequences):
        learned = np.ones(tokens.shape, dtype=bool)
        for row, (_, sequence) in enumerate(sequences):
            if sequence.answers is not None:
                learned[row] = (labels[row] != IGNORED) & np.append(sequence.answers[1:], False)
        labels[~learned] = IGNORED
    return Batch(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(np.stack(positions)),
        labels=torch.from_numpy(labels),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        sequence_ids=tuple((component, s.epoch, s.number) for component, s in sequences),
        learned=None if learned is None else torch.from_numpy(learned),
    )


def derived_seed(*parts: int) -> int:
    """One seed out of several numbers, without the collisions that adding them has."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def _generator(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, epoch, purpose]))
