"""Softmax attention over the whole sequence, or over blocks that also see their neighbours.

Symbols: B batch, T positions, H heads, D head dim, w positions of a block, N blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .config import EncoderConfig
from .positions import Rotary, alibi_bias


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention; `block_tokens`, `direction` and ALiBi as the configuration says."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head_dim, self.causal, self.block_tokens = config.head_dim, config.causal, config.block_tokens
        self.has_alibi = config.positions == "alibi"
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotary: Rotary | None, real: Tensor | None) -> Tensor:
        """hidden [B, T, hidden], real [B, T] (None: no padding) -> [B, T, hidden]."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv_proj(hidden).chunk(3, dim=-1))
        if rotary is not None:
            q, k = rotary.grow(*apply_rotary_pos_emb(q, k, rotary.cos, rotary.sin, unsqueeze_dim=2))
        if self.block_tokens and hidden.shape[1] > self.block_tokens:
            output = local_attention(q, k, v, real, block_tokens=self.block_tokens, causal=self.causal)
        else:
            # Behind the end lies only padding: what is causal cannot see it.
            seen = None if real is None or self.causal else real[:, None, None]
            if self.has_alibi:
                bias = alibi_bias(q.shape[1], q.shape[2], self.causal, q.device, q.dtype)
                seen = bias if seen is None else bias.masked_fill(~seen, float("-inf"))
            is_causal = self.causal and not self.has_alibi
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            output = F.scaled_dot_product_attention(q, k, v, seen, is_causal=is_causal).transpose(1, 2)
        return self.o_proj(output.flatten(-2))


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, *, block_tokens: int, causal: bool
) -> Tensor:
    """Softmax of each block over itself, the block before and (unless causal) the one behind.

    q, k, v [B, T, H, D], real [B, T] -> [B, T, H, D]; time and memory grow with T · w (arXiv 2310.02980 reads 16k
    positions so).
    """
    (B, T, H, D), w, behind = q.shape, block_tokens, 0 if causal else 1
    N = -(-T // w)
    span = (2 + behind) * w
    q = F.pad(q, (0, 0, 0, 0, 0, N * w - T)).view(B * N, w, H, D).transpose(1, 2)
    around = (w, N * w - T + behind * w)
    k, v = (
        F.pad(x, (0, 0, 0, 0, *around)).unfold(1, span, w).permute(0, 1, 2, 4, 3).flatten(0, 1)
        for x in (k, v)
    )
    if real is None:
        real = torch.ones(1, T, dtype=torch.bool, device=q.device)
    seen = F.pad(real, around).unfold(1, span, w).unsqueeze(-2)  # [B, N, 1, span]
    if causal:
        query = torch.arange(w, 2 * w, device=q.device).unsqueeze(1)
        seen = seen & (torch.arange(span, device=q.device) <= query)
    # A row of padding may see nothing at all, and what is thrown away must still not be NaN.
    seen = seen | ~seen.any(-1, keepdim=True)
    seen = seen.expand(B, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    output = F.scaled_dot_product_attention(q, k, v, seen)
    return output.transpose(1, 2).reshape(B, N * w, H, D)[:, :T]
