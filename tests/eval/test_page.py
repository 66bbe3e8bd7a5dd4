"""The merged page: which number is shown where, and its Markdown."""

from __future__ import annotations

import math
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supra_eval.page import write_page
from supra_eval.page.merge import Column, merge, short_names
from supra_eval.page.tables import NONE, make_table, recovery, show_recovery, unit_of
from supra_eval.results import EvalRun, Score

VERSIONS = {"supra": "0.1"}


def run_of(scores: list[Score], model: str = "runs/mine/model", kind: str = "tasks", **more: Any) -> EvalRun:
    more = {"teacher": "llama", "command": "supra eval x", "versions": VERSIONS, **more}
    return EvalRun(kind, model, scores=scores, **more)


def acc(task: str, model: str, value: float, stderr: float | None = 0.02, **more: Any) -> Score:
    more = {"num_samples": 100, "chance": 0.25, **more}
    return Score(task, "acc", model, value, stderr, **more)


def table_of(*runs: EvalRun, kind: str = "tasks") -> Any:
    merged = merge([(Path(f"evals/{i}"), run) for i, run in enumerate(runs)])
    return make_table(merged.groups[kind], merged, "caption")


GOLDEN = """\
# Evaluation of mine

3 models, one evaluation run, 90 s of measuring.

## Failed

- **piqa** (tasks, first): no data at \\<cache\\>

## Tasks

| task | metric | teacher | student | window_only | recovery: student | chance | samples |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| arc | acc % | 50.0 ± 2.0 | **40.0 ± 2.0** | 30.0 ± 2.0 | 60.0% | 25.0 | 100 |
| boolq | acc % | 70.0 ± 2.0 | 60.0 ± 2.0 | **61.0 ± 2.0** | 50.0% | 50.0 | 100 |
| lambada | perplexity ↓ | 10.00 | 12.50 | – | 80.0% |  | 100 |
| *average of 2 tasks* | acc % | 60.0 ± 1.4 | **50.0 ± 1.4** | 45.5 ± 1.4 | 55.6% | 37.5 |  |

- ↓ lower is better.
- Recovery: (student − chance) / (teacher − chance), with a chance of 0 where that of guessing is not known; \
teacher / student where lower is better; – where the teacher is not above chance, and in parentheses where it is \
above by less than two of its standard errors.
- Bold: the best in its row, the teacher left out; equal numbers are all marked.

## How it was measured

| models | weights |
| --- | --- |
| teacher | llama |
| student, window_only | runs/mine/model |

### first: tasks

```sh
supra eval x
```

- model: runs/mine/model
- teacher: llama
- ran on: cpu · float32
- seed: 3
- time: 90 s
- settings: limit = 100
- versions: supra 0.1

<details>
<summary>Recipe of first</summary>

```yaml
name: demo
```

</details>
"""


def test_the_page_as_a_whole(tmp_path: Path) -> None:
    scores = [
        *(acc("arc", m, v) for m, v in (("teacher", 0.5), ("student", 0.4), ("window_only", 0.3))),
        *(
            acc("boolq", m, v, chance=0.5)
            for m, v in (("teacher", 0.7), ("student", 0.6), ("window_only", 0.61))
        ),
        *(
            Score("lambada", "perplexity", m, v, num_samples=100, higher_is_better=False)
            for m, v in (("teacher", 10.0), ("student", 12.5))
        ),
    ]
    run = run_of(
        scores, failures={"piqa": "no data at <cache>"}, recipe="name: demo\n", seconds=90, seed=3,
        settings={"limit": 100}, runs_on={"teacher": "cpu · float32", "student": "cpu · float32"},
    )  # fmt: skip
    paths = write_page([(Path("evals/first"), run)], tmp_path / "new" / "page")
    assert paths.markdown.read_text(encoding="utf-8") == GOLDEN
    assert sorted(path.name for path in (tmp_path / "new" / "page").iterdir()) == [
        "report.html",
        "report.md",
    ]


def test_recovery_by_hand() -> None:
    assert recovery(acc("t", "student", 0.40), acc("t", "teacher", 0.50)) == pytest.approx(0.15 / 0.25)
    pair = [Score("t", "acc", model, value) for model, value in (("student", 0.45), ("teacher", 0.5))]
    assert recovery(*pair) == pytest.approx(0.9)
    pair = [Score("t", "ppl", m, v, higher_is_better=False) for m, v in (("student", 12.5), ("teacher", 10))]
    assert recovery(*pair) == pytest.approx(0.8)
    assert recovery(acc("t", "student", 0.4), acc("t", "teacher", 0.25)) is None
    assert recovery(acc("t", "student", math.nan), acc("t", "teacher", 0.5)) is None
    assert show_recovery(acc("t", "student", 0.2499999), acc("t", "teacher", 0.5)) == "0.0%"  # not -0.0%
    # 0.03 above chance is less than two standard errors of 0.02, 0.05 is more.
    assert show_recovery(acc("t", "student", 0.28), acc("t", "teacher", 0.28)) == "(100.0%)"
    assert show_recovery(acc("t", "student", 0.30), acc("t", "teacher", 0.30)) == "100.0%"


