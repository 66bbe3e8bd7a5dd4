"""GroupNorm with a group per head, where the output is still in registers, and its gradient."""

import triton
import triton.language as tl


@triton.jit
def normalise_rows(value, weight, bias, head, column, SIZE, eps, AFFINE: tl.constexpr):
    """GroupNorm of rows [C, W] over their first SIZE columns: zero mean, unit variance, then the head's affine map."""
    exists = (column < SIZE)[None, :]
    mean = tl.sum(tl.where(exists, value, 0.0), 1) / SIZE
    centred = tl.where(exists, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / SIZE + eps)
    normed = centred * scale[:, None]
    if AFFINE:
        at = head * SIZE + column
        normed *= tl.load(weight + at, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        normed += tl.load(bias + at, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
    return normed


@triton.jit
def group_norm_backward(
    o, d_y, weight, d_o, d_weight, d_bias, tokens, heads, V, SIZE, eps,
    AFFINE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d_o from the unnormalised o [tokens, heads, V] and d_y, and this block's part of the affine map's gradients
    [blocks, heads, SIZE]. Grid: blocks of tokens, heads."""
    block, head = tl.program_id(0), tl.program_id(1)
    row, column = block.to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    exists = (row < tokens)[:, None] & (column < SIZE)[None, :]
    at = (row * heads + head)[:, None] * V + column[None, :]
    value = tl.load(o + at, mask=exists, other=0.0).to(tl.float32)
    gradient = tl.load(d_y + at, mask=exists, other=0.0).to(tl.float32)
    mean = tl.sum(value, 1) / SIZE
    centred = tl.where(exists, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / SIZE + eps)
    # Rows that do not exist have no variance: with eps = 0 their scale is infinite.
    normed = tl.where(exists, centred * scale[:, None], 0.0)
    if AFFINE:
        part = (block.to(tl.int64) * heads + head) * SIZE + column
        tl.store(d_weight + part, tl.sum(gradient * normed, 0), mask=column < SIZE)
        tl.store(d_bias + part, tl.sum(gradient, 0), mask=column < SIZE)
        gradient *= tl.load(weight + head * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)[
            None, :
        ]
    average = tl.sum(gradient, 1) / SIZE
    along = tl.sum(gradient * normed, 1) / SIZE
    value = (gradient - average[:, None] - normed * along[:, None]) * scale[:, None]
    # Columns from SIZE to V are padding, which the kernels before this one read.
    inside = (row < tokens)[:, None] & (column < V)[None, :]
    tl.store(d_o + at, tl.where(exists, value, 0.0).to(d_o.dtype.element_ty), mask=inside)
