"""The teacher that training compares with is the one that was converted, sliding windows included."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from supra.config import Conversion, Recipe
from supra.convert import execute, make_plan
from supra.loading import load_model
from supra.train.teacher import build_teacher
from supra.train.trainer import run_training

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEACHERS = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "qwen2-mixed": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
}


@pytest.mark.parametrize("kind", TEACHERS)
def test_rebuilt_teacher_equals_the_source_past_its_sliding_window(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    TEACHERS[kind]().save_pretrained(tmp_path / "teacher")
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    plan = make_plan(str(tmp_path / "teacher"), Conversion(feature_map="hedgehog", window=4))
    execute(plan, tmp_path / "student", seed=0, recipe_yaml="conversion: {}\n")
    student = load_model(tmp_path / "student", tokenizer=False).model
    assert student.config.num_linear_layers == 3
    ids = torch.randint(0, 64, (2, 20))
    with torch.no_grad():
        assert torch.equal(build_teacher(student)(ids).logits, source(ids).logits)


def test_a_teacher_that_an_earlier_run_moved_is_named(
    tiny: ModuleType, model_dir: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, model: Path, **changes: Any) -> tuple[Path, str]:
        recipe = Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(name=name, **changes)))
        out = run_training(recipe, model, tmp_path / name)
        return out, capsys.readouterr().err

    transferred, said = train("transfer", model_dir)
    assert "warning" not in said
    distilled, said = train(
        "distill", transferred, trainable="adapters", loss="kl"
    )  # only new weights had moved
    assert "warning" not in said
    _, said = train("again", distilled, trainable="adapters", loss="kl")
    assert "the teacher of again is" in said and "has moved its weights in distill" in said
    _, said = train("longer", distilled, trainable="adapters", loss="ce")  # has no teacher
    assert "warning" not in said
