"""One forward of a model larger than the memory it may take: matrices are read a few rows at a time.

Reads go through `read`, not a memory map: mapped pages would count as memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from supra.convert.headers import TensorInfo
from supra.errors import SupraError
from supra.models import SupraConfig, SupraForCausalLM

BLOCK_ELEMENTS = 1 << 20
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


class StreamedLinear(nn.Module):
    """x [..., in] -> x Wᵀ + b [..., out], W read from disk block by block."""

    def __init__(self, reader: TensorReader, name: str, bias: str | None) -> None:
        super().__init__()
        self._reader, self._name, self._bias = reader, name, bias

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.linear(x, rows) for rows in self._reader.blocks(self._name)]
        y = torch.cat(parts, dim=-1)
        return y if self._bias is None else y + self._reader.whole(self._bias)


class StreamedEmbedding(nn.Module):
    """ids [...] -> rows [..., hidden] of a table that stays on disk."""

    def __init__(self, reader: TensorReader, name: str) -> None:
        super().__init__()
        self._reader, self._name = reader, name

    def forward(self, ids: Tensor) -> Tensor:
        rows = [self._reader.rows(self._name, int(index), 1)[0] for index in ids.flatten()]
        return torch.stack(rows).view(*ids.shape, -1)


def streamed_model(
    config: SupraConfig, places: Mapping[str, tuple[Path, TensorInfo]], dtype: torch.dtype
) -> SupraForCausalLM:
    """The model with its matrices left on disk, a layer's other parameters loaded while that layer runs."""
    with torch.device("meta"):
        model = SupraForCausalLM(config)
    model.eval()
    # Not a weight: computed from the configuration, in fp32, and left behind on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    reader = TensorReader(places, dtype)
    for name, module in list(model.named_modules()):
        streamed: nn.Module
        if isinstance(module, nn.Linear):
            weight = f"{name}.weight"
            tied = weight not in places and weight == "lm_head.weight"
            bias = f"{name}.bias" if module.bias is not None else None
            streamed = StreamedLinear(reader, "model.embed_tokens.weight" if tied else weight, bias)
        elif isinstance(module, nn.Embedding):
            streamed = StreamedEmbedding(reader, f"{name}.weight")
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, streamed)
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.count(".") == 2:
            _load_while_running(module, name, reader, set(model._keep_in_fp32_modules_strict or ()))
    norm = model.model.norm
    norm.weight = nn.Parameter(reader.whole("model.norm.weight"), requires_grad=False)
    return model


def _load_while_running(layer: nn.Module, prefix: str, reader: TensorReader, in_fp32: set[str]) -> None:
    """Fill the layer's remaining parameters before its forward, and empty them after it."""
    owners = [(module, f"{prefix}.{path}" if path else prefix) for path, module in layer.named_modules()]

    def fill(*_: Any) -> None:
        for module, path in owners:
            for key in module._parameters:
                if module._parameters[key] is not None:
                    dtype = torch.float32 if in_fp32 & set(path.split(".")) else None
                    value = reader.whole(f"{path}.{key}", dtype)
                    module._parameters[key] = nn.Parameter(value, requires_grad=False)

    def empty(*_: Any) -> None:
        for module, _path in owners:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    layer.register_forward_pre_hook(fill)
    layer.register_forward_hook(empty)