@pytest.mark.parametrize(
    ("kind", "metric", "value", "shown"),
    [
        ("tasks", "acc", 0.4567, "45.7"), ("tasks", "acc_norm,none", 1.0, "100.0"), ("length", "accuracy", 0.5, "50.0"),
        ("recall", "exact_match", 0.125, "12.5"), ("scrolls", "f1", 17.46, "17.5"), ("tasks", "f1", 0.5, "50.0"),
        ("perplexity", "perplexity", 83145.6, "83,145.60"), ("perplexity", "nll", 3.63731, "3.6373"),
        ("tasks", "acc", math.nan, "not finite"), ("tasks", "word_perplexity,none", 12.0, "12.00"),
        ("length", "cache_bytes", 188_743_680.0, "188.7"), ("recall", "effective_length", 4096.0, "4,096"),
        ("recall", "effective_length", math.nan, "none"), ("scrolls", "scrolls_score", 20.04, "20.0"),
    ],
)  # fmt: skip
def test_how_numbers_are_shown(kind: str, metric: str, value: float, shown: str) -> None:
    assert unit_of(kind, metric).show(value) == shown


def test_equal_numbers_are_all_best_and_the_teacher_never_is() -> None:
    table = table_of(
        run_of([acc("arc", m, v) for m, v in (("teacher", 0.9), ("student", 0.40004), ("untrained", 0.4))])
    )
    assert [cell.best for cell in table.rows[0].cells] == [False, True, True]
    lower = [("teacher", 1.0), ("student", 3.0), ("untrained", 2.0)]
    table = table_of(run_of([Score("t", "loss", m, v, higher_is_better=False) for m, v in lower]))
    assert [cell.best for cell in table.rows[0].cells] == [False, False, True]


def test_averages_only_over_what_every_model_has() -> None:
    first = [acc("a", "teacher", 0.4, 0.03), acc("b", "teacher", 0.6, 0.04), acc("c", "teacher", 0.9)]
    second = [acc("a", "student", 0.3, 0.03), acc("b", "student", 0.5, None)]
    table = table_of(run_of(first + second))
    (average,) = [row for row in table.rows if row.is_average]
    assert (average.task, average.cells[0].text, average.cells[0].error) == (
        "average of 2 tasks",
        "50.0",
        "2.5",
    )
    assert (average.cells[1].text, average.cells[1].error) == ("40.0", "")  # b has no error
    assert any("Not in the average" in note and note.endswith(": c.") for note in table.notes)


def test_averages_across_metrics_where_each_task_has_one_and_per_metric_otherwise() -> None:
    tasks = [("piqa", "acc_norm", 0.2), ("winogrande", "acc", 0.4), ("arc", "acc", 0.6)]
    one_each = [Score(task, metric, "student", value) for task, metric, value in tasks]
    more = Score("piqa", "acc", "student", 0.5)

    def averages(*scores: Score, kind: str = "tasks") -> list[tuple[str, str, str]]:
        rows = table_of(run_of(list(scores), kind=kind), kind=kind).rows
        return [(row.task, row.metric, row.cells[0].text) for row in rows if row.is_average]

    assert averages(*one_each) == [("average of 3 tasks", "acc_norm / acc %", "40.0")]
    assert averages(*one_each, more) == [("average of 3 tasks", "acc %", "50.0")]
    assert averages(*one_each, kind="scrolls") == []
    assert averages(*(Score(t, "perplexity", "student", 9.0, higher_is_better=False) for t in "ab")) == []
    assert averages(*(Score(t, "acc", "student", 0.1, higher_is_better=False) for t in "ab")) == []


def test_contexts_stand_from_short_to_long_within_a_task() -> None:
    scores = [acc(task, "student", 0.5, context_tokens=n) for n in (2048, 512) for task in ("b", "a")]
    rows = [
        (row.task, row.context) for row in table_of(run_of(scores, kind="length"), kind="length").rows[:4]
    ]
    assert rows == [("b", "512"), ("b", "2,048"), ("a", "512"), ("a", "2,048")]


