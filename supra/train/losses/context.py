"""What every loss of a stage reads: the stage, the two models and how this process computes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from supra.config import Stage
from supra.models import SupraForCausalLM
from supra.models.attention import SupraLinearAttention, SupraSoftmaxAttention
from supra.train.data import Batch


class Targets(NamedTuple):
    """What a step's losses average over: all its tokens, those whose prediction is learned, and those with a label."""

    num_tokens: float
    num_learned: float
    num_labels: float


NOTHING = Targets(math.inf, math.inf, math.inf)  # with it a micro-batch adds zero to loss and gradients


@dataclass(frozen=True)
class LossContext:
    """The models of one stage; `teacher` is None where the loss needs none.

    `num_linear_layers`: over how many attention transfer takes its mean.
    """

    stage: Stage
    student: SupraForCausalLM
    teacher: SupraForCausalLM | None
    accelerator: Accelerator
    num_linear_layers: int

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a part of the step's loss, if anything that trains had a share in it."""
        if loss.requires_grad:
            # Accelerate divides by the number of micro-batches; a loss here is its part of the step's mean already.
            self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)

    def linear_pairs(self) -> Iterator[tuple[SupraSoftmaxAttention, SupraLinearAttention]]:
        """The teacher's and the student's attention in each linear layer, in order."""
        assert self.teacher is not None
        for theirs, ours in zip(self.teacher.model.layers, self.student.model.layers, strict=True):
            if isinstance(ours.self_attn, SupraLinearAttention):
                assert isinstance(theirs.self_attn, SupraSoftmaxAttention)
                yield theirs.self_attn, ours.self_attn

    def run_teacher(self, batch: Batch, hooks: list[RemovableHandle]) -> None:
        """One pass of the teacher's decoder layers without gradients, during which the hooks are in place."""
        assert self.teacher is not None
        try:
            with torch.no_grad(), self.accelerator.autocast():
                self.teacher.model(**model_inputs(batch))
        finally:
            for hook in hooks:
                hook.remove()


def model_inputs(batch: Batch) -> dict[str, Any]:
    """The arguments with which a model reads a batch."""
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "cu_seqlens": batch.cu_seqlens,
        "use_cache": False,
    }
