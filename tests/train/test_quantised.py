"""What a recipe keeps in fewer bytes than fp32's: AdamW's moments, and the teacher's weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from supra.config import Optimizer, Recipe, TeacherWeights
from supra.errors import UserError
from supra.models import SupraForCausalLM
from supra.train import checkpoint
from supra.train.data import Batch
from supra.train.moments import moments_bytes, moments_of
from supra.train.narrow import narrow, narrowed_bytes
from supra.train.optim import build_optimizer
from supra.train.plan import dry_run
from supra.train.teacher import build_teacher
from supra.train.tracking import read_metrics
from supra.train.trainer import run_training

NARROW: list[TeacherWeights] = ["bfloat16", "int8", "nf4"]


def int8_stage(tiny: ModuleType, **changes: Any) -> dict[str, Any]:
    optimizer = {"lr": 1e-3, "warmup_steps": 1, "weight_decay": 0.01, "moments": "int8"}
    return tiny.stage(name="distill", trainable="all", loss="kl", optimizer=optimizer, ema=0.8, **changes)


def steps(parameter: torch.nn.Parameter, moments: str, num_steps: int = 20) -> torch.optim.Optimizer:
    config = Optimizer.model_validate({"lr": 1e-2, "weight_decay": 0.1, "moments": moments})
    optimizer = build_optimizer(config, {"w": parameter})
    generator = torch.Generator().manual_seed(2)
    for _ in range(num_steps):
        parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.5
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("shape", [(96, 64), (63, 65), (64, 63), (7,)])
def test_moments_in_8_bits_take_the_steps_of_adamw(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact, found = (torch.nn.Parameter(start.clone()) for _ in range(2))
    steps(exact, "float32")
    optimizer = steps(found, "int8")
    error = ((found - exact).norm() / (exact - start).norm()).detach()
    assert float(error) <= (0.05 if found.numel() >= 4096 else 1e-5)
    state = moments_of(optimizer, {"w": found})["w"]
    held = sum(tensor.nbytes for key, tensor in state.items() if key != "step")
    assert held == moments_bytes(found.numel(), "int8")
    assert held <= 0.26 * moments_bytes(found.numel(), "float32") or found.numel() < 4096


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, int8_stage(tiny), teacher_weights="int8"))
    run_training(recipe, model_dir, tmp_path / "whole")
    tiny.stop_after(monkeypatch, 1, recipe, model_dir, tmp_path / "stopped")
    newest = checkpoint.newest(tmp_path / "stopped")
    assert newest is not None
    saved = load_file(newest / "tensors.safetensors")
    kinds = {name.split(".")[1]: tensor.dtype for name, tensor in saved.items() if "embed_tokens" in name}
    assert kinds["state1"] == kinds["state2"] == torch.uint8
    plan = dry_run(recipe, model_dir, tmp_path / "planned", probe=False)
    size = (newest / "tensors.safetensors").stat().st_size
    assert plan.stages[0].checkpoint_bytes == pytest.approx(size, rel=0.05)
    run_training(recipe, model_dir, tmp_path / "stopped", resume=True)
    one, two = (
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "stopped")
    )
    assert one == two
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "stopped")]
    assert losses[0] == losses[1]


def logits(model: SupraForCausalLM, batch: Batch) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=batch.input_ids, use_cache=False).logits.float()


@pytest.mark.parametrize("weights", NARROW)
def test_a_narrow_teacher_says_what_the_teacher_says(
    weights: TeacherWeights, student: SupraForCausalLM, batch: Batch
) -> None:
    wanted, untouched = (
        logits(build_teacher(student), batch),
        {n: p.clone() for n, p in student.named_parameters()},
    )
    teacher = build_teacher(student, weights)
    found = logits(teacher, batch)
    error = float((found - wanted).norm() / wanted.norm())
    assert error <= {"bfloat16": 0.0, "int8": 0.02, "nf4": 0.15}[weights]
    assert weights == "bfloat16" or error > 0
    own = {p.data_ptr() for p in student.parameters()}
    copies = [p for p in teacher.parameters() if p.data_ptr() not in own]
    assert {p.dtype for p in copies} == {
        {"bfloat16": torch.bfloat16, "int8": torch.int8, "nf4": torch.uint8}[weights]
    }
    held = sum(p.nbytes for p in copies)
    counted = sum(narrowed_bytes(student, weights).values())
    assert held == counted if weights != "nf4" else held == pytest.approx(counted * 0.5 / (0.5 + 4 / 64))
    assert all(torch.equal(p, untouched[name]) for name, p in student.named_parameters())


def test_an_outlying_feature_does_not_flatten_the_others() -> None:
    """LLM.int8() keeps columns of large activations apart; without that their row's scale would round all else away."""
    layer = torch.nn.Linear(128, 64, bias=False)
    hidden = torch.randn(8, 128)
    hidden[:, 5] *= 200
    wanted = layer(hidden).detach()
    model = torch.nn.ModuleDict({"q_proj": layer})
    narrow(model, "int8")
    with torch.no_grad():
        found = model["q_proj"](hidden)
    assert float((found - wanted).norm() / wanted.norm()) <= 0.01  # 0.027 without


