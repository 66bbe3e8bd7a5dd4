"""Feature maps and RoPE where queries and keys are loaded, so that mapped ones never travel to memory; their gradient.

What is loaded is the pre-activation, φ's matrix product. A side of the attention is the tuple (x, bias, normaliser,
cos, sin): x [tokens, heads, ·]; `bias` [heads, K]; `normaliser` [tokens, heads], hedgehog's log-sum-exp; cos and sin
[tokens, ANGLES], rotating ANGLES features at a time (rotate-half). Parts that MAP and ANGLES do not use are None.
"""

import triton
import triton.language as tl

from supra_kernels.triton_backend.tiles import load_rows

NO_MAP = tl.constexpr(0)
RELU = tl.constexpr(1)  # ReLU(x + b)
ELU = tl.constexpr(2)  # ELU(x) + 1
HEDGEHOG = tl.constexpr(3)  # softmax([x; −x]): K is twice x's width


@triton.jit
def _mapped(side, start, i, valid, head, heads, K, column, MAP: tl.constexpr):
    """φ at features `column` [W] → fp32 [C, W], zero where nothing is."""
    x, bias, normaliser, _, _ = side
    width, source = K, column
    if MAP == HEDGEHOG:
        width = K // 2
        source = column % width
    exists = valid[:, None] & (column < K)[None, :]
    at = x + (start * heads + head) * width + (i[:, None] * (heads * width) + source[None, :])
    value = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    if MAP == RELU:
        value += tl.load(bias + head * K + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        value = tl.maximum(value, 0.0)
    if MAP == ELU:
        value = tl.where(value > 0, value + 1, tl.exp(tl.minimum(value, 0.0)))
    if MAP == HEDGEHOG:
        total = tl.load(normaliser + start * heads + head + i * heads, mask=valid, other=0.0)
        value = tl.exp(tl.where(column < width, 1.0, -1.0)[None, :] * value - total[:, None])
    return tl.where(exists, value, 0.0)


@triton.jit
def _partner(column, ANGLES: tl.constexpr):
    """Place in its rotation, partner feature and sign of it under rotate-half."""
    place = column % ANGLES
    low = place < ANGLES // 2
    return place, tl.where(low, column + ANGLES // 2, column - ANGLES // 2), tl.where(low, -1.0, 1.0)


@triton.jit
def _angle(table, start, i, valid, place, ANGLES: tl.constexpr):
    at = table + start * ANGLES + (i[:, None] * ANGLES + place[None, :])
    return tl.load(at, mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_features(
    side, start, i, valid, head, heads, K, first, WIDTH: tl.constexpr, MAP: tl.constexpr, ANGLES: tl.constexpr
):
    """Features first … first + WIDTH of one head, mapped and rotated in fp32 → [C, WIDTH] in x's dtype."""
    x, _, _, cos, sin = side
    if MAP == NO_MAP and ANGLES == 0:
        return load_rows(x, start, i, valid, head, heads, K, first, WIDTH)
    column = first + tl.arange(0, WIDTH)
    value = _mapped(side, start, i, valid, head, heads, K, column, MAP)
    if ANGLES:
        place, partner, sign = _partner(column, ANGLES)
        turned = _mapped(side, start, i, valid, head, heads, K, partner, MAP) * sign[None, :]
        value = value * _angle(cos, start, i, valid, place, ANGLES)
        value += turned * _angle(sin, start, i, valid, place, ANGLES)
    return value.to(x.dtype.element_ty)


@triton.jit
def hedgehog_normaliser(x, normaliser, tokens, heads, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """normaliser [tokens, heads] := log Σ exp(x) + exp(−x). Grid: blocks of tokens, heads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, column = tl.program_id(1), tl.arange(0, WIDTH)
    exists = (row < tokens)[:, None] & (column < width)[None, :]
    value = tl.load(x + (row * heads + head)[:, None] * width + column[None, :], mask=exists, other=0.0).to(
        tl.float32
    )
    largest = tl.max(tl.abs(value), 1)
    parts = tl.exp(value - largest[:, None]) + tl.exp(-value - largest[:, None])
    total = tl.log(tl.sum(tl.where(exists, parts, 0.0), 1)) + largest
    tl.store(normaliser + row * heads + head, total, mask=row < tokens)


@triton.jit
def _unrotated(d_features, side, start, i, valid, head, heads, K, column, ANGLES: tl.constexpr):
    """Gradient of the features before RoPE at `column`, fp32 [C, W]."""
    _, _, _, cos, sin = side
    exists = valid[:, None] & (column < K)[None, :]
    base = d_features + (start * heads + head) * K + i[:, None] * (heads * K)
    gradient = tl.load(base + column[None, :], mask=exists, other=0.0).to(tl.float32)
    if ANGLES:
        place, partner, sign = _partner(column, ANGLES)
        other = tl.load(base + partner[None, :], mask=exists, other=0.0).to(tl.float32)
        partner_place, _, _ = _partner(partner, ANGLES)
        gradient = gradient * _angle(cos, start, i, valid, place, ANGLES)
        gradient -= other * sign[None, :] * _angle(sin, start, i, valid, partner_place, ANGLES)
    return gradient


@triton.jit
def features_backward(
    x, bias, normaliser, cos, sin, d_features, d_x, d_bias, tokens, heads, K, width,
    MAP: tl.constexpr, ANGLES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d_x [tokens, heads, width] and, for ReLU, this block's part of the bias's gradient d_bias [blocks, heads, K] from
    d_features [tokens, heads, K]. Grid: blocks of tokens, heads."""
    block, head = tl.program_id(0), tl.program_id(1)
    start, i = block.to(tl.int64) * ROWS, tl.arange(0, ROWS)
    valid, column = start + i < tokens, tl.arange(0, WIDTH)
    side = (x, bias, normaliser, cos, sin)
    gradient = _unrotated(d_features, side, start, i, valid, head, heads, K, column, ANGLES)
    if MAP == RELU:
        gradient = tl.where(_mapped(side, start, i, valid, head, heads, K, column, MAP) > 0, gradient, 0.0)
        tl.store(
            d_bias + (block.to(tl.int64) * heads + head) * K + column, tl.sum(gradient, 0), mask=column < K
        )
    if MAP == ELU:
        gradient *= tl.minimum(_mapped(side, start, i, valid, head, heads, K, column, MAP), 1.0)
    if MAP == HEDGEHOG:
        gradient = tl.where(column[None, :] < width, gradient, 0.0)
        lower = _unrotated(d_features, side, start, i, valid, head, heads, K, column + width, ANGLES)
        plus = _mapped(side, start, i, valid, head, heads, K, column, MAP)
        minus = _mapped(side, start, i, valid, head, heads, K, column + width, MAP)
        plus = tl.where(column[None, :] < width, plus, 0.0)
        mean = tl.sum(plus * gradient + minus * lower, 1)[:, None]
        gradient = plus * (gradient - mean) - minus * (lower - mean)
    at = d_x + (start * heads + head) * width + (i[:, None] * (heads * width) + column[None, :])
    tl.store(at, gradient.to(d_x.dtype.element_ty), mask=valid[:, None] & (column < width)[None, :])
