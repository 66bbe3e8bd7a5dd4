"""Launches of the chunk kernels: which run, in what order, with which buffers.

Forward: decays are summed per chunk, `chunk_states` → `scan_states` → `chunk_output`. Backward: the states again unless
they were kept, `chunk_states` (reversed) → `scan_states_reversed` → `chunk_dq`, `chunk_dk`, `chunk_dv`, and the decay's
gradient. Buffers beside the inputs' own size are the states and their gradients only: 4 · S · K · V / C bytes a token
each. Products run in the dtype of q and k, sums and states in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from supra_kernels.triton_backend import tuned
from supra_kernels.triton_backend.chunks import Chunks
from supra_kernels.triton_backend.feature_kernels import features_backward, hedgehog_normaliser
from supra_kernels.triton_backend.gradient_kernels import chunk_d_log_decay, chunk_dk, chunk_dq, chunk_dv
from supra_kernels.triton_backend.norm_kernels import group_norm_backward
from supra_kernels.triton_backend.output_kernels import chunk_output
from supra_kernels.triton_backend.state_kernels import chunk_states, scan_states, scan_states_reversed
from supra_kernels.triton_backend.tiles import FIXED
from supra_kernels.triton_backend.tiling import SCAN_BLOCK, Tiling

ROWS = 32  # tokens of a block of the elementwise kernels
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """What is fixed for one call: head counts and dims, chunks and tiles, which decay, map, rotation and norm act.

    K counts features; V is padded to a multiple of 16, of which the norm takes `norm_size`.
    """

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
    feature_map: int = 0
    angles: int = 0
    norm: bool = False
    norm_size: int = 0
    eps: float = 0.0

    @property
    def num_sequences(self) -> int:
        return self.chunks.sequence_chunks.shape[0] - 1

    @property
    def tokens(self) -> int:
        return self.B * self.T

    @property
    def front(self) -> dict[str, Any]:
        return {"MAP": self.feature_map, "ANGLES": self.angles}

    def constants(self, kernel: Any, like: Tensor, *names: str, **flags: Any) -> dict[str, Any]:
        """Constants, `flags` among them, and compiler options of a kernel over chunks, for q like `like`."""
        fixed = self.front | {"DECAY": self.decay} | flags
        fixed |= self.tiling.constants(*names, "C", "BK", "BV", "NV", "TAIL", "MIXED", "PRECISION")
        sizes = fixed | {"K": self.K, "V": self.V}
        return fixed | tuned.options(kernel.fn.__name__, like, sizes, self.tiling.num_warps)

    def states(self, like: Tensor) -> Tensor:
        return like.new_empty(len(self.chunks), self.S, self.K, self.V, dtype=torch.float32)


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, contiguous; `decay` in the form of `accumulated`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Pair
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    q_normaliser: Tensor | None = None
    k_normaliser: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None

    @property
    def q_side(self) -> tuple[Tensor | None, ...]:
        return self.q, self.q_bias, self.q_normaliser, self.cos, self.sin

    @property
    def k_side(self) -> tuple[Tensor | None, ...]:
        return self.k, self.k_bias, self.k_normaliser, self.cos, self.sin

    @property
    def sides(self) -> tuple[Tensor | None, ...]:
        return *self.q_side[:3], *self.k_side


def accumulated(log_decay: Tensor | None, fixed: bool, chunks: Chunks, like: Tensor) -> Pair:
    """The two decay arguments of every kernel (tensors that nothing reads where there is no decay).

    A decay per token becomes b [B·T, S], summed from each chunk's start in fp64, because what the kernels need are
    small differences of long sums; two fp32 numbers together hold it.
    """
    if log_decay is None:
        return like, like
    if fixed:
        values = log_decay.to(torch.float32).contiguous()
        return values, values
    rows = log_decay.flatten(0, 1)
    place = torch.arange(chunks.size, device=rows.device)
    inside = place < chunks.tokens[:, None]
    padded = rows[(chunks.start[:, None] + place * inside)].to(torch.float64)
    sums = (padded * inside[..., None]).cumsum(1)
    chunk = torch.repeat_interleave(chunks.tokens, output_size=rows.shape[0])
    b = sums[chunk, torch.arange(rows.shape[0], device=rows.device) - chunks.start[chunk]]
    high = b.to(torch.float32)
    return high, (b - high).to(torch.float32)


def normaliser(x: Tensor) -> Tensor:
    """Hedgehog's log Σ exp(x) + exp(−x), [B·T, heads] fp32, of x [B, T, heads, width]."""
    tokens, (heads, width) = x.shape[0] * x.shape[1], x.shape[2:]
    out = x.new_empty(tokens, heads, dtype=torch.float32)
    if tokens:
        hedgehog_normaliser[(triton.cdiv(tokens, ROWS), heads)](
            x, out, tokens, heads, width, ROWS=ROWS, WIDTH=triton.next_power_of_2(width)
        )
    return out


