"""One decoded token of a linear layer in one Triton launch: feature maps, RoPE, the state and the normalisation.

Taken where the layer's backend is `triton`, nothing needs a gradient and no window asks for more; everywhere else the
general path computes the same (in half precision this one rounds less: features stay fp32 until they meet the state).

Symbols: B batch, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from supra_kernels import fused_operators

from .decay import per_token
from .feature_maps import DenseReLU, ELUPlusOne, HeadwiseReLU, Hedgehog, Identity

if TYPE_CHECKING:
    from .attention import SupraLinearAttention
    from .cache import RecurrentLayer

# The kernel's name of each map that it knows; a map wrapped in something else is left to the general path.
KERNEL_MAPS: dict[type[nn.Module], str] = {
    DenseReLU: "relu", HeadwiseReLU: "relu", Hedgehog: "hedgehog", ELUPlusOne: "elu", Identity: "identity",
}  # fmt: skip


def known_maps(layer: SupraLinearAttention) -> bool:
    """Whether both of the layer's maps are, bare, one that the kernels know: a wrapped one computes something else."""
    kinds = {
        type(module) for name in ("feature_map_q", "feature_map_k") if (module := getattr(layer, name, None))
    }
    return len(kinds) == 1 and kinds <= KERNEL_MAPS.keys()


def fuses(layer: SupraLinearAttention, q: Tensor, memory: RecurrentLayer) -> bool:
    """Whether `fused_step` computes this segment, q [B, T, H, D] without pads, after what `memory` holds."""
    if q.shape[1] != 1 or layer.window or memory.recurrent_state is None:
        return False
    if torch.is_grad_enabled() or q.dtype == torch.float64 or not known_maps(layer):
        return False
    kernels = fused_operators(layer.backend, q.device)
    return (
        kernels is not None
        and kernels.why_not_fused(layer.head_dim, layer.config.feature_dim, layer.head_dim) is None
    )


def fused_step(
    layer: SupraLinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    memory: RecurrentLayer,
) -> Tensor:
    """q [B, 1, H, D], k and v [B, 1, G, D] as projected -> output [B, 1, H, D] in v's dtype; `memory` moves on."""
    step = fused_operators(layer.backend, q.device)
    assert step is not None
    assert memory.recurrent_state is not None
    config, rope = layer.config, layer.config.rope_position
    map_q = layer.feature_map_q
    map_k = layer.feature_map_k if hasattr(layer, "feature_map_k") else map_q
    if isinstance(map_q, DenseReLU):
        # Its matrix spans the heads: a product for the whole layer, which has to come after a rotation before it.
        if rope == "before":
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
            rope = "none"
        q, k = (F.linear(x.flatten(-2), m.weight).view(x.shape) for x, m in ((q, map_q), (k, map_k)))  # type: ignore[arg-type]
    denominator = config.attention_norm == "denominator"
    plan = step.StepPlan(
        feature_map=KERNEL_MAPS[type(map_q)],
        rope=rope,
        norm=config.attention_norm,
        # A common factor of numerator and denominator cancels.
        scale=1.0 if denominator else layer.head_dim**-0.5,
        eps=1e-5 if denominator else layer.group_norm.eps,
    )
    cos, sin = (None, None) if rope == "none" else (x[:, 0] for x in position_embeddings)
    state = memory.recurrent_state.contiguous()
    output = step.decode_step(
        plan, q[:, 0], k[:, 0], v[:, 0], state, log_decay[:, 0] if per_token(log_decay) else log_decay,
        cos=cos, sin=sin, weights=step.StepWeights(**_weights(layer, map_q, map_k)),
    )  # fmt: skip
    memory.store(1, state, (), (), None)
    return output.unsqueeze(1)


def _weights(layer: SupraLinearAttention, map_q: nn.Module, map_k: nn.Module) -> dict[str, Any]:
    """The arguments of `StepWeights`: what the kernel applies itself."""
    weights: dict[str, Any] = {}
    for side, own_map, heads in (("q", map_q, layer.num_heads), ("k", map_k, layer.num_key_value_heads)):
        if isinstance(own_map, HeadwiseReLU | Hedgehog):
            weights[f"{side}_weight"] = own_map.weight
        if isinstance(own_map, HeadwiseReLU | DenseReLU):
            weights[f"{side}_bias"] = own_map.bias.view(heads, layer.head_dim)
    if layer.config.attention_norm == "group_norm" and layer.group_norm.affine:
        weights["norm_weight"] = layer.group_norm.weight.view(layer.num_heads, layer.head_dim)
        weights["norm_bias"] = layer.group_norm.bias.view(layer.num_heads, layer.head_dim)
    return weights
