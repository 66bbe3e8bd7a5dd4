"""A decay that each token sets: where it starts, what it costs, in which precision, and that it can be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from supra.models import SupraCache, SupraForCausalLM, init_new_tensors
from supra.models.decay import GatedDecay, fixed_log_decay, starting_log_decay

MakeModel = Callable[..., SupraForCausalLM]
WINDOW: dict[str, Any] = {
    "feature_map": "hedgehog", "rope_position": "before", "attention_norm": "denominator", "decay": "gated",
    "window": 4, "num_sink_tokens": 1,
}  # fmt: skip


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 96, shape, generator=torch.Generator().manual_seed(0))


def started(model: SupraForCausalLM) -> SupraForCausalLM:
    """The model with its own tensors as a conversion makes them."""
    model.load_state_dict(dict(init_new_tensors(model.config, 0, model.dtype)), strict=False)
    return model


@pytest.mark.parametrize("fields", [{"feature_map": "relu"}, {**WINDOW, "decay_shared": True}])
def test_a_conversion_starts_from_retnets_decay(make_model: MakeModel, fields: dict[str, Any]) -> None:
    found = {
        decay: started(make_model(**{**fields, "decay": decay}))(tokens(2, 15)).logits
        for decay in ("gated", "learned", "retnet", "none")
    }
    assert torch.equal(found["gated"], found["learned"])
    assert_close(found["gated"], found["retnet"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found["gated"], found["none"], rtol=1e-3, atol=1e-3)


def test_every_gate_gets_a_gradient_from_its_start(make_model: MakeModel) -> None:
    model, ids = started(make_model(**WINDOW)), tokens(2, 15)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for layer in model.linear_layers():
        assert isinstance(layer.decay, GatedDecay)
        assert bool((layer.decay.weight.grad.abs().amax(1) > 0).all()), "each head's"
        assert bool((layer.decay.bias.grad != 0).all())


@pytest.mark.parametrize("num_heads", [1, 4, 9])
def test_few_heads_start_at_retnets(num_heads: int) -> None:
    assert torch.equal(starting_log_decay(num_heads), fixed_log_decay("retnet", num_heads))


def test_each_of_many_heads_can_learn_to_forget() -> None:
    decay = GatedDecay(32, 4)
    decay.load_state_dict(start := decay.initial_values(torch.Generator()))
    optimizer = torch.optim.Adam(decay.parameters(), lr=1e-2)
    for _ in range(10):
        kept = decay(torch.ones(1, 64, 4)).sum(1).exp()
        optimizer.zero_grad()
        (1e-2 * kept.mean()).backward()
        optimizer.step()
    assert bool((decay.bias > start["bias"] + 0.03).all())


def test_a_closed_gate_forgets_and_an_open_one_keeps() -> None:
    decay = GatedDecay(2, 1).double()
    decay.load_state_dict({"weight": torch.tensor([[1.0], [1.0]]), "bias": torch.zeros(2)})
    log_decay = decay(torch.tensor([[[-200.0], [0.0], [1e4]]], dtype=torch.float64))
    assert_close(
        log_decay[0, :, 0], torch.tensor([0.0, -torch.log(torch.tensor(2.0)), -1e4], dtype=torch.float64)
    )


@torch.no_grad()
def test_ablations_decode_as_they_read(make_model: MakeModel) -> None:
    model, ids = make_model(**WINDOW), tokens(1, 14)
    for branch in ("window_only", "linear_only"):
        with model.ablation(branch):
            cache = SupraCache(model.config)
            steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(14)]
            assert_close(torch.cat(steps, 1), model(ids).logits, rtol=1e-9, atol=1e-9)


def test_the_gate_is_fp32_in_half_precision_and_under_autocast(make_model: MakeModel) -> None:
    model = make_model(torch.float32, **WINDOW)
    gate, hidden = model.linear_layers()[0].decay, torch.randn(2, 7, 48)
    exact = gate(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gate(hidden), exact)
    model.bfloat16()
    assert gate.weight.dtype == gate.bias.dtype == torch.float32
    assert torch.equal(gate(hidden.bfloat16()), gate(hidden.bfloat16().float()))
    stream = model(tokens(1, 9), use_cache=True).cache.layers[0].window_streams[3]
    assert stream.dtype == torch.float32
    started_at = dict(init_new_tensors(model.config, 0, torch.bfloat16))
    bias = started_at["model.layers.0.self_attn.decay.bias"]
    assert bias.dtype == torch.float32
    assert_close(-torch.nn.functional.softplus(bias), fixed_log_decay("retnet", 6).float())
