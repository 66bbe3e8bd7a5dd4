"""What a run is foreseen to cost is what it costs, and what cannot fit is refused before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supra.config import Recipe
from supra.errors import UserError
from supra.train import budget, checkpoint, probe
from supra.train.plan import dry_run
from supra.train.trainer import run_training


def all_kinds(tiny: ModuleType, text: Path, **changes: Any) -> Recipe:
    """Checkpoints that grow from stage to stage, so that the largest sum is not the last."""
    adapt = tiny.stage(name="adapt", trainable="adapters", loss="kl")
    tune = tiny.stage(name="tune", trainable="all", loss="ce", checkpoint_every_steps=1)
    return Recipe.model_validate(tiny.raw_recipe(text, tiny.stage(), adapt, tune, **changes))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("adapters", ["merge", "keep"])
def test_the_disk_is_as_foreseen(
    adapters: str,
    tiny: ModuleType,
    tmp_path: Path,
    text_file: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, run_dir = all_kinds(tiny, text_file, adapters=adapters), tmp_path / "run"
    if adapters == "keep":  # a run that ends with its adapters beside the model
        recipe = recipe.model_copy(update={"stages": recipe.stages[:2]})
    plan = dry_run(recipe, model_dir, run_dir, probe=False)
    sizes: list[int] = []
    real = checkpoint.sync_folder

    def sync(folder: Path) -> None:  # when a checkpoint lies beside those that it will replace
        sizes.append(folder_bytes(run_dir))
        real(folder)

    monkeypatch.setattr(checkpoint, "sync_folder", sync)
    run_training(recipe, model_dir, run_dir)
    left = folder_bytes(run_dir)
    assert plan.disk_bytes == pytest.approx(left, rel=0.1)
    assert plan.peak_disk_bytes == pytest.approx(max(*sizes, left), rel=0.1)
    newest = checkpoint.newest(run_dir)
    assert newest is not None
    assert plan.stages[0].num_checkpoints == 2
    if adapters == "keep":
        assert plan.stages[1].checkpoint_bytes == pytest.approx(folder_bytes(newest), rel=0.1)


@pytest.mark.parametrize("start", [run_training, dry_run])
def test_a_disk_too_small_is_refused_before_anything_is_written(
    start: Any,
    tiny: ModuleType,
    tmp_path: Path,
    text_file: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = all_kinds(tiny, text_file)
    needed = dry_run(recipe, model_dir, tmp_path / "run", probe=False).peak_disk_bytes
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(budget.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if fits:
            assert dry_run(recipe, model_dir, tmp_path / "run", probe=False).free_disk_bytes == free
            continue
        with pytest.raises(UserError, match=r"needs .* of disk .* are free") as caught:
            start(recipe, model_dir, tmp_path / "run")
        assert caught.value.exit_code == 2
        assert str(tmp_path / "run") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_memory_too_small_is_refused_before_the_model_is_loaded(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = all_kinds(tiny, text_file)
    plan = dry_run(recipe, model_dir, tmp_path / "run", probe=False)
    # The last stage trains all: weights, gradients and two moments; its teacher is gone.
    assert plan.memory_bytes >= 16 * plan.num_parameters
    monkeypatch.setattr(budget, "available_memory_bytes", lambda device: plan.memory_bytes - 1)
    monkeypatch.setattr("supra.train.prepare.load_model", lambda *a, **k: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=r"memory: weights, gradients and moments need .* available on cpu"):
        run_training(recipe, model_dir, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_micro_batch_too_large_is_refused_after_two_rows(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = iter([SimpleNamespace(rss=0), SimpleNamespace(rss=10**9)])
    monkeypatch.setattr(probe.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: next(resident)))
    monkeypatch.setattr(budget, "available_memory_bytes", lambda device: 10**9)
    stage = tiny.stage(micro_batch_size=4)  # the second row took 1 GB: two more of them do not fit
    with pytest.raises(UserError, match=r"transfer: 2 further rows .* need 2\.00 GB where 1\.00 GB"):
        dry_run(Recipe.model_validate(tiny.raw_recipe(text_file, stage)), model_dir, tmp_path / "run")


def test_a_container_has_what_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(budget, "_CGROUP_LIMIT", tmp_path / "memory.max")
    whole = budget.available_memory_bytes(cpu)
    (tmp_path / "memory.max").write_text("max\n")
    assert budget.available_memory_bytes(cpu) == pytest.approx(whole, rel=0.2)
    (tmp_path / "memory.max").write_text("4000000\n")
    assert budget.available_memory_bytes(cpu) == 4_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert budget.available_memory_bytes(cpu) == 2_000_000


@given(num_micro_batches=st.integers(1, 200), micro_batch_s=st.floats(0.01, 5), optimizer_s=st.floats(0.0, 5))
def test_a_step_is_told_from_a_part_of_it(
    num_micro_batches: int, micro_batch_s: float, optimizer_s: float
) -> None:
    """However many micro-batches a step has, and whatever share of it the optimiser takes."""
    now, first_s = [0.0], 7.0
    calls: list[int] = []

    def train_step(step: int, limit: int) -> None:
        calls.append(limit)
        now[0] += (first_s if len(calls) == 1 else 0.0) + limit * micro_batch_s + optimizer_s

    runner: Any = SimpleNamespace(
        num_micro_batches=num_micro_batches,
        train_step=train_step,
        stage=SimpleNamespace(micro_batch_size=1, num_steps=3),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "clock", lambda: now[0])
        found = probe.time_steps(runner)
    assert found.seconds == pytest.approx(num_micro_batches * micro_batch_s + optimizer_s, rel=1e-6)
    assert found.first_s == pytest.approx(first_s, rel=1e-6)
    assert now[0] - first_s <= 6 + 6 * (2 * micro_batch_s + optimizer_s), "a probe is short"


@pytest.mark.slow
def test_time_memory_and_disk_are_foreseen_within_a_fifth(tiny: ModuleType, tmp_path: Path) -> None:
    """Each in a process of its own, as peak memory is a process's; time is CPU time."""
    shape = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    model = tiny.write_model(tmp_path / "model", **shape)
    text = tiny.write_text(tmp_path / "text.txt", seed=1, num_words=60_000)
    steps = {"length": 128, "tokens_per_step": 1536, "micro_batch_size": 4, "total_tokens": 1536 * 8}
    stages = [
        tiny.stage(**steps),
        tiny.stage(name="adapt", trainable="adapters", loss="kl", **steps),
        tiny.stage(name="tune", trainable="all", loss="ce", **steps),
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Recipe.model_validate(tiny.raw_recipe(text, *stages)).to_yaml())
    found: dict[str, dict[str, float]] = {}
    for what in ("plan", "train"):
        worker = [sys.executable, str(Path(__file__).with_name("cost_worker.py")), what]
        done = subprocess.run(
            [*worker, str(recipe), str(model), str(tmp_path / "run")],
            capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[what] = json.loads(done.stdout)
    for cost, real in found["train"].items():
        assert found["plan"][cost] == pytest.approx(real, rel=0.2), (cost, found)
