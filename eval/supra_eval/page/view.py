"""What the page says, in the order in which it says it, before it is HTML or Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from supra_eval.results import EvalRun

from .figures import Figure, draw_curves, draw_grids, slug_of
from .merge import Column, Group, Merged, columns_of, merge, short_names
from .tables import Table, make_table
from .training import KIND

TITLES = {
    KIND: "Training",
    "perplexity": "Perplexity",
    "tasks": "Tasks",
    "scrolls": "SCROLLS: long documents",
    "length": "Length",
    "recall": "Recall",
}


@dataclass(frozen=True)
class Failure:
    """A task that has no result in a run; `elsewhere` names a run that has one for the same model."""

    run: str
    kind: str
    task: str
    reason: str
    elsewhere: str | None


@dataclass
class Section:
    """One kind of evaluation: its scores, and its curves and grids as figures."""

    anchor: str
    title: str
    table: Table | None
    notes: list[str]
    figures: list[Figure]


@dataclass(frozen=True)
class ModelLine:
    """The names of all columns that were made from the weights in one folder."""

    labels: str
    folder: str


@dataclass(frozen=True)
class RunLine:
    """What is needed to repeat one run; `facts` are names and values."""

    label: str
    command: str
    facts: tuple[tuple[str, str], ...]


@dataclass
class Page:
    """All of it; `recipes` are the names of the runs that share a recipe, and its YAML."""

    title: str
    summary: str
    failures: list[Failure]
    sections: list[Section]
    models: list[ModelLine]
    runs: list[RunLine]
    recipes: list[tuple[str, str]] = field(default_factory=list)


def make_page(runs: Sequence[tuple[Path, EvalRun]], title: str | None) -> Page:
    """Merge the runs and draw their figures.

    Raises:
        SupraError: there are curves or grids, and matplotlib is not installed.
    """
    merged = merge(runs)
    kinds = [kind for kind in TITLES if kind in merged.groups]
    kinds += [kind for kind in merged.groups if kind not in TITLES]
    sections = [_section(merged.groups[kind], merged) for kind in kinds]
    names = short_names([run.model for run in merged.runs]).values()
    recipes: dict[str, list[str]] = {}
    for run, label in zip(merged.runs, merged.run_labels, strict=True):
        if run.recipe:
            recipes.setdefault(run.recipe, []).append(label)
    only_training = all(run.kind == KIND for run in merged.runs)
    what = "training" if only_training else "evaluation"
    count = f"{len(runs)} {what} runs" if len(runs) > 1 else f"one {what} run"
    spent = "training" if only_training else "measuring"
    seconds = sum(run.seconds for run in merged.runs)
    return Page(
        title or f"{what.capitalize()} of {', '.join(names)}",
        f"{len(merged.labels)} models, {count}, {duration(seconds)} of {spent}.",
        _failures(merged),
        [section for section in sections if section.table or section.figures or section.notes],
        _model_lines(merged),
        [_run_line(run, label) for run, label in zip(merged.runs, merged.run_labels, strict=True)],
        [(", ".join(dict.fromkeys(names)), text) for text, names in recipes.items()],
    )


def duration(seconds: float) -> str:
    """Seconds in the unit that a reader would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _section(group: Group, merged: Merged) -> Section:
    title = TITLES.get(group.kind, group.kind)
    table = make_table(group, merged, f"{title}: value ± standard error") if group.rows else None
    notes = [*(table.notes if table else ()), *_disagreements(group, merged), *_replaced(group, merged)]
    figures = []
    for key, lines in group.plots.items():
        models = [(c.role, merged.labels[c], lines[c].part) for c in columns_of([lines], merged.labels)]
        figures.append(draw_curves(group.kind, key, models))
    for key, maps in group.maps.items():
        grids = [(merged.labels[c], maps[c].part) for c in columns_of([maps], merged.labels)]
        figures += draw_grids(group.kind, key, grids)
    return Section(slug_of("kind", group.kind), title, table, notes, figures)


def _disagreements(group: Group, merged: Merged) -> list[str]:
    """A line for each setting that runs of this kind did not share: their numbers may not be comparable."""
    lines = []
    for name, values in group.settings.items():
        parts = [
            f"{value} in {', '.join(merged.run_labels[i] for i in runs)}" for value, runs in values.items()
        ]
        lines.append(f"Not measured alike: {name} is {'; '.join(parts)}.")
    return lines


def _replaced(group: Group, merged: Merged) -> list[str]:
    """A line for each pair of runs that measured the same: what was measured twice, and which one is shown."""
    twice: dict[tuple[int, int], dict[Column, list[str]]] = {}
    for column, what, old, new in group.replaced:
        twice.setdefault((old, new), {}).setdefault(column, []).append(what)
    return [
        f"Measured twice, shown as in {merged.run_labels[new]} (the later argument), not as in "
        f"{merged.run_labels[old]}: "
        + "; ".join(f"{merged.labels[column]}: {', '.join(names)}" for column, names in models.items())
        + "."
        for (old, new), models in twice.items()
    ]


def _failures(merged: Merged) -> list[Failure]:
    found = []
    for run, label in zip(merged.runs, merged.run_labels, strict=True):
        for task, reason in run.failures.items():
            others = [
                name
                for other, name in zip(merged.runs, merged.run_labels, strict=True)
                if other is not run and (other.kind, other.model) == (run.kind, run.model)
                and any(score.task == task for score in other.scores)
            ]  # fmt: skip
            found.append(Failure(label, run.kind, task, reason, others[-1] if others else None))
    return found


def _model_lines(merged: Merged) -> list[ModelLine]:
    folders: dict[str, list[str]] = {}
    for column, label in merged.labels.items():
        folders.setdefault(column.folder, []).append(label)
    return [ModelLine(", ".join(labels), folder) for folder, labels in folders.items()]


def _runs_on(run: EvalRun) -> str:
    """What each model of a run ran on: once, where it was the same for all."""
    places: dict[str, list[str]] = {}
    for model, place in run.runs_on.items():
        places.setdefault(place, []).append(model)
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{', '.join(models)}: {place}" for place, models in places.items()) or "not recorded"


def _run_line(run: EvalRun, label: str) -> RunLine:
    settings = [f"{name} = {json.dumps(value, default=str)}" for name, value in run.settings.items()]
    facts = [
        ("kind", run.kind),
        ("model", run.model),
        ("teacher", run.teacher or "none"),
        ("ran on", _runs_on(run)),
        ("seed", str(run.seed)),
        ("time", duration(run.seconds)),
        ("settings", " · ".join(settings) or "none"),
        ("versions", " · ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]
    return RunLine(label, run.command, tuple(facts))
