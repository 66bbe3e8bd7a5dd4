"""How far back a decaying state can reach at all."""

from __future__ import annotations

import math
from typing import Any

import torch

KEPT = 0.01


@torch.no_grad()
def decay_horizon(model: Any, kept: float = KEPT) -> list[float]:
    """For each linear layer with a decay, the tokens n after which its slowest head keeps `kept`: γ^n = kept.

    Empty for a model without decay (or without linear layers), whose state never fades; infinite for a head with γ = 1.
    A gated decay is taken at an input of zeros, where the gate is its bias: tokens make it shorter or longer.
    """
    layers = model.linear_layers() if hasattr(model, "linear_layers") else []
    horizons = []
    for layer in layers:
        if hasattr(layer, "decay"):
            nothing = torch.zeros(1, 1, layer.config.hidden_size, dtype=torch.float64, device=model.device)
            slowest = float(layer.decay(nothing).max())
            horizons.append(math.log(kept) / slowest if slowest < 0 else math.inf)
    return horizons


def describe_horizon(horizons: list[float], kept: float = KEPT) -> str:
    """One line about what `decay_horizon` returned."""
    if not horizons:
        return "no decay: nothing fades from the state by itself"
    longest, shortest = max(horizons), min(horizons)
    return f"decay horizon: each layer's slowest head keeps {kept:.0%} after {shortest:,.0f} to {longest:,.0f} tokens"
