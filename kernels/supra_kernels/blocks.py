"""Blocks of consecutive tokens as batches of small matrices, in scratch buffers that stay in cache.

The queries of a key/value group are folded into the rows of one matrix, so keys and values are never
repeated, and copying a block into its buffer also makes it contiguous and fp32 whatever the dtype and
strides it came with.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def cut(start: int, end: int, size: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Blocks `(first token, pieces, tokens of a piece)` that cover [start, end): even blocks of at most
    `most` full pieces of `size` tokens, then what remains as one piece."""
    full, rest = divmod(end - start, size)
    blocks = -(-full // max(1, most))
    even = -(-full // max(1, blocks))
    for first in range(0, full, max(1, even)):
        yield start + first * size, min(even, full - first), size
    if rest:
        yield end - rest, 1, rest


class Buffers:
    """Named scratch tensors, reused from block to block."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.flat: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        numel = 1
        for size in shape:
            numel *= size
        flat = self.flat.get(name)
        if flat is None or flat.numel() < numel:
            flat = self.flat[name] = torch.empty(numel, dtype=self.dtype, device=self.device)
        return flat[:numel].view(shape)


def block_view(x: Tensor, start: int, M: int, C: int, G: int) -> Tensor:
    """M pieces of C tokens of `x` `[B, T, G·n, D]`, from token `start` on, as `[M, B, G, n, C, D]`."""
    B, _, heads, D = x.shape
    return x[:, start : start + M * C].view(B, M, C, G, heads // G, D).permute(1, 0, 3, 4, 2, 5)


def load(buffer: Tensor, view: Tensor, scale: float = 1.0) -> Tensor:
    """Copy `view` `[M, B, G, n, C, D]` into its buffer, times `scale`, and return it as matrices `[M·B·G,
    n·C, D]`."""
    M, B, G, n, C, D = view.shape
    buffer.copy_(view)
    if scale != 1.0:
        buffer.mul_(scale)
    return buffer.view(M * B * G, n * C, D)
