"""A validation split carved out of a training split by a seed, for data that comes without one."""

from __future__ import annotations

import numpy as np

from supra.errors import UserError

from ..task import Examples


def carve(train: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """What is left of `train`, and `share` of each of its classes; both in the order of `train`.

    Raises:
        UserError: a share that leaves one of the two empty.
    """
    rng = np.random.default_rng(seed)
    held = np.zeros(len(train), dtype=bool)
    for label in np.unique(train.labels):
        rows = np.flatnonzero(train.labels == label)
        held[rng.permutation(rows)[: round(share * len(rows))]] = True
    if not 0 < held.sum() < len(train):
        raise UserError(
            f"a validation share of {share}",
            f"leaves a split of {len(train)} examples empty",
            "Give another share",
        )
    return train[np.flatnonzero(~held)], train[np.flatnonzero(held)]
