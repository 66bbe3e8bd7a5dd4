"""Gradients of queries, keys, values and decay of every chunk at once (the equations are in kernels/README.md).

`d_states` holds dS', the gradient of the state after each chunk. With a decay gradient the kernels leave what each
token adds to the gradient of its exponents; where a fixed decay is the only one that asks, that is already weighted
by the tokens the exponent spans.
"""

import triton
import triton.language as tl

from supra_kernels.triton_backend.feature_kernels import load_features
from supra_kernels.triton_backend.output_kernels import query_key_products
from supra_kernels.triton_backend.tiles import (
    FIXED,
    PER_TOKEN,
    chunk_rows,
    from_start,
    load_decay,
    load_rows,
    mask_scores,
    state_pointers,
    store_rows,
    to_end,
)


@triton.jit
def _score_gradients(
    do, v, start, i, valid, head, g, H, G, V,
    C: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, MIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dO Vᵀ [C, C] of one query head and its value head in one chunk."""
    gradient = tl.zeros([C, C], tl.float32)
    for piece in tl.range(NV, num_stages=1, loop_unroll_factor=1):
        do_rows = load_rows(do, start, i, valid, head, H, V, piece * BV, BV)
        v_rows = load_rows(v, start, i, valid, g, G, V, piece * BV, BV)
        gradient = tl.dot(do_rows.to(MIXED), tl.trans(v_rows.to(MIXED)), gradient, input_precision=PRECISION)
    if TAIL:
        do_rows = load_rows(do, start, i, valid, head, H, V, NV * BV, TAIL)
        v_rows = load_rows(v, start, i, valid, g, G, V, NV * BV, TAIL)
        gradient = tl.dot(do_rows.to(MIXED), tl.trans(v_rows.to(MIXED)), gradient, input_precision=PRECISION)
    return gradient


@triton.jit
def _times_state_transposed(
    x, states, start, i, valid, head, heads, c, s, S, K, V, first_k,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr, MIXED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """X Sᵀ [C, BK] for x [tokens, heads, V] and columns first_k … of the states' K."""
    product = tl.zeros([C, BK], tl.float32)
    for piece in tl.range(NV, num_stages=1, loop_unroll_factor=1):
        rows = load_rows(x, start, i, valid, head, heads, V, piece * BV, BV).to(MIXED)
        at, exists = state_pointers(states, c, s, S, K, V, first_k, piece * BV, BK, BV)
        state = tl.load(at, mask=exists, other=0.0).to(MIXED)
        product = tl.dot(rows, tl.trans(state), product, input_precision=PRECISION)
    if TAIL:
        rows = load_rows(x, start, i, valid, head, heads, V, NV * BV, TAIL).to(MIXED)
        at, exists = state_pointers(states, c, s, S, K, V, first_k, NV * BV, BK, TAIL)
        state = tl.load(at, mask=exists, other=0.0).to(MIXED)
        product = tl.dot(rows, tl.trans(state), product, input_precision=PRECISION)
    return product


@triton.jit
def chunk_dq(
    q, q_bias, q_normaliser, k, k_bias, k_normaliser, cos, sin, v, do, states, dq, d_row,
    decay, decay_low, chunk_start, chunk_tokens, S, H, G, K, V, scale,
    HEADS, STATES, DECAY: tl.constexpr, DECAY_GRADIENT: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ = dA K + scale · exp(b) ∘ dO Sᵀ with dA = scale · dO Vᵀ ∘ D.

    d_row [tokens, H] fp32 := the gradient of b_i as token i reads: of its row of D (j < i) and of exp(b_i).
    Grid: chunks, key/value heads.
    """
    c, g = tl.program_id(0), tl.program_id(1)
    start, i, valid, _ = chunk_rows(chunk_start, chunk_tokens, c, C)
    q_side, k_side = (q, q_bias, q_normaliser, cos, sin), (k, k_bias, k_normaliser, cos, sin)
    for h in range(HEADS):
        head = g * HEADS + h
        s = g * STATES + h * STATES // HEADS
        hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
        d_scores = _score_gradients(
            do, v, start, i, valid, head, g, H, G, V, C, BV, NV, TAIL, MIXED, PRECISION
        )
        d_scores = mask_scores(d_scores, hi, lo, unit, i, valid, DECAY) * scale
        reads = from_start(hi, lo, unit, valid, DECAY) * scale
        row = tl.zeros([C], tl.float32)
        # How many times exp(b_i) holds a decay fixed in time; one per token is told apart later.
        spans = (i + 1).to(tl.float32) if DECAY == FIXED else 1.0
        if DECAY_GRADIENT and DECAY == PER_TOKEN:
            products = query_key_products(
                q_side, k_side, start, i, valid, head, g, H, G, K, MAP, ANGLES, C, BK, NK, PRECISION
            )
            row = tl.sum(tl.where(i[:, None] > i[None, :], products * d_scores, 0.0), 1)
        for piece in tl.range(NK, num_stages=1, loop_unroll_factor=1):
            k_rows = load_features(k_side, start, i, valid, g, G, K, piece * BK, BK, MAP, ANGLES)
            through_state = (
                _times_state_transposed(
                    do, states, start, i, valid, head, H, c, s, S, K, V, piece * BK,
                    C, BK, BV, NV, TAIL, MIXED, PRECISION,
                )
                * reads[:, None]
            )  # fmt: skip
            if DECAY_GRADIENT:
                q_rows = load_features(q_side, start, i, valid, head, H, K, piece * BK, BK, MAP, ANGLES).to(
                    tl.float32
                )
                row += tl.sum(q_rows * through_state, 1) * spans
            value = tl.dot(d_scores.to(MIXED), k_rows.to(MIXED), through_state, input_precision=PRECISION)
            store_rows(dq, value, start, i, valid, head, H, K, piece * BK, BK)
        if DECAY_GRADIENT:
            tl.store(d_row + start * H + head + i * H, row, mask=valid)


@triton.jit
def chunk_dk(
    q, q_bias, q_normaliser, k, k_bias, k_normaliser, cos, sin, v, do, d_states, dk, d_column, d_to_end,
    decay, decay_low, chunk_start, chunk_tokens,
    tokens, S, H, G, K, V, scale,
    HEADS, STATES, DECAY: tl.constexpr, DECAY_GRADIENT: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK = Σ_h dA_hᵀ Q_h + exp(b_last − b) ∘ V dS'ᵀ, summed over the group's query heads in registers.

    d_column [tokens, H] fp32 := the gradient that b_j gets (with a minus sign) from its column of D, i > j; d_to_end
    [NK, tokens, S] := that from exp(b_last − b_j), this piece of K's part. Grid: chunks, key/value heads, pieces of K.
    """
    c, g, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, i, valid, length = chunk_rows(chunk_start, chunk_tokens, c, C)
    q_side, k_side = (q, q_bias, q_normaliser, cos, sin), (k, k_bias, k_normaliser, cos, sin)
    first = piece * BK
    total = tl.zeros([C, BK], tl.float32)
    k_rows = load_features(k_side, start, i, valid, g, G, K, first, BK, MAP, ANGLES).to(tl.float32)
    ages = tl.where(valid, length - 1 - i, 0).to(tl.float32)
    for h in range(HEADS):
        head = g * HEADS + h
        s = g * STATES + h * STATES // HEADS
        hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
        d_scores = _score_gradients(
            do, v, start, i, valid, head, g, H, G, V, C, BV, NV, TAIL, MIXED, PRECISION
        )
        d_scores = mask_scores(d_scores, hi, lo, unit, i, valid, DECAY) * scale
        q_rows = load_features(q_side, start, i, valid, head, H, K, first, BK, MAP, ANGLES)
        total = tl.dot(tl.trans(d_scores.to(MIXED)), q_rows.to(MIXED), total, input_precision=PRECISION)
        if DECAY_GRADIENT and piece == 0:
            products = query_key_products(
                q_side, k_side, start, i, valid, head, g, H, G, K, MAP, ANGLES, C, BK, NK, PRECISION
            )
            between = tl.where(i[:, None] > i[None, :], products * d_scores, 0.0)
            if DECAY == FIXED:
                between *= (i[:, None] - i[None, :]).to(tl.float32)
            tl.store(d_column + start * H + head + i * H, tl.sum(between, 0), mask=valid)
    for m in range(STATES):
        s = g * STATES + m
        hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
        kept = _times_state_transposed(
            v, d_states, start, i, valid, g, G, c, s, S, K, V, first, C, BK, BV, NV, TAIL, MIXED, PRECISION
        )
        kept *= to_end(hi, lo, unit, i, valid, length, DECAY)[:, None]
        total += kept
        if DECAY_GRADIENT:
            left = tl.sum(k_rows * kept, 1)
            if DECAY == FIXED:
                left *= ages
            tl.store(d_to_end + (piece * tokens + start) * S + s + i * S, left, mask=valid)
    store_rows(dk, total, start, i, valid, g, G, K, first, BK)


@triton.jit
def _dv_piece(
    q_side, k_side, v, do, d_states, dv, decay, decay_low, start, i, valid, length, c, g, S, H, G, K, V, scale, first,
    HEADS, STATES, DECAY: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([C, BV], tl.float32)
    for h in range(HEADS):
        head = g * HEADS + h
        s = g * STATES + h * STATES // HEADS
        hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
        scores = query_key_products(
            q_side, k_side, start, i, valid, head, g, H, G, K, MAP, ANGLES, C, BK, NK, PRECISION
        )
        scores = mask_scores(scores, hi, lo, unit, i, valid, DECAY) * scale
        do_rows = load_rows(do, start, i, valid, head, H, V, first, BV)
        total = tl.dot(tl.trans(scores.to(MIXED)), do_rows.to(MIXED), total, input_precision=PRECISION)
    for m in range(STATES):
        s = g * STATES + m
        hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
        kept = tl.zeros([C, BV], tl.float32)
        for piece in tl.range(NK, num_stages=1, loop_unroll_factor=1):
            k_rows = load_features(k_side, start, i, valid, g, G, K, piece * BK, BK, MAP, ANGLES).to(MIXED)
            at, exists = state_pointers(d_states, c, s, S, K, V, piece * BK, first, BK, BV)
            state = tl.load(at, mask=exists, other=0.0).to(MIXED)
            kept = tl.dot(k_rows, state, kept, input_precision=PRECISION)
        total += kept * to_end(hi, lo, unit, i, valid, length, DECAY)[:, None]
    store_rows(dv, total, start, i, valid, g, G, V, first, BV)


@triton.jit
def chunk_dv(
    q, q_bias, q_normaliser, k, k_bias, k_normaliser, cos, sin, v, do, d_states, dv,
    decay, decay_low, chunk_start, chunk_tokens, S, H, G, K, V, scale,
    HEADS, STATES, DECAY: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV = Σ_h A_hᵀ dO_h + exp(b_last − b) ∘ K dS'. Grid: chunks, key/value heads, pieces of V."""
    c, g, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, i, valid, length = chunk_rows(chunk_start, chunk_tokens, c, C)
    q_side, k_side = (q, q_bias, q_normaliser, cos, sin), (k, k_bias, k_normaliser, cos, sin)
    _dv_piece(
        q_side, k_side, v, do, d_states, dv, decay, decay_low, start, i, valid, length, c, g, S, H, G, K, V, scale,
        piece * BV, HEADS, STATES, DECAY, MAP, ANGLES, C, BK, NK, BV, MIXED, PRECISION,
    )  # fmt: skip
    if TAIL and piece == NV - 1:
        _dv_piece(
            q_side, k_side, v, do, d_states, dv, decay, decay_low, start, i, valid, length, c, g, S, H, G, K, V,
            scale, NV * BV, HEADS, STATES, DECAY, MAP, ANGLES, C, BK, NK, TAIL, MIXED, PRECISION,
        )  # fmt: skip


@triton.jit
def chunk_d_log_decay(
    d_row, d_column, d_to_end, d_whole, d_log_decay, chunk_start, chunk_tokens, tokens, S, BLOCKS,
    HEADS, NK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradient of a decay per token: log_decay_t is part of every b_i with i ≥ t of its chunk.

    d_log_decay [tokens, S] fp32; HEADS query heads share each of the S decays. Grid: chunks, state heads.
    """
    c, s = tl.program_id(0), tl.program_id(1)
    start, i, valid, _ = chunk_rows(chunk_start, chunk_tokens, c, C)
    d_b, left = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for h in range(HEADS):
        at = (start * S + s) * HEADS + h + i * (S * HEADS)
        d_b += tl.load(d_row + at, mask=valid, other=0.0) - tl.load(d_column + at, mask=valid, other=0.0)
    for piece in range(NK):
        left += tl.load(d_to_end + (piece * tokens + start) * S + s + i * S, mask=valid, other=0.0)
    whole = 0.0
    for block in range(BLOCKS):
        whole += tl.load(d_whole + (tl.cast(c, tl.int64) * S + s) * BLOCKS + block)
    later, earlier = i[:, None] >= i[None, :], i[:, None] < i[None, :]
    # exp(b_last − b_j) holds the decays after j only: those of t > j.
    total = tl.sum(tl.where(later, d_b[:, None], 0.0), 0) + tl.sum(tl.where(earlier, left[:, None], 0.0), 0)
    tl.store(d_log_decay + start * S + s + i * S, total + whole, mask=valid)
