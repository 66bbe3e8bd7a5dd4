"""Text too large to be tokenised whole: shards of it are made as training comes to them, and dropped behind it.

A shard is the next documents of the sources, about `SHARD_TOKENS` tokens of them and no further than the end of an
epoch, in an order drawn from (seed, shard). All that the next one needs is the row at which this one ended: so a small
file for each shard, which is kept, holds it, any shard can be made again from the file before it, and the tokens after
any sequence are the same whichever process makes them and however often a run was killed.
"""

import bisect
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from supra.config import Data
from supra.errors import SupraError
from supra.train.data import Sequence
from supra.train.encode import START, Document, Place, encode
from supra.train.run_folder import write_whole
from supra.train.sources import find_sources
from supra.train.token_store import TokenStore, TokenWriter, cache_folder, open_tokens, write_tokens
from supra.train.tokens import no_text, text_key

SHARD_TOKENS = 1 << 23
_POLL_SECONDS = 0.05
NEIGHBOURS = (
    3  # shards kept on either side of the one that is read: 7 in all, 4 bytes a token at most (5 of chats)
)


class TokenStream:
    """A text that is tokenised while training goes on.

    Raises:
        UserError: sources are missing.
    """

    def __init__(self, data: Data, tokenizer: Any) -> None:
        self.data, self.tokenizer, self.chats = data, tokenizer, data.messages_field is not None
        self.sources, _ = find_sources(data)
        self.key = f"{text_key(self.sources, data, tokenizer)}-{SHARD_TOKENS}"


@dataclass(frozen=True)
class Shard:
    """Where a shard lies in the stream, the epoch it is of, and where the next one goes on."""

    first: int
    num_tokens: int
    num_short: int
    epoch: int
    next_epoch: int
    next_place: Place

    @property
    def stop(self) -> int:
        return self.first + self.num_tokens


