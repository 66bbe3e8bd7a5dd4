"""Reads the texts of a source one document at a time, whatever its format."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from supra.config import Data
from supra.errors import UserError
from supra.recipe_io import nearest
from supra.train.sources import Source


def read_documents(source: Source, data: Data) -> Iterator[str]:
    """The non-empty documents of one source, in order.

    Raises:
        UserError: it cannot be read, or a row has no text; the row is named.
    """
    for where, value in _rows(source, data, "text_field"):
        text = _text_of(value, data.text_field, where)
        document = unwrap(text) if data.unwrap else text
        if document.strip():
            yield document


def read_chats(source: Source, data: Data) -> Iterator[tuple[str, Any]]:
    """What each row of one source holds in `data.messages_field`, after the row's name.

    Raises:
        UserError: it cannot be read or is plain text, or a row has no such field; the row is named.
    """
    if source.kind == "text":
        raise UserError(
            source.where,
            "is plain text and has no rows of messages",
            "Name .jsonl or .parquet files or a dataset, or leave out data.messages_field.",
        )
    yield from _rows(source, data, "messages_field")


def unwrap(text: str) -> str:
    """Join each paragraph's lines with spaces; blank and indented lines (verse, lists) stay as they are."""
    paragraphs = re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n"))
    return "\n\n".join(re.sub(r"[ \t]*\n(?![ \t])", " ", paragraph.strip("\n")) for paragraph in paragraphs)


def _rows(source: Source, data: Data, option: str) -> Iterator[tuple[str, Any]]:
    """Each row's name and its value in the field that `data` names under `option`."""
    if source.kind == "text":
        yield source.where, _read_text(source)
        return
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet}
    field = getattr(data, option)
    for where, row in readers.get(source.kind, _read_dataset)(source, data, option):
        if field not in row:
            raise _no_field(where, option, field, list(row))
        yield where, row[field]


def _read_text(source: Source) -> str:
    raw = _bytes(source)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        if b"\0" in raw:
            raise UserError(source.where, "is binary, not text", "Name text files only.") from None
        # Every byte is a latin-1 character, so this cannot fail; two of the Gutenberg texts need it.
        print(f"{source.name}: not UTF-8, read as latin-1", file=sys.stderr)
        return raw.decode("latin-1")


def _read_jsonl(source: Source, data: Data, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open(source) as lines:
        yield from json_objects(lines, source.where)


def json_objects(lines: Iterable[str | bytes], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a file of JSON lines, with the file's `name` and its line number; empty lines are left out.

    Raises:
        UserError: a line that is no JSON object.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(where, f"is not JSON ({error})", "Correct or remove that line.") from None
        if not isinstance(row, dict):
            raise UserError(where, "is no JSON object", "Correct or remove that line.")
        yield where, row


def _read_parquet(source: Source, data: Data, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(source.where)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            source.where, f"not a parquet file ({error})", "Set data.format if it is another."
        ) from None
    field = getattr(data, option)
    if field not in table.schema_arrow.names:
        raise _no_field(source.where, option, field, table.schema_arrow.names)
    number = 0
    for batch in table.iter_batches(batch_size=256, columns=[field]):
        for row in batch.to_pylist():
            yield f"{source.where} row {number}", row
            number += 1


def _read_dataset(source: Source, data: Data, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    try:
        if source.kind == "saved_dataset":
            rows: Any = datasets.load_from_disk(source.where)
            if isinstance(rows, datasets.DatasetDict):
                rows = rows[data.split]
        else:
            name, _, config_name = source.where.partition(":")
            rows = datasets.load_dataset(
                name, config_name or None, split=data.split, streaming=data.max_tokens is not None
            )
    except KeyError:
        raise UserError(source.where, f"it has no split {data.split}", "Set data.split.") from None
    except Exception as error:  # the library raises many kinds, and its messages say what is wrong
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"dataset {source.where}", reason, "Check the name, data.split and the network."
        ) from None
    for number, row in enumerate(rows):
        yield f"{source.where} row {number}", row


def _text_of(value: Any, field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(where, f"field {field} is {type(value).__name__}, not text", "Set data.text_field.")
    return value


def _no_field(where: str, option: str, field: str, names: list[str]) -> UserError:
    hint = nearest(field, names)
    mend = (
        f"Set data.{option}; did you mean {hint}?"
        if hint
        else f"Set data.{option} to one of {', '.join(names)}."
    )
    return UserError(where, f"there is no field {field}", mend)


def _bytes(source: Source) -> bytes:
    try:
        return Path(source.where).read_bytes()
    except OSError as error:
        raise UserError(
            source.where, f"cannot be read ({error.strerror})", "Check its permissions."
        ) from None


def _open(source: Source) -> Any:
    try:
        return open(source.where, encoding="utf-8", errors="strict")
    except OSError as error:
        raise UserError(
            source.where, f"cannot be read ({error.strerror})", "Check its permissions."
        ) from None