def forward_states(c: Call, x: Operands, initial: Tensor | None) -> Pair:
    """The state before every chunk [chunks, S, K, V] and after every sequence [N, S, K, V]."""
    states = c.states(x.k)
    final = x.k.new_empty(c.num_sequences, c.S, c.K, c.V, dtype=torch.float32)
    if len(c.chunks):
        chunk_states[(len(c.chunks), c.S, c.tiling.NK * c.tiling.NV)](
            *x.k_side, x.v, states, *x.decay, c.chunks.start, c.chunks.tokens, c.S, c.K, c.V, c.G, 1.0,
            HEADS=1, SHARE=c.S // c.G, **c.constants(chunk_states, x.q, REVERSED=False),
        )  # fmt: skip
    entries = c.K * c.V
    scan_states[(c.num_sequences, c.S, triton.cdiv(entries, SCAN_BLOCK))](
        states, final if initial is None else initial, final, *x.decay, c.chunks.start, c.chunks.tokens,
        c.chunks.sequence_chunks, c.S, entries, DECAY=c.decay, INITIAL=initial is not None, BLOCK=SCAN_BLOCK,
    )  # fmt: skip
    return states, final


def output(c: Call, x: Operands, states: Tensor, norm: tuple[Tensor | None, Tensor | None]) -> Pair:
    """o [B, T, H, V] and its GroupNorm y (o itself where there is none).

    What is normalised later stays fp32: unnormalised sums leave fp16's range, and their gradients its precision.
    """
    y = x.v.new_empty(c.B, c.T, c.H, c.V)
    o = torch.empty_like(y, dtype=torch.float32) if c.norm else y
    if len(c.chunks):
        chunk_output[(len(c.chunks), c.G)](
            *x.sides, x.v, states, o, y, *norm, *x.decay, c.chunks.start, c.chunks.tokens,
            c.S, c.H, c.G, c.K, c.V, c.scale, c.norm_size, c.eps, HEADS=c.H // c.G, STATES=c.S // c.G,
            AFFINE=norm[0] is not None, **c.constants(chunk_output, x.q, "NK", NORM=c.norm),
        )  # fmt: skip
    return o, y


