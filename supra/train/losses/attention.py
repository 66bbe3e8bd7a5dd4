"""Attention transfer: each linear layer learns the output of the softmax attention in its place.

The teacher runs once without gradients; at each linear layer the student's attention gets the same hidden
states and its error goes back at once, so that one layer's activations live at a time.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from supra.models.packing import packing_from_boundaries
from supra.train.data import Batch
from supra.train.losses.context import LossContext, Targets


def attention_loss(context: LossContext, batch: Batch, targets: Targets) -> Tensor:
    """Mean over the linear layers of |student − teacher|² / |teacher|² (LoLCATs, 2410.10254, eq. 6).

    The division by the teacher's power makes layers weigh alike: outputs of late layers are far larger.
    """
    probe = _AttentionProbe(context, batch, batch.input_ids.numel() / targets.num_tokens)
    context.run_teacher(batch, probe.attach())
    return probe.total


class _AttentionProbe:
    """Hooks on the teacher's linear-to-be attentions that train the student's as the teacher passes by."""

    def __init__(self, context: LossContext, batch: Batch, share: float) -> None:
        self.context = context
        config = context.student.config
        self.weight = share / context.num_linear_layers
        self.total = torch.zeros((), device=batch.input_ids.device)
        B, T = batch.input_ids.shape
        self.packing = packing_from_boundaries(batch.cu_seqlens, B, T, config.window)
        self.before_o_proj = context.stage.attention_target == "before_o_proj"
        self.seen: dict[str, Tensor] = {}

    def attach(self) -> list[RemovableHandle]:
        handles = []
        for theirs, ours in self.context.linear_pairs():
            handles.append(theirs.register_forward_hook(partial(self._compare, ours), with_kwargs=True))
            if self.before_o_proj:
                for key, attention in (("target", theirs), ("output", ours)):
                    handles.append(attention.o_proj.register_forward_pre_hook(partial(self._keep, key)))
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
            self.context.backward(loss)
        self.total += loss.detach()
