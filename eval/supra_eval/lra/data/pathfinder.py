"""Pathfinder (arXiv 1805.08315, arXiv 2011.04006): do the two disks lie on the same dashed contour? Drawn anew.

Two contours of paddles grow in turn from seeds a fixed distance apart; shorter contours distract. One disk marks where
a contour begins, the other where it or its rival ends: both answers come from the same drawings.

Notable: the n first pictures of a seed and split are the same whatever the number asked for. Unlike the original, all
paddles have one contrast, places are not rounded to pixels, and a contour looks two paddles ahead before it runs into a
wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from supra.errors import SupraError, UserError

from ..task import Examples, Task
from .contours import Style, grow_distractors, grow_pairs
from .drawing import draw

NUM_TOKENS = 257  # padding, then 256 shades of grey
PICTURES_AT_ONCE = 256
MAX_BARREN = 20  # so many times over without one, there will be none


# What the benchmark's authors say of theirs; 16 is ours, for quick runs, with contours as long as fit.
STYLES = {
    style.size: style
    for style in (
        Style(16, 0.5, 1.5, 0.5, 0.6, 3.5, 1.2, 1.0, 1.5, 6, 2, 2),
        Style(32, 1, 2, 0.5, 1, 7, 1.5, 1.0, 1.5, 14, 4, 5),
        Style(64, 1, 5, 1, 1, 12, 2.5, 1.8, 0.8, 14, 4, 5),
        Style(128, 1, 5, 1.5, 2, 20, 3, 1.8, 0.9, 14, 4, 8),
        Style(256, 22, 5, 2, 3, 27, 5, 1.8, 1.0, 14, 4, 7),
    )
}
NAMES = {128: "pathx", 256: "pathx256"}


@dataclass
class Drawings:
    """The geometry of B pictures, in pixels from the top left corner, x before y.

    `paddles` [B, P, 4] are x and y of both ends, NaN where a distractor found no place; the two contours come first,
    one after the other, then distractors; `disks` [B, 2, 2]; `labels` [B] is 1 where both disks lie on one contour.
    """

    paddles: np.ndarray
    disks: np.ndarray
    labels: np.ndarray


def draw_geometry(rng: np.random.Generator, style: Style, num_pictures: int) -> Drawings:
    """What is left of `num_pictures` attempts: those pictures whose two contours found room."""
    grid, pairs = grow_pairs(rng, style, num_pictures)
    distractors = grow_distractors(rng, grid)
    rows = np.arange(len(pairs))
    begin, labels = rng.integers(0, 2, (2, len(pairs)))
    end = np.where(labels == 1, begin, 1 - begin)
    disks = np.stack([pairs[rows, begin, 0, :2], pairs[rows, end, -1, 2:]], axis=1)
    contours = pairs.reshape(len(pairs), 2 * style.contour_length, 4)
    return Drawings(np.concatenate([contours, distractors], axis=1), disks, labels)


def pictures(
    style: Style, num_pictures: int, *, seed: tuple[int, ...], say: Callable[[str], None] = lambda text: None
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [N, size, size] (uint8) and labels [N], the same for a seed however many are asked for.

    Raises:
        SupraError: no contour finds room in a picture of this style.
    """
    shades = np.zeros((num_pictures, style.size, style.size), dtype=np.uint8)
    labels = np.zeros(num_pictures, dtype=np.int64)
    filled, block, start, last = 0, 0, time.monotonic(), 0.0
    while filled < num_pictures:
        drawings = draw_geometry(np.random.default_rng((*seed, block)), style, PICTURES_AT_ONCE)
        block += 1
        if block == MAX_BARREN and not filled and not len(drawings.labels):
            raise SupraError(
                f"contours of {style.contour_length} paddles",
                f"found no room in {block * PICTURES_AT_ONCE:,} pictures of {style.size} pixels",
                "Give a smaller --contour-length",
            )
        count = min(len(drawings.labels), num_pictures - filled)
        new = slice(filled, filled + count)
        shades[new] = draw(drawings.paddles[:count], drawings.disks[:count], style)
        labels[new] = drawings.labels[:count]
        filled += count
        if (now := time.monotonic() - start) - last > 5:
            last = now
            say(f"pathfinder: {filled:,} of {num_pictures:,} · {filled / now:,.0f} pictures/s")
    return shades, labels


def make(
    *, seed: int, train: int = 160_000, validation: int = 20_000, test: int = 20_000, size: int = 32,
    contour_length: int | None = None, num_distractors: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Task:  # fmt: skip
    """The task in pictures of `size` pixels, as tokens: `1 + shade`, row by row.

    Raises:
        UserError: sizes that cannot be had.
        SupraError: contours so long that none finds room.
    """
    if size not in STYLES:
        known = ", ".join(map(str, STYLES))
        raise UserError(f"--size {size}", "is a size without a style", f"Choose from {known}")
    if min(train, validation, test) < 1:
        raise UserError("the splits", "each need an example at least", "Give a size of 1 or more")
    style = STYLES[size]
    if contour_length is not None:
        if contour_length < 2:
            raise UserError(f"--contour-length {contour_length}", "is no contour", "Give 2 or more")
        style = replace(style, contour_length=contour_length, distractor_length=max(1, contour_length // 3))
    if num_distractors is not None:
        if num_distractors < 0:
            raise UserError(f"--distractors {num_distractors}", "is below 0", "Give 0 or more")
        style = replace(style, num_distractors=num_distractors)
    splits, start = [], time.monotonic()
    for number, count in enumerate((train, validation, test)):
        shades, labels = pictures(style, count, seed=(seed, number), say=say)
        tokens = shades.reshape(count, -1).astype(np.int16) + 1
        splits.append(Examples(tokens, labels, np.full(count, size * size, dtype=np.int32)))
    taken, total = time.monotonic() - start, train + validation + test
    say(
        f"pathfinder: {total:,} pictures of {size} × {size} in {taken:.1f} s · {total / taken:,.0f} pictures/s"
    )
    return Task(NAMES.get(size, "pathfinder"), 2, NUM_TOKENS, 1, *splits)
