"""Runs a recipe's stages from a converted model to a trained one, so that a kill at any instant costs no bit.

Notable:
- the state after a step is a pure function of the state before it and the step's number: batches, dropout and
  rates come from (seed, stage, step), so a resumed run equals the uninterrupted one bit for bit;
- everything is checked and the text tokenised (of a streamed one, the first shard) before the run folder is made:
  bad input leaves nothing behind.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from supra.config import Recipe
from supra.console import speaks
from supra.errors import SupraError, UserError
from supra.models import SupraForCausalLM
from supra.train import checkpoint, run_folder
from supra.train.checkpoint import Checkpoint, Position
from supra.train.divergence import DivergedError, LossGuard
from supra.train.export import export_model
from supra.train.layerwise import transfer_layerwise
from supra.train.prepare import Prepared, prepare
from supra.train.run_folder import check_new_or_resumed, open_run
from supra.train.sharding import whole_on_cpu
from supra.train.stage import StageRunner, StepResult, changed_tensors, metrics_row, put_tensors
from supra.train.teacher import build_teacher, without_adapters
from supra.train.trackers import Trackers
from supra.train.tracking import Metrics, Reporter, read_metrics

StageCallback = Callable[[str, SupraForCausalLM], None]


def run_training(
    recipe: Recipe,
    model_dir: str | Path,
    run_dir: str | Path,
    *,
    resume: bool = False,
    skip_steps: Sequence[int] = (),
    on_stage_end: StageCallback | None = None,
    reporter: Reporter | None = None,
) -> Path:
    """Train `model_dir` by `recipe` in `run_dir` and return the folder of the trained model, `run_dir/model`.

    `skip_steps` are left out, now and by every later resume: they count, and nothing is trained in them.

    `on_stage_end(stage name, model)` sees the model in eval mode after each stage (but a layerwise one, which never
    has it whole), adapters merged. A run that was killed around the end of a stage may call it again for that stage.

    Raises:
        UserError: the folder is used or empty (see `resume`), or recipe, model and text do not fit together.
        DivergedError: a loss is not finite, or larger than a stage's `max_loss_ratio` allows.
        SupraError: the disk is full, every checkpoint is damaged.
    """
    model_dir, run_dir = Path(model_dir), Path(run_dir)
    reporter = reporter or Reporter()
    if not speaks():
        reporter = Reporter.silent()
    if on_stage_end is not None and recipe.strategy == "fsdp2":
        raise UserError(
            "on_stage_end", "it would see a part of the model in one process", "Use strategy=ddp with it."
        )
    check_new_or_resumed(run_dir, resume)
    prepared = prepare(recipe, model_dir, run_dir, reporter)
    processes = prepared.processes
    processes.wait()  # all have checked the folder before one writes there
    lock = processes.on_main(lambda: open_run(run_dir, recipe, model_dir, prepared.data_keys))
    try:
        if skip_steps:
            last_done = checkpoint.newest_step(run_dir)
            processes.on_main(lambda: run_folder.skip_steps(run_dir, skip_steps, recipe, last_done))
        if (run_dir / "model").exists():
            reporter.say(f"this run is finished: {run_dir / 'model'}")
            return run_dir / "model"
        reporter.say(prepared.describe())
        if recipe.stages[0].layerwise:
            transfer_layerwise(prepared, run_dir, reporter)
            if len(recipe.stages) == 1:
                return _export_transferred(prepared, run_dir)
        prepared.load_student()
        return _Run(prepared, run_dir, reporter, on_stage_end).run()
    finally:
        if lock is not None:
            lock.close()


def _export_transferred(prepared: Prepared, run_dir: Path) -> Path:
    """The model of a run that was one layerwise stage."""
    saved = checkpoint.load_newest(run_dir, lambda _: None)
    assert saved is not None
    return _export(prepared, run_dir, saved.model, None)


def _export(prepared: Prepared, run_dir: Path, tensors: dict[str, Tensor], adapters: Any) -> Path:
    return export_model(
        tensors,
        adapters,
        recipe=prepared.recipe,
        model_dir=prepared.model_dir,
        target=run_dir / "model",
        training=prepared.training_facts(run_dir, run_folder.skipped_steps(run_dir)),
    )


class _Run:
    """The state of one run while its stages go by."""

    def __init__(
        self, prepared: Prepared, run_dir: Path, reporter: Reporter, on_stage_end: StageCallback | None
    ) -> None:
        self.prepared, self.run_dir, self.reporter = prepared, run_dir, reporter
        self.on_stage_end, self.processes = on_stage_end, prepared.processes
        self.recipe, self.student = prepared.recipe, prepared.student
        self.ever_trained: set[str] = set()
        self.skipped = run_folder.skipped_steps(run_dir)
        self.metrics: Metrics | None = None  # in the main process, as are the trackers
        self.trackers: Trackers | None = None
        self.adapters: Any = None  # of the last stage, where they are kept

    def run(self) -> Path:
        saved = checkpoint.load_newest(self.run_dir, self.reporter.warn)
        position = saved.position if saved else Position()
        remaining = self.recipe.stages[position.stage :]
        # The teacher takes the conversion's tensors before a checkpoint's replace them in the student.
        learns = any(stage.loss != "ce" for stage in remaining)
        self.teacher = build_teacher(self.student, self.recipe.teacher_weights) if learns else None
        if saved:
            self.reporter.say(f"resuming from {saved.path.name}")
            put_tensors(self.student, saved.model)
            self.ever_trained = set(saved.model)
        written = read_metrics(self.run_dir)
        rows = [row for row in written if row["step"] <= position.global_step]
        # By step: a layerwise stage has a row of it for every layer.
        self.total_tokens = sum({row["step"]: row["tokens"] for row in rows}.values())
        last_step = position.global_step
        self.processes.wait()  # all have read before one writes
        if self.processes.is_main:
            path = self.run_dir / "metrics.jsonl"
            self.metrics = Metrics(path, keep=lambda row: bool(row["step"] <= last_step))
            last_sent = written[-1]["step"] if written else 0
            self.trackers = Trackers(self.prepared.accelerator, self.recipe, self.run_dir, last_sent)
        try:
            for index in range(position.stage, len(self.recipe.stages)):
                losses = [row["loss"] for row in rows if row["stage"] == self.recipe.stages[index].name]
                position = self._run_stage(index, position, saved, losses)
                saved = None
        finally:
            if self.metrics is not None:
                self.metrics.close()
            if self.trackers is not None:
                self.trackers.close()
        tensors = changed_tensors(self.student, self.ever_trained)
        self.processes.on_main(lambda: _export(self.prepared, self.run_dir, tensors, self.adapters))
        return self.run_dir / "model"

    def _run_stage(
        self, index: int, position: Position, saved: Checkpoint | None, losses: list[float]
    ) -> Position:
        stage = self.recipe.stages[index]
        if all(s.loss == "ce" for s in self.recipe.stages[index:]):
            self.teacher = None  # nobody needs it any more
        prepared = self.prepared
        runner = StageRunner(
            self.recipe, index, self.student, self.teacher, prepared.accelerator, prepared.texts[index]
        )
        runner.guard = LossGuard(stage.max_loss_ratio, losses)
        if saved and position.step:
            runner.restore(saved)
        self.ever_trained |= {without_adapters(n) for n in runner.trainable.parameters if ".lora_" not in n}
        with self.reporter.stage(stage.title, done=position.step, num_steps=stage.num_steps) as progress:
            while position.step < stage.num_steps:
                before, position = position, Position(index, position.step + 1, position.global_step + 1)
                if position.global_step in self.skipped:
                    self.reporter.say(f"{stage.name} {position.step}/{stage.num_steps} · skipped, as asked")
                else:
                    start = time.monotonic()
                    result = self._step(runner, before)
                    rate = result.num_tokens / (time.monotonic() - start)
                    self._record(stage.name, position, result, rate)
                    progress.step(position.step, loss=result.loss, tokens_per_second=rate)
                if position.step % stage.checkpoint_every_steps == 0 or position.step == stage.num_steps:
                    self._save(position, runner)
        return self._end_stage(runner, position)

    def _record(self, stage: str, position: Position, result: StepResult, rate: float) -> None:
        self.total_tokens += result.num_tokens
        row = metrics_row(stage, position.step, position.global_step, self.total_tokens, result, rate)
        if self.metrics is not None:
            self.metrics.write(row)
        if self.trackers is not None:
            self.trackers.log(row)

    def _step(self, runner: StageRunner, position: Position) -> StepResult:
        try:
            return runner.train_step(position.step)
        except DivergedError as error:
            newest, number = checkpoint.newest(self.run_dir), position.global_step + 1
            last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
            thing = f"{error.thing} (step {number} of the run)"
            mend = f"{error.mend}; {last}."
            raise DivergedError(thing, error.reason, mend, stage=error.stage, global_step=number) from None
        except torch.OutOfMemoryError:
            raise SupraError(
                f"stage {runner.stage.name}",
                f"a step does not fit in the memory of {self.prepared.accelerator.device}",
                "Lower micro_batch_size or length, or train adapters instead of all, in another run folder.",
            ) from None

    def _end_stage(self, runner: StageRunner, position: Position) -> Position:
        index, last = runner.index, runner.index == len(self.recipe.stages) - 1
        if runner.average is not None:
            runner.average.apply()
        keep = last and self.recipe.adapters == "keep" and runner.trainable.adapters is not None
        if runner.trainable.adapters is not None and not keep:
            wrapped = {n for n, _ in self.student.named_parameters() if n.endswith(".base_layer.weight")}
            self.ever_trained |= {without_adapters(name) for name in wrapped}
            runner.trainable.merge()
        self.adapters = runner.trainable.adapters
        runner.close()
        if self.on_stage_end is not None and self.processes.is_main:
            self.on_stage_end(runner.stage.name, self.student)
        position = Position(index + 1, 0, position.global_step)
        if not keep:  # else a resume must find the adapters in the checkpoint before this one
            self._save(position, None)
        return position

    def _save(self, position: Position, runner: StageRunner | None) -> None:
        # Outside of what the main process does alone: shards are gathered by all.
        model = changed_tensors(self.student, self.ever_trained)
        moments = runner.moments() if runner else {}
        adapters = runner.adapters() if runner else {}
        average = whole_on_cpu(runner.average.average) if runner and runner.average else {}
        self.processes.on_main(
            lambda: checkpoint.save(
                self.run_dir, position, model=model, adapters=adapters, moments=moments, average=average
            )
        )
