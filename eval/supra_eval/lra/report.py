"""One table and one plot from the runs of any number of comparisons: mean and standard deviation over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supra.errors import SupraError, UserError
from supra.train.run_folder import write_whole
from supra_eval import grid

FIELDS = ("comparison", "task", "model", "mode", "share", "fraction")  # in which runs of one row agree
MODES = {
    "scratch": "scratch",
    "masked": "masked SPT",
    "scratch_causal": "scratch, causal",
    "causal": "causal SPT",
}


@dataclass(frozen=True)
class Row:
    """Test accuracies (0–1) of one model under one mode, one for each seed whose run is finished."""

    comparison: str
    task: str
    model: str
    mode: str
    share: float
    fraction: float
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds; none with one seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def shown(self) -> str:
        """`75.4 ± 0.8 (3)`: percent, standard deviation over seeds, number of seeds."""
        return grid.shown([100 * accuracy for accuracy in self.accuracies])


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of a comparison's folder, as the runner wrote them.

    Raises:
        UserError: there are none, or a file is no run's result.
    """
    return grid.read_cells(
        folder, "supra lra run", lambda cell: {**cell, "test_accuracy": float(cell["test_accuracy"])}
    )


def rows_of(cells: Iterable[dict[str, Any]]) -> list[Row]:
    """One row for each model, mode, share and fraction, in the order in which they first occur."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for cell in cells:
        key = tuple(cell[name] for name in FIELDS)
        found.setdefault(key, []).append(cell["test_accuracy"])
    order = list(MODES)
    rows = [
        Row(**dict(zip(FIELDS, key, strict=True)), accuracies=tuple(values)) for key, values in found.items()
    ]
    return sorted(rows, key=lambda r: (r.comparison, -r.fraction, r.model, r.share, order.index(r.mode)))


def markdown(rows: list[Row], baselines: dict[str, dict[str, float]]) -> str:
    """A table of models by modes for each comparison, with the trivial baselines of its task under it."""
    parts = []
    for comparison in dict.fromkeys(row.comparison for row in rows):
        mine = [row for row in rows if row.comparison == comparison]
        modes = [mode for mode in MODES if any(row.mode == mode for row in mine)]
        lines = [
            f"| {comparison}: test accuracy, mean ± sd (seeds) | "
            + " | ".join(MODES[m] for m in modes)
            + " |",
            "|---|" + "---:|" * len(modes),
        ]
        for label, group in _by_model(mine).items():
            shown = [group[mode].shown() if mode in group else "–" for mode in modes]
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
        for name, accuracy in baselines.get(comparison, {}).items():
            lines.append(f"| {name} | {100 * accuracy:.1f} |" + " |" * (len(modes) - 1))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _by_model(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """`{model, with what varies beside it: {mode: row}}`; a scratch run stands in the line of every share."""
    fractions = {row.fraction for row in rows}
    shares = sorted({row.share for row in rows if row.share})
    lines: dict[str, dict[str, Row]] = {}
    for fraction in sorted(fractions, reverse=True):
        for model in dict.fromkeys(row.model for row in rows):
            for share in shares or [0.0]:
                group = {
                    row.mode: row
                    for row in rows
                    if row.model == model and row.fraction == fraction and row.share in (0.0, share)
                }
                label = model + (f", {100 * fraction:g} % of the data" if len(fractions) > 1 else "")
                label += f", {100 * share:g} % of the epochs SPT" if len(shares) > 1 else ""
                if group:
                    lines[label] = group
    return lines


def write(folders: list[Path], out: Path) -> str:
    """Read every run in `folders`; write `table.md`, `results.json` and `accuracy.png` into `out`; return the table.

    Raises:
        UserError: a folder without runs, or two folders of one comparison.
        SupraError: `out` cannot be written.
    """
    cells: list[dict[str, Any]] = []
    baselines: dict[str, dict[str, float]] = {}
    for folder in folders:
        found = read_cells(folder)
        names = {cell["comparison"] for cell in found}
        if twice := names & baselines.keys():
            raise UserError(
                str(folder), f"holds {', '.join(sorted(twice))}, as another folder does", "Give one of them"
            )
        baselines |= dict.fromkeys(names, found[0]["baselines"])
        cells += found
    rows = rows_of(cells)
    table = markdown(rows, baselines)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "table.md", table + "\n")
        write_whole(
            out / "results.json", json.dumps({"cells": cells, "baselines": baselines}, indent=1) + "\n"
        )
        plot(rows, baselines, out / "accuracy.png")
    except OSError as error:
        raise SupraError(
            str(out), f"cannot be written ({error.strerror or error})", "Choose another place with -o"
        ) from error
    return table


def plot(rows: list[Row], baselines: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of accuracy by mode, a group for each model and a panel for each comparison, with every seed as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.comparison for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False, sharey=False)
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    for name, axes in zip(names, panels[0], strict=True):
        lines = _by_model([row for row in rows if row.comparison == name])
        width = 0.8 / len(modes)
        for place, mode in enumerate(modes):
            at = [
                i + (place - (len(modes) - 1) / 2) * width for i, g in enumerate(lines.values()) if mode in g
            ]
            group = [g[mode] for g in lines.values() if mode in g]
            axes.bar(
                at, [100 * r.mean for r in group], width, label=MODES[mode], color=f"C{place}", alpha=0.75,
                yerr=[100 * (r.sd or 0) for r in group], capsize=3,
            )  # fmt: skip
            for x, row in zip(at, group, strict=True):
                axes.plot([x] * len(row.accuracies), [100 * a for a in row.accuracies], "k.", markersize=3)
        for label, accuracy in baselines.get(name, {}).items():
            axes.axhline(100 * accuracy, color="grey", linestyle=":", linewidth=1)
            axes.annotate(
                label, (0.01, 100 * accuracy), xycoords=("axes fraction", "data"), fontsize=7, va="bottom"
            )
        axes.set_xticks(range(len(lines)), lines, fontsize=8, rotation=15)
        axes.set_title(name)
        axes.set_ylabel("test accuracy (%)")
    panels[0][0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    plt.close(figure)
    partial.replace(path)
