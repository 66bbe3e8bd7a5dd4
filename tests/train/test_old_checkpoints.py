"""Checkpoints of other days: rotary buffers among the weights, and a tied head that is stored as well."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import supra  # noqa: F401 - registers the architecture
from supra.config import Conversion, Recipe
from supra.convert import execute, make_plan
from supra.train import run_training

BUFFER, HEAD, EMBEDDING = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "lm_head.weight",
    "model.embed_tokens.weight",
)


@pytest.fixture
def converted(tiny: ModuleType, tmp_path: Path) -> Path:
    teacher = tmp_path / "teacher"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0,
        )
    ).save_pretrained(teacher)  # fmt: skip
    tensors = load_file(teacher / "model.safetensors")
    tensors |= {BUFFER: torch.ones(8), HEAD: tensors[EMBEDDING].clone()}
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    tiny.make_tokenizer().save_pretrained(teacher)
    plan = make_plan(str(teacher), Conversion(feature_map="hedgehog", window=4))
    execute(plan, tmp_path / "converted", seed=0, recipe_yaml="")
    return tmp_path / "converted"


@pytest.mark.parametrize("layerwise", [False, True])
def test_they_train_and_a_stored_head_stays_tied(
    tiny: ModuleType, converted: Path, text_file: Path, tmp_path: Path, layerwise: bool
) -> None:
    stages = [tiny.stage(layerwise=layerwise), tiny.stage(name="all", trainable="all", loss="ce")]
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, *stages))
    trained = run_training(recipe, converted, tmp_path / "run")
    stored = {name: x for path in trained.glob("*.safetensors") for name, x in load_file(path).items()}
    before = {name: x for path in converted.glob("*.safetensors") for name, x in load_file(path).items()}
    assert not torch.equal(stored[EMBEDDING], before[EMBEDDING])
    assert torch.equal(stored[HEAD], stored[EMBEDDING])
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert torch.equal(model.lm_head.weight, stored[EMBEDDING])
