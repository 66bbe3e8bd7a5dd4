"""From the finished runs of any number of folders to one page of tables, with the survey's figures for reference."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from supra.errors import SupraError, UserError
from supra.train.run_folder import write_whole
from supra_eval import grid

from .methods import Method, Mixer, left_out
from .plot import draw
from .recipe import GRID, Extrapolation, task_differences

UNITS = {"accuracy": "accuracy (%)", "exact match": "exact match (%)", "perplexity": "perplexity a byte"}
FIELDS = ("name", "task", "metric", "train_tokens", "mixer", "method")  # in which runs of one row agree
KEY = ("name", "task", "mixer", "method", "seed")  # of a run, among those of all folders
REFERENCE = """\
For reference, as the survey arXiv 2312.17044 gives them: perplexity on WikiText-103, trained at 512 tokens.

| method | 512 | 1,012 |
|---|---:|---:|
| sinusoidal | 20.05 | 43.54 |
| RoPE | 20.07 | 21.37 |
| ALiBi | 19.73 | 18.73 |
| T5 bias | 19.65 | 18.79 |

Theirs are large models on words: not comparable in digits with the tables above; what carries over is the order."""


@dataclass(frozen=True)
class Row:
    """The tests of one mixer and method on one task, one for each seed: `tests[length]` as `score.measure` gives."""

    name: str
    task: str
    metric: str
    train_tokens: int
    mixer: str
    method: str
    tests: tuple[dict[str, Any], ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({int(length) for tests in self.tests for length in tests})

    def values(self, length: int) -> list[float]:
        """The task's metric, of the seeds that were tested so far."""
        return [tests[str(length)]["value"] for tests in self.tests if str(length) in tests]

    def curve(self) -> list[tuple[int, float]]:
        """Position -> mean loss over seeds: by bucket at the longest length; of an end alone, by length."""
        whole = [tests for tests in self.tests if str(self.lengths[-1]) in tests]
        buckets = [tests[str(self.lengths[-1])]["by_position"] for tests in whole]
        curves = [[(int(end), loss) for end, loss, *_ in each] for each in buckets]
        if len(buckets[0]) == 1:
            curves = [
                [(n, tests[str(n)]["loss"]) for n in self.lengths if str(n) in tests] for tests in whole
            ]
        return [
            (points[0][0], statistics.fmean(loss for _, loss in points))
            for points in zip(*curves, strict=True)
        ]


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of a folder, as the runner wrote them.

    Raises:
        UserError: there are none, or a file is no run's result.
    """

    def check(cell: dict[str, Any]) -> dict[str, Any]:
        for tests in cell["tests"].values():
            for test in tests.values():
                float(test["value"]), float(test["loss"]), list(test["by_position"])
        Mixer(cell["mixer"]), Method(cell["method"])
        return {**cell, **{name: cell[name] for name in (*FIELDS, "seed", "baselines")}}

    return grid.read_cells(folder, "supra extrapolate RECIPE", check)


def rows_of(cells: list[dict[str, Any]]) -> list[Row]:
    """One row for each name, task, mixer and method, mixers and methods in their own order."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        for method, tests in cell["tests"].items():
            key = tuple({**cell, "method": method}[name] for name in FIELDS)
            found.setdefault(key, []).append(tests)
    rows = [Row(**dict(zip(FIELDS, key, strict=True)), tests=tuple(tests)) for key, tests in found.items()]
    mixers, methods = list(Mixer), list(Method)
    order = {task: place for place, task in enumerate(dict.fromkeys(cell["task"] for cell in cells))}
    return sorted(
        rows,
        key=lambda r: (r.name, order[r.task], mixers.index(Mixer(r.mixer)), methods.index(Method(r.method))),
    )


