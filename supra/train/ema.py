"""An exponential moving average of what a stage trains, which takes its place when the stage ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from supra.train.sharding import like


class MovingAverage:
    """average ← decay · average + (1 − decay) · weights after each step; it starts at the stage's first weights."""

    def __init__(self, decay: float, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        self._blend: Any = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """Take in the weights of one more step."""
        for sharded in (False, True):  # torch blends either kind at once, not both
            names = [name for name, p in self.parameters.items() if isinstance(p, DTensor) == sharded]
            if names:
                weights = [self.parameters[name].detach() for name in names]
                self._blend([self.average[name] for name in names], weights, None)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Take up the average where a checkpoint left it."""
        for name, tensor in self.average.items():
            tensor.copy_(like(tensor, saved[name]))

    @torch.no_grad()
    def apply(self) -> None:
        """Give the parameters the average's values."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.average[name])
