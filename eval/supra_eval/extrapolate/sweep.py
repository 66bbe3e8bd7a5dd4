"""All runs of an extrapolation: shared out over processes, each kept as soon as it is finished, none run twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from supra_eval.grid import Share, claim, run_share

from .methods import Method
from .recipe import GRID, Cell, Extrapolation, task_differences
from .runner import run_cell
from .task import Task


def run(recipe: Extrapolation, out: Path, share: Share, say: Callable[[str], None]) -> list[Cell]:
    """Run what is not finished yet of this process's share; the runs that were done now.

    Raises:
        UserError: the folder holds another grid, or a text cannot be read.
        SupraError: a loss is not finite, or the disk refuses.
    """
    tasks: dict[str, Task] = {name: recipe.open_task(name) for name in recipe.tasks.given()}

    def run_one(cell: Cell, state: Path) -> tuple[dict[str, Any], str]:
        result = run_cell(recipe, cell, tasks[cell.task], state, say, share.device)
        first = next(iter(result["tests"].values()))
        told = ", ".join(f"{length}: {test['value']:.1f}" for length, test in first.items())
        return result, f"{result['metric']} at {told} in {result['seconds']:.0f} s"

    claim(recipe, out, GRID, _differences, write=share.index == 0)
    return run_share(recipe.name, recipe.cells(), out, share, run_one, say)


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What the grid holds already in another way: a task's settings, or the tests of a training."""
    ours, known = _families(mine["methods"]), _families(theirs["methods"])
    return task_differences(mine, theirs) + [
        f"methods that test {name}" for name in ours.keys() & known.keys() if ours[name] != known[name]
    ]


def _families(methods: list[str]) -> dict[Method, set[str]]:
    """Training method -> the methods that test it."""
    found: dict[Method, set[str]] = {}
    for name in methods:
        found.setdefault(Method(name).trained_as, set()).add(name)
    return found
