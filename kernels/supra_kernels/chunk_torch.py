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

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.blocks import Buffers, block_view, cut
from supra_kernels.decay import Decay, DecayGradient, Place, decays

# Measured (kernels/README.md): short chunks waste less on the masked half of the scores, and blocks whose queries and
# states take this much keep their scratch tensors in the L2 cache.
CHUNK_SIZE = 32
BLOCK_BYTES = 1 << 20


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
    decayed: bool

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.B, self.G, self.m, self.K, self.V


class Block:
    """Scratch tensors for blocks of M chunks of C tokens, every view of them that the products need, and the
    computation itself. Views are made once because making them costs as much as a small product.

    Matrices are per group: q, o and their gradients `[M·B·G, n·C, ·]`, k, v `[M·B·G, C, ·]`, scores `[M·B·G, n·C, C]`;
    `…_rows` fold them by state instead, `[M·B·G·m, n/m·C, ·]`. States are `[M + 1, B, G, m, K, V]`: states[i] is
    the one before chunk i, states[M] the one the block leaves behind.
    """

    def __init__(self, s: Sizes, buffers: Buffers, M: int, C: int) -> None:
        self.s, self.buffers, self.C = s, buffers, C
        self.batch, self.by_state = M * s.B * s.G, (M, s.B, s.G, s.m)
        self.decay: Decay | None = None
        self.q_view, self.q, self.q_rows = self.rows("q", s.K)
        self.k_view, self.k, self.k_T = self.keys("k", s.K)
        self.v_view, self.v, self.v_T = self.keys("v", s.V)
        self.o_view, self.o, self.o_rows = self.rows("o", s.V)
        k_end = buffers("k_end", self.batch, C, s.m * s.K) if s.decayed else self.k
        self.k_end, self.k_end_T = k_end, k_end.transpose(1, 2)
        self.k_end_heads = k_end.view(M, s.B, s.G, C, s.m, s.K).transpose(3, 4)
        self.scores = buffers("scores", self.batch, s.n * C, C)
        self.states, self.each_state, self.before, self.after = self.state("states", M)

    def rows(self, name: str, D: int) -> tuple[Tensor, Tensor, Tensor]:
        """A tensor of queries: as a block of the input, as matrices by group, and as matrices by state."""
        view = self.buffers(name, *self.by_state[:3], self.s.n, self.C, D)
        return view, view.view(self.batch, -1, D), view.view(self.batch * self.s.m, -1, D)

    def keys(self, name: str, D: int) -> tuple[Tensor, Tensor, Tensor]:
        """A tensor of keys or values: as a block of the input, as matrices, and transposed."""
        view = self.buffers(name, *self.by_state[:3], 1, self.C, D)
        flat = view.view(self.batch, self.C, D)
        return view, flat, flat.transpose(1, 2)

    def state(self, name: str, M: int) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor]:
        """States: all of them, one by one, and as matrices those before a chunk by head and those after by group."""
        s, states = self.s, self.buffers(name, M + 1, *self.s.state_shape)
        return states, states.unbind(), states[:-1].flatten(0, 3), states[1:].view(self.batch, s.m * s.K, s.V)

    def heads(self, x: Tensor) -> Tensor:
        """Rows folded by group as `[M, B, G, m, n/m, C, ·]`, against which decays broadcast."""
        return x.view(*self.by_state, -1, self.C, x.shape[-1])

    def mask(self, scores: Tensor) -> None:
        """Causality and decay, in place."""
        if self.decay is None:
            scores.view(-1, self.C, self.C).tril_()
        else:
            self.heads(scores).mul_(self.decay.between)

    def load(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Decay | None, place: Place) -> None:
        """Fill q, k, v, k decayed to the chunk's end, and the states."""
        s, self.decay = self.s, decay
        self.q_view.copy_(block_view(q, *place, s.G))
        self.k_view.copy_(block_view(k, *place, s.G))
        self.v_view.copy_(block_view(v, *place, s.G))
        if s.scale != 1.0:
            self.q.mul_(s.scale)
        if decay is not None:
            torch.mul(self.k_view, decay.to_end, out=self.k_end_heads)
        # What each chunk adds by itself, all at once; then what it inherits from those before it.
        self.each_state[0].copy_(state)
        torch.bmm(self.k_end_T, self.v, out=self.after)
        for i in range(len(self.each_state) - 1):
            self.inherit(self.each_state[i + 1], self.each_state[i], i)

    def inherit(self, heir: Tensor, state: Tensor, chunk: int) -> None:
        """heir += the decay over the whole chunk times the state on its other side."""
        if self.decay is None:
            heir.add_(state)
        else:
            heir.addcmul_(self.decay.chunk(chunk), state)

    def forward(self) -> Tensor:
        """`o` of the block, `[M, B, G, n, C, V]`."""
        torch.bmm(self.q, self.k_T, out=self.scores)
        self.mask(self.scores)
        torch.bmm(self.scores, self.v, out=self.o)
        if self.decay is not None:
            self.heads(self.q).mul_(self.decay.from_start)
        self.o_rows.baddbmm_(self.q_rows, self.before)
        return self.o_view


