"""SCROLLS is answered as transformers would, a paper is read once, and neither a failure nor a kill loses an answer."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from supra.errors import SupraError, UserError
from supra.loading import Loaded, load_model, load_tokenizer
from supra_eval.contenders import Contender
from supra_eval.harness.scoring import Limits, Scorer
from supra_eval.results import EvalRun, read_run
from supra_eval.scrolls import data as scrolls_data
from supra_eval.scrolls import run as scrolls
from supra_eval.scrolls.data import QASPER_YES_NO, SCROLLS, Example, Prompts

OUTPUTS = {"quality": "A hut", "contract_nli": "Entailment"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three examples of each task, the first with two references, and a test split without labels."""
    root = tmp_path_factory.mktemp("scrolls")
    for task in SCROLLS:
        options = "\n\n (A) A hut\n (B) A ship\n (C) A cave\n (D) A hill" if task.folder == "quality" else ""
        for split in ("train", "validation", "test"):
            rows = []
            for number in range(3):
                document = f"{split} {number}: " + "the river runs under a tree. " * 12
                query = f"Where is {number}?{options}\n\n" if "{query}" in task.ask else ""
                output = OUTPUTS.get(task.folder, "under a tree") if split != "test" else None
                row = {"id": f"{split}-{number}", "pid": "p", "input": query + document, "output": output}
                rows += [row, {**row, "output": "a hill"}] if number == 0 and split != "test" else [row]
            path = root / task.folder / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(root)


@pytest.fixture(scope="module", params=["teacher", "student"])
def loaded(request: pytest.FixtureRequest, teacher_dir: Path, student_dir: Path) -> Loaded:
    return load_model({"teacher": teacher_dir, "student": student_dir}[request.param], device="cpu")


def run(model: Path, data: str, *tasks: str, **options: Any) -> EvalRun:
    fields: dict[str, Any] = {"teacher": None, "contexts": [700], "device": "cpu", "say": lambda _: None}
    return scrolls.run_scrolls(model, tasks=tasks, data=data, **{**fields, **options})


Answer = Callable[[list[int]], str]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[list[int]]]:
    """Replace generation by a function of the prompt; the prompts asked are collected."""

    def replaced(answer: Answer) -> list[list[int]]:
        asked: list[list[int]] = []

        def generate(model: Any, tokenizer: Any, ids: list[int], *args: Any, **options: Any) -> str:
            asked.append(ids)
            return answer(ids)

        monkeypatch.setattr(scrolls, "generate_greedy", generate)
        return asked

    return replaced


@pytest.mark.parametrize("chunk_tokens", [7, 64, 1000])
def test_generates_what_transformers_does_greedily(loaded: Loaded, chunk_tokens: int) -> None:
    ids = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(3))
    expected = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, 90:]
    text = loaded.tokenizer.decode(expected, skip_special_tokens=True)
    found = scrolls.generate_greedy(
        loaded.model, loaded.tokenizer, ids[0].tolist(), 12, stop_at_newline=False, chunk_tokens=chunk_tokens
    )
    assert found == text.strip() != ""


