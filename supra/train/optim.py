"""AdamW and its learning rate as a pure function of the step."""

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from supra.config import Optimizer
from supra.models import is_new_parameter
from supra.train.bits import bitsandbytes


def lr_multiplier(config: Optimizer, step: int, num_steps: int) -> float:
    """Factor on the learning rate at `step` (0-based) of `num_steps`: linear warm-up, then the schedule.

    The first step already moves (1/warmup), and the last step of a schedule runs at min_lr_ratio.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        falling = config.decay_steps(num_steps)
        share = 1 - math.sqrt(max(0, step + 1 - (num_steps - falling)) / falling)
    else:
        progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
        share = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * share


def build_optimizer(config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over named parameters; new ones at lr × new_lr_ratio, vectors without weight decay.

    Raises:
        UserError: its moments are to be int8, and bitsandbytes is not installed.
    """
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        sharded = isinstance(parameter, DTensor)  # torch takes a step with either kind, not with both at once
        groups.setdefault((is_new_parameter(name), parameter.ndim >= 2, sharded), []).append(parameter)
    adamw = (
        torch.optim.AdamW
        if config.moments == "float32"
        else bitsandbytes("optimizer.moments int8").optim.AdamW8bit
    )
    optimizer: torch.optim.Optimizer = adamw(
        [
            {
                "params": members,
                "base_lr": config.lr * (config.new_lr_ratio if new else 1.0),
                "weight_decay": config.weight_decay if matrix else 0.0,
            }
            for (new, matrix, _), members in groups.items()
        ],
        lr=config.lr,
        betas=config.betas,
    )
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Set each group's rate to its base rate × multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * multiplier
