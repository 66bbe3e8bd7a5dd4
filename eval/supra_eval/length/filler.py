"""Text that recall tasks hide something in: neutral sentences, or those of given books; and words that are none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from supra.config import Data
from supra.errors import UserError
from supra.train.documents import read_documents
from supra.train.sources import find_sources

NEUTRAL = (
    "The path follows the river down to the mill.",
    "Clouds drift over the hills in the afternoon.",
    "A cart stands in the yard beside the barn.",
    "The bread is on the table and the door is open.",
    "Leaves fall on the road behind the garden wall.",
    "The lamp burns low and the house is quiet.",
)
# 16 consonants and 5 vowels: 80 syllables, 512,000 words of three.
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Filler:
    """Sentences to fill a context with, repeated in order from any one of them."""

    sentences: tuple[str, ...] = NEUTRAL

    def take(self, start: int, count: int) -> list[str]:
        """`count` sentences from the one numbered `start` on, from the beginning again after the last."""
        size = len(self.sentences)
        return [self.sentences[(start + i) % size] for i in range(count)]


def read_filler(data: Sequence[str]) -> Filler:
    """The sentences of the given texts; the neutral ones where `data` is empty.

    Raises:
        UserError: a text that cannot be read, or texts without a sentence.
    """
    if not data:
        return Filler()
    settings = Data(train=tuple(data), unwrap=True)
    try:
        sources, _ = find_sources(settings)
        documents = [document for source in sources for document in read_documents(source, settings)]
    except UserError as error:
        raise UserError(error.thing.replace("data.train", "--data"), error.reason, error.mend) from None
    pieces = [re.split(r"(?<=[.!?])\s+", " ".join(document.split())) for document in documents]
    sentences = tuple(sentence for piece in pieces for sentence in piece if sentence)
    if not sentences:
        raise UserError("--data", "holds no sentence", "Name texts, or leave it out for neutral sentences")
    return Filler(sentences)


def made_up_words(chooser: random.Random) -> Iterator[str]:
    """Different words of three syllables that mean nothing, such as `banufo`, without end (of 512,000)."""
    seen: set[str] = set()
    while True:
        word = "".join(chooser.choice(_CONSONANTS) + chooser.choice(_VOWELS) for _ in range(3))
        if word not in seen:
            seen.add(word)
            yield word


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a prompt, the tokenizer's special ones included."""
    return len(tokenizer(text, verbose=False).input_ids)


def fit(
    build: Callable[[int], str], count: Callable[[str], int], budget_tokens: int
) -> tuple[int, str] | None:
    """The largest n with count(build(n)) ≤ budget_tokens, and build(n); None where not even build(0) fits.

    `build` must grow with n. Long texts take a second to tokenise, so two guesses by the rule of three come before
    the search.
    """
    base = count(build(0))
    if base > budget_tokens:
        return None
    guess, size = 16, count(build(16))
    for _ in range(2):
        guess = max(1, int((budget_tokens - base) * guess / max(size - base, 1)))
        size = count(build(guess))
    step = 1
    if size <= budget_tokens:
        low = guess
        while count(build(low + step)) <= budget_tokens:
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = guess
        while high - step > 0 and count(build(high - step)) > budget_tokens:
            high, step = high - step, 2 * step
        low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(build(middle)) <= budget_tokens else (low, middle)
    return low, build(low)
