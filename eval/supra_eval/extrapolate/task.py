"""What a task is here: sequences of any length, with a target wherever something is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

UNSCORED = -100
Metric = Literal["accuracy", "exact match", "perplexity"]


class Batch(NamedTuple):
    """Token ids [B, T] and targets [B, T], both int64; a target is the class at its own position, or `UNSCORED`."""

    tokens: Tensor
    targets: Tensor


Draw = Callable[[np.random.Generator, int, int], Batch]  # random numbers, rows, length


@dataclass(frozen=True)
class Task:
    """`draw` makes training sequences, `test` those of a test (`draw` as well, unless the task has its own).

    `accuracy` counts targets, `exact match` sequences of which every target is right (which under teacher forcing are
    those that greedy decoding would answer), `perplexity` is exp of the mean loss.
    """

    name: str
    num_tokens: int
    num_classes: int
    metric: Metric
    draw: Draw
    test: Draw | None = None

    def train_batch(self, seed: int, step: int, rows: int, length: int) -> Batch:
        """The sequences of a step: the same for every mixer and method."""
        return self.draw(generator(f"{self.name} train {seed} {step}"), rows, length)

    def test_batch(self, rows: int, length: int) -> Batch:
        """The test at one length: the same for every run; no seed of training leads to it."""
        return (self.test or self.draw)(generator(f"{self.name} test {length}"), rows, length)


def generator(purpose: str) -> np.random.Generator:
    """Random numbers that depend on `purpose` alone."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(purpose.encode()))


def baselines(task: Task, batch: Batch) -> dict[str, float]:
    """What the task's metric is for guessing, and for knowing no more than how often each class occurs."""
    scored = batch.targets[batch.targets != UNSCORED]
    share = torch.bincount(scored, minlength=task.num_classes).double() / len(scored)
    if task.metric == "perplexity":
        entropy = -(share * share.clamp_min(1e-300).log()).sum().item()
        return {"guessing": float(task.num_classes), "class frequencies": math.exp(entropy)}
    per_row = (batch.targets != UNSCORED).sum(1)
    if task.metric == "exact match":
        return {"guessing": 100.0 * float((1.0 / task.num_classes) ** per_row.double().mean())}
    return {"guessing": 100.0 / task.num_classes, "commonest class": 100.0 * share.max().item()}
