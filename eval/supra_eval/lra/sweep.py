"""All runs of a comparison: shared out over processes, each kept as soon as it is finished, none run twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from supra_eval.grid import Share, claim, require_same_grid, run_share
from supra_eval.lra.recipe import Cell, Comparison
from supra_eval.lra.runner import run_cell
from supra_eval.lra.task import Task

_GRID = {"models", "modes", "shares", "fractions", "seeds"}  # may grow from one command to the next


def require_same(comparison: Comparison, out: Path) -> None:
    """UserError where the folder holds another comparison: before its task is generated into it."""
    require_same_grid(comparison, out, _GRID, _differences)


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

    def run_one(cell: Cell, state: Path) -> tuple[dict[str, Any], str]:
        result = run_cell(comparison, cell, task, state, say, share.device)
        told = f"test {100 * result['test_accuracy']:.1f} % in {result['seconds']:.0f} s"
        return result | {"baselines": baselines}, told

    claim(comparison, out, _GRID, _differences, write=share.index == 0)
    return run_share(comparison.name, comparison.cells(), out, share, run_one, say)


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The models that the grid holds already in another way."""
    known = {model["name"]: model for model in theirs["models"]}
    return [f"models.{m['name']}" for m in mine["models"] if m != known.get(m["name"], m)]
