"""Groups of tasks: what is in them, how names are resolved, which number is quoted."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from supra.errors import SupraError, UserError
from supra_eval.harness import task_groups
from supra_eval.harness.task_groups import GROUPS, Entry, resolve


def test_the_paper_s_tasks_and_metrics() -> None:
    # "5-shot results are used for MMLU. Norm results are used for PIQA, HellaSwag, ARC-C" (TRI-ML/linear_open_lm).
    assert {
        entry.task: (entry.num_fewshot, entry.metric, entry.chance) for entry in resolve(["supra-paper"])
    } == {
        "hellaswag": (0, "acc_norm", 0.25),
        "piqa": (0, "acc_norm", 0.5),
        "winogrande": (0, "acc", 0.5),
        "arc_easy": (0, "acc", 0.25),
        "arc_challenge": (0, "acc_norm", 0.25),
        "mmlu": (5, "acc", 0.25),
    }


def test_quick_is_a_few_documents_of_cheap_tasks() -> None:
    quick = resolve(["quick"])
    assert [entry.task for entry in quick] == ["piqa", "arc_easy", "hellaswag"]
    assert {entry.max_documents for entry in quick} == {200}


def test_each_task_comes_once_in_the_order_of_the_names() -> None:
    assert [entry.task for entry in resolve(["winogrande", "piqa", "winogrande"])] == ["winogrande", "piqa"]


def test_a_name_alone_leaves_the_shots_to_the_task() -> None:
    (entry,) = resolve(["mmlu"])
    assert (entry.num_fewshot, entry.metric) == (None, "acc")


def test_one_task_in_two_ways_is_refused() -> None:
    with pytest.raises(UserError, match="task mmlu: is asked for twice"):
        resolve(["mmlu", "supra-paper"])


def test_no_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"the tasks: are none.*supra-paper"):
        resolve([])


def test_a_task_of_lm_eval_that_has_no_entry_is_taken_as_it_is() -> None:
    assert resolve(["boolq-seq2seq"]) == (Entry("boolq-seq2seq"),)


def test_a_subject_of_mmlu_is_quoted_and_guessed_like_the_whole() -> None:
    assert resolve(["mmlu_anatomy"]) == (Entry("mmlu_anatomy", metric="acc", chance=0.25),)


def test_an_unknown_name_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = task_groups._manager(usual=True)
    whole = SimpleNamespace(task_index=usual.task_index, all_tasks=[*usual.task_index, "blimp"])
    monkeypatch.setattr(task_groups, "_manager", lambda *, usual: whole)
    with pytest.raises(
        UserError, match=r"task hellaswagg: is unknown, to lm-eval too. Did you mean hellaswag"
    ):
        resolve(["hellaswagg"])
    with pytest.raises(UserError, match="Did you mean supra-paper"):
        resolve(["supra_paper"])


def test_a_tag_is_left_to_the_whole_index(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tasks of one tag lie in many folders, of which the small index has a few: it would give a part of the tag.
    usual = task_groups._manager(usual=True)
    assert usual.task_index["lambada"].kind.name == "TAG"
    small = SimpleNamespace(task_index=usual.task_index)
    monkeypatch.setattr(task_groups, "_manager", lambda *, usual: small if usual else "whole")
    assert task_groups.task_manager(["piqa", "lambada"]) == "whole"
    assert task_groups.task_manager(["piqa", "mmlu"]) is small


def test_the_small_index_knows_every_entry() -> None:
    usual = task_groups._manager(usual=True)
    for task, (entry, _) in task_groups._KNOWN.items():
        assert entry.task == task
        assert usual.task_index[task].kind.name in ("TASK", "GROUP")
    assert not set(GROUPS) & set(usual.task_index)


ROW = {
    "alias": "piqa",
    "acc,none": 0.5,
    "acc_stderr,none": 0.1,
    "acc_norm,none": 0.6,
    "acc_norm_stderr,none": 0.1,
}


def test_the_quoted_number() -> None:
    assert Entry("piqa", metric="acc_norm").key_in(ROW) == "acc_norm,none"
    assert Entry("piqa").key_in(ROW) == "acc,none"
    strict = Entry("gsm8k", metric="exact_match", answer_filter="strict-match")
    assert strict.key_in({"exact_match,flexible-extract": 0.2, "exact_match,strict-match": 0.1}) == (
        "exact_match,strict-match"
    )


def test_a_number_that_is_not_there_is_named() -> None:
    with pytest.raises(SupraError, match=r"task: has no f1,none \(it reports acc,none, acc_norm,none\)"):
        Entry("task", metric="f1").key_in(ROW)


def test_lm_eval_is_imported_only_when_it_is_asked() -> None:
    top = ast.parse(Path(str(task_groups.__file__)).read_text()).body
    modules = {node.module for node in top if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    assert modules
    assert not any(str(module).startswith(("lm_eval", "torch", "datasets")) for module in modules)
