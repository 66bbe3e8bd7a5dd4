"""Every curve and grid of an evaluation as a picture (PNG) and as its numbers (CSV)."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from supra.checks import require_matplotlib
from supra.errors import SupraError
from supra.train.run_folder import write_whole
from supra_eval.page.figures import draw_curves, draw_grids
from supra_eval.results import Curve, EvalRun, Grid


def write_plots(run: EvalRun, folder: Path) -> list[Path]:
    """Write a PNG and a CSV for the curves of each name and for each grid into `folder`; return their paths.

    Raises:
        SupraError: matplotlib is not installed, or the files cannot be written.
    """
    require_matplotlib()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(curve.name for curve in run.curves):
            curves = [curve for curve in run.curves if curve.name == name]
            key = (name, curves[0].x_label, curves[0].y_label)
            figure = draw_curves(run.kind, key, [(curve.model, curve.model, curve) for curve in curves])
            written += _write(folder / _slug(name), *curve_rows(curves), figure.png)
        for grid in run.grids:
            (figure,) = draw_grids(run.kind, (grid.name, grid.x_label, grid.y_label), [(grid.model, grid)])
            stem = f"{_slug(grid.name)}-{_slug(grid.model)}-grid"
            written += _write(folder / stem, *grid_rows(grid), figure.png)
    except OSError as error:
        raise SupraError(
            str(folder), f"cannot be written ({error.strerror or error})", "Choose another place with -o"
        ) from error
    return written


def curve_rows(curves: Sequence[Curve]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows (model, x, y, stderr) of curves with the same name; an unknown number is empty."""
    header = ["model", curves[0].x_label, curves[0].y_label, "stderr"]
    rows = []
    for curve in curves:
        errors = curve.stderr or [math.nan] * len(curve.x)
        rows += [
            [curve.model, _number(x), _number(y), _number(error)]
            for x, y, error in zip(curve.x, curve.y, errors, strict=True)
        ]
    return header, rows


def grid_rows(grid: Grid) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of a grid, one row for each y; a cell that was not run is empty."""
    header = [f"{grid.y_label} / {grid.x_label}", *(f"{x:g}" for x in grid.x)]
    return header, [[f"{y:g}", *map(_number, row)] for y, row in zip(grid.y, grid.values, strict=True)]


def _number(value: float | None) -> float | str:
    return "" if value is None or not math.isfinite(value) else value


def _write(stem: Path, header: list[str], rows: list[list[Any]], png: bytes) -> list[Path]:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    table, picture = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.png")
    write_whole(table, text.getvalue())
    write_whole(picture, png)
    return [table, picture]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
