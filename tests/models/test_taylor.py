"""The second-order Taylor map: what its products are, how wide it is, where it starts and which backends take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from supra.models import SupraCache, SupraConfig, SupraForCausalLM, init_new_tensors, recurrent_state_bytes
from supra.models.attention import _rotate
from supra.models.feature_maps import Taylor
from supra_kernels import BackendError

MakeModel = Callable[..., SupraForCausalLM]
TAYLOR: dict[str, Any] = {
    "feature_map": "taylor", "taylor_dim": 4, "rope_position": "before", "attention_norm": "denominator",
    "decay": "none",
}  # fmt: skip


def started(head_dim: int, taylor_dim: int) -> Taylor:
    """A map of one head in fp64, as a conversion makes it."""
    taylor = Taylor(1, head_dim, taylor_dim).double()
    taylor.load_state_dict(taylor.initial_values(torch.Generator()))
    return taylor


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=20)
@given(half_head=st.integers(1, 9), data=st.data(), size=st.floats(0.1, 10))
def test_products_are_the_polynomial_and_at_least_one_half(
    half_head: int, data: st.DataObject, size: float
) -> None:
    head_dim, taylor_dim = 2 * half_head, 2 * data.draw(st.integers(1, half_head))
    maps = [Taylor(3, head_dim, taylor_dim).double() for _ in range(2)]
    for seed, one in enumerate(maps):
        one.weight.data.copy_(normal(*one.weight.shape, seed=seed))
    q, k = (size * normal(1, 5, 3, head_dim, seed=seed) for seed in (2, 3))
    found = torch.einsum("bihk,bjhk->bhij", maps[0](q), maps[1](k))
    s = (
        torch.einsum("bihd,hpd,hpe,bjhe->bhij", q, maps[0].weight, maps[1].weight, k).detach()
        / taylor_dim**0.5
    )
    assert_close(found, 1 + s + s * s / 2, rtol=1e-9, atol=1e-9 * size**4 * head_dim**2)
    width = SupraConfig(
        num_attention_heads=1, head_dim=head_dim, **{**TAYLOR, "taylor_dim": taylor_dim}
    ).feature_dim
    assert maps[0](q).shape[-1] == width
    assert float((1 + s + s * s / 2).min()) >= 0.5


@torch.no_grad()
def test_half_precision_stays_positive() -> None:
    """Long, almost opposite directions: s near −1, of terms hundreds large, whose rounding would go below zero."""
    taylor = started(64, 16).float()
    q, k = (8 * normal(1, 400, 1, 64, seed=seed).bfloat16() for seed in (0, 1))
    taylor.bfloat16()
    mapped_q, mapped_k = taylor(q), taylor(k)
    assert mapped_q.dtype == torch.float32
    products = torch.einsum("bihk,bjhk->bij", mapped_q, mapped_k)
    rounded = torch.einsum("bihk,bjhk->bij", mapped_q.bfloat16().double(), mapped_k.bfloat16().double())
    assert float(products.min()) > 0.4
    assert float(rounded.min()) < 0, "or else fp32 would be for nothing"


@pytest.mark.parametrize(("head_dim", "taylor_dim"), [(8, 8), (64, 16), (10, 4), (12, 10), (2, 2)])
def test_it_starts_with_whole_rotary_pairs_of_the_logits(head_dim: int, taylor_dim: int) -> None:
    taylor, half = started(head_dim, taylor_dim), head_dim // 2
    weight = taylor.weight[0]
    assert_close(weight @ weight.T, torch.eye(taylor_dim).double() * (head_dim / taylor_dim) ** 0.5)
    used = weight.abs().sum(0) > 0
    assert torch.equal(used[:half], used[half:]) and int(used.sum()) == taylor_dim
    # Both of a pair: s depends on the distance of two tokens, not on where they stand.
    q, k = (normal(1, 1, 1, head_dim, seed=seed).expand(1, 9, 1, head_dim) for seed in (0, 1))
    angle = torch.outer(torch.arange(9), 10.0 ** -torch.arange(half)).double().repeat(1, 2)[None]
    q_rotated, k_rotated = _rotate(q, k, (angle.cos(), angle.sin()))
    products = torch.einsum("bihk,bjhk->ij", taylor(q_rotated), taylor(k_rotated))
    assert_close(products[1:, 1:], products[:-1, :-1])
    if taylor_dim == head_dim:
        s = torch.einsum("bihd,bjhd->ij", q, k) / head_dim**0.5
        assert_close(torch.einsum("bihk,bjhk->ij", taylor(q), taylor(k)), 1 + s + s * s / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["none", "gated"])
@pytest.mark.parametrize("feature_map", ["taylor", "hedgehog"])
def test_state_bytes_are_what_the_cache_holds(
    make_model: MakeModel, feature_map: str, decay: str, dtype: torch.dtype
) -> None:
    taylor_dim = 4 if feature_map == "taylor" else None
    fields = {**TAYLOR, "feature_map": feature_map, "taylor_dim": taylor_dim, "decay": decay}
    model = make_model(torch.float32, **fields, window=5, num_sink_tokens=1).to(dtype)
    for length in (3, 12):
        cache = model(torch.ones(2, length, dtype=torch.long), use_cache=True).cache
        assert cache.num_bytes() == recurrent_state_bytes(model.config, 2, dtype.itemsize)


@torch.no_grad()
def test_ablations_decode_as_they_read(make_model: MakeModel) -> None:
    model, ids = make_model(**TAYLOR, window=4, num_sink_tokens=1), torch.arange(2, 16)[None]
    for branch in ("window_only", "linear_only"):
        with model.ablation(branch):
            cache = SupraCache(model.config)
            steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(14)]
            assert_close(torch.cat(steps, 1), model(ids).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"taylor_dim": 5}, "must be even"),
        ({"taylor_dim": 10}, "from 2 to the head_dim of 8"),
        ({"taylor_dim": None}, "taylor_dim=None must be"),
        ({"rope_position": "after", "attention_norm": "group_norm"}, "needs rope_position='before'"),
        ({"feature_map": "hedgehog"}, "taylor_dim=4 has no meaning"),
    ],
)
def test_configurations_without_meaning_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        SupraConfig(num_attention_heads=2, head_dim=8, **{**TAYLOR, **fields})


def test_triton_computes_it(make_model: MakeModel) -> None:
    pytest.importorskip("triton")
    shape = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    model = make_model(torch.float32, **TAYLOR, **shape)
    ids, found = torch.arange(2, 8)[None], {}
    for backend in ("torch", "triton"):
        model.set_backend(backend)
        model.zero_grad()
        logits = model(ids).logits
        logits.square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            cache = model(ids[:, :5], use_cache=True).cache
            step = model(ids[:, 5:], cache=cache, use_cache=True).logits
        found[backend] = {"logits": logits.detach(), "step": step, **gradients}
    for name, want in found["torch"].items():
        assert_close(found["triton"][name], want, rtol=1e-4, atol=1e-5 * float(want.abs().max()), msg=name)


def test_heads_too_wide_for_triton_are_refused_before_anything_runs(make_model: MakeModel) -> None:
    pytest.importorskip("triton")
    model = make_model(torch.float32, **{**TAYLOR, "taylor_dim": 32}, head_dim=32, num_hidden_layers=1)
    with pytest.raises(BackendError, match=r"head dims 561 and 33: backend 'triton' takes at most 512"):
        model.set_backend("triton")
    assert model.set_backend("auto") in ("torch", "triton")
    assert model(torch.arange(2, 8)[None]).logits.isfinite().all()


def test_the_window_starts_by_weighing_it_as_little_as_a_past_of_halves_asks(make_model: MakeModel) -> None:
    tensors = dict(init_new_tensors(make_model(**TAYLOR, window=4).config, 0, torch.float32))
    assert set(tensors["model.layers.0.self_attn.window_mix.weight"].tolist()) == {-4.0}
    assert set(tensors["model.layers.0.self_attn.window_mix.lse_weight"].tolist()) == {1.0}
