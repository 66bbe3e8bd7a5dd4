"""Where the chunks are: each sequence, a row of the batch or a packed document, is cut into chunks of its own."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from supra_kernels.documents import bounds_of, remembered


@dataclass(frozen=True)
class Chunks:
    """`start` int64 [chunks]: first row in the flattened tokens; `tokens` int32 [chunks]; `sequence_chunks` int32
    [N + 1]: the chunks of sequence n are sequence_chunks[n] … sequence_chunks[n + 1] − 1."""

    start: Tensor
    tokens: Tensor
    sequence_chunks: Tensor
    size: int

    def __len__(self) -> int:
        return self.start.shape[0]


def cut(bounds: Tensor, size: int, device: torch.device) -> Chunks:
    """Chunks of at most `size` tokens of the sequences between `bounds` int64 [N + 1] (on the CPU)."""
    lengths = bounds.diff()
    counts = (lengths + size - 1) // size
    sequence_chunks = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), counts)
    index = torch.arange(int(sequence_chunks[-1]), device="cpu") - sequence_chunks[sequence]
    tokens = (lengths[sequence] - index * size).clamp(max=size)
    return Chunks(
        (bounds[sequence] + index * size).to(device),
        tokens.to(device, torch.int32),
        sequence_chunks.to(device, torch.int32),
        size,
    )


@functools.lru_cache(maxsize=64)
def cut_rows(rows: int, row_tokens: int, size: int, device: torch.device) -> Chunks:
    """Chunks of `rows` sequences of equal length; remembered, because every layer of every step asks again."""
    return cut(torch.arange(rows + 1, device="cpu") * row_tokens, size, device)


def cut_documents(cu_seqlens: Tensor, size: int, device: torch.device) -> Chunks:
    """Chunks of the documents packed into one row by `cu_seqlens` [N + 1]; remembered as long as that tensor lives."""

    def make() -> Chunks:
        return cut(torch.tensor(bounds_of(cu_seqlens), device="cpu"), size, device)

    return remembered(cu_seqlens, (size, device), make)
