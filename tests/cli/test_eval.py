"""`supra eval` and `supra report` as a user types them: mistakes cost no work, and no result is overwritten unseen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from supra.cli import app
from supra.errors import SupraError
from supra_eval.harness.request_cache import with_cache
from supra_eval.results import EvalRun, Score, merged_with_earlier, read_run, require_mergeable

MODEL_CONFIG = {"model_type": "supra", "vocab_size": 8, "hidden_size": 4, "layer_types": ["linear_attention"]}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a student's and a teacher's config.json, where the command runs."""
    for name, config in (
        ("s", MODEL_CONFIG),
        ("t", {**MODEL_CONFIG, "model_type": "llama", "layer_types": None}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def supra(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


MISTAKES: dict[str, tuple[list[str], str]] = {
    "nothing to score": (["eval", "s"], "--data"),
    "books for --length": (["eval", "s", "--length"], "Name the books"),
    "tasks and length": (["eval", "s", "--tasks", "piqa", "--length"], "one after the other"),
    "contexts that are no numbers": (["eval", "s", "--length", "--data", "x", "--contexts", "2k"], "2k"),
    "a context of one token": (["eval", "s", "--length", "--data", "x", "--contexts", "1,8"], "1,8"),
    "shots for perplexity": (["eval", "s", "--data", "x", "--num-fewshot", "5"], "--num-fewshot: has no effect"),
    "blocks for tasks": (["eval", "s", "--tasks", "piqa", "--block-tokens", "8"], "--block-tokens: has no effect"),
    "an unknown protocol": (
        ["eval", "s", "--length", "--data", "x", "--contexts", "512", "--protocols", "slidng"], "Did you mean sliding"),
    "no cost of recall": (["eval", "s", "--recall", "passkey", "--no-cost"], "--no-cost: has an effect on --length"),
    "a student under no scaling": (
        ["eval", "s", "--length", "--data", "x", "--rope", "none", "--student-rope"], "Name some with --rope"),
    "protocols for tasks": (["eval", "s", "--tasks", "piqa", "--protocols", "none"], "--protocols: has no effect"),
    "a file as -o": (["eval", "s", "--data", "x", "-o", "s/config.json"], "is a file"),
    "two places for tasks": (["eval", "s", "--tasks", "piqa", "--data", "a", "--data", "b"], "more than once"),
    "tasks and SCROLLS from one place": (
        ["eval", "s", "--tasks", "piqa,scrolls_qasper", "--data", "packages"], "one after the other"),
    "a report of nothing": (["report", "nowhere"], "nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_before_anything_is_loaded(kind: str, folders: Path) -> None:
    arguments, named = MISTAKES[kind]
    result = supra(*arguments)
    assert isinstance(result.exception, SupraError)
    assert result.exception.exit_code == 2
    assert named in str(result.exception)
    assert sorted(path.name for path in folders.iterdir()) == ["s", "t"], "nothing was left behind"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), ["non_overlapping", "sliding", "carried"]),
        (("--protocols", "sliding"), ["sliding"]),
        (("--protocols", "none"), []),
    ],
)
def test_the_protocols_asked_for_are_the_ones_that_run(
    given: tuple[str, ...], asked: list[str], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def record(model: Path, *, protocols: tuple[str, ...], **_: Any) -> EvalRun:
        ran.extend(protocols)
        return EvalRun("length", str(model))

    monkeypatch.setattr("supra_eval.length.run_length", record)
    result = supra("eval", "s", "--length", "--data", "x", *given)
    assert result.exception is None and ran == asked


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["linear_attention"]}, "is a converted model itself"),
        ({"hidden_size": 64}, "hidden size of 64"),
        ({"vocab_size": 9}, "vocabulary of 9"),
        ({"num_hidden_layers": 9}, "number of layers of 9"),
    ],
)
def test_what_cannot_be_the_teacher_is_refused(change: dict[str, Any], named: str, folders: Path) -> None:
    config = json.loads((folders / "t/config.json").read_text())
    (folders / "t/config.json").write_text(json.dumps(config | change))
    (folders / "x.txt").write_text("text " * 99)
    from supra_eval.contenders import require_teacher_of

    with pytest.raises(SupraError, match=named):
        require_teacher_of(folders / "s", folders / "t")


def run(**fields: Any) -> EvalRun:
    base: dict[str, Any] = {"kind": "tasks", "model": "s", "settings": {"tasks": ["piqa"], "limit": 3}}
    return EvalRun(**base | fields)


