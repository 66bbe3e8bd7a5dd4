"""MNIST-1D (arXiv 2011.14439): ten short templates, stretched, moved and noised, by its authors' own generator.

Notable: the package `mnist1d` would download its data set unless told otherwise; only its generator is called here,
which needs no network. A validation split is generated with the others and belongs to neither.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from supra.errors import UserError

from ..task import Examples, Task

NUM_CLASSES = 10


def make(
    *, seed: int, train: int = 2_000, validation: int = 500, test: int = 1_000, length: int = 40,
    say: Callable[[str], None] = lambda text: None,
) -> Task:  # fmt: skip
    """The task with signals of `length` numbers, over all splits of mean 0 and standard deviation 1.

    Each class is as frequent as the others over all splits together, not within one.

    Raises:
        UserError: the package is not installed, or sizes that cannot be had.
    """
    if min(train, validation, test) < 1:
        raise UserError("the splits", "each need an example at least", "Give a size of 1 or more")
    if length < 2:
        raise UserError(f"--length {length}", "is no signal", "Give 2 or more")
    total = train + validation + test
    if total % NUM_CLASSES:
        raise UserError(
            f"{total} examples",
            f"do not share out evenly over {NUM_CLASSES} classes",
            "Make their sum a multiple of 10",
        )
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError:
        raise UserError(
            "mnist1d", "is not installed", "Run: pip install -c constraints.txt -e '.[lra]'"
        ) from None
    start = time.monotonic()
    arguments = get_dataset_args()
    arguments.num_samples, arguments.final_seq_length = total, length
    arguments.seed, arguments.train_split = seed, train / total
    # The generator seeds the process's global generators: nobody else's draws may hang on that.
    before = random.getstate(), np.random.get_state()
    try:
        made = make_dataset(arguments)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    signals = np.concatenate([made["x"], made["x_test"]]).astype(np.float32)[..., None]
    labels = np.concatenate([made["y"], made["y_test"]]).astype(np.int64)
    splits, at = [], 0
    for size in (train, validation, test):
        rows = slice(at, at + size)
        splits.append(Examples(signals[rows], labels[rows], np.full(size, length, dtype=np.int32)))
        at += size
    taken = time.monotonic() - start
    say(f"mnist1d: {total:,} examples in {taken:.1f} s · {total / taken:,.0f} examples/s")
    return Task("mnist1d", NUM_CLASSES, None, 1, *splits)
