"""What a run will do and cost, before it does it: tokens, steps, memory, disk, and time by a short probe."""

import json
import resource
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from supra.config import Recipe
from supra.train.checkpoint import KEPT
from supra.train.export import stored_dtype
from supra.train.run_folder import check_new_or_resumed
from supra.train.stage import StageRunner
from supra.train.teacher import build_teacher
from supra.train.tracking import Reporter
from supra.train.trainer import Prepared, prepare

_FP32_BYTES = 4
_MOMENTS = 2  # AdamW's, per trained weight


@dataclass(frozen=True)
class StagePlan:
    """One stage; `epochs`: of each component of its data, None where streamed; `seconds`: None where not probed."""

    name: str
    trainable: str
    loss: str
    num_trainable_parameters: int
    length: int
    steps: int
    tokens: int
    data_tokens: int | None
    epochs: tuple[float | None, ...]
    checkpoint_bytes: int
    seconds: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """`memory_bytes`: weights, gradients, moments and averages; `measured_peak_bytes`: what the probe really took."""

    recipe: str
    model_dir: str
    runs_on: str
    num_parameters: int
    stages: tuple[StagePlan, ...]
    memory_bytes: int
    measured_peak_bytes: int | None
    disk_bytes: int
    free_disk_bytes: int

    @property
    def seconds(self) -> float | None:
        """Time of all stages together."""
        times = [stage.seconds for stage in self.stages]
        return None if None in times else sum(t for t in times if t is not None)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "seconds": self.seconds}, indent=2)

    def render(self) -> RenderableType:
        table = Table("stage", "trains", "loss", "length", "steps", "tokens", "epochs", "time", box=None)
        for stage in self.stages:
            table.add_row(
                stage.name,
                f"{stage.trainable} ({stage.num_trainable_parameters:,})",
                stage.loss,
                str(stage.length),
                f"{stage.steps:,}",
                f"{stage.tokens:,}",
                " / ".join("streamed" if epochs is None else f"{epochs:.2f}" for epochs in stage.epochs),
                _duration(stage.seconds),
            )
        measured = f", probe took {_size(self.measured_peak_bytes)}" if self.measured_peak_bytes else ""
        lines = [
            f"recipe {self.recipe} · model {self.model_dir} ({self.num_parameters:,} parameters)",
            self.runs_on,
            f"memory: {_size(self.memory_bytes)} for weights, gradients, moments and averages{measured}",
            f"disk: up to {_size(self.disk_bytes)}, free {_size(self.free_disk_bytes)}",
            f"time: {_duration(self.seconds)}",
        ]
        if self.disk_bytes > self.free_disk_bytes:
            lines.append("warning: the disk is too small for this run")
        return Group(*lines[:2], table, *lines[2:])


def dry_run(
    recipe: Recipe,
    model_dir: str | Path,
    run_dir: str | Path,
    *,
    probe: bool = True,
    reporter: Reporter | None = None,
) -> TrainingPlan:
    """Check everything as a run would, tokenise, and with `probe` run a step of each stage; writes no run.

    Raises:
        UserError: as `run_training` would.
    """
    model_dir, run_dir = Path(model_dir), Path(run_dir)
    check_new_or_resumed(run_dir, resume=False)
    prepared = prepare(recipe, model_dir, reporter or Reporter())
    teacher = build_teacher(prepared.student) if any(stage.loss != "ce" for stage in recipe.stages) else None
    weights = sum(p.numel() for p in prepared.student.parameters()) * _FP32_BYTES
    stages, memory = [], weights
    for index, stage in enumerate(recipe.stages):
        runner = StageRunner(
            recipe, index, prepared.student, teacher, prepared.accelerator, prepared.texts[index]
        )
        trained = sum(p.numel() for p in runner.trainable.parameters.values())
        num_bytes = trained * _FP32_BYTES
        own_teacher = num_bytes if stage.trainable == "all" and teacher is not None else 0
        copies = 1 + _MOMENTS + (stage.ema is not None)
        memory = max(memory, weights + own_teacher + num_bytes * copies)
        seconds = _seconds_per_step(runner) * stage.num_steps if probe else None
        stages.append(
            StagePlan(
                name=stage.name,
                trainable=stage.trainable,
                loss=stage.loss,
                num_trainable_parameters=trained,
                length=stage.length,
                steps=stage.num_steps,
                tokens=stage.num_steps * stage.tokens_per_step,
                data_tokens=prepared.texts[index].mixture.num_tokens,
                epochs=runner.data.epochs(stage.num_steps * stage.sequences_per_step),
                checkpoint_bytes=num_bytes * copies,
                seconds=seconds,
            )
        )
        if runner.trainable.adapters is not None:
            runner.trainable.adapters.unload()
        runner.close()
    export_bytes = sum(p.numel() for p in prepared.student.parameters()) * stored_dtype(model_dir).itemsize
    existing = next(path for path in [run_dir.resolve(), *run_dir.resolve().parents] if path.exists())
    return TrainingPlan(
        recipe=recipe.name,
        model_dir=str(model_dir),
        runs_on=prepared.describe(),
        num_parameters=sum(p.numel() for p in prepared.student.parameters()),
        stages=tuple(stages),
        memory_bytes=memory,
        measured_peak_bytes=_peak_bytes(prepared) if probe else None,
        disk_bytes=export_bytes + (KEPT + 1) * max(stage.checkpoint_bytes for stage in stages),
        free_disk_bytes=shutil.disk_usage(existing).free,
    )


def _seconds_per_step(runner: StageRunner) -> float:
    """Time of a whole step, from steps of one and two micro-batches (the model in memory is thrown away)."""
    runner.train_step(0, limit=1)  # warm up
    one = _timed(runner, 1)
    if runner.num_micro_batches == 1:
        return one
    # The difference is a micro-batch; what is left of `one` is the optimiser, paid once.
    micro_batch = min(max(_timed(runner, 2) - one, 0.5 * one), one)
    return one + micro_batch * (runner.num_micro_batches - 1)


def _timed(runner: StageRunner, num_micro_batches: int) -> float:
    start = time.perf_counter()
    runner.train_step(0, limit=num_micro_batches)  # reads the loss back, so a GPU has finished
    return time.perf_counter() - start


def _peak_bytes(prepared: Prepared) -> int:
    if prepared.accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "not probed"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