@pytest.mark.parametrize(("rows", "columns", "copied"), [(64, 128, True), (48, 64, False), (64, 96, False)])
def test_nf4_takes_whole_blocks(rows: int, columns: int, copied: bool) -> None:
    model = torch.nn.ModuleDict(
        {"up_proj": torch.nn.Linear(columns, rows), "lm_head": torch.nn.Linear(128, 64)}
    )
    own, hidden = model["up_proj"], torch.randn(3, columns)
    counted = narrowed_bytes(model, "nf4")
    narrow(model, "nf4")
    assert (model["up_proj"] is not own) == copied == bool(counted)
    with torch.no_grad():
        error = (model["up_proj"](hidden) - own(hidden)).norm() / own(hidden).norm()
    assert float(error) <= 0.2 * copied
    if copied:
        weight = model["up_proj"].weight
        assert weight.nbytes + weight.quant_state.absmax.nbytes <= counted["up_proj.weight"]


def test_a_run_with_int8_says_no_more_than_another(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny.raw_recipe(text_file, tiny.stage(trainable="all", loss="kl"), teacher_weights="int8")
    run_training(Recipe.model_validate(recipe), model_dir, tmp_path / "run")
    assert not [record for record in caplog.records if record.name.startswith("bitsandbytes")]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["versions"]["bitsandbytes"]


def test_a_narrow_teacher_stays_as_it_is_while_the_student_moves(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    losses = {}
    for weights in ("shared", "bfloat16"):
        recipe = tiny.raw_recipe(
            text_file, tiny.stage(trainable="all", loss="kl"), dtype="bfloat16", teacher_weights=weights
        )
        run_training(Recipe.model_validate(recipe), model_dir, tmp_path / weights)
        losses[weights] = [row["loss"] for row in read_metrics(tmp_path / weights)]
    assert losses["bfloat16"] == losses["shared"]


def test_a_narrow_teacher_and_8_bits_are_counted(
    tiny: ModuleType, text_file: Path, model_dir: Path, tmp_path: Path
) -> None:
    def memory(moments: str = "float32", **changes: Any) -> int:
        stage = tiny.stage(trainable="all", loss="kl", optimizer={"lr": 1e-3, "moments": moments})
        recipe = Recipe.model_validate(tiny.raw_recipe(text_file, stage, **changes))
        return dry_run(recipe, model_dir, tmp_path / "run", probe=False).memory_bytes

    whole = memory()
    assert (
        memory(teacher_weights="int8") < memory(teacher_weights="nf4") < whole
    )  # a projection stays: 96 columns
    assert (
        memory("int8")
        < whole
        - 5
        * dry_run(
            Recipe.model_validate(tiny.raw_recipe(text_file)), model_dir, tmp_path / "run", probe=False
        ).num_parameters
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"teacher_weights": "int8"}, "teacher_weights int8"), ({}, "transfer.optimizer.moments int8")],
)
def test_without_bitsandbytes_nothing_is_loaded(
    changes: dict[str, Any], named: str, tiny: ModuleType, text_file: Path, model_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    optimizer = {"lr": 1e-2} if changes else {"lr": 1e-2, "moments": "int8"}
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(optimizer=optimizer), **changes))
    with pytest.raises(UserError, match=f"{named}: bitsandbytes is not installed. Run: pip install"):
        run_training(recipe, model_dir, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bf16_teacher_in_an_fp32_run_is_refused(
    tiny: ModuleType, text_file: Path, model_dir: Path, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, teacher_weights="bfloat16"))
    with pytest.raises(UserError, match="the run computes in float32"):
        run_training(recipe, model_dir, tmp_path / "run")
