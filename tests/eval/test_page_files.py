"""What the page reads and writes: results of either kind, files that are not, and Markdown that no name can break."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from supra.errors import SupraError, UserError
from supra_eval.page import read_any, write_page
from supra_eval.page.markdown import fenced, plain
from supra_eval.page.merge import merge
from supra_eval.page.tables import make_table
from supra_eval.results import Curve, EvalRun, Grid, Score


def run_of(scores: list[Score], **more: Any) -> EvalRun:
    more = {"model": "runs/mine/model", "teacher": "llama", "command": "supra eval x", **more}
    return EvalRun("tasks", scores=scores, **more)


def acc(task: str, model: str, value: float) -> Score:
    return Score(task, "acc", model, value, 0.02)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"])))
def test_any_text_is_shown_as_it_is_and_never_as_markup(text: str) -> None:
    reader = MarkdownIt("commonmark").enable("table")
    for tokens in (
        reader.parse(f"| head |\n| --- |\n| {plain(text)} |\n"),
        reader.parse(f"- {plain(text)}\n"),
    ):
        inline = [token for token in tokens if token.type == "inline"]
        parts = inline[-1].children or [] if inline else []
        assert "".join(part.content for part in parts if part.type != "head") in (text, "head" * (not text))
        assert {part.type for part in parts} <= {"text", "text_special"}


def test_no_name_becomes_html_in_the_markdown(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&lt;|`"
    run = run_of(
        [acc(evil, "student", 0.5)], model=evil, command=evil, failures={evil: evil}, recipe=evil,
        settings={evil: evil}, runs_on={evil: evil}, curves=[Curve(evil, evil, evil, evil, [1.0], [2.0])],
    )  # fmt: skip
    text = write_page([(Path("e/<script>"), run)], tmp_path, title=evil).markdown.read_text()
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    html = [t.content for token in tokens for t in (token, *(token.children or [])) if "html" in t.type]
    assert [part.replace("</script>", "") for part in html if "<script" in part.lower()] == []
    assert [part.split("\n")[0] for part in html] == ["<details>", "</details>"]


@given(st.text(st.sampled_from("`~ab\n")))
def test_a_code_block_ends_where_it_should(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse("\n".join([*fenced(text, "sh"), "", "after"]))
    assert [token.type for token in tokens][:2] == ["fence", "paragraph_open"]
    assert tokens[0].content.rstrip("\n") == text.rstrip("\n")


def write_json(path: Path, **changes: Any) -> Path:
    raw = json.loads(run_of([acc("arc", "student", 0.5)]).to_json())
    path.write_text(json.dumps(raw | changes))
    return path


CURVE = {"name": "n", "model": "student", "x_label": "x", "y_label": "y", "x": [1, 2], "y": [1]}
GRID = {**CURVE, "y": [0.0], "values": [[1.0]]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 99}, "format 99"), ({"scores": 5}, "no evaluation's result"),
        ({"curves": [CURVE]}, "differ in length"), ({"grids": [{**GRID, "x": [], "y": []}]}, "without a cell"),
        ({"curves": [{**CURVE, "y": [1, "z"]}]}, "something else than numbers"), ({"grids": [GRID]}, "do not fit"),
        ({"scores": [{"task": "t", "metric": "m", "model": "s", "value": "high"}]}, "is no number"),
        ({"scores": [{"task": 5, "metric": "m", "model": "s", "value": 1}]}, "than text"),
        ({"settings": []}, "another form"), ({"runs_on": {"student": []}}, "describes a device"),
        ({"seconds": "long"}, "no number"), ({"grids": [{**GRID, "x": [None, 1]}]}, "a gap in its axes"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write_json(tmp_path / "results.json", **changes)
    with pytest.raises(UserError, match=reason) as error:
        read_any(tmp_path)
    assert error.value.thing == str(path)
    assert error.value.mend


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "null", '{"decode_ms": 1}'])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"results\.json"):
        read_any(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_any(tmp_path / "absent")


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of(
        [acc("arc", "student", 0.5)],
        curves=[Curve("c", "student", "x", "y", [1.0], [2.0])],
        grids=[Grid("g", "student", "x", "y", [1.0], [2.0], [[None]])],
    )
    assert read_any(run.write(tmp_path).parent) == run


def test_the_demo_is_read_as_an_evaluation(tmp_path: Path) -> None:
    names = ("teacher", "untrained", "transfer", "final", "window_only")
    results = {
        "teacher_name": "SmolLM2", "recipe": "demo", "conversion": {"window": 64}, "heldout": ["a.txt", "b.txt"],
        "perplexity": dict(zip(names, (10.0, 40.0, 20.0, 12.5, 16.0), strict=True)),
        "nll_stderr": dict.fromkeys(names, 0.02), "eval_length": 1024, "scored_tokens": 12276,
        "decode_ms": {"teacher": {"128": 80.0}, "student": {"128": 120.0}},
        "context_bytes": {"teacher": {"128": 3e6}, "student": {"128": 6e6}},
        "peak_bytes": 1, "wall_s": 60.0, "train_s": 1.0, "tokens_trained": 2, "seed": 0,
        "command": "supra demo", "runs_on": "2 CPU threads", "versions": {"torch": "2"},
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(results))
    run = read_any(tmp_path)
    assert run.models() == ["teacher", "untrained", "transfer", "student", "window_only"]
    assert [(curve.name, curve.model, curve.x, curve.y) for curve in run.curves] == [
        ("time per token", "teacher", [128.0], [80.0]), ("time per token", "student", [128.0], [120.0]),
        ("memory of the context", "teacher", [128.0], [3.0]), ("memory of the context", "student", [128.0], [6.0]),
    ]  # fmt: skip
    merged = merge([(tmp_path, run)])
    table = make_table(merged.groups["perplexity"], merged, "caption")
    assert table.columns == ["teacher", "student", "window_only", "untrained", "transfer"]
    assert [row.recovery[0] for row in table.rows] == ["80.0%", f"{math.log(10) / math.log(12.5):.1%}"]
    assert (table.rows[0].cells[1].text, table.rows[0].cells[1].error) == ("12.50", "0.25")  # 12.5 x 0.02
    assert table.rows[0].samples == "12"  # 12 x (1024 - 1) = 12276


def test_what_cannot_be_written_or_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no run"):
        write_page([], tmp_path)
    (tmp_path / "file").write_text("")
    run = run_of([acc("arc", "student", 0.5)])
    with pytest.raises(SupraError, match=r"file.*cannot be written"):
        write_page([(Path("e"), run)], tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_page([(Path("e"), run)], tmp_path / "without")
    run.curves.append(Curve("c", "student", "x", "y", [1.0], [2.0]))
    with pytest.raises(SupraError, match="matplotlib is not installed"):
        write_page([(Path("e"), run)], tmp_path / "with")
    assert not (tmp_path / "with").exists()


def test_a_page_is_written_over_itself_and_over_no_other(tmp_path: Path) -> None:
    runs = [(Path("e"), run_of([acc("arc", "student", 0.5)]))]
    write_page(runs, tmp_path / "own")
    write_page(runs, tmp_path / "own", title="Again")
    assert (tmp_path / "own/report.md").read_text().startswith("# Again")
    (tmp_path / "report.md").write_text("the demo's")
    with pytest.raises(UserError, match=r"report\.md: is there already"):
        write_page(runs, tmp_path)
    assert (tmp_path / "report.md").read_text() == "the demo's"
