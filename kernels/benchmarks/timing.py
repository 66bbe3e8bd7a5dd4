"""Times of contenders that take turns: one call of each in every round, so that a ratio compares the same moments.

On a GPU: CUDA events around the call, behind a kernel that only waits, so that the queue is full before the first
event and launching costs nothing; sets of inputs that together exceed the L2 cache several times take turns. Without
one (dry run): each call once, and no time is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
WAIT_CYCLES = 4_000_000  # about 2 ms: longer than Python needs to launch one pass
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contender by round."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.ms) < 2:
            return self.ms[0], self.ms[0]
        low, _, high = statistics.quantiles(self.ms, n=4)
        return low, high


def ratio(theirs: Times, ours: Times) -> float:
    """The median over rounds of their time over ours."""
    return statistics.median(a / b for a, b in zip(theirs.ms, ours.ms, strict=True))


def number_of_sets(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """How many sets of inputs make up 4 times the L2 cache, in a quarter of the free memory, at most 128."""
    wanted = -(-4 * l2_bytes // max(1, set_bytes))
    return max(1, min(wanted, free_bytes // 4 // max(1, set_bytes), 128))


def rounds_that_fit(once: Mapping[str, float], rounds: int, seconds: float) -> tuple[int, list[str]]:
    """Rounds of all contenders within `seconds`, given the seconds of one call each, and who is left out because not
    even `LEAST_ROUNDS` fit: of those that take more than an equal share the last named, never the first of all."""
    names, out = list(once), list[str]()
    while True:
        fit = int(seconds / max(1e-9, sum(once[name] for name in names)))
        if fit >= LEAST_ROUNDS or len(names) == 1:
            return max(1, min(rounds, fit)), out
        share = sum(once[name] for name in names) / len(names)
        heavy = [name for name in names[1:] if once[name] >= share] or names[1:]
        names.remove(heavy[-1])
        out.append(heavy[-1])


def take_turns(calls: Mapping[str, Sequence[Call]], rounds: int, inner: int) -> dict[str, Times]:
    """Time `inner` calls of every contender in each round, on a GPU; each round starts with another contender."""
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        events = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            own = calls[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            start.record()
            for i in range(inner):
                own[(turn * inner + i) % len(own)]()
            end.record()
            torch.cuda.synchronize()
            events[name] = start.elapsed_time(end) / inner
        for name, ms in events.items():
            found[name].append(ms)
    return {name: Times(tuple(ms)) for name, ms in found.items()}


def seconds_of(call: Call) -> float:
    """Wall time of one call, the GPU's work included."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
