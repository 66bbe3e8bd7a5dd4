"""ListOps: an independent parser agrees with every label, and the draws follow the published rules."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supra.errors import UserError
from supra_eval.lra.data import listops
from supra_eval.lra.data.folder import rows_of
from supra_eval.lra.data.summary import summarise
from supra_eval.lra.task import Examples

APPLY = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def words(examples: Examples, row: int) -> list[str]:
    return [listops.WORDS[token] for token in examples.inputs[row, : examples.lengths[row]]]


def parse(expression: list[str]) -> tuple[int, int, int]:
    """Value, depth and largest number of arguments of an expression, by a stack of its own."""
    stack: list[tuple[str, list[int]]] = []
    depth = largest = 0
    for number, word in enumerate(expression):
        if word in APPLY:
            stack.append((word, []))
            depth = max(depth, len(stack) + 1)  # its arguments lie one deeper
            continue
        if word == "]":
            operator, values = stack.pop()
            assert len(values) >= 2
            largest = max(largest, len(values))
            value = APPLY[operator](values)
        else:
            value = int(word)
        if not stack:
            assert number == len(expression) - 1, "something stands behind the end"
            return value, depth, largest
        stack[-1][1].append(value)
    raise AssertionError("a bracket is open at the end")


def parse_original(text: str) -> int:
    """The value of the form with a pair of parentheses an argument, by recursion over the pairs."""
    tokens = text.split()

    def read(at: int) -> tuple[object, int]:
        if tokens[at] != "(":
            return (int(tokens[at]) if tokens[at].isdigit() else tokens[at]), at + 1
        left, at = read(at + 1)
        right, at = read(at)
        assert tokens[at] == ")"
        if right == "]":
            assert isinstance(left, tuple)
            return APPLY[left[0]](left[1]), at + 1
        return ((*left[:1], [*left[1], right]) if isinstance(left, tuple) else (left, [right])), at + 1

    value, end = read(0)
    assert end == len(tokens) and isinstance(value, int)
    return value


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(4, 80), st.integers(2, 60), st.integers(2, 10), st.integers(2, 10))
def test_labels_and_rules(seed: int, least: int, room: int, depth: int, args: int) -> None:
    try:
        task = listops.make(
            seed=seed, train=20, validation=5, test=5, min_length=least, max_length=least + room,
            max_depth=depth, max_args=args,
        )  # fmt: skip
    except UserError:
        return  # so deep and wide no such expressions exist
    for split in (task.train, task.validation, task.test):
        for row in range(len(split)):
            expression = words(split, row)
            value, found_depth, found_args = parse(expression)
            assert value == split.labels[row]
            assert least < len(expression) < least + room
            assert found_depth <= depth and found_args <= args
            assert not split.inputs[row, split.lengths[row] :].any()


def test_evaluates_by_hand() -> None:
    operator = np.array([0, 1, 2, 2, 3])  # MIN, MAX, MED of four, MED of three, SM
    parent = np.repeat(np.arange(5), [2, 2, 4, 3, 3])
    value = np.array([4, 2, 4, 2, 9, 2, 5, 4, 9, 0, 3, 9, 9, 4])
    assert listops.evaluate(operator, parent, value).tolist() == [2, 4, 4, 3, 2]


def test_the_original_form() -> None:
    tokens = [listops.WORDS.index(word) for word in ["[MAX", "2", "[SM", "8", "7", "]", "3", "]"]]
    text = listops.source(np.array(tokens, dtype=np.uint8))
    assert text == "( ( ( ( [MAX 2 ) ( ( ( [SM 8 ) 7 ) ] ) ) 3 ) ] )"
    assert parse_original(text) == 5
    task = listops.make(seed=3, train=50, validation=5, test=5, min_length=10, max_length=100)
    for row in range(len(task.train)):
        text = listops.source(task.train.inputs[row, : task.train.lengths[row]])
        assert text.replace("(", "").replace(")", "").split() == words(task.train, row)
        assert parse_original(text) == task.train.labels[row]


def test_no_expression_twice_and_test_does_not_hang_on_train() -> None:
    kwargs = dict(seed=1, validation=100, test=100, min_length=4, max_length=10)
    small, large = listops.make(train=100, **kwargs), listops.make(train=700, **kwargs)
    rows = [rows_of(split) for split in (large.train, large.validation, large.test)]
    assert [len(row) for row in rows] == [700, 100, 100] and len(set().union(*rows)) == 900
    for split in ("test", "validation"):
        assert np.array_equal(getattr(small, split).inputs, getattr(large, split).inputs)
    assert np.array_equal(small.train.labels, large.train.labels[:100])
    again = listops.make(train=700, **kwargs)
    assert np.array_equal(again.train.inputs, large.train.inputs)
    assert not np.array_equal(listops.make(train=700, **kwargs | {"seed": 2}).test.labels, large.test.labels)


def test_as_often_as_a_plain_recursion_draws_them() -> None:
    rng = random.Random(0)

    def tree(depth: int) -> list[str]:
        if depth == 6 or (depth > 1 and rng.random() > 0.25):
            return [str(rng.randrange(10))]
        inner = [word for _ in range(rng.randint(2, 10)) for word in tree(depth + 1)]
        return [rng.choice(list(APPLY)), *inner, "]"]

    def kept(expression: list[str]) -> bool:
        return 10 < len(expression) < 60

    plain = [expression for expression in (tree(1) for _ in range(12_000)) if kept(expression)]
    ours = [
        [listops.WORDS[token] for token in tokens]
        for tokens, _ in listops.draw(np.random.default_rng(0), 12_000, 10, 60, 6, 10)
    ]
    assert len(ours) / len(plain) == pytest.approx(1, abs=0.05)
    for measure in (len, lambda e: e.count("]"), lambda e: e.count("7"), lambda e: e.count("[MED")):
        ours_mean, plain_mean = (np.mean([measure(e) for e in rows]) for rows in (ours, plain))
        deviation = np.std([measure(e) for e in plain]) * np.sqrt(1 / len(ours) + 1 / len(plain))
        assert abs(ours_mean - plain_mean) < 4 * deviation


def test_trivial_baselines_are_the_published_ones() -> None:
    """Measured elsewhere on 12,000 examples of full length: 16.9 % and 35.5 %."""
    task = listops.make(seed=0, train=2_000, validation=100, test=1_000)
    assert task.train.lengths.min() > 500 and task.train.lengths.max() < 2_000
    scores = summarise(task)["baselines"]
    assert scores["majority class"] == pytest.approx(0.169, abs=0.035)
    assert scores["heuristic on the root operator"] == pytest.approx(0.355, abs=0.045)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_length": 50, "max_length": 51},
        {"max_depth": 1},
        {"test": 0},
        {"max_length": 6, "min_length": 3, "max_args": 2},
    ],
)
def test_refuses_what_cannot_be_had(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        listops.make(
            **dict(seed=0, train=2_000, validation=10, test=10, min_length=10, max_length=60) | wrong
        )


def test_tsv_files(tmp_path: Path) -> None:
    task = listops.make(seed=0, train=3, validation=1, test=1, min_length=4, max_length=30)
    listops.write_tsv(task, tmp_path)
    lines = (tmp_path / "basic_train.tsv").read_text().splitlines()
    assert lines[0] == "Source\tTarget" and len(lines) == 4
    assert [int(line.split("\t")[1]) for line in lines[1:]] == task.train.labels.tolist()
