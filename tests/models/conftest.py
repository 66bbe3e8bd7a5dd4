"""Tiny random models of every kind of linear layer, in fp64 so that equalities are sharp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from supra.models import SupraConfig, SupraForCausalLM

DENOMINATOR = {"rope_position": "before", "attention_norm": "denominator"}
# Every feature map with every decay, normalisation and window that has a meaning with it.
VARIANTS: dict[str, dict] = {
    "supra": {},
    "supra-shared-decay": {"decay_shared": True, "group_norm_affine": True},
    "relu-retnet": {"feature_map": "relu", "decay": "retnet"},
    "relu-learned": {"feature_map": "relu", "decay": "learned"},
    "relu-rope-before": {"feature_map": "relu", "rope_position": "before", "decay": "none"},
    "identity": {"feature_map": "identity", "decay": "retnet", "decay_shared": True},
    "elu-denominator": {"feature_map": "elu", **DENOMINATOR, "decay": "none"},
    "t2r": {"feature_map": "t2r", **DENOMINATOR, "decay": "none"},
    "t2r-window-decay": {
        "feature_map": "t2r", **DENOMINATOR, "decay": "alibi", "window": 3,
    },
    "hedgehog": {"feature_map": "hedgehog", **DENOMINATOR, "decay": "none"},
    "hedgehog-group-norm-rope-after": {"feature_map": "hedgehog", "decay": "alibi"},
    "hedgehog-window": {
        "feature_map": "hedgehog", **DENOMINATOR, "decay": "none", "window": 4,
    },
    "hedgehog-window-learned-decay": {
        "feature_map": "hedgehog", **DENOMINATOR, "decay": "learned",
        "decay_shared": True, "window": 5,
    },
    "relu-gated": {"feature_map": "relu", "decay": "gated"},
    "hedgehog-window-gated-shared": {
        "feature_map": "hedgehog", **DENOMINATOR, "decay": "gated", "decay_shared": True, "window": 4,
    },
    "taylor": {"feature_map": "taylor", "taylor_dim": 6, **DENOMINATOR, "decay": "none"},
    "taylor-window-sinks-gated": {
        "feature_map": "taylor", "taylor_dim": 4, **DENOMINATOR, "decay": "gated", "window": 3, "num_sink_tokens": 2,
    },
    "sinks": {
        "feature_map": "hedgehog", **DENOMINATOR, "decay": "none", "window": 3,
        "num_sink_tokens": 2,
    },
    "sinks-decay-hybrid": {
        "feature_map": "t2r", **DENOMINATOR, "decay": "retnet", "window": 4,
        "num_sink_tokens": 1, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "hybrid": {
        "feature_map": "hedgehog", **DENOMINATOR, "decay": "none", "window": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "hybrid-sliding-qk-norm": {
        "layer_types": ["sliding_attention", "linear_attention", "full_attention"], "sliding_window": 6,
        "qk_norm": True, "attention_bias": True, "head_dim": 24,
    },
    "all-softmax": {"layer_types": ["full_attention"] * 3},
}  # fmt: skip


def tiny_config(**fields) -> SupraConfig:
    """A 3-layer GQA model of 48 dimensions."""
    base = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=96, tie_word_embeddings=True, attention_output_bias=False,
    )  # fmt: skip
    return SupraConfig(**{**base, **fields})


def tiny_model(dtype: torch.dtype = torch.float64, **fields) -> SupraForCausalLM:
    """The model in eval mode with weights large enough that attention matters."""
    torch.manual_seed(0)
    config = tiny_config(**fields)
    model = SupraForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(4)
            if any(part in name for part in ("feature_map", "window_mix", "decay")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(params=VARIANTS, scope="module")
def model(request: pytest.FixtureRequest) -> SupraForCausalLM:
    return tiny_model(**VARIANTS[request.param])


@pytest.fixture
def make_model() -> Callable[..., SupraForCausalLM]:
    return tiny_model
