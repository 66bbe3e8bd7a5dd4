"""The three losses, each running its own backward so that its peak memory is its own business.

- attention: the teacher runs once without gradients; at each linear layer the student's attention gets the
  same hidden states and its error goes back at once, so that one layer's activations live at a time;
- kl, ce: the hidden states are projected to the vocabulary a few tokens at a time, forward and backward.

B batch, T tokens, C tokens of a chunk, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from supra.config import Stage
from supra.models import SupraForCausalLM
from supra.models.packing import packing_from_boundaries
from supra.train.data import IGNORED, Batch

# From a chunk's logits [C, V] and its rows: the loss and its gradient with respect to the logits [C, V].
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]

_CHUNK_ELEMENTS = 1 << 24  # logits of one chunk: 64 MB in fp32


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
        self.stage, self.student, self.teacher, self.accelerator = stage, student, teacher, accelerator

    def __call__(self, batch: Batch, num_targets: int) -> Tensor:
        """Accumulate d(sum over the batch / num_targets) and return that loss as a detached fp32 scalar."""
        run = {"attention": self._attention, "kl": self._kl, "ce": self._ce}[self.stage.loss]
        return run(batch, num_targets)

    def num_targets(self, batches: list[Batch]) -> int:
        """How many tokens of a step's batches the loss averages over."""
        if self.stage.loss == "ce":
            return max(1, sum(int((batch.labels != IGNORED).sum()) for batch in batches))
        if self.stage.loss == "kl":
            return max(1, sum(_learned(batch.labels, batch).numel() for batch in batches))
        return sum(batch.input_ids.numel() for batch in batches)

    def _attention(self, batch: Batch, num_targets: int) -> Tensor:
        """Mean over the linear layers of |student − teacher|² / |teacher|² (LoLCATs, 2410.10254, eq. 6).

        The division by the teacher's power makes layers weigh alike: outputs of late layers are far larger.
        """
        assert self.teacher is not None
        probe = _AttentionProbe(self, batch, batch.input_ids.numel() / num_targets)
        handles = probe.attach(self.teacher, self.student)
        try:
            with torch.no_grad(), self.accelerator.autocast():
                self.teacher.model(**_inputs(batch))
        finally:
            for handle in handles:
                handle.remove()
        return probe.total

    def _kl(self, batch: Batch, num_targets: int) -> Tensor:
        """KL(teacher ‖ student) of the tokens to learn at temperature τ, times τ² (Hinton, 1503.02531)."""
        assert self.teacher is not None
        teacher, temperature = self.teacher, self.stage.kl_temperature
        with torch.no_grad(), self.accelerator.autocast():
            target_hidden = _learned(teacher.model(**_inputs(batch)).last_hidden_state, batch)

        def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            with self.accelerator.autocast():
                target_logits = teacher.lm_head(target_hidden[rows])
            target, ours = _log_softmax(target_logits, temperature), _log_softmax(logits, temperature)
            # In place from here on: on a CPU each pass over [C, V] costs as much as the projection.
            probability = target.exp()
            divergence = torch.dot(probability.flatten(), target.sub_(ours).flatten())
            # d KL / d logits = (softmax(student) − softmax(teacher)) / τ
            gradient = ours.exp_().sub_(probability).mul_(temperature / num_targets)
            return divergence * temperature**2 / num_targets, gradient

        return self._through_the_head(batch, chunk_loss)

    def _ce(self, batch: Batch, num_targets: int) -> Tensor:
        """Next-token cross-entropy; a document's last token predicts nothing."""
        labels = _learned(batch.labels, batch)

        def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            log_probabilities = F.log_softmax(logits.float(), dim=-1)
            loss = F.nll_loss(log_probabilities, labels[rows], ignore_index=IGNORED, reduction="sum")
            # d loss / d logits = softmax − one-hot, and nothing where nothing is predicted
            counted = (labels[rows] != IGNORED).unsqueeze(-1)
            gradient = log_probabilities.exp_()
            gradient.scatter_add_(1, labels[rows].clamp_min(0).unsqueeze(-1), -counted.to(gradient.dtype))
            return loss / num_targets, gradient.mul_(counted / num_targets)

        return self._through_the_head(batch, chunk_loss)

    def _through_the_head(self, batch: Batch, chunk_loss: ChunkLoss) -> Tensor:
        """Project, compare and go back chunk by chunk, then once through the body: never B·T·V logits.

        The losses give their gradient themselves, so that autograd keeps no copy of a chunk's softmax. bf16
        and fp32 need no loss scaling, so nothing of Accelerate's backward is missing.
        """
        with self.accelerator.autocast():
            body = _learned(self.student.model(**_inputs(batch)).last_hidden_state, batch)
        leaf = body.detach().requires_grad_()
        total = torch.zeros((), device=body.device)
        chunk = max(1, _CHUNK_ELEMENTS // self.student.config.vocab_size)
        for start in range(0, max(1, len(leaf)), chunk):  # once even without answers: every gradient is there
            rows = slice(start, start + chunk)
            with self.accelerator.autocast():
                logits = self.student.lm_head(leaf[rows])
            with torch.no_grad():
                loss, gradient = chunk_loss(logits, rows)
            logits.backward(gradient=gradient.to(logits.dtype))
            total += loss
        body.backward(gradient=leaf.grad)
        return total


class _AttentionProbe:
    """Hooks on the teacher's linear-to-be attentions that train the student's as the teacher passes by."""

    def __init__(self, owner: StageLoss, batch: Batch, share: float) -> None:
        self.owner, self.batch = owner, batch
        self.num_layers = owner.student.config.num_linear_layers
        self.weight = share / self.num_layers
        self.total = torch.zeros((), device=batch.input_ids.device)
        config = owner.student.config
        B, T = batch.input_ids.shape
        self.packing = packing_from_boundaries(batch.cu_seqlens, B, T, config.window)
        self.before_o_proj = owner.stage.attention_target == "before_o_proj"
        self.seen: dict[str, Tensor] = {}

    def attach(self, teacher: SupraForCausalLM, student: SupraForCausalLM) -> list[Any]:
        handles = []
        for theirs, ours in zip(teacher.model.layers, student.model.layers, strict=True):
            if ours.layer_type != "linear_attention":
                continue
            hook = partial(self._compare, ours.self_attn)
            handles.append(theirs.self_attn.register_forward_hook(hook, with_kwargs=True))
            if self.before_o_proj:
                handles.append(
                    theirs.self_attn.o_proj.register_forward_pre_hook(partial(self._keep, "target"))
                )
                handles.append(ours.self_attn.o_proj.register_forward_pre_hook(partial(self._keep, "output")))
        return handles

    def _keep(self, key: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.seen[key] = args[0]

    def _compare(
        self, ours: nn.Module, theirs: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        hidden_states = kwargs["hidden_states"]
        target = self.seen.pop("target") if self.before_o_proj else output[0]
        with torch.enable_grad():
            attended, _ = ours(
                hidden_states=hidden_states,
                position_embeddings=kwargs["position_embeddings"],
                packing=self.packing,
            )
            attended = self.seen.pop("output") if self.before_o_proj else attended
            error = F.mse_loss(attended.float(), target.float())
            loss = error / target.float().square().mean().clamp_min(1e-12) * self.weight
            if loss.requires_grad:
                # Accelerate divides by the number of micro-batches; `weight` holds the step's mean already.
                self.owner.accelerator.backward(loss * self.owner.accelerator.gradient_accumulation_steps)
        self.total += loss.detach()


def _learned(x: Tensor, batch: Batch) -> Tensor:
    """[N, …] of x [B, T, …]: the positions whose prediction is learned, in row order."""
    return x.flatten(0, 1) if batch.learned is None else x[batch.learned]


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    return F.log_softmax(logits, dim=-1)


def _inputs(batch: Batch) -> dict[str, Any]:
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "cu_seqlens": batch.cu_seqlens,
        "use_cache": False,
    }
