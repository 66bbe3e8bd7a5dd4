"""How the linear part and the softmax window share one normaliser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .precision import KeepsFloat32

# exp of it is far from fp32's end, also once multiplied by a long context's denominator.
MAX_LOG_RATIO = 40.0


class WindowMix(KeepsFloat32):
    """How much the linear part counts against the softmax window: log r = a_h − b_h·lse, learned per query head.

    With lse_i the log-sum-exp of the window's scores, the linear part enters the shared normaliser as
    r_i·φ(q_i)·φ(k_j) against the window's exp(s_ij − lse_i). b = 1 would make φ(q)·φ(k) stand for exp(s) itself, b = 0
    for a share of the window; in between, a peaked window leaves less to the past. It starts in between, and where φ
    `expands_exp` at b = 1, with a low a: a polynomial of exp stays at 1/2 or more where exp is next to nothing, so that
    a long past would outweigh the window. Kept in fp32.
    """

    def __init__(self, num_heads: int, expands_exp: bool) -> None:
        super().__init__()
        self.expands_exp = expands_exp
        self.weight = nn.Parameter(torch.empty(num_heads))
        self.lse_weight = nn.Parameter(torch.empty(num_heads))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        heads = self.weight.shape[0]
        start, lse_start = (-4.0, 1.0) if self.expands_exp else (2.5, 0.6)
        return {"weight": torch.full((heads,), start), "lse_weight": torch.full((heads,), lse_start)}

    def log_ratio(self, lse: Tensor) -> Tensor:
        """log r [B, T, H] from lse [B, T, H]; finite where r itself is too small for fp32."""
        return (self.weight - self.lse_weight * lse).clamp(max=MAX_LOG_RATIO)

    def forward(self, lse: Tensor) -> Tensor:
        """Weight r [B, T, H] of the linear part from lse [B, T, H]."""
        return self.log_ratio(lse).exp()
