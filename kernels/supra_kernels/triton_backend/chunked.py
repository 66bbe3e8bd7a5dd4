"""The `triton` backend of `linear_attention`: which kernels run, in what order, with which buffers.

Forward: decays are summed per chunk, `chunk_states` → `scan_states` → `chunk_output`. Backward: the states again unless
they were kept, `chunk_states` (reversed) → `scan_states_reversed` → `chunk_dq`, `chunk_dk`, `chunk_dv`, and the decay's
gradient. Buffers beside the inputs' own size are the states and their gradients only: 4 · S · K · V / C bytes a token
each. Products run in the dtype of q and k, sums and states in fp32.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.cost import DecayKind, Shape, choose_chunk_size, save_states
from supra_kernels.errors import BackendError
from supra_kernels.triton_backend.chunks import Chunks, cut_documents, cut_rows
from supra_kernels.triton_backend.gradient_kernels import chunk_d_log_decay, chunk_dk, chunk_dq, chunk_dv
from supra_kernels.triton_backend.output_kernels import chunk_output
from supra_kernels.triton_backend.state_kernels import chunk_states, scan_states, scan_states_reversed
from supra_kernels.triton_backend.tiles import FIXED, NO_DECAY, PER_TOKEN
from supra_kernels.triton_backend.tiling import (
    LARGEST_CHUNK,
    LARGEST_HEAD_DIM,
    SCAN_BLOCK,
    Tiling,
    chunk_tile,
    tile,
)


@dataclass(frozen=True)
class Call:
    """What is fixed for one call: head counts and dims, chunks and tiles, and which decay acts."""

    B: int
    T: int
    H: int
    G: int
    S: int
    K: int
    V: int
    scale: float
    decay: int
    chunks: Chunks
    tiling: Tiling
    keep_states: bool

    @property
    def num_sequences(self) -> int:
        return self.chunks.sequence_chunks.shape[0] - 1

    @property
    def heads(self) -> dict[str, Any]:
        return {"HEADS": self.H // self.G, "STATES": self.S // self.G, "DECAY": self.decay}

    def states(self, like: Tensor) -> Tensor:
        return like.new_empty(len(self.chunks), self.S, self.K, self.V, dtype=torch.float32)


def _accumulate(log_decay: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """b [B·T, S] of a decay per token, summed from each chunk's start, as two fp32 parts whose sum holds it.

    Summed in fp64: what the kernels need are small differences of long sums.
    """
    total = log_decay.flatten(0, 1).to(torch.float64).cumsum(0)
    before = F.pad(total, (0, 0, 1, 0))[chunks.start]
    b = total - before.repeat_interleave(chunks.tokens, 0, output_size=total.shape[0])
    high = b.to(torch.float32)
    return high, (b - high).to(torch.float32)


def _forward_states(
    c: Call, k: Tensor, v: Tensor, decay: tuple[Tensor, Tensor], initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state before every chunk [chunks, S, K, V] and after every sequence [N, S, K, V]."""
    states, t = c.states(k), c.tiling
    final = k.new_empty(c.num_sequences, c.S, c.K, c.V, dtype=torch.float32)
    if len(c.chunks):
        chunk_states[(len(c.chunks), c.S, t.NK * t.NV)](
            k, v, states, *decay, c.chunks.start, c.chunks.tokens, c.S, c.K, c.V, c.G, 1.0,
            HEADS=1, SHARE=c.S // c.G, REVERSED=False, DECAY=c.decay, num_warps=t.num_warps, num_stages=1,
            **t.constants("C", "BK", "BV", "NV", "TAIL", "MIXED", "PRECISION"),
        )  # fmt: skip
    entries = c.K * c.V
    scan_states[(c.num_sequences, c.S, triton.cdiv(entries, SCAN_BLOCK))](
        states, final if initial is None else initial, final, *decay, c.chunks.start, c.chunks.tokens,
        c.chunks.sequence_chunks, c.S, entries,
        DECAY=c.decay, INITIAL=initial is not None, BLOCK=SCAN_BLOCK,
    )  # fmt: skip
    return states, final


