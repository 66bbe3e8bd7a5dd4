"""The moving average: its formula, what a stage ends with, and adapters under it."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from supra.config import Recipe
from supra.models import SupraForCausalLM
from supra.train.ema import MovingAverage
from supra.train.stage import StageRunner
from supra.train.trainer import run_training


def test_the_average_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(3, 2, generator=generator))
    expected, average = parameter.detach().clone(), MovingAverage(0.9, {"w": parameter})
    for _ in range(20):
        parameter.data = torch.randn(3, 2, generator=generator)
        average.update()
        expected = 0.9 * expected + 0.1 * parameter.detach()
    torch.testing.assert_close(average.average["w"], expected)
    assert not torch.allclose(parameter, expected)
    average.apply()
    assert torch.equal(parameter, average.average["w"])


@pytest.mark.parametrize("trainable", ["all", "adapters"])
def test_a_stage_ends_with_the_average_of_its_weights(
    tiny: ModuleType,
    tmp_path: Path,
    text_file: Path,
    model_dir: Path,
    trainable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What runs on from a plain run's weights after each step is what the run with `ema` exports."""
    decay, steps = 0.7, []
    real = StageRunner.train_step

    def record(self: StageRunner, step: int, limit: int | None = None) -> Any:
        if step == 0:
            steps.append({name: p.detach().clone() for name, p in self.trainable.parameters.items()})
        result = real(self, step, limit)
        steps.append({name: p.detach().clone() for name, p in self.trainable.parameters.items()})
        return result

    stage = tiny.stage(trainable=trainable, loss="kl")
    with monkeypatch.context() as patch:
        patch.setattr(StageRunner, "train_step", record)
        run_training(Recipe.model_validate(tiny.raw_recipe(text_file, stage)), model_dir, tmp_path / "plain")
    average = steps[0]
    for weights in steps[1:]:
        average = {name: decay * average[name] + (1 - decay) * w for name, w in weights.items()}

    seen: dict[str, Tensor] = {}

    def look(name: str, model: SupraForCausalLM) -> None:
        seen.update({key: p.detach().clone() for key, p in model.named_parameters()})

    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, {**stage, "ema": decay}))
    out = run_training(recipe, model_dir, tmp_path / "run", on_stage_end=look)
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(exported[name], seen[name]) for name in exported)
    original = load_file(model_dir / "model.safetensors")
    for name, tensor in average.items():
        if ".lora_B." in name:
            adapted = name.partition(".lora_B.")[0] + ".weight"
            lora_a = average[name.replace("lora_B", "lora_A")]
            expected = original[adapted] + 2.0 * tensor @ lora_a  # alpha / rank
            torch.testing.assert_close(exported[adapted], expected, rtol=1e-5, atol=1e-6)
        elif ".lora_A." not in name:
            torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-6)
