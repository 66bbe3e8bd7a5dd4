"""One stage being trained: its step, and its state going to and coming from a checkpoint."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from supra.config import Recipe
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train import checkpoint
from supra.train.data import Batch, derived_seed
from supra.train.divergence import DivergedError, LossGuard
from supra.train.ema import MovingAverage
from supra.train.losses import NOTHING, StageLoss
from supra.train.mixture import MixedData
from supra.train.moments import moments_of, restore_moments
from supra.train.optim import build_optimizer, lr_multiplier, set_lr
from supra.train.parallel import Processes
from supra.train.sharding import assign, clip_grad_norm, is_sharded, whole_on_cpu
from supra.train.teacher import without_adapters
from supra.train.trainable import enter_stage
from supra.train.window_dropout import dropout_probability, windows_dropped


@dataclass(frozen=True)
class StepResult:
    """Figures of one optimiser step; gradient norms are before clipping, which multiplied them by `clip_factor`.

    `new_grad_norm` is that of the new parameters where others train beside them, None elsewhere.
    """

    loss: float
    grad_norm: float
    new_grad_norm: float | None
    clip_factor: float
    lr: float
    num_tokens: int


def metrics_row(
    stage: str, stage_step: int, step: int, total_tokens: int, result: StepResult, tokens_per_second: float
) -> dict[str, Any]:
    """A step's line in `metrics.jsonl`; `step` and `total_tokens` count over all stages."""
    return {
        "step": step,
        "stage": stage,
        "stage_step": stage_step,
        "tokens": result.num_tokens,
        "total_tokens": total_tokens,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "new_grad_norm": result.new_grad_norm,
        "clip_factor": round(result.clip_factor, 6),
        "lr": result.lr,
        "tokens_per_second": round(tokens_per_second, 1),
    }


