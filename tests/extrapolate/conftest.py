"""A grid small enough to be run in seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from supra.recipe_io import parse_as
from supra_eval.extrapolate.recipe import Extrapolation

RECIPE = """
name: tiny
tasks:
  chain: {}
  recall: {pairs: 2, keys: 4, values: 3}
  passkey: {digits: 2, filler: 3}
encoder: {num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 16}
methods: [none, alibi, rope, rope+yarn]
multiples: [1, 2, 4]
test_sequences: 6
seeds: [0, 1]
training:
  lengths: [8, 12]
  total_tokens: 480
  tokens_per_step: 48
  optimizer: {lr: 1e-2, warmup_steps: 1}
"""


@pytest.fixture
def recipe() -> Callable[..., Extrapolation]:
    """The tiny recipe with overrides."""
    return lambda *overrides: parse_as(Extrapolation, RECIPE, list(overrides), name="tiny")
