"""Decoding by the fused Triton step is decoding: the same logits and greedy tokens as the `torch` backend's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from supra.models import SupraCache, SupraForCausalLM
from supra_kernels import autograd

step = pytest.importorskip("supra_kernels.triton_backend.step")
fused = pytest.importorskip("supra_kernels.triton_backend.fused")

MakeModel = Callable[..., SupraForCausalLM]
SMALL = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
DENOMINATOR = {"rope_position": "before", "attention_norm": "denominator"}
MAPS = ("relu_dense", "relu", "t2r", "hedgehog", "elu", "identity")
FORMS: dict[str, dict[str, Any]] = {
    "after": {"rope_position": "after"},
    "before": {"rope_position": "before", "group_norm_affine": True},
    "denominator": DENOMINATOR,
}
DECAYS: dict[str, dict[str, Any]] = {
    "none": {"decay": "none"},
    "alibi": {"decay": "alibi"},
    "retnet": {"decay": "retnet", "decay_shared": True},
    "learned": {"decay": "learned"},
}


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels launched so far. Only the step is Triton's here: in the interpreter a prompt takes its time."""
    names: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        kernel = getattr(step, name)

        def launch(*args: Any, **options: Any) -> Any:
            names.append(name)
            return kernel(*args, **options)

        return launch

    monkeypatch.setattr(fused, "decode_step", counted("decode_step"))
    torch_backend = autograd.BACKENDS["torch"]
    only_step = autograd.Backend(
        torch_backend.linear_attention,
        counted("linear_attention_step"),
        torch_backend.window_attention,
        lambda device: None,
        fused=autograd.BACKENDS["triton"].fused,
    )
    monkeypatch.setitem(autograd.BACKENDS, "triton", only_step)
    monkeypatch.setattr("supra.models.attention.fuses_sequence", lambda layer, q: False)
    return names


@torch.no_grad()
def greedy(
    model: SupraForCausalLM, backend: str, prompt: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, num_tokens + 1, vocab] and tokens after the prompt, and the first layer's state."""
    model.set_backend(backend)
    cache = SupraCache(model.config)
    logits = [model(prompt, cache=cache, use_cache=True).logits[:, -1:]]
    tokens = []
    for _ in range(num_tokens):
        tokens.append(logits[-1].argmax(-1))
        logits.append(model(tokens[-1], cache=cache, use_cache=True).logits)
    return torch.cat(logits, 1), torch.cat(tokens, 1), cache.layers[0].recurrent_state


def prompt(batch: int, length: int = 5) -> Tensor:
    return torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_same_decoding(model: SupraForCausalLM, batch: int, num_tokens: int) -> None:
    logits, tokens, state = greedy(model, "torch", prompt(batch), num_tokens)
    found = greedy(model, "triton", prompt(batch), num_tokens)
    assert torch.equal(found[1], tokens)
    assert_close(found[0], logits, rtol=1e-4, atol=1e-4)
    assert_close(found[2], state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature_map", MAPS)
def test_every_kind_of_layer(
    make_model: MakeModel, launches: list[str], feature_map: str, form: str, decay: str
) -> None:
    if feature_map == "identity" and form == "denominator":
        pytest.skip("refused by the configuration: the denominator could change sign")
    fields = {"feature_map": feature_map, **FORMS[form], **DECAYS[decay]}
    model = make_model(torch.float32, **SMALL, **fields)
    assert_same_decoding(model, batch=1, num_tokens=2)
    assert launches == ["decode_step"] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"feature_map": "relu_dense", "num_key_value_heads": 4, "num_attention_heads": 4},
        {"feature_map": "hedgehog", "decay": "alibi", "qk_norm": True, "attention_bias": True},
        {"feature_map": "t2r", **DENOMINATOR, "decay": "learned", "decay_shared": True, "head_dim": 10},
        {"feature_map": "hedgehog", **DENOMINATOR, "decay": "gated"},
    ],
    ids=["one-dense-map", "qk-norm", "odd-head-dim", "gated"],
)
def test_a_batch_through_several_layers(
    make_model: MakeModel, launches: list[str], fields: dict[str, Any]
) -> None:
    base = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    assert_same_decoding(make_model(torch.float32, **{**base, **fields}), batch=2, num_tokens=2)
    assert launches == ["decode_step"] * 4


def test_generate_with_pads_and_beams(make_model: MakeModel, launches: list[str]) -> None:
    """After a padded prompt every column is real again; beams move the state."""
    model = make_model(torch.float32, **SMALL, feature_map="elu", **DENOMINATOR, decay="none")
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    found = {}
    for backend in ("torch", "triton"):
        model.set_backend(backend)
        found[backend] = model.generate(ids, attention_mask=mask, max_new_tokens=3, num_beams=2)
    assert torch.equal(found["torch"], found["triton"])
    assert launches


def test_half_precision_is_no_worse_than_torch(make_model: MakeModel) -> None:
    fields = dict(feature_map="hedgehog", **DENOMINATOR, decay="none")
    exact, tokens, _ = greedy(make_model(torch.float32, **SMALL, **fields), "torch", prompt(2), 1)
    half = make_model(torch.float32, **SMALL, **fields).bfloat16()
    errors = {}
    for backend in ("torch", "triton"):
        half.set_backend(backend)
        cache = SupraCache(half.config)
        with torch.no_grad():
            half(prompt(2), cache=cache, use_cache=True)
            logits = half(tokens, cache=cache, use_cache=True).logits
        errors[backend] = float((logits.float() - exact[:, -1:]).norm())
    assert errors["triton"] <= 2 * errors["torch"]


def test_where_the_general_path_stays(make_model: MakeModel, launches: list[str]) -> None:
    """A window, a gradient, pads in the step, heads too large for one program: never fused, and equal all the same."""
    hybrid = make_model(torch.float32, **SMALL, feature_map="elu", **DENOMINATOR, decay="none", window=2)
    assert_same_decoding(hybrid, batch=1, num_tokens=2)
    assert launches == ["linear_attention_step"] * 2
    launches.clear()

    model = make_model(torch.float32, **SMALL)
    model.set_backend("triton")
    cache = SupraCache(model.config)
    model(prompt(2), cache=cache, use_cache=True)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 5] = 0
    with torch.no_grad():
        model(prompt(2, 1), attention_mask=mask, cache=cache, use_cache=True)
    assert launches == []
    model(prompt(2, 1), cache=cache, use_cache=True).logits.sum().backward()
    assert launches == ["linear_attention_step"]
    launches.clear()

    large = make_model(torch.float32, **SMALL, head_dim=256, feature_map="identity")
    assert step.why_not_fused(256, 256, 256) is not None
    assert_same_decoding(large, batch=1, num_tokens=1)
    assert launches == ["linear_attention_step"]
