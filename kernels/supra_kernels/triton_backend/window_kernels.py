"""Softmax over the last `window` tokens as flash attention (arXiv 2205.14135, algorithms 1 and 4) on a band.

A program owns a tile of queries (or keys, for their gradients) and meets only the tiles within the window of it, so
work and memory grow with T · window. Within a sequence tokens have local positions: 0 … length − 1 are its own, −P …
−1 the past kept before it, of which those from −past_valid on are real. Query t sees the keys s with t − window <
s ≤ t. Weights are recomputed from `lse` in the backward pass: with s_ij the scaled scores,

    P_ij = exp(s_ij − lse_i)        dS_ij = P_ij (dO_i · V_j − delta_i)        delta_i = dO_i · O_i − d lse_i
    dV = Pᵀ dO                      dQ = scale · dS K                          dK = scale · dSᵀ Q

Tensors are contiguous: q, k, v, o `[tokens, heads, ·]`, past `[N, P, G, ·]`, lse and delta `[tokens, H]`. Without
`cu_seqlens` sequences are `tokens` long each; with it, `tiles` `[number, 2]` holds (sequence, first local position)
of each tile. Scores are natural logarithms throughout, so that large ones lose no digits to a change of base.
"""

import triton
import triton.language as tl


@triton.jit
def extent(sequence, cu_seqlens, tokens):
    """`(row of local position 0, length)` of a sequence."""
    if cu_seqlens is None:
        start, length = sequence.to(tl.int64) * tokens, tokens
    else:
        start = tl.load(cu_seqlens + sequence)
        length = (tl.load(cu_seqlens + sequence + 1) - start).to(tl.int32)
    return start, length


@triton.jit
def place(tile, cu_seqlens, tiles, tokens, BLOCK: tl.constexpr):
    """`(sequence, first local position, row of local position 0, length)` of a tile of tokens."""
    if cu_seqlens is None:
        each = tl.cdiv(tokens, BLOCK)
        sequence, first = tile // each, tile % each * BLOCK
    else:
        sequence = tl.load(tiles + 2 * tile).to(tl.int32)
        first = tl.load(tiles + 2 * tile + 1).to(tl.int32)
    start, length = extent(sequence, cu_seqlens, tokens)
    return sequence, first, start, length


