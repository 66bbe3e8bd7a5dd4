"""The text tasks as others released them: ListOps, byte-level text (IMDB), and pairs of papers (AAN).

Both layouts are found: Long Range Arena's own archive and the shorter folder names of S4's data loaders.

Notable: bytes of UTF-8 never reach 255, so that `1 + byte` fits into a byte. A published text task validates on its
test split; here validation is carved out of train unless that is asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from supra.errors import UserError

from ..task import Examples, Task
from . import listops
from .splits import carve

LRA_URL = "https://storage.googleapis.com/long-range-arena/lra_release.gz"
IMDB_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
GET_LRA = f"It is in {LRA_URL} (tar -xf lra_release.gz); name the folder it lies in, or one above"
GET_IMDB = f"It is in {IMDB_URL} (tar -xf aclImdb_v1.tar.gz); name the folder it lies in, or one above"
# The archive's own folder lies twice within another; what lies one level up is no good (pathfinder128).
ROOTS = ("lra_release/lra_release", "lra_release", "")
NUM_BYTE_TOKENS = 257  # padding, then the bytes
MAX_BYTES = 4096  # of a text, as the benchmark cuts it; a paper of a pair: MAX_PAPER_BYTES
MAX_PAPER_BYTES = 4000


def find(folder: Path, names: Sequence[str], file: str, mend: str) -> Path:
    """The first of `ROOTS` × `names` below `folder` that holds `file`; what lies deeper goes first.

    Raises:
        UserError: none does.
    """
    for root in ROOTS:
        for name in names:
            if (folder / root / name / file).exists():
                return folder / root / name
    tried = ", ".join(str(Path(name) / file) for name in names)
    raise UserError(f"{folder}", f"holds no {file} (looked for {tried}, and in lra_release/)", mend)


def read_listops(folder: Path) -> Task:
    """ListOps' `basic_{train,val,test}.tsv`: parentheses dropped, brackets kept, a token a word.

    Raises:
        UserError: a file is missing or a line is no expression.
    """
    found = find(folder, ("listops-1000", "listops", ""), "basic_train.tsv", GET_LRA)
    splits = []
    for name in ("train", "val", "test"):
        rows, values = [], []
        for where, line in lines(found / f"basic_{name}.tsv", GET_LRA):
            if where.endswith(":1"):
                if line.split("\t") != ["Source", "Target"]:
                    raise UserError(where, "is not the header `Source<tab>Target`", GET_LRA)
                continue
            row, value = expression(line, where)
            rows.append(row)
            values.append(value)
        if not rows:
            raise UserError(str(found / f"basic_{name}.tsv"), "holds no expression", GET_LRA)
        splits.append(listops.pad(rows, values))
    return Task("listops", 10, listops.NUM_TOKENS, 1, *splits)


TOKENS = {word: token for token, word in enumerate(listops.WORDS) if word}


def expression(line: str, where: str) -> tuple[np.ndarray, int]:
    """The tokens and the value that a line of ListOps states."""
    source, _, target = line.partition("\t")
    words = source.replace("(", " ").replace(")", " ").split()
    unknown = [word for word in words if word not in TOKENS]
    if unknown or not words or target not in TOKENS or len(target) != 1:
        what = (
            f"{unknown[0]!r} is no token"
            if unknown
            else f"{target!r} is no digit"
            if words
            else "nothing there"
        )
        raise UserError(where, f"is no expression: {what}", GET_LRA)
    tokens = np.array([TOKENS[word] for word in words], dtype=np.uint8)
    if (tokens == listops.END).sum() != ((tokens >= listops.OPERATOR) & (tokens < listops.END)).sum():
        raise UserError(
            where,
            "opens more brackets than it closes, or fewer",
            "Keep `]` in the files: without it results differ",
        )
    return tokens, int(target)


def read_retrieval(folder: Path) -> Task:
    """Pairs of papers, `new_aan_pairs.{train,eval,test}.tsv`: does one cite the other? Bytes, each paper by itself.

    Raises:
        UserError: a file is missing or a line is no pair.
    """
    found = find(folder, ("tsv_data", "aan", ""), "new_aan_pairs.train.tsv", GET_LRA)
    splits = []
    for name in ("train", "eval", "test"):
        labels: list[int] = []
        first: list[bytes] = []
        second: list[bytes] = []
        path = found / f"new_aan_pairs.{name}.tsv"
        for where, line in lines(path, GET_LRA):
            parts = line.split("\t")
            if len(parts) != 5 or parts[0] not in ("0", "1", "0.0", "1.0"):
                raise UserError(where, "is not label, id, id, text, text parted by tabs", GET_LRA)
            labels.append(int(float(parts[0])))
            first.append(parts[3].encode()[:MAX_PAPER_BYTES])
            second.append(parts[4].encode()[:MAX_PAPER_BYTES])
        if not labels:
            raise UserError(str(path), "holds no pair", GET_LRA)
        splits.append(byte_examples(first, labels, byte_examples(second, labels)))
    return Task("retrieval", 2, NUM_BYTE_TOKENS, 1, *splits)


def read_text(folder: Path, *, seed: int, validate_on_test: bool, share: float = 0.1) -> Task:
    """IMDB's reviews as bytes: a file each (`aclImdb/`), or the hub's two parquet files.

    Raises:
        UserError: a file is missing.
    """
    splits = []
    for split in ("train", "test"):
        rows = list(parquet_rows(folder, split) or review_rows(folder, split))
        splits.append(byte_examples([row[:MAX_BYTES] for row, _ in rows], [label for _, label in rows]))
    train, test = splits
    if validate_on_test:
        return Task("text", 2, NUM_BYTE_TOKENS, 1, train, test, test)
    train, validation = carve(train, share, seed)
    return Task("text", 2, NUM_BYTE_TOKENS, 1, train, validation, test)


def review_rows(folder: Path, split: str) -> Iterator[tuple[bytes, int]]:
    """Reviews and labels (1 is positive) of `{train,test}/{pos,neg}/*.txt`."""
    found = find(folder, ("aclImdb", "imdb/aclImdb", "imdb", ""), f"{split}/pos", GET_IMDB)
    for label, name in enumerate(("neg", "pos")):
        files = sorted((found / split / name).glob("*.txt"), key=lambda path: (len(path.stem), path.stem))
        if not files:
            raise UserError(str(found / split / name), "holds no review", GET_IMDB)
        for file in files:
            yield file.read_bytes().decode("utf-8", "replace").encode(), label


def parquet_rows(folder: Path, split: str) -> list[tuple[bytes, int]]:
    """The same from the hub's `{train,test}-*.parquet` with columns `text` and `label`; empty where there is none."""
    for name in ("plain_text", "imdb/plain_text", "imdb", ""):
        files = sorted((folder / name).glob(f"{split}-*.parquet"))
        if files:
            from pyarrow import parquet

            rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
            return [(row["text"].encode(), int(row["label"])) for row in rows]
    return []


def byte_examples(rows: list[bytes], labels: list[int], second: Examples | None = None) -> Examples:
    """Texts as `1 + byte`, zeros behind each end; an empty text is one space, so that something can be read."""
    rows = [row or b" " for row in rows]
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    inputs = np.zeros((len(rows), int(lengths.max())), dtype=np.uint8)
    for number, row in enumerate(rows):
        inputs[number, : len(row)] = np.frombuffer(row, dtype=np.uint8) + 1
    return Examples(inputs, np.array(labels, dtype=np.int64), lengths, second)


def lines(path: Path, mend: str) -> Iterator[tuple[str, str]]:
    """Each line of a text file, and where it stands as `path:number`.

    Raises:
        UserError: the file is missing or is no UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}:{number}", line.rstrip("\r\n")
    except FileNotFoundError:
        raise UserError(str(path), "is missing", mend) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error})", mend) from None
