"""Starting values of the new tensors: a pure function of (seed, tensor name), made one layer at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .attention import build_new_modules
from .configuration_supra import SupraConfig

NEW_MODULES = ("feature_map_q", "feature_map_k", "decay", "group_norm", "window_mix")
FP32_MODULES = ("decay", "window_mix")


def is_new_parameter(name: str) -> bool:
    """Whether a parameter belongs to the conversion and not to the teacher."""
    return any(part in NEW_MODULES for part in name.split("."))


def initial_values(module: nn.Module, seed: int, name: str) -> dict[str, Tensor]:
    """Starting values in fp32 of a new module's parameters, for the module called `name`."""
    if not hasattr(module, "initial_values"):
        # GroupNorm, where it has an affine part: the one new module that is not ours.
        return {
            key: torch.full(value.shape, float(key == "weight")) for key, value in module.named_parameters()
        }
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    make: Callable[[torch.Generator], dict[str, Tensor]] = module.initial_values  # type: ignore[assignment]
    return make(generator)


def init_new_tensors(config: SupraConfig, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every tensor that a conversion adds, in the order of the layers.

    Only one module's tensors exist at a time, so the memory needed does not grow with the model. Tensors have `dtype`
    but for the few that the model keeps in fp32.
    """
    with torch.device("meta"):
        modules = build_new_modules(config)
    for layer_idx, layer_type in enumerate(config.layer_types or []):
        if layer_type != "linear_attention":
            continue
        for module_name, module in modules.items():
            prefix = f"model.layers.{layer_idx}.self_attn.{module_name}"
            kept = torch.float32 if module_name in FP32_MODULES else dtype
            for key, value in initial_values(module, seed, prefix).items():
                yield f"{prefix}.{key}", value.to(kept)