@triton.jit
def row_pointers(x, row, real, head, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to one head of x `[rows, HEADS, D]` from `row` (int64) on, and which exist: `[len(real), BLOCK]`.

    One int64 base and int32 offsets: a tile of int64 offsets would take more registers than the tile itself.
    """
    i, d = tl.arange(0, real.shape[0]), tl.arange(0, BLOCK)
    base = x + (row * HEADS + head) * D
    return base + (i[:, None] * (HEADS * D) + d[None, :]), real[:, None] & (d < D)[None, :]


@triton.jit
def load_rows(x, row, real, head, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers at `row_pointers`, zero where nothing is."""
    at, exists = row_pointers(x, row, real, head, HEADS, D, BLOCK)
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def store_rows(x, value, row, real, head, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write where `load_rows` would read."""
    at, exists = row_pointers(x, row, real, head, HEADS, D, BLOCK)
    tl.store(at, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def within(t, s, real, window):
    """Which queries see which keys, by broadcasting local positions; `real` marks the keys that exist."""
    age = t - s
    return (age >= 0) & (age < window) & real


@triton.jit
def attend(
    q_tile, k, v, row, t, s, real, group, window, scale, top, total, mean,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running maximum `top`, denominator `total` and numerator `mean`."""
    k_tile = load_rows(k, row, real, group, G, D, BLOCK_D)
    v_tile = load_rows(v, row, real, group, G, V, BLOCK_V)
    scores = tl.dot(q_tile, tl.trans(k_tile), None, input_precision=PRECISION) * scale
    scores = tl.where(within(t[:, None], s[None, :], real[None, :], window), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row may see nothing of this tile nor of those before it.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - finite_top[:, None])
    keep = tl.exp(top - finite_top)
    total = total * keep + tl.sum(weights, 1)
    mean = mean * keep[:, None]
    mean = tl.dot(weights.to(v_tile.dtype), v_tile, mean, input_precision=PRECISION)
    return new_top, total, mean


@triton.jit(do_not_specialize=["tokens", "P", "window"])
def window_forward(
    q, k, v, past_k, past_v, past_valid, cu_seqlens, tiles, o, lse, tokens, P, window, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`o` and `lse` of a tile of queries. Grid: tiles × H, heads fastest so that a group reads its keys together."""
    head, tile = tl.program_id(0) % H, tl.program_id(0) // H
    sequence, first, start, length = place(tile, cu_seqlens, tiles, tokens, BLOCK)
    if first >= length:
        return
    group = head // (H // G)
    t = first + tl.arange(0, BLOCK)
    exists, row = t < length, start + first
    at = row * H + head + tl.arange(0, BLOCK) * H
    q_tile = load_rows(q, row, exists, head, H, D, BLOCK_D)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    oldest = first - window + 1
    if past_k is not None:
        valid = tl.load(past_valid + sequence).to(tl.int32)
        for from_s in range(tl.maximum(oldest, -valid), 0, BLOCK):
            s = from_s + tl.arange(0, BLOCK)
            slot = (sequence.to(tl.int64) + 1) * P + from_s
            top, total, mean = attend(
                q_tile, past_k, past_v, slot, t, s, s < 0, group, window, scale, top, total, mean,
                G, D, V, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
    for from_s in range(tl.maximum(oldest, 0) // BLOCK * BLOCK, tl.minimum(first + BLOCK, length), BLOCK):
        s = from_s + tl.arange(0, BLOCK)
        top, total, mean = attend(
            q_tile, k, v, start + from_s, t, s, s < length, group, window, scale, top, total, mean,
            G, D, V, BLOCK_D, BLOCK_V, PRECISION,
        )  # fmt: skip
    # Only rows past the end, which are not stored, may have seen nothing.
    total = tl.where(exists, total, 1.0)
    store_rows(o, mean / total[:, None], row, exists, head, H, V, BLOCK_V)
    tl.store(lse + at, top + tl.log(total), mask=exists)


@triton.jit
def add_dq(
    q_tile, do_tile, k, v, row, t, s, real, group, window, scale, row_lse, row_delta, dq_tile,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dq / scale` with one more tile of keys."""
    k_tile = load_rows(k, row, real, group, G, D, BLOCK_D)
    v_tile = load_rows(v, row, real, group, G, V, BLOCK_V)
    scores = tl.dot(q_tile, tl.trans(k_tile), None, input_precision=PRECISION) * scale - row_lse[:, None]
    # What is not seen never reaches exp.
    weights = tl.exp(tl.where(within(t[:, None], s[None, :], real[None, :], window), scores, float("-inf")))
    d_weights = tl.dot(do_tile, tl.trans(v_tile), None, input_precision=PRECISION)
    d_scores = weights * (d_weights - row_delta[:, None])
    return tl.dot(d_scores.to(k_tile.dtype), k_tile, dq_tile, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens", "P", "window"])
def window_dq(
    q, k, v, past_k, past_v, past_valid, cu_seqlens, tiles, o, lse, do, d_lse, delta, dq, tokens, P, window, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dq` of a tile of queries, and `delta`, which `window_dkv` needs. Grid as `window_forward`."""
    head, tile = tl.program_id(0) % H, tl.program_id(0) // H
    sequence, first, start, length = place(tile, cu_seqlens, tiles, tokens, BLOCK)
    if first >= length:
        return
    group = head // (H // G)
    t = first + tl.arange(0, BLOCK)
    exists, row = t < length, start + first
    at = row * H + head + tl.arange(0, BLOCK) * H
    do_tile = load_rows(do, row, exists, head, H, V, BLOCK_V)
    o_tile = load_rows(o, row, exists, head, H, V, BLOCK_V)
    row_delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    row_delta -= tl.load(d_lse + at, mask=exists, other=0.0)
    tl.store(delta + at, row_delta, mask=exists)
    # exp of a row past the end is never stored; an infinite lse makes it exp(−∞).
    row_lse = tl.load(lse + at, mask=exists, other=float("inf"))
    q_tile = load_rows(q, row, exists, head, H, D, BLOCK_D)
    dq_tile = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    oldest = first - window + 1
    if past_k is not None:
        valid = tl.load(past_valid + sequence).to(tl.int32)
        for from_s in range(tl.maximum(oldest, -valid), 0, BLOCK):
            s = from_s + tl.arange(0, BLOCK)
            slot = (sequence.to(tl.int64) + 1) * P + from_s
            dq_tile = add_dq(
                q_tile, do_tile, past_k, past_v, slot, t, s, s < 0, group, window, scale, row_lse, row_delta,
                dq_tile, G, D, V, BLOCK_D, BLOCK_V, PRECISION,
            )  # fmt: skip
    for from_s in range(tl.maximum(oldest, 0) // BLOCK * BLOCK, tl.minimum(first + BLOCK, length), BLOCK):
        s = from_s + tl.arange(0, BLOCK)
        dq_tile = add_dq(
            q_tile, do_tile, k, v, start + from_s, t, s, s < length, group, window, scale, row_lse, row_delta,
            dq_tile, G, D, V, BLOCK_D, BLOCK_V, PRECISION,
        )  # fmt: skip
    store_rows(dq, dq_tile * scale, row, exists, head, H, D, BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "P", "window"])
def window_dkv(
    q, k, v, past_valid, cu_seqlens, tiles, lse, do, delta, dk, dv, tokens, P, window, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of a tile of keys, summed over the group's query heads. Grid: tiles × G, heads fastest.

    With PAST, k, v, dk and dv are the past's `[N, P, G, ·]`; slots without a token get zeros.
    """
    group, tile = tl.program_id(0) % G, tl.program_id(0) // G
    if PAST:
        each = tl.cdiv(P, BLOCK)
        sequence, first = tile // each, tile % each * BLOCK - P
        start, length = extent(sequence, cu_seqlens, tokens)
        s = first + tl.arange(0, BLOCK)
        real = (s < 0) & (s >= -tl.load(past_valid + sequence).to(tl.int32))
        row, exists, end = (sequence.to(tl.int64) + 1) * P + first, s < 0, 0
    else:
        sequence, first, start, length = place(tile, cu_seqlens, tiles, tokens, BLOCK)
        if first >= length:
            return
        s = first + tl.arange(0, BLOCK)
        real = s < length
        row, exists, end = start + first, real, length
    k_tile = load_rows(k, row, real, group, G, D, BLOCK_D)
    v_tile = load_rows(v, row, real, group, G, V, BLOCK_V)
    dk_tile = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    # The last query that sees the last key of this tile.
    last = tl.minimum(tl.minimum(first + BLOCK, end) - 1 + window, length)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        for from_t in range(tl.maximum(first, 0), last, BLOCK):
            t = from_t + tl.arange(0, BLOCK)
            asks, t_row = t < length, start + from_t
            at = t_row * H + head + tl.arange(0, BLOCK) * H
            q_tile = load_rows(q, t_row, asks, head, H, D, BLOCK_D)
            do_tile = load_rows(do, t_row, asks, head, H, V, BLOCK_V)
            row_lse = tl.load(lse + at, mask=asks, other=0.0)
            row_delta = tl.load(delta + at, mask=asks, other=0.0)
            seen = within(t[None, :], s[:, None], real[:, None] & asks[None, :], window)
            scores = (
                tl.dot(k_tile, tl.trans(q_tile), None, input_precision=PRECISION) * scale - row_lse[None, :]
            )
            weights = tl.exp(tl.where(seen, scores, float("-inf")))
            dv_tile = tl.dot(weights.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
            d_weights = tl.dot(v_tile, tl.trans(do_tile), None, input_precision=PRECISION)
            d_scores = weights * (d_weights - row_delta[None, :])
            dk_tile = tl.dot(d_scores.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)
    store_rows(dk, dk_tile * scale, row, exists, group, G, D, BLOCK_D)
    store_rows(dv, dv_tile, row, exists, group, G, V, BLOCK_V)
