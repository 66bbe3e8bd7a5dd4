"""Dashed contours that grow in many pictures at once and keep their distance: the geometry of Pathfinder.

Each paddle bends from the last one by an angle of density cos²(continuity · angle), among those that lie clear of all
others and from which the contour can go on.

Notable: a grid for each picture says where a paddle may not lie, so that a step costs the same however many there are,
and hundreds of pictures take the step together; those that cannot go on are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .drawing import distance

ANGLES = 16  # ways to go on that are weighed for each paddle
LOOKED_AHEAD = 12  # of them that may be asked whether the contour can go on from there
AHEAD = 2  # paddles that are looked ahead
DISTRACTOR_TRIALS = 4
SEED_TRIALS = 12


@dataclass(frozen=True)
class Style:
    """How pictures of one size are drawn; distances in pixels.

    `margin` is the free space at each end of a paddle and half of what is kept between two contours; `seed_distance`
    lies between the two contours' beginnings, and the first of them twice as far from the border.
    """

    size: int
    padding: float
    paddle_length: float
    thickness: float
    margin: float
    seed_distance: float
    disk_radius: float
    continuity: float
    contrast: float
    contour_length: int
    distractor_length: int
    num_distractors: int

    @property
    def clearance(self) -> float:
        """Least distance between the middle lines of two paddles that do not follow each other."""
        return 2 * self.margin + self.thickness


class Grid:
    """Which cells of each of B pictures are too near a paddle for the middle line of another; `cells` to a pixel."""

    def __init__(self, style: Style, num_pictures: int) -> None:
        self.cells = max(1, round(64 / style.size))
        self.style, self.side = style, style.size * self.cells
        self.blocked = np.zeros((num_pictures, self.side, self.side), dtype=bool)
        edge = max(1, round(style.padding * self.cells))
        self.blocked[:, :edge] = self.blocked[:, -edge:] = True
        self.blocked[:, :, :edge] = self.blocked[:, :, -edge:] = True
        count = int(np.ceil(style.paddle_length * self.cells)) + 1
        self.along = np.linspace(0.0, style.paddle_length, count)
        self.arcs = [arcs(style, depth) for depth in range(1, AHEAD + 1)]

    def keep(self, which: np.ndarray) -> None:
        self.blocked = self.blocked[which]

    def free(self, rows: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Whether all of `points` [N, …, S, 2] lie clear in the pictures `rows` [N]: [N, …]. The border never does."""
        x, y = ((points[..., axis] * self.cells).astype(np.int32).clip(0, self.side - 1) for axis in (0, 1))
        offset = (rows * self.side**2).reshape(-1, *[1] * (x.ndim - 1))
        return ~self.blocked.reshape(-1).take(offset + y * self.side + x).any(axis=-1)

    def block(self, rows: np.ndarray, paddles: np.ndarray) -> None:
        """Close the cells within the clearance of `paddles` [N, 4], one in each of the pictures `rows`."""
        # Half a cell's diagonal on top: a point is looked up by the cell that it lies in.
        reach = self.style.clearance + 0.75 / self.cells
        half = int(np.ceil((reach + self.style.paddle_length / 2) * self.cells)) + 1
        middle = (paddles[:, :2] + paddles[:, 2:]) / 2
        offsets = np.arange(-half, half + 1)
        cell = (
            np.floor(middle * self.cells).astype(np.int64)[:, None] + offsets[:, None]
        )  # [N, 2·half + 1, 2]
        x, y = cell[..., 0], cell[..., 1]
        at_x, at_y = (((axis + 0.5) / self.cells).astype(np.float32) for axis in (x, y))
        near = distance(at_x[:, None, :], at_y[:, :, None], paddles.astype(np.float32)) < reach
        near &= ((x >= 0) & (x < self.side))[:, None, :] & ((y >= 0) & (y < self.side))[:, :, None]
        row, down, right = np.nonzero(near)
        self.blocked[rows[row], y[row, down], x[row, right]] = True