class BlockBackward(Block):
    """A block with the scratch tensors of its gradients; do takes the place of o."""

    def __init__(self, s: Sizes, buffers: Buffers, M: int, C: int) -> None:
        super().__init__(s, buffers, M, C)
        self.do_view, self.do, self.do_rows = self.o_view, self.o, self.o_rows
        self.q_rows_T, self.scores_T = self.q_rows.transpose(1, 2), self.scores.transpose(1, 2)
        self.before_T = self.before.transpose(1, 2)
        self.d_scores = buffers("d_scores", *self.scores.shape)
        self.d_scores_T = self.d_scores.transpose(1, 2)
        self.dq_view, self.dq, self.dq_rows = self.rows("dq", s.K)
        self.dk_view, self.dk, _ = self.keys("dk", s.K)
        self.dv_view, self.dv, _ = self.keys("dv", s.V)
        self.d_states, self.each_d_state, self.d_before, self.d_after = self.state("d_states", M)
        self.d_after_T = self.d_after.transpose(1, 2)
        self.v_end = buffers("v_end", *self.by_state, C, s.V)
        self.by_head = [
            (self.v_end[:, :, :, i].flatten(0, 2), self.d_states[1:, :, :, i].flatten(0, 2).transpose(1, 2))
            for i in range(s.m)
        ]

    def backward(self, place: Place, d_state: Tensor, d_decay: DecayGradient | None) -> Tensor:
        """Fill dq, dk, dv from do and the gradient of the state after the block; return that of the state before."""
        s, decay = self.s, self.decay
        torch.bmm(self.do, self.v_T, out=self.d_scores)
        torch.bmm(self.q, self.k_T, out=self.scores)
        self.mask(self.scores)
        torch.bmm(self.scores_T, self.do, out=self.dv)
        between = self.scores.mul_(self.d_scores) if d_decay is not None else None
        self.mask(self.d_scores)

        # From here on do is only needed as what reads the state before the chunk.
        if decay is not None:
            self.heads(self.do).mul_(decay.from_start)
        self.each_d_state[-1].copy_(d_state)
        torch.bmm(self.q_rows_T, self.do_rows, out=self.d_before)
        for i in reversed(range(len(self.each_d_state) - 1)):
            self.inherit(self.each_d_state[i], self.each_d_state[i + 1], i)
        self.dv.baddbmm_(self.k_end, self.d_after)

        torch.bmm(self.do_rows, self.before_T, out=self.dq_rows)
        from_start = self.heads(self.q * self.dq).sum((4, 6)) if d_decay is not None else None
        self.dq.baddbmm_(self.d_scores, self.k)

        torch.bmm(self.d_scores_T, self.q, out=self.dk)
        if decay is None:
            self.dk.baddbmm_(self.v, self.d_after_T)
        else:
            torch.mul(self.v_view, decay.to_end, out=self.v_end)
            for v_end, d_after_T in self.by_head:
                self.dk.baddbmm_(v_end, d_after_T)
        if decay is not None and d_decay is not None and between is not None and from_start is not None:
            dk_end = (
                torch.bmm(self.v, self.d_after_T).view(*self.by_state[:3], self.C, s.m, s.K).transpose(3, 4)
            )
            to_end = (dk_end * self.k_view).sum(-1) * decay.to_end.squeeze(-1)
            whole = (self.states[:-1] * self.d_states[1:]).sum((-1, -2)) * decay.whole[..., 0, 0]
            d_decay.add(place, self.heads(between).sum(4), from_start, to_end, whole)
        if s.scale != 1.0:
            self.dq.mul_(s.scale)
        return self.each_d_state[0]


class ChunkedLinearAttention(torch.autograd.Function):
    """`(o, final_state)` of one call; the states have the shape `[N, S, K, V]` of the public operator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor, s: Sizes
    ) -> tuple[Tensor, Tensor]:
        buffers, decay_of = Buffers(q.device, s.dtype), decays(log_decay, s.G, s.dtype)
        block_of = functools.cache(lambda M, C: Block(s, buffers, M, C))
        o = torch.empty(*q.shape[:3], s.V, dtype=v.dtype, device=q.device)
        kept, finals = [], []
        for places, initial in zip(s.documents, initial_state.split(s.B), strict=True):
            state = initial.reshape(s.state_shape)
            for place in places:
                kept.append(state)
                block = block_of(*place[1:])
                block.load(q, k, v, state, decay_of(place), place)
                block_view(o, *place, s.G).copy_(block.forward())
                state = block.each_state[-1].clone()
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
        block_of = functools.cache(lambda M, C: BlockBackward(s, buffers, M, C))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        d_decay = (
            DecayGradient(torch.zeros_like(log_decay, dtype=s.dtype)) if ctx.needs_input_grad[3] else None
        )
        d_initials = []
        with torch.autocast(q.device.type, enabled=False):
            for places, d_last in zip(reversed(s.documents), reversed(d_final.split(s.B)), strict=True):
                d_state = d_last.reshape(s.state_shape)
                for place in reversed(places):
                    block = block_of(*place[1:])
                    block.load(q, k, v, kept.pop(), decay_of(place), place)
                    block.do_view.copy_(block_view(do, *place, s.G))
                    d_state = block.backward(place, d_state, d_decay)
                    for whole, part in ((dq, block.dq_view), (dk, block.dk_view), (dv, block.dv_view)):
                        block_view(whole, *place, s.G).copy_(part)
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
    size = chunk_size or CHUNK_SIZE
    chunk_bytes = B * (H * size * max(K, V) + state_heads * K * V) * dtype.itemsize
    most = max(1, BLOCK_BYTES // max(1, chunk_bytes))
    documents = [list(cut(start, end, size, most)) for start, end in itertools.pairwise(bounds)]
    s = Sizes(B, G, H // G, state_heads // G, K, V, scale, dtype, documents, log_decay is not None)
    if initial_state is None:
        initial_state = torch.zeros(B * len(documents), state_heads, K, V, dtype=dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        o, final = ChunkedLinearAttention.apply(q, k, v, log_decay, initial_state.to(dtype), s)
    return o, final if output_final_state else None
