"""One stage being trained: its step, and its state going to and coming from a checkpoint."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from supra.config import Recipe
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train import checkpoint
from supra.train.data import Batch, PackedData
from supra.train.divergence import DivergedError, LossGuard
from supra.train.losses import StageLoss
from supra.train.optim import build_optimizer, lr_multiplier, set_lr
from supra.train.parallel import Processes
from supra.train.teacher import without_adapters
from supra.train.tokens import TokenStore
from supra.train.trainable import enter_stage


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


class StageRunner:
    """Holds what trains, the optimiser and the data of stage number `index`.

    Raises:
        UserError: the data is too short.
    """

    def __init__(
        self,
        recipe: Recipe,
        index: int,
        student: SupraForCausalLM,
        teacher: SupraForCausalLM | None,
        accelerator: Accelerator,
        store: TokenStore,
    ) -> None:
        self.recipe, self.index, self.stage = recipe, index, recipe.stages[index]
        self.student, self.accelerator, self.processes = student, accelerator, Processes(accelerator)
        self.data = PackedData(store, length=self.stage.length, seed=derived_seed(recipe.seed, index))
        self.trainable = enter_stage(self.stage, student, teacher, derived_seed(recipe.seed, index, 1))
        self.optimizer = accelerator.prepare(build_optimizer(self.stage.optimizer, self.trainable.parameters))
        self.loss = StageLoss(self.stage, student, teacher, accelerator)
        self.guard = LossGuard()  # of losses that are not finite
        student.train()

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
        num_targets = self.loss.num_targets(batches)
        mine = self.processes.share(list(enumerate(batches)))
        self.accelerator.gradient_accumulation_steps = max(1, len(mine))
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in mine:
            # Of dropout: a micro-batch draws the same whichever process it falls to.
            torch.manual_seed(derived_seed(self.recipe.seed, self.index, step, 2, number))
            with self.accelerator.accumulate(self.student):
                total += self.loss(batch, num_targets)
        self.processes.sum_gradients(self.trainable.parameters.values())
        self.processes.sum(total)
        new_norm = self._new_grad_norm()
        clip = self.stage.optimizer.grad_clip or math.inf
        grad_norm = self.accelerator.clip_grad_norm_(list(self.trainable.parameters.values()), clip)
        loss, norm = float(total), float(grad_norm) if grad_norm is not None else 0.0
        if problem := self.guard.problem(loss, norm):
            raise self._diverged(step, problem, batches)
        multiplier = lr_multiplier(self.stage.optimizer, step, self.stage.num_steps)
        set_lr(self.optimizer, multiplier)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.guard.passed(loss)
        num_tokens = sum(batch.input_ids.numel() for batch in batches)
        factor = min(1.0, clip / norm) if norm else 1.0
        return StepResult(loss, norm, new_norm, factor, self.stage.optimizer.lr * multiplier, num_tokens)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state by parameter name."""
        return checkpoint.moments_of(self.optimizer.optimizer, self.trainable.parameters)

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' weights by parameter name."""
        return {name: p.data for name, p in self.trainable.parameters.items() if ".lora_" in name}

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take up adapters and optimiser where `saved` left them; the model's own tensors are in place."""
        for name, parameter in self.trainable.parameters.items():
            if ".lora_" in name:
                parameter.data.copy_(saved.adapters[name])
        checkpoint.restore_moments(self.optimizer.optimizer, self.trainable.parameters, saved.moments)

    def close(self) -> None:
        """Let go of the optimiser's memory, which Accelerate holds on to."""
        self.student.requires_grad_(False)
        self.student.eval()
        self.accelerator.free_memory()
        del self.optimizer

    def _new_grad_norm(self) -> float | None:
        parameters = self.trainable.parameters
        new = [p.grad for name, p in parameters.items() if is_new_parameter(name) and p.grad is not None]
        if not new or len(new) == len(parameters):
            return None
        return float(nn.utils.get_total_norm(new))

    def _diverged(self, step: int, problem: str, batches: list[Batch]) -> DivergedError:
        rows = [f"{epoch}:{sequence}" for batch in batches for epoch, sequence in batch.sequence_ids]
        shown = ", ".join(rows[:8]) + ("…" if len(rows) > 8 else "")
        return DivergedError(
            f"stage {self.stage.name}, step {step + 1}",
            f"{problem}; sequences (epoch:number) {shown}",
            "The weights are those before this step",
            stage=self.stage.name,
        )


def derived_seed(*parts: int) -> int:
    """One seed out of several numbers, without the collisions that adding them has."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def changed_tensors(student: SupraForCausalLM, ever_trained: set[str]) -> dict[str, Tensor]:
    """The student's tensors, by plain name, that a stage has trained so far or trains now."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in student.named_parameters():
        plain = without_adapters(name)
        if ".lora_" not in name and (parameter.requires_grad or plain in ever_trained):
            tensors[plain] = parameter.data
    return tensors


def put_tensors(student: SupraForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Give parameters new values in new memory: a teacher that shares the old memory keeps what it had."""
    parameters: dict[str, nn.Parameter] = dict(student.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].data = tensor.to(parameters[name].device, parameters[name].dtype)
