"""What every loss of a stage reads: the stage, the two models and how this process computes."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import Tensor

from supra.config import Stage
from supra.models import SupraForCausalLM
from supra.train.data import Batch


class Targets(NamedTuple):
    """What a step's losses average over: all its tokens, and those that have a label."""

    num_tokens: float
    num_labels: float


NOTHING = Targets(math.inf, math.inf)  # with it a micro-batch adds zero to loss and gradients


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


def model_inputs(batch: Batch) -> dict[str, Any]:
    """The arguments with which a model reads a batch."""
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "cu_seqlens": batch.cu_seqlens,
        "use_cache": False,
    }
