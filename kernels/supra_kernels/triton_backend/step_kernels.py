"""The Triton kernels of a decode step: one token of linear attention, alone or with all that surrounds it.

Both read and write the state exactly once. A decode step moves few numbers and does little with each, so a tile of the
state stays in registers while every query head of its group reads it. All arithmetic is fp32.

Symbols: B batch, H query heads, G key/value heads, S state heads, K feature dim, V value dim, D head dim; HEADS = H/S
query heads read one state, and H/G one key/value head.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    q,  # [B, H, K]
    k,  # [B, G, K]
    v,  # [B, G, V]
    state,  # [B, S, K, V] fp32, changed in place
    log_decay,  # [S], [B, S] or None
    o,  # [B, H, V]
    decay_stride,  # from one row of log_decay to the next; 0 where all rows share it
    scale,
    S,
    HEADS,  # no constant: the compiler would unroll the loop over them and run out of registers
    SHARE: tl.constexpr,  # states that read one key/value head, S/G
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAIL: tl.constexpr,  # whether the last block has one column more: a normaliser is not worth a block of its own
):
    """Program (b·S + s, j): block j of the columns of one state, and its part of `o` for all heads that read it."""
    head_of_batch = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, key_head, first_query = head_of_batch // S, head_of_batch // SHARE, head_of_batch * HEADS
    rows, columns = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = rows < K, columns < V
    decay = 1.0
    if log_decay is not None:
        decay = tl.exp(tl.load(log_decay + row * decay_stride + head_of_batch % S).to(tl.float32))

    key = tl.load(k + key_head * K + rows, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + key_head * V + columns, mask=in_v, other=0.0).to(tl.float32)
    here = state + head_of_batch * K * V + rows[:, None] * V + columns[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    tile = tl.load(here, mask=in_tile, other=0.0) * decay + key[:, None] * value[None, :]
    tl.store(here, tile, mask=in_tile)
    for i in range(HEADS):
        query = tl.load(q + (first_query + i) * K + rows, mask=in_k, other=0.0).to(tl.float32) * scale
        result = tl.sum(query[:, None] * tile, 0)
        tl.store(o + (first_query + i) * V + columns, result.to(o.dtype.element_ty), mask=in_v)

    if TAIL:  # noqa: SIM102  # one condition is the compiler's, the other the program's
        if block == tl.num_programs(1) - 1:
            last_value = tl.load(v + key_head * V + V - 1).to(tl.float32)
            there = state + head_of_batch * K * V + rows * V + V - 1
            column = tl.load(there, mask=in_k, other=0.0) * decay + key * last_value
            tl.store(there, column, mask=in_k)
            for i in range(HEADS):
                query = tl.load(q + (first_query + i) * K + rows, mask=in_k, other=0.0).to(tl.float32) * scale
                last = tl.sum(query * column, 0)
                tl.store(o + (first_query + i) * V + V - 1, last.to(o.dtype.element_ty))


@triton.jit
def load_halves(x, D: tl.constexpr, HALF: tl.constexpr):
    """The two halves of D numbers, each padded with zeros to HALF lanes: RoPE pairs number d with number d + D/2."""
    lanes = tl.arange(0, HALF)
    inside = lanes < D // 2
    first = tl.load(x + lanes, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(x + D // 2 + lanes, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rotate(first, second, cos, sin, D: tl.constexpr, HALF: tl.constexpr):
    """RoPE on the halves of D features: x cos + (−second, first) sin."""
    cos_first, cos_second = load_halves(cos, D, HALF)
    sin_first, sin_second = load_halves(sin, D, HALF)
    return first * cos_first - second * sin_first, second * cos_second + first * sin_second


@triton.jit
def half_of_product(weight, first, second, D: tl.constexpr, HALF: tl.constexpr):
    """D/2 rows of W x, from `weight` [D/2, D] in memory and x in halves."""
    lanes = tl.arange(0, HALF)
    inside = lanes < D // 2
    where = weight + lanes[:, None] * D + lanes[None, :]
    in_tile = inside[:, None] & inside[None, :]
    left = tl.load(where, mask=in_tile, other=0.0).to(tl.float32)
    y = tl.sum(left * first[None, :], 1)
    right = tl.load(where + D // 2, mask=in_tile, other=0.0).to(tl.float32)
    return y + tl.sum(right * second[None, :], 1)


@triton.jit
def features(
    x,  # [.., D], or [.., 2D] where they are features already (MAP "identity") and WIDE
    head,  # which row of x
    map_head,  # which head's parameters
    weight,  # [heads, D, D] or None
    bias,  # [heads, D] or None
    cos,  # [D], this token's
    sin,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    MAP: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
):
    """φ of one head in pieces of D/2 lanes: 4 where WIDE, else 2 and the same 2 again. Padding lanes are 0."""
    inside = tl.arange(0, HALF) < D // 2
    here = x + head * (2 * D if WIDE and MAP == "identity" else D)
    a, b = load_halves(here, D, HALF)
    if ROPE == "before":
        a, b = rotate(a, b, cos, sin, D, HALF)
    if weight is not None:
        matrix = weight + map_head * D * D
        y = half_of_product(matrix, a, b, D, HALF)
        b = half_of_product(matrix + D // 2 * D, a, b, D, HALF)
        a = y
    if bias is not None:
        bias_a, bias_b = load_halves(bias + map_head * D, D, HALF)
        a, b = a + bias_a, b + bias_b
    if MAP == "relu":
        a, b = tl.maximum(a, 0.0), tl.maximum(b, 0.0)
    elif MAP == "elu":
        a = tl.where(inside, tl.where(a > 0, a + 1, tl.exp(tl.minimum(a, 0.0))), 0.0)
        b = tl.where(inside, tl.where(b > 0, b + 1, tl.exp(tl.minimum(b, 0.0))), 0.0)
    c, d = a, b
    if MAP == "hedgehog":
        # softmax([y, −y]): its largest entry is the largest |y|, so no exponent is positive.
        top = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0))
        a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(-a - top), tl.exp(-b - top)
        total = tl.sum(tl.where(inside, a + b + c + d, 0.0), 0)
        a, b = tl.where(inside, a / total, 0.0), tl.where(inside, b / total, 0.0)
        c, d = tl.where(inside, c / total, 0.0), tl.where(inside, d / total, 0.0)
    elif WIDE:
        c, d = load_halves(here + D, D, HALF)
        if ROPE == "before":
            c, d = rotate(c, d, cos, sin, D, HALF)
    if ROPE == "after":
        a, b = rotate(a, b, cos, sin, D, HALF)
        c, d = rotate(c, d, cos, sin, D, HALF)
    return a, b, c, d


@triton.jit
def advance(
    state, feature, value, decay, D: tl.constexpr, V: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr
):
    """Read, update and write D/2 rows of a state whose rows are STRIDE apart; return them `[HALF, WIDTH]`."""
    lanes, columns = tl.arange(0, feature.shape[0]), tl.arange(0, WIDTH)
    where = state + lanes[:, None] * STRIDE + columns[None, :]
    in_tile = (lanes < D // 2)[:, None] & (columns < V)[None, :]
    tile = tl.load(where, mask=in_tile, other=0.0) * decay + feature[:, None] * value[None, :]
    tl.store(where, tile, mask=in_tile)
    return tile


@triton.jit
def advance_normaliser(column, feature, decay, D: tl.constexpr, STRIDE: tl.constexpr):
    """`advance` for the state's last column, whose values are all 1."""
    lanes = tl.arange(0, feature.shape[0])
    inside = lanes < D // 2
    new = tl.load(column + lanes * STRIDE, mask=inside, other=0.0) * decay + feature
    tl.store(column + lanes * STRIDE, new, mask=inside)
    return new


