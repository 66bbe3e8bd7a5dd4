"""The configuration refuses what has no meaning, by name, and survives a round trip."""

from __future__ import annotations

import json

import pytest
import torch

from supra.models import SupraConfig, SupraForCausalLM, init_new_tensors, is_new_parameter
from supra.models.configuration_supra import kv_cache_bytes, recurrent_state_bytes
from supra.models.decay import alibi_slopes, fixed_log_decay

LLAMA2_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
MISTRAL_7B = {**LLAMA2_7B, "num_key_value_heads": 8}


@pytest.mark.parametrize(("shape", "expected"), [(LLAMA2_7B, 537_001_984), (MISTRAL_7B, 570_589_184)])
def test_paper_preset_adds_the_papers_parameters(shape: dict[str, int], expected: int) -> None:
    config = SupraConfig(vocab_size=64, intermediate_size=64, **shape)
    with torch.device("meta"):
        model = SupraForCausalLM(config)
    added = sum(p.numel() for name, p in model.named_parameters() if is_new_parameter(name))
    assert added == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"feature_map": "hedgehg"}, "feature_map"),
        ({"decay": "alibbi"}, "decay"),
        ({"rope_position": "middle"}, "rope_position"),
        ({"attention_norm": "layer"}, "attention_norm"),
        ({"layer_types": ["linear_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"]}, "layer"),
        ({"window": -1}, "window"),
        ({"window": 8}, "window"),
        ({"attention_norm": "denominator"}, "rope_position"),
        (
            {"attention_norm": "denominator", "feature_map": "identity", "rope_position": "before"},
            "feature map",
        ),
        ({"featuremap": "hedgehog"}, "feature_map"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ],
)
def test_meaningless_configurations_are_refused_by_name(fields: dict, named: str) -> None:
    base = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(Exception, match=named):
        SupraConfig(**{**base, **fields})


def test_configuration_survives_json(tmp_path) -> None:
    config = SupraConfig(
        num_hidden_layers=2, feature_map="hedgehog", rope_position="before", attention_norm="denominator", window=8,
        decay="none", layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    again = SupraConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "supra"


@pytest.mark.parametrize("heads", [1, 3, 9, 12, 24, 32, 40])
def test_decays_forget_and_are_distinct_for_any_number_of_heads(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert len(slopes) == heads
    assert len(set(slopes)) == heads
    for kind in ("alibi", "retnet"):
        log_decay = fixed_log_decay(kind, heads)
        assert log_decay.shape == (heads,)
        assert bool((log_decay < 0).all()), "every head forgets"
        assert bool((log_decay.float() < 0).all()), "also after rounding to fp32"


def test_alibi_slopes_of_a_power_of_two_are_the_papers() -> None:
    assert alibi_slopes(8) == pytest.approx([2 ** -(h + 1) for h in range(8)])


def test_new_tensors_depend_on_seed_and_name_only() -> None:
    config = SupraConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=8
    )
    first, again = (
        dict(init_new_tensors(config, 0, torch.float32)),
        dict(init_new_tensors(config, 0, torch.float32)),
    )
    other = dict(init_new_tensors(config, 1, torch.float32))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert len({tensor.flatten()[0].item() for tensor in first.values()}) == len(first), (
        "no two tensors alike"
    )


def test_state_bytes_do_not_grow_and_cache_bytes_do() -> None:
    config = SupraConfig(**MISTRAL_7B)
    assert recurrent_state_bytes(config) == 32 * 32 * 128 * 128 * 4
    assert kv_cache_bytes(config, 4096) * 8 == kv_cache_bytes(config, 32768)
