"""Every recall task fits its context, is the same for the same seed, and has an answer that its text supports."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supra.errors import UserError
from supra.loading import load_tokenizer
from supra_eval.length.filler import NEUTRAL, Filler, count_tokens, fit, made_up_words, read_filler
from supra_eval.length.recall_tasks import (
    MQAR_QUERIES,
    NUM_COMMON,
    TASKS,
    Example,
    make_example,
    require_depths,
    require_tasks,
    score,
)

FILLER = Filler()


@pytest.fixture(scope="module")
def tokenizer(teacher_dir: Path) -> Any:
    return load_tokenizer(teacher_dir)


def make(tokenizer: Any, task: str, context: int = 3000, sample: int = 0, **options: Any) -> Example:
    return make_example(
        task, tokenizer, context, **{"seed": 0, "sample": sample, "filler": FILLER, **options}
    )


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(TASKS)), st.integers(2200, 5000), st.integers(0, 10_000))
def test_prompt_and_answer_fit_the_context_and_fill_it(
    tokenizer: Any, task: str, context: int, seed: int
) -> None:
    example = make(tokenizer, task, context, seed=seed)
    used = count_tokens(tokenizer, example.prompt) + example.new_tokens
    # A byte is a token here: one more sentence, pair or triple of words would not have fitted.
    assert context - 60 <= used <= context
    for answer in example.answers:
        assert count_tokens(tokenizer, answer) <= example.new_tokens


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_fixes_the_example(tokenizer: Any, task: str) -> None:
    assert make(tokenizer, task) == make(tokenizer, task)
    different = {make(tokenizer, task).prompt, make(tokenizer, task, sample=1).prompt}
    assert len(different | {make(tokenizer, task, seed=1).prompt}) == 3


@pytest.mark.parametrize("task", TASKS)
def test_a_context_that_is_too_short_says_what_it_needs(tokenizer: Any, task: str) -> None:
    with pytest.raises(
        UserError, match=f"too short for the task {task}, which needs (\\d+) tokens"
    ) as caught:
        make(tokenizer, task, 20)
    needed = int(re.findall(r"needs (\d+)", str(caught.value))[0])
    assert needed > 20


def test_passkey_states_and_asks(tokenizer: Any) -> None:
    example = make(tokenizer, "passkey")
    [key] = example.answers
    assert f"The pass key is {key}." in example.prompt and example.prompt.endswith("The pass key is")
    assert re.fullmatch(r"\d{5}", key)


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_needle_lies_at_its_depth(tokenizer: Any, depth: float) -> None:
    example = make(tokenizer, "needle", depth=depth)
    text = example.prompt.split("\n")[1]
    place = text.index(f"is {example.answers[0]}.") / len(text)
    assert place == pytest.approx(depth, abs=0.03)
    assert example.prompt.count(" is ") >= 2 and len(re.findall(r"\d{7}", example.prompt)) == 1


def test_multi_key_asks_for_one_of_four(tokenizer: Any) -> None:
    example = make(tokenizer, "multi_key")
    stated = dict(re.findall(r"The number of (\w+) is (\d{7})\.", example.prompt))
    asked = re.findall(r"The number of (\w+) is$", example.prompt)[0]
    assert len(stated) == 4 and stated[asked] == example.answers[0]


def test_variables_follow_the_chain_in_order(tokenizer: Any) -> None:
    for sample in range(20):
        example = make(tokenizer, "variables", sample=sample)
        values: dict[str, str] = {}
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", example.prompt):
            values[name] = values.get(value, value)  # a name must have come before
        asked = re.findall(r"have the value (\d+)", example.prompt)[0]
        assert set(values.values()) == {asked}
        assert list(values) == list(example.answers)


def test_common_words_are_the_most_common(tokenizer: Any) -> None:
    example = make(tokenizer, "common_words")
    listed = re.findall(r"\d+\. (\w+)", example.prompt)
    counts = Counter(listed).most_common()
    assert {word for word, _ in counts[:NUM_COMMON]} == set(example.answers)
    assert {count for _, count in counts} == {12, 2}
    assert example.chance == pytest.approx(NUM_COMMON / len(counts))
    assert listed[:NUM_COMMON] != list(example.answers), "shuffled"


def test_associative_recall_asks_for_pairs_that_were_stated(tokenizer: Any) -> None:
    for context in (300, 340, 3000):
        example = make(tokenizer, "associative_recall", context)
        stated, asked = example.prompt.split("\nRecall them.\n")
        pairs = dict(re.findall(r"(\w+): (\d+)", stated))
        questions = re.findall(r"(\w+): (\d+)", asked)
        assert len({word for word, _ in questions}) == MQAR_QUERIES
        assert all(pairs[word] == number for word, number in questions)
        spans = [example.prompt[start:end] for start, end in example.spans]
        assert spans == [number for _, number in questions]


def test_arithmetic_stays_within_ten_and_is_exact(tokenizer: Any) -> None:
    results = Counter()
    for sample in range(60):
        example = make(tokenizer, "arithmetic", 200, sample=sample)
        chain = example.prompt.split("\n")[-1].removesuffix("=")
        value = int(chain[0])
        for sign, digit in re.findall(r"([+-])(\d)", chain[1:]):
            value += int(sign + digit)
            assert 0 <= value <= 9 and digit != "0"
        assert example.answers == (str(value),)
        results[value] += 1
    assert len(results) == 10, "every digit is an answer, so that guessing scores a tenth"


def test_scores() -> None:
    one = Example("", ("48213",), 0.0, 8)
    assert score(one, " 48213. Remember") == 1
    assert [score(one, text) for text in ("482134", "the 48213", "", "48 213")] == [0, 0, 0, 0]
    several = Example("", ("abc", "def", "ghi", "jkl"), 0.0, 8)
    assert score(several, "abc, jkl and abc") == 0.5
    assert score(several, "abcdef") == 0


def test_unknown_tasks_and_depths_are_named(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="task paskey: is unknown") as caught:
        require_tasks(["passkey", "paskey"])
    assert "Did you mean passkey?" in caught.value.mend
    with pytest.raises(UserError, match="is empty"):
        require_tasks([])
    with pytest.raises(UserError, match=r"--depths 1.5: is out of range"):
        require_depths([0, 1, 1.5])
    with pytest.raises(UserError, match=r"--depths -0\.1"):
        make(tokenizer, "needle", depth=-0.1)


@given(st.integers(0, 400), st.integers(1, 9), st.integers(0, 50))
def test_fit_finds_the_largest(budget: int, unit: int, base: int) -> None:
    found = fit(lambda n: "x" * (base + unit * n), len, budget)
    if base > budget:
        assert found is None
    else:
        assert found is not None
        assert found[0] == (budget - base) // unit and len(found[1]) == base + unit * found[0]


def test_made_up_words_differ() -> None:
    words = list(islice(made_up_words(random.Random(0)), 5000))
    assert len(set(words)) == 5000 and all(re.fullmatch(r"([b-z][aeiou]){3}", word) for word in words)


def test_filler_of_books(tmp_path: Path) -> None:
    assert read_filler([]).sentences == NEUTRAL
    (tmp_path / "a.txt").write_text("One goes\nhome. Two stay!  Who\n\nasks? Nobody")
    filler = read_filler([str(tmp_path / "a.txt")])
    assert filler.sentences == ("One goes home.", "Two stay!", "Who asks?", "Nobody")
    assert filler.take(3, 3) == ["Nobody", "One goes home.", "Two stay!"]
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(UserError, match="holds no sentence"):
        read_filler([str(tmp_path / "b.txt")])
