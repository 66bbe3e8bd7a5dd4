"""Exact softmax over the last `window` tokens in blocks: the `torch` backend of `window_attention`.

A block of queries meets the keys of its own span only, so time and memory grow with T · window. As in flash
attention (arXiv 2205.14135, algorithm 4) nothing of size T · window is kept for the backward pass: the
weights are recomputed from `lse`. Keys are padded in front by `front` slots, which hold past keys or
nothing; query t then sees the padded keys `lowest[t] ≤ j ≤ t + front`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.blocks import Buffers, block_view, cut, load

BLOCK_BYTES = 1 << 20  # of the weights of one group of blocks


@dataclass(frozen=True)
class Layout:
    """Static description of one call: block of `rows` queries, `front` padded keys, scores computed in
    `dtype`."""

    window: int
    front: int
    rows: int
    scale: float
    dtype: torch.dtype

    def groups(self, B: int, T: int, H: int) -> Iterator[tuple[int, int, int]]:
        """Groups of blocks `(first query, number of blocks, queries of a block)`."""
        block_bytes = B * H * self.rows * (self.rows + self.front) * self.dtype.itemsize
        return cut(0, T, self.rows, BLOCK_BYTES // max(1, block_bytes))

    def bias(self, lowest: Tensor | None, device: torch.device, place: tuple[int, int, int]) -> Tensor:
        """0 where a query sees a key and −inf elsewhere, `[M | 1, B | 1, 1, 1, rows, rows + front]`."""
        start, M, rows = place
        query = torch.arange(rows, device=device).unsqueeze(1) + self.front
        key = torch.arange(rows + self.front, device=device)
        seen = (key <= query) & (key > query - self.window)
        if lowest is not None:
            low = lowest[:, start : start + M * rows].view(-1, M, rows, 1).transpose(0, 1)
            offset = start + rows * torch.arange(M, device=device).view(M, 1, 1, 1)
            seen = seen & (key + offset >= low)
            seen = seen.view(M, -1, 1, 1, rows, rows + self.front)
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=device)
        return bias.masked_fill_(~seen, float("-inf"))


def spans(x: Tensor, start: int, M: int, rows: int, front: int) -> Tensor:
    """Padded keys `[B, front + T, G, D]` → those each block sees, `[M, B, G, 1, rows + front, D]`,
    overlapping."""
    part = x[:, start : start + M * rows + front]
    return part.unfold(1, rows + front, rows).permute(1, 0, 2, 4, 3).unsqueeze(3)


class Group:
    """The operands of a group of blocks, and its scores (masked, unnormalised)."""

    def __init__(
        self,
        layout: Layout,
        buffers: Buffers,
        place: tuple[int, int, int],
        bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        start, M, rows = place
        (B, _, H, D), (G, V), front = q.shape, v.shape[-2:], layout.front
        n, span = H // G, rows + layout.front
        self.q = load(buffers("q", M, B, G, n, rows, D), block_view(q, start, M, rows, G), layout.scale)
        self.k = load(buffers("k", M, B, G, 1, span, D), spans(k, start, M, rows, front))
        self.v = load(buffers("v", M, B, G, 1, span, V), spans(v, start, M, rows, front))
        self.scores = buffers("scores", M * B * G, n * rows, span)
        torch.bmm(self.q, self.k.transpose(1, 2), out=self.scores)
        self.scores.view(M, B, G, n, rows, span).add_(bias)


class WindowAttention(torch.autograd.Function):
    """`(o, lse)` from q `[B, T, H, D]` and front-padded k, v `[B, front + T, G, ·]`; `lowest` `[B | 1, T]`
    or None."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lowest: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        (B, T, H, _), (G, V) = q.shape, v.shape[-2:]
        buffers = Buffers(q.device, layout.dtype)
        o = torch.empty(B, T, H, V, dtype=v.dtype, device=q.device)
        lse = torch.empty(B, T, H, dtype=layout.dtype, device=q.device)
        for place in layout.groups(B, T, H):
            start, M, rows = place
            group = Group(layout, buffers, place, layout.bias(lowest, q.device, place), q, k, v)
            top = group.scores.amax(-1, keepdim=True)
            weights = group.scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            o_group = torch.bmm(weights, group.v, out=buffers("o", M * B * G, H // G * rows, V)).div_(total)
            block_view(o, start, M, rows, G).copy_(o_group.view(M, B, G, -1, rows, V))
            block_view(lse.unsqueeze(-1), start, M, rows, G).copy_(
                total.log_().add_(top).view(M, B, G, -1, rows, 1)
            )
        ctx.save_for_backward(q, k, v, lowest, o, lse)
        ctx.layout = layout
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lowest, o, lse = ctx.saved_tensors
        layout: Layout = ctx.layout
        (B, T, H, D), (G, V) = q.shape, v.shape[-2:]
        buffers = Buffers(q.device, layout.dtype)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=layout.dtype, device=x.device) for x in (k, v))
        # d scores = weights ∘ (do vᵀ − delta), with delta_i = do_i·o_i − d lse_i
        delta = (do.to(layout.dtype) * o).sum(-1).sub_(d_lse)
        for place in layout.groups(B, T, H):
            start, M, rows = place
            group = Group(layout, buffers, place, layout.bias(lowest, q.device, place), q, k, v)
            shape = (M, B, G, H // G, rows, 1)
            lse_rows = load(buffers("lse", *shape), block_view(lse.unsqueeze(-1), start, M, rows, G))
            delta_rows = load(buffers("delta", *shape), block_view(delta.unsqueeze(-1), start, M, rows, G))
            do_rows = load(buffers("do", *shape[:-1], V), block_view(do, start, M, rows, G))
            weights = group.scores.sub_(lse_rows).exp_()
            dv_spans = torch.bmm(weights.transpose(1, 2), do_rows, out=buffers("dv", *group.v.shape))
            d_scores = torch.bmm(do_rows, group.v.transpose(1, 2), out=buffers("d_scores", *weights.shape))
            d_scores.sub_(delta_rows).mul_(weights)
            dq_rows = torch.bmm(d_scores, group.k, out=buffers("dq", *group.q.shape)).mul_(layout.scale)
            dk_spans = torch.bmm(d_scores.transpose(1, 2), group.q, out=buffers("dk", *group.k.shape))
            block_view(dq, start, M, rows, G).copy_(dq_rows.view(*shape[:-1], D))
            for total, parts in ((dk, dk_spans), (dv, dv_spans)):
                for i, part in enumerate(parts.view(M, B, G, rows + layout.front, -1)):
                    first = start + i * rows
                    total[:, first : first + rows + layout.front] += part.transpose(1, 2)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _in_front(past: Tensor | None, x: Tensor, front: int, real: Tensor | None) -> Tensor:
    """`x` `[B, T, G, D]` behind `front` slots: the last of the past, and zeros where there is no real
    token."""
    held = 0 if past is None else min(front, past.shape[1])
    parts = [x.new_zeros(x.shape[0], front - held, *x.shape[2:])] if front > held else []
    if past is not None and held:
        kept = past[:, past.shape[1] - held :].to(x.dtype)
        # A slot without a token may hold anything, NaN included.
        parts.append(kept if real is None else kept.masked_fill(~real[:, -held:, None, None], 0))
    return torch.cat([*parts, x], dim=1) if parts else x


def window_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    past_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The public operator on the `torch` backend; arguments are already validated."""
    T = q.shape[1]
    if cu_seqlens is not None and past_k is not None and past_v is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            valid = None if past_valid is None else past_valid[i : i + 1]
            parts.append(
                window_attention_torch(
                    *(x[:, start:end] for x in (q, k, v)), window=window, scale=scale,
                    past_k=past_k[i : i + 1], past_v=past_v[i : i + 1], past_valid=valid,
                )
            )  # fmt: skip
        outputs, lses = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(lses, 1)

    P = 0 if past_k is None else past_k.shape[1]
    rows = min(max(T, 1), block_rows(window))
    # Keys before the first query: none exist beyond the past, and a single block needs no others.
    front = min(window - 1, P if rows >= T else P + T)
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32), v.dtype)
    layout = Layout(window, front, rows, scale, dtype)
    real, lowest = None, None
    if cu_seqlens is not None:
        token = torch.arange(T, device=q.device)
        document = torch.bucketize(token, cu_seqlens[1:], right=True)
        lowest = (cu_seqlens[document] + front).unsqueeze(0)
    elif front:
        valid = torch.full((1,), min(P, front), device=q.device)
        if past_valid is not None:
            valid = past_valid.clamp(max=min(P, front))
            real = torch.arange(-front, 0, device=q.device) >= -valid.unsqueeze(1)
        lowest = (front - valid).unsqueeze(1).expand(-1, T)
    k, v = _in_front(past_k, k, front, real), _in_front(past_v, v, front, real)
    with torch.autocast(q.device.type, enabled=False):
        return WindowAttention.apply(q, k, v, lowest, layout)


def block_rows(window: int) -> int:
    """Queries of a block: about as many as the window has keys, so that half of the scores computed are
    used."""
    return min(128, max(32, window))
