"""What a long-range task is to a model: padded inputs, labels, and three splits that never mix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAD = 0  # token id of padding; real tokens start at 1


@dataclass(frozen=True)
class Examples:
    """Some examples of a task.

    `inputs` are token ids [N, T] (integers, `PAD` behind the end) or numbers [N, T, C] (float32, zero behind the end);
    `labels` [N] classes; `lengths` [N] positions that are real; `second` the other document of a pair, if a task
    compares two.
    """

    inputs: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    second: Examples | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> Examples:
        second = None if self.second is None else self.second[rows]
        return Examples(self.inputs[rows], self.labels[rows], self.lengths[rows], second)


@dataclass(frozen=True)
class Task:
    """A classification task; `num_tokens` counts ids with padding (None: numbers of `channels` a position)."""

    name: str
    num_classes: int
    num_tokens: int | None
    channels: int
    train: Examples
    validation: Examples
    test: Examples