def markdown(rows: list[Row], baselines: dict[tuple[str, str], dict[str, dict[str, float]]]) -> str:
    """A table of each task, and what trivial answers score on the same sequences under it."""
    parts = []
    for name, task in dict.fromkeys((row.name, row.task) for row in rows):
        mine = [row for row in rows if (row.name, row.task) == (name, task)]
        lengths = sorted({length for row in mine for length in row.lengths})
        trained = mine[0].train_tokens
        lines = [
            f"| {name}, {task}: {UNITS[mine[0].metric]}, mean ± sd (seeds), trained at up to {trained} | "
            + " | ".join(f"{length:,} ({length / trained:g}×)" for length in lengths)
            + " |",
            "|---|" + "---:|" * len(lengths),
        ]
        for row in mine:
            cells = [grid.shown(values) if (values := row.values(n)) else "–" for n in lengths]
            lines.append(f"| {row.mixer} · {row.method} | " + " | ".join(cells) + " |")
        trivial = baselines[name, task]
        for label in next(iter(trivial.values())):
            shown = [f"{trivial[str(n)][label]:.1f}" if str(n) in trivial else "–" for n in lengths]
            lines.append(f"| {label} | " + " | ".join(shown) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write(folders: list[Path], out: Path) -> str:
    """Read every run in `folders`; write `table.md`, `results.json` and `loss_by_position.png`; return the page.

    Raises:
        UserError: a folder without runs, two folders with the same run, or of one name and different recipes.
        SupraError: `out` cannot be written, or matplotlib is not installed.
    """
    cells, omitted = gather(folders)
    rows = rows_of(cells)
    baselines: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for cell in cells:
        baselines.setdefault((cell["name"], cell["task"]), {}).update(cell["baselines"])
    parts = [markdown(rows, baselines)]
    if omitted:
        parts.append("Left out:\n\n" + "\n".join(f"- {pair}: {why}" for pair, why in omitted.items()))
    page = "\n\n".join([*parts, REFERENCE])
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "table.md", page + "\n")
        write_whole(out / "results.json", json.dumps({"cells": cells, "left_out": omitted}, indent=1) + "\n")
        draw(rows, out / "loss_by_position.png")
    except OSError as error:
        raise SupraError(
            str(out), f"cannot be written ({error.strerror or error})", "Choose another place with -o"
        ) from error
    return page


def gather(folders: list[Path]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every run in `folders`, and what their recipes left out with the reason.

    Raises:
        UserError: a folder without runs, two folders with the same run, or of one name and different recipes.
    """
    cells: list[dict[str, Any]] = []
    keys: dict[tuple[Any, ...], Path] = {}
    omitted: dict[str, str] = {}
    recipes: dict[str, tuple[Path, dict[str, Any]]] = {}
    for folder in folders:
        recipe = _recipe(folder)
        if recipe:
            _require_same(folder, recipe, *recipes.setdefault(recipe["name"], (folder, recipe)))
            omitted |= left_out(map(Mixer, recipe["mixers"]), map(Method, recipe["methods"]))
        for cell in read_cells(folder):
            key = tuple(cell[field] for field in KEY)
            if key in keys:
                raise UserError(str(folder), f"holds {_told(cell)}, as {keys[key]} does", "Give one of them")
            keys[key] = folder
            cells.append(cell)
    return cells, omitted


def require_mergeable(recipe: Extrapolation, out: Path, folders: list[Path]) -> None:
    """What `write` would refuse of `folders` beside the runs of `recipe` in `out`, before these begin.

    Raises:
        UserError: see `gather`.
    """
    cells, _ = gather(folders)
    mine = recipe.model_dump(mode="json")
    for folder in folders:
        theirs = _recipe(folder)
        if theirs.get("name") == recipe.name:
            _require_same(folder, theirs, out, mine)
    own = {(recipe.name, cell.task, cell.mixer, cell.method, cell.seed) for cell in recipe.cells()}
    for cell in cells:
        if tuple(cell[field] for field in KEY) in own:
            raise UserError(
                "--merge", f"holds {_told(cell)}, which {out} is to hold too", "Leave out one of them"
            )


def _told(cell: dict[str, Any]) -> str:
    return f"{cell['task']}, {cell['mixer']}, {cell['method']}, seed {cell['seed']}"


def _recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a folder of runs, as data; nothing where there is none, or one of another kind."""
    path = folder / grid.RECIPE_NAME
    recipe = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return recipe if {"name", "tasks", "mixers", "methods"} <= recipe.keys() else {}


def _require_same(folder: Path, recipe: dict[str, Any], other: Path, known: dict[str, Any]) -> None:
    """UserError where two folders of one name, whose seeds would be averaged, differ in more than the grid."""
    differing = grid.fixed_differences(recipe, known, GRID) + task_differences(recipe, known)
    if differing:
        raise UserError(
            f"{folder} and {other}", f"are both of {recipe['name']} and differ in {', '.join(sorted(differing))}",
            "Give one of them, or run one under another name (--set name=…)",
        )  # fmt: skip
