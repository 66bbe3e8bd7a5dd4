"""Real time series of the UCR and UEA archives that lie inside the wheel `aeon`, read without importing it.

A `.ts` file is comments (`#`), a header (`@…`) and, after `@data`, a series a line: channels parted by `:`, numbers by
`,`, the class last.

Notable: the train and test splits are the archive's; validation is carved out of train, as many of each class as its
share.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from supra.errors import UserError

from ..task import Examples, Task
from .splits import carve

GET = "Run: pip install -c constraints.txt --no-deps aeon"


def folders() -> dict[str, Path]:
    """The sets inside the wheel that have labelled classes in a train and a test split, by name.

    Raises:
        UserError: the wheel is not installed.
    """
    found = importlib.util.find_spec("aeon")
    if found is None or not found.submodule_search_locations:
        raise UserError("aeon", "is not installed; the time series are inside it", GET)
    root = Path(found.submodule_search_locations[0]) / "datasets/data"
    return {
        path.parent.name: path.parent
        for path in sorted(root.glob("*/*_TRAIN.ts"))
        if path.name == f"{path.parent.name}_TRAIN.ts"
        and (path.parent / f"{path.parent.name}_TEST.ts").is_file()
        and "@classlabel true" in header(path)
    }


def header(path: Path) -> str:
    """What stands before a `.ts` file's data, in small letters, without comments."""
    lines = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip().lower() == "@data":
                break
            if not line.startswith("#"):
                lines.append(line.strip().lower())
    return "\n".join(lines)


def make(*, seed: int, name: str = "ACSF1", validation: float = 0.2) -> Task:
    """A set of the wheel as a task; numbers as they are in the archive, zeros behind the end of a shorter series.

    Raises:
        UserError: no such set, or a share of train that leaves a split empty.
    """
    known = folders()
    if name not in known:
        raise UserError(f"--name {name}", "is not in the wheel `aeon`", f"Choose from {', '.join(known)}")
    read = {part: read_ts(known[name] / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")}
    classes = sorted({label for _, labels in read.values() for label in labels})
    longest = max(series.shape[1] for rows, _ in read.values() for series in rows)
    train, test = (examples(*read[part], classes, longest) for part in ("TRAIN", "TEST"))
    train, held = carve(train, validation, seed)
    return Task(f"ucr-{name.lower()}", len(classes), None, train.inputs.shape[2], train, held, test)


def examples(rows: list[np.ndarray], labels: list[str], classes: list[str], longest: int) -> Examples:
    """Series [C, T] of any length as one array [N, longest, C]."""
    inputs = np.zeros((len(rows), longest, len(rows[0])), dtype=np.float32)
    for number, series in enumerate(rows):
        inputs[number, : series.shape[1]] = series.T
    lengths = np.array([series.shape[1] for series in rows], dtype=np.int32)
    return Examples(inputs, np.array([classes.index(label) for label in labels], dtype=np.int64), lengths)


def read_ts(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """The series [C, T] of a `.ts` file and their classes.

    Raises:
        UserError: a line that is no such series.
    """
    rows, labels = [], []
    seen_data = False
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not seen_data:
                seen_data = line.strip().lower() == "@data"
                continue
            if not line.strip():
                continue
            *channels, label = line.strip().split(":")
            try:
                series = np.array([[float(value) for value in channel.split(",")] for channel in channels])
            except ValueError as error:
                raise UserError(
                    f"{path}:{number}", f"is no time series ({error})", "Install aeon again"
                ) from None
            if series.ndim != 2 or not np.isfinite(series).all():
                raise UserError(
                    f"{path}:{number}",
                    "has no channel, or a missing value",
                    "Choose a set without missing values",
                )
            rows.append(series)
            labels.append(label)
    if not rows:
        raise UserError(str(path), "has no series after @data", "Install aeon again")
    return rows, labels