def norm_gradients(
    c: Call, o: Tensor, d_y: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """d_o and the gradients of the norm's weight and bias [H · norm_size] fp32."""
    d_o, blocks = torch.empty_like(o), triton.cdiv(c.tokens, ROWS)
    parts = o.new_empty(2, blocks, c.H * c.norm_size, dtype=torch.float32) if weight is not None else None
    if blocks:
        group_norm_backward[(blocks, c.H)](
            o, d_y, weight, d_o, None if parts is None else parts[0], None if parts is None else parts[1],
            c.tokens, c.H, c.V, c.norm_size, c.eps,
            AFFINE=weight is not None, ROWS=ROWS, WIDTH=triton.next_power_of_2(c.V),
        )  # fmt: skip
    return d_o, *((None, None) if parts is None else parts.sum(1))


def backward_states(
    c: Call, x: Operands, do: Tensor, states: Tensor, d_final: Tensor, wants_decay: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the state after every chunk and of the initial states, and of each chunk's whole decay
    [chunks, S, blocks]."""
    d_states, entries = c.states(x.q), c.K * c.V
    blocks = triton.cdiv(entries, SCAN_BLOCK)
    d_initial = torch.empty_like(d_final)
    d_whole = x.q.new_empty(len(c.chunks), c.S, blocks, dtype=torch.float32)
    if len(c.chunks):
        chunk_states[(len(c.chunks), c.S, c.tiling.NK * c.tiling.NV)](
            *x.q_side, do, d_states, *x.decay, c.chunks.start, c.chunks.tokens, c.S, c.K, c.V, c.H, c.scale,
            HEADS=c.H // c.S, SHARE=1, **c.constants(chunk_states, x.q, REVERSED=True),
        )  # fmt: skip
    scan_states_reversed[(c.num_sequences, c.S, blocks)](
        d_states, d_final, d_initial, states, d_whole, *x.decay, c.chunks.start, c.chunks.tokens,
        c.chunks.sequence_chunks, c.S, entries, DECAY=c.decay, DECAY_GRADIENT=wants_decay, BLOCK=SCAN_BLOCK,
    )  # fmt: skip
    return d_states, d_initial, d_whole


def gradients(
    c: Call, x: Operands, do: Tensor, states: Tensor, d_states: Tensor, d_whole: Tensor, wants_decay: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of mapped q and k [B, T, heads, K], of v, and of log_decay, [S] or [B·T, S] fp32, if it is wanted."""
    t, q = c.tiling, x.q
    dq, dk, dv = q.new_empty(c.B, c.T, c.H, c.K), x.k.new_empty(c.B, c.T, c.G, c.K), torch.empty_like(x.v)
    if not len(c.chunks):
        none = q.new_zeros(c.S if c.decay == FIXED.value else 0, dtype=torch.float32)
        return dq, dk, dv, none if wants_decay else None
    rows = q.new_empty(2, c.tokens, c.H, dtype=torch.float32) if wants_decay else q
    d_row, d_column = (rows[0], rows[1]) if wants_decay else (q, q)
    d_to_end = q.new_empty(t.NK, c.tokens, c.S, dtype=torch.float32) if wants_decay else q
    where = (*x.decay, c.chunks.start, c.chunks.tokens)
    sizes = (c.S, c.H, c.G, c.K, c.V, c.scale)
    heads = {"HEADS": c.H // c.G, "STATES": c.S // c.G}
    grid = len(c.chunks), c.G
    chunk_dq[grid](
        *x.sides, x.v, do, states, dq, d_row, *where, *sizes,
        **heads, **c.constants(chunk_dq, q, "NK", DECAY_GRADIENT=wants_decay),
    )  # fmt: skip
    chunk_dk[(*grid, t.NK)](
        *x.sides, x.v, do, d_states, dk, d_column, d_to_end, *where, c.tokens, *sizes,
        **heads, **c.constants(chunk_dk, q, "NK", DECAY_GRADIENT=wants_decay),
    )  # fmt: skip
    chunk_dv[(*grid, t.NV)](
        *x.sides, x.v, do, d_states, dv, *where, *sizes, **heads, **c.constants(chunk_dv, q, "NK")
    )
    if not wants_decay:
        return dq, dk, dv, None
    if c.decay == FIXED.value:
        of_heads = rows.sum((0, 1), dtype=torch.float64).view(c.S, -1).sum(1)
        of_chunks = (c.chunks.tokens[:, None] * d_whole.sum(2)).sum(0, dtype=torch.float64)
        return dq, dk, dv, of_heads + d_to_end.sum((0, 1), dtype=torch.float64) + of_chunks
    d_log_decay = q.new_empty(c.tokens, c.S, dtype=torch.float32)
    chunk_d_log_decay[(len(c.chunks), c.S)](
        d_row, d_column, d_to_end, d_whole, d_log_decay, c.chunks.start, c.chunks.tokens, c.tokens, c.S,
        d_whole.shape[2], HEADS=c.H // c.S, NK=t.NK, C=t.C,
    )  # fmt: skip
    return dq, dk, dv, d_log_decay


def front_gradients(
    c: Call, side: tuple[Tensor | None, ...], d_features: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a side's pre-activation and of its bias [heads, K] fp32, from that of its features."""
    x, bias = side[:2]
    assert x is not None
    if not (c.feature_map or c.angles):
        return d_features, None
    heads, width = x.shape[2:]
    blocks = triton.cdiv(c.tokens, ROWS)
    d_x = torch.empty_like(x)
    d_bias = x.new_empty(blocks, heads, c.K, dtype=torch.float32) if bias is not None else None
    if blocks:
        features_backward[(blocks, heads)](
            *side, d_features, d_x, d_bias, c.tokens, heads, c.K, width,
            ROWS=ROWS, WIDTH=triton.next_power_of_2(width), **c.front,
        )  # fmt: skip
    return d_x, None if d_bias is None else d_bias.sum(0)
