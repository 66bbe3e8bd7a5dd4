"""The losses, each running its own backward so that its peak memory is its own business.

- attention: the teacher runs once without gradients; at each linear layer the student's attention gets the
  same hidden states and its error goes back at once, so that one layer's activations live at a time;
- attention_weights: likewise, for the queries of a few rows at a time against all keys;
- hidden: the teacher's hidden states after every layer are kept, then the student reads on its own;
- kl, ce: the hidden states are projected to the vocabulary a few tokens at a time, forward and backward.
"""

from accelerate import Accelerator
from torch import Tensor

from supra.config import Stage
from supra.models import SupraForCausalLM
from supra.train.data import IGNORED, Batch
from supra.train.losses.attention import attention_loss
from supra.train.losses.attention_weights import attention_weights_loss
from supra.train.losses.context import NOTHING, LossContext, Targets
from supra.train.losses.hidden import hidden_loss
from supra.train.losses.logits import ce_loss, kl_loss

__all__ = ["NOTHING", "StageLoss", "Targets"]

_LOSSES = {
    "attention": attention_loss,
    "attention_weights": attention_weights_loss,
    "hidden": hidden_loss,
    "kl": kl_loss,
    "ce": ce_loss,
}


class StageLoss:
    """The loss of a stage: call it with a batch to accumulate gradients and get the loss back.

    The value is the micro-batch's part of the step's mean: a step's values add up to its loss.
    """

    def __init__(
        self,
        stage: Stage,
        student: SupraForCausalLM,
        teacher: SupraForCausalLM | None,
        accelerator: Accelerator,
    ) -> None:
        self.context = LossContext(stage, student, teacher, accelerator, student.config.num_linear_layers)

    def __call__(self, batch: Batch, targets: Targets) -> Tensor:
        """Accumulate d(sum over the batch / number of targets); return that loss as a detached fp32 scalar."""
        return _LOSSES[self.context.stage.loss](self.context, batch, targets)

    def num_targets(self, batches: list[Batch]) -> Targets:
        """How many tokens of a step's batches a loss averages over."""
        return Targets(
            num_tokens=sum(batch.input_ids.numel() for batch in batches),
            num_learned=max(1, sum(_num_learned(batch) for batch in batches)),
            num_labels=max(1, sum(int((batch.labels != IGNORED).sum()) for batch in batches)),
        )


def _num_learned(batch: Batch) -> int:
    return batch.input_ids.numel() if batch.learned is None else int(batch.learned.sum())
