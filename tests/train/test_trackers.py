"""Trackers get what metrics.jsonl gets, no step twice, and decide nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from supra import recipe_io
from supra.config import Recipe
from supra.errors import UserError
from supra.train import checkpoint, trackers
from supra.train.tracking import read_metrics
from supra.train.trainer import run_training


class Recorder(GeneralTracker):
    """Stands in for TensorBoard's tracker, which Accelerate makes by its name."""

    name = "tensorboard"
    requires_logging_directory = True
    sent: list[tuple[int, dict[str, Any]]] = []
    folders: list[str] = []
    finished = 0

    def __init__(self, run_name: str, logging_dir: str, **kwargs: Any) -> None:
        super().__init__()
        Recorder.folders.append(f"{logging_dir}/{run_name}")

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        assert step is not None
        Recorder.sent.append((step, values))

    def finish(self) -> None:
        Recorder.finished += 1


def test_a_tracker_gets_every_step_once_over_a_resume(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Recorder)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "kept")
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, trackers=["tensorboard"]))
    real = checkpoint.save
    run = tmp_path / "run"

    def full(*args: Any, **kwargs: Any) -> Path:  # at step 4: steps 3 and 4 are done again
        if args[1].global_step == 4:
            raise OSError
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        with pytest.raises(OSError):  # noqa: PT011
            run_training(recipe, model_dir, run)
    assert [step for step, _ in Recorder.sent] == [1, 2, 3, 4]
    run_training(recipe, model_dir, run, resume=True)
    rows = read_metrics(run)
    assert [step for step, _ in Recorder.sent] == [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["total_tokens"] for row in rows] == [64, 128, 192, 256]
    for (_, values), row in zip(Recorder.sent, rows, strict=True):
        for key in ("loss", "grad_norm", "lr", "total_tokens"):
            assert values[key] == row[key]
        assert values["tokens_per_second"] > 0
    assert Recorder.folders == [f"{run}/trackers/supra"] * 2
    assert Recorder.finished == 2
    assert (run / "trackers" / "run_name").read_text().startswith("run-")


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else object())
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, trackers="tensorboard,wandb"))
    with pytest.raises(UserError, match=r"trackers = wandb: not installed here\. Run: pip install wandb"):
        run_training(recipe, model_dir, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_is_only_watched_is_no_other_recipe(tiny: ModuleType, text_file: Path) -> None:
    plain = Recipe.model_validate(tiny.raw_recipe(text_file))
    changes = ["trackers=[tensorboard, trackio]", "stages.transfer.max_loss_ratio=3"]
    watched = recipe_io.parse(plain.to_yaml(), changes, name="tiny")
    assert watched.trackers == ("tensorboard", "trackio")
    assert watched.hash() == plain.hash()
    with pytest.raises(
        UserError, match=r"trackers\.0 = 'tensorbord': must be one of .*did you mean `tensorboard`"
    ):
        recipe_io.parse(plain.to_yaml(), ["trackers=[tensorbord]"], name="tiny")
