"""What every kind of evaluation writes: scores, curves and grids in one `results.json`, read again by `supra report`.

Notable: a failed task is recorded beside the others' results, never instead of them.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from supra.errors import SupraError, UserError
from supra.train.run_folder import versions, write_whole

RESULTS_NAME = "results.json"
FORMAT = 1


@dataclass(frozen=True)
class Score:
    """One number: `value` of `metric` on `task` for one model; `chance` is what guessing scores.

    `context_tokens` is the context cut-off it was measured at, where a task is run at several.
    """

    task: str
    metric: str
    model: str
    value: float
    stderr: float | None = None
    num_samples: int = 0
    context_tokens: int | None = None
    higher_is_better: bool = True
    chance: float | None = None


@dataclass(frozen=True)
class Curve:
    """A line of a plot called `name`: one model's y over x, with standard errors where they are known.

    `marks` names places on x where something begins.
    """

    name: str
    model: str
    x_label: str
    y_label: str
    x: list[float]
    y: list[float]
    stderr: list[float] | None = None
    log_x: bool = True
    marks: dict[str, float] | None = None


@dataclass(frozen=True)
class Grid:
    """A heat map called `name` of one model; `values[i][j]` belongs to `y[i]` and `x[j]`, None where not run."""

    name: str
    model: str
    x_label: str
    y_label: str
    x: list[float]
    y: list[float]
    values: list[list[float | None]]


@dataclass
class EvalRun:
    """Everything one `supra eval` measured, and what a reader needs to run it again.

    `kind` is perplexity, tasks, scrolls, length or recall; `runs_on` maps each model to its device, dtype, backend and
    attention; `failures` maps a task to why it has no result.
    """

    kind: str
    model: str
    teacher: str | None = None
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    runs_on: dict[str, str] = field(default_factory=dict)
    scores: list[Score] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    recipe: str | None = None
    seconds: float = 0.0
    command: str = field(default_factory=lambda: shlex.join(["supra", *sys.argv[1:]]))
    versions: dict[str, str] = field(default_factory=versions)
    format: int = FORMAT

    def to_json(self) -> str:
        """All of it; a number that is not finite becomes null, for JSON knows none."""
        return json.dumps(_finite(asdict(self)), indent=2)

    def write(self, folder: Path) -> Path:
        """Write `results.json` into `folder` (made if need be), beside and then renamed.

        Raises:
            SupraError: it cannot be written.
        """
        path = folder / RESULTS_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.to_json() + "\n")
        except OSError as error:
            raise SupraError(
                str(path), f"cannot be written ({error.strerror or error})", "Choose another place with -o"
            ) from error
        return path

    def models(self) -> list[str]:
        """Names of the models that have a result, in the order in which they were measured."""
        parts: Iterable[Any] = (*self.scores, *self.curves, *self.grids)
        return list(dict.fromkeys(part.model for part in parts))


# What may differ between two commands that fill one folder: which tasks and contexts, and what follows from them.
MERGEABLE = {"tasks", "contexts", "notes", "num_shots", "max_new_tokens", "unfinished"}


def require_mergeable(run: EvalRun, folder: Path) -> None:
    """UserError where `folder` holds another model's results, or results that were measured with other settings."""
    if not (folder / RESULTS_NAME).exists():
        return

    def decisive(one: EvalRun) -> dict[str, Any]:
        settings = {name: value for name, value in one.settings.items() if name not in MERGEABLE}
        return {**settings, "model": one.model, "seed": one.seed}

    earlier = read_run(folder)
    mine, theirs = decisive(run), decisive(earlier)
    if run.teacher and earlier.teacher:  # one without a teacher lacks its scores and no more
        mine["teacher"], theirs["teacher"] = run.teacher, earlier.teacher
    refuse_others(folder, mine, theirs)


def refuse_others(folder: Path, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """UserError that names each setting in which the results in `folder` differ from those to be measured."""
    differing = [
        f"{key} {theirs.get(key)} where this is {mine.get(key)}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    if differing:
        raise UserError(
            str(folder),
            f"holds results of another evaluation ({'; '.join(differing)})",
            "Choose another folder with -o, or remove its results.json",
        )


def merged_with_earlier(run: EvalRun, folder: Path) -> EvalRun:
    """`run` with what `folder` already holds of other tasks, contexts and models (see `require_mergeable`)."""
    if not (folder / RESULTS_NAME).exists():
        return run
    earlier = read_run(folder)
    own = {(score.task, score.metric, score.model, score.context_tokens) for score in run.scores}
    kept = [s for s in earlier.scores if (s.task, s.metric, s.model, s.context_tokens) not in own]
    tasks = run.settings.get("tasks", [])
    failures = {key: why for key, why in earlier.failures.items() if not any(task in key for task in tasks)}
    settings = {
        **earlier.settings,
        **run.settings,
        **{
            key: list(dict.fromkeys([*earlier.settings[key], *run.settings[key]]))
            for key in ("tasks", "contexts", "notes")
            if isinstance(earlier.settings.get(key), list) and isinstance(run.settings.get(key), list)
        },
    }
    if "unfinished" not in run.settings:
        settings.pop("unfinished", None)
    return replace(
        run, scores=kept + run.scores, failures={**failures, **run.failures}, settings=settings,
        teacher=run.teacher or earlier.teacher, runs_on={**earlier.runs_on, **run.runs_on},
        seconds=earlier.seconds + run.seconds,
    )  # fmt: skip


def read_run(path: Path) -> EvalRun:
    """Read a `results.json`, or the one in a folder.

    Raises:
        UserError: it is missing, no JSON, or not written by `supra eval`.
    """
    file = path / RESULTS_NAME if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            str(file), error.strerror or str(error), "Give a folder that `supra eval -o` wrote"
        ) from error
    except ValueError as error:
        raise UserError(
            str(file), f"is not JSON ({error})", "Give a folder that `supra eval -o` wrote"
        ) from error
    try:
        if raw["format"] != FORMAT:
            raise UserError(
                str(file),
                f"has format {raw['format']}, this version reads {FORMAT}",
                "Run the evaluation again",
            )
        scores = [Score(**_nan_for_none(score, "value")) for score in raw.pop("scores")]
        curves = [Curve(**curve) for curve in raw.pop("curves")]
        grids = [Grid(**grid) for grid in raw.pop("grids")]
        return EvalRun(scores=scores, curves=curves, grids=grids, **raw)
    except (KeyError, TypeError) as error:
        raise UserError(
            str(file), f"is no evaluation's result ({error})", "Give a folder that `supra eval -o` wrote"
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan_for_none(part: dict[str, Any], key: str) -> dict[str, Any]:
    return part if part[key] is not None else {**part, key: math.nan}
