"""Token ids on disk: written whole beside and then renamed, and mapped into memory."""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from supra.errors import SupraError

_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class TokenStore:
    """Token ids of all documents end to end.

    `tokens` [total] uint16 or uint32 (memory-mapped); `offsets` [num_documents + 1] int64: their bounds.
    `num_short`: how many documents more were left out as too short.
    `answers` [total] uint8 (memory-mapped): 1 where a token is part of an answer in a chat; None for plain text.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    key: str
    num_short: int = 0
    answers: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


class TokenWriter:
    """Appends documents to the files of one folder, which is whole after `finish`."""

    def __init__(self, folder: Path, vocabulary: int, *, chats: bool) -> None:
        self.folder, self.offsets = folder, [0]
        self.dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        self._tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115 - open as long as this
        self._answers = open(folder / "answers.bin", "wb") if chats else None  # noqa: SIM115

    @property
    def total(self) -> int:
        return self.offsets[-1]

    def add(self, ids: Any, answers: Any) -> None:
        """One document: its ids and, of a chat, which of them are answers."""
        self._tokens.write(np.asarray(ids, dtype=self.dtype).tobytes())
        if self._answers is not None:
            self._answers.write(np.asarray(answers, dtype=np.uint8).tobytes())
        self.offsets.append(self.total + len(ids))

    def finish(self, meta: dict[str, Any]) -> None:
        """Everything to the disk; `meta` goes beside what the files themselves need."""
        for file in filter(None, (self._tokens, self._answers)):
            file.flush()
            os.fsync(file.fileno())
        np.save(self.folder / "offsets.npy", np.asarray(self.offsets, dtype=np.int64))
        meta = {"dtype": self.dtype.name, "num_tokens": self.total, **meta}
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1))

    def close(self) -> None:
        for file in filter(None, (self._tokens, self._answers)):
            file.close()


def cache_folder() -> Path:
    """`$SUPRA_CACHE`, or `~/.cache/supra`."""
    return Path(os.environ.get("SUPRA_CACHE") or Path.home() / ".cache" / "supra")


def open_tokens(folder: Path, key: str, *, chats: bool) -> TokenStore:
    """Map a folder that `write_tokens` made.

    Raises:
        SupraError: files are missing, cut short or do not belong together.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        offsets = np.load(folder / "offsets.npy")
        answers = np.memmap(folder / "answers.bin", dtype=np.uint8, mode="r") if chats else None
        lengths = {len(tokens), int(offsets[-1]), len(tokens if answers is None else answers)}
        whole = lengths == {meta["num_tokens"]}
    except (OSError, EOFError, ValueError, KeyError):
        whole = False
    if not whole:
        raise SupraError(str(folder), "the cached tokens are damaged", "Delete that folder and run again.")
    return TokenStore(tokens, offsets, key, meta.get("num_short", 0), answers)


def write_tokens(
    folder: Path, vocabulary: int, fill: Callable[[TokenWriter], dict[str, Any]], *, chats: bool
) -> None:
    """Let `fill` write documents beside, then rename: a crash leaves no half of it, and of two the first one wins.

    Raises:
        SupraError: the disk is full or cannot be written.
    """
    partial = folder.with_name(f"{folder.name}.partial.{platform.node()}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        partial.mkdir()
        try:
            writer = TokenWriter(partial, vocabulary, chats=chats)
            try:
                writer.finish(fill(writer))
            finally:
                writer.close()
            try:
                os.rename(partial, folder)
            except OSError:
                if not (folder / "meta.json").exists():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        mend = "Free some space, or set SUPRA_CACHE to a writable folder."
        raise SupraError(str(folder.parent), f"tokens cannot be cached ({error.strerror})", mend) from None


def _remove_abandoned(folder: Path) -> None:
    """Partial caches whose process is gone: a dead one of this machine, or one that has written nothing for a day.

    Other machines and containers may share the folder, and their process numbers say nothing here.
    """
    for partial in folder.glob("*.partial.*"):
        host, _, pid = partial.name.partition(".partial.")[2].rpartition(".")
        if host == platform.node():
            abandoned = pid == str(os.getpid()) or (pid.isdigit() and not psutil.pid_exists(int(pid)))
        else:
            abandoned = time.time() - _newest_change(partial) > _DAY_SECONDS
        if abandoned:
            shutil.rmtree(partial, ignore_errors=True)


def _newest_change(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:
        return time.time()  # its process is at it this very moment
