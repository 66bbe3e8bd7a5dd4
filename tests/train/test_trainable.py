"""What a stage trains: names chosen by kind and pattern, and what that leaves untouched."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from supra.config import Lora, Recipe, Stage
from supra.errors import UserError
from supra.models import SupraForCausalLM, is_new_parameter
from supra.train.trainable import adapter_names, check_trainable, enter_stage
from supra.train.trainer import run_training


@pytest.fixture
def student(tiny: ModuleType) -> SupraForCausalLM:
    return SupraForCausalLM(tiny.tiny_config(tie_word_embeddings=False))


def make_stage(tiny: ModuleType, **changes: Any) -> Stage:
    return Stage.model_validate(tiny.stage(**{"loss": "ce", **changes}))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {"trainable": "all", "freeze": ["*.mlp.*", "*embed*"]},
            lambda n: "mlp" not in n and "embed" not in n,
        ),
        (
            {"trainable": "all", "train_only": ["model.layers.[1-9].*"]},
            lambda n: n.startswith("model.layers.1."),
        ),
        (
            {"trainable": "all", "train_only": ["*.self_attn.*"], "freeze": ["*.layers.0.*", "*.o_proj.*"]},
            lambda n: n.startswith("model.layers.1.self_attn.") and "o_proj" not in n,
        ),
        ({"trainable": "new", "freeze": ["*.window_mix.*"]}, lambda n: "feature_map" in n),
        (
            {"trainable": "adapters", "train_only": ["*.q_proj.*", "*.feature_map_q.*"]},
            lambda n: "q_proj.lora_" in n or "feature_map_q" in n,
        ),
        ({"trainable": "all", "train_only": ["lm_head.*"]}, lambda n: n == "lm_head.weight"),
    ],
)
def test_patterns_choose_among_the_parameters_of_the_kind(
    tiny: ModuleType, student: SupraForCausalLM, changes: dict[str, Any], wanted: Any
) -> None:
    stage = make_stage(tiny, **changes)
    check_trainable(stage, student)
    entered = enter_stage(stage, student, None, seed=0)
    expected = {name for name, _ in student.named_parameters() if wanted(name)}
    if stage.trainable == "adapters":
        expected = {name for name in expected if ".lora_" in name or is_new_parameter(name)}
    assert set(entered.parameters) == expected
    assert {name for name, p in student.named_parameters() if p.requires_grad} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"trainable": "all", "freeze": ["model.layer.0.*"]},
            ["stages.transfer.freeze = model.layer.0.*", "no parameter of trainable: all", "model.layers.0."],
        ),
        (
            {"trainable": "new", "train_only": ["*.q_proj.*"]},
            ["stages.transfer.train_only = *.q_proj.*", "trainable: new", "feature_map_q"],
        ),
        ({"trainable": "adapters", "freeze": ["*.gate_proj.*"]}, ["freeze = *.gate_proj.*", ".lora_"]),
        ({"trainable": "new", "freeze": ["*"]}, ["stages.transfer", "leave nothing to train"]),
    ],
)
def test_a_pattern_that_chooses_nothing_is_an_error(
    tiny: ModuleType, student: SupraForCausalLM, changes: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        check_trainable(make_stage(tiny, **changes), student)
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize("dora", [False, True])
def test_the_names_of_adapters_are_known_before_they_exist(
    tiny: ModuleType, student: SupraForCausalLM, dora: bool
) -> None:
    lora = Lora(targets=("q_proj", "o_proj", "gate_proj", "down_proj"), dora=dora)
    foreseen = adapter_names(lora, student)
    stage = make_stage(tiny, trainable="adapters", train_new=False, lora=lora.model_dump())
    assert sorted(foreseen) == sorted(enter_stage(stage, student, None, seed=0).parameters)


def test_frozen_weights_come_out_as_they_went_in(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    stage = tiny.stage(trainable="all", loss="kl", freeze=["*.mlp.*", "*embed*", "*.layers.0.*"])
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, stage))
    out = run_training(recipe, model_dir, tmp_path / "run")
    before, after = (load_file(folder / "model.safetensors") for folder in (model_dir, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if n.startswith("model.layers.1.") and "mlp" not in n} | {
        "model.norm.weight"
    }


def test_a_head_may_train_alone(tiny: ModuleType, tmp_path: Path, text_file: Path) -> None:
    source = tiny.write_model(tmp_path / "untied", tie_word_embeddings=False)
    stage = tiny.stage(trainable="all", loss="ce", train_only=["lm_head.*"])
    out = run_training(Recipe.model_validate(tiny.raw_recipe(text_file, stage)), source, tmp_path / "run")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"lm_head.weight"}
