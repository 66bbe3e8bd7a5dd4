"""Tensors read from weight files a few rows at a time.

Reads go through `read`, not a memory map: mapped pages would count as memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from supra.errors import SupraError
from supra.weights.headers import SINGLE_NAME, TensorInfo, index_map, read_header, shard_names

BLOCK_ELEMENTS = 1 << 20
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def tensor_places(folder: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """The file and header entry of each tensor of a model folder; what its index leaves out is left out.

    Raises:
        UserError: there are no safetensors files, or one is damaged.
    """
    names = shard_names(folder) or ()
    listed = index_map(folder) if names != (SINGLE_NAME,) else None
    return {
        info.name: (folder / name, info)
        for name in names
        for info in read_header(folder / name)
        if listed is None or listed.get(info.name) == name
    }


class TensorReader:
    """Reads rows of the tensors in `places`: name -> file and header entry."""

    def __init__(self, places: Mapping[str, tuple[Path, TensorInfo]], dtype: torch.dtype) -> None:
        self._places, self._dtype = places, dtype

    def rows(
        self,
        name: str,
        start: int,
        count: int,
        dtype: torch.dtype | None = None,
        buffer: bytearray | None = None,
    ) -> Tensor:
        """`count` rows of a tensor [n, ...], in `dtype` or the model's; they live in `buffer` if one is
        given.
        """
        path, info = self._places[name]
        row_bytes = info.num_bytes // max(info.shape[0], 1)
        buffer = bytearray(count * row_bytes) if buffer is None else buffer
        left = memoryview(buffer)[: count * row_bytes]
        with path.open("rb", buffering=0) as file:
            file.seek(info.start + start * row_bytes)
            while len(left):
                got = file.readinto(left)
                if not got:
                    raise SupraError(str(path), "the file ends too early", "Convert again")
                left = left[got:]
        num_elements = count * info.num_elements // max(info.shape[0], 1)
        values = torch.frombuffer(buffer, dtype=TORCH_DTYPES[info.dtype], count=num_elements)
        return values.to(dtype or self._dtype).view(count, *info.shape[1:])

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The rows of a whole tensor, about BLOCK_ELEMENTS at a time, each block valid until the next one."""
        info = self._places[name][1]
        num_rows = info.shape[0]
        step = min(num_rows, max(1, BLOCK_ELEMENTS // max(1, info.num_elements // num_rows)))
        buffer = bytearray(step * (info.num_bytes // num_rows))
        for start in range(0, num_rows, step):
            yield self.rows(name, start, min(step, num_rows - start), buffer=buffer)

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One small tensor [...], in `dtype` or the model's."""
        return self.rows(name, 0, self._places[name][1].shape[0], dtype)

    def first_broken(self) -> str | None:
        """The name of a tensor that holds NaN or infinity, or None; reads everything, so ask only when
        needed.
        """
        for name in self._places:
            if not all(bool(torch.isfinite(block).all()) for block in self.blocks(name)):
                return name
        return None


class StreamedEmbedding(nn.Module):
    """ids [...] -> rows [..., hidden] of a table that stays on disk."""

    def __init__(self, reader: TensorReader, name: str) -> None:
        super().__init__()
        self._reader, self._name = reader, name

    def forward(self, ids: Tensor) -> Tensor:
        wanted, places = ids.unique(return_inverse=True)
        rows = torch.cat([self._reader.rows(self._name, int(index), 1) for index in wanted])
        return rows.to(ids.device)[places]
