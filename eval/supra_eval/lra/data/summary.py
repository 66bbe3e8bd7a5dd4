"""What is said of a task before a model is: how many, how long, how the labels lie, and what knowing nothing scores.

Notable: a trivial baseline is the train split's commonest class, or its commonest class given one thing that is plain
to see (ListOps: the outermost operator; a chain: its start and its last step). A score beside these means something; a
score alone does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..task import Examples, Task

SPLITS = ("train", "validation", "test")


def summarise(task: Task) -> dict[str, Any]:
    """Counts, lengths and label shares of every split, and the accuracy (0 to 1) of trivial baselines on test."""
    splits = {}
    for name in SPLITS:
        examples = getattr(task, name)
        counts = np.bincount(examples.labels, minlength=task.num_classes)
        splits[name] = {
            "count": len(examples),
            "label_shares": [round(float(count) / len(examples), 4) for count in counts],
            "length_min": int(examples.lengths.min()),
            "length_mean": round(float(examples.lengths.mean()), 1),
            "length_max": int(examples.lengths.max()),
        }
    return {"splits": splits, "baselines": {name: round(score, 4) for name, score in baselines(task).items()}}


def baselines(task: Task) -> dict[str, float]:
    """The accuracy on the test split of each trivial baseline, fitted on the train split."""
    nothing = np.zeros(len(task.train), dtype=np.int64), np.zeros(len(task.test), dtype=np.int64)
    found = {"majority class": by_key(task, *nothing)}
    for kind, (name, key) in KEYS.items():
        if task.name.startswith(kind):
            found[name] = by_key(task, key(task.train), key(task.test))
    return found


def by_key(task: Task, train: np.ndarray, test: np.ndarray) -> float:
    """Accuracy of the commonest train class given a key (a number from 0); the commonest of all where a key is new."""
    table = np.zeros((max(int(train.max()), int(test.max())) + 1, task.num_classes))
    np.add.at(table, (train, task.train.labels), 1)
    table += 1e-6 * table.sum(axis=0)  # decides what was never seen, and ties
    return float((table[test].argmax(axis=1) == task.test.labels).mean())


def root_operator(examples: Examples) -> np.ndarray:
    return examples.inputs[:, 0].astype(np.int64)


def start_and_last_step(examples: Examples) -> np.ndarray:
    last = examples.inputs[np.arange(len(examples)), examples.lengths - 1].astype(np.int64)
    return examples.inputs[:, 0].astype(np.int64) * 32 + last


KEYS = {
    "listops": ("heuristic on the root operator", root_operator),
    "chain": ("heuristic on the start and the last step", start_and_last_step),
}
