"""The feature maps φ that replace the exponential of softmax attention.

Symbols: B batch, T tokens, h heads, D head dim, K feature dim.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .precision import HALF_PRECISION

if TYPE_CHECKING:
    from .configuration_supra import SupraConfig


class DenseReLU(nn.Module):
    """φ(x) = ReLU(Wx + b) with one dense W across all heads, x [B, T, h, D] -> [B, T, h, D].

    Source: the models released with SUPRA (arXiv 2405.06640, eq. 6). Initialised as `nn.Linear` is.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim, num_heads * head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads * head_dim))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        return _linear_initial_values(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x.flatten(-2), self.weight, self.bias)).view(x.shape)


class HeadwiseReLU(nn.Module):
    """φ(x) = ReLU(W_h x + b_h) with a D×D map per head, x [B, T, h, D] -> [B, T, h, D].

    Source: T2R (arXiv 2103.13076, eq. 5). Initialised as `nn.Linear` is.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads, head_dim))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        return _linear_initial_values(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(headwise_linear(x, self.weight) + self.bias)


class Hedgehog(nn.Module):
    """φ(x) = softmax([W_h x; −W_h x]) per head, x [B, T, h, D] -> [B, T, h, 2D].

    Source: Hedgehog (arXiv 2402.04347, eq. 6) as LoLCATs uses it (arXiv 2410.10254, section 3.1). W starts as the
    identity, so that before any training large entries of q and k already meet in the same feature.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        num_heads, head_dim, _ = self.weight.shape
        return {"weight": torch.eye(head_dim).expand(num_heads, head_dim, head_dim).clone()}

    def forward(self, x: Tensor) -> Tensor:
        y = headwise_linear(x, self.weight)
        # fp32: a bf16 softmax over 2D entries loses the small features that carry the long context.
        dtype = torch.float32 if y.dtype in HALF_PRECISION else y.dtype
        return torch.softmax(torch.cat((y, -y), dim=-1), dim=-1, dtype=dtype).to(y.dtype)


class Taylor(nn.Module):
    """φ(x) = [1, y, y_i²/√2, y_i·y_j (i < j)] with y = W_h x / D'^¼, x [B, T, h, D] -> [B, T, h, 1 + D' + D'(D'+1)/2].

    Source: Based (arXiv 2402.18668, section 4): with s = W_q q·W_k k / √D', φ(q)·φ(k) = 1 + s + s²/2, the second-order
    Taylor polynomial of exp(s). It is at least 1/2, so it can normalise. W starts as D' coordinates of a head, the same
    in queries and keys: whole rotary pairs, evenly spread over the frequencies, scaled so that s stands for q·k/√D.
    """

    def __init__(self, num_heads: int, head_dim: int, taylor_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, taylor_dim, head_dim))

    def initial_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        _, taylor_dim, head_dim = self.weight.shape
        # Llama's rotary pairs are coordinates i and i + D/2.
        pairs = torch.arange(taylor_dim // 2, device="cpu") * head_dim // taylor_dim
        rows = torch.eye(head_dim, device="cpu")[torch.cat((pairs, pairs + head_dim // 2))]
        return {"weight": (rows * (head_dim / taylor_dim) ** 0.25).expand(self.weight.shape).clone()}

    def forward(self, x: Tensor) -> Tensor:
        """Half precision comes out in fp32: s²/2 is a sum that cancels, and rounded terms could leave it below −s."""
        y = headwise_linear(x, self.weight)
        y = y.to(torch.float32 if y.dtype in HALF_PRECISION else y.dtype) * self.weight.shape[1] ** -0.25
        products = (y.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
        mixed = products.index_select(-1, _above_diagonal(self.weight.shape[1], x.device))
        return torch.cat((torch.ones_like(y[..., :1]), y, y * y * 0.5**0.5, mixed), dim=-1)


@functools.lru_cache(maxsize=64)
def _above_diagonal(size: int, device: torch.device) -> Tensor:
    """Where i < j in a flattened [size, size]; made once, as a copy from the host in every layer would stall a GPU."""
    with torch.inference_mode(False):  # it is saved for the backward pass
        row, column = torch.triu_indices(size, size, offset=1)
        return (row * size + column).to(device)


class ELUPlusOne(nn.Module):
    """φ(x) = ELU(x) + 1, x [B, T, h, D] -> [B, T, h, D] (arXiv 2006.16236, eq. 7); no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


class Identity(nn.Module):
    """φ(x) = x: retention without a feature map (arXiv 2307.08621, eq. 5); no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def build_feature_maps(config: SupraConfig) -> dict[str, nn.Module]:
    """The feature maps of one layer: `feature_map_q`, and `feature_map_k` where the keys have a map of their own.

    The dense map is shared between queries and keys when there are as many of each (MHA), as in the released models.
    """
    assert config.head_dim is not None and config.num_key_value_heads is not None
    heads_q, heads_k, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if config.feature_map in ("elu", "identity"):
        kind: type[nn.Module] = ELUPlusOne if config.feature_map == "elu" else Identity
        return {"feature_map_q": kind(), "feature_map_k": kind()}
    if config.feature_map == "taylor":
        assert config.taylor_dim is not None
        return {
            "feature_map_q": Taylor(heads_q, dim, config.taylor_dim),
            "feature_map_k": Taylor(heads_k, dim, config.taylor_dim),
        }
    with_weights = {"relu_dense": DenseReLU, "relu": HeadwiseReLU, "t2r": HeadwiseReLU, "hedgehog": Hedgehog}
    make = with_weights[config.feature_map]
    if config.feature_map == "relu_dense" and heads_q == heads_k:
        return {"feature_map_q": make(heads_q, dim)}
    return {"feature_map_q": make(heads_q, dim), "feature_map_k": make(heads_k, dim)}


def headwise_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Apply one matrix per head: x [B, T, h, D], weight [h, K, D] -> [B, T, h, K]."""
    return torch.einsum("bthd,hkd->bthk", x, weight)


def _linear_initial_values(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    values = {}
    fan_in = dict(module.named_parameters())["weight"].shape[-1]
    for name, parameter in module.named_parameters():
        values[name] = torch.empty(parameter.shape, device="cpu").uniform_(
            -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator
        )
    return values
