"""Runs a recipe's stages from a converted model to a trained one, so that a kill at any instant costs no bit.

Notable:
- the state after a step is a pure function of the state before it and the step's number: batches, dropout and
  rates come from (seed, stage, step), so a resumed run equals the uninterrupted one bit for bit;
- everything is checked and the text tokenised (of a streamed one, the first shard) before the run folder is made:
  bad input leaves nothing behind.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from supra.config import Conversion, Data, Recipe, Stage
from supra.console import speaks
from supra.errors import SupraError, UserError
from supra.loading import load_model, load_outline
from supra.models import SupraConfig, SupraForCausalLM
from supra.train import checkpoint
from supra.train.checkpoint import Checkpoint, Position
from supra.train.data import derived_seed
from supra.train.export import export_model
from supra.train.layerwise import transfer_layerwise
from supra.train.mixture import MixedData, Mixture
from supra.train.parallel import Processes
from supra.train.precision import Precision, make_accelerator
from supra.train.run_folder import check_new_or_resumed, open_run
from supra.train.sharding import load_sharded, num_sharded_units, whole_on_cpu
from supra.train.stage import StageRunner, StepResult, changed_tensors, metrics_row, put_tensors
from supra.train.streaming import TokenStream
from supra.train.teacher import build_teacher, without_adapters
from supra.train.token_store import TokenStore
from supra.train.tokens import load_tokens
from supra.train.tracking import Metrics, Reporter, read_metrics
from supra.train.trainable import check_trainable

StageCallback = Callable[[str, SupraForCausalLM], None]


@dataclass
class Prepared:
    """All that a run needs, checked and loaded; nothing is written yet but the token cache."""

    recipe: Recipe
    model_dir: Path
    student: SupraForCausalLM
    accelerator: Accelerator
    precision: Precision
    backend: str
    texts: list[MixedData]  # one a stage

    @property
    def processes(self) -> Processes:
        return Processes(self.accelerator)

    def load_student(self) -> None:
        """The weights themselves, in place of the outline.

        Raises:
            SupraError: they were to be sharded and are not.
        """
        if self.recipe.strategy == "fsdp2":
            device, config = self.accelerator.device, self.student.config
            self.student = load_sharded(self.model_dir, config, device, self.backend)
            if num_sharded_units(self.student) != 2 * config.num_hidden_layers:
                raise SupraError("strategy fsdp2", "the layers were not sharded", "Use strategy=ddp.")
            return
        device = str(self.accelerator.device.type)
        self.student = load_model(
            self.model_dir, device=device, dtype="float32", backend=self.backend, tokenizer=False
        ).model

    @property
    def data_keys(self) -> dict[str, str]:
        return {
            stage.name: text.mixture.key for stage, text in zip(self.recipe.stages, self.texts, strict=True)
        }

    def training_facts(self, run_dir: Path) -> dict[str, Any]:
        """What the exported model's card and `supra.json` say of the training."""
        rows, stages = read_metrics(run_dir), []
        for stage in self.recipe.stages:
            # A layerwise stage has a row of each step for every layer.
            losses = [
                statistics.fmean(
                    row["loss"] for row in rows if (row["stage"], row["stage_step"]) == (stage.name, step)
                )
                for step in (1, stage.num_steps)
            ]
            stages.append(
                {
                    "name": stage.name,
                    "trainable": stage.trainable,
                    "loss": stage.loss,
                    "steps": stage.num_steps,
                    "tokens": stage.num_steps * stage.tokens_per_step,
                    "first_loss": losses[0],
                    "last_loss": losses[1],
                }
            )
        return {
            "seed": self.recipe.seed,
            "tokens_trained": sum(stage["tokens"] for stage in stages),
            "precision": str(self.precision),
            "device": str(self.accelerator.device),
            "backend": self.backend,
            "processes": self.processes.count,
            "stages": stages,
        }

    def describe(self) -> str:
        """One line naming what runs."""
        count = self.processes.count
        together = f"{count} processes · strategy {self.recipe.strategy} · " if count > 1 else ""
        return (
            f"{together}device {self.accelerator.device} · dtype {self.precision} · backend {self.backend} · "
            f"attention {self.student.config._attn_implementation}"
        )


