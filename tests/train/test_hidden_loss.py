"""The loss of hidden states against the plain computation, and what it does not reach."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from supra.config import Recipe, Stage
from supra.models import SupraForCausalLM
from supra.train.data import Batch
from supra.train.losses import StageLoss
from supra.train.teacher import build_teacher
from supra.train.tracking import read_metrics
from supra.train.trainable import enter_stage
from supra.train.trainer import run_training


def layer_outputs(tiny: ModuleType, model: SupraForCausalLM, batch: Batch) -> list[torch.Tensor]:
    """Outputs of the decoder layers, each computed by calling it."""
    body = model.model
    B, T = batch.input_ids.shape
    hidden = body.embed_tokens(batch.input_ids)
    arguments: dict[str, Any] = {"position_embeddings": body.rotary_emb(hidden, batch.position_ids)}
    masks = body._softmax_masks(hidden, None, None, batch.position_ids)
    outputs = []
    for layer in body.layers:
        mask = masks.get(layer.layer_type)
        packing = body._packing(None, batch.cu_seqlens, B, T)
        hidden = layer(hidden, attention_mask=mask, packing=packing, **arguments)
        outputs.append(hidden)
    return outputs


@pytest.mark.parametrize("trainable", ["new", "all"])
def test_hidden_states_equal_the_plain_computation(
    tiny: ModuleType, student: SupraForCausalLM, batch: Batch, trainable: str
) -> None:
    loss, found = tiny.run_loss(student, batch, loss="hidden", trainable=trainable)
    assert "model.norm.weight" not in found
    with torch.no_grad():
        wanted = layer_outputs(tiny, build_teacher(student), batch)
    errors = [
        ((ours - theirs) ** 2).sum(-1) / (theirs**2).sum(-1)
        for ours, theirs in zip(layer_outputs(tiny, student, batch), wanted, strict=True)
    ]
    expected = torch.stack(errors).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_same(found, tiny.gradients(student))


def test_micro_batches_add_up(tiny: ModuleType, student: SupraForCausalLM, batch: Batch) -> None:
    stage = Stage.model_validate(tiny.stage(loss="hidden", trainable="all"))
    teacher, accelerator = build_teacher(student), Accelerator(cpu=True)
    enter_stage(stage, student, teacher, seed=0)
    loss = StageLoss(stage, student, teacher, accelerator)
    one = loss(batch, loss.num_targets([batch]))
    expected = tiny.gradients(student)
    student.zero_grad()
    accelerator.gradient_accumulation_steps = 2
    total = sum(loss(batch, loss.num_targets([batch, batch])) for _ in range(2))
    assert float(total) == pytest.approx(float(one), rel=1e-5)
    tiny.assert_same(tiny.gradients(student), expected)


def test_hidden_states_come_closer_and_the_head_stays(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    stage = tiny.stage(
        loss="hidden", trainable="all", total_tokens=64 * 10, activation_checkpointing=True,
        optimizer={"lr": 3e-3, "schedule": "constant", "weight_decay": 0.1},
    )  # fmt: skip
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, stage))
    norms: list[torch.Tensor] = []
    run_training(
        recipe, model_dir, tmp_path / "run", on_stage_end=lambda _, m: norms.append(m.model.norm.weight)
    )
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert torch.equal(norms[0], torch.ones_like(norms[0]))
