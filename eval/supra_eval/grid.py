"""The runs of a grid: shared out over processes, each kept as soon as it is finished, none run twice."""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import yaml
from accelerate import PartialState
from torch import nn

from supra.config.fields import PROSE, Documented
from supra.errors import SupraError, UserError
from supra.loading import resolve_device
from supra.train.run_folder import versions, write_whole

CPU = torch.device("cpu")
CELLS_NAME = "cells"
RECIPE_NAME = "recipe.yaml"
SAVE_SECONDS = 60.0  # between two states of an unfinished run on the disk


class Keyed(Protocol):
    """One run of a grid."""

    @property
    def key(self) -> str:
        """A file name that says all of it."""
        ...


Cell = TypeVar("Cell", bound=Keyed)
Result = dict[str, Any]
Differences = Callable[[dict[str, Any], dict[str, Any]], list[str]]


@dataclass(frozen=True)
class Share:
    """Which of the runs are this process's, every `count`-th from `index` on, and where it computes them."""

    index: int = 0
    count: int = 1
    device: torch.device = CPU


def open_processes(device: str) -> PartialState:
    """Accelerate's view of the processes that share a grid; `cuda`, or `auto` where there is one, is a GPU each.

    Raises:
        UserError: a device that this machine does not have.
    """
    where = resolve_device(device)
    if where not in ("cpu", "cuda"):
        mend = f"Use --device cuda with CUDA_VISIBLE_DEVICES={where.partition(':')[2]}"
        raise UserError(f"device {device!r}", "processes take the GPUs in their order", mend)
    # Without `cpu` Accelerate would look for GPUs, and each process on CPUs would stay alone.
    return PartialState(cpu=where == "cpu")


def share_of(state: PartialState) -> Share:
    """This process's share of a grid."""
    return Share(state.process_index, state.num_processes, state.device)


def run_share(
    name: str,
    grid: Sequence[Cell],
    out: Path,
    share: Share,
    run_one: Callable[[Cell, Path], tuple[Result, str]],
    say: Callable[[str], None],
) -> list[Cell]:
    """Run what is not finished yet of this process's share; the runs that were done now.

    `run_one(cell, state)` gives a run's result and how it went in a few words, and keeps its progress in the file
    `state` until then.

    Raises:
        SupraError: what a run raises, or the disk refuses.
    """
    cells = out / CELLS_NAME
    mine = grid[share.index :: share.count]
    left = [cell for cell in mine if not (cells / f"{cell.key}.json").exists()]
    say(f"{name}: {len(grid)} runs, {len(mine)} of this process, {len(mine) - len(left)} finished before")
    for number, cell in enumerate(left, start=1):
        state = cells / f"{cell.key}.state"
        result, told = run_one(cell, state)
        result |= {"device": str(share.device), "versions": versions()}
        _keep(result, cells / f"{cell.key}.json")
        state.unlink(missing_ok=True)
        say(f"{number}/{len(left)} {cell.key}: {told}")
    return list(left)


def claim(recipe: Documented, out: Path, grows: set[str], differences: Differences, *, write: bool) -> None:
    """Make the folder of the runs and write the recipe into it, or compare with the one that lies there.

    The file keeps all that the fields `grows` ever held: runs of it may lie there.

    Raises:
        UserError: the folder holds another grid.
        SupraError: it cannot be made.
    """
    theirs = require_same_grid(recipe, out, grows, differences)
    try:
        (out / CELLS_NAME).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SupraError(
            str(out), f"cannot be made ({error.strerror})", "Choose another place with -o"
        ) from None
    mine = recipe.model_dump(mode="json")
    if theirs is not None:
        mine |= {key: _united(mine[key], theirs[key]) for key in grows}
    if write:
        write_whole(out / RECIPE_NAME, yaml.safe_dump(mine, sort_keys=False, allow_unicode=True))


def require_same_grid(
    recipe: Documented, out: Path, grows: set[str], differences: Differences
) -> dict[str, Any] | None:
    """The recipe that lies in a folder of runs, None where there is none; nothing is written.

    The fields `grows` span the grid and may change from one command to the next; `differences(mine, theirs)` names what
    of them cannot share a folder.

    Raises:
        UserError: the folder holds another grid.
    """
    path, mine = out / RECIPE_NAME, recipe.model_dump(mode="json")
    if not path.exists():
        return None
    theirs: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    # A recipe of another kind differs in these already, and `differences` would not find its fields in it.
    differing = fixed_differences(mine, theirs, grows) or differences(mine, theirs)
    if differing:
        raise UserError(
            str(out), f"holds a comparison that differs in {', '.join(sorted(differing))}",
            "Choose another folder with -o, or remove this one",
        )  # fmt: skip
    return theirs


def fixed_differences(mine: dict[str, Any], theirs: dict[str, Any], grows: set[str]) -> list[str]:
    """The fields in which two recipes differ, but for prose and for those `grows` that span the grid."""
    return [key for key in mine.keys() - PROSE - grows if mine[key] != theirs.get(key)]


def num_finished(grid: Sequence[Keyed], out: Path) -> int:
    """How many of the runs are finished, by whichever process."""
    return sum((out / CELLS_NAME / f"{cell.key}.json").exists() for cell in grid)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here for the same folder: what it reads and writes then belongs together."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # dropped with the file, however the process ends
        yield


def read_cells(folder: Path, command: str, check: Callable[[Result], Result]) -> list[Result]:
    """The finished runs of a folder that `command` wrote, each through `check`.

    Raises:
        UserError: there are none, or a file is no run's result (`check` failed).
    """
    files = sorted((folder / CELLS_NAME).glob("*.json"))
    if not files:
        raise UserError(str(folder), "holds no finished run", f"Give a folder that `{command} -o` wrote")
    cells = []
    for file in files:
        try:
            cells.append(check(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                str(file), f"is no run's result ({error!r})",
                f"Give a folder that `{command} -o` wrote; if it is one, remove the file and run again",
            ) from None  # fmt: skip
    return cells


def save_state(state: dict[str, Any], path: Path) -> None:
    """Write a run's progress, whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
    """What `save_state` wrote; None where a run has not begun."""
    kept: dict[str, Any] | None = (
        torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    )
    return kept


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next(module.parameters()).device


def shown(values: Sequence[float]) -> str:
    """`75.4 ± 0.8 (3)`: mean, sample standard deviation over seeds (none with one seed), number of seeds."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread} ({len(values)})"


def _united(mine: Any, theirs: Any) -> Any:
    """A field of a grid, a list or what is given by name, with what it has in either recipe."""
    if isinstance(mine, dict):
        return {name: theirs.get(name) if value is None else value for name, value in mine.items()}
    return [*mine, *(item for item in theirs if item not in mine)]


def _keep(result: Result, path: Path) -> None:
    try:
        write_whole(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise SupraError(
            str(path), f"cannot be written ({error.strerror})", "Free some disk and run again"
        ) from None
