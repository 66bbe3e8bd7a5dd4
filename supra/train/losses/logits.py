"""Losses of the logits: the hidden states are projected to the vocabulary a few tokens at a time.

C tokens of a chunk, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from supra.train.data import IGNORED, Batch
from supra.train.losses.context import LossContext, Targets, model_inputs

# From a chunk's logits [C, V] and its rows: the loss and its gradient with respect to the logits [C, V].
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]

_CHUNK_ELEMENTS = 1 << 24  # logits of one chunk: 64 MB in fp32


def kl_loss(context: LossContext, batch: Batch, targets: Targets) -> Tensor:
    """(1 − w)·KL(teacher ‖ student)·τ² + w·cross-entropy, with w = `ce_weight` (Hinton, 1503.02531).

    KL is the mean over all tokens to learn at temperature τ, cross-entropy over those of them that have a next token.
    """
    divergence = _kl_of_chunk(context, batch, targets.num_learned)
    weight = context.stage.ce_weight
    if not weight:
        return _through_the_head(context, batch, divergence)
    cross_entropy = _ce_of_chunk(batch, targets.num_labels)

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        loss, gradient = divergence(logits, rows)
        ce, ce_gradient = cross_entropy(logits, rows)
        return torch.lerp(loss, ce, weight), gradient.lerp_(ce_gradient, weight)

    return _through_the_head(context, batch, chunk_loss)


def ce_loss(context: LossContext, batch: Batch, targets: Targets) -> Tensor:
    """Next-token cross-entropy; a document's last token predicts nothing."""
    return _through_the_head(context, batch, _ce_of_chunk(batch, targets.num_labels))


def _kl_of_chunk(context: LossContext, batch: Batch, num_targets: float) -> ChunkLoss:
    assert context.teacher is not None
    teacher, temperature = context.teacher, context.stage.kl_temperature
    with torch.no_grad(), context.accelerator.autocast():
        target_hidden = _learned(teacher.model(**model_inputs(batch)).last_hidden_state, batch)

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        with context.accelerator.autocast():
            target_logits = teacher.lm_head(target_hidden[rows])
        target, ours = _log_softmax(target_logits, temperature), _log_softmax(logits, temperature)
        # In place from here on: on a CPU each pass over [C, V] costs as much as the projection.
        probability = target.exp()
        divergence = torch.dot(probability.flatten(), target.sub_(ours).flatten())
        # d KL / d logits = (softmax(student) − softmax(teacher)) / τ
        gradient = ours.exp_().sub_(probability).mul_(temperature / num_targets)
        return divergence * temperature**2 / num_targets, gradient

    return chunk_loss


def _ce_of_chunk(batch: Batch, num_targets: float) -> ChunkLoss:
    labels = _learned(batch.labels, batch)

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_probabilities = F.log_softmax(logits.float(), dim=-1)
        loss = F.nll_loss(log_probabilities, labels[rows], ignore_index=IGNORED, reduction="sum")
        # d loss / d logits = softmax − one-hot, and nothing where nothing is predicted
        counted = (labels[rows] != IGNORED).unsqueeze(-1)
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(1, labels[rows].clamp_min(0).unsqueeze(-1), -counted.to(gradient.dtype))
        return loss / num_targets, gradient.mul_(counted / num_targets)

    return chunk_loss


def _through_the_head(context: LossContext, batch: Batch, chunk_loss: ChunkLoss) -> Tensor:
    """Project, compare and go back chunk by chunk, then once through the body: never B·T·V logits.

    The losses give their gradient themselves, so that autograd keeps no copy of a chunk's softmax. bf16
    and fp32 need no loss scaling, so nothing of Accelerate's backward is missing.
    """
    student, accelerator = context.student, context.accelerator
    with accelerator.autocast():
        body = _learned(student.model(**model_inputs(batch)).last_hidden_state, batch)
    leaf = body.detach().requires_grad_()
    total = torch.zeros((), device=body.device)
    chunk = max(1, _CHUNK_ELEMENTS // student.config.vocab_size)
    for start in range(0, max(1, len(leaf)), chunk):  # once even without answers: every gradient is there
        rows = slice(start, start + chunk)
        with accelerator.autocast():
            logits = student.lm_head(leaf[rows])
        with torch.no_grad():
            loss, gradient = chunk_loss(logits, rows)
        logits.backward(gradient=gradient.to(logits.dtype))
        total += loss
    if body.requires_grad:  # else nothing trains but the head
        body.backward(gradient=leaf.grad)
    return total


def _learned(x: Tensor, batch: Batch) -> Tensor:
    """[N, …] of x [B, T, …]: the positions whose prediction is learned, in row order."""
    return x.flatten(0, 1) if batch.learned is None else x[batch.learned]


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    return F.log_softmax(logits, dim=-1)
