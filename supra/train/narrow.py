"""Projections of a frozen model in fewer bytes than fp32's four: bf16, int8 or nf4."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from supra.config import TeacherWeights
from supra.train.bits import bitsandbytes

# nf4: 4 bits, and for each block of weights one scale, fp32 at most. int8's scale for each row is not worth counting.
_NF4_BLOCK, _NF4_ROWS = 64, 32
_BYTES_A_WEIGHT = {"bfloat16": 2.0, "int8": 1.0, "nf4": 0.5 + 4 / _NF4_BLOCK}
# Activations beyond it are outliers, which LLM.int8() multiplies in half precision (arXiv 2208.07339, section 3.2).
_OUTLIER = 6.0


def narrow(model: nn.Module, weights: TeacherWeights) -> None:
    """Give the model's projections weights of their own, one at a time, as wide as `weights` says.

    bf16: what autocast would make of them at every use, so not a bit of the model's output changes. int8: weights and
    activations by row, outlying columns of them apart (LLM.int8(), arXiv 2208.07339). nf4: arXiv 2305.14314, section 3.
    The output layer stays as it is in both, and in nf4 a projection of other than whole blocks.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if weights == "shared":
        return
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if _is_narrowed(layer, name, weights):
                setattr(parent, name, _copy(layer, weights))


def narrowed_bytes(model: nn.Module, weights: TeacherWeights) -> dict[str, float]:
    """Bytes of the weights that `narrow` would make, by the name of the one that each stands for."""
    return {
        f"{name}.weight": layer.weight.numel() * _BYTES_A_WEIGHT[weights]
        for name, layer in model.named_modules()
        if weights != "shared" and _is_narrowed(layer, name.rpartition(".")[2], weights)
    }


def _is_narrowed(layer: nn.Module, name: str, weights: TeacherWeights) -> TypeGuard[nn.Linear]:
    if type(layer) is not nn.Linear:
        return False
    if weights == "bfloat16" or name == "lm_head":
        return weights == "bfloat16"
    # bitsandbytes packs whole blocks alone on some CPUs, and fails on others.
    return weights == "int8" or (layer.in_features % _NF4_BLOCK == 0 and layer.out_features % _NF4_ROWS == 0)


def _copy(layer: nn.Linear, weights: TeacherWeights) -> nn.Module:
    out_features, in_features = layer.weight.shape
    if weights == "bfloat16":
        copy: Any = nn.Linear(in_features, out_features, bias=layer.bias is not None, device="meta")
        copy.weight = nn.Parameter(layer.weight.detach().to(torch.bfloat16))
    else:
        bnb = bitsandbytes(f"teacher_weights {weights}")
        # Both quantise on their way to the device, from memory outside of it.
        data, options = layer.weight.detach().cpu(), {"bias": layer.bias is not None, "device": "meta"}
        if weights == "int8":
            copy = bnb.nn.Linear8bitLt(
                in_features, out_features, has_fp16_weights=False, threshold=_OUTLIER, **options
            )
            copy.weight = bnb.nn.Int8Params(data, requires_grad=False, has_fp16_weights=False)
        else:
            copy = bnb.nn.Linear4bit(
                in_features, out_features, quant_type="nf4", compress_statistics=False, **options
            )
            copy.weight = bnb.nn.Params4bit(
                data, requires_grad=False, quant_type="nf4", compress_statistics=False, module=copy
            )
        copy.weight = copy.weight.to(layer.weight.device)
    if layer.bias is not None:
        copy.bias = layer.bias  # the student's own: a bias trains with its weight, and then gets a copy
    return copy
