"""Window dropout: how often, for whom, and that it is the same whoever computes it."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from supra.config import Recipe, WindowDropout
from supra.models import SupraForCausalLM
from supra.train.data import Batch
from supra.train.losses import StageLoss
from supra.train.trainer import run_training
from supra.train.window_dropout import dropout_probability, windows_dropped


def test_the_probability_moves_linearly_over_the_steps() -> None:
    config = WindowDropout(start=0.9, end=0.1)
    found = [dropout_probability(config, step, 5) for step in range(5)]
    assert found == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    assert dropout_probability(config, 0, 1) == 0.9


def test_each_layer_draws_for_itself_and_as_often_as_said(student: SupraForCausalLM) -> None:
    drawn = []
    for seed in range(400):
        with windows_dropped(student, 0.3, seed):
            drawn.append([layer.window == 0 for layer in student.linear_layers()])
    assert all(layer.ablation is None for layer in student.linear_layers())
    shares = torch.tensor(drawn).float().mean(0)
    assert ((shares - 0.3).abs() < 0.08).all()
    assert {tuple(pair) for pair in drawn} == {(a, b) for a in (True, False) for b in (True, False)}
    with windows_dropped(student, 0.3, 7):
        assert [layer.window == 0 for layer in student.linear_layers()] == drawn[7]


@pytest.mark.parametrize("loss", ["attention", "hidden", "kl", "ce"])
def test_a_dropped_window_is_the_linear_part_over_every_token(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch, loss: str
) -> None:
    changes = {"loss": loss, "trainable": "new", "window_dropout": {"start": 1, "end": 1}}
    with windows_dropped(student, 1.0, 0):
        value, found = tiny.run_loss(student, batch, **changes)
    with student.ablation("linear_only"):
        expected, gradients = tiny.run_loss(student, batch, **changes)
    assert value == expected
    tiny.assert_same(found, gradients)
    assert value != tiny.run_loss(student, batch, **changes)[0]


def recorded_run(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, model: Path, run: Path
) -> list[Any]:
    """Which windows were gone in each micro-batch of a run."""
    seen: list[Any] = []
    real = StageLoss.__call__

    def spy(self: StageLoss, batch: Any, targets: Any) -> torch.Tensor:
        seen.append([layer.window == 0 for layer in self.context.student.linear_layers()])
        return real(self, batch, targets)

    with monkeypatch.context() as patch:
        patch.setattr(StageLoss, "__call__", spy)
        run_training(recipe, model, run)
    return seen


def test_a_run_draws_by_seed_and_step_and_ends_with_its_windows(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tiny.stage(window_dropout={"start": 1, "end": 0}, total_tokens=64 * 5)
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, stage))
    other = Recipe.model_validate(tiny.raw_recipe(text_file, stage, seed=1))
    first = recorded_run(tiny, monkeypatch, recipe, model_dir, tmp_path / "a")
    assert first == recorded_run(tiny, monkeypatch, recipe, model_dir, tmp_path / "b")
    assert first != recorded_run(tiny, monkeypatch, other, model_dir, tmp_path / "c")
    assert first[:2] == [[True, True]] * 2  # the first step's two micro-batches
    assert first[-2:] == [[False, False]] * 2
    # Steps and micro-batches draw apart.
    assert len({tuple(map(tuple, first[i : i + 2])) for i in range(0, 10, 2)}) > 2
