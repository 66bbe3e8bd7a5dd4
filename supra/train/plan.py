"""What a run will do and cost, before it does it: tokens, steps, memory, disk, and time by a short probe."""

import json
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from supra.config import Recipe
from supra.train import probe as measured
from supra.train.budget import StageBudget, free_disk_bytes, size
from supra.train.layerwise import LayerwiseTransfer
from supra.train.prepare import Prepared, load_texts, prepare
from supra.train.run_folder import check_new_or_resumed
from supra.train.stage import StageRunner
from supra.train.teacher import build_teacher
from supra.train.tracking import Reporter


@dataclass(frozen=True)
class StagePlan:
    """One stage; `epochs` has one entry for each component of its data, None where it is streamed.

    `seconds` (with its checkpoints) and `seconds_per_step` (of a layerwise stage, in one layer) are None where it was
    not probed.
    """

    name: str
    trainable: str
    loss: str
    num_trainable_parameters: int
    length: int
    positions: str | None
    steps: int
    tokens: int
    data_tokens: int | None
    epochs: tuple[float | None, ...]
    num_checkpoints: int
    checkpoint_bytes: int
    seconds_per_step: float | None
    checkpoint_seconds: float | None
    seconds: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """`memory_bytes`: weights, gradients, moments and averages; `measured_peak_bytes`: what the probe really took.

    `peak_disk_bytes` is the run folder at its largest, `disk_bytes` what stays of it; `load_seconds` is the time to
    load model and tokens, `export_seconds` to write the trained model.
    """

    recipe: str
    model_dir: str
    runs_on: str
    num_parameters: int
    stages: tuple[StagePlan, ...]
    memory_bytes: int
    measured_peak_bytes: int | None
    available_memory_bytes: int
    peak_disk_bytes: int
    disk_bytes: int
    free_disk_bytes: int
    load_seconds: float
    export_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """Time of loading, all stages and the export together."""
        times = [stage.seconds for stage in self.stages] + [self.load_seconds, self.export_seconds]
        return None if None in times else sum(t for t in times if t is not None)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "seconds": self.seconds}, indent=2)

    def render(self) -> RenderableType:
        table = Table(
            "stage", "trains", "loss", "length", "steps", "tokens", "epochs", "checkpoints", "time", box=None
        )
        for stage in self.stages:
            table.add_row(
                stage.name,
                f"{stage.trainable} ({stage.num_trainable_parameters:,})",
                stage.loss,
                f"{stage.length}, {stage.positions}" if stage.positions else str(stage.length),
                f"{stage.steps:,}",
                f"{stage.tokens:,}",
                " / ".join("streamed" if epochs is None else f"{epochs:.2f}" for epochs in stage.epochs),
                f"{stage.num_checkpoints:,} × {size(stage.checkpoint_bytes)}",
                _duration(stage.seconds),
            )
        took = (
            "" if self.measured_peak_bytes is None else f", the probe took {size(self.measured_peak_bytes)}"
        )
        lines = [
            f"recipe {self.recipe} · model {self.model_dir} ({self.num_parameters:,} parameters)",
            self.runs_on,
            f"memory: {size(self.memory_bytes)} for weights, gradients, moments and averages{took}, "
            f"available {size(self.available_memory_bytes)}",
            f"disk: up to {size(self.peak_disk_bytes)}, of which {size(self.disk_bytes)} stay, "
            f"free {size(self.free_disk_bytes)}",
            f"time: {_duration(self.seconds)} (loading {_duration(self.load_seconds)}, "
            f"export {_duration(self.export_seconds)})",
        ]
        return Group(*lines[:2], table, *lines[2:])


