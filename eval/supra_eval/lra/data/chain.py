"""Chains of additions and subtractions within the ten digits: as hard at any length, generated, exact.

A chain is a digit and then signed digits; the answer is the running result. By the rule `modulo` the result wraps
around at ten: every step counts, and no part of the chain tells the answer. By the rule `within` only such steps are
drawn as keep the result between 0 and 9: after some steps the recent ones alone tell it, so that a short memory is
enough.

Notable: with steps of 1 only (`largest_step` 1), start and length give away whether the result is odd.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from supra.errors import UserError

from ..task import Examples, Task
from .folder import rows_of

# Token ids: 0 is padding, then the ten digits a chain starts with, then +1 … +9, then −1 … −9.
START, PLUS, MINUS = 1, 11, 20
NUM_TOKENS = 29
RULES = ("modulo", "within")
MAX_BARREN = 20


def make(
    *, seed: int, train: int = 10_000, validation: int = 1_000, test: int = 1_000,
    train_steps: tuple[int, int] = (32, 32), validation_steps: tuple[int, int] | None = None,
    test_steps: tuple[int, int] | None = None, largest_step: int = 9, rule: str = "modulo",
    say: Callable[[str], None] = lambda text: None,
) -> Task:  # fmt: skip
    """The task with so many steps a chain (least and most, each length as likely); the train split's unless given.

    No chain is there twice. The test split is drawn first, then validation, then train.

    Raises:
        UserError: sizes, steps or a rule that cannot be had.
    """
    if rule not in RULES:
        raise UserError(f"--rule {rule}", "is unknown", f"Choose from {', '.join(RULES)}")
    if not 1 <= largest_step <= 9:
        raise UserError(f"--largest-step {largest_step}", "is no digit from 1 to 9", "Give one of them")
    start, rng = time.monotonic(), np.random.default_rng(seed)
    seen: set[bytes] = set()
    test_split = split(rng, test, test_steps or train_steps, largest_step, rule, seen)
    validation_split = split(rng, validation, validation_steps or train_steps, largest_step, rule, seen)
    train_split = split(rng, train, train_steps, largest_step, rule, seen)
    total, taken = train + validation + test, time.monotonic() - start
    say(f"chain: {total:,} examples in {taken:.1f} s · {total / taken:,.0f} examples/s")
    return Task("chain", 10, NUM_TOKENS, 1, train_split, validation_split, test_split)


def split(
    rng: np.random.Generator,
    size: int,
    steps: tuple[int, int],
    largest_step: int,
    rule: str,
    seen: set[bytes],
) -> Examples:
    """`size` chains of a number of steps within `steps`, none of them in `seen`, to which they are added."""
    least, most = steps
    if size < 1:
        raise UserError("the splits", "each need an example at least", "Give a size of 1 or more")
    if not 1 <= least <= most:
        raise UserError(f"{least}-{most} steps", "is no range of 1 or more", "Write for example 32 or 8-32")
    inputs = np.zeros((size, 1 + most), dtype=np.uint8)
    labels, lengths = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int32)
    filled = num_barren = 0
    while filled < size:
        drawn = chains(rng, size - filled, least, most, largest_step, rule)
        fresh = []
        for row in range(len(drawn)):
            one = rows_of(drawn[row : row + 1])
            if not one <= seen:
                seen |= one
                fresh.append(row)
        new = drawn[np.array(fresh, dtype=np.int64)]
        target = slice(filled, filled + len(new))
        inputs[target], labels[target], lengths[target] = new.inputs, new.labels, new.lengths
        filled += len(new)
        num_barren = 0 if len(new) else num_barren + 1
        if num_barren == MAX_BARREN:
            raise UserError(
                f"{size:,} chains of {least}-{most} steps",
                "are more than there are that differ, over all splits",
                "Ask for fewer examples or more steps",
            )
    return Examples(inputs, labels, lengths)


def chains(
    rng: np.random.Generator, size: int, least: int, most: int, largest_step: int, rule: str
) -> Examples:
    """`size` chains, drawn at once."""
    num_steps = rng.integers(least, most + 1, size)
    result = rng.integers(0, 10, size)
    inputs = np.zeros((size, 1 + most), dtype=np.uint8)
    inputs[:, 0] = START + result
    possible = np.concatenate([np.arange(1, largest_step + 1), -np.arange(1, largest_step + 1)])
    for position in range(1, most + 1):
        going = position <= num_steps
        if rule == "modulo":
            step = rng.choice(possible, size)
        else:
            allowed = np.abs(result[:, None] + possible - 4.5) < 5
            step = possible[np.argmax(rng.random(allowed.shape) * allowed, axis=1)]
        inputs[going, position] = np.where(step > 0, PLUS - 1 + step, MINUS - 1 - step)[going]
        result = np.where(going, (result + step) % 10, result)
    return Examples(inputs, result.astype(np.int64), (1 + num_steps).astype(np.int32))
