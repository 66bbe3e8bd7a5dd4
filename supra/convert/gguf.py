"""A teacher in a GGUF file: its tensors, configuration, tokenizer, chat template and generation settings.

Notable:
- quantised tensors become the exact fp32 values they stand for, a few rows at a time; fp16 and bf16 files
  keep theirs;
- files of Llama's kind hold the rows of q and k interleaved (llama.cpp rotates neighbours, transformers
  halves);
- Llama 3's rotary scaling is not in the metadata: it is recovered from `rope_freqs.weight`, or the file is
  refused.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from supra.architectures import ARCHITECTURES, Architecture, find
from supra.convert.gguf_tokenizer import check_tokenizer, write_tokenizer
from supra.convert.shard_writer import CancelledError, Hash, OnBytes, ShardWriter, file_bytes, hash_file
from supra.convert.source import Shard, Source
from supra.errors import UserError
from supra.rope import LLAMA3_BANDS
from supra.weights.headers import TensorInfo

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PLAIN_DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BLOCK_ELEMENTS = 4 << 20
SHARD_BYTES = 4 << 30
LONG_ARRAY = 1024
# The defaults of Llama 3.1's own configuration; the factor alone differs between its releases.
LLAMA3_ROPE = {**LLAMA3_BANDS, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class _Stored:
    """Where the file keeps one tensor, and how many heads there are whose rows are interleaved (0: none)."""

    ggml_type: Any
    offset: int
    num_bytes: int
    interleaved_heads: int


class GgufSource(Source):
    """One .gguf file; UserError when it is broken, split, or of an architecture that cannot be converted."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.location = self.where = str(path)
        self._path = path
        fields, tensors = _read(path)
        self._fields = fields
        name = fields.get("general.architecture")
        if name not in ARCHITECTURES or name == "mistral":
            find(
                name if name not in ARCHITECTURES else "mistral3", str(path)
            )  # raises with the nearest known names
        row = ARCHITECTURES[str(name)]
        check_tokenizer(path, fields)
        self._refuse(row, fields, tensors)
        self.config = _config(row, fields, tensors, str(path))
        self._stored: dict[str, _Stored] = {}
        self.shards = self._plan_shards(row, tensors)
        quantised = sorted({t.tensor_type.name for t in tensors} - PLAIN_DTYPES.keys())
        self._notes = (
            [f"quantised tensors ({', '.join(quantised)}) become the fp32 values they stand for"]
            if quantised
            else []
        )

    def _refuse(self, row: Architecture, fields: dict[str, Any], tensors: list[Any]) -> None:
        where, arch = str(self._path), row.model_type
        if int(fields.get("split.count") or 1) > 1:
            raise UserError(
                where, "it is one part of a split file", "Merge the parts with `llama-gguf-split --merge`"
            )
        if int(fields.get(f"{arch}.expert_count") or 0):
            raise UserError(
                where, "it is a mixture of experts, only dense MLPs are converted", "Choose a dense model"
            )
        for field in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            if isinstance(fields.get(f"{arch}.{field}"), list):
                raise UserError(
                    f"{where}: {arch}.{field}", "it differs from layer to layer", "Choose a uniform model"
                )

    def _plan_shards(self, row: Architecture, tensors: list[Any]) -> tuple[Shard, ...]:
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        plain = self.config["dtype"] != "float32"
        shards: list[Shard] = []
        group: list[TensorInfo] = []
        for tensor in tensors:
            if tensor.name == "rope_freqs.weight":
                continue
            name, part = _hf_name(tensor.name)
            kind = tensor.tensor_type.name
            dtype = PLAIN_DTYPES[kind] if plain else "F32"
            shape = tuple(int(n) for n in reversed(tensor.shape))
            info = TensorInfo(name, dtype, shape, int(tensor.data_offset))
            if group and sum(t.num_bytes for t in group) + info.num_bytes > SHARD_BYTES:
                shards.append(self._shard(len(shards), group))
                group = []
            group.append(info)
            interleaved = heads.get(part, 0) if row.gguf_permuted else 0
            self._stored[name] = _Stored(
                tensor.tensor_type, int(tensor.data_offset), int(tensor.n_bytes), interleaved
            )
        shards.append(self._shard(len(shards), group))
        return tuple(shards)

    def _shard(self, number: int, tensors: list[TensorInfo]) -> Shard:
        return Shard(f"{self._path.name}#{number + 1}", tuple(tensors), file_bytes(tensors))

    def write_shard(self, shard: Shard, target: Path, on_bytes: OnBytes, stop: threading.Event) -> Hash:
        with ShardWriter(target, shard.tensors, on_bytes) as writer:
            for tensor in shard.tensors:
                writer.write(tensor.name, self._blocks(tensor, stop))
        return lambda: writer.digest

    def _blocks(self, tensor: TensorInfo, stop: threading.Event) -> Iterator[np.ndarray]:
        """The tensor's values in HF's row order and dtype, in whole heads where rows are interleaved."""
        stored = self._stored[tensor.name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        row_bytes, row_elements = stored.num_bytes // rows, tensor.num_elements // rows
        # One row of a vector is the whole vector; its elements are then what the heads divide.
        unit = rows // stored.interleaved_heads if stored.interleaved_heads and rows > 1 else 1
        step = max(1, BLOCK_ELEMENTS // (row_elements * unit)) * unit
        with self._path.open("rb") as file:
            file.seek(stored.offset)
            for start in range(0, rows, step):
                if stop.is_set():
                    raise CancelledError
                count = min(step, rows - start)
                raw = np.frombuffer(file.read(count * row_bytes), np.uint8).reshape(count, row_bytes)
                if rows > 1 and stored.interleaved_heads:
                    raw = unpermute(raw, count // unit)
                block = _values(raw, stored.ggml_type, tensor.dtype)
                if rows == 1 and stored.interleaved_heads:
                    block = unpermute(block.reshape(-1, 1), stored.interleaved_heads)
                yield np.ascontiguousarray(block).view(np.uint8).reshape(-1)

    def write_small_files(self, out: Path) -> None:
        write_tokenizer(self._path, self._fields, out)

    def small_bytes(self) -> int:
        return 32 << 20  # a tokenizer of 150,000 tokens and its merges, as JSON

    def local_path(self) -> Path | None:
        return self._path

    def source_hashes(self, written: dict[str, str]) -> dict[str, str]:
        return {self._path.name: hash_file(self._path, lambda _: None, threading.Event())}

    def notes(self) -> list[str]:
        return self._notes


def _read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Metadata without its long arrays (a vocabulary takes a GB of small views), and the tensor table."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """Steps over long arrays, which gguf's own reader turns into two numpy views for each entry."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            inner, length = struct.unpack_from("<IQ", self.data.data, orig_offs)
            if length < LONG_ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            place = orig_offs + 12
            if inner == GGUFValueType.STRING:
                for _ in range(length):
                    place += 8 + struct.unpack_from("<Q", self.data.data, place)[0]
            else:
                place += length * np.dtype(self.gguf_scalar_to_np[GGUFValueType(inner)]).itemsize
            return place - orig_offs, [], [], [GGUFValueType(raw_type)]

    again = "Download it again"
    try:
        reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if field.data}
        # Their data would keep the whole file mapped.
        tensors = [tensor._replace(data=np.empty(0)) for tensor in reader.tensors]
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, struct.error) as error:
        raise UserError(str(path), f"it is no readable GGUF file, or is cut short ({error})", again) from None
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in tensors), default=0)
    if path.stat().st_size < end:
        raise UserError(
            str(path), f"the file is cut short: it has {path.stat().st_size:,} bytes of {end:,}", again
        )
    return fields, tensors