class StreamedData:
    """The sequences that one stream gives to a stage: the tokens of its shards in order, cut every `length`.

    Of the processes of one machine one has `makes_shards`, whose reader is then always where the next shard begins;
    the others wait for what it makes.

    Raises:
        UserError: the sources cannot be read or hold no text.
        SupraError: the cache cannot be written, or the text changed while it was read.
    """

    def __init__(self, stream: TokenStream, *, length: int, seed: int, makes_shards: bool = True) -> None:
        self.stream, self.length, self.seed, self.makes_shards = stream, length, seed, makes_shards
        self.folder = cache_folder() / "streams" / f"{stream.key}-{seed:016x}"
        self._shards: list[Shard] = []  # all up to the furthest that was asked for
        self._open: dict[int, TokenStore] = {}
        self._reader: tuple[int, Place, Iterator[Document]] | None = None
        self._shard_at(0)

    def sequence(self, number: int) -> Sequence:
        """Sequence number `number` of the endless stream."""
        begin, stop = number * self.length, (number + 1) * self.length
        tokens, answers, starts = [], [], []
        here, epoch = begin, self._shards[self._shard_at(begin)].epoch
        while here < stop:
            index = self._shard_at(here)
            shard, store = self._shards[index], self._store(index)
            span = slice(here - shard.first, min(stop - shard.first, shard.num_tokens))
            tokens.append(store.tokens[span].astype(np.int64))
            if store.answers is not None:
                answers.append(store.answers[span] != 0)
            low, high = np.searchsorted(store.offsets, [span.start, span.stop])
            starts.append(store.offsets[low:high] + shard.first - begin)
            here = shard.first + span.stop
        inner = np.concatenate(starts)
        return Sequence(
            np.concatenate(tokens),
            np.unique(inner[inner > 0]),
            np.concatenate(answers) if answers else None,
            epoch,
            number,
        )

    def _shard_at(self, position: int) -> int:
        while not self._shards or position >= self._shards[-1].stop:
            index = len(self._shards)
            shard = self._known(index)
            while shard is None and not self.makes_shards:
                time.sleep(_POLL_SECONDS)  # the launcher ends this process too if the one that makes it fails
                shard = self._known(index)
            if shard is None:
                with self._alone():
                    shard = self._known(index) or self._make(index)
            self._shards.append(shard)
        return bisect.bisect_right(self._shards, position, key=lambda shard: shard.first) - 1

    def _store(self, index: int) -> TokenStore:
        if index not in self._open:
            near = range(index - NEIGHBOURS, index + NEIGHBOURS + 1)
            kept = {number: store for number, store in self._open.items() if number in near}
            with self._alone():  # what is mapped stays readable, whoever drops it afterwards
                if not self._path(index).exists():
                    self._make(index)
                store = open_tokens(self._path(index), self.stream.key, chats=self.stream.chats)
                for path in self.folder.glob("[0-9]*"):
                    if path.name.isdigit() and int(path.name) not in near:
                        self._remove(path)
            self._open = {**kept, index: store}
        return self._open[index]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time makes, maps and drops shards; the system ends the turn of one that dies."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            mend = "Free some space, or set SUPRA_CACHE to a writable folder."
            raise SupraError(str(self.folder), f"tokens cannot be cached ({error.strerror})", mend) from None

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:08}"

    def _known(self, index: int) -> Shard | None:
        """The shard as whoever made it first recorded it."""
        record = self._path(index).with_suffix(".json")
        if not record.exists():
            return None
        try:
            fields = json.loads(record.read_text())
            return Shard(**fields | {"next_place": Place(*fields["next_place"])})
        except (ValueError, TypeError, KeyError):
            raise SupraError(str(record), "it is damaged", f"Delete {self.folder} and run again.") from None

    def _make(self, index: int) -> Shard:
        """Write a shard, then its record, which tells that it is whole."""
        before = self._shards[index - 1] if index else Shard(0, 0, 0, 0, 0, START)
        documents, made = self._take(before)
        if made != (self._known(index) or made):
            raise SupraError(
                ", ".join(self.stream.data.train),
                "the text is no longer what it was when training first came by here",
                "Restore it, or start a new run.",
            )
        order = np.random.Generator(np.random.PCG64([self.seed, index, 3])).permutation(len(documents))

        def fill(writer: TokenWriter) -> dict[str, Any]:
            for number in order:
                writer.add(*documents[number])
            return {"num_short": made.num_short}

        self._remove(self._path(index))  # of a process that died before it wrote the record
        write_tokens(self._path(index), len(self.stream.tokenizer), fill, chats=self.stream.chats)
        write_whole(self._path(index).with_suffix(".json"), json.dumps(asdict(made)))
        return made

    def _take(self, before: Shard) -> tuple[list[tuple[np.ndarray, np.ndarray]], Shard]:
        """The documents (ids, answers) of the shard after `before`, in the order of their sources."""
        epoch, place = before.next_epoch, before.next_place
        documents: list[tuple[np.ndarray, np.ndarray]] = []
        total = num_short = longest = 0
        while not documents:
            whole_epoch, num_short = place == START, 0
            for document in self._documents(epoch, place):
                place = Place(document.place.source, document.place.row + 1)
                longest = max(longest, len(document.ids))
                if len(document.ids) < (self.stream.data.min_document_tokens or 0):
                    num_short += 1
                    continue
                documents.append((np.array(document.ids, np.uint32), np.array(document.answers, np.uint8)))
                total += len(document.ids)
                if total >= SHARD_TOKENS:
                    break
            if total >= SHARD_TOKENS:
                return documents, Shard(before.stop, total, num_short, epoch, epoch, place)
            if whole_epoch and not documents:
                raise no_text(self.stream.data, self.stream.sources, num_short, longest)
            epoch, place = epoch + 1, START
        return documents, Shard(before.stop, total, num_short, epoch - 1, epoch, START)

    def _documents(self, epoch: int, place: Place) -> Iterator[Document]:
        """The documents from `place` on, in the epoch's order of sources; a reader that is just there goes on."""
        if self._reader is None or self._reader[:2] != (epoch, place):
            order = np.random.Generator(np.random.PCG64([self.seed, epoch, 4])).permutation(
                len(self.stream.sources)
            )
            sources = [self.stream.sources[number] for number in order]
            self._reader = epoch, place, encode(sources, self.stream.data, self.stream.tokenizer, place)
        reader = self._reader[2]
        for document in reader:
            self._reader = epoch, Place(document.place.source, document.place.row + 1), reader
            yield document
        self._reader = None

    def _remove(self, path: Path) -> None:
        """Take a shard away at once: a half-removed one never bears its name, and a killed process's is found."""
        doomed = path.with_name(f"{path.name}.partial.{platform.node()}.{os.getpid()}")
        try:
            os.rename(path, doomed)
        except FileNotFoundError:
            return  # not there, or another process was faster
        shutil.rmtree(doomed, ignore_errors=True)
