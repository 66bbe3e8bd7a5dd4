"""A generated task on disk: read back as it was, never half there, never mixed, never silently changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supra.errors import SupraError, UserError
from supra_eval.lra.data import chain
from supra_eval.lra.data.folder import SPLITS, hash_of, read_task, write_task
from supra_eval.lra.data.load import load_task
from supra_eval.lra.data.summary import summarise
from supra_eval.lra.task import Examples, Task


def write(task: Task, folder: Path, **options: Any) -> dict[str, Any]:
    return write_task(task, folder, seed=3, settings={"a": 1}, summary=summarise(task), **options)


def small(seed: int = 0) -> Task:
    return chain.make(seed=seed, train=20, validation=5, test=7, train_steps=(3, 6))


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([np.uint8, np.int16, np.float32]))
def test_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, size: int, channels: int, kind: type
) -> None:
    numbers = np.arange(3 * size * 4 * channels).astype(kind).reshape(3, size, 4, channels)
    if channels == 1:
        numbers = numbers[..., 0]
    labels, lengths = np.arange(size) % 2, np.full(size, 4)
    task = Task("x", 2, None, channels, *(Examples(part, labels, lengths) for part in numbers))
    folder = tmp_path_factory.mktemp("task") / "deep/er"
    meta = write(task, folder)
    again = read_task(folder)
    for split in SPLITS:
        ours, theirs = getattr(task, split), getattr(again, split)
        assert theirs.inputs.dtype == kind and np.array_equal(ours.inputs, theirs.inputs)
        assert np.array_equal(ours.labels, theirs.labels) and np.array_equal(ours.lengths, theirs.lengths)
    assert meta == json.loads((folder / "meta.json").read_text())
    assert (
        meta["counts"] == dict.fromkeys(SPLITS, size) and meta["settings"] == {"a": 1} and meta["seed"] == 3
    )


def test_refuses_a_folder_that_is_there(tmp_path: Path) -> None:
    write(small(), tmp_path / "a")
    with pytest.raises(UserError, match="--overwrite"):
        write(small(1), tmp_path / "a")
    assert hash_of(read_task(tmp_path / "a")) == hash_of(small())
    write(small(1), tmp_path / "a", overwrite=True)
    assert hash_of(read_task(tmp_path / "a")) == hash_of(small(1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="no generated task"):
        write(small(), tmp_path / "mine", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(SupraError, match="no space left"):
        write(small(), tmp_path / "a", extra=full)
    assert not list(tmp_path.iterdir())


def test_the_same_input_in_two_splits_is_refused(tmp_path: Path) -> None:
    task = small()
    mixed = Task("chain", 10, 29, 1, task.train, task.train[3:5], task.test)
    with pytest.raises(SupraError, match="same input in train and validation"):
        write(mixed, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    write(small(), tmp_path / "a")
    labels = np.load(tmp_path / "a/test.labels.npy")
    labels[0] = (labels[0] + 1) % 10
    np.save(tmp_path / "a/test.labels.npy", labels)
    with pytest.raises(UserError, match="hash differs"):
        read_task(tmp_path / "a")
    (tmp_path / "a/test.labels.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"test\.labels\.npy"):
        read_task(tmp_path / "a")
    for text in ("{", "[]", '{"format": 99}'):
        (tmp_path / "a/meta.json").write_text(text)
        with pytest.raises(UserError, match=r"meta\.json"):
            read_task(tmp_path / "a")


def test_load_task_knows_what_lies_there(tmp_path: Path) -> None:
    write(small(), tmp_path / "a")
    assert load_task(None, tmp_path / "a").name == load_task("chain", tmp_path / "a").name == "chain"
    for wrong in (
        lambda: load_task("listops", tmp_path / "a"),
        lambda: load_task(None, tmp_path),
        lambda: load_task("chess", tmp_path),
        lambda: load_task("chain", tmp_path / "b"),
        lambda: load_task("chain", tmp_path / "a", pixels="tokens"),
        lambda: load_task("chain", tmp_path / "a", validate_on_test=True),
    ):
        with pytest.raises(UserError):
            wrong()
