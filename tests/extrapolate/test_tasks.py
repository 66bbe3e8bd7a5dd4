"""Tasks: answers worked out again from the tokens alone, any length, seeds, and nothing of the test in training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supra.errors import UserError
from supra_eval.extrapolate.chars import Chars
from supra_eval.extrapolate.generated import Chain, Passkey, Recall
from supra_eval.extrapolate.task import UNSCORED, Batch, Task, baselines

TASKS = {"chain": Chain(), "recall": Recall(), "passkey": Passkey()}


@given(
    seed=st.integers(0, 99), length=st.integers(2, 70), rule=st.sampled_from(["within", "modulo"]),
    largest=st.integers(1, 9),
)  # fmt: skip
def test_a_chain_asks_for_the_running_result(seed: int, length: int, rule: str, largest: int) -> None:
    task = Chain(rule=rule, largest_step=largest).make()  # type: ignore[arg-type]
    tokens, targets = task.train_batch(seed, 0, 3, length)
    assert tokens.shape == targets.shape == (3, length)
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        # Ids: 1 to 10 are the digits 0 to 9, 11 to 19 are +1 to +9, 20 to 28 are −1 to −9.
        result = row[0] - 1
        assert 0 <= result <= 9 and asked[0] == UNSCORED
        for token, target in zip(row[1:], asked[1:], strict=True):
            step = token - 10 if token < 20 else 19 - token
            assert 1 <= abs(step) <= largest
            result += step
            assert rule == "modulo" or 0 <= result <= 9
            assert target == result % 10


@given(seed=st.integers(0, 99), length=st.integers(9, 70), rate=st.sampled_from([0.1, 0.5, 1.0]))
def test_recall_asks_for_the_value_of_a_pair_shown_before(seed: int, length: int, rate: float) -> None:
    task = Recall(pairs=4, keys=6, values=5, query_rate=rate).make()
    tokens, targets = task.train_batch(seed, 0, 3, length)
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[0:8:2], row[1:8:2], strict=True))
        assert len(pairs) == 4 and set(pairs) <= set(range(1, 7)) and set(pairs.values()) <= set(range(7, 12))
        assert asked[:8] == [UNSCORED] * 8
        assert asked[-1] != UNSCORED and (rate < 1 or UNSCORED not in asked[8:])
        for token, target in zip(row[8:], asked[8:], strict=True):
            assert target == (UNSCORED if token == 0 else pairs[token] - 7)


@given(seed=st.integers(0, 99), length=st.integers(7, 70))
def test_the_passkey_stands_somewhere_and_is_asked_for_at_the_end(seed: int, length: int) -> None:
    task = Passkey(digits=3, filler=4).make()
    tokens, targets = task.train_batch(seed, 0, 4, length)
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        at = row.index(10)
        key = row[at + 1 : at + 4]
        assert all(digit < 10 for digit in key) and asked[-3:] == key
        assert row[-3:] == [11, *key[:-1]]
        filler = row[:at] + row[at + 4 : -3]
        assert len(filler) == length - 7 and all(12 <= token < 16 for token in filler)
        assert asked[:-3] == [UNSCORED] * (length - 3)


def test_the_key_may_stand_anywhere() -> None:
    tokens = Passkey(digits=3).make().train_batch(0, 0, 2000, 20).tokens
    found = (tokens == 10).nonzero()[:, 1]
    assert found.unique().tolist() == list(range(20 - 6))


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_and_a_step_give_one_batch_and_the_test_is_none_of_them(name: str) -> None:
    task = TASKS[name].make()
    again = TASKS[name].make()
    first = task.train_batch(3, 7, 4, 40)
    assert all(torch.equal(a, b) for a, b in zip(first, again.train_batch(3, 7, 4, 40), strict=True))
    assert not torch.equal(first.tokens, task.train_batch(3, 8, 4, 40).tokens)
    assert not torch.equal(first.tokens, task.train_batch(4, 7, 4, 40).tokens)
    tested = {row.numpy().tobytes() for row in task.test_batch(64, 40).tokens}
    trained = {
        row.numpy().tobytes()
        for seed in (0, 1)
        for step in range(50)
        for row in task.train_batch(seed, step, 16, 40).tokens
    }
    assert len(tested) == 64 and len(trained) == 1600 and not tested & trained


@pytest.mark.parametrize("name", TASKS)
def test_the_shortest_length_still_asks_something(name: str) -> None:
    settings = TASKS[name]
    assert (settings.make().train_batch(0, 0, 2, settings.least_tokens).targets != UNSCORED).any(1).all()


@pytest.fixture
def texts(tmp_path: Path) -> Chars:
    for number in range(3):
        lines = [f"text {number} line {line}, which is unlike all others." for line in range(200)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    return Chars(train=(f"{tmp_path}/*.txt",), heldout=(f"{tmp_path}/2.txt",), unwrap=False)


def test_the_next_byte_is_asked_and_no_test_text_is_trained_on(texts: Chars) -> None:
    task = texts.make(longest=64)
    tokens, targets = task.train_batch(0, 0, 200, 60)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    trained = [bytes(row.tolist()) for row in tokens]
    assert not any(b"text 2" in row for row in trained)
    assert {word in row for row in trained for word in (b"text 0", b"text 1")} == {True, False}
    tested = bytes(task.test_batch(8, 64).tokens.flatten().tolist())
    assert b"text 2" in tested and b"text 0" not in tested and b"text 1" not in tested


def test_every_length_is_tested_on_the_same_bytes(texts: Chars) -> None:
    task = texts.make(longest=64)
    batches = {length: task.test_batch(5, length) for length in (16, 32, 64)}
    assert {length: tuple(b.tokens.shape) for length, b in batches.items()} == {
        16: (20, 16), 32: (10, 32), 64: (5, 64),
    }  # fmt: skip
    assert len({bytes(b.targets.flatten().tolist()) for b in batches.values()}) == 1


def test_texts_that_are_too_short_or_missing_are_named(texts: Chars, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tasks\.chars\.heldout.*bytes"):
        texts.make(longest=64).test_batch(1000, 64)
    with pytest.raises(UserError, match=r"tasks\.chars\.train.*bytes"):
        texts.make(longest=10**6)
    with pytest.raises(UserError, match=r"tasks\.chars\.heldout .*no file matches"):
        texts.model_copy(update={"heldout": (f"{tmp_path}/9.txt",)}).make(longest=64)


def test_trivial_answers_score_what_counting_says() -> None:
    def batch(*rows: list[int]) -> Batch:
        return Batch(torch.zeros(len(rows), len(rows[0])), torch.tensor(rows))

    accuracy = Task("t", 4, 4, "accuracy", TASKS["chain"].make().draw)
    asked = batch([UNSCORED, 1, 1], [3, 1, UNSCORED])
    assert baselines(accuracy, asked) == {"guessing": 25.0, "commonest class": 75.0}
    exact = Task("t", 10, 10, "exact match", accuracy.draw)
    assert baselines(exact, batch([UNSCORED, 1, 1])) == {"guessing": pytest.approx(1.0)}
    text = Task("t", 8, 8, "perplexity", accuracy.draw)
    assert baselines(text, batch([0, 1, 2, 3])) == {"guessing": 8.0, "class frequencies": pytest.approx(4.0)}
    assert math.isfinite(baselines(text, batch([0, 0]))["class frequencies"])
