"""Chains of ±: the label is the sum, by either rule, at any length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supra.errors import UserError
from supra_eval.lra.data import chain
from supra_eval.lra.data.folder import rows_of
from supra_eval.lra.data.summary import summarise
from supra_eval.lra.task import Examples


def steps(examples: Examples, row: int) -> tuple[int, list[int]]:
    """The digit a chain starts with and its signed steps, read off the ids as the module's comment lists them."""
    start, *rest = examples.inputs[row, : examples.lengths[row]].tolist()
    assert 1 <= start <= 10 and all(11 <= token <= 28 for token in rest)
    return start - 1, [token - 10 if token < 20 else 19 - token for token in rest]


@settings(max_examples=15)
@given(
    st.integers(0, 99), st.integers(4, 12), st.integers(0, 8), st.integers(1, 9), st.sampled_from(chain.RULES)
)
def test_the_label_is_the_sum(seed: int, least: int, more: int, largest: int, rule: str) -> None:
    task = chain.make(
        seed=seed,
        train=30,
        validation=5,
        test=5,
        train_steps=(least, least + more),
        largest_step=largest,
        rule=rule,
    )
    for split in (task.train, task.validation, task.test):
        assert split.inputs.shape[1] == 1 + least + more
        for row in range(len(split)):
            start, signed = steps(split, row)
            assert least <= len(signed) <= least + more
            assert all(1 <= abs(step) <= largest for step in signed)
            sums = np.cumsum([start, *signed])
            assert split.labels[row] == sums[-1] % 10
            if rule == "within":
                assert sums.min() >= 0 and sums.max() <= 9
            assert not split.inputs[row, split.lengths[row] :].any()


def test_a_length_for_each_split_and_no_chain_twice() -> None:
    task = chain.make(
        seed=0,
        train=300,
        validation=50,
        test=50,
        train_steps=(2, 3),
        validation_steps=(8, 8),
        test_steps=(64, 64),
    )
    assert (
        set(task.train.lengths) == {3, 4}
        and set(task.validation.lengths) == {9}
        and set(task.test.lengths) == {65}
    )
    assert len(rows_of(task.train) | rows_of(task.validation) | rows_of(task.test)) == 400
    again = chain.make(
        seed=0,
        train=100,
        validation=50,
        test=50,
        train_steps=(2, 3),
        validation_steps=(8, 8),
        test_steps=(64, 64),
    )
    assert np.array_equal(again.test.inputs, task.test.inputs)


@pytest.mark.parametrize("length", [8, 128])
def test_modulo_is_balanced_and_gives_nothing_away_at_any_length(length: int) -> None:
    task = chain.make(seed=0, train=8_000, validation=10, test=4_000, train_steps=(length, length))
    shares = np.bincount(task.test.labels, minlength=10) / len(task.test)
    assert np.abs(shares - 0.1).max() < 0.025  # 5 standard errors
    assert max(summarise(task)["baselines"].values()) < 0.125


def test_what_is_said_of_the_weaker_kinds() -> None:
    ones = chain.make(seed=0, train=4_000, validation=10, test=2_000, largest_step=1)
    start = ones.test.inputs[:, 0].astype(int) - 1
    assert np.array_equal((ones.test.labels - start - 32) % 2, np.zeros(2_000))
    within = chain.make(seed=0, train=4_000, validation=10, test=2_000, rule="within")
    assert summarise(within)["baselines"]["heuristic on the start and the last step"] > 0.17


@pytest.mark.parametrize(
    "wrong",
    [{"rule": "wrap"}, {"largest_step": 0}, {"train_steps": (3, 2)}, {"train_steps": (1, 1)}, {"test": 0}],
)
def test_refuses_what_cannot_be_had(wrong: dict) -> None:
    with pytest.raises(UserError):  # of one step there are 180 chains only
        chain.make(**dict(seed=0, train=300, validation=5, test=5) | wrong)
