"""Where a position stands: sinusoids added to its input, a rotation of queries and keys, or a bias by distance."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from supra.models.decay import alibi_slopes

XPOS_GAMMA = 0.4


class Rotary(NamedTuple):
    """What rotates queries and keys: cos and sin [1 or B, T, D], and xPos' `growth` [1 or B, T, D] (None: RoPE)."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None

    def grow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [B, T, H, D] -> q·ζ^n and k·ζ^−n, so that q·k fades by ζ^(n−m); as they are without xPos."""
        if self.growth is None:
            return q, k
        growth = self.growth.unsqueeze(2)
        return q * growth, k / growth


@functools.lru_cache(maxsize=16)
def sinusoids(num_positions: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[T, size]: sin(t / 10000^(2i/size)) and the cosines behind them (arXiv 1706.03762, section 3.5)."""
    with torch.inference_mode(False):  # a tensor made in inference mode could never meet a gradient
        frequency = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=1).to(device=device, dtype=dtype)


def sinusoids_at(positions: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """positions [B, T] (from 0) -> [B, T, size]."""
    rows = 1 << int(positions.max()).bit_length()  # a power of two: few tables, each made once
    return sinusoids(rows, size, positions.device, dtype)[positions]


def xpos_growth(positions: Tensor, head_dim: int, scale_tokens: int, dtype: torch.dtype) -> Tensor:
    """positions [B, T] -> ζ^(n/B) [B, T, head_dim] with ζ_i = (2i/d + γ)/(1 + γ) (arXiv 2212.10554).

    Not shifted to the middle of the sequence, as its authors' code does against overflow: from 70 · `scale_tokens`
    positions on it leaves fp32.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    zeta = ((pair + XPOS_GAMMA) / (1 + XPOS_GAMMA)).repeat(2)  # RoPE's pairs are i and i + d/2
    return (zeta ** (positions.to(torch.float64) / scale_tokens).unsqueeze(-1)).to(dtype)


@functools.lru_cache(maxsize=4)
def alibi_bias(
    num_positions: int, num_heads: int, causal: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """−m_h·|i − j| [H, T, T], −∞ ahead of a causal query (arXiv 2108.12409)."""
    with torch.inference_mode(False):
        at = torch.arange(num_positions, device=device)
        ahead = at - at.unsqueeze(1)
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float64, device=device)
        bias = -slopes.view(-1, 1, 1) * ahead.abs()
        return (bias.masked_fill(ahead > 0, float("-inf")) if causal else bias).to(dtype)
