"""The `torch` backend: chunked linear attention tuned for CPU, forward and backward.

Notable: the queries of a key/value group are folded into the rows of one matrix, so keys and values are
never repeated; blocks of a few chunks are copied into fp32 buffers that stay in cache, whatever the inputs'
dtype and strides; beside the inputs only one state per block is saved, from which the backward pass
recomputes the states between the block's chunks.

Shape legend (the derivation is in kernels/README.md):
    B batch, T tokens, H query heads, G key/value heads, n = H / G, K key dim, V value dim
    C tokens of a chunk, M chunks of a block, m decays of a group (n: per query head, 1: shared in the
    group, or no decay) a block's tensors start with M, so that the states of consecutive chunks are
    consecutive in memory
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.blocks import Buffers, block_view, cut, load
from supra_kernels.decay import Decay, DecayGradient, Place, decays

BLOCK_BYTES = (
    1 << 20
)  # of the queries of one block: a handful of buffers of that size fit the L2 caches of two cores


@dataclass(frozen=True)
class Sizes:
    """The static description of one call; `documents` are the blocks of each sequence, in order."""

    B: int
    G: int
    n: int
    m: int
    K: int
    V: int
    scale: float
    dtype: torch.dtype
    documents: list[list[Place]]


class Block:
    """A block's q, k, v as matrices per group, and the state before and after each of its chunks.

    q `[M·B·G, n·C, K]`, k `[M·B·G, C, K]`, v `[M·B·G, C, V]`, k_end (k decayed to the chunk's end) `[M·B·G,
    C, m·K]`, states `[M + 1, B, G, m, K, V]`: states[i] is the one before chunk i, states[M] the one the
    block leaves behind.
    """

    def __init__(
        self, s: Sizes, buffers: Buffers, decay: Decay | None, place: Place, q: Tensor, k: Tensor, v:
        Tensor, state: Tensor
    ) -> None:  # fmt: skip
        start, M, C = place
        self.M, self.C, self.decay = M, C, decay
        self.q = load(buffers("q", M, s.B, s.G, s.n, C, s.K), block_view(q, start, M, C, s.G), s.scale)
        self.k = load(buffers("k", M, s.B, s.G, 1, C, s.K), block_view(k, start, M, C, s.G))
        self.v = load(buffers("v", M, s.B, s.G, 1, C, s.V), block_view(v, start, M, C, s.G))
        self.k_end = self.k
        if decay is not None:
            self.k_end = buffers("k_end", len(self.k), C, s.m * s.K)
            torch.mul(
                self.k.view(M, s.B, s.G, 1, C, s.K), decay.to_end,
                out=self.k_end.view(M, s.B, s.G, C, s.m, s.K).transpose(3, 4),
            )  # fmt: skip
        self.states = buffers("states", M + 1, s.B, s.G, s.m, s.K, s.V)
        self.states[0] = state
        # Each chunk's own contribution first, all at once; then what it inherits, one after the other.
        torch.bmm(self.k_end.transpose(1, 2), self.v, out=self.states[1:].view(len(self.k), s.m * s.K, s.V))
        inherit(self.states.unbind(), decay)

    def before(self) -> Tensor:
        """The state before each chunk, `[M·B·G·m, K, V]`."""
        return self.states[:-1].flatten(0, 3)

    def by_state(self, x: Tensor) -> Tensor:
        """Rows folded by group, `[M·B·G, n·C, D]`, as rows that share a state, `[M·B·G·m, n/m·C, D]`."""
        return x.view(self.states[:-1].shape[:4].numel(), -1, x.shape[-1])

    def from_start(self, x: Tensor, out: Tensor) -> Tensor:
        """exp(b_i) x_i, as rows that share a state; without a decay x itself."""
        if self.decay is not None:
            shape = (*self.states[:-1].shape[:4], -1, self.C, x.shape[-1])
            x = torch.mul(x.view(shape), self.decay.from_start, out=out.view(shape))
        return self.by_state(x)

    def mask(self, x: Tensor) -> Tensor:
        """Causality and decay on scores `[M·B·G, n·C, C]`, in place."""
        if self.decay is None:
            x.view(-1, self.C, self.C).tril_()
        else:
            x.view(*self.states[:-1].shape[:4], -1, self.C, self.C).mul_(self.decay.between)
        return x


def inherit(states: tuple[Tensor, ...], decay: Decay | None) -> None:
    """states[i + 1] += exp(b_C of chunk i) states[i], in order."""
    if decay is None:
        for before, after in itertools.pairwise(states):
            after.add_(before)
    else:
        for whole, before, after in zip(decay.chunks(len(states) - 1), states[:-1], states[1:], strict=True):
            after.addcmul_(whole, before)


def bequeath(d_states: tuple[Tensor, ...], decay: Decay | None) -> None:
    """The adjoint of `inherit`: d_states[i] += exp(b_C of chunk i) d_states[i + 1], from the last to the
    first."""
    if decay is None:
        for after, before in itertools.pairwise(reversed(d_states)):
            before.add_(after)
    else:
        wholes = reversed(decay.chunks(len(d_states) - 1))
        for whole, (after, before) in zip(wholes, itertools.pairwise(reversed(d_states)), strict=True):
            before.addcmul_(whole, after)


def block_forward(block: Block, buffers: Buffers) -> Tensor:
    """`o` of a block, `[M·B·G, n·C, V]`."""
    rows = block.q.shape[:2]
    scores = torch.bmm(block.q, block.k.transpose(1, 2), out=buffers("scores", *rows, block.C))
    o = torch.bmm(block.mask(scores), block.v, out=buffers("o", *rows, block.v.shape[-1]))
    q_start = block.from_start(block.q, buffers("q_start", *block.q.shape))
    block.by_state(o).baddbmm_(q_start, block.before())
    return o


def block_backward(
    s: Sizes,
    block: Block,
    buffers: Buffers,
    place: Place,
    do: Tensor,
    d_state: Tensor,
    d_decay: DecayGradient | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients `(dq, dk, dv, state before the block)` from those of a block's output and of the state
    after it."""
    M, B, G, C = block.M, s.B, s.G, block.C
    batch, decay = len(block.q), block.decay
    do_start = block.from_start(do, buffers("do_start", *do.shape))

    # d_states[i + 1] belongs to the state that chunk i leaves, d_states[0] to the one the block receives.
    d_states = buffers("d_states", *block.states.shape)
    d_states[-1] = d_state
    torch.bmm(block.by_state(block.q).transpose(1, 2), do_start, out=d_states[:-1].flatten(0, 3))
    bequeath(d_states.unbind(), decay)
    d_after = d_states[1:].view(batch, s.m * s.K, s.V)

    d_scores = torch.bmm(do, block.v.transpose(1, 2), out=buffers("d_scores", batch, s.n * C, C))
    scores = torch.bmm(block.q, block.k.transpose(1, 2), out=buffers("scores", *d_scores.shape))
    block.mask(scores)
    dv = torch.bmm(scores.transpose(1, 2), do, out=buffers("dv", batch, C, s.V))
    dv.baddbmm_(block.k_end, d_after)
    between = scores.mul_(d_scores) if d_decay is not None else None
    block.mask(d_scores)

    dq = buffers("dq", *block.q.shape)
    torch.bmm(do_start, block.before().transpose(1, 2), out=block.by_state(dq))
    from_start = (block.q * dq).view(M, B, G, s.m, -1, C, s.K).sum((4, 6)) if d_decay is not None else None
    dq.baddbmm_(d_scores, block.k)

    dk = torch.bmm(d_scores.transpose(1, 2), block.q, out=buffers("dk", *block.k.shape))
    if decay is None:
        dk.baddbmm_(block.v, d_after.transpose(1, 2))
    else:
        dk_end = torch.bmm(block.v, d_after.transpose(1, 2), out=buffers("dk_end", batch, C, s.m * s.K))
        by_head = dk_end.view(M, B, G, C, s.m, s.K).transpose(3, 4).mul_(decay.to_end)
        dk += by_head.sum(3).view(dk.shape)
        if d_decay is not None and between is not None and from_start is not None:
            to_end = (by_head * block.k.view(M, B, G, 1, C, s.K)).sum(-1)
            whole = (block.states[:-1] * d_states[1:]).sum((-1, -2)) * decay.whole[..., 0, 0]
            d_decay.add(place, between.view(M, B, G, s.m, -1, C, C).sum(4), from_start, to_end, whole)
    return dq.mul_(s.scale) if s.scale != 1.0 else dq, dk, dv, d_states[0]


class ChunkedLinearAttention(torch.autograd.Function):
    """`(o, final_state)` of one call; the states have the shape `[N, S, K, V]` of the public operator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor, s: Sizes
    ) -> tuple[Tensor, Tensor]:
        buffers, decay_of = Buffers(q.device, s.dtype), decays(log_decay, s.G, s.dtype)
        o = torch.empty(*q.shape[:3], s.V, dtype=v.dtype, device=q.device)
        state_shape = (s.B, s.G, s.m, s.K, s.V)
        kept, finals = [], []
        for blocks, initial in zip(s.documents, initial_state.split(s.B), strict=True):
            state = initial.reshape(state_shape)
            for place in blocks:
                kept.append(state)
                block = Block(s, buffers, decay_of(place), place, q, k, v, state)
                target = block_view(o, *place, s.G)
                target.copy_(block_forward(block, buffers).view(target.shape))
                state = block.states[-1].clone()
            finals.append(state.view(initial.shape))
        ctx.save_for_backward(q, k, v, log_decay, *kept)
        ctx.sizes = s
        return o, torch.cat(finals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, *kept = ctx.saved_tensors
        s: Sizes = ctx.sizes
        buffers, decay_of = Buffers(q.device, s.dtype), decays(log_decay, s.G, s.dtype)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        d_decay = (
            DecayGradient(torch.zeros_like(log_decay, dtype=s.dtype)) if ctx.needs_input_grad[3] else None
        )
        d_initials = []
        with torch.autocast(q.device.type, enabled=False):
            for blocks, d_last in zip(reversed(s.documents), reversed(d_final.split(s.B)), strict=True):
                d_state = d_last.reshape(s.B, s.G, s.m, s.K, s.V)
                for place in reversed(blocks):
                    block = Block(s, buffers, decay_of(place), place, q, k, v, kept.pop())
                    do_view = block_view(do, *place, s.G)
                    do_block = load(buffers("do", *do_view.shape), do_view)
                    *found, d_state = block_backward(s, block, buffers, place, do_block, d_state, d_decay)
                    for whole, part in zip((dq, dk, dv), found, strict=True):
                        target = block_view(whole, *place, s.G)
                        target.copy_(part.view(target.shape))
                d_initials.append(d_state.reshape(d_last.shape).clone())
        d_log_decay = d_decay.total.to(log_decay.dtype) if d_decay is not None else None
        return dq, dk, dv, d_log_decay, torch.cat(d_initials[::-1]), None


def linear_attention_torch(
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
    """The public operator on the `torch` backend; arguments are already validated."""
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    state_heads = G if log_decay is None or log_decay.shape[-1] == G else H
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32), v.dtype)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    token_bytes = B * H * max(K, V) * dtype.itemsize
    size = chunk_size or 64
    documents = [
        list(cut(start, end, size, BLOCK_BYTES // (token_bytes * size)))
        for start, end in itertools.pairwise(bounds)
    ]
    s = Sizes(B, G, H // G, state_heads // G, K, V, scale, dtype, documents)
    if initial_state is None:
        initial_state = torch.zeros(B * len(documents), state_heads, K, V, dtype=dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        o, final = ChunkedLinearAttention.apply(q, k, v, log_decay, initial_state.to(dtype), s)
    return o, final if output_final_state else None
