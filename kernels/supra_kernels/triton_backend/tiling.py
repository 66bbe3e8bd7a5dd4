"""How one call is cut into tiles: arithmetic on shapes and dtypes, shared by the launcher and the compile report."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

LARGEST_CHUNK = 128
LARGEST_HEAD_DIM = 512
SCAN_BLOCK = 1024
# 64 KB of shared memory a block where NVIDIA's have 163 and more, and warps of 64 lanes.
AMD = torch.version.hip is not None


@dataclass(frozen=True)
class Tiling:
    """Constants of the kernels for one shape: chunks of C tokens, NK pieces of BK key dims, NV of BV value dims and a
    TAIL, the dtype MIXED of products with a computed operand, the precision of fp32 products, and the warps."""

    C: int
    BK: int
    NK: int
    BV: int
    NV: int
    TAIL: int
    MIXED: Any
    PRECISION: str
    num_warps: int

    def constants(self, *names: str) -> dict[str, Any]:
        """The named fields as keyword arguments of a kernel."""
        return {name: getattr(self, name) for name in names}


def too_wide(key_dim: int, value_dim: int) -> str | None:
    """Why heads with so many features and values cannot be computed, or None if they can."""
    if max(key_dim, value_dim) <= LARGEST_HEAD_DIM:
        return None
    return (
        f"head dims {key_dim} and {value_dim}: backend 'triton' takes at most {LARGEST_HEAD_DIM}; "
        'use backend="torch"'
    )


def chunk_tile(chunk_size: int) -> int:
    """Tokens of the tile that holds a chunk: a power of two, at least the 16 rows of a tensor core's tile."""
    return max(16, triton.next_power_of_2(chunk_size))


def largest_fitting_chunk(K: int, V: int, dtype: torch.dtype) -> int:
    """The longest chunk whose tiles the shared memory holds (the compile report): AMD's is too small for wide fp32."""
    return 32 if AMD and dtype == torch.float32 and max(K, V) > 128 else LARGEST_CHUNK


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies fp32 operands for inputs of `dtype`: for fp32 as torch's own products are set to be.

    bf16 products have one precision anyhow, and AMD's matrix units take fp32 as it is.
    """
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact or AMD or dtype == torch.bfloat16 else "tf32"


def tile(K: int, V: int, C: int, dtype: torch.dtype, *, whole_rows: bool = False) -> Tiling:
    """Tiles for head dims K and V, chunk tile C and the dtype of q and k; `whole_rows`: V in one piece, for its norm.

    A column beyond a power of two (the normaliser: V = 65, 129) becomes a tail of 16 instead of doubling V. Products
    with a computed operand run in bf16 for bf16 inputs; for fp16 in tf32, as unnormalised scores and states can
    leave its range. fp32 products follow torch's own setting, `torch.set_float32_matmul_precision`.
    """
    mixed = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    widest = 128 if dtype == torch.bfloat16 and not AMD else 64
    BK = min(widest, max(16, triton.next_power_of_2(K)))
    BV = min(widest, max(16, triton.next_power_of_2(V + 1) // 2))
    NV = max(1, V // BV)
    rest = V - NV * BV
    tail = max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
    if tail > BV // 2 and BV > 16:
        NV, tail = NV + 1, 0
    if whole_rows:
        BV, NV, tail = max(16, triton.next_power_of_2(V)), 1, 0
    return Tiling(
        C, BK, triton.cdiv(K, BK), BV, NV, tail, mixed, precision(dtype), 8 if C * max(BK, BV) >= 4096 else 4
    )