def _backward_states(
    c: Call,
    q: Tensor,
    do: Tensor,
    states: Tensor,
    decay: tuple[Tensor, Tensor],
    d_final: Tensor,
    d_decay: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the state after every chunk and of the initial states, and of each chunk's whole decay
    [chunks, S, blocks]."""
    d_states, t = c.states(q), c.tiling
    entries = c.K * c.V
    blocks = triton.cdiv(entries, SCAN_BLOCK)
    d_initial = torch.empty_like(d_final)
    d_whole = q.new_empty(len(c.chunks), c.S, blocks, dtype=torch.float32)
    if len(c.chunks):
        chunk_states[(len(c.chunks), c.S, t.NK * t.NV)](
            q, do, d_states, *decay, c.chunks.start, c.chunks.tokens, c.S, c.K, c.V, c.H, c.scale,
            HEADS=c.H // c.S, SHARE=1, REVERSED=True, DECAY=c.decay, num_warps=t.num_warps, num_stages=1,
            **t.constants("C", "BK", "BV", "NV", "TAIL", "MIXED", "PRECISION"),
        )  # fmt: skip
    scan_states_reversed[(c.num_sequences, c.S, blocks)](
        d_states, d_final, d_initial, states, d_whole, *decay, c.chunks.start, c.chunks.tokens,
        c.chunks.sequence_chunks, c.S, entries,
        DECAY=c.decay, DECAY_GRADIENT=d_decay, BLOCK=SCAN_BLOCK,
    )  # fmt: skip
    return d_states, d_initial, d_whole


class TritonLinearAttention(torch.autograd.Function):
    """`(o, final_state)` of one call from contiguous inputs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, c: Call
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty(c.B, c.T, c.H, c.V, dtype=v.dtype, device=v.device)
        decay, t = _decay(c, q, log_decay), c.tiling
        states, final = _forward_states(c, k, v, decay, initial)
        if len(c.chunks):
            chunk_output[(len(c.chunks), c.G)](
                q, k, v, states, o, *decay, c.chunks.start, c.chunks.tokens,
                c.S, c.H, c.G, c.K, c.V, c.scale, num_warps=t.num_warps, num_stages=1, **c.heads,
                **t.constants("C", "BK", "NK", "BV", "NV", "TAIL", "MIXED", "PRECISION"),
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, log_decay, initial, states if c.keep_states else None)
        ctx.call = c
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, initial, states = ctx.saved_tensors
        c: Call = ctx.call
        wants_decay = ctx.needs_input_grad[3]
        with _on(q):
            decay, do = _decay(c, q, log_decay), do.contiguous()
            if states is None:
                states, _ = _forward_states(c, k, v, decay, initial)
            d_states, d_initial, d_whole = _backward_states(
                c, q, do, states, decay, d_final.contiguous(), wants_decay
            )
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            d_log_decay = _gradients(
                c, q, k, v, do, states, d_states, decay, d_whole, (dq, dk, dv), wants_decay
            )
        if d_log_decay is not None:
            d_log_decay = d_log_decay.view(log_decay.shape).to(log_decay.dtype)
        return dq, dk, dv, d_log_decay, None if initial is None else d_initial, None


def _gradients(
    c: Call, q: Tensor, k: Tensor, v: Tensor, do: Tensor, states: Tensor, d_states: Tensor,
    decay: tuple[Tensor, Tensor], d_whole: Tensor, into: tuple[Tensor, Tensor, Tensor], wants_decay: bool,
) -> Tensor | None:  # fmt: skip
    """Fill dq, dk, dv; return the gradient of log_decay, [S] or [B·T, S] fp32, if it is wanted."""
    t, (dq, dk, dv) = c.tiling, into
    total_tokens = c.B * c.T
    rows = q.new_empty(2, total_tokens, c.H, dtype=torch.float32) if wants_decay else q
    d_row, d_column = (rows[0], rows[1]) if wants_decay else (q, q)
    d_to_end = q.new_empty(t.NK, total_tokens, c.S, dtype=torch.float32) if wants_decay else q
    if not len(c.chunks):
        return q.new_zeros(c.S if c.decay == FIXED.value else 0, dtype=torch.float32) if wants_decay else None
    where = (*decay, c.chunks.start, c.chunks.tokens)
    sizes = (c.S, c.H, c.G, c.K, c.V, c.scale)
    constants = t.constants("C", "BK", "NK", "BV", "NV", "TAIL", "MIXED", "PRECISION") | c.heads
    options = {"num_warps": t.num_warps, "num_stages": 1}
    grid = len(c.chunks), c.G
    chunk_dq[grid](
        q, k, v, do, states, dq, d_row, *where, *sizes, DECAY_GRADIENT=wants_decay, **constants, **options
    )
    chunk_dk[(*grid, t.NK)](
        q, k, v, do, d_states, dk, d_column, d_to_end, *where, total_tokens, *sizes,
        DECAY_GRADIENT=wants_decay, **constants, **options,
    )  # fmt: skip
    chunk_dv[(*grid, t.NV)](q, k, v, do, d_states, dv, *where, *sizes, **constants, **options)
    if not wants_decay:
        return None
    if c.decay == FIXED.value:
        of_heads = rows.sum((0, 1), dtype=torch.float64).view(c.S, -1).sum(1)
        of_chunks = (c.chunks.tokens[:, None] * d_whole.sum(2)).sum(0, dtype=torch.float64)
        return of_heads + d_to_end.sum((0, 1), dtype=torch.float64) + of_chunks
    d_log_decay = q.new_empty(total_tokens, c.S, dtype=torch.float32)
    chunk_d_log_decay[(len(c.chunks), c.S)](
        d_row, d_column, d_to_end, d_whole, d_log_decay, c.chunks.start, c.chunks.tokens, total_tokens, c.S,
        d_whole.shape[2], HEADS=c.H // c.S, NK=t.NK, C=t.C,
    )  # fmt: skip
    return d_log_decay


def _decay(c: Call, q: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two decay arguments of every kernel; tensors that nothing reads where there is no decay."""
    if log_decay is None:
        return q, q
    if c.decay == FIXED.value:
        fixed = log_decay.to(torch.float32).contiguous()
        return fixed, fixed
    return _accumulate(log_decay, c.chunks)


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on the tensors' own GPU, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The public operator on the `triton` backend; arguments are already validated.

    Raises BackendError for what the kernels do not compute: fp64, head dims beyond 512, chunks beyond 128 tokens.
    """
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    _refuse(q, k, v, log_decay, initial_state, chunk_size)
    shape = _shape(q, k, v, log_decay, cu_seqlens)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    exact = torch.get_float32_matmul_precision() == "highest"
    size = chunk_size or choose_chunk_size(shape, training=training, exact=exact)
    chunks = cut_rows(B, T, size, q.device) if cu_seqlens is None else cut_documents(cu_seqlens, size)
    dtype = torch.promote_types(q.dtype, k.dtype)
    kinds = {0: NO_DECAY, 1: FIXED, 3: PER_TOKEN}
    kind = kinds[0 if log_decay is None else log_decay.dim()].value
    # Rows of 65 or 129 numbers would leave every load of values, outputs and states unaligned.
    width = triton.cdiv(V, 16) * 16
    c = Call(
        B, T, H, G, shape.state_heads, K, width, float(scale), kind, chunks, tile(K, width, chunk_tile(size), dtype),
        keep_states=save_states(shape, size),
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False), _on(q):
        if initial_state is not None:
            initial_state = F.pad(initial_state.to(torch.float32), (0, width - V)).contiguous()
        v = F.pad(v, (0, width - V)).contiguous()
        o, final = TritonLinearAttention.apply(
            q.to(dtype).contiguous(), k.to(dtype).contiguous(), v, log_decay, initial_state, c
        )
    return o[..., :V], final[..., :V].contiguous() if output_final_state else None


def _shape(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None) -> Shape:
    """The call as the cost model sees it; packed documents count as rows of their mean length."""
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    if cu_seqlens is not None:
        B = cu_seqlens.shape[0] - 1
        T = -(-T // B)
    kind: DecayKind = "none"
    if log_decay is not None:
        by_group = log_decay.shape[-1] == G
        if log_decay.dim() == 1:
            kind = "key head" if by_group else "query head"
        else:
            kind = "token and key head" if by_group else "token and query head"
    return Shape(B, T, H, G, K, V, kind, q.element_size(), v.element_size())


def _refuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int | None,
) -> None:
    mend = 'use backend="torch"'
    for name, x in {"q": q, "k": k, "v": v, "log_decay": log_decay, "initial_state": initial_state}.items():
        if x is not None and x.dtype == torch.float64 and name != "log_decay":
            raise BackendError(f"{name} is fp64, but backend 'triton' computes in fp32: {mend}")
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD_DIM:
        raise BackendError(
            f"head dims {q.shape[-1]} and {v.shape[-1]}: backend 'triton' takes at most {LARGEST_HEAD_DIM}; {mend}"
        )
    if chunk_size is not None and chunk_size > LARGEST_CHUNK:
        raise BackendError(
            f"chunk_size is {chunk_size}: backend 'triton' takes at most {LARGEST_CHUNK}, or None to choose"
        )
