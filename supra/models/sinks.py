"""Attention sinks: the first tokens of a sequence, kept exact for ever beside the window.

Pretrained Transformers park much of their attention on the first token (arXiv 2309.17453). A feature map learns that
spike badly, so the first `num_sink_tokens` stay in the softmax at constant cost and never enter the state.

Symbols: N sequences, T tokens, H query heads, G key/value heads, D head dim, s sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Masks a score without the NaN gradients that −inf gives where every score of a row is masked.
MASKED = -1e30


def update_sinks(x: Tensor, sinks: Tensor, num_seen: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Fill sinks [N, s, ...] from flat tokens x [total, ...] where this segment holds a sequence's first s tokens.

    Sequence n has seen `num_seen[n]` tokens and its segment is `x[starts[n] : starts[n] + lengths[n]]`.
    """
    if x.shape[0] == 0:
        return sinks
    slots = torch.arange(sinks.shape[1], device=x.device)
    local = slots - num_seen[:, None]
    fresh = (local >= 0) & (local < lengths[:, None])
    index = (starts[:, None] + local).clamp(0, x.shape[0] - 1)
    return torch.where(fresh.view(*fresh.shape, *[1] * (x.ndim - 1)), x[index], sinks)


def add_sinks(
    window_part: tuple[Tensor, Tensor],
    q: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    visible: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Merge the sinks into the window's softmax, as if they had been scored in one.

    window_part is (output [B, T, H, D], lse [B, T, H]); q [B, T, H, D]; sink_k and sink_v [B, 1 or T, s, G, D];
    visible [B, T, s] is true where a sink is older than the query's window. Returns the same pair.
    """
    output, lse = window_part
    B, T, H, D = q.shape
    grouped = q.unflatten(2, (sink_k.shape[3], -1))
    scores = torch.einsum("btgnd,btsgd->btgns", grouped, sink_k.expand(B, T, *sink_k.shape[2:])).flatten(2, 3)
    scores = (scores.to(lse.dtype) * scale).masked_fill(~visible.unsqueeze(2), MASKED)
    sink_lse = scores.logsumexp(dim=-1)
    weights = (scores - sink_lse.unsqueeze(-1)).exp().unflatten(2, (sink_k.shape[3], -1))
    sink_output = torch.einsum(
        "btgns,btsgd->btgnd", weights.to(sink_v.dtype), sink_v.expand(B, T, *sink_v.shape[2:])
    ).reshape(B, T, H, D)
    merged = torch.logaddexp(lse, sink_lse)
    share, sink_share = ((part - merged).exp().unsqueeze(-1) for part in (lse, sink_lse))
    return output * share + sink_output * sink_share, merged
