"""The results of several runs side by side: which number belongs to which model, and which of two counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar

from supra_eval.contenders import ALL
from supra_eval.results import RESULTS_NAME, Curve, EvalRun, Grid, Score

Part = TypeVar("Part", Score, Curve, Grid)


@dataclass(frozen=True)
class Column:
    """One model of the page: what it is to its run (`role`), and the folder of its weights."""

    role: str
    folder: str


@dataclass(frozen=True)
class Measured(Generic[Part]):
    """A result and the index of the run that it was taken from."""

    part: Part
    run: int


# Rows of tables, plots of curves, heat maps: each with one result for each model that has one.
RowKey = tuple[str, str, int | None]  # task, metric, context_tokens
PlotKey = tuple[str, str, str]  # name, x_label, y_label


@dataclass
class Group:
    """All results of one kind of evaluation; `settings` holds what its runs did not agree on."""

    kind: str
    rows: dict[RowKey, dict[Column, Measured[Score]]] = field(default_factory=dict)
    plots: dict[PlotKey, dict[Column, Measured[Curve]]] = field(default_factory=dict)
    maps: dict[PlotKey, dict[Column, Measured[Grid]]] = field(default_factory=dict)
    replaced: list[tuple[Column, str, int, int]] = field(default_factory=list)
    settings: dict[str, dict[str, list[int]]] = field(default_factory=dict)


@dataclass
class Merged:
    """Every run's results by kind; `labels` names the models in the order of the page's columns."""

    runs: list[EvalRun]
    run_labels: list[str]
    labels: dict[Column, str]
    groups: dict[str, Group]


def merge(runs: Sequence[tuple[Path, EvalRun]]) -> Merged:
    """Bring runs together; of two results for the same thing of the same model, the later argument's stays."""
    groups: dict[str, Group] = {}
    for index, (_, run) in enumerate(runs):
        group = groups.setdefault(run.kind, Group(run.kind))
        for score in run.scores:
            what = " ".join(filter(None, (score.task, score.metric, _at(score.context_tokens))))
            key = (score.task, score.metric, score.context_tokens)
            _put(group, group.rows.setdefault(key, {}), column_of(run, score.model), what, score, index)
        for curve in run.curves:
            key_ = (curve.name, curve.x_label, curve.y_label)
            place = group.plots.setdefault(key_, {})
            _put(group, place, column_of(run, curve.model), f"curve {curve.name}", curve, index)
        for grid in run.grids:
            key_ = (grid.name, grid.x_label, grid.y_label)
            place_ = group.maps.setdefault(key_, {})
            _put(group, place_, column_of(run, grid.model), f"grid {grid.name}", grid, index)
    for group in groups.values():
        group.settings = _disagreements(
            [(i, run.settings) for i, (_, run) in enumerate(runs) if run.kind == group.kind]
        )
    labels = _labels([run for _, run in runs])
    return Merged([run for _, run in runs], _run_labels([path for path, _ in runs]), labels, groups)


def column_of(run: EvalRun, role: str) -> Column:
    """The model that `run` calls `role`: a teacher is known by the teacher's folder, all others by the student's."""
    return Column(role, str(PurePath((run.teacher or "") if is_teacher(role) else run.model)))


def is_teacher(role: str) -> bool:
    """Whether a model is the teacher, as it is or changed (`teacher_yarn`: with scaled positions)."""
    return role == "teacher" or role.startswith("teacher_")


def teacher_of(student: Column, runs: Sequence[EvalRun]) -> Column | None:
    """The teacher that the last run of this student named, or None."""
    for run in reversed(runs):
        if run.teacher is not None and column_of(run, "student") == student:
            return column_of(run, "teacher")
    return None


def columns_of(parts: Iterable[dict[Column, Any]], labels: dict[Column, str]) -> list[Column]:
    """The models that any of `parts` has a result of, in the page's order."""
    found = {column for part in parts for column in part}
    return [column for column in labels if column in found]


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """The shortest ending of each path that no other has, without a last part `model` (what training writes)."""
    parts = {folder: PurePath(folder).parts for folder in dict.fromkeys(folders)}
    cut = {f: p[:-1] if len(p) > 1 and p[-1] == "model" and p[-2] != "/" else p for f, p in parts.items()}
    if len(set(cut.values())) == len(parts):
        parts = cut
    names = {}
    for folder, own in parts.items():
        others = [other for path, other in parts.items() if path != folder]
        depth = 1
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        names[folder] = str(PurePath(*own[-depth:])) if own else folder
    return names


def _at(context_tokens: int | None) -> str:
    return "" if context_tokens is None else f"at {context_tokens:,}"


def _put(group: Group, place: dict[Column, Any], column: Column, what: str, part: Any, run: int) -> None:
    if column in place:
        group.replaced.append((column, what, place[column].run, run))
    place[column] = Measured(part, run)


def _labels(runs: list[EvalRun]) -> dict[Column, str]:
    """Names of all models: their role, and the folder's name where two folders have that role."""
    columns = list(dict.fromkeys(column_of(run, model) for run in runs for model in run.models()))
    roles = dict.fromkeys(["teacher", *(c.role for c in columns if is_teacher(c.role)), *ALL])
    order = list(roles | dict.fromkeys(column.role for column in columns))
    columns.sort(key=lambda column: order.index(column.role))  # stable: runs stay in the arguments' order
    students = short_names([str(PurePath(run.model)) for run in runs])
    teachers = short_names([column.folder for column in columns if is_teacher(column.role)])
    labels = {}
    for column in columns:
        if is_teacher(column.role):
            name = teachers[column.folder]
            labels[column] = column.role if len(teachers) == 1 else f"{column.role} {name}"
        elif len(students) == 1:
            labels[column] = column.role
        else:
            name = students[column.folder]
            alone = column.role == "student" and name not in labels.values()
            labels[column] = name if alone else f"{name} {column.role}"
    return labels


def _run_labels(paths: list[Path]) -> list[str]:
    folders = [str(path.parent if path.name == RESULTS_NAME else path) for path in paths]
    names = short_names(folders)
    return [names[folder] for folder in folders]


def _disagreements(settings: list[tuple[int, dict[str, Any]]]) -> dict[str, dict[str, list[int]]]:
    """For each setting that two runs have at different values: which runs have which value."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in dict.fromkeys(key for _, own in settings for key in own):
        values: dict[str, list[int]] = {}
        for run, own in settings:
            if name in own:
                values.setdefault(str(own[name]), []).append(run)
        if len(values) > 1:
            found[name] = values
    return found
