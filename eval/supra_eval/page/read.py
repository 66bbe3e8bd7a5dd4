"""Reading a run for the page: what `supra eval`, `supra demo` or `supra train` wrote, checked before it is drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from supra.errors import UserError
from supra_eval.results import RESULTS_NAME, Curve, EvalRun, Grid, Score, read_run

from .training import is_training_run, training_run

_MEND = "Give a folder that `supra eval -o`, `supra demo` or `supra train` wrote"


def read_any(path: Path) -> EvalRun:
    """Read the `results.json` of an evaluation or of a demo, the one in a folder, or a training run's folder.

    Raises:
        UserError: it is missing, no JSON, neither's result, or holds something else than numbers where they belong.
    """
    if is_training_run(path) and not (path / RESULTS_NAME).exists():
        return training_run(path)
    file = path / RESULTS_NAME if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(str(file), error.strerror or str(error), _MEND) from error
    except ValueError as error:
        raise UserError(str(file), f"is not JSON ({error})", _MEND) from error
    if not isinstance(raw, dict):
        raise UserError(str(file), "is no evaluation's result", _MEND)
    try:
        run = demo_run(raw, file.parent) if "decode_ms" in raw and "format" not in raw else read_run(file)
        if problem := _problem(run):
            raise UserError(str(file), problem, _MEND)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(str(file), f"is no evaluation's result ({error})", _MEND) from error
    return run


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Each path, or the folders right below it that hold a result or a training run, where it holds none itself."""
    found: list[Path] = []
    for path in paths:
        below = [] if _holds_run(path) else [child for child in sorted(path.glob("*")) if _holds_run(child)]
        found += below or [path]
    return found


def _holds_run(path: Path) -> bool:
    return (path / RESULTS_NAME).exists() or is_training_run(path)


def demo_run(results: dict[str, Any], folder: Path) -> EvalRun:
    """What `supra demo` measured, as an evaluation: `final` is the student, a stage's name what it was after it.

    Raises:
        KeyError, TypeError, ValueError: results of another form.
    """
    names, block_tokens = {"final": "student"}, results["eval_length"]
    num_blocks = results["scored_tokens"] // (block_tokens - 1)  # a block's first token is not scored
    scores = []
    for name, perplexity in results["perplexity"].items():
        error = results["nll_stderr"][name]
        loss = math.log(perplexity)
        for metric, value, scale in (("perplexity", perplexity, perplexity), ("loss", loss, 1.0)):
            scores.append(
                Score("heldout_text", metric, names.get(name, name), value,
                      None if error is None else error * scale,  # d exp(nll) = exp(nll) d nll
                      num_blocks, block_tokens, higher_is_better=False)
            )  # fmt: skip
    curves = [
        Curve(title, model, "context (tokens)", label, [float(x) for x in points], [y / unit for y in points.values()])
        for key, title, label, unit in (
            ("decode_ms", "time per token", "milliseconds per token", 1.0),
            ("context_bytes", "memory of the context", "megabytes", 1e6),
        )
        for model, points in results[key].items()
    ]  # fmt: skip
    recipe = {"name": results["recipe"], "seed": results["seed"], "conversion": results["conversion"]}
    settings = {
        "block_tokens": block_tokens,
        "scored_tokens": results["scored_tokens"],
        "texts": results["heldout"],
    }
    settings |= {name: results[name] for name in ("tokens_trained", "train_s", "peak_bytes")}
    return EvalRun(
        kind="perplexity",
        model=str(folder),
        teacher=results["teacher_name"],
        seed=results["seed"],
        settings=settings,
        runs_on={score.model: results["runs_on"] for score in scores},
        scores=scores,
        curves=curves,
        recipe=yaml.safe_dump(recipe, sort_keys=False),
        seconds=results["wall_s"],
        command=results["command"],
        versions=results["versions"],
    )


def _problem(run: EvalRun) -> str | None:
    """What in a run cannot be shown, or None."""
    for score in run.scores:
        numbers = (score.value, score.stderr, score.chance, score.num_samples, score.context_tokens)
        if not _are_numbers(numbers):
            return f"holds a score of {score.task} that is no number"
    for curve in run.curves:
        if not _are_numbers([*curve.x, *curve.y, *(curve.stderr or [])]):
            return f"holds a curve {curve.name} with something else than numbers"
        if curve.marks is not None and not _are_numbers(curve.marks.values()):
            return f"holds a curve {curve.name} whose marks are no numbers"
        if len({len(curve.x), len(curve.y), len(curve.stderr or curve.x)}) != 1:
            return f"holds a curve {curve.name} whose x, y and errors differ in length"
    for grid in run.grids:
        if not _are_numbers([*grid.x, *grid.y, *(value for row in grid.values for value in row)]):
            return f"holds a grid {grid.name} with something else than numbers"
        if None in (*grid.x, *grid.y):
            return f"holds a grid {grid.name} with a gap in its axes"
        if not (grid.x and grid.y):
            return f"holds a grid {grid.name} without a cell"
        if len(grid.values) != len(grid.y) or any(len(row) != len(grid.x) for row in grid.values):
            return f"holds a grid {grid.name} whose values do not fit its axes"
    texts: list[Any] = [run.kind, run.model, run.command, run.teacher or "", run.recipe or ""]
    texts += [text for score in run.scores for text in (score.task, score.metric, score.model)]
    plots: list[Curve | Grid] = [*run.curves, *run.grids]
    texts += [text for part in plots for text in (part.name, part.model, part.x_label, part.y_label)]
    if not all(isinstance(text, str) for text in texts):
        return "names a model, task, metric, plot, command or recipe by something else than text"
    notes = (run.runs_on, run.failures, run.versions)
    if not all(isinstance(table, dict) for table in (run.settings, *notes)):
        return "holds settings, devices, failures or versions of another form"
    if not all(isinstance(text, str) for table in notes for text in table.values()):
        return "describes a device, failure or version by something else than text"
    if not _are_numbers([run.seconds, run.seed]) or run.seconds is None:
        return "holds a time or a seed that is no number"
    return None


def _are_numbers(values: Any) -> bool:
    return all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    )
