"""A run's scores as a table for a terminal: one row a task and metric, one column a model."""

from __future__ import annotations

import math
from typing import Any

from supra_eval.results import EvalRun, Score


def render(run: EvalRun) -> Any:
    """The table; its last column says what the student kept of its teacher."""
    from rich.table import Table

    models = list(dict.fromkeys(score.model for score in run.scores))
    with_recovery = {"teacher", "student"} <= set(models)
    table = Table("task", "metric")
    for name in (*models, *(["student/teacher"] if with_recovery else [])):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, int | None, str], dict[str, Score]] = {}
    for score in run.scores:
        rows.setdefault((score.task, score.context_tokens, score.metric), {})[score.model] = score
    for (task, context, metric), scores in rows.items():
        where = task if context is None else f"{task} @ {context:,}"
        cells = [_cell(scores.get(name)) for name in models]
        if with_recovery:
            cells.append(_recovery_cell(scores))
        table.add_row(where, metric, *cells)
    for task, reason in run.failures.items():
        table.add_row(task, "[red]failed[/red]", reason)
    return table


def recovery(student: Score, teacher: Score) -> float | None:
    """Share of the teacher's score above chance that the student kept; teacher/student where lower is better.

    (s − c) / (t − c) with c the chance level, 0 where none is known; None where the teacher is no better than chance.
    """
    if not teacher.higher_is_better:
        return teacher.value / student.value if student.value else None
    chance = teacher.chance or 0.0
    return (student.value - chance) / (teacher.value - chance) if teacher.value > chance else None


def _recovery_cell(scores: dict[str, Score]) -> str:
    if not {"teacher", "student"} <= scores.keys():
        return "–"
    student, teacher = scores["student"], scores["teacher"]
    if not teacher.higher_is_better:
        return f"x {student.value / teacher.value:.3f}" if teacher.value else "–"
    kept = recovery(student, teacher)
    return "–" if kept is None else f"{kept:.1%} kept"


def _cell(score: Score | None) -> str:
    if score is None or not math.isfinite(score.value):
        return "–"
    digits = 2 if abs(score.value) >= 10 else 4
    error = "" if score.stderr is None else f" ± {score.stderr:.{digits}f}"
    return f"{score.value:.{digits}f}{error}"


def describe_settings(run: EvalRun) -> str:
    """What was asked for, in one line; what was left unset is left out."""
    set_ones = {key: value for key, value in run.settings.items() if value not in (None, False, [], {}, "")}
    return " · ".join(
        f"{key} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for key, value in set_ones.items()
    )