@triton.jit
def decode_kernel(
    q,  # [B, H, D], or [B, H, 2D] where they are features already and WIDE
    k,  # [B, G, ·] likewise
    v,  # [B, G, V]
    state,  # [B, S, K, STRIDE] fp32, changed in place
    log_decay,  # [S], [B, S] or None
    cos,  # [B, D], [1, D] or None
    sin,
    q_weight,  # [H, D, D] or None
    q_bias,  # [H, D] or None
    k_weight,  # [G, D, D] or None
    k_bias,  # [G, D] or None
    norm_weight,  # [H, V] or None
    norm_bias,
    out,  # [B, H, V]
    decay_stride,  # from one row to the next; 0 where all rows share it
    rope_stride,
    scale,
    eps,
    S,
    HEADS,  # no constant: the compiler would unroll the loop over them and run out of registers
    SHARE: tl.constexpr,  # states that read one key/value head, S/G
    D: tl.constexpr,
    V: tl.constexpr,
    WIDE: tl.constexpr,  # whether K = 2D, else K = D
    MAP: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,  # lanes for D/2 features
    WIDTH: tl.constexpr,  # lanes for V values
):
    """Program b·S + s: feature maps, RoPE, one state's step and the normalisation of all heads that read it."""
    head_of_batch = tl.program_id(0).to(tl.int64)
    row, state_head = head_of_batch // S, head_of_batch % S
    key_head = head_of_batch // SHARE
    STRIDE: tl.constexpr = V + 1 if NORM == "denominator" else V
    cos_row, sin_row = cos, sin
    if ROPE != "none":
        cos_row, sin_row = cos + row * rope_stride, sin + row * rope_stride
    decay = 1.0
    if log_decay is not None:
        decay = tl.exp(tl.load(log_decay + row * decay_stride + state_head).to(tl.float32))
    columns = tl.arange(0, WIDTH)
    in_v = columns < V

    a, b, c, d = features(
        k, key_head, state_head // SHARE, k_weight, k_bias, cos_row, sin_row, D, WIDE, MAP, ROPE, HALF
    )
    value = tl.load(v + key_head * V + columns, mask=in_v, other=0.0).to(tl.float32)
    here = state + head_of_batch * (2 * D if WIDE else D) * STRIDE
    half: tl.constexpr = D // 2 * STRIDE
    state_a = advance(here, a, value, decay, D, V, STRIDE, WIDTH)
    state_b = advance(here + half, b, value, decay, D, V, STRIDE, WIDTH)
    if WIDE:
        state_c = advance(here + 2 * half, c, value, decay, D, V, STRIDE, WIDTH)
        state_d = advance(here + 3 * half, d, value, decay, D, V, STRIDE, WIDTH)
    if NORM == "denominator":
        sum_a = advance_normaliser(here + V, a, decay, D, STRIDE)
        sum_b = advance_normaliser(here + half + V, b, decay, D, STRIDE)
        if WIDE:
            sum_c = advance_normaliser(here + 2 * half + V, c, decay, D, STRIDE)
            sum_d = advance_normaliser(here + 3 * half + V, d, decay, D, STRIDE)

    for i in range(HEADS):
        head = head_of_batch * HEADS + i
        own_head = state_head * HEADS + i
        a, b, c, d = features(q, head, own_head, q_weight, q_bias, cos_row, sin_row, D, WIDE, MAP, ROPE, HALF)
        result = tl.sum(a[:, None] * state_a, 0) + tl.sum(b[:, None] * state_b, 0)
        if WIDE:
            result += tl.sum(c[:, None] * state_c, 0) + tl.sum(d[:, None] * state_d, 0)
        result *= scale
        if NORM == "group_norm":
            mean = tl.sum(result, 0) / V
            centred = tl.where(in_v, result - mean, 0.0)
            result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / V + eps)
            if norm_weight is not None:
                result *= tl.load(norm_weight + own_head * V + columns, mask=in_v, other=0.0).to(tl.float32)
            if norm_bias is not None:
                result += tl.load(norm_bias + own_head * V + columns, mask=in_v, other=0.0).to(tl.float32)
        elif NORM == "denominator":
            denominator = tl.sum(a * sum_a, 0) + tl.sum(b * sum_b, 0)
            if WIDE:
                denominator += tl.sum(c * sum_c, 0) + tl.sum(d * sum_d, 0)
            result /= tl.maximum(denominator * scale, 1e-12)
        tl.store(out + head * V + columns, result.to(out.dtype.element_ty), mask=in_v)
