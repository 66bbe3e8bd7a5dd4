"""Tables of scores: how a number is shown, which is the best, and how much of the teacher a student recovers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from supra_eval.results import Score

from .merge import Column, Group, Merged, RowKey, columns_of, is_teacher, teacher_of

NONE = "–"
NOT_FINITE = "not finite"
RECOVERY = (
    "Recovery: (student − chance) / (teacher − chance), with a chance of 0 where that of guessing is not known; "
    "teacher / student where lower is better; – where the teacher is not above chance, and in parentheses where it "
    "is above by less than two of its standard errors."
)
_FRACTIONS = {"exact_match", "em", "f1", "mcc", "recall", "precision"}


@dataclass(frozen=True)
class Cell:
    """A value and its standard error, as shown; `best` marks the best one but for the teacher's."""

    text: str
    error: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """One task at one metric and context: a cell for each column, then each student's recovery."""

    task: str
    metric: str
    context: str
    chance: str
    samples: str
    cells: tuple[Cell, ...]
    recovery: tuple[str, ...]
    is_average: bool = False


@dataclass
class Table:
    """The scores of one kind; `has_context`, `has_chance` and `has_samples` say which columns are not empty."""

    caption: str
    columns: list[str]
    recovery_of: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @property
    def has_context(self) -> bool:
        return any(row.context for row in self.rows)

    @property
    def has_chance(self) -> bool:
        return any(row.chance for row in self.rows)

    @property
    def has_samples(self) -> bool:
        return any(row.samples for row in self.rows)


@dataclass(frozen=True)
class Unit:
    """How one metric is written: `value × scale` with `decimals` places, and `missing` where it is not finite.

    `is_cost` says that it measures what a model takes, not how good it is: there is no recovery of a cost.
    """

    suffix: str
    scale: float
    decimals: int
    missing: str = NOT_FINITE
    is_cost: bool = False

    def show(self, value: float) -> str:
        """The number as it stands in a table."""
        return f"{value * self.scale:z,.{self.decimals}f}" if math.isfinite(value) else self.missing


def unit_of(kind: str, metric: str) -> Unit:
    """The rule by which numbers are shown.

    SCROLLS scores come × 100 already: one decimal. Accuracies, exact matches, F1 and what is called a rate or a
    fraction lie between 0 and 1: shown × 100 with one decimal, and `%` behind the metric's name. Losses: four
    decimals. Bytes: in MB. Lengths in tokens: whole, or `none` where no context was short enough. All else
    (perplexities): as it is, with two. A filter behind a comma (`acc,none`) is not looked at.
    """
    name = metric.split(",")[0].lower()
    if kind == "scrolls":
        return Unit("", 1.0, 1)
    if (
        name in _FRACTIONS
        or name.startswith("acc")
        or name.endswith(("_acc", "accuracy", "_rate", "fraction"))
    ):
        return Unit(" %", 100.0, 1)
    if name.startswith(("nll", "bits")) or name.endswith(("loss", "nll")):
        return Unit("", 1.0, 4)
    if name.endswith("_bytes"):
        return Unit(" in MB", 1e-6, 1, is_cost=True)
    if name.endswith("_length"):
        return Unit(" in tokens", 1.0, 0, missing="none")
    return Unit("", 1.0, 2)


def recovery(student: Score, teacher: Score) -> float | None:
    """The share of the teacher's score that the student reaches (see `RECOVERY`); None where it has no meaning."""
    own, its = student.value, teacher.value
    if not (math.isfinite(own) and math.isfinite(its)):
        return None
    if not student.higher_is_better:
        return its / own if own > 0 and its > 0 else None
    floor = student.chance if student.chance is not None else 0.0
    return (own - floor) / (its - floor) if its > floor else None


def show_recovery(student: Score, teacher: Score) -> str:
    """Recovery in percent; in parentheses where the teacher's lead over chance may be noise."""
    share = recovery(student, teacher)
    if share is None:
        return NONE
    lead = teacher.value - (student.chance or 0.0)
    is_noise = teacher.higher_is_better and teacher.stderr is not None and lead < 2 * teacher.stderr
    return f"({share:z.1%})" if is_noise else f"{share:z.1%}"


def make_table(group: Group, merged: Merged, caption: str) -> Table:
    """All scores of one kind, and their averages over the rows that every model has."""
    columns = columns_of(group.rows.values(), merged.labels)
    students = [
        (column, teacher)
        for column in columns
        if column.role == "student" and (teacher := teacher_of(column, merged.runs)) in columns
    ]
    keys = _ordered(list(group.rows))
    measured = {key: {c: m.part for c, m in group.rows[key].items()} for key in keys}
    rows = [_row(key, unit_of(group.kind, key[1]), measured[key], columns, students) for key in keys]
    averages, notes = _averages(group.kind, measured, columns, students)
    if any(not score.higher_is_better for scores in measured.values() for score in scores.values()):
        notes.append("↓ lower is better.")
    if students:
        notes.append(RECOVERY)
    if any(cell.best for row in rows for cell in row.cells):
        notes.append("Bold: the best in its row, the teacher left out; equal numbers are all marked.")
    names = [merged.labels[column] for column in columns]
    return Table(caption, names, [merged.labels[student] for student, _ in students], rows + averages, notes)


