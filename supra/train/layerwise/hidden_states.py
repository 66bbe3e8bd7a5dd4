"""The hidden states between two layers, for a whole stage, in one file: read with `read`, so they take no memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from supra.errors import SupraError


class HiddenStates:
    """A file of `count` micro-batches of hidden states [B, T, hidden] in `dtype`, by number.

    A file that is written has a name of its own until `finish`: what has the final name is whole.

    Raises:
        SupraError: the disk is too small.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype, *, create_count: int | None = None
    ) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._bytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        self._partial = path.with_name(f"{path.name}.partial")
        if create_count is None:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - open as long as the layer trains
            return
        needed, free = create_count * self._bytes, shutil.disk_usage(path.parent).free
        if needed > free:
            reason = (
                f"{needed / 1e9:.2f} GB of hidden states do not fit into {free / 1e9:.2f} GB of free disk"
            )
            raise SupraError(str(path), reason, "Free some space, or lower the stage's total_tokens")
        self._file = open(self._partial, "w+b", buffering=0)  # noqa: SIM115

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, number: int) -> Tensor:
        """Micro-batch `number` [B, T, hidden] in fp32."""
        data = bytearray(self._bytes)
        got = os.preadv(self._file.fileno(), [data], number * self._bytes)
        if got != self._bytes:
            raise SupraError(str(self.path), "it is cut short", "Delete the run and start anew")
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape).float()

    def write(self, number: int, hidden_states: Tensor) -> None:
        """Store micro-batch `number` [B, T, hidden]."""
        data = hidden_states.detach().to("cpu", self.dtype).contiguous().view(torch.uint8).numpy()
        left, place = memoryview(data.data).cast("B"), number * self._bytes
        try:
            while len(left):
                count = os.pwrite(self._file.fileno(), left, place)
                left, place = left[count:], place + count
        except OSError as error:
            raise SupraError(
                str(self.path),
                f"hidden states cannot be written ({error.strerror})",
                "Free some space, then run with --resume",
            ) from None

    def finish(self) -> None:
        """Flush what was written to disk and give it its name."""
        os.fsync(self._file.fileno())
        os.replace(self._partial, self.path)

    def close(self) -> None:
        self._file.close()


class StoredEmbedding(nn.Module):
    """In the place of the token embedding: the hidden states of the next micro-batch, whatever its ids."""

    def __init__(self, source: HiddenStates, device: torch.device) -> None:
        super().__init__()
        self._source, self._device, self._next = source, device, 0

    def forward(self, ids: Tensor) -> Tensor:
        self._next += 1
        return self._source.read(self._next - 1).to(self._device)
