"""A whole length evaluation on the tiny models: what it holds, what a failure leaves, what a second run reuses."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from supra.errors import SupraError, UserError
from supra.loading import load_model
from supra_eval.length import run_length
from supra_eval.length.books import read_books
from supra_eval.length.losses import loss_by_position, non_overlapping, sliding
from supra_eval.results import EvalRun, read_run

MODELS = ["teacher", "teacher_linear", "student", "window_only", "linear_only", "untrained"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chooser = random.Random(1)
    path = tmp_path_factory.mktemp("long") / "book.txt"
    path.write_text(" ".join(chooser.choices(["sea", "boat", "wind", "a", "harbour"], k=2600)))
    return path


@pytest.fixture
def evaluate(teacher_dir: Path, student_dir: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("supra_eval.length.run.SLIDING_WINDOWS", 2)

    def run(**options: Any) -> EvalRun:
        settings: dict[str, Any] = dict(
            teacher=teacher_dir, data=[str(book)], contexts=[1024, 300], protocols=["sliding", "carried"],
            rope=["linear"], max_sequences=2, ablations=True, out=None, device="cpu", dtype="float32",
            backend="auto", cost=False, say=lambda line: None,
        )  # fmt: skip
        return run_length(student_dir, **{**settings, **options})

    return run


def test_a_run_holds_every_model_and_the_functions_numbers(
    evaluate: Any, teacher_dir: Path, student_dir: Path, book: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    protocols = ["non_overlapping", "sliding", "carried"]
    run = evaluate(protocols=protocols, cost=True, out=tmp_path, say=said.append)
    assert run.kind == "length" and run.models() == MODELS and not run.failures
    assert run.settings["rope"] == "linear: teacher x2" and "rope linear x2" in run.runs_on["teacher_linear"]
    assert run.settings["contexts"] == [300, 1024] and run.settings["sources"] == ["book.txt"]

    student = load_model(student_dir)
    ids, _ = read_books([str(book)], student.tokenizer, 1024 + 256, 2)
    longest = ids[:, :1024]
    values = {(s.task, s.model, s.context_tokens): s.value for s in run.scores if s.metric == "perplexity"}
    losses = loss_by_position(student.model, longest)
    assert values["carried", "student", 1024] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    blocks = non_overlapping(student.model, longest, 300)
    assert values["non_overlapping", "student", 300] == pytest.approx(math.exp(blocks.mean()), rel=1e-5)
    slid = sliding(student.model, ids, 1024, stride=256, max_windows=2)
    assert slid.shape == (2, 512)
    assert values["sliding", "student", 1024] == pytest.approx(math.exp(slid.mean()), rel=1e-5)
    assert ("carried", "teacher", 1024) not in values, "a softmax model has no state to carry"

    curves = {(curve.name, curve.model): curve for curve in run.curves}
    by_position = curves["loss by position", "student"]
    assert by_position.x == [128, 256, 512, 1024]
    assert by_position.y[0] == pytest.approx(float(losses[:, :127].mean()), rel=1e-5)
    assert by_position.stderr is not None and len(by_position.stderr) == 4
    positions = {model: curves["loss by position", model].y for model in MODELS}
    assert positions["teacher"] != positions["teacher_linear"]
    # An untrained conversion of an untrained student is the same model.
    assert positions["untrained"] == pytest.approx(positions["student"])
    assert {"loss by last mention", "cache", "decode time", "peak memory"} <= {name for name, _ in curves}
    assert curves["cache", "student"].y[0] == curves["cache", "student"].y[1]
    assert any("cache holds 0.3 MB after 1,024 tokens" in line for line in said if "teacher:" in line)

    again = read_run(tmp_path)
    assert again.settings == run.settings and again.models() == MODELS


def test_a_second_run_measures_nothing_again(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluate(out=tmp_path, rope=["none"], ablations=False, protocols=[])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("supra_eval.length.run.read_losses", refuse)
    said: list[str] = []
    second = evaluate(out=tmp_path, rope=["none"], ablations=False, protocols=[], say=said.append)
    assert second.scores == first.scores and second.curves == first.curves
    assert [line for line in said if line.endswith("measured before")] == [
        "teacher: measured before",
        "student: measured before",
    ]
    with pytest.raises(UserError, match=r"contexts .* where this is"):
        evaluate(out=tmp_path, rope=["none"], ablations=False, protocols=[], contexts=[300])


def test_a_killed_run_loses_one_model(evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from supra_eval.length import run as module

    own = module.sliding

    def killed(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.config.model_type == "supra":
            raise KeyboardInterrupt
        return own(model, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "sliding", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(out=tmp_path, ablations=False)
    assert read_run(tmp_path).models() == ["teacher", "teacher_linear"]
    said: list[str] = []
    run = evaluate(out=tmp_path, ablations=False, say=said.append)
    assert run.models() == ["teacher", "teacher_linear", "student"]
    assert sum(line.endswith("measured before") for line in said) == 2


def test_a_failed_part_is_recorded_and_tried_again(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from supra_eval.length import run as module

    own = module.sliding

    def short_of_memory(model: Any, ids: Any, context: int, *args: Any, **kwargs: Any) -> Any:
        if model.config.model_type == "llama" and context == 1024:
            raise RuntimeError("out of memory")
        return own(model, ids, context, *args, **kwargs)

    options: dict[str, Any] = dict(out=tmp_path, rope=["none"], ablations=False)
    with monkeypatch.context() as patch:
        patch.setattr(module, "sliding", short_of_memory)
        run = evaluate(**options)
    assert run.failures == {"teacher: sliding at 1024": "out of memory"}
    slid = [(s.model, s.context_tokens) for s in run.scores if s.task == "sliding"]
    assert slid == [("teacher", 300), ("student", 300), ("student", 1024)]
    said: list[str] = []
    again = evaluate(**options, say=said.append)
    assert not again.failures and "student: measured before" in said
    assert [(s.model, s.context_tokens) for s in again.scores if s.task == "sliding"][1] == ("teacher", 1024)
    assert again.models() == ["teacher", "student"] and not read_run(tmp_path).failures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": [1, 300]}, "--contexts 1: has no token to score"),
        ({"contexts": []}, "--contexts: is empty"),
        ({"contexts": [256, 300]}, "no longer than the sliding window's stride of 256"),
        ({"contexts": [30_000]}, "book.txt has"),
        ({"protocols": ["slidin"]}, "Did you mean sliding"),
        ({"rope": ["yarm"]}, "Did you mean yarn"),
        ({"rope": ["yarn", "none"]}, "--rope yarn,none: names one twice, or none beside others"),
        ({"rope": []}, "--rope: is empty"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0"),
        ({"teacher": Path("absent")}, "absent: does not exist"),
    ],
)
def test_mistakes_are_answered_before_any_model_is_read(
    evaluate: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supra_eval.contenders.load_model", None)
    with pytest.raises(UserError, match=message):
        evaluate(**options)


def test_without_a_teacher_the_student_is_read_alone(evaluate: Any) -> None:
    assert evaluate(teacher=None, ablations=False, contexts=[300]).models() == ["student"]


def test_a_teacher_that_reaches_is_not_scaled(evaluate: Any) -> None:
    said: list[str] = []
    run = evaluate(contexts=[300, 512], ablations=False, protocols=[], say=said.append)
    assert run.models() == ["teacher", "student"] and run.settings["rope"] == "none"
    assert any("--rope: left out" in line for line in said)


def test_each_scaling_is_a_reading_of_the_teacher_and_of_the_student(evaluate: Any) -> None:
    options: dict[str, Any] = dict(ablations=False, protocols=[], rope=["linear", "yarn"], student_rope=True)
    run = evaluate(**options)
    names = [f"{base}{scaling}" for base in ("teacher", "student") for scaling in ("", "_linear", "_yarn")]
    assert run.models() == names and run.settings["rope"] == "linear, yarn: teacher x2, student x2"
    losses = {curve.model: tuple(curve.y) for curve in run.curves if curve.name == "loss by position"}
    assert len(set(losses.values())) == len(names)
    again = evaluate(**options | {"rope": ["none"], "student_rope": False})
    plain = {curve.model: tuple(curve.y) for curve in again.curves if curve.name == "loss by position"}
    # The model's own positions are back after each scaling.
    assert plain == {name: losses[name] for name in ("teacher", "student")}


def test_an_unwritable_folder_is_one_clear_line(evaluate: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SupraError, match="cannot be written"):
        evaluate(out=tmp_path / "file" / "in", teacher=None, ablations=False, contexts=[300])
