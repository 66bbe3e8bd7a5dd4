"""Streaming writer of one safetensors file, the copy of one, and their hashes.

Notable: nothing larger than one block is held in memory.
"""

from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import xxhash

from supra.errors import SupraError
from supra.weights.headers import TensorInfo

if TYPE_CHECKING:
    import torch

HASH_NAME = "xxh3_128"
COPY_BYTES = 16 << 20
NOT_IN_KERNEL = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)
BLOCK_BYTES = 512 << 10  # stays in the processor's own cache between reading, hashing and writing
OnBytes = Callable[[int], None]
Hash = Callable[[], str]  # gives the hash of a file's bytes, reading them if need be


class CancelledError(Exception):
    """Raised inside a copying thread once the conversion has been given up."""


def header_bytes(tensors: Sequence[TensorInfo]) -> bytes:
    """The header of a safetensors file that holds `tensors` one after the other, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def file_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Size in bytes of the file that holds `tensors`."""
    return len(header_bytes(tensors)) + sum(tensor.num_bytes for tensor in tensors)


class ShardWriter:
    """Context manager that writes `tensors`, in their order, to `path`; `digest` is the hash of its bytes."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], on_bytes: OnBytes) -> None:
        self._path, self._tensors, self._on_bytes = path, tensors, on_bytes
        self._next, self._hash = 0, xxhash.xxh3_128()

    def __enter__(self) -> ShardWriter:
        self._file = self._path.open("wb", buffering=0)
        self._put(header_bytes(self._tensors))
        return self

    def write(self, name: str, blocks: Iterable[Any]) -> None:
        """Write the next tensor, given as bytes-like blocks."""
        expected = self._tensors[self._next]
        assert name == expected.name, f"{name} came where {expected.name} was planned"
        written = sum(self._put(block) for block in blocks)
        assert written == expected.num_bytes, (
            f"{name}: {written} bytes came where {expected.num_bytes} were planned"
        )
        self._next += 1

    def _put(self, block: Any) -> int:
        view = memoryview(block).cast("B")
        self._hash.update(view)
        _write_all(self._file, view)
        self._on_bytes(len(view))
        return len(view)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None:
            assert self._next == len(self._tensors), (
                f"{len(self._tensors) - self._next} tensors were never written"
            )

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def copy_file(source: Path, target: Path, on_bytes: OnBytes, stop: threading.Event) -> Hash:
    """Copy a file byte for byte; CancelledError once `stop` is set.

    The kernel copies, as for `cp`. What is returned reads the source again, from the page cache, to hash it: meant
    to be called once all files are copied, for turning from one to the other took up to twice as long
    (docs/LOG.md). Where the kernel does not copy, the bytes pass through this process and are hashed there.
    """
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        size, in_kernel = os.fstat(reader.fileno()).st_size, hasattr(os, "copy_file_range")
        for start in range(0, size, COPY_BYTES):
            if stop.is_set():
                raise CancelledError
            if not in_kernel:
                break
            end = min(start + COPY_BYTES, size)
            in_kernel = _copy_in_kernel(reader.fileno(), writer.fileno(), start, end)
            if in_kernel:
                on_bytes(end - start)
        if in_kernel:
            return lambda: hash_file(source, lambda _: None, stop)
        digest = _copy_by_hand(reader, writer, source, size, on_bytes, stop)
        return lambda: digest


def _copy_by_hand(
    reader: io.FileIO, writer: io.FileIO, source: Path, size: int, on_bytes: OnBytes, stop: threading.Event
) -> str:
    digest, buffer, place = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES)), 0
    while place < size:
        if stop.is_set():
            raise CancelledError
        count = os.preadv(reader.fileno(), [buffer[: size - place]], place)
        if not count:
            raise OSError(errno.EIO, "the file became shorter while it was copied", str(source))
        digest.update(buffer[:count])
        _write_all(writer, buffer[:count])
        place += count
        on_bytes(count)
    return digest.hexdigest()


def _copy_in_kernel(reader: int, writer: int, start: int, end: int) -> bool:
    """Copy bytes start to end between file descriptors; False when these file systems need it done by hand."""
    place = start
    while place < end:
        try:
            count = os.copy_file_range(reader, writer, end - place, place, place)
        except OSError as error:
            if place == 0 and error.errno in NOT_IN_KERNEL:
                return False
            raise
        if not count and place == 0:
            return False
        if not count:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        place += count
    return True


def _write_all(file: io.FileIO, view: memoryview) -> None:
    """Write all of `view`; one call to an unbuffered file may take less."""
    while len(view):
        view = view[file.write(view) or 0 :]


def hash_file(path: Path, on_bytes: OnBytes, stop: threading.Event) -> str:
    """The hash of a file's bytes; CancelledError once `stop` is set."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            if stop.is_set():
                raise CancelledError
            digest.update(buffer[:count])
            on_bytes(count)
    return digest.hexdigest()


def tensor_blocks(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The raw little-endian bytes of a CPU tensor, copying nothing when it is contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (memoryview(flat.numpy().data),)


def disk_error(error: OSError, path: Path) -> SupraError:
    """The SupraError that names what the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SupraError(
            str(path),
            "the disk is full",
            "Free some space or choose another disk with -o; nothing was left behind",
        )
    reason = error.strerror or str(error)
    return SupraError(
        error.filename or str(path),
        f"reading or writing failed ({reason})",
        "Check the disk and its permissions",
    )
