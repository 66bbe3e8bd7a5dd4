"""A segment of a linear layer on the Triton kernels that map, rotate and normalise where they load and store.

Taken where the layer's backend is `triton` and no window needs the mapped keys themselves; it differentiates.
Everywhere else the general path computes the same; in half precision this one rounds features once, and values before
they are summed.

Symbols: B batch, T tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from supra_kernels import fused_operators

from .decay import per_token
from .feature_maps import DenseReLU, HeadwiseReLU, Hedgehog, headwise_linear
from .fused_step import KERNEL_MAPS, known_maps

if TYPE_CHECKING:
    from .attention import SupraLinearAttention
    from .cache import RecurrentLayer
    from .packing import Packing


def fuses_sequence(layer: SupraLinearAttention, q: Tensor) -> bool:
    """Whether `fused_sequence` computes this layer's segments, q [B, T, H, D]."""
    if layer.config.window or q.dtype == torch.float64 or not known_maps(layer):
        return False
    kernels = fused_operators(layer.backend, q.device)
    if kernels is None:
        return False
    return layer.config.attention_norm == "denominator" or layer.head_dim <= kernels.LARGEST_NORM


def fused_sequence(
    layer: SupraLinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    memory: RecurrentLayer | None,
    packing: Packing | None,
) -> Tensor:
    """q [B, T, H, D], k and v [B, T, G, D] as projected -> output [B, T, H, D], or [1, total, H, D] where packed."""
    kernels = fused_operators(layer.backend, q.device)
    assert kernels is not None
    config, num_columns = layer.config, q.shape[1]
    maps = (
        layer.feature_map_q,
        layer.feature_map_k if hasattr(layer, "feature_map_k") else layer.feature_map_q,
    )
    cos, sin = (x.expand(q.shape[0], -1, -1) for x in position_embeddings)
    if config.rope_position == "before":
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q, k = (_pre_activation(x, own_map) for x, own_map in zip((q, k), maps, strict=True))
    if packing is not None:
        q, k, v, cos, sin = (packing.pack(x) for x in (q, k, v, cos, sin))
        log_decay = packing.pack(log_decay) if per_token(log_decay) else log_decay
    q_bias, k_bias = (getattr(own_map, "bias", None) for own_map in maps)
    front = kernels.Front(
        KERNEL_MAPS[type(maps[0])],
        None if q_bias is None else q_bias.view(q.shape[2], -1),
        None if k_bias is None else k_bias.view(k.shape[2], -1),
        *((cos, sin) if config.rope_position == "after" else (None, None)),
    )
    denominator, norm, scale = config.attention_norm == "denominator", None, layer.head_dim**-0.5
    if denominator:
        # The normaliser is a column of values that are all 1; both stay fp32 until they are divided.
        v, scale = torch.cat((v.float(), torch.ones_like(v[..., :1], dtype=torch.float32)), dim=-1), 1.0
    else:
        norm = kernels.Norm(layer.group_norm.weight, layer.group_norm.bias, layer.group_norm.eps)
    output, state = kernels.linear_attention(
        q, k, v, log_decay, scale=scale,
        initial_state=None if memory is None else memory.recurrent_state, output_final_state=memory is not None,
        cu_seqlens=None if packing is None else packing.cu_seqlens, front=front, norm=norm,
    )  # fmt: skip
    if memory is not None:
        memory.store(num_columns, state, (), (), None)
    return output[..., :-1] / output[..., -1:].clamp_min(1e-12) if denominator else output


def _pre_activation(x: Tensor, own_map: nn.Module) -> Tensor:
    """φ's matrix product alone; bias and activation are the kernels'."""
    if isinstance(own_map, DenseReLU):
        return F.linear(x.flatten(-2), own_map.weight).view(x.shape)
    if isinstance(own_map, HeadwiseReLU | Hedgehog):
        return headwise_linear(x, own_map.weight)
    return x
