"""Tokenises the texts once into a file of token ids that every later run maps into memory."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from supra.config import Data
from supra.errors import UserError
from supra.train.chat import chat_template
from supra.train.encode import encode
from supra.train.sources import Source, find_sources
from supra.train.token_store import TokenStore, TokenWriter, cache_folder, open_tokens, write_tokens

_FORMAT = 1  # part of the cache key: raise it when the file's meaning changes
_MEBIBYTE = 1 << 20


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
    key = text_key(sources, data, tokenizer)
    folder, chats = cache_folder() / "tokens" / key, data.messages_field is not None
    if not (folder / "meta.json").exists():
        if report:
            report(f"tokenising {len(sources)} sources")
        write_tokens(
            folder, len(tokenizer), lambda writer: _tokenise(writer, sources, data, tokenizer), chats=chats
        )
    store = open_tokens(folder, key, chats=chats)
    if report and data.min_document_tokens is not None:
        report(
            f"kept {store.num_documents:,} of {store.num_documents + store.num_short:,} documents, "
            f"those of {data.min_document_tokens:,} tokens or more"
        )
    return store


def _tokenise(writer: TokenWriter, sources: list[Source], data: Data, tokenizer: Any) -> dict[str, Any]:
    num_short, longest = 0, 0
    for document in encode(sources, data, tokenizer):
        size = len(document.ids)
        longest = max(longest, size)
        if size < (data.min_document_tokens or 0):
            num_short += 1
            continue
        if data.max_tokens is not None:
            size = min(size, data.max_tokens - writer.total)
        writer.add(document.ids[:size], document.answers[:size])
        if writer.total == data.max_tokens:
            break
    if writer.total == 0:
        raise no_text(data, sources, num_short, longest)
    return {"num_short": num_short, "sources": [source.where for source in sources]}


def no_text(data: Data, sources: list[Source], num_short: int, longest: int) -> UserError:
    """The error of sources in which nothing is left to train on."""
    if num_short:
        return UserError(
            f"data.min_document_tokens = {data.min_document_tokens}",
            f"all {num_short} documents are shorter, the longest has {longest} tokens",
            "Lower it, or name longer texts.",
        )
    return UserError("data", f"{len(sources)} sources hold no text", "Check data.train and data.text_field.")


def text_key(sources: list[Source], data: Data, tokenizer: Any) -> str:
    """Hash of all that decides the tokens: tokenizer, file contents, reading options."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = (
        backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    options = data.model_dump(include={"text_field", "split", "unwrap", "max_tokens"})
    # Left out where they are not set, so that caches made before they existed are still found.
    options |= data.model_dump(include={"min_document_tokens", "messages_field"}, exclude_none=True)
    options |= data.model_dump(include={"documents"}, exclude_defaults=True)
    if data.streaming:
        options["streaming"] = True
    if data.messages_field is not None:
        options["chat_template"] = chat_template(tokenizer)
    parts = [_FORMAT, hashlib.sha256(vocabulary.encode()).hexdigest(), tokenizer.eos_token_id, options]
    parts += [[source.kind, _fingerprint(source, whole=not data.streaming)] for source in sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _fingerprint(source: Source, *, whole: bool) -> str:
    """Hash of a source's bytes, or, where it is too large to be read at once, of its size, first and last MiB."""
    if source.kind == "dataset":
        return source.where
    path = Path(source.where)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = xxhash.xxh3_128()
    for file in files:
        try:
            with open(file, "rb") as stream:
                if not whole:
                    size = os.fstat(stream.fileno()).st_size
                    digest.update(f"{size}".encode() + stream.read(_MEBIBYTE))
                    stream.seek(max(0, size - _MEBIBYTE))
                while block := stream.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            raise UserError(
                str(file), f"cannot be read ({error.strerror})", "Check its permissions."
            ) from None
    return digest.hexdigest()
