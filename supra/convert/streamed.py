"""One forward of a model larger than the memory it may take: matrices are read a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from supra.models import SupraConfig, SupraForCausalLM
from supra.weights.headers import TensorInfo
from supra.weights.reader import StreamedEmbedding, TensorReader


class StreamedLinear(nn.Module):
    """x [..., in] -> x Wᵀ + b [..., out], W read from disk block by block."""

    def __init__(self, reader: TensorReader, name: str, bias: str | None) -> None:
        super().__init__()
        self._reader, self._name, self._bias = reader, name, bias

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.linear(x, rows) for rows in self._reader.blocks(self._name)]
        y = torch.cat(parts, dim=-1)
        return y if self._bias is None else y + self._reader.whole(self._bias)


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