def prepare(recipe: Recipe, model_dir: Path, reporter: Reporter) -> Prepared:
    """Load the model and the tokens, and check that they fit the recipe.

    Raises:
        UserError: the model is not converted or not as the recipe says, or the text is missing or too short.
    """
    accelerator, precision = make_accelerator(recipe)
    # A layerwise stage does without the whole model, and a sharded one is read in shards: the outline will do so far.
    later = recipe.stages[0].layerwise or recipe.strategy == "fsdp2"
    load = load_outline if later else partial(load_model, dtype="float32")
    loaded = load(model_dir, device=str(accelerator.device.type), backend=recipe.backend)
    if not isinstance(loaded.model, SupraForCausalLM):
        raise UserError(str(model_dir), "it is not a converted model", "Run `supra convert` first.")
    check_conversion(recipe.conversion, loaded.model.config)
    datas = [stage.data or recipe.data for stage in recipe.stages]
    loaded_texts: dict[Data, TokenStore | TokenStream] = {}
    for part in dict.fromkeys(part for data in datas for part in data.components()):
        with accelerator.main_process_first():  # the others find the cache it wrote
            loaded_texts[part] = _load_text(part, loaded.tokenizer, reporter)
        text = loaded_texts[part]
        ids = len(loaded.tokenizer) if isinstance(text, TokenStream) else int(text.tokens.max()) + 1
        if ids > loaded.model.config.vocab_size:
            raise UserError(
                str(model_dir), "its tokenizer has more tokens than the model", "Convert it again."
            )
    texts: list[MixedData] = []
    for index, (stage, data) in enumerate(zip(recipe.stages, datas, strict=True)):
        check_trainable(stage, loaded.model)
        mixture = Mixture(tuple(loaded_texts[part] for part in data.components()), data.shares())
        check_length(stage, mixture)
        with accelerator.main_process_first():
            texts.append(
                MixedData(
                    mixture,
                    length=stage.length,
                    seed=derived_seed(recipe.seed, index),
                    makes_shards=accelerator.is_local_main_process,
                )
            )
    return Prepared(recipe, model_dir, loaded.model, accelerator, precision, loaded.backend, texts)


def _load_text(data: Data, tokenizer: Any, reporter: Reporter) -> TokenStore | TokenStream:
    if data.streaming:
        return TokenStream(data, tokenizer)
    return load_tokens(data, tokenizer, report=reporter.say)


def check_length(stage: Stage, mixture: Mixture) -> None:
    """Raise a UserError if a text that is not streamed has less than one sequence of the stage."""
    for number, store in enumerate(mixture.stores):
        if isinstance(store, TokenStore) and len(store.tokens) < stage.length:
            which = f"component {number} of the mixture" if len(mixture.stores) > 1 else "the text"
            raise UserError(
                f"stages.{stage.name}.length = {stage.length}",
                f"{which} has {len(store.tokens)} tokens, less than one sequence",
                "Add text or lower the length.",
            )


def run_training(
    recipe: Recipe,
    model_dir: str | Path,
    run_dir: str | Path,
    *,
    resume: bool = False,
    on_stage_end: StageCallback | None = None,
    reporter: Reporter | None = None,
) -> Path:
    """Train `model_dir` by `recipe` in `run_dir` and return the folder of the trained model, `run_dir/model`.

    `on_stage_end(stage name, model)` sees the model in eval mode after each stage, adapters merged. A run
    that was killed around the end of a stage may call it again for that stage.

    Raises:
        UserError: the folder is used or empty (see `resume`), or recipe, model and text do not fit together.
        SupraError: the loss is not finite, the disk is full, every checkpoint is damaged.
    """
    model_dir, run_dir = Path(model_dir), Path(run_dir)
    reporter = reporter or Reporter()
    if not speaks():
        reporter = Reporter.silent()
    check_new_or_resumed(run_dir, resume)
    prepared = prepare(recipe, model_dir, reporter)
    processes = prepared.processes
    processes.wait()  # all have checked the folder before one writes there
    lock = processes.on_main(lambda: open_run(run_dir, recipe, model_dir, prepared.data_keys))
    try:
        if (run_dir / "model").exists():
            reporter.say(f"this run is finished: {run_dir / 'model'}")
            return run_dir / "model"
        reporter.say(prepared.describe())
        if recipe.stages[0].layerwise:
            transfer_layerwise(prepared, run_dir, reporter)
            if len(recipe.stages) == 1:
                return export_transferred(prepared, run_dir)
        if prepared.student.device.type == "meta":
            prepared.load_student()
        return _Run(prepared, run_dir, reporter, on_stage_end).run()
    finally:
        if lock is not None:
            lock.close()


