"""Our lm-eval class gives HFLM's log-likelihoods, for every kind of request, whatever is shared or padded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from supra.config import Conversion
from supra.convert import execute, make_plan
from supra.errors import UserError
from supra.loading import load_model
from supra_eval.harness.model import SupraLM

SHOTS = "Q: what runs under a tree? A: the river. Q: what is a tree? A: a plant. "
WORDS = ["the", "river", "runs", "under", "a", "tree", "plant", "Ünïcödé"]


@pytest.fixture(scope="session")
def hybrid_dir(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer stays softmax, so a fork stacks states and pads keys."""
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    conversion = Conversion(feature_map="hedgehog", window=8, keep_softmax=[0])
    execute(make_plan(str(teacher_dir), conversion), folder, seed=0, recipe_yaml="conversion: {}\n")
    return folder


@pytest.fixture(params=["teacher", "student", "hybrid"])
def model_dir(request: pytest.FixtureRequest, teacher_dir: Path, student_dir: Path, hybrid_dir: Path) -> Path:
    return {"teacher": teacher_dir, "student": student_dir, "hybrid": hybrid_dir}[request.param]


def pair(folder: Path, *, reference_batch: int = 1, max_length: int | None = None, **options: Any) -> Any:
    loaded = load_model(folder)
    reference = HFLM(
        loaded.model,
        tokenizer=loaded.tokenizer,
        batch_size=reference_batch,
        max_length=max_length,
        device="cpu",
        softmax_dtype="float64",  # it sums hundreds of log-probabilities in its softmax's dtype
    )
    ours = SupraLM(loaded.model, loaded.tokenizer, max_length=max_length, device="cpu", **options)
    return reference, ours


def instances(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def compare(reference: HFLM, ours: SupraLM, arguments: list[tuple[Any, ...]]) -> None:
    expected = reference.loglikelihood(instances("loglikelihood", arguments), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", arguments), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=0, abs=1e-4)
    assert any(score != found[0][0] for score, _ in found)


def boundary_cases() -> list[tuple[str, str]]:
    return [
        ("the river runs ", "under"),  # the space moves to the continuation
        ("the river runs   ", " under"),
        ("", "the river"),  # an empty context: the prefix token
        ("", "r"),
        ("the river", " "),
        ("the river runs under a", "x"),  # one token
        ("the river runs under a", "y"),
        ("the river runs under a", "x y"),
        ("the river runs under a", "x"),  # asked twice
        ("under " * 30, " a tree " * 50),  # longer than the window of 512 tokens
        ("under " * 200, "a tree"),
        ("<eos>", "the"),
    ]


def many_requests(seed: int) -> list[tuple[str, str]]:
    chooser = random.Random(seed)

    def text(length: int) -> str:
        return " ".join(chooser.choices(WORDS, k=length))

    asked = []
    for _ in range(8):
        question = SHOTS + "Q: " + text(chooser.randint(1, 9)) + "? A:"
        asked += [(question, " " + text(chooser.randint(1, 3))) for _ in range(4)]
    asked += [(text(chooser.randint(1, 12)), " " + chooser.choice(WORDS)) for _ in range(8)]
    chooser.shuffle(asked)
    return asked


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_log_likelihoods_equal_hflm(model_dir: Path, batch_size: int) -> None:
    reference, ours = pair(model_dir, batch_size=batch_size, reference_batch=batch_size)
    compare(reference, ours, many_requests(batch_size) + boundary_cases())


@pytest.mark.parametrize(
    "options",
    [{"batch_tokens": 1}, {"chunk_tokens": 5}, {"share_prefixes": False}, {"max_length": 40}],
    ids=lambda options: next(iter(options)),
)
def test_no_setting_of_the_batches_changes_a_score(model_dir: Path, options: dict[str, Any]) -> None:
    reference, ours = pair(model_dir, **options)
    cases = boundary_cases()
    if "max_length" in options:
        cases = [case for case in cases if len(case[1].encode()) <= 40]
    compare(reference, ours, many_requests(7) + cases)


def test_rolling_log_likelihoods_equal_hflm(model_dir: Path) -> None:
    reference, ours = pair(model_dir, reference_batch=2)
    texts = [("the river",), ("under a tree " * 100,), ("r",), ("the river",)]
    expected = reference.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=0, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [512, 7])
def test_generations_equal_hflm(model_dir: Path, batch_size: int, chunk_tokens: int) -> None:
    reference, ours = pair(model_dir, batch_size=batch_size, chunk_tokens=chunk_tokens)
    asked = [
        (prompt, {"until": until, "max_gen_toks": 12, "do_sample": False})
        for prompt in ("the river runs", "a", SHOTS)
        for until in ([" "], ["\n\n"])
    ]
    expected = reference.generate_until(instances("generate_until", asked), disable_tqdm=True)
    found = ours.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert found == expected
    assert any(found)


def test_chat_template_is_the_tokenizers(student_dir: Path) -> None:
    _, ours = pair(student_dir)
    history = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(history) == "[hello]"
    assert ours.chat_template(True) == ours.tokenizer.chat_template


def test_shared_prefixes_are_read_once(student_dir: Path) -> None:
    loaded = load_model(student_dir)
    asked = many_requests(3)
    read = []
    for share in (True, False):
        model = SupraLM(loaded.model, loaded.tokenizer, share_prefixes=share, device="cpu")
        model.loglikelihood(instances("loglikelihood", asked), disable_tqdm=True)
        read.append(model.scorer.tokens_read)
    assert read[0] < read[1] / 3


def test_registered_as_supra_and_loads_a_folder(student_dir: Path) -> None:
    assert get_model("supra") is SupraLM
    model = SupraLM.create_from_arg_string(f"pretrained={student_dir},batch_tokens=64,dtype=float32")
    ((score, _),) = model.loglikelihood(instances("loglikelihood", [("the", " river")]), disable_tqdm=True)
    assert score < 0


def test_a_continuation_longer_than_the_window_is_refused(student_dir: Path) -> None:
    _, ours = pair(student_dir, max_length=8)
    with pytest.raises(UserError, match="window of 8"):
        ours.loglikelihood(instances("loglikelihood", [("the", " river runs under")]), disable_tqdm=True)


@pytest.mark.parametrize("option", ["peft", "load_in_4bit", "bogus"])
def test_an_option_that_would_be_ignored_is_refused(option: str, student_dir: Path) -> None:
    with pytest.raises(UserError, match=option):
        SupraLM(str(student_dir), **{option: "x"})


def test_lm_evals_default_device_is_not_an_error_without_a_gpu(
    student_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.warns(UserWarning, match="running on the CPU"):
        assert SupraLM(str(student_dir), device="cuda:0").device.type == "cpu"
