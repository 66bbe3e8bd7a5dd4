"""A teacher whose weights are pickled (.bin): read with `weights_only`, so that no code of theirs runs."""

from __future__ import annotations

import pickle
import threading
import zipfile
from pathlib import Path
from typing import Any

from supra.convert.shard_writer import (
    CancelledError,
    Hash,
    OnBytes,
    ShardWriter,
    file_bytes,
    hash_file,
    tensor_blocks,
)
from supra.convert.source import Shard, Source, check_shards, copy_small_files, small_files, tokenizer_notes
from supra.errors import UserError
from supra.weights.headers import TensorInfo, index_map, read_json, shard_names

SINGLE_NAME, INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
# A mapped file counts as memory for as long as it stays open: open it anew after so many bytes.
REMAP_BYTES = 128 << 20


class PickleSource(Source):
    """A folder of `pytorch_model*.bin`; UserError when a file is missing, or holds anything but tensors."""

    kind = "pickle"

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder
        self.where = str(folder / "config.json")
        self.config = read_json(folder / "config.json", "config.json")
        names = shard_names(folder, SINGLE_NAME, INDEX_NAME)
        if names is None:
            raise UserError(
                str(folder),
                "it holds no weights, neither safetensors nor .bin",
                "Give the folder with the weights",
            )
        self.shards = tuple(self._shard(name) for name in names)
        weight_map = index_map(folder, INDEX_NAME) if names != (SINGLE_NAME,) else None
        check_shards(self.shards, weight_map, str(folder / INDEX_NAME))

    def _load(self, name: str) -> dict[str, Any]:
        import torch

        path, again = (
            self._folder / name,
            "Download it again, or convert it to safetensors where it came from",
        )
        # Files from before torch 1.6 are no zip archives, and cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(str(path), f"it is no plain file of tensors ({reason[:120]})", again) from None
        if not isinstance(loaded, dict) or not all(
            isinstance(value, torch.Tensor) for value in loaded.values()
        ):
            raise UserError(
                str(path), "it does not hold a plain dictionary of tensors", "Save the model's state_dict"
            )
        return loaded

    def _shard(self, name: str) -> Shard:
        tensors = tuple(
            TensorInfo(key, _dtype_code(value), tuple(value.shape))
            for key, value in sorted(self._load(name).items())
        )
        return Shard(name, tensors, file_bytes(tensors))

    def local_path(self) -> Path | None:
        return self._folder

    def write_shard(self, shard: Shard, target: Path, on_bytes: OnBytes, stop: threading.Event) -> Hash:
        with ShardWriter(target, shard.tensors, on_bytes) as writer:
            loaded, since = self._load(shard.name), 0
            for tensor in shard.tensors:
                if stop.is_set():
                    raise CancelledError
                if since > REMAP_BYTES:
                    del loaded
                    loaded, since = self._load(shard.name), 0
                writer.write(tensor.name, tensor_blocks(loaded[tensor.name]))
                since += tensor.num_bytes
        return lambda: writer.digest

    def write_small_files(self, out: Path) -> None:
        copy_small_files(self._folder, out)

    def small_bytes(self) -> int:
        return sum(path.stat().st_size for path in small_files(self._folder))

    def source_hashes(self, written: dict[str, str]) -> dict[str, str]:
        stop = threading.Event()
        return {
            shard.name: hash_file(self._folder / shard.name, lambda _: None, stop) for shard in self.shards
        }

    def notes(self) -> list[str]:
        return [
            "the pickled weights are rewritten as safetensors, tensor by tensor",
            *tokenizer_notes(self._folder),
        ]


def _dtype_code(tensor: Any) -> str:
    """The safetensors code of a torch tensor's dtype."""
    import torch

    codes = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
    }
    codes |= {torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
    return codes.get(tensor.dtype, "F8_E4M3")
