"""MNIST-1D and real time series: what the packages hold, without a download, with a validation split of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from supra.errors import UserError
from supra_eval.lra.data import mnist1d, ucr
from supra_eval.lra.data.folder import refuse_shared
from supra_eval.lra.data.splits import carve
from supra_eval.lra.task import Examples


def test_is_the_packages_own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    from mnist1d import data

    monkeypatch.setattr(data.requests, "get", lambda *args, **kwargs: pytest.fail("a download"))
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    task = mnist1d.make(seed=7, train=100, validation=30, test=70)
    assert np.random.random() == expected, "the process's own generator was touched"
    arguments = data.get_dataset_args()
    arguments.num_samples, arguments.seed = 200, 7
    made = data.make_dataset(arguments)
    signals = np.concatenate([made["x"], made["x_test"]]).astype(np.float32)
    ours = np.concatenate([task.train.inputs, task.validation.inputs, task.test.inputs])[..., 0]
    assert np.array_equal(ours, signals)
    assert (task.num_tokens, task.channels, task.train.inputs.shape) == (None, 1, (100, 40, 1))
    labels = np.concatenate([task.train.labels, task.validation.labels, task.test.labels])
    assert np.array_equal(np.bincount(labels), np.full(10, 20))
    refuse_shared(task)


def test_any_length() -> None:
    task = mnist1d.make(seed=0, train=10, validation=5, test=5, length=100)
    assert task.test.inputs.shape == (5, 100, 1) and set(task.test.lengths) == {100}


@pytest.mark.parametrize("wrong", [{"train": 11}, {"test": 0}, {"length": 1}])
def test_refuses_what_cannot_be_had(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        mnist1d.make(**dict(seed=0, train=10, validation=5, test=5) | wrong)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mnist1d.data", None)
    with pytest.raises(UserError, match=r"\[lra\]"):
        mnist1d.make(seed=0)
    monkeypatch.setattr(ucr.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="aeon"):
        ucr.make(seed=0)


def test_acsf1_from_the_wheel() -> None:
    task = ucr.make(seed=0)
    assert (task.name, task.num_classes, task.channels) == ("ucr-acsf1", 10, 1)
    assert [len(split) for split in (task.train, task.validation, task.test)] == [80, 20, 100]
    assert task.train.inputs.shape == (80, 1460, 1) and task.train.inputs.dtype == np.float32
    assert np.array_equal(np.bincount(task.validation.labels), np.full(10, 2))
    refuse_shared(task)
    first = task.train.inputs[0, :3, 0]
    text = (ucr.folders()["ACSF1"] / "ACSF1_TRAIN.ts").read_text().partition("@data\n")[2].splitlines()
    firsts = [np.float32(line.split(",")[:3]) for line in text]
    assert any(np.array_equal(first, other) for other in firsts)


def test_series_of_several_channels_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "X.ts"
    path.write_text("# a comment\n@classLabel true a b\n@data\n1,2,3:4,5,6:b\n7,8:9,10:a\n")
    rows, labels = ucr.read_ts(path)
    made = ucr.examples(rows, labels, ["a", "b"], 4)
    assert made.labels.tolist() == [1, 0] and made.lengths.tolist() == [3, 2]
    assert made.inputs[1].tolist() == [[7, 9], [8, 10], [0, 0], [0, 0]]
    for bad in ("1,x:a", "1,?:a", "1,2:3:a", "1,nan:a"):
        path.write_text(f"@data\n{bad}\n")
        with pytest.raises(UserError, match=r"X\.ts:2"):
            ucr.read_ts(path)


def test_carve_takes_a_share_of_each_class() -> None:
    labels = np.repeat([0, 1], [80, 20])
    whole = Examples(np.arange(100)[:, None], labels, np.ones(100, dtype=int))
    train, held = carve(whole, 0.1, 3)
    assert np.bincount(held.labels).tolist() == [8, 2] and len(train) == 90
    assert sorted([*train.inputs[:, 0], *held.inputs[:, 0]]) == list(range(100))
    assert np.array_equal(carve(whole, 0.1, 3)[1].inputs, held.inputs)
    assert not np.array_equal(carve(whole, 0.1, 4)[1].inputs, held.inputs)
    for share in (0.0, 1.0):
        with pytest.raises(UserError):
            carve(whole, share, 3)