def dry_run(
    recipe: Recipe,
    model_dir: str | Path,
    run_dir: str | Path,
    *,
    probe: bool = True,
    reporter: Reporter | None = None,
) -> TrainingPlan:
    """Check everything as a run would, tokenise, and with `probe` run some steps of each stage; writes no run.

    Raises:
        UserError: as `run_training` would.
    """
    model_dir, run_dir = Path(model_dir), Path(run_dir)
    check_new_or_resumed(run_dir, resume=False)
    reporter = reporter or Reporter()
    prepared = prepare(recipe, model_dir, run_dir, reporter)
    start = measured.clock()
    # The tokens are cached now, as a run will find them.
    load_texts(recipe, prepared.tokenizer, prepared.student.config.vocab_size, prepared.accelerator, reporter)
    load_seconds = measured.clock() - start
    budget = prepared.budget
    stages = _plan_stages(prepared, run_dir, reporter, probe)
    peak = _peak_bytes(prepared) if probe else None
    return TrainingPlan(
        recipe=recipe.name,
        model_dir=str(model_dir),
        runs_on=prepared.describe(),
        num_parameters=budget.num_parameters,
        stages=tuple(stages),
        memory_bytes=budget.memory_bytes,
        measured_peak_bytes=peak,
        available_memory_bytes=prepared.available_memory_bytes,
        peak_disk_bytes=budget.peak_disk_bytes,
        disk_bytes=budget.disk_bytes,
        free_disk_bytes=free_disk_bytes(run_dir),
        load_seconds=load_seconds + prepared.model_seconds,
        export_seconds=measured.write_seconds(run_dir, budget.export_bytes) if probe else None,
    )


def _plan_stages(prepared: Prepared, run_dir: Path, reporter: Reporter, probe: bool) -> list[StagePlan]:
    costs = _probe_stages(prepared, run_dir, reporter) if probe else [_Cost()] * len(prepared.recipe.stages)
    plans = []
    for stage, budget, text, cost in zip(
        prepared.recipe.stages, prepared.budget.stages, prepared.texts, costs, strict=True
    ):
        plans.append(
            StagePlan(
                name=stage.name,
                trainable=stage.trainable,
                loss=stage.loss,
                num_trainable_parameters=budget.num_trainable_parameters,
                length=stage.length,
                positions=stage.positions,
                steps=stage.num_steps,
                tokens=stage.num_steps * stage.tokens_per_step,
                data_tokens=text.mixture.num_tokens,
                epochs=text.epochs(stage.num_steps * stage.sequences_per_step),
                num_checkpoints=budget.num_checkpoints,
                checkpoint_bytes=budget.checkpoint_bytes,
                seconds_per_step=cost.step,
                checkpoint_seconds=cost.checkpoints,
                seconds=cost.whole,
            )
        )
    return plans


class _Cost(NamedTuple):
    """Seconds of one step, of all checkpoints, and of a whole stage; None where it was not probed."""

    step: float | None = None
    checkpoints: float | None = None
    whole: float | None = None


def _probe_stages(prepared: Prepared, run_dir: Path, reporter: Reporter) -> list[_Cost]:
    recipe, costs = prepared.recipe, []
    first = 0
    if recipe.stages[0].layerwise:
        costs, first = [_probe_layers(prepared, run_dir, reporter)], 1
    if len(recipe.stages) > first:
        prepared.load_student()
    has_teacher = any(stage.loss != "ce" for stage in recipe.stages[first:])
    teacher = build_teacher(prepared.student, recipe.teacher_weights) if has_teacher else None
    for index in range(first, len(recipe.stages)):
        stage, budget = recipe.stages[index], prepared.budget.stages[index]
        start = measured.clock()
        runner = StageRunner(
            recipe, index, prepared.student, teacher, prepared.accelerator, prepared.texts[index]
        )
        entering = measured.clock() - start
        step = measured.time_steps(runner)
        if runner.trainable.adapters is not None:
            runner.trainable.adapters.unload()
        runner.close()
        saving = _saving_seconds(run_dir, budget)
        whole = entering + step.first_s + step.seconds * stage.num_steps + saving
        costs.append(_Cost(step.seconds, saving, whole))
    return costs


def _probe_layers(prepared: Prepared, run_dir: Path, reporter: Reporter) -> _Cost:
    """A layerwise stage: one linear layer is read and timed, and stands for all of them."""
    stage, budget = prepared.recipe.stages[0], prepared.budget.stages[0]
    start = measured.clock()
    step = LayerwiseTransfer(prepared, run_dir, reporter).probe(measured.time_steps)
    reading = max(0.0, measured.clock() - start - step.probed_s)
    saving = _saving_seconds(run_dir, budget)
    layer = reading + step.seconds * stage.num_steps
    whole = step.first_s + layer * prepared.student.config.num_linear_layers + saving
    return _Cost(step.seconds, saving, whole)


def _saving_seconds(run_dir: Path, budget: StageBudget) -> float:
    inside = measured.write_seconds(run_dir, budget.checkpoint_bytes) * budget.num_checkpoints
    return inside + measured.write_seconds(run_dir, budget.end_checkpoint_bytes or 0)


def _peak_bytes(prepared: Prepared) -> int:
    if prepared.accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "not probed"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
