"""What every chunk kernel does with memory and decay: loading tiles, the factors of a chunk, the causal mask.

Notation as in kernels/README.md. A chunk has at most C tokens, from row `start` of the flattened inputs
`[tokens, heads, D]` on; token i [C] of it exists where `valid` [C]. V is a multiple of 16 in memory. The decay
accumulated since the chunk's start is `b_i = (hi_i + lo_i) · unit`: a decay per token is summed in fp64 beforehand and
comes as two fp32 parts, so that differences of long sums keep their digits; a fixed one needs only the number of tokens
and `unit` = its log decay.

Loops over the pieces of a head stay loops (`tl.range(…, num_stages=1, loop_unroll_factor=1)`): unrolled, the sixteen
fp32 tiles of a head of 256 took the compiler 95 s and 11 KB of spilled registers a thread; as a loop 2.4 s and none.
"""

import triton
import triton.language as tl

NO_DECAY = tl.constexpr(0)
FIXED = tl.constexpr(1)
PER_TOKEN = tl.constexpr(2)


@triton.jit
def chunk_rows(chunk_start, chunk_tokens, c, C: tl.constexpr):
    """Chunk c: its first row int64, positions in the chunk `i` [C], `valid` [C], and its number of tokens."""
    i = tl.arange(0, C)
    length = tl.load(chunk_tokens + c)
    return tl.load(chunk_start + c), i, i < length, length


@triton.jit
def row_pointers(x, start, i, valid, head, heads, D, first, WIDTH: tl.constexpr):
    """Pointers to columns first … first + WIDTH of one head of x [tokens, heads, D], and which exist, [C, WIDTH].

    One int64 base and int32 offsets: a tile of int64 offsets would take more registers than the tile itself.
    """
    column = first + tl.arange(0, WIDTH)
    base = x + (start * heads + head) * D
    return base + (i[:, None] * (heads * D) + column[None, :]), valid[:, None] & (column < D)[None, :]


@triton.jit
def load_rows(x, start, i, valid, head, heads, D, first, WIDTH: tl.constexpr):
    """Columns first … first + WIDTH of one head of x [tokens, heads, D] → [C, WIDTH], zero where nothing is."""
    at, exists = row_pointers(x, start, i, valid, head, heads, D, first, WIDTH)
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def store_rows(x, value, start, i, valid, head, heads, D, first, WIDTH: tl.constexpr):
    """Write [C, WIDTH] where `load_rows` would read."""
    at, exists = row_pointers(x, start, i, valid, head, heads, D, first, WIDTH)
    tl.store(at, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def state_pointers(states, c, s, S, K, V, first_k, first_v, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers to a [BK, BV] tile of states [chunks, S, K, V], and which of its entries exist."""
    row, column = first_k + tl.arange(0, BK), first_v + tl.arange(0, BV)
    base = states + (tl.cast(c, tl.int64) * S + s) * K * V
    return base + (row[:, None] * V + column[None, :]), (row < K)[:, None] & (column < V)[None, :]


@triton.jit
def load_decay(decay, decay_low, start, i, valid, s, S, DECAY: tl.constexpr):
    """`(hi [C], lo [C], unit)` of state head s; see the module."""
    hi, lo, unit = (i + 1).to(tl.float32), tl.zeros_like(i).to(tl.float32), 0.0
    if DECAY == FIXED:
        unit = tl.load(decay + s)
    if DECAY == PER_TOKEN:
        hi = tl.load(decay + start * S + s + i * S, mask=valid, other=0.0)
        lo = tl.load(decay_low + start * S + s + i * S, mask=valid, other=0.0)
        unit = 1.0
    return hi, lo, unit


@triton.jit
def from_start(hi, lo, unit, valid, DECAY: tl.constexpr):
    """exp(b_i) [C]: how much of the state before the chunk is left when token i reads it."""
    if DECAY == NO_DECAY:
        return valid.to(tl.float32)
    return tl.where(valid, tl.exp((hi + lo) * unit), 0.0)


@triton.jit
def to_end(hi, lo, unit, i, valid, length, DECAY: tl.constexpr):
    """exp(b_last − b_j) [C]: how much of token j is left when the chunk ends."""
    if DECAY == NO_DECAY:
        return valid.to(tl.float32)
    last = i == length - 1
    last_hi, last_lo = tl.sum(tl.where(last, hi, 0.0)), tl.sum(tl.where(last, lo, 0.0))
    return tl.where(valid, tl.exp(((last_hi - hi) + (last_lo - lo)) * unit), 0.0)


@triton.jit
def whole_chunk(decay, decay_low, start, length, s, S, DECAY: tl.constexpr):
    """exp(b_last), a number: how much of the state before the chunk is left after it."""
    # One return: what follows an early one is compiled as well, and without decay the pointers are another dtype's.
    if DECAY == NO_DECAY:
        whole = 1.0
    elif DECAY == FIXED:
        whole = tl.exp(tl.cast(length, tl.float32) * tl.load(decay + s))
    else:
        at = (tl.cast(start, tl.int64) + length - 1) * S + s
        whole = tl.exp(tl.load(decay + at) + tl.load(decay_low + at))
    return whole


@triton.jit
def mask_scores(scores, hi, lo, unit, i, valid, DECAY: tl.constexpr):
    """Scores [C, C] times exp(b_i − b_j), zero for j > i; what must not count never reaches exp."""
    seen = (i[:, None] >= i[None, :]) & valid[:, None]
    if DECAY == NO_DECAY:
        return tl.where(seen, scores, 0.0)
    difference = ((hi[:, None] - hi[None, :]) + (lo[:, None] - lo[None, :])) * unit
    return scores * tl.exp(tl.where(seen, difference, float("-inf")))
