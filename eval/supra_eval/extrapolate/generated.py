"""Generated tasks of any length: chains of ±, multi-query associative recall, a passkey in filler.

They are as hard at any length but for the distance: a chain's result stays a digit, the pairs to recall and the digits
of the key stay as many.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator

from supra.config.fields import Count, PositiveCount, Real, Section
from supra_eval.lra.data.chain import MINUS, NUM_TOKENS, PLUS, START, chains

from .task import UNSCORED, Batch, Task

DIGITS = 10


class Chain(Section):
    """Chains of additions and subtractions (arXiv 2312.17044, appendix A.3): the running result, at every step.

    `within` draws steps that keep the result within 0 to 9, `modulo` wraps around at ten: see `lra.data.chain`.
    """

    rule: Literal["within", "modulo"] = "within"
    largest_step: Annotated[Count, Field(ge=1, le=9)] = 9

    @property
    def least_tokens(self) -> int:
        """The shortest sequence in which something is asked."""
        return 2

    def make(self) -> Task:
        """The start itself is not asked for."""

        def draw(rng: np.random.Generator, rows: int, length: int) -> Batch:
            steps = length - 1
            tokens = chains(rng, rows, steps, steps, self.largest_step, self.rule).inputs.astype(np.int64)
            signed = np.where(tokens >= MINUS, MINUS - 1 - tokens, tokens - PLUS + 1)
            signed[:, 0] = tokens[:, 0] - START
            results = signed.cumsum(1) % DIGITS
            results[:, 0] = UNSCORED
            return _batch(tokens, results)

        return Task("chain", NUM_TOKENS, DIGITS, "accuracy", draw)


class Recall(Section):
    """Multi-query associative recall (arXiv 2312.04927, section 3): pairs of key and value, then keys among filler.

    Ours differs: the number of pairs is fixed, whatever the length, and they are asked for at any later position, each
    with probability `query_rate` (the last always), so that only the distance grows. Answers are not shown.
    """

    pairs: PositiveCount = 4
    keys: PositiveCount = Field(default=16, validate_default=True)
    values: Annotated[Count, Field(ge=2)] = 16
    query_rate: Annotated[Real, Field(gt=0, le=1)] = 0.25

    @field_validator("keys")
    @classmethod
    def _a_key_has_one_value(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("pairs", 1):
            raise ValueError("keys do not repeat: at least as many as pairs are needed")
        return value

    @property
    def least_tokens(self) -> int:
        """The shortest sequence in which something is asked."""
        return 2 * self.pairs + 1

    def make(self) -> Task:
        """Ids: 0 filler, then the keys, then the values; classes are the values."""

        def draw(rng: np.random.Generator, rows: int, length: int) -> Batch:
            keys = rng.permuted(np.tile(np.arange(self.keys), (rows, 1)), axis=1)[:, : self.pairs]
            values = rng.integers(0, self.values, (rows, self.pairs))
            tokens = np.zeros((rows, length), dtype=np.int64)
            targets = np.full((rows, length), UNSCORED, dtype=np.int64)
            shown = 2 * self.pairs
            tokens[:, 0:shown:2], tokens[:, 1:shown:2] = 1 + keys, 1 + self.keys + values
            asked = rng.random((rows, length - shown)) < self.query_rate
            asked[:, -1] = True
            which = rng.integers(0, self.pairs, asked.shape)
            tokens[:, shown:] = np.where(asked, 1 + np.take_along_axis(keys, which, 1), 0)
            targets[:, shown:] = np.where(asked, np.take_along_axis(values, which, 1), UNSCORED)
            return _batch(tokens, targets)

        return Task("recall", 1 + self.keys + self.values, self.values, "accuracy", draw)


class Passkey(Section):
    """A key of some digits at a random place in filler, asked for at the end (arXiv 2305.16300, section 4)."""

    digits: PositiveCount = 4
    filler: PositiveCount = 16  # different filler tokens, drawn at random

    @property
    def least_tokens(self) -> int:
        """The shortest sequence in which something is asked."""
        return 2 * self.digits + 1

    def make(self) -> Task:
        """Ids: the ten digits, what announces the key, what asks for it, filler; the answer's digits are read back."""
        announces, asks, first_filler = DIGITS, DIGITS + 1, DIGITS + 2

        def draw(rng: np.random.Generator, rows: int, length: int) -> Batch:
            D = self.digits
            key = rng.integers(0, DIGITS, (rows, D))
            tokens = rng.integers(first_filler, first_filler + self.filler, (rows, length))
            targets = np.full((rows, length), UNSCORED, dtype=np.int64)
            start = rng.integers(0, length - 2 * D, (rows, 1))
            at = start + np.arange(D + 1)
            np.put_along_axis(tokens, at, np.concatenate([np.full((rows, 1), announces), key], axis=1), 1)
            tokens[:, -D], tokens[:, length - D + 1 :] = asks, key[:, :-1]
            targets[:, -D:] = key
            return _batch(tokens, targets)

        return Task("passkey", first_filler + self.filler, DIGITS, "exact match", draw)


def _batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
