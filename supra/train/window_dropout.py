"""Scheduled window dropout: now and then a layer trains without its window, so that its linear part carries weight.

A hybrid trained with its window always there lets the window do the work (arXiv 2510.05901, which schedules such a
dropout by stages; here the probability moves linearly over the steps and each layer draws on its own).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from supra.config import WindowDropout
from supra.models import SupraForCausalLM


def dropout_probability(config: WindowDropout, step: int, num_steps: int) -> float:
    """Probability at `step` (0-based) of `num_steps`: `start` in the first step, `end` in the last."""
    progress = step / max(1, num_steps - 1)
    return config.start + (config.end - config.start) * progress


@contextmanager
def windows_dropped(student: SupraForCausalLM, probability: float, seed: int) -> Iterator[None]:
    """Each linear layer, with this probability, hands every token to its linear part; drawn from `seed` alone."""
    layers = student.linear_layers()
    draws = np.random.Generator(np.random.PCG64(seed)).random(len(layers))
    for layer, draw in zip(layers, draws, strict=True):
        layer.ablation = "linear_only" if draw < probability else None
    try:
        yield
    finally:
        for layer in layers:
            layer.ablation = None
