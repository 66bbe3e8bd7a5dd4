"""Launcher and gradient of the windowed softmax: the `triton` backend of `window_attention`.

Everything is decided here without waiting for the GPU: which tile belongs to which document is a table made on the
device, with a few tiles to spare that end at once. The past is read where it lies; nothing is concatenated.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.errors import BackendError
from supra_kernels.triton_backend import tiling
from supra_kernels.triton_backend.guard import on
from supra_kernels.triton_backend.window_kernels import window_dkv, window_dq, window_forward

HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def padded(size: int) -> int:
    """The power of two of at least 16 that a tile's head dimension takes."""
    return max(16, triton.next_power_of_2(size))


def tile_sizes(qk: torch.dtype, v: torch.dtype, D: int, V: int) -> dict[str, int]:
    """BLOCK (tokens of a tile) and the compiler's options for these dtypes and head dims.

    Chosen from what the compilers report for sm_80, sm_90 and gfx942, without a GPU: the largest tiles of at most 64
    tokens that stay in the registers (up to 550 bytes a thread of fp32 products without tf32 spill) and within each
    target's shared memory.
    """
    size = max(padded(D), padded(V))
    block = 64 if size <= 128 else 32
    if qk not in HALF or v not in HALF:
        # With two dtypes in one kernel the compilers need more registers than with fp32 alone.
        block = 32 if size <= (128 if qk == v else 64) else 16
    # A warp of AMD has 64 lanes: eight of them would leave half the registers to each.
    wide = size > 64 and not tiling.AMD
    return {"BLOCK": block, "num_warps": 8 if wide else 4, "num_stages": 1}


def specialisation(qk: torch.dtype, v: torch.dtype, H: int, G: int, D: int, V: int) -> dict[str, Any]:
    """The constants that every kernel is compiled with for these dtypes and sizes, and the compiler's options."""
    constants = dict(
        H=H, G=G, D=D, V=V, BLOCK_D=padded(D), BLOCK_V=padded(V), PRECISION=tiling.precision(torch.float32)
    )
    return constants | tile_sizes(qk, v, D, V)


def tile_table(cu_seqlens: Tensor, tokens: int, block: int) -> Tensor:
    """`[number, 2]`: each tile's document and its first token therein; spare tiles start behind the last document.

    Σ ⌈length / block⌉ ≤ ⌊tokens / block⌋ + N, so the number is known without reading the bounds.
    """
    counts = (cu_seqlens.diff() + block - 1) // block
    ends = counts.cumsum(0)
    N = counts.shape[0]
    tile = torch.arange(tokens // block + N, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=N - 1)
    return torch.stack([sequence, (tile - (ends - counts)[sequence]) * block], dim=1)


class WindowAttention(torch.autograd.Function):
    """`(o, lse)`; the arguments as the public operator's, contiguous; q and k share a dtype, with past or without."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past_k: Tensor | None,
        past_v: Tensor | None,
        past_valid: Tensor | None,
        cu_seqlens: Tensor | None,
        window: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        (B, T, H, D), (G, V) = q.shape, v.shape[-2:]
        P = 0 if past_k is None else past_k.shape[1]
        # No age exceeds T + P: a larger window changes nothing and would not fit 32 bits.
        options: dict[str, Any] = dict(tokens=T, P=P, window=min(window, T + P), scale=scale)
        options |= specialisation(q.dtype, v.dtype, H, G, D, V)
        block: int = options["BLOCK"]
        tiles = None if cu_seqlens is None else tile_table(cu_seqlens, T, block)
        number = B * triton.cdiv(T, block) if tiles is None else tiles.shape[0]
        o = torch.empty(B, T, H, V, dtype=v.dtype, device=q.device)
        lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
        if lse.numel():
            with on(q.device):
                window_forward[(number * H,)](
                    q, k, v, past_k, past_v, past_valid, cu_seqlens, tiles, o, lse, **options
                )
        ctx.save_for_backward(q, k, v, past_k, past_v, past_valid, cu_seqlens, tiles, o, lse)
        ctx.number, ctx.options = number, options
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, past_k, past_v, past_valid, cu_seqlens, tiles, o, lse = ctx.saved_tensors
        options: dict[str, Any] = ctx.options
        if not lse.numel():
            grads = (None if x is None else torch.zeros_like(x) for x in (q, k, v, past_k, past_v))
            return *grads, None, None, None, None
        do, d_lse, delta = do.contiguous(), d_lse.contiguous(), torch.empty_like(lse)
        H, G, block, P = options["H"], options["G"], options["BLOCK"], options["P"]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_past_k, d_past_v = None, None
        with on(q.device):
            window_dq[(ctx.number * H,)](
                q, k, v, past_k, past_v, past_valid, cu_seqlens, tiles, o, lse, do, d_lse, delta, dq, **options
            )  # fmt: skip
            window_dkv[(ctx.number * G,)](
                q, k, v, None, cu_seqlens, tiles, lse, do, delta, dk, dv, PAST=False, **options
            )
            if past_k is not None and (ctx.needs_input_grad[3] or ctx.needs_input_grad[4]):
                d_past_k, d_past_v = torch.empty_like(past_k), torch.empty_like(past_v)
                window_dkv[(past_k.shape[0] * triton.cdiv(P, block) * G,)](
                    q, past_k, past_v, past_valid, cu_seqlens, None, lse, do, delta, d_past_k, d_past_v,
                    PAST=True, **options,
                )  # fmt: skip
        return dq, dk, dv, d_past_k, d_past_v, None, None, None, None


def _common(*tensors: Tensor | None) -> list[Any]:
    """The tensors contiguous and in one dtype, which a product of tiles needs."""
    dtypes = [x.dtype for x in tensors if x is not None]
    for dtype in dtypes:
        if dtype not in (*HALF, torch.float32):
            raise BackendError(
                f"backend 'triton' computes window_attention in fp32 and takes bf16, fp16 or fp32, not {dtype}; "
                'backend="torch" takes it'
            )
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return [None if x is None else x.to(dtype).contiguous() for x in tensors]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    past_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The public operator on the `triton` backend; arguments are already validated.

    Raises BackendError for fp64 and other dtypes it cannot compute in, and for head dims above 256.
    """
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        raise BackendError(
            f"backend 'triton' keeps whole heads in one tile, up to {MAX_HEAD_DIM} wide; here q is {q.shape[-1]} and "
            f'v {v.shape[-1]} wide: use backend="torch"'
        )
    out_dtype = v.dtype
    if past_k is None or past_v is None or past_k.shape[1] == 0:
        past_k = past_v = past_valid = None
    else:
        N, P = past_k.shape[:2]
        if past_valid is None:
            past_valid = torch.full((N,), P, dtype=torch.int32, device=q.device)
        past_valid = past_valid.to(torch.int32).clamp(0, P).contiguous()
    q_, k_, past_k_ = _common(q, k, past_k)
    v_, past_v_ = _common(v, past_v)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device, torch.int64).contiguous()
    o, lse = WindowAttention.apply(q_, k_, v_, past_k_, past_v_, past_valid, cu_seqlens, window, scale)
    return o.to(out_dtype), lse
