"""A training run for the page, finished, going on or killed: its curves over the tokens trained, from metrics.jsonl."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from supra.errors import UserError
from supra.train.tracking import read_metrics
from supra_eval.results import Curve, EvalRun, Score

KIND = "training"
_MOST_POINTS = 160  # of a curve: each is the mean of neighbouring steps
_LAST_STEPS = 10  # whose mean is the loss in the table
_X_LABEL = "tokens trained"
_PLOTS = {  # by the name in metrics.jsonl: the plot's name and its y
    "loss": ("loss", "loss"),
    "lr": ("learning rate", "learning rate"),
    "grad_norm": ("gradient norm", "norm before clipping"),
    "tokens_per_second": ("speed", "tokens per second"),
}
_MEND = "Give the folder that `supra train -o` made, once it has trained a step"


def is_training_run(path: Path) -> bool:
    """Whether `path` is the folder of a training run."""
    return (path / "run.json").is_file() and (path / "recipe.yaml").is_file()


def training_run(folder: Path) -> EvalRun:
    """The run in `folder` up to the last whole line of its metrics; its model is called `student`.

    Raises:
        UserError: it has not trained a step, or its files are damaged.
    """
    try:
        rows = read_metrics(folder)
        text = (folder / "recipe.yaml").read_text(encoding="utf-8")
        recipe, facts = yaml.safe_load(text), json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not rows:
            raise UserError(str(folder), "has not trained a step yet", _MEND)
        return _run(folder, rows, recipe, text, facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(str(folder), f"is no whole training run ({error})", _MEND) from error


def _run(
    folder: Path, rows: list[dict[str, Any]], recipe: dict[str, Any], text: str, facts: dict[str, Any]
) -> EvalRun:
    seconds = sum(row["tokens"] / row["tokens_per_second"] for row in rows if row["tokens_per_second"])
    rows = _over_layers(rows)
    tokens = 0
    for row in rows:
        tokens += row["tokens"]
        row["x"] = tokens
    by_stage = {
        name: [row for row in rows if row["stage"] == name]
        for name in dict.fromkeys(row["stage"] for row in rows)
    }
    marks = {name: float(own[0]["x"] - own[0]["tokens"]) for name, own in by_stage.items()}
    curves = [_curve(rows, key, *labels, marks) for key, labels in _PLOTS.items()]
    if len(by_stage) > 1:  # losses of two stages are different things
        curves += [_curve(own, "loss", f"loss of {name}", "loss", None) for name, own in by_stage.items()]
    scores = []
    for name, own in by_stage.items():
        losses = [row["loss"] for row in own[-_LAST_STEPS:]]
        scores.append(
            Score(name, "loss", "student", fmean(losses), num_samples=len(losses), higher_is_better=False)
        )
    planned = {stage["name"]: stage["total_tokens"] // stage["tokens_per_step"] for stage in recipe["stages"]}
    done = {name: by_stage[name][-1]["stage_step"] if name in by_stage else 0 for name in planned}
    settings = {
        "recipe": recipe["name"],
        "steps": ", ".join(f"{name} {done[name]} of {steps}" for name, steps in planned.items()),
        "finished": (folder / "model").is_dir(),
        "tokens_trained": tokens,
        "loss": f"mean of a stage's last {_LAST_STEPS} steps",
    }
    command = [
        "supra",
        "train",
        str(folder / "recipe.yaml"),
        "--model",
        facts["model_dir"],
        "-o",
        str(folder),
    ]
    return EvalRun(
        kind=KIND,
        model=str(folder / "model"),
        seed=recipe["seed"],
        settings=settings | ({"skipped_steps": facts["skipped_steps"]} if "skipped_steps" in facts else {}),
        scores=scores,
        curves=curves,
        recipe=text,
        seconds=seconds,
        command=shlex.join(command),
        versions=facts["versions"],
    )


def _over_layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a step: a layerwise stage has one for each layer that is done, and their mean is what is shown."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    return [own[0] | {key: fmean(row[key] for row in own) for key in _PLOTS} for own in by_step.values()]


def _curve(
    rows: list[dict[str, Any]], key: str, name: str, y_label: str, marks: dict[str, float] | None
) -> Curve:
    bundle = math.ceil(len(rows) / _MOST_POINTS)
    groups = [rows[first : first + bundle] for first in range(0, len(rows), bundle)]
    x = [float(group[-1]["x"]) for group in groups]
    y = [fmean(row[key] for row in group) for group in groups]
    return Curve(name, "student", _X_LABEL, y_label, x, y, log_x=False, marks=marks)
