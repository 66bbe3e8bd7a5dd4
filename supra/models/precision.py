"""Modules whose tensors stay in fp32 whatever dtype the model is moved to: RoPE frequencies, decay, mix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HALF_PRECISION = (torch.bfloat16, torch.float16)


class KeepsFloat32(nn.Module):
    """A module that follows `.to(device)` but not `.to(bfloat16)`: rounding a decay or a frequency moves far tokens."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in HALF_PRECISION else moved

        return super()._apply(keep, recurse)


class SupraRotaryEmbedding(KeepsFloat32, LlamaRotaryEmbedding):
    """The teacher's rotary embedding with frequencies that stay fp32 (transformers' own follow `.to(bfloat16)`)."""
