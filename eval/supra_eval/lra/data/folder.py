"""A generated task on disk: one array file for each part of a split, and a `meta.json` that says how it was made.

Notable: arrays are mapped into memory, so that a data set larger than memory can be read; the hash in `meta.json` is
checked first. A folder is written beside its place and then renamed, so that none is ever half there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from supra.errors import SupraError, UserError

from ..task import Examples, Task

META, FORMAT = "meta.json", 1
SPLITS = ("train", "validation", "test")
PARTS = ("inputs", "labels", "lengths")


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """UserError where `folder` is there already and may not be replaced, or is something else than a task."""
    if not folder.exists():
        return
    if not overwrite:
        raise UserError(str(folder), "is there already", "Give another -o, or --overwrite to replace it")
    if not (folder / META).is_file():
        raise UserError(
            str(folder), f"holds no {META}: it is no generated task", "--overwrite replaces only such folders"
        )


def write_task(
    task: Task,
    folder: Path,
    *,
    seed: int,
    settings: dict[str, Any],
    summary: dict[str, Any],
    overwrite: bool = False,
    extra: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Write `task` as a folder that `read_task` reads back, and return what its `meta.json` says.

    `extra` may add files of its own to the folder before it gets its name.

    Raises:
        UserError: the folder is there already.
        SupraError: an example is in two splits, or the disk refuses.
    """
    refuse_existing(folder, overwrite)
    refuse_shared(task)
    meta = {
        "format": FORMAT,
        "name": task.name,
        "seed": seed,
        "settings": settings,
        "num_classes": task.num_classes,
        "num_tokens": task.num_tokens,
        "channels": task.channels,
        "counts": {split: len(getattr(task, split)) for split in SPLITS},
        "hash": hash_of(task),
        "summary": summary,
    }
    beside: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        beside.chmod(0o755)
        for split in SPLITS:
            for part in PARTS:
                np.save(beside / f"{split}.{part}.npy", getattr(getattr(task, split), part))
        if extra is not None:
            extra(beside)
        (beside / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(beside, folder)
    except OSError as error:
        raise SupraError(
            str(folder), f"cannot be written ({error})", "Free some disk, or give another -o"
        ) from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return meta


def read_meta(folder: Path) -> dict[str, Any]:
    """What `meta.json` of a generated task says.

    Raises:
        UserError: it is not there, or no such file.
    """
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(str(path), "is missing", "Make the data with `supra lra data`") from None
    except (OSError, ValueError) as error:
        raise UserError(
            str(path), f"cannot be read ({error})", "Make the data again with `supra lra data`"
        ) from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(str(path), "is of no format known here", "Make the data again with `supra lra data`")
    return meta


def read_task(folder: Path) -> Task:
    """The task that `write_task` wrote, its arrays mapped into memory, its hash checked.

    Raises:
        UserError: a file is missing or is not what was written.
    """
    meta = read_meta(folder)
    splits: dict[str, Examples] = {}
    for split in SPLITS:
        parts = {}
        for part in PARTS:
            path = folder / f"{split}.{part}.npy"
            try:
                parts[part] = np.load(path, mmap_mode="r" if meta["counts"][split] else None)
            except (OSError, EOFError, ValueError) as error:
                raise UserError(str(path), f"cannot be read ({error})", "Make the data again") from None
        splits[split] = Examples(**parts)
    task = Task(meta["name"], meta["num_classes"], meta["num_tokens"], meta["channels"], **splits)
    if hash_of(task) != meta["hash"]:
        raise UserError(str(folder), "is not what was written: its hash differs", "Make the data again")
    return task


def hash_of(task: Task) -> str:
    """A hash of every value in a task's three splits."""
    total = xxhash.xxh3_128(f"{task.name} {task.num_classes} {task.num_tokens} {task.channels}".encode())
    for split in SPLITS:
        for part in PARTS:
            array = getattr(getattr(task, split), part)
            total.update(f"{split} {part} {array.dtype} {array.shape}".encode())
            for start in range(0, len(array), 4096):
                total.update(np.ascontiguousarray(array[start : start + 4096]).data)
    return total.hexdigest()


def rows_of(examples: Examples) -> set[bytes]:
    """A fingerprint for each different input (without its padding)."""
    lengths = examples.lengths.tolist()
    return {
        xxhash.xxh3_128_digest(np.ascontiguousarray(examples.inputs[row, :length]).data)
        for row, length in enumerate(lengths)
    }


def refuse_shared(task: Task) -> None:
    """SupraError where the same input stands in two splits: what is tested must never have been trained on."""
    seen: dict[bytes, str] = {}
    for split in SPLITS:
        rows = rows_of(getattr(task, split))
        for row in rows:
            if row in seen:
                raise SupraError(
                    f"task {task.name}",
                    f"has the same input in {seen[row]} and {split}",
                    "Choose another seed, fewer examples (there may not be so many that differ) or another set",
                )
        seen |= dict.fromkeys(rows, split)
