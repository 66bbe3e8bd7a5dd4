"""Reads the texts of a source one document at a time, whatever its format."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from supra.config import Data
from supra.errors import UserError
from supra.recipe_io import nearest
from supra.train.mediawiki import read_articles
from supra.train.sources import Source


class Row(NamedTuple):
    """What one row of a source holds in the field that is read: a text, or a chat's messages."""

    number: int  # from 0 within its source
    where: str  # what errors call it
    value: Any


def read_documents(source: Source, data: Data) -> Iterator[str]:
    """The non-empty documents of one source, in order.

    Raises:
        UserError: it cannot be read, or a row has no text; the row is named.
    """
    for row in read_rows(source, data):
        if document := document_of(row, data):
            yield document


def document_of(row: Row, data: Data) -> str:
    """A row's text as it is trained on, or nothing where it is blank.

    Raises:
        UserError: it is no text.
    """
    if row.value is None:
        return ""
    if not isinstance(row.value, str):
        kind = type(row.value).__name__
        raise UserError(row.where, f"field {data.text_field} is {kind}, not text", "Set data.text_field.")
    document = unwrap(row.value) if data.unwrap else row.value
    return document if document.strip() else ""


def read_rows(source: Source, data: Data, first: int = 0) -> Iterator[Row]:
    """The rows of one source from number `first` on, of those that `data.documents` takes.

    Those before it are passed over as cheaply as the format lets.

    Raises:
        UserError: it cannot be read, a row has not the field, or it is plain text and should hold chats, or documents
            beside the first.
    """
    option = "text_field" if data.messages_field is None else "messages_field"
    field = getattr(data, option)
    if source.kind == "text":
        if option == "messages_field":
            raise UserError(
                source.where,
                "is plain text and has no rows of messages",
                "Name .jsonl or .parquet files or a dataset, or leave out data.messages_field.",
            )
        if data.documents == "odd":
            raise UserError(
                source.where, "is one document, the first, and documents: odd leaves it out",
                "Hold out whole files instead (data.heldout), or read it without `documents`.",
            )  # fmt: skip
        if first == 0:
            yield Row(0, source.where, _read_text(source))
        return
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "mediawiki": _read_mediawiki}
    rows = readers.get(source.kind, _read_dataset)(source, data, option, first)
    for number, (where, row) in enumerate(rows, start=first):
        if data.documents != "all" and (number % 2 == 0) != (data.documents == "even"):
            continue
        if field not in row:
            raise _no_field(where, option, field, list(row))
        yield Row(number, where, row[field])


def unwrap(text: str) -> str:
    """Join each paragraph's lines with spaces; blank and indented lines (verse, lists) stay as they are."""
    paragraphs = re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n"))
    return "\n\n".join(re.sub(r"[ \t]*\n(?![ \t])", " ", paragraph.strip("\n")) for paragraph in paragraphs)


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


_NamedRows = Iterator[tuple[str, dict[str, Any]]]


def _read_jsonl(source: Source, data: Data, option: str, first: int) -> _NamedRows:
    with _open(source) as lines:
        try:
            yield from json_objects(lines, source.where, first)
        except UnicodeDecodeError as error:
            raise UserError(source.where, f"is not UTF-8 ({error.reason})", "Convert it to UTF-8.") from None


def json_objects(lines: Iterable[str | bytes], name: str, first: int = 0) -> _NamedRows:
    """Each object of a file of JSON lines, with the file's `name` and its line number, from object `first` on.

    Empty lines are left out and not counted.

    Raises:
        UserError: a line that is no JSON object.
    """
    filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in islice(filled, first, None):
        where = f"{name} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(where, f"is not JSON ({error})", "Correct or remove that line.") from None
        if not isinstance(row, dict):
            raise UserError(where, "is no JSON object", "Correct or remove that line.")
        yield where, row


def _read_parquet(source: Source, data: Data, option: str, first: int) -> _NamedRows:
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
    number, groups = 0, list(range(table.num_row_groups))
    while groups and number + table.metadata.row_group(groups[0]).num_rows <= first:
        number += table.metadata.row_group(groups.pop(0)).num_rows
    for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=[field]):
        for row in batch.to_pylist():
            if number >= first:
                yield f"{source.where} row {number}", row
            number += 1


def _read_mediawiki(source: Source, data: Data, option: str, first: int) -> _NamedRows:
    articles = read_articles(Path(source.where), first)
    return ((f"{source.where} article {article['title']}", dict(article)) for article in articles)


def _read_dataset(source: Source, data: Data, option: str, first: int) -> _NamedRows:
    import datasets

    lazily = data.streaming or data.max_tokens is not None
    try:
        if source.kind == "saved_dataset":
            rows: Any = datasets.load_from_disk(source.where)
            if isinstance(rows, datasets.DatasetDict):
                rows = rows[data.split]
        else:
            name, _, config_name = source.where.partition(":")
            rows = datasets.load_dataset(name, config_name or None, split=data.split, streaming=lazily)
    except KeyError:
        raise UserError(source.where, f"it has no split {data.split}", "Set data.split.") from None
    except Exception as error:
        raise _not_loaded(source, error) from None
    try:
        for number, row in enumerate(rows.skip(first), start=first):
            yield f"{source.where} row {number}", row
    except Exception as error:  # the network, where rows come over it
        raise _not_loaded(source, error) from None


def _not_loaded(source: Source, error: Exception) -> UserError:
    """Of the many kinds that the library raises; its messages say what is wrong."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"dataset {source.where}", reason, "Check the name, data.split and the network.")


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
