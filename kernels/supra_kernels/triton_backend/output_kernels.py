"""The output of every chunk at once, from its own tokens and from the state before it."""

import triton
import triton.language as tl

from supra_kernels.triton_backend.feature_kernels import load_features
from supra_kernels.triton_backend.norm_kernels import normalise_rows
from supra_kernels.triton_backend.tiles import (
    chunk_rows,
    from_start,
    load_decay,
    load_rows,
    mask_scores,
    state_pointers,
    store_rows,
)


@triton.jit
def query_key_products(
    q, k, start, i, valid, head, g, H, G, K, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q Kᵀ [C, C] of one query head and its key head in one chunk."""
    scores = tl.zeros([C, C], tl.float32)
    for piece in tl.range(NK, num_stages=1, loop_unroll_factor=1):
        q_rows = load_features(q, start, i, valid, head, H, K, piece * BK, BK, MAP, ANGLES)
        k_rows = load_features(k, start, i, valid, g, G, K, piece * BK, BK, MAP, ANGLES)
        scores = tl.dot(q_rows, tl.trans(k_rows), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _output_piece(
    q, v, states, o, y, norm_weight, norm_bias, scores, reads,
    start, i, valid, c, s, head, g, S, H, G, K, V, scale, first,
    norm_size, eps, NORM: tl.constexpr, AFFINE: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    old = tl.zeros([C, BV], tl.float32)
    for piece in tl.range(NK, num_stages=1, loop_unroll_factor=1):
        q_rows = load_features(q, start, i, valid, head, H, K, piece * BK, BK, MAP, ANGLES)
        at, exists = state_pointers(states, c, s, S, K, V, piece * BK, first, BK, BV)
        state = tl.load(at, mask=exists, other=0.0)
        old = tl.dot(q_rows.to(MIXED), state.to(MIXED), old, input_precision=PRECISION)
    v_rows = load_rows(v, start, i, valid, g, G, V, first, BV)
    value = tl.dot(scores, v_rows.to(MIXED), old * (reads * scale)[:, None], input_precision=PRECISION)
    store_rows(o, value, start, i, valid, head, H, V, first, BV)
    if NORM:
        normed = normalise_rows(value, norm_weight, norm_bias, head, tl.arange(0, BV), norm_size, eps, AFFINE)
        store_rows(y, normed, start, i, valid, head, H, V, first, BV)


@triton.jit
def chunk_output(
    q, q_bias, q_normaliser, k, k_bias, k_normaliser, cos, sin, v, states, o, y, norm_weight, norm_bias,
    decay, decay_low, chunk_start, chunk_tokens, S, H, G, K, V, scale, norm_size, eps,
    HEADS, STATES, DECAY: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr,
    NORM: tl.constexpr, AFFINE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, NK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, TAIL: tl.constexpr,
    MIXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o = scale · ((Q Kᵀ ∘ D) V + exp(b) ∘ Q S), S the state before the chunk; with NORM also y, its GroupNorm.

    Grid: chunks, key/value heads. A program takes the group's HEADS query heads, which have STATES states, one after
    the other, so that keys, values and a state they share come from memory once and from cache afterwards.
    """
    c, g = tl.program_id(0), tl.program_id(1)
    start, i, valid, _ = chunk_rows(chunk_start, chunk_tokens, c, C)
    q_side, k_side = (q, q_bias, q_normaliser, cos, sin), (k, k_bias, k_normaliser, cos, sin)
    for h in range(HEADS):
        head = g * HEADS + h
        s = g * STATES + h * STATES // HEADS
        hi, lo, unit = load_decay(decay, decay_low, start, i, valid, s, S, DECAY)
        scores = query_key_products(
            q_side, k_side, start, i, valid, head, g, H, G, K, MAP, ANGLES, C, BK, NK, PRECISION
        )
        scores = (mask_scores(scores, hi, lo, unit, i, valid, DECAY) * scale).to(MIXED)
        reads = from_start(hi, lo, unit, valid, DECAY)
        for piece in tl.range(NV, num_stages=1, loop_unroll_factor=1):
            _output_piece(
                q_side, v, states, o, y, norm_weight, norm_bias, scores, reads,
                start, i, valid, c, s, head, g, S, H, G, K, V, scale, piece * BV,
                norm_size, eps, NORM, AFFINE, MAP, ANGLES, C, BK, NK, BV, MIXED, PRECISION,
            )  # fmt: skip
        if TAIL:
            _output_piece(
                q_side, v, states, o, y, norm_weight, norm_bias, scores, reads,
                start, i, valid, c, s, head, g, S, H, G, K, V, scale, NV * BV,
                norm_size, eps, NORM, AFFINE, MAP, ANGLES, C, BK, NK, TAIL, MIXED, PRECISION,
            )  # fmt: skip