class Scripted:
    """A model that says `text` whatever it reads; `read` counts the tokens of each call."""

    device = "cpu"

    def __init__(self, ids: list[int], eos: int | list[int]) -> None:
        self.ids, self.read = ids, []
        self.generation_config = SimpleNamespace(eos_token_id=eos)

    def __call__(self, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        self.read.append(ids.shape[1])
        logits = torch.zeros(1, 1, 300)
        said = 0 if cache is None else cache
        if ids.shape[1] == 1 or sum(self.read) == 10:
            logits[0, 0, self.ids[said]] = 1
            said += 1
        return SimpleNamespace(logits=logits, cache=said)


@pytest.mark.parametrize(
    ("said", "ends", "newline", "expected", "calls"),
    [
        (" one\ntwo\n", ["<eos>"], True, "one", 5),
        (" one\ntwo\n", ["<eos>"], False, "one\ntwo", 9),  # up to max_new_tokens
        ("\nlate", ["<eos>"], True, "", 1),  # an empty answer is an answer
        ("yes<eos>no", ["<eos>"], True, "yes", 4),
        ("yes?no way", ["!", "?"], True, "yes", 4),  # one of several ends
        ("yes<eos>no", ["!", "?"], True, "yes", 4),  # the tokenizer's own end counts too
    ],
)
def test_stops_at_newline_end_or_length(
    teacher_dir: Path, said: str, ends: list[str], newline: bool, expected: str, calls: int
) -> None:
    tokenizer = load_tokenizer(teacher_dir)
    eos = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    model = Scripted(tokenizer(said).input_ids, eos if len(eos) > 1 else eos[0])
    text = scrolls.generate_greedy(model, tokenizer, [5] * 10, 9, stop_at_newline=newline, chunk_tokens=4)
    assert text == expected
    assert model.read == [4, 4, 2] + [1] * (calls - 1), "chunks of at most 4, then token by token"


def test_logits_that_are_not_finite_are_no_answer(teacher_dir: Path) -> None:
    loaded = load_model(teacher_dir)
    with torch.no_grad():
        loaded.model.model.norm.weight[0] = float("nan")
    with pytest.raises(SupraError, match="not finite"):
        scrolls.generate_greedy(
            loaded.model, loaded.tokenizer, [1, 2], 3, stop_at_newline=True, chunk_tokens=8
        )


def test_likelihoods_of_a_fork_equal_one_whole_pass(loaded: Loaded) -> None:
    paper = torch.randint(256, (1, 60), generator=torch.Generator().manual_seed(1))
    scorer = Scorer(loaded.model, Limits(chunk_tokens=16))
    question, answers = [3, 1, 4, 1, 5], [[9, 2, 6], [7], [9, 5]]
    for _ in range(2):  # asking leaves the paper's state as it was
        (found,) = scrolls.log_likelihoods(scorer, [[*paper[0].tolist(), *question]], [answers])
        for answer, value in zip(answers, found, strict=True):
            ids = torch.cat([paper, torch.tensor([[*question, *answer]])], dim=1)
            with torch.no_grad():
                logp = loaded.model(ids).logits.log_softmax(-1)[0, -len(answer) - 1 : -1]
            expected = sum(float(row[token]) for row, token in zip(logp, answer, strict=True))
            assert value == pytest.approx(expected, abs=1e-4)


def test_a_paper_is_read_once_for_all_its_questions(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    questions = [Example(str(i), f"{'very ' * i}good?", f"paper {i % 2} " * 50, ("yes",)) for i in range(4)]
    contender = Contender("m", loaded.model, loaded.tokenizer, "print", "cpu")
    prompts = Prompts(QASPER_YES_NO, [], loaded.tokenizer, "middle")
    papers: list[int] = []
    read: list[int] = []
    document, score = prompts.document, Scorer.score

    def cut(example: Example, num_tokens: int) -> list[int]:
        papers.append(num_tokens)
        return document(example, num_tokens)

    def counted(self: Scorer, requests: Any, *options: Any) -> Any:
        yield from score(self, requests, *options)
        read.append(self.tokens_read)

    monkeypatch.setattr(prompts, "document", cut)
    monkeypatch.setattr(Scorer, "score", counted)
    context = 200

    def predicted() -> dict[str, str]:
        store = scrolls.Predictions(tmp_path / "yes.jsonl", "print")
        pairs = scrolls.predict_yes_no(contender, prompts, questions, context, store, 32)
        return {example.id: text for example, text in pairs}

    first = predicted()
    # Each paper is cut for the longest of its own questions, numbers 2 and 3.
    longest = [len(f"\n\nQuestion: {questions[i].query}\nAnswer: yes") for i in (2, 3)]
    assert papers == [context - length for length in longest]
    asked = {
        example.id: document(example, papers[int(example.id) % 2]) + prompts.tails(example)[0]
        for example in questions
    }
    distinct = {tuple(ids[: n + 1]) for ids in asked.values() for n in range(len(ids))}
    # Short shared pieces may be read again, but no paper is.
    assert len(distinct) <= read[-1] < len(distinct) + min(papers)
    for example in questions:
        (scores,) = scrolls.log_likelihoods(
            Scorer(loaded.model, Limits(), share=False), [asked[example.id]], [prompts.answers(example)]
        )
        assert first[example.id] == ("yes" if scores[0] >= scores[1] else "no")
    again = len(read)
    assert predicted() == first
    assert read[again:] == [0, 0], "the second time everything comes from the file"


def test_real_generation_scores_teacher_and_student(
    teacher_dir: Path, student_dir: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scrolls_qasper", "scrolls_narrative_qa"):
        monkeypatch.setitem(scrolls_data.TASKS, name, replace(scrolls_data.TASKS[name], max_new_tokens=5))
    said: list[str] = []
    result = run(student_dir, data, "scrolls_qasper", "scrolls_narrative_qa", teacher=teacher_dir,
                 contexts=[300, 700], limit=2, truncate="end", out=tmp_path, ablations=True,
                 say=said.append)  # fmt: skip
    assert result.failures == {}
    assert result.models() == ["teacher", "student", "window_only", "linear_only", "untrained"]
    keys = [(s.task, s.model, s.context_tokens) for s in result.scores]
    assert len(set(keys)) == len(keys) == 2 * 5 * 2
    assert {s.num_samples for s in result.scores} == {2}
    assert (result.kind, result.settings["truncate"], result.settings["limit"]) == ("scrolls", "end", 2)
    assert result.settings["num_shots"] == {"scrolls_qasper": 2, "scrolls_narrative_qa": 0}
    assert any("documents cut at 'end'" in line for line in said)
    assert any("made for 512 tokens, contexts go up to 700" in line for line in said)
    lines = (tmp_path / "predictions/student/scrolls_qasper-700.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["validation-0", "validation-1"]
    assert read_run(result.write(tmp_path)).scores == result.scores


def test_all_seven_give_the_overall_score(
    student_dir: Path, data: str, answering: Callable[[Answer], list[list[int]]]
) -> None:
    answering(lambda ids: "under a tree")
    said: list[str] = []
    result = run(student_dir, data, "scrolls", say=said.append)
    values = {score.task: score.value for score in result.scores}
    assert values.pop("scrolls") == pytest.approx(sum(values.values()) / 7)
    assert values == pytest.approx(
        {f"scrolls_{task.folder}": 0.0 if task.folder in OUTPUTS else 100.0 for task in SCROLLS}
    )
    assert any("all seven" in line for line in said)
    answering(lambda ids: "Entailment")
    six = run(student_dir, data, *[task.name for task in SCROLLS[1:]], limit=2)
    values = {score.task: score.value for score in six.scores}
    assert "scrolls" not in values
    assert values["scrolls_contract_nli"] == 100
    assert values["scrolls_qasper"] == 0


def test_a_failed_task_leaves_the_others(
    student_dir: Path, data: str, answering: Callable[[Answer], list[list[int]]]
) -> None:
    tokenizer = load_tokenizer(student_dir)

    def answer(ids: list[int]) -> str:
        if "Hypothesis" in tokenizer.decode(ids):
            raise RuntimeError("out of memory")
        return "a hut"

    answering(answer)
    result = run(student_dir, data, "scrolls")
    assert result.failures == {"student, scrolls_contract_nli, 700 tokens": "out of memory"}
    assert {score.task for score in result.scores} == {
        task.name for task in SCROLLS if task.folder != "contract_nli"
    }


def test_a_killed_run_goes_on(
    student_dir: Path, data: str, tmp_path: Path, answering: Callable[[Answer], list[list[int]]]
) -> None:
    count = 0

    def killed(ids: list[int]) -> str:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return "under a tree"

    answering(killed)
    with pytest.raises(KeyboardInterrupt):
        run(student_dir, data, "scrolls_narrative_qa", out=tmp_path)
    path = tmp_path / "predictions/student/scrolls_narrative_qa-700.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # the kill tore the second of the two lines
    asked = answering(lambda ids: "under a tree")
    said: list[str] = []
    result = run(student_dir, data, "scrolls_narrative_qa", out=tmp_path, say=said.append)
    assert len(asked) == 2
    assert any("1 of 3 predictions are those of an earlier run" in line for line in said)
    assert [score.value for score in result.scores] == [100]
    asked.clear()
    assert run(student_dir, data, "scrolls_narrative_qa", out=tmp_path).scores == result.scores
    assert asked == []


def test_predictions_of_another_model_or_prompt_are_not_reused(
    student_dir: Path, teacher_dir: Path, data: str, tmp_path: Path,
    answering: Callable[[Answer], list[list[int]]],
) -> None:  # fmt: skip
    asked = answering(lambda ids: "x")
    run(student_dir, data, "scrolls_narrative_qa", out=tmp_path, contexts=[200])
    assert len(asked) == 3
    run(
        teacher_dir, data, "scrolls_narrative_qa", out=tmp_path, contexts=[200]
    )  # a `student` of other weights
    assert len(asked) == 6
    run(student_dir, data, "scrolls_narrative_qa", out=tmp_path, contexts=[200], truncate="end")
    assert len(asked) == 9
    run(student_dir, data, "scrolls_narrative_qa", out=tmp_path, contexts=[200])
    assert len(asked) == 9, "what was there before is still known"


def test_the_test_split_gives_a_submission_file(
    student_dir: Path, data: str, tmp_path: Path, answering: Callable[[Answer], list[list[int]]]
) -> None:
    answering(lambda ids: 'a "hut", or\nnone')
    result = run(student_dir, data, "scrolls", split="test", out=tmp_path)
    assert result.scores == []
    assert result.failures == {}
    with open(tmp_path / "submission/student-700.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["Task", "ID", "Prediction"]
    assert [row[:2] for row in rows] == [[t.folder, f"test-{i}"] for t in SCROLLS for i in range(3)]
    assert {row[2] for row in rows} == {'a "hut", or\nnone'}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"limit": 0}, "--limit 0"),
        ({"contexts": []}, "--contexts 0"),
        ({"contexts": [2048, 0]}, "--contexts 0"),
        ({"contexts": [700, 80]}, "--contexts 80: is too small for scrolls_qasper: question 'validation-0'"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0"),
        ({"truncate": "head"}, "--truncate head.* middle, end"),
        ({"split": "dev"}, "--split dev.* validation"),
        ({"split": "test"}, "hidden labels.* -o"),
        ({"tasks": ["scrolls_qaspar"]}, "scrolls_qasper"),
        ({"data": "nowhere"}, "nowhere: is no folder"),
        ({"model": Path("nowhere")}, "nowhere"),
        ({"teacher": Path("nowhere")}, "nowhere"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    student_dir: Path, data: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], named: str
) -> None:
    monkeypatch.setattr(scrolls, "contenders", lambda *_, **__: pytest.fail("a model was loaded"))
    arguments = {"model": student_dir, "data": data, "tasks": ["scrolls_qasper"], **options}
    tasks = arguments.pop("tasks")
    with pytest.raises(UserError, match=named):
        run(arguments.pop("model"), arguments.pop("data"), *tasks, **arguments)


def test_a_place_that_cannot_be_written_is_named(student_dir: Path, data: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SupraError, match="file: cannot be made"):
        run(student_dir, data, "scrolls_qasper", out=tmp_path / "file")


def test_a_longer_answer_is_another_prompt(
    student_dir: Path, data: str, tmp_path: Path, answering: Callable[[Answer], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = answering(lambda ids: "x")
    run(student_dir, data, "scrolls_narrative_qa", out=tmp_path)
    longer = replace(SCROLLS[4], max_new_tokens=40)
    monkeypatch.setitem(scrolls_data.TASKS, longer.name, longer)
    run(student_dir, data, "scrolls_narrative_qa", out=tmp_path)
    assert asked[:3] == asked[3:], "the prompts are short enough to be the same"
