"""SCROLLS' metrics against hand-worked values, lm-eval's SQuAD functions and scikit-learn's F1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supra_eval.results import Score
from supra_eval.scrolls.data import QASPER_YES_NO, SCROLLS, TASKS, Example
from supra_eval.scrolls.metrics import (
    bootstrap_stderr,
    exact_match,
    geometric_mean,
    macro_f1,
    mean_stderr,
    normalize,
    overall,
    rouge,
    score_task,
    token_f1,
)

WORDS = st.lists(
    st.sampled_from(["The", "a", "cat", "cat", "Sat,", "(on)", "mat.", "THE", "an", "don't"]), max_size=8
)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("The cat sat on a mat", ["cat on the mat"], 2 * 3 / (4 + 3)),  # articles do not count
        ("cat cat cat", ["cat dog"], 2 * 1 / (3 + 2)),  # a word counts as often as both have it
        ("blue", ["red", "blue!", "BLUE sky"], 1.0),  # the best reference counts
        ("the", ["a"], 0.0),  # nothing is left of either
        ("", ["word"], 0.0),
    ],
)
def test_token_f1_by_hand(prediction: str, references: list[str], expected: float) -> None:
    assert token_f1(prediction, references) == pytest.approx(expected)


def test_exact_match_is_of_normalised_texts() -> None:
    assert exact_match(" The answer, is  Yes. ", ["no", "answer is yes"]) == 1
    assert exact_match("answer is", ["answer is yes"]) == 0
    assert exact_match("Not  mentioned", ["Not mentioned"]) == 1


@given(WORDS, WORDS)
def test_token_f1_equals_lm_evals(prediction: list[str], reference: list[str]) -> None:
    squad = pytest.importorskip("lm_eval.tasks.qasper.metrics")
    texts = " ".join(prediction), "  ".join(reference)
    assert normalize(texts[0]) == squad.normalize_answer(texts[0])
    assert token_f1(texts[0], [texts[1]]) == pytest.approx(squad.f1_abstractive([texts[0]], [texts[1]]))


def test_rouge_by_hand_without_a_stemmer() -> None:
    one, two, longest = rouge("the cat sat", ["the cat ran fast"])
    assert one == pytest.approx(2 * 2 / (3 + 4))
    assert two == pytest.approx(2 * 1 / (2 + 3))
    assert longest == pytest.approx(2 * 2 / (3 + 4))
    assert rouge("cats", ["cat"]) == (0, 0, 0), "a stemmer would find them equal"
    # The best reference of each ROUGE: the first shares both words, the second their order.
    assert rouge("a b c", ["c b a", "a b x y"]) == pytest.approx((1.0, 0.4, 4 / 7))


def test_geometric_mean_is_of_corpus_means() -> None:
    scores = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert geometric_mean(scores) == pytest.approx((0.5 * 0.5 * 1.0) ** (1 / 3))  # each example's own is 0


def test_macro_f1_by_hand_and_as_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    # Class 0: 1 hit, named 2 and 2 times; class 1: 1 hit, named 2 and 2 times.
    assert macro_f1(np.array([[0, 0], [0, 1], [1, 0], [1, 1]])) == pytest.approx(0.5)
    for seed in range(5):
        pairs = np.random.default_rng(seed).integers(2, size=(9, 2))
        expected = metrics.f1_score(pairs[:, 1], pairs[:, 0], average="macro", labels=[0, 1], zero_division=0)
        assert macro_f1(pairs) == pytest.approx(expected)


def test_error_of_a_mean_counts_documents() -> None:
    values = [0.2, 0.9, 0.4, 0.7]
    assert mean_stderr(values, list("abcd")) == pytest.approx(np.std(values, ddof=1) / 2)
    # Asking everything twice tells nothing new; as if they were eight documents it would look more certain.
    assert mean_stderr(values * 2, list("abcd") * 2) == pytest.approx(mean_stderr(values, list("abcd")))
    assert mean_stderr([1, 1, 0, 0], list("aabb")) == pytest.approx(0.5)
    assert mean_stderr([0.1, 0.2], ["a", "a"]) is None


def test_bootstrap_agrees_with_the_analytic_error_of_a_mean() -> None:
    values = np.random.default_rng(0).random((60, 1))
    documents = [str(row // 2) for row in range(60)]
    drawn = bootstrap_stderr(geometric_mean, values, documents, seed=1)
    assert drawn == pytest.approx(mean_stderr(values[:, 0].tolist(), documents), rel=0.1)
    assert drawn == bootstrap_stderr(geometric_mean, values, documents, seed=1)
    assert drawn != bootstrap_stderr(geometric_mean, values, documents, seed=2)
    assert bootstrap_stderr(geometric_mean, values, ["one"] * 60, seed=1) is None


def examples(*golds: str) -> list[Example]:
    return [Example(str(row), "?", f"document {row}", (gold,)) for row, gold in enumerate(golds)]


def test_yes_no_scores_stand_beside_the_majority() -> None:
    golds = examples("yes", "yes", "yes", "no")
    accuracy, f1 = score_task(QASPER_YES_NO, [(gold, "yes") for gold in golds], "student", 1024, seed=0)
    assert (accuracy.task, accuracy.metric, accuracy.model, accuracy.context_tokens, accuracy.num_samples) == (
        "qasper_yes_no", "accuracy", "student", 1024, 4,
    )  # fmt: skip
    assert (accuracy.value, accuracy.chance) == (75, 75)
    assert accuracy.stderr == pytest.approx(100 * np.std([1, 1, 1, 0], ddof=1) / 2)
    assert f1.metric == "macro_f1"
    assert f1.value == f1.chance == pytest.approx(100 * (6 / 7) / 2)


def test_chance_of_the_choice_tasks() -> None:
    nli = examples("Entailment", "Not mentioned", "Entailment")
    (entailed,) = score_task(TASKS["scrolls_contract_nli"], [(e, "entailment.") for e in nli], "m", 64, 0)
    assert entailed.value == entailed.chance == pytest.approx(200 / 3)
    (quality,) = score_task(TASKS["scrolls_quality"], [(examples("A tree")[0], "tree")], "m", 64, 0)
    assert (quality.metric, quality.value, quality.chance, quality.stderr) == ("exact_match", 100, 25, None)


def test_a_summary_is_scored_by_the_geometric_mean() -> None:
    (row,) = score_task(
        TASKS["scrolls_qmsum"], [(examples("the cat ran fast")[0], "the cat sat")], "m", 64, 0
    )
    assert row.metric == "rouge_geometric_mean"
    assert row.value == pytest.approx(100 * (4 / 7 * 2 / 5 * 4 / 7) ** (1 / 3))


def test_hidden_labels_give_no_score() -> None:
    hidden = replace(examples("x")[0], references=())
    assert score_task(TASKS["scrolls_qasper"], [(hidden, "x")], "m", 64, 0) == []


def test_the_overall_score_needs_all_seven() -> None:
    scores = [Score(task.name, "x", "m", 10.0 * i, 7.0, 2, 64) for i, task in enumerate(SCROLLS)]
    whole = overall(scores, "m", 64)
    assert whole is not None
    assert (whole.task, whole.value, whole.num_samples) == ("scrolls", 30, 14)
    assert whole.stderr == pytest.approx(7.0 / 7**0.5)
    assert overall(scores[1:], "m", 64) is None
    assert overall(scores, "m", 128) is None
    assert overall(scores, "other", 64) is None