def _hf_name(name: str) -> tuple[str, str]:
    """The transformers name of a GGUF tensor, and its part (`attn_q`); the plan refuses unknown ones."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name], ""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in LAYER_NAMES:
        return name, ""
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}", match[2]


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotated halves of every head: rows [num_heads · D, n]."""
    return rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _values(raw: np.ndarray, ggml_type: Any, dtype: str) -> np.ndarray:
    """Raw rows [n, bytes] as `dtype`; rows already in it are passed on untouched."""
    from gguf.quants import dequantize

    if ggml_type.name == dtype:
        return raw.view(np.uint16 if dtype in ("F16", "BF16") else np.float32)
    return dequantize(raw, ggml_type)


def _config(row: Architecture, fields: dict[str, Any], tensors: list[Any], where: str) -> dict[str, Any]:
    """The transformers config.json that this file's metadata describes."""
    arch = row.model_type
    by_name = {tensor.name: tensor for tensor in tensors}

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{name}", default)
        if value is None:
            raise UserError(f"{where}: {arch}.{name}", "the metadata lacks it", "Choose a complete GGUF file")
        return _plain(value)

    if "token_embd.weight" not in by_name:
        raise UserError(
            f"{where}: token_embd.weight", "the file has no embeddings", "Choose a complete GGUF file"
        )
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if field(name, head_dim) != head_dim:
            raise UserError(
                f"{where}: {arch}.{name}", f"it is not the head's {head_dim}", "Choose a model of whole heads"
            )
    kinds = {tensor.tensor_type.name for tensor in tensors}
    main = by_name["token_embd.weight"].tensor_type.name if kinds <= PLAIN_DTYPES.keys() else "F32"
    config: dict[str, Any] = {
        "model_type": arch,
        "architectures": [row.class_name],
        "vocab_size": int(by_name["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_parameters": _rope(arch, fields, by_name, where, head_dim),
        "tie_word_embeddings": "output.weight" not in by_name,
        "dtype": TORCH_DTYPES[main],
    }
    if isinstance(row.query_key_value_bias, str):
        config[row.query_key_value_bias] = "blk.0.attn_q.bias" in by_name
    if "blk.0.ffn_up.bias" in by_name:
        config["mlp_bias"] = True
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = fields.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _plain(value: Any) -> Any:
    """A metadata value as Python's own type; a float as the shortest decimal of its fp32 value (1e-05)."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(
    arch: str, fields: dict[str, Any], by_name: dict[str, Any], where: str, head_dim: int
) -> dict[str, Any]:
    theta = _plain(fields.get(f"{arch}.rope.freq_base", 10000.0))
    scaling = {
        key.removeprefix(f"{arch}.rope.scaling."): _plain(v)
        for key, v in fields.items()
        if ".rope.scaling." in key
    }
    scaling.pop("finetuned", None)
    kind = scaling.pop("type", "none")
    if "rope_freqs.weight" in by_name:
        return {"rope_theta": theta, **_llama3_rope(by_name["rope_freqs.weight"], theta, head_dim, where)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    unknown = sorted(scaling.keys() - names.keys())
    if unknown:
        raise UserError(
            f"{where}: {arch}.rope.scaling.{unknown[0]}",
            "this setting is not known",
            "Convert from the HF folder",
        )
    return {"rope_type": kind, "rope_theta": theta, **{names[key]: value for key, value in scaling.items()}}


def _llama3_rope(tensor: Any, theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Llama 3's scaling, recovered from the factors in the file; UserError when they are something else.

    Formula: transformers' `_compute_llama3_parameters`; the file holds the unscaled frequency over the scaled
    one.
    """
    stored = np.fromfile(where, np.float32, count=int(tensor.n_elements), offset=int(tensor.data_offset))
    factor = round(float(stored.max()), 4)
    low, high, length = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"], 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (length / wavelength - low) / (high - low)
    expected = np.where(smooth < 0, factor, np.where(smooth > 1, 1.0, 1 / ((1 - smooth) / factor + smooth)))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UserError(
            f"{where}: rope_freqs.weight", "its factors are not Llama 3's", "Convert from the HF folder"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
