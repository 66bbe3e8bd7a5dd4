"""Several processes train as one does: the same losses and weights, no sequence twice, and another count may go on."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from supra.config import Recipe, load
from supra.errors import UserError
from supra.train import parallel
from supra.train.data import Batch
from supra.train.losses import NOTHING, Targets
from supra.train.parallel import Processes
from supra.train.precision import make_accelerator
from supra.train.prepare import prepare
from supra.train.stage import StageRunner
from supra.train.teacher import build_teacher
from supra.train.tracking import Reporter, read_metrics
from supra.train.trainer import run_training


class Alone:
    """What `Processes` asks of an Accelerator."""

    def __init__(self, count: int, index: int) -> None:
        self.num_processes, self.process_index = count, index


@pytest.fixture
def recipe(tiny: ModuleType, text_file: Path, tmp_path: Path) -> Path:
    """Three micro-batches a step, so that two processes have unequal shares; dropout, an average and a stream."""
    uneven = {"tokens_per_step": 96, "total_tokens": 384}
    streamed = {"train": [str(text_file)], "streaming": True}
    adapt = tiny.stage(
        name="adapt",
        trainable="adapters",
        loss="ce",
        lora={"rank": 2, "dropout": 0.2},
        ema=0.7,
        data=streamed,
        **uneven,
    )
    dropped = {"start": 1.0, "end": 0.3}  # in the first step no window is used, in the others some are
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            tiny.raw_recipe(
                text_file, tiny.stage(window_dropout=dropped, positions="pose:64", **uneven), adapt
            )
        )
    )
    return path


def train_in_two(recipe: Path, model: Path, run: Path) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "supra", "train", str(recipe), "--model", str(model), "-o", str(run)],
        capture_output=True, text=True, timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SUPRA_CACHE": f"{run}-cache"},
    )  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        name: x
        for path in sorted((run / "model").glob("*.safetensors"))
        for name, x in load_file(path).items()
    }


def test_two_processes_train_as_one_and_one_goes_on_where_two_stopped(
    recipe: Path, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    run_training(load(recipe), model_dir, alone)
    assert "2 processes" not in capsys.readouterr().err
    done = train_in_two(recipe, model_dir, run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(run / "model")], "one process speaks"
    assert "2 processes" in done.stderr
    rows = read_metrics(alone), read_metrics(run)
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(1, 9))
    for one, two in zip(*rows, strict=True):
        assert two["tokens"] == one["tokens"] == 96
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    wanted = weights(alone)
    assert_same(weights(run), wanted)

    # The run of two, from a checkpoint in the middle, ended by one.
    shutil.rmtree(run / "model")
    checkpoints = sorted((run / "checkpoints").iterdir())
    for folder in checkpoints[1:]:
        shutil.rmtree(folder)
    run_training(load(recipe), model_dir, run, resume=True)
    assert f"resuming from {checkpoints[0].name}" in capsys.readouterr().err
    assert_same(weights(run), wanted)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-5, msg=name)


def test_a_mistake_of_all_processes_is_told_once(recipe: Path, model_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "used"
    run.mkdir()
    (run / "something").touch()
    done = train_in_two(recipe, model_dir, run)
    assert done.returncode != 0
    assert done.stderr.count("it is not empty") == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_item_of_a_step_falls_to_one_process(count: int) -> None:
    items = list(range(7))
    shares = [Processes(Alone(count, index)).share(items) for index in range(count)]  # type: ignore[arg-type]
    assert sorted(itertools.chain.from_iterable(shares)) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class CountingLoss:
    """In the place of a stage's loss: counts the token ids of the micro-batches that count."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.calls = 0

    def num_targets(self, batches: list[Batch]) -> Targets:
        return Targets(1.0, 1.0, 1.0)

    def __call__(self, batch: Batch, targets: Targets) -> torch.Tensor:
        self.calls += 1
        if targets != NOTHING:
            self.counts.update(batch.input_ids.flatten().tolist())
        return torch.zeros(())


@pytest.mark.parametrize(("count", "sharded"), [(2, False), (2, True), (5, False), (5, True)])
def test_every_token_of_a_run_counts_once_whatever_the_number_of_processes(
    tiny: ModuleType,
    model_dir: Path,
    text_file: Path,
    tmp_path: Path,
    count: int,
    sharded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three micro-batches a step: shares are uneven, and of five processes two have nothing to do."""
    monkeypatch.setattr(Processes, "sum", lambda self, value: value)
    monkeypatch.setattr(Processes, "sum_gradients", lambda self, parameters: None)
    recipe = Recipe.model_validate(
        tiny.raw_recipe(text_file, tiny.stage(tokens_per_step=96, total_tokens=96 * 30))
    )
    prepared = prepare(recipe, model_dir, tmp_path / "run", Reporter.silent())
    teacher = build_teacher(prepared.student)
    runner = StageRunner(recipe, 0, prepared.student, teacher, prepared.accelerator, prepared.texts[0])
    runner.sharded = sharded

    def run(count: int, index: int) -> CountingLoss:
        loss = CountingLoss()
        runner.loss = loss  # type: ignore[assignment]
        runner.processes = Processes(Alone(count, index))  # type: ignore[arg-type]
        for step in range(runner.stage.num_steps):
            runner.train_step(step)
        return loss

    alone = run(1, 0)
    assert alone.counts.total() == 96 * 30
    shares = [run(count, index) for index in range(count)]
    assert sum((share.counts for share in shares), Counter()) == alone.counts
    calls = {share.calls for share in shares}
    assert (len(calls) == 1) == sharded, "where weights are shared out, all call them equally often"


def test_gradients_travel_in_buckets_and_missing_ones_count_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "BUCKET_ELEMENTS", 5)
    sent: list[torch.Tensor] = []

    def double(flat: torch.Tensor) -> None:
        sent.append(flat.clone())
        flat.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (1,), (3,), (9,))]
    for number, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    Processes(Alone(2, 0)).sum_gradients(parameters)  # type: ignore[arg-type]
    assert [len(flat) for flat in sent] == [5, 3, 9]
    for number, parameter in enumerate(parameters):
        assert parameter.grad is not None
        assert torch.equal(
            parameter.grad, torch.full_like(parameter, 2.0 * (number + 1) if number < 3 else 0.0)
        )


def test_processes_that_accelerate_does_not_see_stop_the_run(
    tiny: ModuleType, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class One:
        num_processes = 1

        def __init__(self, **_: Any) -> None: ...

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("supra.train.precision.Accelerator", One)
    with pytest.raises(UserError, match="WORLD_SIZE 2: Accelerate sees 1 of the processes"):
        make_accelerator(Recipe.model_validate(tiny.raw_recipe(text_file)))
