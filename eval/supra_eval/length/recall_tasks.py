"""Recall tasks of any length, generated from a seed and scored exactly: hide something, ask for it at the end.

passkey (arXiv 2305.16300, section 4), needle in a haystack by depth, and RULER's multi-key needle, variable tracking
and common words (arXiv 2404.06654, section 3); multi-query associative recall as text (arXiv 2312.04927, section 3);
chains of additions and subtractions within ten (arXiv 2312.17044, appendix A.3). Prompts and pseudo-words are our own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from supra.errors import UserError
from supra.recipe_io import require_known

from .filler import Filler, count_tokens, fit, made_up_words

MQAR_QUERIES, RECALL = 8, "\nRecall them.\n"
NUM_KEYS = 4
NUM_HOPS = 4
NUM_COMMON, COMMON_TIMES, UNCOMMON_TIMES = 10, 12, 2


@dataclass(frozen=True)
class Example:
    """A prompt that leaves room for its answer, and what must be found in the continuation.

    `answers` are words of which the fraction found counts; one alone must stand at the continuation's start. Where
    there are `spans` instead, the prompt holds its answers, in these characters [start, end), and the fraction that
    the model would have written itself, token for token, counts.
    """

    prompt: str
    answers: tuple[str, ...]
    chance: float
    new_tokens: int
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Kit:
    """What an example is made of: room, tokenizer, filler and random choices; `depth` 0–1 is from start to end."""

    chooser: random.Random
    tokenizer: Any
    context_tokens: int
    filler: Filler
    depth: float

    def count(self, text: str) -> int:
        """Tokens of `text` as it will be read."""
        return count_tokens(self.tokenizer, text)


def _fitted(kit: Kit, task: str, build: Callable[[int], str], reserved: int) -> tuple[int, str]:
    """The longest build(n) that leaves `reserved` tokens of the context, or a UserError that says what it needs."""
    found = fit(build, kit.count, kit.context_tokens - reserved)
    if found is None:
        raise UserError(
            f"--contexts {kit.context_tokens}",
            f"is too short for the task {task}, which needs {kit.count(build(0)) + reserved} tokens",
            "Use longer contexts, or leave the task out",
        )
    return found


def _answer_tokens(kit: Kit, answers: Sequence[str]) -> int:
    """Room for the answers with a separator each, and a few tokens for another way to write them."""
    return sum(kit.count(f" {answer},") for answer in answers) + 4


def _hide(
    kit: Kit, task: str, head: str, facts: Sequence[tuple[float, str]], tail: str, reserved: int
) -> str:
    """`head`, filler with the facts' sentences at their depths, and `tail`, as long as fits."""
    start = kit.chooser.randrange(len(kit.filler.sentences))

    def build(count: int) -> str:
        sentences = kit.filler.take(start, count)
        for depth, fact in sorted(facts, reverse=True):  # the deepest first: the others' places stay right
            sentences.insert(round(depth * count), fact)
        return "\n".join([head, " ".join(sentences), tail])

    return _fitted(kit, task, build, reserved)[1]


def passkey(kit: Kit) -> Example:
    """Five digits that are called important, asked for at the end."""
    key = str(kit.chooser.randint(10_000, 99_999))
    head = "There is important information hidden in the text below. Find it and memorise it."
    fact = f"The pass key is {key}. Remember it. {key} is the pass key."
    reserved = _answer_tokens(kit, [key])
    prompt = _hide(
        kit, "passkey", head, [(kit.depth, fact)], "What is the pass key? The pass key is", reserved
    )
    return Example(prompt, (key,), 1 / 90_000, reserved)


def needle(kit: Kit) -> Example:
    """One number of seven digits under a name that stands once in the text."""
    return _numbers(kit, "needle", 1)


def multi_key(kit: Kit) -> Example:
    """As `needle`, with numbers of three other names strewn in that must not be given."""
    return _numbers(kit, "multi_key", NUM_KEYS)


def _numbers(kit: Kit, task: str, num_keys: int) -> Example:
    words = made_up_words(kit.chooser)
    keys = [next(words) for _ in range(num_keys)]
    numbers = [str(kit.chooser.randint(1_000_000, 9_999_999)) for _ in keys]
    depths = [kit.depth, *(kit.chooser.random() for _ in keys[1:])]
    facts = [
        (depth, f"The number of {key} is {number}.")
        for depth, key, number in zip(depths, keys, numbers, strict=True)
    ]
    head = "Some numbers are hidden in the text below. Memorise them."
    tail = f"What is the number of {keys[0]}? The number of {keys[0]} is"
    reserved = _answer_tokens(kit, numbers[:1])
    return Example(_hide(kit, task, head, facts, tail, reserved), (numbers[0],), 1 / 9_000_000, reserved)


def variables(kit: Kit) -> Example:
    """A value handed through a chain of variables, VAR b = VAR a; all five that have it are asked for."""
    names = kit.chooser.sample(
        [f"{a}{b}{c}" for a in "KQVXZ" for b in "BDFGH" for c in "JLMNP"], NUM_HOPS + 1
    )
    value = str(kit.chooser.randint(10_000, 99_999))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    depths = sorted(kit.chooser.random() for _ in lines)
    head = "Memorise the chain of variable assignments hidden in the text below."
    tail = (
        f"Which {len(names)} variables have the value {value}, directly or through others? "
        f"The {len(names)} variables with the value {value} are"
    )
    reserved = _answer_tokens(kit, [f"VAR {name}" for name in names])
    prompt = _hide(kit, "variables", head, list(zip(depths, lines, strict=True)), tail, reserved)
    return Example(prompt, tuple(names), len(names) / 125, reserved)


