"""Positions of encoders against their formulas, and ids in the place of 0 to T − 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from supra.models.decay import alibi_slopes
from supra_eval.lra.models.config import EncoderConfig
from supra_eval.lra.models.encoder import Encoder
from supra_eval.lra.models.linear import LinearAttention
from supra_eval.lra.models.positions import xpos_growth
from supra_eval.lra.models.softmax import SoftmaxAttention

T, HEADS, DIM = 9, 4, 4
SIZES: dict[str, Any] = dict(
    num_layers=2, hidden_size=HEADS * DIM, num_heads=HEADS, intermediate_size=8, channels=2
)


def config(mixer: str, positions: str, **more: Any) -> EncoderConfig:
    return EncoderConfig(mixer=mixer, positions=positions, **{"direction": "causal", **SIZES, **more})


def distances() -> Tensor:
    """−m_h·|i − j| [H, T, T], entry by entry."""
    return torch.tensor(
        [[[-m * abs(i - j) for j in range(T)] for i in range(T)] for m in alibi_slopes(HEADS)],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_softmax_alibi_is_a_bias_by_distance(direction: str) -> None:
    layer = SoftmaxAttention(config("softmax", "alibi", direction=direction)).double()
    hidden = torch.randn(2, T, HEADS * DIM, dtype=torch.float64)
    q, k, v = (x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in layer.qkv_proj(hidden).chunk(3, dim=-1))
    scores = q @ k.transpose(-1, -2) / DIM**0.5 + distances()
    if direction == "causal":
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    expected = layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(hidden, None, None), expected, rtol=1e-10, atol=1e-10)


def test_linear_alibi_weighs_by_exactly_the_exponential_of_that_bias() -> None:
    # An encoder gives its feature maps values; a layer made alone holds whatever the memory held.
    mixer = Encoder(config("linear", "none", decay="alibi"), seed=1).double().layers[0].mixer
    assert isinstance(mixer, LinearAttention)
    layer, hidden = mixer.attention, torch.randn(2, T, HEADS * DIM, dtype=torch.float64)
    q, k, v = layer.project(hidden)
    _, _, q, k = layer.map_features(q, k, None)
    weights = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * distances().exp().tril()
    sums = (weights @ v.transpose(1, 2)).transpose(1, 2) * layer.summands(v)[1]
    expected = layer.o_proj(layer.normalise(sums).flatten(-2))
    torch.testing.assert_close(mixer(hidden, None, None), expected, rtol=1e-8, atol=1e-8)


def test_xpos_fades_each_pair_of_dimensions_by_its_own_rate() -> None:
    growth = xpos_growth(torch.arange(T).unsqueeze(0), DIM, 4, torch.float64)[0]
    for pair in range(DIM // 2):
        zeta = (2 * pair / DIM + 0.4) / 1.4
        for n in range(T):
            for m in range(n):
                ratio = growth[n] / growth[m]
                assert ratio[pair].item() == pytest.approx(zeta ** ((n - m) / 4))
                assert ratio[pair].item() == ratio[pair + DIM // 2].item()


def read(positions: str, mixer: str, ids: Tensor | None, **more: Any) -> Tensor:
    model = Encoder(config(mixer, positions, **more), seed=1).double()
    inputs = torch.randn(1, T, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return model(inputs, positions=ids)


@pytest.mark.parametrize("mixer", ["softmax", "linear"])
@pytest.mark.parametrize("positions", ["rope", "xpos", "sinusoidal"])
def test_ids_take_the_place_of_counting(positions: str, mixer: str) -> None:
    more = {"xpos_tokens": 5} if positions == "xpos" else {}
    counted = read(positions, mixer, None, **more)
    ids = torch.arange(T).unsqueeze(0)
    torch.testing.assert_close(read(positions, mixer, ids, **more), counted, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(read(positions, mixer, 2 * ids, **more), counted)
    shifted = read(positions, mixer, ids + 40, **more)
    is_relative = positions != "sinusoidal"
    # RoPE's angles are made in fp32.
    assert torch.allclose(shifted, counted, rtol=1e-4, atol=1e-4) == is_relative


def test_an_encoder_without_ids_refuses_them() -> None:
    for positions in ("none", "alibi"):
        with pytest.raises(ValueError, match=f"whose positions are {positions}"):
            read(positions, "softmax", torch.arange(T).unsqueeze(0))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(mixer="linear", positions="alibi"), "set decay to alibi"),
        (dict(mixer="softmax", positions="alibi", block_tokens=4), "no bias by distance"),
        (dict(mixer="softmax", positions="xpos"), "xpos, which needs it"),
        (dict(mixer="softmax", positions="rope", xpos_tokens=4), "xpos, which needs it"),
        (dict(mixer="softmax", positions="xpos", xpos_tokens=4, direction="bidirectional"), "causal"),
        (dict(mixer="linear", positions="xpos", xpos_tokens=4, feature_map="hedgehog"), "before the map"),
        (dict(mixer="s4d", positions="alibi", num_heads=None), "no queries"),
    ],
)
def test_positions_that_do_not_fit_are_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        config(**fields)
