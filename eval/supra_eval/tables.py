"""A run's scores as a table for a terminal: one row a task and metric, one column a model."""

from __future__ import annotations

from typing import Any

from supra_eval.page.tables import NONE, Unit, show_recovery, unit_of
from supra_eval.results import EvalRun, Score


def render(run: EvalRun) -> Any:
    """The table; its last column is what the student recovers of its teacher (`page_tables.RECOVERY`)."""
    from rich.table import Table

    models = list(dict.fromkeys(score.model for score in run.scores))
    with_recovery = {"teacher", "student"} <= set(models)
    table = Table("task", "metric")
    for name in (*models, *(["recovery"] if with_recovery else [])):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, int | None, str], dict[str, Score]] = {}
    for score in run.scores:
        rows.setdefault((score.task, score.context_tokens, score.metric), {})[score.model] = score
    for (task, context, metric), scores in rows.items():
        where = task if context is None else f"{task} @ {context:,}"
        unit = unit_of(run.kind, metric)
        cells = [_cell(scores.get(name), unit) for name in models]
        if with_recovery:
            cells.append(NONE if unit.is_cost else _recovery_cell(scores))
        table.add_row(where, f"{metric}{unit.suffix}", *cells)
    for task, reason in run.failures.items():
        table.add_row(task, "[red]failed[/red]", reason)
    return table


def _recovery_cell(scores: dict[str, Score]) -> str:
    both = {"teacher", "student"} <= scores.keys()
    return show_recovery(scores["student"], scores["teacher"]) if both else NONE


def _cell(score: Score | None, unit: Unit) -> str:
    if score is None:
        return NONE
    error = "" if score.stderr is None else f" ± {unit.show(score.stderr)}"
    return f"{unit.show(score.value)}{error}"


def describe_settings(run: EvalRun) -> str:
    """What was asked for, in one line; what was left unset is left out."""
    set_ones = {key: value for key, value in run.settings.items() if value not in (None, False, [], {}, "")}
    return " · ".join(
        f"{key} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for key, value in set_ones.items()
    )
