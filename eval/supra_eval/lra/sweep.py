"""All runs of a comparison: shared out over processes, each kept as soon as it is finished, none run twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from supra.config.fields import PROSE
from supra.errors import SupraError, UserError
from supra.train.run_folder import versions, write_whole
from supra_eval.lra.recipe import Cell, Comparison
from supra_eval.lra.report import CELLS_NAME
from supra_eval.lra.runner import run_cell
from supra_eval.lra.task import Task

RECIPE_NAME = "recipe.yaml"
_GRID = {"models", "modes", "shares", "fractions", "seeds"}  # may grow from one command to the next


@dataclass(frozen=True)
class Share:
    """Which of the runs are this process's: every `count`-th from `index` on."""

    index: int = 0
    count: int = 1


def run(
    comparison: Comparison,
    task: Task,
    baselines: dict[str, float],
    out: Path,
    share: Share,
    say: Callable[[str], None],
) -> list[Cell]:
    """Run what is not finished yet of this process's share; the runs that were done now.

    Raises:
        UserError: the folder holds another comparison.
        SupraError: a loss is not finite, or the disk refuses.
    """
    cells = out / CELLS_NAME
    try:
        cells.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SupraError(
            str(out), f"cannot be made ({error.strerror})", "Choose another place with -o"
        ) from None
    _claim(comparison, out, write=share.index == 0)
    grid = comparison.cells()
    mine = grid[share.index :: share.count]
    left = [cell for cell in mine if not (cells / f"{cell.key}.json").exists()]
    say(
        f"{comparison.name}: {len(grid)} runs, {len(mine)} of this process, {len(mine) - len(left)} finished before"
    )
    for number, cell in enumerate(left, start=1):
        state = cells / f"{cell.key}.state"
        result = run_cell(comparison, cell, task, state, say)
        result |= {"baselines": baselines, "versions": versions()}
        _keep(result, cells / f"{cell.key}.json")
        state.unlink(missing_ok=True)
        say(
            f"{number}/{len(left)} {cell.key}: test {100 * result['test_accuracy']:.1f} % in {result['seconds']:.0f} s"
        )
    return left


def _keep(result: dict[str, Any], path: Path) -> None:
    try:
        write_whole(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise SupraError(
            str(path), f"cannot be written ({error.strerror})", "Free some disk and run again"
        ) from None


def _claim(comparison: Comparison, out: Path, *, write: bool) -> None:
    """Write the recipe into a new folder; compare it with the one there, in all that decides a run's result."""
    path = out / RECIPE_NAME
    mine = comparison.model_dump(mode="json", exclude=set(PROSE))
    if path.exists():
        theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
        differing = [key for key in mine.keys() - _GRID if mine[key] != theirs.get(key)]
        known = {model["name"]: model for model in theirs["models"]}
        differing += [f"models.{m['name']}" for m in mine["models"] if m != known.get(m["name"], m)]
        if differing:
            raise UserError(
                str(out), f"holds a comparison that differs in {', '.join(sorted(differing))}",
                "Choose another folder with -o, or remove this one",
            )  # fmt: skip
    if write:
        write_whole(
            path, yaml.safe_dump(comparison.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        )
