"""One decoded token's softmax over window and sinks: the same result as the general path in a quarter of the calls.

A decode step of a small model is bound by the number of operations, not by their size. Everything here is fp32: half-
precision products of such small matrices are slower on a CPU, and the recurrent state they are weighed against is fp32.

Symbols: B batch, H query heads, G key/value heads, D head dim, w window, s sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sinks import MASKED


def roll(past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Push new [B, 1, ...] into past [B, w, ...]; return the past after it and the token that left [B, 1, ...]."""
    return torch.cat((past[:, 1:], new), dim=1), past[:, :1]


def step_sinks(new: Tensor, sinks: Tensor, num_seen: Tensor) -> Tensor:
    """Sinks [B, s, ...] after the token new [B, 1, ...], which is one itself while fewer than s have been seen."""
    slots = torch.arange(sinks.shape[1], device=new.device)
    is_this_token = (slots == num_seen[:, None]).view(*sinks.shape[:2], *[1] * (sinks.ndim - 2))
    return torch.where(is_this_token, new, sinks)


def window_step(
    q: Tensor,
    window_kv: tuple[Tensor, Tensor],
    sink_kv: tuple[Tensor, Tensor] | None,
    num_seen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Exact softmax of one query over the last w tokens (its own included) and the sinks that are older.

    q [B, 1, H, D]; window_kv: keys and values [B, w, G, D] right-aligned; sink_kv: [B, s, G, D]; num_seen [B] tokens
    before this one. Returns (output [B, 1, H, D], lse [B, 1, H]) in fp32, or fp64 where q is.
    """
    keys, values = window_kv
    B, window, G, D = keys.shape
    slots = torch.arange(window, device=q.device)
    visible = slots >= window - 1 - num_seen[:, None]
    if sink_kv is not None:
        keys, values = torch.cat((sink_kv[0], keys), dim=1), torch.cat((sink_kv[1], values), dim=1)
        sinks = torch.arange(sink_kv[0].shape[1], device=q.device)
        visible = torch.cat((sinks <= num_seen[:, None] - window, visible), dim=1)
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(accumulate).view(B, G, -1, D) * scale
    scores = grouped @ keys.to(accumulate).permute(0, 2, 3, 1)
    scores = scores.masked_fill(~visible[:, None, None], MASKED)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    output = (scores - lse).exp() @ values.to(accumulate).transpose(1, 2)
    return output.view(B, 1, -1, D), lse.view(B, 1, -1)