def test_results_of_other_tasks_are_kept_and_of_the_same_replaced(tmp_path: Path) -> None:
    run(scores=[Score("piqa", "acc", "student", 0.5), Score("piqa", "acc", "teacher", 0.7)],
        failures={"sciq, student": "no rows", "piqa": "was slow"}).write(tmp_path)  # fmt: skip
    later = run(scores=[Score("piqa", "acc", "student", 0.6), Score("boolq", "acc", "student", 0.4)],
                settings={"tasks": ["piqa", "boolq"], "limit": 3})  # fmt: skip
    require_mergeable(later, tmp_path)
    whole = merged_with_earlier(later, tmp_path)
    assert [(s.task, s.model, s.value) for s in whole.scores] == [
        ("piqa", "teacher", 0.7), ("piqa", "student", 0.6), ("boolq", "student", 0.4)
    ]  # fmt: skip
    assert whole.failures == {"sciq, student": "no rows"}
    assert whole.settings["tasks"] == ["piqa", "boolq"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": {"tasks": ["piqa"], "limit": 9}}, "limit 3"),
        ({"model": "other"}, "model s"),
        ({"seed": 1}, "seed"),
    ],
)
def test_results_measured_otherwise_are_not_mixed(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(scores=[Score("piqa", "acc", "student", 0.5)]).write(tmp_path)
    with pytest.raises(SupraError, match=named):
        require_mergeable(run(**change), tmp_path)


def test_perplexity_json_and_files_of_the_real_command(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import supra_eval.perplexity

    found = EvalRun("perplexity", "s", scores=[Score("heldout_text", "loss", "student", 2.0)])
    monkeypatch.setattr(supra_eval.perplexity, "evaluate_folder", lambda *_, **__: found)
    result = supra("eval", "s", "--data", "x.txt", "-o", "out", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["runs"][0]["scores"][0]["value"] == 2.0
    assert read_run(folders / "out/perplexity").scores == found.scores


def test_a_failed_part_is_an_error_after_all_is_shown_and_kept(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import supra_eval.perplexity

    found = EvalRun(
        "perplexity", "s", scores=[Score("a", "loss", "student", 2.0)], failures={"b": "no memory"}
    )
    monkeypatch.setattr(supra_eval.perplexity, "evaluate_folder", lambda *_, **__: found)
    result = supra("eval", "s", "--data", "x.txt", "-o", "out", "--json")
    assert isinstance(result.exception, SupraError)
    assert result.exception.exit_code == 1
    assert "1 part" in str(result.exception)
    assert json.loads(result.stdout)["runs"][0]["failures"] == {"b": "no memory"}
    assert (folders / "out/perplexity/results.json").exists()


def test_a_run_without_results_overwrites_none(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import supra_eval.perplexity

    EvalRun("perplexity", "s", scores=[Score("a", "loss", "student", 2.0)]).write(folders / "out/perplexity")
    empty = EvalRun("perplexity", "s", failures={"a": "no memory"})
    monkeypatch.setattr(supra_eval.perplexity, "evaluate_folder", lambda *_, **__: empty)
    assert isinstance(supra("eval", "s", "--data", "x.txt", "-o", "out").exception, SupraError)
    assert read_run(folders / "out/perplexity").scores


def test_a_damaged_answer_cache_is_named(tmp_path: Path) -> None:
    class Model:
        def set_cache_hook(self, hook: object) -> None:
            pass

    with_cache(Model(), "f" * 32, folder=tmp_path).dbdict.close()  # type: ignore[arg-type]
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"no data base " * 99)
    with pytest.raises(SupraError, match=f"{path.name}: is damaged"):
        with_cache(Model(), "f" * 32, folder=tmp_path)  # type: ignore[arg-type]


def test_a_foreign_page_is_not_replaced(folders: Path) -> None:
    EvalRun("perplexity", "s", scores=[Score("a", "loss", "student", 2.0)]).write(folders / "out/perplexity")
    assert supra("report", "out", "-o", "page").exit_code == 0
    assert supra("report", "out", "-o", "page").exit_code == 0, "our own page is replaced"
    (folders / "page/report.html").write_text("mine")
    result = supra("report", "out", "-o", "page")
    assert isinstance(result.exception, SupraError)
    assert (folders / "page/report.html").read_text() == "mine"
    shutil.rmtree(folders / "page")
