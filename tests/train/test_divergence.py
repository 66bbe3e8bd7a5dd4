"""A loss that is not to be trained on stops the run, and what it then offers works."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from supra.cli import app
from supra.cli_train import launcher
from supra.config import Recipe
from supra.errors import SupraError, UserError
from supra.train import checkpoint
from supra.train import stage as stage_module
from supra.train.divergence import WINDOW_STEPS, DivergedError, LossGuard
from supra.train.run_folder import skip_steps, skipped_steps
from supra.train.tracking import read_metrics
from supra.train.trainer import run_training


def poison_model(tiny: ModuleType, folder: Path) -> Path:
    """A model that gives NaN wherever the letter Z is read."""
    tiny.write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (token,) = tiny.make_tokenizer().encode("Z")
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def supra(*arguments: str) -> Result:
    """The command line in this process; a failure is its `exception`, which `supra.cli.main` would print."""
    return CliRunner().invoke(app, list(arguments))


def test_the_command_offered_for_a_poisoned_batch_ends_the_run(tiny: ModuleType, tmp_path: Path) -> None:
    model = poison_model(tiny, tmp_path / "model")
    text = tiny.write_text(tmp_path / "text.txt", seed=1, num_words=190)
    text.write_text(text.read_text().replace("the", "Z", 1))
    recipe = Recipe.model_validate(tiny.raw_recipe(text, tiny.stage(checkpoint_every_steps=1)))
    (tmp_path / "my recipe.yaml").write_text(recipe.to_yaml())
    run = tmp_path / "run"
    stopped = supra("train", str(tmp_path / "my recipe.yaml"), "--model", str(model), "-o", str(run))
    error = str(stopped.exception)
    assert isinstance(stopped.exception, SupraError) and stopped.exception.exit_code == 1
    (step,) = re.findall(r"^stage transfer, step (\d) \(step \1 of the run\): loss nan", error)
    assert "sequences (component:epoch:number) 0:0:" in error
    (offered,) = re.findall(r"Leave this step out: supra (.*) ; or begin", error)
    (anew,) = re.findall(r"or begin anew with a lower rate: supra (.*)$", error)
    assert f"{run}-slower --set stages.transfer.optimizer.lr=0.005" in anew
    saved = checkpoint.load_newest(run, print)
    assert saved is not None
    assert saved.position.step == int(step) - 1
    assert all(tensor.isfinite().all() for tensor in saved.model.values())

    assert "loss nan" in str(supra(*shlex.split(offered.split(" --skip-steps")[0])).exception), (
        "it comes again"
    )
    ended = supra(*shlex.split(offered))
    assert ended.exit_code == 0
    assert ended.stdout.strip() == str(run / "model")
    assert [row["step"] for row in read_metrics(run)] == [n for n in range(1, 5) if n != int(step)]
    facts = json.loads((run / "model" / "supra.json").read_text())["training"]
    assert (facts["skipped_steps"], facts["tokens_trained"]) == ([int(step)], 192)
    assert all(
        x.isfinite().all() for n, x in load_file(run / "model/model.safetensors").items() if "embed" not in n
    )


def spiking(tiny: ModuleType, tmp_path: Path, **changes: Any) -> Recipe:
    """A text with one document like no other, which the loss of a model that has learnt the rest tells."""
    common = tiny.write_text(tmp_path / "text.txt", seed=1, num_words=1200)
    parts = common.read_text().split("\n\n")
    odd = "".join(chr(33 + (7 * n * n + n) % 90) for n in range(120))
    common.write_text("\n\n".join([*parts[:60], odd, *parts[60:]]))
    changes = {"total_tokens": 64 * 13, "max_loss_ratio": 1.2, "checkpoint_every_steps": 1, **changes}
    tune = tiny.stage(
        name="tune", trainable="all", loss="ce", optimizer={"lr": 2e-2, "schedule": "constant"}, **changes
    )
    return Recipe.model_validate(tiny.raw_recipe(common, tune, seed=4))


def test_a_spike_stops_alike_after_a_resume_and_skipping_it_is_exact(
    tiny: ModuleType, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = spiking(tiny, tmp_path)
    with pytest.raises(DivergedError, match=r"more than max_loss_ratio 1\.2 × .*median of the last") as whole:
        run_training(recipe, model_dir, tmp_path / "whole")
    step = whole.value.global_step
    assert step > 8
    tiny.stop_after(monkeypatch, step - 3, recipe, model_dir, tmp_path / "parts")
    with pytest.raises(DivergedError) as parts:
        run_training(recipe, model_dir, tmp_path / "parts", resume=True)
    assert (parts.value.reason, parts.value.global_step) == (whole.value.reason, step)

    # A resume may take another ratio: it decides nothing that was trained.
    run_training(recipe, model_dir, tmp_path / "whole", resume=True, skip_steps=[step])
    tiny.stop_after(monkeypatch, 2, recipe, model_dir, tmp_path / "parts", resume=True, skip_steps=[step])
    assert checkpoint.newest_step(tmp_path / "parts") == step + 1
    run_training(spiking(tiny, tmp_path, max_loss_ratio=50), model_dir, tmp_path / "parts", resume=True)
    rows, weights = [], []
    for run in ("whole", "parts"):
        rows.append([{**row, "tokens_per_second": 0} for row in read_metrics(tmp_path / run)])
        weights.append((tmp_path / run / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert rows[0] == rows[1]
    assert step not in [row["step"] for row in rows[0]]


def test_the_median_is_not_moved_by_a_spike() -> None:
    guard = LossGuard(3.0)
    for loss in [1.0] * 7:
        assert guard.problem(100.0, 1.0) is None, "too few steps to compare with"
        guard.passed(loss)
    guard.passed(2.9)
    assert guard.problem(2.9, 1.0) is None
    assert "loss 3.1 is more than max_loss_ratio 3 × 1" in str(guard.problem(3.1, 1.0))
    for _ in range(WINDOW_STEPS):
        guard.passed(10.0)
    assert guard.problem(29.0, 1.0) is None, "only the last steps count"
    assert LossGuard().problem(1e9, 1.0) is None
    assert "gradient norm inf" in str(LossGuard().problem(1.0, math.inf))


def test_what_cannot_be_skipped_is_refused(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file))
    run_training(recipe, model_dir, tmp_path / "run")
    with pytest.raises(UserError, match=r"step 3: cannot be skipped: it is done already"):
        run_training(recipe, model_dir, tmp_path / "run", resume=True, skip_steps=[3])
    for step in (0, 5):
        with pytest.raises(UserError, match=rf"step {step}: .*is none of the run's 4"):
            skip_steps(tmp_path / "run", [step], recipe, 0)
    with pytest.raises(UserError, match="stage transfer: would be left without a step"):
        skip_steps(tmp_path / "run", [1, 2, 3, 4], recipe, 0)
    assert skipped_steps(tmp_path / "run") == frozenset()
    skip_steps(tmp_path / "run", [4], recipe, 0)
    skip_steps(tmp_path / "run", [2], recipe, 0)
    assert skipped_steps(tmp_path / "run") == {2, 4}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--skip-steps", "3"], "goes with --resume"),
        (["--resume", "--skip-steps", "5-3"], "no list of steps"),
    ],
)
def test_a_mistake_in_what_to_skip(options: list[str], named: str, tmp_path: Path) -> None:
    done = supra("train", "demo", "--model", "x", "-o", str(tmp_path / "run"), *options)
    assert isinstance(done.exception, UserError)
    assert named in str(done.exception)


def test_the_norm_of_the_new_parameters_and_the_clipping_are_told(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = {"lr": 1e-3, "grad_clip": 1e-3}
    adapt = tiny.stage(name="adapt", trainable="adapters", loss="kl", optimizer=optimizer, total_tokens=64)
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(total_tokens=128), adapt))
    norms: list[float] = []
    real = stage_module.clip_grad_norm

    def clip(parameters: Any, *a: Any, **k: Any) -> Any:
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)))
        return real(parameters, *a, **k)

    monkeypatch.setattr(stage_module, "clip_grad_norm", clip)
    run_training(recipe, model_dir, tmp_path / "run")
    alone, _, beside = read_metrics(tmp_path / "run")
    assert alone["new_grad_norm"] is None, "all that trains is new"
    assert alone["clip_factor"] == 1.0
    assert beside["grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
    assert 0 < beside["new_grad_norm"] < beside["grad_norm"]
    assert beside["clip_factor"] == pytest.approx(1e-3 / beside["grad_norm"], abs=1e-6)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, "supra"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nproc-per-node 4 -m supra"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "torchrun --nnodes 2 --nproc-per-node 8 -m supra"),
    ],
)
def test_the_command_offered_starts_as_many_processes(
    environment: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert " ".join(launcher()) == wanted
