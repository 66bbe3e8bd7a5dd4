"""States between chunks: what each chunk adds by itself, for all chunks at once, then a scan over each sequence.

Splitting it this way keeps every matrix product parallel over chunks, whatever the sequences' lengths; only an
elementwise pass walks along a sequence (the split is Mamba-2's, arXiv 2405.21060, section 6).
"""

import triton
import triton.language as tl

from supra_kernels.triton_backend.feature_kernels import load_features
from supra_kernels.triton_backend.tiles import (
    chunk_rows,
    from_start,
    load_decay,
    load_rows,
    state_pointers,
    to_end,
    whole_chunk,
)


@triton.jit
def _add_tile(
    x, y, states, decay, decay_low, start, i, valid, length, c, s, S, K, V, x_heads, scale, first_k, first_v,
    HEADS, SHARE, REVERSED: tl.constexpr, DECAY: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
    if REVERSED:
        weight = from_start(hi, lo, unit, valid, DECAY) * scale
    else:
        weight = to_end(hi, lo, unit, i, valid, length, DECAY)
    total = tl.zeros([BK, BV], tl.float32)
    for h in range(HEADS):
        head = (s * HEADS + h) // SHARE
        x_rows = load_features(x, start, i, valid, head, x_heads, K, first_k, BK, MAP, ANGLES)
        x_rows = x_rows.to(tl.float32) * weight[:, None]
        y_rows = load_rows(y, start, i, valid, head, x_heads, V, first_v, BV)
        total = tl.dot(tl.trans(x_rows.to(MIXED)), y_rows.to(MIXED), total, input_precision=PRECISION)
    at, exists = state_pointers(states, c, s, S, K, V, first_k, first_v, BK, BV)
    tl.store(at, total, mask=exists)


@triton.jit
def chunk_states(
    x, bias, normaliser, cos, sin, y, states, decay, decay_low, chunk_start, chunk_tokens, S, K, V, x_heads, scale,
    HEADS, SHARE, REVERSED: tl.constexpr, DECAY: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """states[c, s] [K, V] = (exp(b_last − b) ∘ K)ᵀ V of chunk c, or REVERSED: Σ_h scale · (exp(b) ∘ Q_h)ᵀ dO_h.

    Grid: chunks, state heads, tiles of [K, V]. A state head sums HEADS heads of x and y, SHARE state heads read the
    same one.
    """
    c, s, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, i, valid, length = chunk_rows(chunk_start, chunk_tokens, c, C)
    first_k, piece = tile // NV * BK, tile % NV
    side = (x, bias, normaliser, cos, sin)
    _add_tile(
        side, y, states, decay, decay_low, start, i, valid, length, c, s, S, K, V, x_heads, scale, first_k,
        piece * BV, HEADS, SHARE, REVERSED, DECAY, MAP, ANGLES, C, BK, BV, MIXED, PRECISION,
    )  # fmt: skip
    if TAIL and piece == NV - 1:
        _add_tile(
            side, y, states, decay, decay_low, start, i, valid, length, c, s, S, K, V, x_heads, scale,
            first_k, NV * BV, HEADS, SHARE, REVERSED, DECAY, MAP, ANGLES, C, BK, TAIL, MIXED, PRECISION,
        )  # fmt: skip


@triton.jit
def scan_states(
    states, initial, final, decay, decay_low, chunk_start, chunk_tokens, sequence_chunks, S, ENTRIES,
    DECAY: tl.constexpr, INITIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """states[c] := the state before chunk c, in place; `final` := the state after the last one.

    Grid: sequences, state heads, blocks of the ENTRIES = K · V numbers of a state.
    """
    n, s = tl.program_id(0), tl.program_id(1)
    entry = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < ENTRIES
    own = (tl.cast(n, tl.int64) * S + s) * ENTRIES + entry
    state = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        state = tl.load(initial + own, mask=exists, other=0.0)
    for c in range(tl.load(sequence_chunks + n), tl.load(sequence_chunks + n + 1)):
        at = states + (tl.cast(c, tl.int64) * S + s) * ENTRIES + entry
        added = tl.load(at, mask=exists, other=0.0)
        tl.store(at, state, mask=exists)
        length, start = tl.load(chunk_tokens + c), tl.load(chunk_start + c)
        state = state * whole_chunk(decay, decay_low, start, length, s, S, DECAY) + added
    tl.store(final + own, state, mask=exists)


@triton.jit
def scan_states_reversed(
    d_states, d_final, d_initial, states, d_whole, decay, decay_low, chunk_start, chunk_tokens, sequence_chunks,
    S, ENTRIES,
    DECAY: tl.constexpr, DECAY_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_states[c] := the gradient of the state after chunk c, in place; `d_initial` := that of the first state.

    With DECAY_GRADIENT, d_whole [chunks, S, blocks] := this block's part of the gradient of b_last as it decays
    the state before the chunk. Grid as `scan_states`.
    """
    n, s, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    exists = entry < ENTRIES
    own = (tl.cast(n, tl.int64) * S + s) * ENTRIES + entry
    state = tl.load(d_final + own, mask=exists, other=0.0)
    first, last = tl.load(sequence_chunks + n), tl.load(sequence_chunks + n + 1)
    for back in range(0, last - first):
        c = last - 1 - back
        row = tl.cast(c, tl.int64) * S + s
        at = d_states + row * ENTRIES + entry
        added = tl.load(at, mask=exists, other=0.0)
        tl.store(at, state, mask=exists)
        length, start = tl.load(chunk_tokens + c), tl.load(chunk_start + c)
        whole = whole_chunk(decay, decay_low, start, length, s, S, DECAY)
        if DECAY_GRADIENT:
            before = tl.load(states + row * ENTRIES + entry, mask=exists, other=0.0)
            tl.store(d_whole + row * tl.num_programs(2) + block, tl.sum(before * state) * whole)
        state = state * whole + added
    tl.store(d_initial + own, state, mask=exists)
