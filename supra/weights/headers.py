"""What safetensors files say they hold: their headers, and the index over several of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supra.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Bits per element of the dtypes of the safetensors format.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "C64": 64,
}  # fmt: skip
# safetensors' own limit; a longer "header" is garbage, and must not be read into memory.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Name, safetensors dtype and shape of one tensor; `start` is its first byte, counted from the file's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`; UserError when it is missing, no JSON, or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            str(path), f"there is no {what}", "Give a folder in the Hugging Face format"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"it is not valid JSON ({error})", "Download or save it again") from None
    except OSError as error:
        raise UserError(
            str(path), f"it cannot be read ({error.strerror})", "Check the file and its permissions"
        ) from None
    if not isinstance(value, dict):
        raise UserError(
            str(path), f"it holds a JSON {type(value).__name__}, not an object", "Download or save it again"
        )
    return value


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of a safetensors file in file order; UserError when it is missing, cut short or garbage."""
    again = "Download or copy the file again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(
                    str(path), "it is not a safetensors file, or is cut short inside its header", again
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise UserError(str(path), "the file is missing", again) from None
    except OSError as error:
        raise UserError(
            str(path), f"it cannot be read ({error.strerror})", "Check the file and its permissions"
        ) from None
    try:
        header = json.loads(raw)
        tensors = parse_header(header, data_start=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(str(path), f"its safetensors header is garbage ({error})", again) from None
    needed = max((tensor.start + tensor.num_bytes for tensor in tensors), default=8 + length)
    if size < needed:
        raise UserError(str(path), f"the file is cut short: it has {size:,} bytes of {needed:,}", again)
    return tensors


def parse_header(header: Mapping[str, Any], data_start: int = 0) -> tuple[TensorInfo, ...]:
    """The tensors of a decoded header, sorted by place; ValueError, KeyError or TypeError for nonsense."""
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (int(offset) for offset in entry["data_offsets"])
        tensor = TensorInfo(
            name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), data_start + begin
        )
        if tensor.dtype not in DTYPE_BITS:
            raise ValueError(f"{name} has the unknown dtype {tensor.dtype}")
        if begin < 0 or end - begin != tensor.num_bytes:
            raise ValueError(
                f"{name} has {end - begin} bytes where its shape and dtype need {tensor.num_bytes}"
            )
        tensors.append(tensor)
    return tuple(sorted(tensors, key=lambda tensor: tensor.start))


def shard_names(folder: Path, single: str = SINGLE_NAME, index: str = INDEX_NAME) -> tuple[str, ...] | None:
    """The sorted names of `folder`'s weight files, None without any; UserError when the index makes no sense.

    As in transformers, a single file wins over an index.
    """
    if (folder / single).is_file():
        return (single,)
    if not (folder / index).exists():
        return None
    weight_map = read_json(folder / index, "index").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise UserError(
            str(folder / index), "it has no weight_map from tensors to files", "Download or save it again"
        )
    names = tuple(sorted(set(weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise UserError(
                str(folder / index), f"{name!r} lies outside the folder", "Name files of this folder only"
            )
        if not (folder / name).is_file():
            raise UserError(
                str(folder / name), f"this shard is named in {index} but missing", "Download it again"
            )
    return names


def index_map(folder: Path, index: str = INDEX_NAME) -> dict[str, str] | None:
    """`weight_map` of the folder's index, or None without one."""
    return dict(read_json(folder / index, "index")["weight_map"]) if (folder / index).exists() else None