def unit(angle: np.ndarray) -> np.ndarray:
    """The direction of each angle: [..., 2]."""
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def heading(paddles: np.ndarray) -> np.ndarray:
    """The angle [N] in which each paddle [N, 4] points."""
    return np.arctan2(paddles[:, 3] - paddles[:, 1], paddles[:, 2] - paddles[:, 0])


def seed(
    rng: np.random.Generator, grid: Grid, rows: np.ndarray, centres: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A first paddle [N, 4] in each of the pictures `rows`, begun at one of `centres` [N, K, 2]; whether one was."""
    angles = rng.uniform(-np.pi, np.pi, centres.shape[:2])
    points = centres[:, :, None] + grid.along[:, None] * unit(angles)[:, :, None]
    column, found = choose(rng, grid.free(rows, points))
    picked = np.arange(len(rows)), column
    start = centres[picked]
    return np.concatenate([start, start + grid.style.paddle_length * unit(angles[picked])], axis=-1), found


def choose(rng: np.random.Generator, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A column of each row drawn by its weights [N, K], and whether any of the row's weights is above 0."""
    sums = np.cumsum(weights, axis=1)
    drawn = rng.random(len(weights)) * sums[:, -1]
    return np.argmax(sums > drawn[:, None], axis=1), sums[:, -1] > 0


def extend(
    rng: np.random.Generator,
    grid: Grid,
    rows: np.ndarray,
    last: np.ndarray,
    rival: np.ndarray | None,
    left: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The paddle [N, 4] that follows `last` in each of the pictures `rows`, and whether there was a place for it.

    `last` itself is not in the grid yet, nor is `rival`, the other contour's last one; `left` paddles are to follow the
    new one.
    """
    style = grid.style
    turns = (np.arange(ANGLES) + rng.random((len(rows), ANGLES))) / ANGLES - 0.5  # one in each of equal parts
    angle = heading(last)
    angles = angle[:, None] + turns * np.pi / style.continuity
    pivot = last[:, 2:] + style.margin * unit(angle)
    starts = pivot[:, None] + style.margin * unit(angles)
    points = starts[:, :, None] + grid.along[:, None] * unit(angles)[:, :, None]
    free = grid.free(rows, points)
    if rival is not None:
        free &= (distance(points[..., 0], points[..., 1], rival) >= style.clearance).all(axis=-1)
    # In an order that draws by weight, the first from which the contour can go on; else the first.
    order = rng.exponential(size=free.shape) / np.maximum(np.cos(turns * np.pi) ** 2 * free, 1e-12)
    columns = np.argsort(order, axis=1)[:, :LOOKED_AHEAD]
    picked = np.arange(len(rows))[:, None], columns
    if left:
        steps = grid.arcs[min(left, AHEAD) - 1]  # [A, S, 2]
        cos, sin = np.cos(angles[picked])[..., None, None], np.sin(angles[picked])[..., None, None]
        turned = np.stack(
            [cos * steps[..., 0] - sin * steps[..., 1], sin * steps[..., 0] + cos * steps[..., 1]], -1
        )
        ends = starts[picked] + style.paddle_length * unit(angles[picked])
        goes_on = grid.free(rows, ends[:, :, None, None] + turned).any(axis=-1)
        best = columns[np.arange(len(rows)), np.argmax(goes_on & free[picked], axis=1)]
    else:
        best = columns[:, 0]
    chosen = np.arange(len(rows)), best
    new = np.concatenate(
        [starts[chosen], starts[chosen] + style.paddle_length * unit(angles[chosen])], axis=-1
    )
    return new, free[chosen]


def arcs(style: Style, depth: int) -> np.ndarray:
    """Points [3, 2 · depth, 2] on the next paddles of a contour that turns evenly, seen from a paddle's end along x."""
    found = []
    for turn in np.linspace(-0.8, 0.8, 3) * np.pi / 2 / style.continuity:
        at, angle, points = np.zeros(2), 0.0, []
        for _ in range(depth):
            start = at + style.margin * unit(np.array(angle)) + style.margin * unit(np.array(angle + turn))
            angle += turn
            points += [start + share * style.paddle_length * unit(np.array(angle)) for share in (0.25, 1.0)]
            at = points[-1]
        found.append(points)
    return np.array(found)


def grow_pairs(rng: np.random.Generator, style: Style, num_pictures: int) -> tuple[Grid, np.ndarray]:
    """Two whole contours [B, 2, contour_length, 4] in each picture that has room for them, and what they block."""
    grid = Grid(style, num_pictures)
    border = min(2 * style.seed_distance, style.size / 2 - 2)
    rows = np.arange(num_pictures)
    first, good = seed(rng, grid, rows, rng.uniform(border, style.size - border, (num_pictures, 1, 2)))
    around = rng.uniform(-np.pi, np.pi, (num_pictures, SEED_TRIALS))
    second, found = seed(rng, grid, rows, first[:, None, :2] + style.seed_distance * unit(around))
    good &= found & (gap(first, second, grid.along) >= style.clearance)
    paddles = np.zeros((num_pictures, 2, style.contour_length, 4))
    paddles[:, 0, 0], paddles[:, 1, 0] = first, second
    for step in range(1, style.contour_length):
        for which in (0, 1):
            grid.keep(good)
            paddles = paddles[good]
            rows = np.arange(len(paddles))
            last = paddles[:, which, step - 1]
            rival = paddles[:, 1 - which, step - 1 + which]
            paddles[:, which, step], good = extend(
                rng, grid, rows, last, rival, style.contour_length - 1 - step
            )
            grid.block(rows, last)
    grid.keep(good)
    paddles = paddles[good]
    for which in (0, 1):
        grid.block(np.arange(len(paddles)), paddles[:, which, -1])
    return grid, paddles


def gap(first: np.ndarray, second: np.ndarray, along: np.ndarray) -> np.ndarray:
    """The distance [N] between the middle lines of paddles [N, 4], looked up at steps of `along` on the second."""
    points = second[:, None, :2] + along[:, None] * unit(heading(second))[:, None]
    return distance(points[..., 0], points[..., 1], first).min(axis=-1)


def grow_distractors(rng: np.random.Generator, grid: Grid) -> np.ndarray:
    """Distractors [B, num_distractors · distractor_length, 4] beside what the grid holds; NaN: no place for it."""
    style, num_pictures = grid.style, len(grid.blocked)
    paddles = np.full((num_pictures, style.num_distractors, style.distractor_length, 4), np.nan)
    for number in range(style.num_distractors):
        rows = np.arange(num_pictures)
        for _ in range(DISTRACTOR_TRIALS):
            grown, good = grow_one(rng, grid, rows)
            paddles[rows[good], number] = grown[good]
            for step in range(style.distractor_length):
                grid.block(rows[good], grown[good, step])
            rows = rows[~good]
    return paddles.reshape(num_pictures, style.num_distractors * style.distractor_length, 4)


def grow_one(rng: np.random.Generator, grid: Grid, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A distractor [N, distractor_length, 4] in each of the pictures `rows`, and whether it found room; blocks nothing.

    So a distractor does not see itself: a few paddles that turn by at most 90° each hardly meet.
    """
    style = grid.style
    grown = np.zeros((len(rows), style.distractor_length, 4))
    centres = rng.uniform(style.padding, style.size - style.padding, (len(rows), SEED_TRIALS, 2))
    grown[:, 0], good = seed(rng, grid, rows, centres)
    for step in range(1, style.distractor_length):
        before, left = np.flatnonzero(good), style.distractor_length - 1 - step
        grown[before, step], found = extend(rng, grid, rows[before], grown[before, step - 1], None, left)
        good[before] = found
    return grown, good
