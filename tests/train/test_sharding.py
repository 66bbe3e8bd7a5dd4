"""FSDP2 on two CPU processes: what one process trains whole, two train in shards, and either goes on for the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from supra.config import Recipe, load
from supra.errors import UserError
from supra.train import run_training
from supra.train.precision import make_accelerator
from supra.train.sharding import clip_grad_norm
from supra.train.tracking import read_metrics


@pytest.fixture(scope="module")
def model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that two processes cannot share out evenly, and a head of its own."""
    return tiny.write_model(
        tmp_path_factory.mktemp("sharded") / "model",
        hidden_size=48,
        intermediate_size=97,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=False,
    )


@pytest.fixture
def recipe(tiny: ModuleType, text_file: Path, tmp_path: Path) -> Path:
    """Every kind of stage, three micro-batches a step: one process has one to do where the other has two."""
    uneven = {"tokens_per_step": 96, "total_tokens": 192}
    stages = [
        tiny.stage(**uneven, attention_target="before_o_proj"),
        tiny.stage(name="after", attention_target="after_o_proj", **uneven),
        tiny.stage(name="adapt", trainable="adapters", loss="ce", lora={"rank": 2, "dropout": 0.2}, **uneven),
        tiny.stage(name="aligned", trainable="all", loss="hidden", **uneven),
        tiny.stage(
            name="everything", trainable="all", loss="kl", activation_checkpointing=True, ema=0.8, **uneven
        ),
        tiny.stage(name="words", trainable="all", loss="ce", **uneven),
    ]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny.raw_recipe(text_file, *stages)))
    return path


def train(recipe: Path, model: Path, run: Path, strategy: str, *more: str) -> None:
    """In this process, or (fsdp2) in two of their own."""
    if strategy == "ddp":
        run_training(load(recipe), model, run, resume="--resume" in more)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "supra"]
    options = ["--model", str(model), "-o", str(run), "--set", "strategy=fsdp2", *more]
    done = subprocess.run(
        [sys.executable, *launcher, "train", str(recipe), *options],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(done.stderr, file=sys.stderr)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        n: x for path in sorted((run / "model").glob("*.safetensors")) for n, x in load_file(path).items()
    }


def assert_moved_alike(run: Path, wanted: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> None:
    """What training added is the same to 1e-3 of its length, tensor by tensor.

    Not element by element: Adam turns the rounding of a gradient that is nearly zero into a whole step.
    """
    found = weights(run / "model")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        moved = (wanted[name] - start[name]).norm()
        assert moved > 0, f"{name} has not been trained"
        assert (tensor - wanted[name]).norm() < 1e-3 * moved, name


def test_shards_train_as_the_whole_model_does(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    train(recipe, model, whole, "ddp")
    train(recipe, model, shards, "fsdp2")
    assert "2 processes · strategy fsdp2" in capsys.readouterr().err
    for one, two in zip(read_metrics(whole), read_metrics(shards), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5), one
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4), one
    wanted, start = weights(whole / "model"), weights(model)
    assert_moved_alike(shards, wanted, start)
    loaded = AutoModelForCausalLM.from_pretrained(shards / "model")
    assert torch.isfinite(loaded(torch.arange(8).unsqueeze(0)).logits).all(), "an ordinary checkpoint"

    # Stopped in the middle of the last stage, and ended by one process that holds all.
    go_on_as(recipe, model, shards, "ddp", capsys)
    assert_moved_alike(shards, wanted, start)


@pytest.mark.slow
def test_shards_go_on_where_the_whole_model_stopped(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(recipe, model, run, "ddp")
    wanted = weights(run / "model")
    go_on_as(recipe, model, run, "fsdp2", capsys)
    assert_moved_alike(run, wanted, weights(model))


def go_on_as(recipe: Path, model: Path, run: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Take a finished run back to its last checkpoint but one, and resume it by another strategy."""
    shutil.rmtree(run / "model")
    checkpoints = sorted((run / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])
    train(recipe, model, run, strategy, "--resume")
    assert f"resuming from {checkpoints[-2].name}" in capsys.readouterr().err


def test_one_process_has_nobody_to_share_with(tiny: ModuleType, text_file: Path) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, strategy="fsdp2"))
    with pytest.raises(UserError, match="strategy fsdp2: one process has nobody to share the model with"):
        make_accelerator(recipe)


def test_nobody_may_watch_a_part_of_the_model(
    tiny: ModuleType, text_file: Path, model: Path, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, strategy="fsdp2"))
    with pytest.raises(UserError, match="on_stage_end: it would see a part of the model"):
        run_training(recipe, model, tmp_path / "run", on_stage_end=lambda *_: None)


@pytest.mark.parametrize(
    "stage",
    [
        {"loss": "attention_weights"},
        {"trainable": "adapters", "loss": "kl", "lora": {"rank": 2, "dora": True}},
    ],
    ids=["attention_weights", "dora"],
)
def test_what_needs_whole_weights_is_refused(
    tiny: ModuleType, text_file: Path, stage: dict[str, Any]
) -> None:
    raw = tiny.raw_recipe(text_file, tiny.stage(**stage), strategy="fsdp2")
    with pytest.raises(ValueError, match=r"transfer: .* fsdp2"):
        Recipe.model_validate(raw)
    Recipe.model_validate(raw | {"strategy": "ddp"})


def test_the_norm_is_that_of_all_gradients_together() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), -1.0)
    assert float(clip_grad_norm(parameters, 2.0)) == pytest.approx(4.0)
    assert parameters[0].grad.tolist() == pytest.approx([1.0] * 3, rel=1e-5)
    assert parameters[1].grad.flatten().tolist() == pytest.approx([-0.5] * 4, rel=1e-5)
