"""A step of AdamW as a recipe's `Optimizer` says it: its rate, its clipping, a stop where the loss is not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from supra.config import Optimizer
from supra.errors import SupraError
from supra.train.optim import lr_multiplier, set_lr
from supra_eval.lra.models.s4d import parameter_groups


class Descent:
    """What moves the weights of `module`."""

    def __init__(self, module: nn.Module, settings: Optimizer) -> None:
        self.module, self.settings = module, settings
        groups = parameter_groups(module, settings.lr, settings.weight_decay)
        self.optimizer = torch.optim.AdamW(
            [{**group, "base_lr": group["lr"]} for group in groups],
            lr=settings.lr,
            betas=settings.betas,
            fused=True,
        )

    def step(self, loss: Tensor, number: int, num_steps: int, where: str) -> float:
        """Step `number` (from 0) of `num_steps` down the gradient of `loss`; its value. `where` is for the error.

        Raises:
            SupraError: the loss is not finite; the weights are as they were.
        """
        value = loss.item()
        if not math.isfinite(value):
            mend = f"Lower the learning rate: it is {self.settings.lr:g}"
            raise SupraError(where, f"the loss is {value}", mend)
        set_lr(self.optimizer, lr_multiplier(self.settings, number, num_steps))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.settings.grad_clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        return value

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs to go on as if nothing had happened."""
        return {"weights": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