def common_words(kit: Kit) -> Example:
    """A list in which ten words stand twelve times and all others twice; the ten are asked for."""
    words = made_up_words(kit.chooser)
    common = [next(words) for _ in range(NUM_COMMON)]
    others: list[str] = []
    order = random.Random(kit.chooser.random())
    state = order.getstate()

    def build(extra: int) -> str:
        count = NUM_COMMON + extra
        while len(others) < count:
            others.append(next(words))
        listed = common * COMMON_TIMES + others[:count] * UNCOMMON_TIMES
        order.setstate(state)
        order.shuffle(listed)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
        return (
            f"Some words in the numbered list below are common. Memorise them.\n{numbered}\n"
            f"What are the {NUM_COMMON} most common words in the list? They are"
        )

    reserved = _answer_tokens(kit, [f"{i}. {word}" for i, word in enumerate(common)])
    extra, prompt = _fitted(kit, "common_words", build, reserved)
    return Example(prompt, tuple(common), NUM_COMMON / (2 * NUM_COMMON + extra), reserved)


def associative_recall(kit: Kit) -> Example:
    """As many pairs of a word and a number from 10 to 99 as fit, then eight of them once more, each number scored."""
    words = made_up_words(kit.chooser)
    pairs: list[tuple[str, int]] = []
    eighths, offset = list(range(MQAR_QUERIES)), kit.chooser.random()
    kit.chooser.shuffle(eighths)

    def build(extra: int) -> str:
        count = MQAR_QUERIES + extra
        while len(pairs) < count:
            pairs.append((next(words), kit.chooser.randint(10, 99)))
        # One from each eighth of the list: no pair is asked for twice.
        asked = [pairs[int((eighth + offset) * count / MQAR_QUERIES)] for eighth in eighths]
        return f"Memorise these pairs.\n{_listed(pairs[:count])}{RECALL}{_listed(asked)}"

    _, prompt = _fitted(kit, "associative_recall", build, 0)
    start = prompt.index(RECALL) + len(RECALL)
    spans = [(hit.start(), hit.end()) for hit in re.compile(r"\d+").finditer(prompt, start)]
    return Example(prompt, (), 1 / 90, 0, tuple(spans))


def _listed(pairs: Sequence[tuple[str, int]]) -> str:
    return "\n".join(f"{word}: {number}" for word, number in pairs)


def arithmetic(kit: Kit) -> Example:
    """A chain of + and − whose partial results stay within 0–9, equally hard at any length."""
    chooser = kit.chooser
    value = chooser.randint(0, 9)
    chain, values = [str(value)], [value]

    def build(count: int) -> str:
        while len(chain) <= count:
            # From any value, nine others are one step away: the result stays uniform over the ten digits.
            step = chooser.choice([other for other in range(10) if other != values[-1]]) - values[-1]
            chain.append(f"{'+' if step > 0 else '-'}{abs(step)}")
            values.append(values[-1] + step)
        return f"Calculate from left to right.\n3+4-5=2\n8-6+1=3\n{''.join(chain[: count + 1])}="

    reserved = kit.count("5\n") + 1
    count, prompt = _fitted(kit, "arithmetic", build, reserved)
    return Example(prompt, (str(values[count]),), 1 / 10, reserved)


TASKS: dict[str, Callable[[Kit], Example]] = {
    "passkey": passkey,
    "needle": needle,
    "multi_key": multi_key,
    "variables": variables,
    "common_words": common_words,
    "associative_recall": associative_recall,
    "arithmetic": arithmetic,
}
# Those that RULER has: its effective length is taken over them.
RULER = ("passkey", "needle", "multi_key", "variables", "common_words")


def make_example(
    task: str, tokenizer: Any, context_tokens: int, *, seed: int, sample: int, filler: Filler,
    depth: float | None = None,
) -> Example:  # fmt: skip
    """Example number `sample` of `task`, with its answer at most `context_tokens` tokens, always the same one.

    `depth` is where the asked fact of passkey, needle and multi_key stands (0 the start, 1 the end), None for anywhere.

    Raises:
        UserError: an unknown task, a depth outside 0–1, or a context that is too short for the task.
    """
    require_tasks([task])
    require_depths([] if depth is None else [depth])
    chooser = random.Random(f"{seed} {task} {context_tokens} {depth} {sample}")
    kit = Kit(chooser, tokenizer, context_tokens, filler, chooser.random() if depth is None else depth)
    return TASKS[task](kit)


def require_tasks(tasks: Sequence[str]) -> None:
    """UserError that names the first unknown task and the one most like it."""
    if not tasks:
        raise UserError("--tasks", "is empty", f"Choose among {', '.join(TASKS)}")
    require_known(tasks, TASKS, "task")


def require_depths(depths: Sequence[float]) -> None:
    """UserError for a depth that is not between 0 (the start of the text) and 1 (its end)."""
    for depth in depths:
        if not 0 <= depth <= 1:
            raise UserError(f"--depths {depth}", "is out of range", "Use depths from 0 (start) to 1 (end)")


def score(example: Example, continuation: str) -> float:
    """1 or 0 for one answer at the start of the continuation, otherwise the fraction of the answers found in it."""
    found = re.findall(r"\w+", continuation)
    if len(example.answers) == 1:
        return float(bool(found) and found[0] == example.answers[0])
    return sum(answer in found for answer in example.answers) / len(example.answers)
