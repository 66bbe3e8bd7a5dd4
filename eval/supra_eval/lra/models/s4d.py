"""S4D (arXiv 2206.11893): a diagonal state-space model per channel, computed as one long convolution by FFT.

Per channel, x' = A x + B u with A diagonal and B = 1, read out as 2·Re(C x) + D u; with a step Δ and zero-order hold,

    x_t = exp(ΔA) x_{t−1} + (exp(ΔA) − 1)/A · u_t ,      k_l = 2·Re Σ_n C_n (exp(ΔA_n) − 1)/A_n · exp(l ΔA_n) .

Both directions are two kernels with an A and Δ in common, the second over what lies strictly behind (as S4's own).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from supra.models.precision import KeepsFloat32

from .config import STATE_SIZE, EncoderConfig, S4DStart
from .positions import Rotary

SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1
LARGEST_KERNEL_RATE = 1e-3


class S4DKernel(KeepsFloat32):
    """The kernels [ways, hidden, T] from Δ, A and C, which stay fp32 and train without weight decay.

    `start`: A_n = −1/2 + iπn (`lin`), or −1/2 + i·(S/π)·(S/(2n+1) − 1) with S states (`inv`); n counts conjugate pairs.
    """

    def __init__(self, hidden_size: int, state_size: int, ways: int, start: S4DStart) -> None:
        super().__init__()
        self.start, pairs = start, state_size // 2
        self.log_step = nn.Parameter(torch.empty(hidden_size))
        self.log_minus_real = nn.Parameter(torch.empty(hidden_size, pairs))
        self.imaginary = nn.Parameter(torch.empty(hidden_size, pairs))
        self.readout = nn.Parameter(torch.empty(ways, hidden_size, pairs, 2))  # C

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Starting values; C is complex normal of variance 1, Δ log-uniform."""
        hidden_size, pairs = self.imaginary.shape
        n, S = torch.arange(pairs, device="cpu"), 2 * pairs
        imaginary = math.pi * n if self.start == "lin" else S / math.pi * (S / (2 * n + 1) - 1)
        log_step = torch.empty(hidden_size, device="cpu")
        readout = torch.empty(self.readout.shape, device="cpu")
        return {
            "log_step": log_step.uniform_(
                math.log(SMALLEST_STEP), math.log(LARGEST_STEP), generator=generator
            ),
            "log_minus_real": torch.full((hidden_size, pairs), math.log(0.5), device="cpu"),
            "imaginary": imaginary.expand(hidden_size, pairs).clone(),
            "readout": readout.normal_(0, 0.5**0.5, generator=generator),
        }

    def discretised(self) -> tuple[Tensor, Tensor]:
        """ΔA [hidden, pairs] and C · (exp(ΔA) − 1)/A [ways, hidden, pairs], both complex."""
        A = torch.complex(-self.log_minus_real.exp(), self.imaginary)
        stepped = A * self.log_step.exp().unsqueeze(-1)
        return stepped, torch.view_as_complex(self.readout) * torch.expm1(stepped) / A

    def forward(self, num_positions: int) -> Tensor:
        """Kernels [ways, hidden, T]: exp(l ΔA) with l = i + jI is a product, so that only I + T/I powers are made."""
        stepped, weight = self.discretised()
        I = 1 << math.ceil(math.log2(num_positions) / 2)  # noqa: E741
        J = -(-num_positions // I)
        within, across = (
            (stepped.unsqueeze(-1) * torch.arange(count, device=stepped.device) * stride).exp()
            for count, stride in ((I, 1), (J, I))
        )
        across = weight.unsqueeze(-1) * across
        # Re(xy) = Re x Re y − Im x Im y: one real product for all channels.
        left = torch.cat((across.real, -across.imag), dim=-2).transpose(-1, -2)
        right = torch.cat((within.real, within.imag), dim=-2)
        return (2 * left @ right).flatten(-2)[..., :num_positions]


class S4D(nn.Module):
    """The layer: convolution, skip D, GELU, and a GLU that mixes the channels."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, ways = config.hidden_size, 1 if config.causal else 2
        self.kernel = S4DKernel(size, config.state_size or STATE_SIZE, ways, config.state_start or "lin")
        self.skip = nn.Parameter(torch.randn(size))
        self.output = nn.Linear(size, 2 * size)

    def forward(self, hidden: Tensor, rotary: Rotary | None, real: Tensor | None) -> Tensor:
        """hidden [B, T, hidden], real [B, T] (None: no padding) -> [B, T, hidden]."""
        if real is not None:
            hidden = hidden * real.unsqueeze(-1)
        with torch.autocast(hidden.device.type, enabled=False):
            u = hidden.to(self.kernel.log_step.dtype).transpose(1, 2)
            y = convolve(u, self.kernel(u.shape[-1])) + self.skip.to(u.dtype).unsqueeze(-1) * u
        return F.glu(self.output(F.gelu(y).transpose(1, 2).to(hidden.dtype)), dim=-1)


def convolve(u: Tensor, kernels: Tensor) -> Tensor:
    """y_t = Σ_{j≤t} k⁰_{t−j} u_j, with two kernels + Σ_{j>t} k¹_{j−t−1} u_j.

    u [B, hidden, T], kernels [ways, hidden, T] -> [B, hidden, T].
    """
    T = u.shape[-1]
    size = fft_size(2 * T)
    kernel = F.pad(kernels[0], (0, size - T))
    if len(kernels) == 2:
        # The end of a circular kernel is its time before 0, the last entry that of one position ahead.
        kernel = kernel + F.pad(kernels[1].flip(-1), (size - T, 0))
    return torch.fft.irfft(torch.fft.rfft(u, size) * torch.fft.rfft(kernel, size), size)[..., :T]


def parameter_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """An optimiser's groups: S4D's kernels learn at most at 1e-3 and never decay, as in S4's own training."""
    kernels = [p for m in model.modules() if isinstance(m, S4DKernel) for p in m.parameters()]
    apart = {id(p) for p in kernels}
    rest = [p for p in model.parameters() if id(p) not in apart]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": lr, "weight_decay": weight_decay}]
    if kernels:
        groups.append({"params": kernels, "lr": min(lr, LARGEST_KERNEL_RATE), "weight_decay": 0.0})
    return groups


def fft_size(least: int) -> int:
    """The next length of at least `least` of which an FFT is fast: 8 to 15 times a power of 2."""
    unit = 1 << max(0, least.bit_length() - 4)
    return -(-least // unit) * unit