class StageRunner:
    """Holds what trains, the optimiser and the data of stage number `index`."""

    def __init__(
        self,
        recipe: Recipe,
        index: int,
        student: SupraForCausalLM,
        teacher: SupraForCausalLM | None,
        accelerator: Accelerator,
        data: MixedData,
    ) -> None:
        self.recipe, self.index, self.stage = recipe, index, recipe.stages[index]
        self.student, self.accelerator, self.processes = student, accelerator, Processes(accelerator)
        self.data = data
        self.trainable = enter_stage(self.stage, student, teacher, derived_seed(recipe.seed, index, 1))
        self.optimizer = accelerator.prepare(build_optimizer(self.stage.optimizer, self.trainable.parameters))
        self.sharded = is_sharded(student)
        self.average = MovingAverage(self.stage.ema, self.trainable.parameters) if self.stage.ema else None
        self.loss = StageLoss(self.stage, student, teacher, accelerator)
        self.guard = LossGuard()  # of losses that are not finite
        student.train()
        if self.stage.activation_checkpointing:
            student.activation_checkpointing_enable()
            student.disable_input_require_grads()  # not needed, and would run the backward down to the embeddings

    @property
    def num_micro_batches(self) -> int:
        return self.stage.sequences_per_step // self.stage.micro_batch_size

    def batches(self, step: int, limit: int | None = None, rows: int | None = None) -> list[Batch]:
        """The micro-batches of one step (the first `limit` of them, of `rows` sequences each)."""
        first, size = step * self.stage.sequences_per_step, rows or self.stage.micro_batch_size
        numbers = range(self.num_micro_batches if limit is None else min(limit, self.num_micro_batches))
        return [self.data.batch(first + n * size, size).to(self.accelerator.device) for n in numbers]

    def train_step(self, step: int, limit: int | None = None, rows: int | None = None) -> StepResult:
        """One optimiser step, a pure function of the state and `step`; `limit` and `rows` make it smaller.

        Raises:
            DivergedError: the loss is not finite or the guard refuses it; the weights are not touched then.
        """
        batches = self.batches(step, limit, rows)
        targets = self.loss.num_targets(batches)
        mine = [(number, batch, targets) for number, batch in self.processes.share(list(enumerate(batches)))]
        if self.sharded:
            # A block is gathered by all at once: who has less to do repeats what counts for nothing.
            mine += [(0, batches[0], NOTHING)] * (self.processes.rounds(len(batches)) - len(mine))
        self.accelerator.gradient_accumulation_steps = max(1, len(mine))
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch, counted in mine:
            # Of dropout: a micro-batch draws the same whichever process it falls to.
            torch.manual_seed(derived_seed(self.recipe.seed, self.index, step, 2, number))
            with self.accelerator.accumulate(self.student), self._window_dropout(step, number):
                total += self.loss(batch, counted)
        trained = self.trainable.parameters.values()
        if self.stage.window_dropout:
            # A mix that no window used would have no gradient here, but zero where processes sum theirs.
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.processes.sum_gradients(p for p in trained if not isinstance(p, DTensor))
        self.processes.sum(total)
        new_norm = self._new_grad_norm()
        clip = self.stage.optimizer.grad_clip or math.inf
        loss, norm = float(total), float(clip_grad_norm(trained, clip))
        if problem := self.guard.problem(loss, norm):
            raise self._diverged(step, problem, batches)
        multiplier = lr_multiplier(self.stage.optimizer, step, self.stage.num_steps)
        set_lr(self.optimizer, multiplier)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        self.guard.passed(loss)
        num_tokens = sum(batch.input_ids.numel() for batch in batches)
        factor = min(1.0, clip / norm) if norm else 1.0
        return StepResult(loss, norm, new_norm, factor, self.stage.optimizer.lr * multiplier, num_tokens)

    def _window_dropout(self, step: int, number: int) -> AbstractContextManager[None]:
        """The windows that micro-batch `number` of a step does without, whichever process it falls to."""
        config = self.stage.window_dropout
        if config is None:
            return nullcontext()
        probability = dropout_probability(config, step, self.stage.num_steps)
        return windows_dropped(
            self.student, probability, derived_seed(self.recipe.seed, self.index, step, 3, number)
        )

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state by parameter name; where it is sharded, every process must ask at the same time."""
        found = moments_of(self.optimizer.optimizer, self.trainable.parameters)
        return {name: whole_on_cpu(state) for name, state in found.items()}

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' weights by parameter name."""
        return {name: p.data for name, p in self.trainable.parameters.items() if ".lora_" in name}

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take up adapters, average and optimiser where `saved` left them; the model's own tensors are in place."""
        for name, parameter in self.trainable.parameters.items():
            if ".lora_" in name:
                parameter.data.copy_(saved.adapters[name])
        if self.average is not None:
            self.average.restore(saved.average)
        restore_moments(self.optimizer.optimizer, self.trainable.parameters, saved.moments)

    def close(self) -> None:
        """Let go of the optimiser's memory, which Accelerate holds on to."""
        self.student.requires_grad_(False)
        self.student.eval()
        self.student.activation_checkpointing_disable()
        self.accelerator.free_memory()
        del self.optimizer

    def _new_grad_norm(self) -> float | None:
        parameters = self.trainable.parameters
        new = [p.grad for name, p in parameters.items() if is_new_parameter(name) and p.grad is not None]
        if not new or len(new) == len(parameters):
            return None
        return float(nn.utils.get_total_norm(new))

    def _diverged(self, step: int, problem: str, batches: list[Batch]) -> DivergedError:
        rows = [":".join(map(str, ids)) for batch in batches for ids in batch.sequence_ids]
        shown = ", ".join(rows[:8]) + ("…" if len(rows) > 8 else "")
        return DivergedError(
            f"stage {self.stage.name}, step {step + 1}",
            f"{problem}; sequences (component:epoch:number) {shown}",
            "The weights are those before this step",
            stage=self.stage.name,
        )


def changed_tensors(student: SupraForCausalLM, ever_trained: set[str]) -> dict[str, Tensor]:
    """The student's tensors, by plain name, that a stage has trained so far or trains now.

    Where the student is sharded, every process must ask at the same time.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in student.named_parameters():
        plain = without_adapters(name)
        if ".lora_" not in name and (parameter.requires_grad or plain in ever_trained):
            tensors[plain] = parameter.data
    return whole_on_cpu(tensors)


def put_tensors(student: SupraForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Give parameters new values; a teacher keeps those that it had."""
    parameters: dict[str, nn.Parameter] = dict(student.named_parameters())
    for name, tensor in tensors.items():
        assign(parameters[name], tensor)