def _ordered(keys: list[RowKey]) -> list[RowKey]:
    """Tasks and their metrics in the order of their first score, contexts from short to long."""
    first = {(task, metric): i for i, (task, metric, _) in reversed(list(enumerate(keys)))}
    tasks = {task: i for i, (task, _, _) in reversed(list(enumerate(keys)))}
    return sorted(keys, key=lambda key: (tasks[key[0]], first[key[:2]], key[2] or 0))


def _row(
    key: RowKey, unit: Unit, scores: dict[Column, Score], columns: list[Column],
    students: list[tuple[Column, Column]], is_average: bool = False,
) -> Row:  # fmt: skip
    task, metric, context = key
    higher = all(score.higher_is_better for score in scores.values())
    best = _best(unit, scores, higher)
    cells = []
    for column in columns:
        score = scores.get(column)
        if score is None:
            cells.append(Cell(NONE))
            continue
        known = score.stderr is not None and math.isfinite(score.stderr)
        error = unit.show(score.stderr) if known and score.stderr is not None else ""
        cells.append(Cell(unit.show(score.value), error, column in best))
    shares = [
        show_recovery(scores[student], scores[teacher])
        if student in scores and teacher in scores and not unit.is_cost
        else NONE
        for student, teacher in students
    ]
    chances = {unit.show(score.chance) for score in scores.values() if score.chance is not None}
    counts = sorted({score.num_samples for score in scores.values() if score.num_samples})
    samples = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,}–{counts[-1]:,}" if counts else ""
    return Row(
        task,
        f"{metric}{unit.suffix}{'' if higher else ' ↓'}",
        "" if context is None else f"{context:,}",
        " / ".join(sorted(chances)),
        samples,
        tuple(cells),
        tuple(shares),
        is_average,
    )


def _best(unit: Unit, scores: dict[Column, Score], higher: bool) -> set[Column]:
    """The best models but for the teacher, by the number as shown; none where only one has a number."""
    rivals = {c: s.value for c, s in scores.items() if not is_teacher(c.role) and math.isfinite(s.value)}
    if len(rivals) < 2:
        return set()
    top = unit.show(max(rivals.values()) if higher else min(rivals.values()))
    return {column for column, value in rivals.items() if unit.show(value) == top}


def _averages(
    kind: str, measured: dict[RowKey, dict[Column, Score]], columns: list[Column],
    students: list[tuple[Column, Column]],
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """One row of means per metric and context, or per context alone where no task has two metrics.

    Only scores out of 100 are averaged: a mean of perplexities or costs of different texts means nothing. SCROLLS
    brings a mean of its own, which needs all seven tasks.
    """
    wanted = [
        key
        for key, scores in measured.items()
        if unit_of(kind, key[1]).scale == 100.0 and all(score.higher_is_better for score in scores.values())
    ]
    single = len({(task, context) for task, _, context in wanted}) == len(wanted)
    groups: dict[tuple[str | None, int | None], list[RowKey]] = {}
    for key in wanted:
        groups.setdefault((None if single else key[1], key[2]), []).append(key)
    rows, notes = [], []
    for (metric, context), keys in groups.items():
        complete = [key for key in keys if _has_all(measured[key], columns)]
        if len(keys) < 2:
            continue
        where = f"{f' of {metric}' if metric else ''}{f' at {context:,} tokens' if context else ''}"
        if left := [key[0] for key in keys if key not in complete]:
            notes.append(f"Not in the average{where}, for not every model has them: {', '.join(left)}.")
        if len(complete) < 2:
            continue
        means = {column: _mean([measured[key][column] for key in complete]) for column in columns}
        shown = " / ".join(dict.fromkeys(key[1] for key in complete))
        key = (f"average of {len(complete)} tasks", shown, context)
        rows.append(_row(key, unit_of(kind, complete[0][1]), means, columns, students, is_average=True))
    return rows, notes


def _has_all(scores: dict[Column, Score], columns: list[Column]) -> bool:
    return all(column in scores and math.isfinite(scores[column].value) for column in columns)


def _mean(scores: list[Score]) -> Score:
    """The mean of independent scores, with an error where all have one, and 0 for a chance that is not known."""
    count = len(scores)
    errors = [score.stderr for score in scores if score.stderr is not None]
    chances = [score.chance for score in scores if score.chance is not None]
    return Score(
        "average", scores[0].metric, scores[0].model, sum(score.value for score in scores) / count,
        math.sqrt(sum(error**2 for error in errors)) / count if len(errors) == count else None,
        chance=sum(chances) / count if chances else None,
    )  # fmt: skip
