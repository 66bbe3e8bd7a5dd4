"""Attention transfer layer by layer: only one layer's weights and one micro-batch of hidden states in memory.

Every layer's new weights learn from the teacher's hidden states alone, so layers do not need each other: layer i
trains through all the stage's steps while the teacher's layer i turns the file of its inputs into the file of its
outputs, which layer i + 1 then reads. On disk are at most two such files. A layer that is done lies in
`RUN/layerwise/layer-i.safetensors`, and a run that was killed goes on with the first that is not.

What differs from training all layers at once: gradients are clipped per layer, a dropped window is dropped in all
layers, and `metrics.jsonl` has the steps of one layer after those of the other, each with the layer's own error.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from supra.errors import UserError
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train import checkpoint
from supra.train.checkpoint import Position
from supra.train.divergence import LossGuard
from supra.train.layerwise.hidden_states import HiddenStates, StoredEmbedding
from supra.train.layerwise.shells import Passage, student_layer, teacher_layer
from supra.train.losses.context import model_inputs
from supra.train.run_folder import write_whole
from supra.train.stage import StageRunner, metrics_row
from supra.train.tracking import Metrics, Reporter, StageProgress
from supra.weights.reader import StreamedEmbedding, TensorReader, tensor_places

if TYPE_CHECKING:
    from supra.train.prepare import Prepared


T = TypeVar("T")
EMBEDDING = "model.embed_tokens.weight"


def transfer_layerwise(prepared: Prepared, run_dir: Path, reporter: Reporter) -> None:
    """Train the first stage's new tensors layer by layer and leave them as the checkpoint after that stage.

    Does nothing where that checkpoint, or a later one, is there already.

    Raises:
        UserError: several processes were launched.
        SupraError: a loss is not finite, or the disk is full.
    """
    if prepared.processes.count > 1:
        raise UserError(
            f"{prepared.processes.count} processes",
            "a layerwise stage runs in one",
            "Start it without torchrun.",
        )
    if checkpoint.newest(run_dir) is None:
        LayerwiseTransfer(prepared, run_dir, reporter).run()
    shutil.rmtree(run_dir / "layerwise", ignore_errors=True)


class LayerwiseTransfer:
    """The state of a layerwise stage between its layers."""

    def __init__(self, prepared: Prepared, run_dir: Path, reporter: Reporter) -> None:
        self.prepared, self.run_dir, self.reporter = prepared, run_dir, reporter
        self.recipe, self.stage, self.config = (
            prepared.recipe,
            prepared.recipe.stages[0],
            prepared.student.config,
        )
        self.folder = run_dir / "layerwise"
        self.device = prepared.accelerator.device
        self.reader = TensorReader(tensor_places(prepared.model_dir), torch.float32)
        self.kinds = self.config.layer_types or []
        # In bf16 the states lose what the layers' own products lose; in fp32 nothing.
        self.dtype = prepared.precision.dtype
        self.shape = (self.stage.micro_batch_size, self.stage.length, self.config.hidden_size)
        self.num_batches = (
            self.stage.num_steps * self.stage.tokens_per_step // (self.shape[0] * self.shape[1])
        )

    def run(self) -> None:
        """All layers from the first that is not done, then the checkpoint of the stage."""
        self.folder.mkdir(exist_ok=True)
        layers = range(len(self.kinds))
        done = next((i for i in layers if not self._tensors_of(i).exists()), len(layers))
        if done:
            self.reporter.say(f"resuming at layer {done}")
        steps_done = self.kinds[:done].count("linear_attention") * self.stage.num_steps
        num_steps = self.config.num_linear_layers * self.stage.num_steps
        metrics = Metrics(self.run_dir / "metrics.jsonl", keep=lambda row: bool(row["layer"] < done))
        try:
            with self.reporter.stage(self.stage.title, done=steps_done, num_steps=num_steps) as progress:
                for index in layers[done:]:
                    self._pass_layer(index, metrics, progress)
        finally:
            metrics.close()
        tensors: dict[str, Tensor] = {}
        for index in layers:
            tensors |= load_file(self._tensors_of(index))
        checkpoint.save(
            self.run_dir,
            Position(1, 0, self.stage.num_steps),
            model=tensors,
            adapters={},
            moments={},
            average={},
        )

    def probe(self, measure: Callable[[StageRunner], T]) -> T:
        """What `measure` finds of a linear layer on its own, fed with the tokens' embeddings."""
        index = self.kinds.index("linear_attention")
        teacher = teacher_layer(self.config, index, self.reader, self.device)
        teacher.model.embed_tokens = StreamedEmbedding(self.reader, EMBEDDING)  # type: ignore[assignment]
        teacher.model.norm = Passage(None)  # type: ignore[assignment]
        runner = self._runner(index, teacher)
        try:
            return measure(runner)
        finally:
            runner.close()

    def _tensors_of(self, index: int) -> Path:
        return self.folder / f"layer-{index:03d}.safetensors"

    def _inputs_of(self, index: int) -> Path:
        return self.folder / f"hidden-states-{index:03d}"

    def _pass_layer(self, index: int, metrics: Metrics, progress: StageProgress) -> None:
        """Turn the file of layer `index`'s inputs into that of the next one's, training the layer on the way."""
        teacher = teacher_layer(self.config, index, self.reader, self.device)
        with ExitStack() as files:
            teacher.model.embed_tokens = self._embedding(index, files)  # type: ignore[assignment]
            target = None
            if index + 1 < len(self.kinds):
                path = self._inputs_of(index + 1)
                target = files.enter_context(
                    HiddenStates(path, self.shape, self.dtype, create_count=self.num_batches)
                )
            teacher.model.norm = Passage(target)  # type: ignore[assignment]
            tensors: dict[str, Tensor] = {}
            if self.kinds[index] == "linear_attention":
                tensors = self._train(index, teacher, metrics, progress)
            elif target is not None:
                self._run_teacher(teacher)
            if target is not None:
                target.finish()  # before the layer counts as done: the next one needs it
        write_whole(self._tensors_of(index), save(tensors))
        self._inputs_of(index).unlink(missing_ok=True)

    def _embedding(self, index: int, files: ExitStack) -> nn.Module:
        if index == 0:
            return StreamedEmbedding(self.reader, EMBEDDING)
        source = HiddenStates(self._inputs_of(index), self.shape, self.dtype)
        return StoredEmbedding(files.enter_context(source), self.device)

    def _train(
        self, index: int, teacher: SupraForCausalLM, metrics: Metrics, progress: StageProgress
    ) -> dict[str, Tensor]:
        """All steps of the stage on one layer; its new tensors by their names in the model."""
        runner = self._runner(index, teacher)
        before = self.kinds[:index].count("linear_attention") * self.stage.num_steps
        for step in range(self.stage.num_steps):
            start = time.monotonic()
            result = runner.train_step(step)
            result = replace(result, loss=result.loss * self.config.num_linear_layers)  # this layer's own
            rate = result.num_tokens / (time.monotonic() - start)
            row = metrics_row(
                self.stage.name, step + 1, step + 1, (step + 1) * result.num_tokens, result, rate
            )
            metrics.write(row | {"layer": index})
            progress.step(before + step + 1, loss=result.loss, tokens_per_second=rate)
        if runner.average is not None:
            runner.average.apply()
        runner.close()
        return {
            name.replace("model.layers.0.", f"model.layers.{index}."): parameter.detach().cpu()
            for name, parameter in runner.student.named_parameters()
            if is_new_parameter(name)
        }

    def _runner(self, index: int, teacher: SupraForCausalLM) -> StageRunner:
        student = student_layer(self.config, index, teacher, self.reader, self.device)
        student.set_backend(self.prepared.backend, self.device)
        runner = StageRunner(
            self.recipe, 0, student, teacher, self.prepared.accelerator, self.prepared.texts[0]
        )
        runner.guard = LossGuard(self.stage.max_loss_ratio)
        # The gradients are those of the mean over all layers, so that Adam's epsilon weighs as it does there.
        num_layers = self.config.num_linear_layers
        runner.loss.context = replace(runner.loss.context, num_linear_layers=num_layers)
        return runner

    def _run_teacher(self, teacher: SupraForCausalLM) -> None:
        """The teacher's layer on all micro-batches, where nothing trains."""
        size = self.stage.micro_batch_size
        for number in range(self.num_batches):
            batch = self.prepared.texts[0].batch(number * size, size).to(self.device)
            with torch.no_grad(), self.prepared.accelerator.autocast():
                teacher.model(**model_inputs(batch))
