"""The decay γ of a linear layer, always as `log_decay` = log γ in fp32."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import KeepsFloat32

if TYPE_CHECKING:
    from .configuration_supra import SupraConfig


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slopes s_h = 2^(−8(h+1)/H), interpolated as ALiBi does where H is no power of two (arXiv 2108.12409).

    SUPRA decays by γ_h = exp(−s_h) (arXiv 2405.06640, section 3.2).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
    return slopes + between[: num_heads - power]


def fixed_log_decay(kind: str, num_heads: int) -> Tensor:
    """log γ [num_heads] in fp64 of the decays that are not learned: `alibi` or `retnet`."""
    if kind == "alibi":
        return -torch.tensor(alibi_slopes(num_heads), dtype=torch.float64)
    # log1p: 1 − 2^(−5−h) rounds to 1 in fp32 from the 20th head on, and the head would never forget.
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(num_heads, dtype=torch.float64)))


def starting_log_decay(num_heads: int) -> Tensor:
    """log γ [num_heads] in fp64 from which a decay learns: RetNet's of up to 9 heads, spread over more of them.

    RetNet's 32nd head, γ = 1 − 2^−36, has a gradient 2^−36 of a forgetful one's: Adam's epsilon would keep it there.
    """
    slowest = min(num_heads + 4.0, 13.0)
    return torch.log1p(-torch.exp2(-torch.linspace(5.0, slowest, num_heads, dtype=torch.float64)))


class FixedDecay(nn.Module):
    """log γ [heads], computed from the configuration: nothing to store, load or lose."""

    def __init__(self, kind: str, num_heads: int) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, num_heads

    def forward(self, like: Tensor) -> Tensor:
        """Return log γ [heads] on the device of `like`, fp32 (fp64 where `like` is fp64)."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return _on_device(self.kind, self.num_heads, like.device, dtype)


@functools.lru_cache(maxsize=64)
def _on_device(kind: str, num_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Made once: a copy from the host in every layer would stall a GPU, and break a CUDA graph."""
    with torch.inference_mode(
        False
    ):  # a tensor made in inference mode could never be saved for a backward pass
        return fixed_log_decay(kind, num_heads).to(device=device, dtype=dtype)


class LearnedDecay(KeepsFloat32):
    """log γ_h = −softplus(w_h), one learned value per head, starting as `starting_log_decay`; kept in fp32.

    RetNet's heads halve a token's weight in 22, 44, 88, … steps. From ALiBi's, the fastest of which take one or two, a
    Hedgehog layer without a window does not get back to the first token, on which its teacher rests (docs/LOG.md).
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        target = -starting_log_decay(self.weight.shape[0])
        return {"weight": torch.log(torch.expm1(target)).float()}

    def forward(self, like: Tensor) -> Tensor:
        """Return log γ [heads] in the parameter's precision."""
        return -F.softplus(self.weight)


class GatedDecay(KeepsFloat32):
    """log γ_{t,h} = −softplus(w_h·x_t + b_h) from the layer's input x_t: each token says what a head forgets.

    One value per head and token as in Mamba-2 (arXiv 2405.21060: −exp(A_log)·softplus(w·x + b), here with A_log = 0),
    which is a forget gate γ = σ(−w·x − b). w starts at 0 and b where `LearnedDecay` does, so that a conversion starts
    as a fixed decay: without any forgetting softplus would be flat, and stay so. Kept in fp32.
    """

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        start = LearnedDecay(self.bias.shape[0]).initial_values(generator)["weight"]
        return {"weight": torch.zeros(self.weight.shape, device="cpu"), "bias": start}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [B, T, hidden] -> log γ [B, T, heads] in the parameters' precision, under autocast too."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return -F.softplus(F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias))


def per_token(log_decay: Tensor | None) -> TypeGuard[Tensor]:
    """Whether log γ differs from token to token, [B, T, heads], and so travels with them."""
    return log_decay is not None and log_decay.ndim == 3


def build_decay(config: SupraConfig) -> nn.Module | None:
    """The decay of one layer, or None for γ = 1."""
    if config.decay == "none":
        return None
    if config.decay == "learned":
        return LearnedDecay(config.num_state_heads)
    if config.decay == "gated":
        return GatedDecay(config.num_state_heads, config.hidden_size)
    return FixedDecay(config.decay, config.num_state_heads)