def test_two_students_are_named_by_their_folders_and_measured_against_their_own_teachers() -> None:
    one = run_of([acc("arc", m, v) for m, v in (("teacher", 0.5), ("student", 0.4), ("window_only", 0.3))])
    two = run_of([acc("arc", "student", 0.45)], model="runs/other/model")
    alone = run_of([acc("arc", "student", 0.45)], model="runs/third/model", teacher=None)
    table = table_of(one, two, alone)
    assert table.columns == ["teacher", "mine", "other", "third", "mine window_only"]
    # `two` names the same teacher, which `one` measured; `alone` names none.
    assert (table.recovery_of, table.rows[0].recovery) == (["mine", "other"], ("60.0%", "80.0%"))


def test_the_later_argument_wins_and_the_page_says_so(tmp_path: Path) -> None:
    old = run_of([acc("arc", "student", 0.3), acc("piqa", "student", 0.5)], settings={"limit": 10})
    new = run_of([acc("arc", "student", 0.4)], settings={"limit": 100}, failures={"piqa": "lost"})
    text = write_page([(Path("e/old"), old), (Path("e/new"), new)], tmp_path).markdown.read_text()
    assert "40.0 ± 2.0" in text
    assert "30.0" not in text
    assert "Measured twice, shown as in new (the later argument), not as in old: student: arc acc." in text
    assert "Not measured alike: limit is 10 in old; 100 in new." in text
    assert "**piqa** (tasks, new): lost (a result is in old)" in text
    swapped = write_page([(Path("e/new"), new), (Path("e/old"), old)], tmp_path).markdown.read_text()
    assert "30.0 ± 2.0" in swapped


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["student", "teacher"]), st.floats(0, 1))))
def test_of_any_scores_the_last_of_each_is_kept(drawn: list[tuple[str, str, float]]) -> None:
    runs = [(Path(f"e/{i}"), run_of([acc(task, m, v)])) for i, (task, m, v) in enumerate(drawn)]
    rows = merge(runs).groups["tasks"].rows if runs else {}
    kept = {
        (key[0], column.role): found.part.value for key, row in rows.items() for column, found in row.items()
    }
    assert kept == {(task, model): value for task, model, value in drawn}


@given(
    st.sets(st.lists(st.sampled_from(["a", "b", "model"]), min_size=1, max_size=4).map("/".join), min_size=1)
)
def test_short_names_differ_and_come_from_their_paths(paths: set[str]) -> None:
    names = short_names(sorted(paths))
    assert len(set(names.values())) == len(paths)
    for path, name in names.items():
        parts = PurePath(name).parts
        assert parts in (PurePath(path).parts[-len(parts) :], PurePath(path).parts[-len(parts) - 1 : -1])


def test_the_same_folder_written_differently_is_one_model() -> None:
    runs = [run_of([acc("arc", "student", 0.3)], model=model) for model in ("runs/a", "runs/a/", "runs/./a")]
    merged = merge([(Path(str(i)), run) for i, run in enumerate(runs)])
    assert merged.labels == {Column("student", "runs/a"): "student"}


def test_a_model_without_a_number_is_shown_as_such() -> None:
    table = table_of(
        run_of([acc("a", "teacher", math.nan), acc("a", "student", 0.5), acc("b", "student", 0.5)])
    )
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["not finite", "50.0"],
        [NONE, "50.0"],
    ]
    assert [row.recovery for row in table.rows] == [(NONE,), (NONE,)]


def test_a_failure_is_not_excused_by_what_its_own_run_measured(tmp_path: Path) -> None:
    run = run_of([acc("arc", "teacher", 0.5)], failures={"arc": "the student ran out of memory"})
    text = write_page([(Path("e/run"), run)], tmp_path).markdown.read_text()
    assert "- **arc** (tasks, run): the student ran out of memory\n" in text


def test_a_changed_teacher_is_no_student_and_a_cost_is_not_recovered() -> None:
    names = [("student", 2e6), ("teacher_yarn", 1e6), ("untrained", 3e6), ("teacher", 4e6)]
    scores = [Score("t", "cache_bytes", name, value, higher_is_better=False) for name, value in names]
    table = table_of(run_of(scores, kind="length"), kind="length")
    assert table.columns == ["teacher", "teacher_yarn", "student", "untrained"]
    (row,) = table.rows
    assert (row.metric, row.recovery) == ("cache_bytes in MB ↓", (NONE,))
    shown = [("4.0", False), ("1.0", False), ("2.0", True), ("3.0", False)]
    assert [(cell.text, cell.best) for cell in row.cells] == shown
