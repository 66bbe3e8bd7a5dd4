"""Training and prefill by the Triton kernels that map, rotate and normalise equal the `torch` backend's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from supra.models import SupraCache, SupraForCausalLM
from supra.models import attention as attention_module

pytest.importorskip("triton")

MakeModel = Callable[..., SupraForCausalLM]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
FIELDS: list[dict[str, Any]] = [
    {"feature_map": "relu", "rope_position": "after", "decay": "alibi"},
    {
        "feature_map": "t2r",
        "rope_position": "before",
        "decay": "learned",
        "decay_shared": True,
        "group_norm_affine": True,
    },
    {"feature_map": "relu_dense", "rope_position": "after", "decay": "none", "num_key_value_heads": 2},
    {"feature_map": "hedgehog", "rope_position": "before", "attention_norm": "denominator", "decay": "none"},
    {"feature_map": "elu", "rope_position": "after", "decay": "learned"},
    {"feature_map": "identity", "rope_position": "after", "decay": "retnet"},
    {"feature_map": "relu", "rope_position": "after", "decay": "gated"},
]
IDS = [f"{fields['feature_map']}-{fields['decay']}" for fields in FIELDS]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain = attention_module.fused_sequence

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return plain(*arguments)

    monkeypatch.setattr(attention_module, "fused_sequence", counted)
    return calls


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("fields", FIELDS, ids=IDS)
def test_logits_and_gradients_with_pads(
    make_model: MakeModel, fused_calls: list[int], fields: dict[str, Any]
) -> None:
    model = make_model(torch.float32, **{**SMALL, **fields}).to(DEVICE)
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long, device=DEVICE)
    mask[1, :2] = 0
    found = {}
    for backend in ("torch", "triton"):
        model.set_backend(backend)
        model.zero_grad()
        logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        logits.square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found[backend] = {"logits": logits.detach(), **gradients}
    assert fused_calls == [1]
    assert found["torch"].keys() == found["triton"].keys()
    for name, want in found["torch"].items():
        assert_close(
            found["triton"][name], want, rtol=1e-4, atol=1e-5 * float(want.abs().max()) + 1e-9, msg=name
        )


@torch.no_grad()
@pytest.mark.parametrize("fields", [FIELDS[0], FIELDS[3], FIELDS[6]], ids=[IDS[0], IDS[3], IDS[6]])
def test_prefill_in_two_parts_goes_on_from_the_state(make_model: MakeModel, fields: dict[str, Any]) -> None:
    model = make_model(torch.float32, **{**SMALL, **fields}).to(DEVICE)
    ids = tokens(1, 7)
    whole = model(ids, use_cache=False).logits
    model.set_backend("triton")
    cache = SupraCache(model.config)
    parts = [
        model(ids[:, part], cache=cache, use_cache=True).logits
        for part in (slice(0, 4), slice(4, 6), slice(6, 7))
    ]
    assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_a_window_keeps_the_general_path(make_model: MakeModel, fused_calls: list[int]) -> None:
    model = make_model(
        torch.float32, **SMALL, feature_map="elu", rope_position="before", attention_norm="denominator", decay="none",
        window=2,
    ).to(DEVICE)  # fmt: skip
    wanted = model(tokens(1, 5), use_cache=False).logits
    model.set_backend("triton")
    assert_close(model(tokens(1, 5), use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    assert fused_calls == []


class Wrapped(torch.nn.Module):
    """What an adapter library makes of a module."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("name", ["feature_map_q", "feature_map_k"])
def test_a_wrapped_map_keeps_the_general_path(
    make_model: MakeModel, fused_calls: list[int], name: str
) -> None:
    model = make_model(torch.float32, **{**SMALL, **FIELDS[0]}).to(DEVICE)
    wanted = model(tokens(1, 5), use_cache=False).logits
    for layer in model.model.layers:
        setattr(layer.self_attn, name, Wrapped(getattr(layer.self_attn, name)))
    model.set_backend("triton")
    assert_close(model(tokens(1, 5), use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    assert fused_calls == []


def test_a_head_too_wide_for_the_norm_keeps_the_general_path(
    make_model: MakeModel, fused_calls: list[int]
) -> None:
    model = make_model(torch.float32, **{**SMALL, **FIELDS[5], "head_dim": 144}).to(DEVICE)
    wanted = model(tokens(1, 3), use_cache=False).logits
    model.set_backend("triton")
    assert_close(model(tokens(1, 3), use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    assert fused_calls == []