def check_conversion(conversion: Conversion, config: SupraConfig) -> None:
    """Raise a UserError that names each field in which the model differs from the recipe's conversion."""
    wanted = conversion.resolve()
    kept = tuple(i for i, kind in enumerate(config.layer_types or []) if kind != "linear_attention")
    pairs = {
        "feature_map": (wanted.feature_map, config.feature_map),
        "taylor_dim": (wanted.taylor_dim, config.taylor_dim),
        "rope": (wanted.rope, config.rope_position),
        "decay": (wanted.decay, config.decay),
        "decay_shared": (wanted.decay_shared, config.decay_shared),
        "norm": (wanted.norm, config.attention_norm),
        "norm_affine": (wanted.norm_affine, config.group_norm_affine),
        "window": (wanted.window, config.window),
        "num_sink_tokens": (wanted.num_sink_tokens, config.num_sink_tokens),
        "keep_softmax": (wanted.keep_softmax, kept),
    }
    differing = [
        f"conversion.{name} is {a!r}, the model's is {b!r}" for name, (a, b) in pairs.items() if a != b
    ]
    if differing:
        raise UserError(
            "the model",
            f"it was not converted by this recipe: {'; '.join(differing)}",
            "Convert it with the recipe.",
        )


def export_transferred(prepared: Prepared, run_dir: Path) -> Path:
    """The model of a run that was one layerwise stage: the conversion's files with the new tensors replaced."""
    saved = checkpoint.load_newest(run_dir, lambda _: None)
    assert saved is not None
    return export_model(
        saved.model,
        None,
        recipe=prepared.recipe,
        model_dir=prepared.model_dir,
        target=run_dir / "model",
        training=prepared.training_facts(run_dir),
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
        self.adapters: Any = None  # of the last stage, where they are kept

    def run(self) -> Path:
        saved = checkpoint.load_newest(self.run_dir, self.reporter.warn)
        position = saved.position if saved else Position()
        remaining = self.recipe.stages[position.stage :]
        # The teacher takes the conversion's tensors before a checkpoint's replace them in the student.
        self.teacher = build_teacher(self.student) if any(s.loss != "ce" for s in remaining) else None
        if saved:
            self.reporter.say(f"resuming from {saved.path.name}")
            put_tensors(self.student, saved.model)
            self.ever_trained = set(saved.model)
        self.processes.wait()  # all have read before one writes
        path = self.run_dir / "metrics.jsonl"
        self.metrics = Metrics(path, last_step=position.global_step) if self.processes.is_main else None
        try:
            for index in range(position.stage, len(self.recipe.stages)):
                position = self._run_stage(index, position, saved)
                saved = None
        finally:
            if self.metrics is not None:
                self.metrics.close()
        tensors = changed_tensors(self.student, self.ever_trained)
        self.processes.on_main(lambda: self._export(tensors))
        return self.run_dir / "model"

    def _run_stage(self, index: int, position: Position, saved: Checkpoint | None) -> Position:
        stage = self.recipe.stages[index]
        if all(s.loss == "ce" for s in self.recipe.stages[index:]):
            self.teacher = None  # nobody needs it any more
        prepared = self.prepared
        runner = StageRunner(
            self.recipe, index, self.student, self.teacher, prepared.accelerator, prepared.texts[index]
        )
        if saved and position.step:
            runner.restore(saved)
        self.ever_trained |= {without_adapters(n) for n in runner.trainable.parameters if ".lora_" not in n}
        with self.reporter.stage(stage.name, done=position.step, num_steps=stage.num_steps) as progress:
            while position.step < stage.num_steps:
                start = time.monotonic()
                result = self._step(runner, position)
                position = Position(index, position.step + 1, position.global_step + 1)
                rate = result.num_tokens / (time.monotonic() - start)
                self._record(stage.name, position, result, rate)
                progress.step(position.step, loss=result.loss, tokens_per_second=rate)
                if position.step % stage.checkpoint_every_steps == 0 or position.step == stage.num_steps:
                    self._save(position, runner)
        return self._end_stage(runner, position)

    def _record(self, stage: str, position: Position, result: StepResult, rate: float) -> None:
        if self.metrics is not None:
            self.metrics.write(metrics_row(stage, position.step, position.global_step, result, rate))

    def _step(self, runner: StageRunner, position: Position) -> StepResult:
        try:
            return runner.train_step(position.step)
        except SupraError as error:
            newest = checkpoint.newest(self.run_dir)
            last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
            raise SupraError(error.thing, error.reason, f"{error.mend}; {last}.") from None

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

    def _export(self, tensors: dict[str, Tensor]) -> Path:
        return export_model(
            tensors,
            self.adapters,
            recipe=self.recipe,
            model_dir=self.prepared.model_dir,
            target=self.run_dir / "model",
            training=self.prepared.training_facts(self.run_dir),
        )
