"""Recall is scored as greedy decoding would write it, and a run keeps scores, grids and effective lengths."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from supra.errors import SupraError, UserError
from supra.loading import load_model
from supra_eval.length import recall as module
from supra_eval.length import run_recall
from supra_eval.length.filler import Filler
from supra_eval.length.recall import continuation, effective_length, fraction_recalled
from supra_eval.length.recall_tasks import Example, make_example
from supra_eval.results import EvalRun, read_run


@pytest.fixture(scope="module", params=["teacher", "student"])
def loaded(request: pytest.FixtureRequest, teacher_dir: Path, student_dir: Path) -> Any:
    return load_model(teacher_dir if request.param == "teacher" else student_dir)


@pytest.mark.parametrize("chunk_tokens", [7, 512])
def test_continuation_equals_generate(loaded: Any, chunk_tokens: int) -> None:
    prompt = "The wind turned and the boat came home to the harbour"
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    written = loaded.model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = loaded.tokenizer.decode(written[0, ids.shape[1] :])
    assert continuation(loaded.model, loaded.tokenizer, prompt, 9, chunk_tokens) == expected


class Echo:
    """A model that remembers perfectly: after `word: ` it writes the number that it has read behind `word` before."""

    device, generation_config = torch.device("cpu"), SimpleNamespace(eos_token_id=None)

    def __init__(self, tokenizer: Any, forgets: str = "") -> None:
        self.tokenizer, self.forgets = tokenizer, forgets

    def __call__(self, ids: Any, cache: Any = None, **kwargs: Any) -> Any:
        text = self.tokenizer.decode(torch.cat([cache, ids], 1)[0] if cache is not None else ids[0])
        start = len(text) - ids.shape[1]
        vocab = self.tokenizer.get_vocab()
        logits = torch.zeros(1, ids.shape[1], len(vocab))
        for i in range(ids.shape[1]):
            read = text[: start + i + 1]
            asked = re.search(r"(\w+): (\d?)$", read)
            known = re.search(rf"\b{asked[1]}: (\d+)", read[: asked.start()]) if asked else None
            if known and asked and asked[1] != self.forgets:
                logits[0, i, vocab[known[1][len(asked[2])]]] = 1
        return SimpleNamespace(logits=logits, cache=ids if cache is None else torch.cat([cache, ids], 1))


@pytest.mark.parametrize("chunk_tokens", [50, 512])
def test_associative_recall_scores_what_is_remembered(loaded: Any, chunk_tokens: int) -> None:
    tokenizer = loaded.tokenizer
    example = make_example("associative_recall", tokenizer, 400, seed=0, sample=0, filler=Filler())
    assert fraction_recalled(Echo(tokenizer), tokenizer, example, chunk_tokens) == 1
    forgotten = re.findall(r"(\w+): \d+$", example.prompt)[0]
    assert fraction_recalled(Echo(tokenizer, forgotten), tokenizer, example, chunk_tokens) == 7 / 8
    assert fraction_recalled(loaded.model, tokenizer, example, chunk_tokens) < 0.5


def test_recall_of_given_numbers_equals_greedy_decoding(loaded: Any) -> None:
    """A span is right exactly where the greedy continuation of the text before it is the span."""
    model, tokenizer = loaded.model, loaded.tokenizer
    prompt = "abcabcabcabc xyz xyz xyz 12 12 12 1 2 1 2"
    ends = range(3, len(prompt), 2)
    whole = Example(prompt, (), 0.0, 0, tuple((end - 1, end) for end in ends))
    right = [continuation(model, tokenizer, prompt[: end - 1], 1) == prompt[end - 1] for end in ends]
    assert fraction_recalled(model, tokenizer, whole, 4) == sum(right) / len(right)


def test_effective_length_is_the_longest_that_passes() -> None:
    assert effective_length({4096: 0.9, 8192: 0.856, 16384: 0.5}) == 8192
    assert effective_length({4096: 0.5, 8192: 0.9}) == 8192
    assert effective_length({4096: 0.8559}) is None
    assert effective_length({}) is None


@pytest.fixture
def evaluate(teacher_dir: Path, student_dir: Path) -> Any:
    def run(**options: Any) -> EvalRun:
        settings: dict[str, Any] = dict(
            teacher=teacher_dir, tasks=["needle", "arithmetic"], contexts=[600, 400], depths=[0.0, 1.0],
            num_samples=2, ablations=False, device="cpu", say=lambda line: None,
        )  # fmt: skip
        return run_recall(student_dir, **{**settings, **options})

    return run


def test_a_run_holds_scores_grids_and_effective_lengths(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_if(model: Any, tokenizer: Any, example: Example, chunk_tokens: int) -> float:
        # The teacher knows all within 400 tokens and, at 600, only what stands at the end.
        at_end = example.prompt.split("\n")[-2].endswith(f"{example.answers[0]}.")
        known = len(example.prompt) < 400 or at_end
        return float(known and model.config.model_type == "llama")

    monkeypatch.setattr(module, "accuracy_on", as_if)
    said: list[str] = []
    run = evaluate(out=tmp_path, say=said.append)
    assert run.kind == "recall" and run.models() == ["teacher", "student"]
    scores = {(s.task, s.metric, s.model, s.context_tokens): s for s in run.scores}
    half = scores["needle", "accuracy", "teacher", 600]
    assert (half.value, half.num_samples) == (0.5, 4)
    assert half.stderr == pytest.approx(math.sqrt(4 * 0.25 / 3 / 4))  # 1 1 0 0
    assert half.chance == pytest.approx(1 / 9e6) and half.higher_is_better
    assert scores["arithmetic", "accuracy", "teacher", 400].chance == 0.1
    grids = {grid.model: grid for grid in run.grids}
    assert grids["teacher"].x == [400, 600] and grids["teacher"].y == [0, 1]
    assert grids["teacher"].values == [[1, 0], [1, 1]]
    assert grids["student"].values == [[0, 0], [0, 0]]
    assert scores["RULER tasks", "effective_length", "teacher", None].value == 400
    assert scores["needle", "effective_length", "teacher", None].value == 400
    assert math.isnan(scores["needle", "effective_length", "student", None].value)
    assert any("needle 400" in line for line in said) and any("needle None" in line for line in said)
    assert {curve.name for curve in run.curves} == {"recall needle", "recall arithmetic"}

    monkeypatch.setattr(module, "accuracy_on", None)  # a second run needs no model's answer
    again = evaluate(out=tmp_path)
    assert again.grids == run.grids and again.curves == run.curves
    assert read_run(tmp_path).settings["num_samples"] == 2


def test_real_answers_of_the_tiny_models(evaluate: Any, text_file: Path) -> None:
    tasks = ["passkey", "associative_recall"]
    run = evaluate(
        tasks=tasks, contexts=[480], num_samples=1, ablations=True, rope=["ntk"], data=[str(text_file)]
    )
    assert run.models() == ["teacher", "student", "window_only", "linear_only", "untrained"]
    assert not run.failures and not run.grids
    accuracies = [s for s in run.scores if s.metric == "accuracy"]
    assert len(accuracies) == 2 * 5 and all(0 <= s.value <= 1 and s.stderr is None for s in accuracies)


def test_a_failure_is_recorded_and_the_rest_goes_on(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_far(model: Any, tokenizer: Any, example: Example, chunk_tokens: int) -> float:
        if len(example.prompt) > 400 and model.config.model_type == "llama":
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(module, "accuracy_on", fails_far)
    run = evaluate(tasks=["needle"])
    assert run.failures == {"teacher: needle at 600": "out of memory"}
    grids = {grid.model: grid for grid in run.grids}
    assert grids["teacher"].values == [[1, None], [1, None]]
    assert grids["student"].values == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["neddle"]}, "Did you mean needle"),
        ({"depths": [-1.0]}, "--depths -1.0"),
        ({"depths": []}, "--depths: is empty"),
        ({"contexts": [30, 400]}, "is too short for the task needle"),
        ({"contexts": [0]}, "--contexts 0"),
        ({"num_samples": 0}, "--samples 0"),
        ({"rope": ["ntc"]}, "Did you mean ntk"),
    ],
)
def test_mistakes_are_answered_before_any_model_is_read(
    evaluate: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supra_eval.contenders.load_model", None)
    with pytest.raises(UserError, match=message):
        evaluate(**options)


def test_broken_weights_are_named(teacher_dir: Path) -> None:
    loaded = load_model(teacher_dir)
    loaded.model.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(SupraError, match="not finite"):
        continuation(loaded.model, loaded.tokenizer, "the sea", 3)
