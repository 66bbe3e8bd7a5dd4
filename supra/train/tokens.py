"""Tokenises the texts once into a file of token ids that every later run maps into memory."""

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
import xxhash

from supra.config import Data
from supra.errors import SupraError, UserError
from supra.train.chat import ChatEncoder, chat_template
from supra.train.documents import read_chats, read_documents
from supra.train.sources import Source, find_sources

_FORMAT = 1  # part of the cache key: raise it when the file's meaning changes
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


def cache_folder() -> Path:
    """`$SUPRA_CACHE`, or `~/.cache/supra`."""
    return Path(os.environ.get("SUPRA_CACHE") or Path.home() / ".cache" / "supra")


def load_tokens(
    data: Data, tokenizer: Any, *, which: str = "train", report: Callable[[str], None] | None = None
) -> TokenStore:
    """The tokens of the training (or `heldout`) sources: from the cache, or tokenised now and cached.

    Each document ends with the tokenizer's eos token, if it has one; a chat is as the chat template has it.

    Raises:
        UserError: sources are missing, unreadable or hold no text, or chats do not fit the tokenizer's template.
        SupraError: the cache cannot be written.
    """
    train, heldout = find_sources(data)
    sources = train if which == "train" else heldout
    key = _key(sources, data, tokenizer)
    folder = cache_folder() / "tokens" / key
    if not (folder / "meta.json").exists():
        if report:
            report(f"tokenising {len(sources)} sources")
        _write(folder, sources, data, tokenizer)
    store = _open(folder, key, chats=data.messages_field is not None)
    if report and data.min_document_tokens is not None:
        report(
            f"kept {store.num_documents:,} of {store.num_documents + store.num_short:,} documents, "
            f"those of {data.min_document_tokens:,} tokens or more"
        )
    return store


def _open(folder: Path, key: str, *, chats: bool) -> TokenStore:
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


def _write(folder: Path, sources: list[Source], data: Data, tokenizer: Any) -> None:
    """Write beside, then rename: a crash leaves no half cache, and of two processes the first one wins."""
    partial = folder.with_name(f"{folder.name}.partial.{platform.node()}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        partial.mkdir()
        try:
            _tokenise(partial, sources, data, tokenizer)
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


def _tokenise(folder: Path, sources: list[Source], data: Data, tokenizer: Any) -> None:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    offsets, total = [0], 0
    num_short, longest = 0, 0
    with ExitStack() as files:
        tokens_file = files.enter_context(_durable(folder / "tokens.bin"))
        answers_file = files.enter_context(_durable(folder / "answers.bin")) if data.messages_field else None
        for ids, answers in _encode(sources, data, tokenizer):
            longest = max(longest, len(ids))
            if len(ids) < (data.min_document_tokens or 0):
                num_short += 1
                continue
            size = len(ids) if data.max_tokens is None else min(len(ids), data.max_tokens - total)
            tokens_file.write(np.asarray(ids[:size], dtype=dtype).tobytes())
            if answers_file is not None:
                answers_file.write(np.asarray(answers[:size], dtype=np.uint8).tobytes())
            total += size
            offsets.append(total)
            if total == data.max_tokens:
                break
    if num_short and total == 0:
        raise UserError(
            f"data.min_document_tokens = {data.min_document_tokens}",
            f"all {num_short} documents are shorter, the longest has {longest} tokens",
            "Lower it, or name longer texts.",
        )
    if total == 0:
        raise UserError(
            "data", f"{len(sources)} sources hold no text", "Check data.train and data.text_field."
        )
    np.save(folder / "offsets.npy", np.asarray(offsets, dtype=np.int64))
    meta = {
        "dtype": dtype.name,
        "num_tokens": total,
        "num_short": num_short,
        "sources": [source.where for source in sources],
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


@contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk, and not only promised, when it is closed."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _encode(sources: list[Source], data: Data, tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Each document's ids and, of chats, which of them are answers."""
    if data.messages_field is not None:
        encode_chat = ChatEncoder(tokenizer)
        for source in sources:
            for where, messages in read_chats(source, data):
                yield encode_chat(messages, where)
        return
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = (document for source in sources for document in read_documents(source, data))
    while batch := list(islice(documents, 64)):
        # verbose=False: a document longer than the model's context is meant to be cut by the packing
        for ids in tokenizer(batch, add_special_tokens=True, verbose=False)["input_ids"]:
            yield ids if ids[-1:] == end else ids + end, []


def _key(sources: list[Source], data: Data, tokenizer: Any) -> str:
    """Hash of all that decides the tokens: tokenizer, file contents, reading options."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = (
        backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    options = data.model_dump(include={"text_field", "split", "unwrap", "max_tokens"})
    # Left out where they are not set, so that caches made before they existed are still found.
    options |= data.model_dump(include={"min_document_tokens", "messages_field"}, exclude_none=True)
    if data.messages_field is not None:
        options["chat_template"] = chat_template(tokenizer)
    parts = [_FORMAT, hashlib.sha256(vocabulary.encode()).hexdigest(), tokenizer.eos_token_id, options]
    parts += [[source.kind, _fingerprint(source)] for source in sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _fingerprint(source: Source) -> str:
    if source.kind == "dataset":
        return source.where
    path = Path(source.where)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = xxhash.xxh3_128()
    for file in files:
        try:
            with open(file, "rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            raise UserError(
                str(file), f"cannot be read ({error.strerror})", "Check its permissions."
            ) from None
    return digest.hexdigest()


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
