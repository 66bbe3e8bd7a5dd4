"""Every curve and grid of an evaluation as a picture (PNG) and as its numbers (CSV)."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from supra.errors import SupraError
from supra.train.run_folder import write_whole
from supra_eval.results import Curve, EvalRun, Grid

# One colour a model in every picture: the teacher grey, the student orange.
COLOURS = {
    "teacher": "#8a8f98", "teacher_rope": "#3b4252", "student": "#c2410c", "window_only": "#2563eb",
    "linear_only": "#0d9488", "untrained": "#a855f7",
}  # fmt: skip


def require_matplotlib() -> Any:
    """pyplot, drawing to files.

    Raises:
        SupraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SupraError(
            "plots", "matplotlib is not installed", "Run: pip install 'supra-lm[plots]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_plots(run: EvalRun, folder: Path) -> list[Path]:
    """Write a PNG and a CSV for the curves of each name and for each grid into `folder`; return their paths.

    Raises:
        SupraError: matplotlib is not installed, or the files cannot be written.
    """
    pyplot = require_matplotlib()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(curve.name for curve in run.curves):
            curves = [curve for curve in run.curves if curve.name == name]
            written.append(_write_csv(folder / f"{_slug(name)}.csv", *curve_rows(curves)))
            written.append(_save(_draw_curves(pyplot, curves), folder / f"{_slug(name)}.png", pyplot))
        for grid in run.grids:
            stem = f"{_slug(grid.name)}-{_slug(grid.model)}-grid"
            written.append(_write_csv(folder / f"{stem}.csv", *grid_rows(grid)))
            written.append(_save(_draw_grid(pyplot, grid), folder / f"{stem}.png", pyplot))
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


def _write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_whole(path, text.getvalue())
    return path


def _draw_curves(pyplot: Any, curves: Sequence[Curve]) -> Any:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained", dpi=150)
    for curve in curves:
        y = [math.nan if value is None else value for value in curve.y]
        [line] = axes.plot(curve.x, y, "o-", markersize=3, color=COLOURS.get(curve.model), label=curve.model)
        if curve.stderr is not None:
            errors = [0.0 if not _known(error) else error for error in curve.stderr]
            lower = [value - error for value, error in zip(y, errors, strict=True)]
            upper = [value + error for value, error in zip(y, errors, strict=True)]
            axes.fill_between(curve.x, lower, upper, color=line.get_color(), alpha=0.2, linewidth=0)
    if curves[0].log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in curves for x in curve.x})
        axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks], rotation=45, fontsize=7)
        axes.minorticks_off()
    if curves[0].y_label.startswith(("MB", "ms")):
        axes.set_ylim(bottom=0)  # a cost is compared with nothing at all
    axes.set_title(curves[0].name, loc="left", fontsize=11)
    axes.set_xlabel(curves[0].x_label)
    axes.set_ylabel(_wrapped(curves[0].y_label))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def _draw_grid(pyplot: Any, grid: Grid) -> Any:
    width, height = 1.8 + 0.7 * len(grid.x), 1.6 + 0.45 * len(grid.y)
    figure, axes = pyplot.subplots(figsize=(max(4.0, width), height), layout="constrained", dpi=150)
    values = [[math.nan if value is None else value for value in row] for row in grid.values]
    axes.imshow(values, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            shown, colour = ("–", "black") if math.isnan(value) else (f"{value:.2f}", "white")
            colour = "black" if value > 0.6 else colour  # on viridis' bright end
            axes.text(j, i, shown, color=colour, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(grid.x)), [f"{x:,.0f}" for x in grid.x], rotation=45)
    axes.set_yticks(range(len(grid.y)), [f"{y:g}" for y in grid.y])
    axes.set_title(f"{grid.name}: {grid.model}", loc="left", fontsize=11)
    axes.set_xlabel(grid.x_label)
    axes.set_ylabel(grid.y_label)
    return figure


def _save(figure: Any, path: Path, pyplot: Any) -> Path:
    """Save a figure beside and rename it, so that no half picture is left."""
    beside = path.with_name(f".{path.name}.partial")
    figure.savefig(beside, format="png")
    pyplot.close(figure)
    beside.replace(path)
    return path


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, 50))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
