"""A linear layer, whatever its options, equals its definition written out with T×T matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from supra.models import SupraForCausalLM


def log_weights(layer, hidden: Tensor) -> Tensor:
    """[B or 1, H, T, T]: the log of what decay leaves of token j at token i, counted from the window's edge."""
    heads, T, window = layer.num_heads, hidden.shape[1], layer.config.window
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    if not hasattr(layer, "decay"):
        return torch.zeros(1, heads, T, T, dtype=hidden.dtype)
    if layer.config.decay != "gated":
        log_decay = layer.decay(hidden)
        log_decay = log_decay.repeat_interleave(heads // log_decay.shape[0])
        return (log_decay[:, None, None] * (i - j - window).clamp(min=0)).unsqueeze(0)
    # A forget gate: γ_t = σ(−(w·x_t + b)). Tokens j < t ≤ i − window have passed since j was read.
    log_gate = torch.einsum("btc,sc->bst", hidden, layer.decay.weight) + layer.decay.bias[:, None]
    log_gate = torch.log(torch.sigmoid(-log_gate)).repeat_interleave(heads // log_gate.shape[1], dim=1)
    t = torch.arange(T)
    between = (j.unsqueeze(-1) < t) & (t <= i.unsqueeze(-1) - window)
    return torch.einsum("bht,ijt->bhij", log_gate, between.to(log_gate.dtype))


def similarities(layer, q: Tensor, k: Tensor, mapped_q: Tensor, mapped_k: Tensor) -> Tensor:
    """[B, H, T, T]: φ(q)·φ(k), of the Taylor map as the polynomial that it stands for; k and mapped_k of every head."""
    if layer.config.feature_map != "taylor":
        return torch.einsum("bihd,bjhd->bhij", mapped_q, mapped_k)
    weight_q, weight_k = layer.feature_map_q.weight, layer.feature_map_k.weight
    weight_k = weight_k.repeat_interleave(layer.num_heads // layer.num_key_value_heads, dim=0)
    s = torch.einsum("bihd,hpd,hpe,bjhe->bhij", q, weight_q, weight_k, k) / layer.config.taylor_dim**0.5
    return 1 + s + s * s / 2


def dense_attention(
    layer, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor, mapped_q: Tensor, mapped_k: Tensor
) -> Tensor:
    """o [B, T, H, D] by the definition: every query against every key."""
    config, T = layer.config, q.shape[1]
    n = layer.num_heads // layer.num_key_value_heads
    k, v, mapped_k = (x.repeat_interleave(n, dim=2) for x in (k, v, mapped_k))
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    age, window, sinks = i - j, config.window, config.num_sink_tokens
    exact = (age >= 0) & ((age < window) | (j < sinks)) if window else torch.zeros(T, T, dtype=torch.bool)
    recurrent = (age >= 0) & ~exact
    linear = similarities(layer, q, k, mapped_q, mapped_k) * recurrent * log_weights(layer, hidden).exp()
    if config.attention_norm == "group_norm":
        output = torch.einsum("bhij,bjhd->bihd", linear * layer.head_dim**-0.5, v)
        mean, var = output.mean(-1, keepdim=True), output.var(-1, keepdim=True, unbiased=False)
        normed = (output - mean) / (var + 1e-5).sqrt()
        if config.group_norm_affine:
            normed = normed * layer.group_norm.weight.view(-1, layer.head_dim) + layer.group_norm.bias.view(
                -1, layer.head_dim
            )
        return normed
    if not window:
        return torch.einsum("bhij,bjhd->bihd", linear, v) / linear.sum(-1).transpose(1, 2).unsqueeze(
            -1
        ).clamp_min(1e-12)
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * layer.head_dim**-0.5).masked_fill(~exact, -torch.inf)
    lse = scores.logsumexp(-1)
    ratio = torch.exp(layer.window_mix.weight[:, None] - layer.window_mix.lse_weight[:, None] * lse)
    weights = torch.exp(scores - lse.unsqueeze(-1)) + ratio.unsqueeze(-1) * linear
    return torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_layer_equals_its_definition(model: SupraForCausalLM, length: int) -> None:
    layers = model.linear_layers()
    if not layers:
        pytest.skip("the all-softmax model has no linear layer")
    hidden = torch.randn(2, length, model.config.hidden_size, dtype=torch.float64)
    rope = model.model.rotary_emb(hidden, torch.arange(length)[None])
    for layer in layers[:1]:
        q, k, v = layer.project(hidden)
        q, k, mapped_q, mapped_k = layer.map_features(q, k, rope)
        expected = layer.o_proj(dense_attention(layer, hidden, q, k, v, mapped_q, mapped_k).flatten(-2))
        got, _ = layer(hidden, rope)
        assert_close(got, expected, rtol=1e-8, atol=1e-8)
