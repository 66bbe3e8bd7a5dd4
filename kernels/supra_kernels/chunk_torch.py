"""The `torch` backend: chunked linear attention tuned for CPU, forward and backward.

Notable: queries of one key/value group are folded into the rows of one matrix, so keys and values are never repeated; blocks
of a few chunks are copied into fp32 buffers that stay in cache, whatever the inputs' dtype and strides; the only thing saved
beside the inputs is one state per block, from which the backward pass recomputes the states of the block's chunks.

Shape legend (the derivation is in kernels/README.md):
    B batch, T tokens, H query heads, G key/value heads, n = H / G, K key dim, V value dim
    C tokens of a chunk, M chunks of a block, m decays of a group (n: per query head, 1: shared in the group, or no decay)
    a block's tensors start with M, so that states of consecutive chunks are consecutive in memory
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.blocks import Buffers, block_view, load

BLOCK_BYTES = 1 << 20  # of the folded queries of one block: a handful of such buffers stay in the L2 caches of two cores


@dataclass(frozen=True)
class Sizes:
    """The static description of one call."""

    B: int
    H: int
    G: int
    K: int
    V: int
    m: int
    scale: float
    chunk_size: int
    dtype: torch.dtype
    documents: tuple[tuple[int, int], ...]

    @property
    def n(self) -> int:
        return self.H // self.G

    def blocks(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Per document, its blocks `(first token, M, C)`: full chunks, then the rest as one chunk of its own size."""
        chunk_bytes = self.B * self.chunk_size * self.H * max(self.K, self.V) * self.dtype.itemsize
        most = max(1, BLOCK_BYTES // max(1, chunk_bytes))
        for index, (start, end) in enumerate(self.documents):
            size = self.chunk_size
            full, rest = divmod(end - start, size)
            found = []
            for first in range(0, full, most):
                found.append((start + first * size, min(most, full - first), size))
            if rest:
                found.append((end - rest, 1, rest))
            yield index, found


@dataclass(frozen=True)
class Decay:
    """Decay factors of one block, shaped to broadcast; `b` is the log decay accumulated from the chunk's start.

    scores `[M, B, G, m, C, C]` exp(b_i − b_j), 0 for j > i; from_start `[M, B, G, m, C, 1]` exp(b_i);
    to_end `[M, B, G, C, m, 1]` exp(b_C − b_j); whole `[M, B, G, m, 1, 1]` exp(b_C). M and B are 1 for a fixed decay.
    """

    scores: Tensor
    from_start: Tensor
    to_end: Tensor
    whole: Tensor

    @staticmethod
    def of(b: Tensor) -> "Decay":
        """From the accumulated log decay `b` `[M, B, G, m, C]`. Differences come first: no positive number meets exp."""
        C = b.shape[-1]
        end = b[..., -1:]
        past = torch.ones(C, C, dtype=torch.bool, device=b.device).tril()
        scores = (b.unsqueeze(-1) - b.unsqueeze(-2)).masked_fill_(~past, float("-inf")).exp_()
        to_end = (end - b).exp_().transpose(-1, -2).unsqueeze(-1)
        return Decay(scores, b.exp().unsqueeze(-1), to_end, end.exp().unsqueeze(-1))


def accumulated(log_decay: Tensor, sizes: Sizes, start: int, M: int, C: int) -> Tensor:
    """The log decay summed from the start of each chunk, itself included: `[M, B, G, m, C]` (M = B = 1 if fixed)."""
    if log_decay.dim() == 1:
        counts = torch.arange(1, C + 1, dtype=sizes.dtype, device=log_decay.device)
        return log_decay.to(sizes.dtype).view(1, 1, sizes.G, sizes.m, 1) * counts
    block = log_decay[:, start : start + M * C].to(sizes.dtype)
    return block.view(sizes.B, M, C, sizes.G, sizes.m).permute(1, 0, 3, 4, 2).cumsum(-1)


def decays(log_decay: Tensor | None, sizes: Sizes) -> Callable[[int, int, int], Decay | None]:
    """A function `(start, M, C)` → decay of that block; a fixed decay is computed once per chunk length."""
    known: dict[int, Decay] = {}

    def decay_of(start: int, M: int, C: int) -> Decay | None:
        if log_decay is None:
            return None
        if log_decay.dim() > 1:
            return Decay.of(accumulated(log_decay, sizes, start, M, C))
        if C not in known:
            known[C] = Decay.of(accumulated(log_decay, sizes, start, M, C))
        return known[C]

    return decay_of


def scores(q: Tensor, k: Tensor, decay: Decay | None, out: Tensor) -> Tensor:
    """`q kᵀ`, causal and decayed: `[M·B·G, n·C, C]`."""
    torch.bmm(q, k.transpose(1, 2), out=out)
    return mask(out, decay)


def mask(x: Tensor, decay: Decay | None) -> Tensor:
    C = x.shape[-1]
    if decay is None:
        x.view(-1, C, C).tril_()
    else:
        M, B, G, m = decay.scores.shape[:4]
        by_group = x.view(-1, B, G, m, x.shape[1] // (m * C), C, C) if M > 1 or B > 1 else None
        if by_group is None:
            x.view(-1, G, m, x.shape[1] // (m * C), C, C).mul_(decay.scores.view(G, m, 1, C, C))
        else:
            by_group.mul_(decay.scores.unsqueeze(4))
    return x


class Block:
    """Operands of one block that forward and backward share: q, k, v, k decayed to the chunk's end, and states."""

    def __init__(
        self, sizes: Sizes, buffers: Buffers, decay: Decay | None, place: tuple[int, int, int],
        q: Tensor, k: Tensor, v: Tensor, state: Tensor,
    ) -> None:  # fmt: skip
        start, M, C = place
        B, G, n, m, K, V = sizes.B, sizes.G, sizes.n, sizes.m, sizes.K, sizes.V
        self.batch, self.M, self.C, self.decay = M * B * G, M, C, decay
        self.q = load(buffers("q", M, B, G, n, C, K), block_view(q, start, M, C, G), sizes.scale)
        self.k = load(buffers("k", M, B, G, 1, C, K), block_view(k, start, M, C, G))
        self.v = load(buffers("v", M, B, G, 1, C, V), block_view(v, start, M, C, G))
        self.k_end = self.k
        if decay is not None:
            k_end = buffers("k_end", M, B, G, C, m, K)
            torch.mul(self.k.view(M, B, G, C, 1, K), decay.to_end, out=k_end)
            self.k_end = k_end.view(self.batch, C, m * K)
        # states[i] is the state before chunk i, states[M] the one the block leaves behind.
        self.states = buffers("states", M + 1, B, G, m, K, V)
        self.states[0] = state
        increments = self.states[1:].view(self.batch, m * K, V)
        torch.bmm(self.k_end.transpose(1, 2), self.v, out=increments)
        for i in range(M):
            accumulate(self.states[i + 1], self.states[i], decay, i)

    def before(self) -> Tensor:
        """The states before each chunk, `[M·B·G·m, K, V]`."""
        return self.states[:-1].view(-1, *self.states.shape[-2:])


def accumulate(target: Tensor, source: Tensor, decay: Decay | None, chunk: int) -> None:
    """target += exp(b_C) · source, over `[B, G, m, K, V]`."""
    if decay is None:
        target.add_(source)
    else:
        whole = decay.whole
        target.addcmul_(whole[chunk if whole.shape[0] > 1 else 0], source)


def decay_rows(x: Tensor, block: Block, sizes: Sizes, buffers: Buffers, name: str) -> Tensor:
    """exp(b_i) · x, `[M·B·G·m, (n/m)·C, D]` from and as rows folded by group; x itself without decay."""
    rows = sizes.n // sizes.m * block.C
    if block.decay is None:
        return x.view(-1, rows, x.shape[-1])
    M, B, G, m = block.M, sizes.B, sizes.G, sizes.m
    shape = (M, B, G, m, rows // block.C, block.C, x.shape[-1])
    out = buffers(name, *shape)
    torch.mul(x.view(shape), block.decay.from_start.unsqueeze(4), out=out)
    return out.view(-1, rows, x.shape[-1])


class ChunkedLinearAttention(torch.autograd.Function):
    """`(o, final_state)` of one call; every argument after `initial_state` is static."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor, sizes: Sizes
    ) -> tuple[Tensor, Tensor]:
        B, G, n, m, K, V = sizes.B, sizes.G, sizes.n, sizes.m, sizes.K, sizes.V
        buffers, decay_of = Buffers(q.device, sizes.dtype), decays(log_decay, sizes)
        o = torch.empty(B, q.shape[1], sizes.H, V, dtype=v.dtype, device=q.device)
        final_state = torch.empty_like(initial_state)
        kept: list[Tensor] = []
        for document, blocks in sizes.blocks():
            state = initial_state[document * B : (document + 1) * B].view(B, G, m, K, V)
            for place in blocks:
                kept.append(state)
                block = Block(sizes, buffers, decay_of(*place), place, q, k, v, state)
                _, M, C = place
                weights = scores(block.q, block.k, block.decay, buffers("scores", M * B * G, n * C, C))
                o_block = buffers("o", M * B * G, n * C, V)
                torch.bmm(weights, block.v, out=o_block)
                q_start = decay_rows(block.q, block, sizes, buffers, "q_start")
                o_block.view(-1, n // m * C, V).baddbmm_(q_start, block.before())
                block_view(o, place[0], M, C, G).copy_(o_block.view(M, B, G, n, C, V))
                state = block.states[-1].clone()
            final_state[document * B : (document + 1) * B] = state.view(B, G * m, K, V)
        ctx.save_for_backward(q, k, v, log_decay, *kept)
        ctx.sizes = sizes
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, *kept = ctx.saved_tensors
        sizes: Sizes = ctx.sizes
        B, G, n, m, K, V = sizes.B, sizes.G, sizes.n, sizes.m, sizes.K, sizes.V
        buffers, decay_of = Buffers(q.device, sizes.dtype), decays(log_decay, sizes)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        wants_decay = log_decay is not None and ctx.needs_input_grad[3]
        d_decay = torch.zeros_like(log_decay, dtype=sizes.dtype) if wants_decay else None
        d_initial = torch.empty_like(d_final)
        kept = list(kept)
        for document, blocks in reversed(list(sizes.blocks())):
            rows_of = slice(document * B, (document + 1) * B)
            d_state = d_final[rows_of].view(B, G, m, K, V)
            for place in reversed(blocks):
                start, M, C = place
                block = Block(sizes, buffers, decay_of(*place), place, q, k, v, kept.pop())
                do_block = load(buffers("do", M, B, G, n, C, V), block_view(do, start, M, C, G))
                do_start = decay_rows(do_block, block, sizes, buffers, "do_start")

                # d_states[i + 1] is the gradient of the state chunk i leaves, d_states[0] of the one the block receives.
                d_states = buffers("d_states", M + 1, B, G, m, K, V)
                d_states[-1] = d_state
                q_rows = block.q.view(-1, n // m * C, K)
                torch.bmm(q_rows.transpose(1, 2), do_start, out=d_states[:-1].view(-1, K, V))
                for i in reversed(range(M)):
                    accumulate(d_states[i], d_states[i + 1], block.decay, i)
                d_after = d_states[1:].view(M * B * G, m * K, V)

                weights = scores(block.q, block.k, block.decay, buffers("scores", M * B * G, n * C, C))
                dv_block = buffers("dv", M * B * G, C, V)
                torch.bmm(weights.transpose(1, 2), do_block, out=dv_block)
                dv_block.baddbmm_(block.k_end, d_after)

                d_weights = buffers("d_scores", M * B * G, n * C, C)
                torch.bmm(do_block, block.v.transpose(1, 2), out=d_weights)
                if wants_decay:
                    by_key = (weights * d_weights).view(M, B, G, m, -1, C).sum(-2)
                mask(d_weights, block.decay)
                dq_block = buffers("dq", M * B * G, n * C, K)
                torch.bmm(d_weights, block.k, out=dq_block)
                dq_block.view(-1, n // m * C, K).baddbmm_(do_start, block.before().transpose(1, 2))

                dk_block = buffers("dk", M * B * G, C, K)
                torch.bmm(d_weights.transpose(1, 2), block.q, out=dk_block)
                if block.decay is None:
                    dk_block.baddbmm_(block.v, d_after.transpose(1, 2))
                else:
                    dk_end = buffers("dk_end", M * B * G, C, m * K)
                    torch.bmm(block.v, d_after.transpose(1, 2), out=dk_end)
                    dk_end = dk_end.view(M, B, G, C, m, K).mul_(block.decay.to_end)
                    dk_block.add_(dk_end.sum(-2).view(dk_block.shape))

                if wants_decay:
                    d_b = (block.q * dq_block).view(M, B, G, m, -1, C, K).sum((-3, -1))
                    by_state = torch.einsum("xbgcmk,xbgck->xbgmc", dk_end, block.k.view(M, B, G, C, K))
                    d_b -= by_key + by_state
                    d_b[..., -1] += by_state.sum(-1)
                    through = (block.states[:-1] * d_states[1:]).sum((-1, -2)) * block.decay.whole[..., 0, 0]
                    d_b[..., -1] += through
                    if log_decay.dim() == 1:
                        counts = torch.arange(1, C + 1, dtype=sizes.dtype, device=q.device)
                        d_decay += (d_b.sum((0, 1)) @ counts).view(-1)
                    else:
                        d_log = d_b.flip(-1).cumsum(-1).flip(-1).permute(1, 0, 4, 2, 3)
                        d_decay[:, start : start + M * C] = d_log.reshape(B, M * C, G * m)

                if sizes.scale != 1.0:
                    dq_block.mul_(sizes.scale)
                block_view(dq, start, M, C, G).copy_(dq_block.view(M, B, G, n, C, K))
                block_view(dk, start, M, C, G).copy_(dk_block.view(M, B, G, 1, C, K))
                block_view(dv, start, M, C, G).copy_(dv_block.view(M, B, G, 1, C, V))
                d_state = d_states[0].clone()
            d_initial[rows_of] = d_state.view(B, G * m, K, V)
        if d_decay is not None:
            d_decay = d_decay.to(log_decay.dtype)
        return dq, dk, dv, d_decay, d_initial, None


def linear_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, *, scale: float, initial_state: Tensor | None,
    output_final_state: bool, cu_seqlens: Tensor | None, chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The public operator on the `torch` backend; arguments are already validated."""
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    state_heads = G if log_decay is None or log_decay.shape[-1] == G else H
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32), v.dtype)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    documents = tuple(itertools.pairwise(bounds))
    sizes = Sizes(B, H, G, K, V, state_heads // G, scale, chunk_size or 64, dtype, documents)
    if initial_state is None:
        initial_state = torch.zeros(B * len(documents), state_heads, K, V, dtype=dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        o, final = ChunkedLinearAttention.apply(q, k, v, log_decay, initial_state.to(dtype), sizes)
    return o, final if output_final_state else None
