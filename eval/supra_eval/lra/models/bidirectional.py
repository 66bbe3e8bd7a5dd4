"""Linear attention in one direction or both, in whichever of its equal forms is fastest for the length.

In both directions, o_i = scale · Σ_j w_ij (q_i·k_j) v_j with w_ij = Π_{t from min(i,j)+1 to max(i,j)} γ_t: what two
tokens mean to each other fades by the tokens from the earlier one to the later one, whoever of them asks. For a fixed γ
that is γ^|i−j|. The causal form is the sum over j ≤ i, the operator of `supra_kernels`.

Shapes: q and k [B, T, H, K], v [B, T, H, V], log γ None, [H] or [B, T, H]; o [B, T, H, V] in v's dtype. Where its k is
zero a position counts nothing to others, so that padding at the end needs zero keys and no more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from supra_kernels import linear_attention

# Positions up to which all pairs at once are the fastest, forward and backward, on a CPU (heads of 16 and 64, batches
# of 8 and 50; causal or not): beyond, T² weights cost more than the states of chunks.
LONGEST_QUADRATIC = 128


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    """All pairs while that is fastest; beyond, the recurrence, in both directions chunks, without decay one sum."""
    dtype = torch.promote_types(q.dtype, v.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        if log_decay is None and not causal:
            return whole_sum(q, k, v, scale=scale)
        if q.shape[1] <= LONGEST_QUADRATIC:
            return quadratic(q, k, v, log_decay, scale=scale, causal=causal)
        if causal:
            return linear_attention(q, k, v, log_decay, scale=scale)[0]
        assert log_decay is not None
        return chunked(q, k, v, log_decay, scale=scale)


def whole_sum(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Both directions without decay: every position reads one sum over all, q_i (Σ_j k_jᵀ v_j)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q @ (k.transpose(-1, -2) @ (v * scale))).transpose(1, 2)


def quadratic(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    """All pairs of positions at once."""
    q, k, v = (x.transpose(1, 2) for x in (q * scale, k, v))
    scores = q @ k.transpose(-1, -2)
    if log_decay is not None:
        scores = scores * _weights(_accumulated(log_decay, scores.shape[-1]), scores.dtype)
    return ((scores.tril() if causal else scores) @ v).transpose(1, 2)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float, chunk_size: int | None = None
) -> Tensor:
    """Both directions: all pairs within a chunk, and one state for what lies before it, one for what lies behind it.

    Nothing is counted twice, as it is by two recurrences, and each product is one for all chunks. With b_t = Σ log γ up
    to t (its own included) and e_n = b of chunk n's last token, for i in chunk n and j in an earlier chunk m
    w_ij = exp(b_i − e_{n−1}) · exp(e_{n−1} − e_m) · exp(e_m − b_j), and the mirror image of it for a later one.
    """
    (B, T, H, K), V = q.shape, v.shape[-1]
    C = chunk_size or max(32, min(K, 64))  # a state costs K·V, a token's pairs C·(K + V)
    M = -(-T // C)
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, M * C - T)).view(B, M, C, H, -1).permute(0, 3, 1, 2, 4).contiguous()
        for x in (q * scale, k, v)
    )
    b = _accumulated(log_decay, M * C).unflatten(-1, (M, C))
    end = b[..., -1]
    start = F.pad(end, (1, -1))  # e_{n−1}
    before = (start.unsqueeze(-1) - end.unsqueeze(-2)).to(q.dtype)
    before = before.masked_fill(before.new_ones(M, M, dtype=torch.bool).triu(), float("-inf")).exp()
    if log_decay.ndim == 1:
        b, end, start = b[..., :1, :], end[..., :1], start[..., :1]  # every chunk is like the first
    from_start = (b - start.unsqueeze(-1)).to(q.dtype).exp().unsqueeze(-1)
    to_end = (end.unsqueeze(-1) - b).to(q.dtype).exp().unsqueeze(-1)

    own = (q @ k.transpose(-1, -2) * _weights(b, q.dtype)) @ v
    forward = before @ ((k * to_end).transpose(-1, -2) @ v).flatten(-2)
    backward = before.transpose(-1, -2) @ ((k * from_start).transpose(-1, -2) @ v).flatten(-2)
    states = torch.cat((forward, backward), dim=-1).view(B, H, M, 2 * K, V)
    o = own + torch.cat((q * from_start, q * to_end), dim=-1) @ states
    return o.permute(0, 2, 3, 1, 4).reshape(B, M * C, H, V)[:, :T]


def _accumulated(log_decay: Tensor, T: int) -> Tensor:
    """b = Σ log γ up to each of T tokens, [1, H, T] or [B, H, T] in fp64: wanted are small differences of long sums."""
    if log_decay.ndim == 1:
        count = torch.arange(1, T + 1, dtype=torch.float64, device=log_decay.device)
        return log_decay.to(torch.float64).view(1, -1, 1) * count
    return F.pad(log_decay.to(torch.float64), (0, 0, 0, T - log_decay.shape[1])).cumsum(1).transpose(1, 2)


def _weights(b: Tensor, dtype: torch.dtype) -> Tensor:
    """b [..., T] -> w [..., T, T]; what reaches exp is never positive."""
    return (b.unsqueeze(-1) - b.unsqueeze(-2)).to(dtype).abs().neg().exp()
