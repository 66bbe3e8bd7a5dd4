"""Alignment of hidden states: the student reads on its own, and every decoder layer's output follows the teacher's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from supra.models import SupraForCausalLM
from supra.train.data import Batch
from supra.train.losses.context import LossContext, Targets, model_inputs


def hidden_loss(context: LossContext, batch: Batch, targets: Targets) -> Tensor:
    """Mean over tokens and decoder layers of |student − teacher|² / |teacher|² of the layers' outputs [B, T, hidden].

    RADLADS' first step (2505.03005) gives each attention block the teacher's hidden states, as the loss `attention`
    does; here a layer gets what the student's own layers before it made, and learns to make up for their errors. Each
    token weighs alike: a sequence's first has hidden states so large (2402.17762) that they would drown all others.
    """
    assert context.teacher is not None
    wanted: list[Tensor] = []
    with torch.no_grad(), context.accelerator.autocast(), _after_each_layer(context.teacher, wanted.append):
        context.teacher.model(**model_inputs(batch))
    errors: list[Tensor] = []

    def compare(output: Tensor) -> None:
        target = wanted.pop(0).float()
        power = target.square().sum(-1).clamp_min(1e-12)
        errors.append(((output.float() - target).square().sum(-1) / power).sum())

    with context.accelerator.autocast(), _after_each_layer(context.student, compare):
        context.student.model(**model_inputs(batch))
    loss = torch.stack(errors).sum() / (len(errors) * targets.num_tokens)
    context.backward(loss)
    return loss.detach()


@contextmanager
def _after_each_layer(model: SupraForCausalLM, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `see` with the output [B, T, hidden] of each decoder layer, in order."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        see(output)

    handles = [layer.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
