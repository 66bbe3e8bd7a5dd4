"""Positions that skip turn RoPE alone: window, sinks, decay, sliding windows and documents go by the count of tokens.

The reference is the same model with its frequencies divided by 4, which reads positions 0, 4, 8, … as another reads
0, 1, 2, ….
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from supra.models import SupraCache, SupraConfig, SupraForCausalLM
from supra.models.packing import places_of_rising, positions_from_boundaries

STRETCH = 4
WINDOW = {
    "feature_map": "hedgehog", "rope_position": "before", "attention_norm": "denominator", "decay": "learned",
    "window": 3, "num_sink_tokens": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "window and sinks": WINDOW,
    "gated": {**WINDOW, "decay": "gated"},
    "paper": {"feature_map": "relu_dense", "rope_position": "after", "decay": "alibi"},
    "hybrid": {**WINDOW, "layer_types": ["full_attention", "linear_attention"]},
    "sliding hybrid": {
        **WINDOW,
        "layer_types": ["linear_attention", "sliding_attention"],
        "sliding_window": 5,
    },
    "softmax": {"layer_types": ["full_attention", "full_attention"]},
    "sliding softmax": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
}
BOUNDS = torch.tensor([0, 5, 6, 20, 33, 40])  # of documents in two rows of 20 tokens


def pair(options: dict[str, Any]) -> tuple[SupraForCausalLM, SupraForCausalLM]:
    """A model, and the same weights with RoPE interpolated linearly."""
    config = SupraConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None, **options,
    )  # fmt: skip
    stretched = copy.deepcopy(config)
    stretched.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": float(STRETCH)}
    torch.manual_seed(0)
    plain = SupraForCausalLM(config).eval()
    other = SupraForCausalLM(stretched).eval()
    other.load_state_dict(plain.state_dict())
    return plain, other


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_rows(name: str, ids: torch.Tensor) -> None:
    plain, stretched = pair(MODELS[name])
    skipping = STRETCH * torch.arange(20).unsqueeze(0)
    expected = plain(ids, use_cache=False).logits  # with a cache, transformers looks for no documents
    torch.testing.assert_close(stretched(ids, position_ids=skipping, use_cache=False).logits, expected)
    assert not torch.allclose(stretched(ids).logits, expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_packed_documents(name: str, ids: torch.Tensor) -> None:
    plain, stretched = pair(MODELS[name])
    skipping = STRETCH * positions_from_boundaries(BOUNDS, 2, 20)
    expected = plain(ids, cu_seqlens=BOUNDS).logits
    torch.testing.assert_close(stretched(ids, cu_seqlens=BOUNDS, position_ids=skipping).logits, expected)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_with_a_cache_and_pads(name: str, ids: torch.Tensor) -> None:
    plain, stretched = pair(MODELS[name])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    skipping = STRETCH * (mask.cumsum(1) - 1).clamp(min=0)
    expected = plain(ids, attention_mask=mask, position_ids=skipping // STRETCH).logits
    cache = SupraCache(stretched.config)
    parts = [
        stretched(
            ids[:, a:b],
            attention_mask=mask[:, :b],
            position_ids=skipping[:, a:b],
            cache=cache,
            use_cache=True,
        )
        for a, b in ((0, 12), (12, 13), (13, 20))
    ]
    found = torch.cat([part.logits for part in parts], dim=1)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


def test_a_fall_begins_a_run_and_a_jump_does_not() -> None:
    positions = torch.tensor([[0, 1, 9, 10, 0, 5, 5, 6], [3, 4, 5, 6, 7, 80, 81, 82]])
    assert places_of_rising(positions).tolist() == [[0, 1, 2, 3, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert places_of_rising(torch.zeros(2, 1, dtype=torch.int64)).tolist() == [[0], [0]]
