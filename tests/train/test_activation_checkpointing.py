"""Recomputing the decoder layers changes memory and nothing else."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from supra.config import Data, Recipe
from supra.loading import load_model
from supra.models import SupraForCausalLM
from supra.train.mixture import MixedData, Mixture
from supra.train.stage import StageRunner
from supra.train.teacher import build_teacher
from supra.train.tokens import load_tokens


def run_step(
    tiny: ModuleType, text: Path, model_dir: Path, **changes: Any
) -> tuple[float, dict[str, Tensor], int]:
    """Loss and weights after one step, and the bytes that autograd kept for the backward pass."""
    stage = tiny.stage(micro_batch_size=4, **changes)
    recipe = Recipe.model_validate(tiny.raw_recipe(text, stage))
    loaded = load_model(model_dir, device="cpu", dtype="float32")
    student = loaded.model
    assert isinstance(student, SupraForCausalLM)
    store = load_tokens(Data(train=(str(text),)), loaded.tokenizer)
    data = MixedData(Mixture((store,), (1,)), length=recipe.stages[0].length, seed=0)
    runner = StageRunner(recipe, 0, student, build_teacher(student), Accelerator(cpu=True), data)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for parameter in student.parameters():
        parameter.grad = None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = runner.train_step(0)
    weights = {name: p.detach().clone() for name, p in runner.trainable.parameters.items()}
    own = {p.untyped_storage().data_ptr() for p in student.parameters()}
    runner.close()
    assert not student.is_activation_checkpointing
    return result.loss, weights, sum(size for pointer, size in kept.items() if pointer not in own)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainable": "all", "loss": "ce"},
        {"trainable": "adapters", "loss": "kl", "lora": {"rank": 2, "dropout": 0.5}},
        {"trainable": "new", "loss": "kl"},
    ],
    ids=lambda changes: changes["trainable"],
)
def test_the_same_bits_in_less_memory(
    tiny: ModuleType, text_file: Path, model_dir: Path, changes: dict[str, Any]
) -> None:
    loss, weights, kept = run_step(tiny, text_file, model_dir, **changes)
    loss_again, weights_again, kept_again = run_step(
        tiny, text_file, model_dir, activation_checkpointing=True, **changes
    )
    assert loss_again == loss
    assert weights_again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(weights_again[name], tensor), name
    assert kept_again < 0.2 * kept
