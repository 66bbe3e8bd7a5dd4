"""Language modelling on the bytes of real text, with whole texts held out."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field

from supra.config import Data
from supra.config.fields import Section
from supra.errors import UserError
from supra.train.documents import read_documents
from supra.train.sources import Source, find_sources

from .task import Batch, Task

NUM_BYTES = 256


class Chars(Section):
    """The next byte of texts, named as `supra train`'s `data` names them; the held-out ones are the test."""

    train: tuple[str, ...] = Field(min_length=1)
    heldout: tuple[str, ...] = Field(min_length=1)  # never trained on, even where `train` matches it too
    exclude: tuple[str, ...] = ()
    unwrap: bool = True

    @property
    def least_tokens(self) -> int:
        """The shortest sequence in which something is asked."""
        return 1

    def make(self, longest: int) -> Task:
        """Training: windows at random. Test: `rows` windows of `longest` spread over the texts, cut to each length.

        So the same bytes are scored at every length that divides the longest: the pieces do not overlap.

        Raises:
            UserError: a text that cannot be read, or fewer bytes than a window needs.
        """
        settings = Data(train=self.train, heldout=self.heldout, exclude=self.exclude, unwrap=self.unwrap)
        try:
            train, heldout = find_sources(settings)
            if not heldout:
                raise UserError("data.heldout", "nothing is left of it", "Loosen data.exclude")
            text, tests = (
                np.concatenate([_read(s, settings) for s in train]),
                [_read(s, settings) for s in heldout],
            )
        except UserError as error:
            mend = error.mend.replace("data.", "tasks.chars.")
            raise UserError(error.thing.replace("data.", "tasks.chars."), error.reason, mend) from None
        _require("tasks.chars.train", len(text), longest)

        def draw(rng: np.random.Generator, rows: int, length: int) -> Batch:
            return _windows(text, rng.integers(0, len(text) - length, rows), length)

        def test(rng: np.random.Generator, rows: int, length: int) -> Batch:
            each = -(-rows // len(tests))
            parts = []
            for ids in tests:
                _require("tasks.chars.heldout", len(ids), each * longest)
                starts = np.arange(each) * ((len(ids) - 1) // each)
                parts.append(_windows(ids, starts, longest))
            tokens, targets = (torch.cat(part)[:rows] for part in zip(*parts, strict=True))
            whole = longest // length * length
            return Batch(tokens[:, :whole].reshape(-1, length), targets[:, :whole].reshape(-1, length))

        return Task("chars", NUM_BYTES, NUM_BYTES, "perplexity", draw, test)


def _read(source: Source, settings: Data) -> np.ndarray:
    text = "\n\n".join(read_documents(source, settings))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _windows(ids: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    """`length` bytes from each start on, and the byte behind each of them."""
    windows = torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return Batch(windows[:, :-1], windows[:, 1:])


def _require(field: str, available: int, needed: int) -> None:
    if available <= needed:
        raise UserError(
            field, f"has {available:,} bytes and {needed + 1:,} are needed",
            "Name longer texts, or lower multiples, training.lengths or test_sequences",
        )  # fmt: skip
