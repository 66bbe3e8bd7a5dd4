"""Where a position stands, added to its input: the sinusoids of the first Transformer."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=16)
def sinusoids(num_positions: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[T, size]: sin(t / 10000^(2i/size)) and the cosines behind them (arXiv 1706.03762, section 3.5)."""
    with torch.inference_mode(False):  # a tensor made in inference mode could never meet a gradient
        frequency = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=1).to(device=device, dtype=dtype)
