"""The project's linear attention as an encoder's mixer, in one direction or both."""

from __future__ import annotations

from torch import Tensor, nn

from supra.models.attention import SupraLinearAttention

from .bidirectional import attend
from .config import EncoderConfig
from .positions import Rotary


class LinearAttention(nn.Module):
    """`SupraLinearAttention`'s projections, feature maps, decay and norm around sums that may look both ways."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.causal = config.causal
        self.attention = SupraLinearAttention(config.layer_config(), layer_idx=0)

    def forward(self, hidden: Tensor, rotary: Rotary | None, real: Tensor | None) -> Tensor:
        """hidden [B, T, hidden], real [B, T] (None: no padding) -> [B, T, hidden]."""
        layer = self.attention
        q, k, v = layer.project(hidden)
        log_decay = layer.decay(hidden) if hasattr(layer, "decay") else None
        _, _, q, k = layer.map_features(q, k, None if rotary is None else (rotary.cos, rotary.sin))
        if rotary is not None:
            q, k = rotary.grow(q, k)
        if real is not None:
            k = k * real[..., None, None]
        v, scale = layer.summands(v)
        output = layer.normalise(attend(q, k, v, log_decay, scale=scale, causal=self.causal))
        return layer.o_proj(output.flatten(-2).to(hidden.dtype))
