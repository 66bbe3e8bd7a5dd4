"""Paddles and disks as pictures with soft edges, many pictures at once.

Notable: a pixel's shade is the share of its width that lies within the paddle, taken from the distance of its middle to
the paddle's middle line; for an endless line along an axis that is exactly the share covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .pathfinder import Style


def distance(x: np.ndarray, y: np.ndarray, paddles: np.ndarray) -> np.ndarray:
    """Distance of points to the middle line of a paddle: `x`, `y` [N, …] and `paddles` [N, 4] (x, y of both ends)."""
    shape = (-1,) + (1,) * (np.broadcast(x, y).ndim - 1)
    x0, y0, x1, y1 = (paddles[:, part].reshape(shape) for part in range(4))
    dx, dy = x1 - x0, y1 - y0
    share = (((x - x0) * dx + (y - y0) * dy) / (dx**2 + dy**2)).clip(0.0, 1.0)
    return np.sqrt((x - x0 - share * dx) ** 2 + (y - y0 - share * dy) ** 2)


def draw(paddles: np.ndarray, disks: np.ndarray, style: Style) -> np.ndarray:
    """Pictures [B, size, size] (uint8) of `paddles` [B, P, 4] (NaN: none) and `disks` [B, 2, 2], 255 the brightest."""
    canvas = np.zeros((len(paddles), style.size, style.size), dtype=np.float32)
    for number in range(paddles.shape[1]):
        rows = np.flatnonzero(~np.isnan(paddles[:, number, 0]))
        stroke(canvas, rows, paddles[rows, number], style.thickness, style.contrast)
    for number in range(disks.shape[1]):
        # A disk is a thick paddle of no length; a hair keeps its direction defined.
        ends = np.concatenate([disks[:, number], disks[:, number] + [1e-6, 0.0]], axis=-1)
        stroke(canvas, np.arange(len(canvas)), ends, 2 * style.disk_radius, 1.0)
    return np.rint(canvas * 255).astype(np.uint8)


def stroke(
    canvas: np.ndarray, rows: np.ndarray, paddles: np.ndarray, thickness: float, contrast: float
) -> None:
    """Brighten `canvas` [B, S, S] under one paddle [N, 4] in each of the pictures `rows`; nothing gets darker."""
    if not len(rows):
        return
    size = canvas.shape[1]
    lengths = np.abs(paddles[:, 2:] - paddles[:, :2]).max()
    half = int(np.ceil(lengths / 2 + thickness / 2 + 0.5))
    middle = np.floor((paddles[:, :2] + paddles[:, 2:]) / 2).astype(np.int64)
    pixel = middle[:, None] + np.arange(-half, half + 1)[:, None]
    x, y = pixel[..., 0], pixel[..., 1]
    away = distance(x[:, None, :] + 0.5, y[:, :, None] + 0.5, paddles)
    covered = np.minimum(0.5, away + thickness / 2) - np.maximum(-0.5, away - thickness / 2)
    shade = (covered * contrast).clip(0.0, 1.0)
    inside = ((x >= 0) & (x < size))[:, None, :] & ((y >= 0) & (y < size))[:, :, None]
    row, at_y, at_x = np.nonzero(inside & (shade > 0))
    place = rows[row], y[row, at_y], x[row, at_x]  # each pixel of a picture once: plain assignment is safe
    canvas[place] = np.maximum(canvas[place], shade[row, at_y, at_x])
