"""One optimisation of a run: a module against a loss, epoch by epoch, keeping the weights that validated best.

What a step sees is known from the seed and its number alone, so a phase goes on from its last saved epoch bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from supra.config import Optimizer
from supra_eval.lra.descent import Descent
from supra_eval.lra.task import Examples

Loss = Callable[[Examples, torch.Generator], Tensor]


class Phase:
    """`module` trained by `loss` for `epochs`; `score` judges it on validation after each (higher is better)."""

    def __init__(
        self, name: str, module: nn.Module, loss: Loss, score: Callable[[], float], *,
        epochs: int, batch_size: int, optimizer: Optimizer, seed: int,
    ) -> None:  # fmt: skip
        self.name, self.module, self.loss, self.score = name, module, loss, score
        self.epochs, self.batch_size, self.seed = epochs, batch_size, seed
        self.descent = Descent(module, optimizer)
        self.best, self.best_weights = -math.inf, dict[str, Tensor]()
        self.losses: list[float] = []  # of each epoch, the mean over its steps
        self.curve: list[float] = []  # of each epoch, the validation score

    @property
    def epochs_done(self) -> int:
        return len(self.curve)

    @property
    def is_finished(self) -> bool:
        return self.epochs_done == self.epochs

    @property
    def best_epoch(self) -> int:
        """From 1; the first of equals."""
        return self.curve.index(self.best) + 1

    def run_epoch(self, train: Examples) -> None:
        """Train on every example once, in an order of this epoch's own, and judge.

        Raises:
            SupraError: the loss is not finite.
        """
        epoch, steps = self.epochs_done, -(-len(train) // self.batch_size)
        random = torch.Generator().manual_seed(
            xxhash.xxh32_intdigest(f"{self.seed} {self.name} {epoch}".encode())
        )
        order = torch.randperm(len(train), generator=random).numpy()
        self.module.train()
        total = 0.0
        for step in range(steps):
            loss = self.loss(train[np.sort(order[step * self.batch_size :][: self.batch_size])], random)
            where = f"{self.name}, epoch {epoch + 1}, step {step + 1} of {steps}"
            total += self.descent.step(loss, epoch * steps + step, self.epochs * steps, where)
        self.losses.append(total / steps)
        self._judge()

    def _judge(self) -> None:
        self.module.eval()
        with torch.inference_mode():
            self.curve.append(self.score())
        if self.curve[-1] > self.best:
            self.best = self.curve[-1]
            self.best_weights = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def restore_best(self) -> None:
        """Put back the weights of the best epoch."""
        self.module.load_state_dict(self.best_weights)

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs to go on as if nothing had happened."""
        return {
            **self.descent.state(), "best": self.best, "best_weights": self.best_weights,
            "losses": self.losses, "curve": self.curve,
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        self.descent.load_state(state)
        self.best, self.best_weights = state["best"], state["best_weights"]
        self.losses, self.curve = state["losses"], state["curve"]
