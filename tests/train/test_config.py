"""Recipes: defaults, overrides, round trip, hash."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from supra import config, recipe_io, recipes
from supra.config import Conversion
from supra.errors import UserError

SHIPPED = sorted(path.stem for path in recipe_io.shipped_folder().glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid_documented_and_round_trip(name: str) -> None:
    recipe = config.load(name)
    assert recipe.name == name
    for field in ("description", "source", "cost", "expected", "command"):
        assert getattr(recipe, field), field
    assert recipe_io.parse(recipe.to_yaml(), [], name=name) == recipe


def test_the_paper_recipe_is_the_paper() -> None:
    recipe = config.load("supra")
    (stage,) = recipe.stages
    optimizer = stage.optimizer
    assert (stage.trainable, stage.loss, stage.length, stage.num_steps) == ("all", "ce", 2048, 9536)
    assert (optimizer.lr, optimizer.betas, optimizer.warmup_steps) == (3e-5, (0.9, 0.95), 1000)
    assert optimizer.lr * optimizer.min_lr_ratio == pytest.approx(1e-5)
    assert recipe.conversion.resolve() == Conversion(feature_map="relu_dense").resolve()


def test_the_sized_paper_recipes_differ_from_the_preset_in_size_alone() -> None:
    preset = config.load("supra")
    free = {"total_tokens", "activation_checkpointing"}
    for name in ("supra-paper-llama2-7b", "supra-paper-mistral-7b", "supra-paper-1b"):
        recipe = config.load(name)
        assert recipe.conversion == preset.conversion
        assert (recipe.data.train, recipe.data.text_field) == (preset.data.train, preset.data.text_field)
        (sized,), (stage,) = recipe.stages, preset.stages
        if name == "supra-paper-1b":
            assert sized.optimizer.lr == 3e-4
            assert sized.optimizer.lr * sized.optimizer.min_lr_ratio == pytest.approx(1e-5)
            sized = sized.model_copy(update={"optimizer": stage.optimizer})
        assert sized.model_dump(exclude=free) == stage.model_dump(exclude=free)


def test_a_length_stage_follows_the_recipe_it_continues() -> None:
    assert config.load("long").conversion == config.load("hedgehog-window").conversion
    # A model that a run wrote is its own teacher: only a loss without one makes sense.
    assert {stage.loss for stage in config.load("long").stages} == {"ce"}


def test_the_variant_that_lolcats_names_is_valid() -> None:
    (first, second) = re.findall(r"--set (\S+)", recipes.show("lolcats-8b"))
    stage = config.load("lolcats-8b", [first, second]).stages[0]
    assert stage.loss == "attention_weights"


def test_config_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['supra']; import supra.recipes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("feature_map", "expected"),
    [
        ("relu_dense", ("after", "group_norm", "alibi")),
        ("relu", ("after", "group_norm", "alibi")),
        ("identity", ("after", "group_norm", "retnet")),
        ("hedgehog", ("before", "denominator", "none")),
        ("t2r", ("before", "denominator", "none")),
        ("elu", ("before", "denominator", "none")),
        ("taylor", ("before", "denominator", "none")),
    ],
)
def test_resolve_fills_the_method_defaults(feature_map: str, expected: tuple[str, str, str]) -> None:
    resolved = Conversion.model_validate({"feature_map": feature_map}).resolve()
    assert (resolved.rope_position, resolved.norm, resolved.decay) == expected
    assert (resolved.window, resolved.decay_shared, resolved.norm_affine) == (0, False, False)
    assert resolved.taylor_dim == (16 if feature_map == "taylor" else None)
    assert resolved.resolve() == resolved


def test_given_values_win_over_defaults() -> None:
    given = Conversion.model_validate(
        {"feature_map": "relu", "norm": "denominator", "rope_position": "before", "decay": "none"}
    )
    resolved = given.resolve()
    assert (resolved.norm, resolved.rope_position, resolved.decay) == ("denominator", "before", "none")


def test_conversion_from_command_line_options() -> None:
    options = {"feature_map": "hedgehog", "window": 32, "keep_softmax": "3, 0", "decay": None}
    conversion, text = config.conversion_from_options(options)
    assert conversion == Conversion(feature_map="hedgehog", window=32, keep_softmax=(3, 0))
    filled = Conversion.model_validate(yaml.safe_load(text)["conversion"])
    assert filled == conversion.resolve()
    with pytest.raises(UserError, match="2 errors"):
        config.conversion_from_options({"feature_map": "hedgehg", "window": -1})


def test_overrides_by_index_by_name_and_into_missing_sections() -> None:
    recipe = config.load(
        "demo",
        [
            "stages.transfer.total_tokens=102_400",
            "stages.1.optimizer.lr=3e-4",
            "stages.distill.lora.rank=4",
            "conversion.decay=learned",
            "seed=7",
        ],
    )
    assert recipe.stages[0].total_tokens == 102_400
    assert recipe.stages[1].optimizer.lr == 3e-4
    assert recipe.stages[1].lora is not None
    assert recipe.stages[1].lora.rank == 4
    assert (recipe.conversion.decay, recipe.seed) == ("learned", 7)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("'1e-3'", 1e-3), ("0.001", 1e-3), ("1E-3", 1e-3)]
)
def test_numbers_in_exponent_notation(text: str, value: float) -> None:
    assert config.load("demo", [f"stages.0.optimizer.lr={text}"]).stages[0].optimizer.lr == value


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert config.load("demo", ["stages.0.total_tokens=1.024e5"]).stages[0].total_tokens == 102_400


def test_hash_covers_decisions_not_prose() -> None:
    plain = config.load("demo")
    assert config.load("demo", ["cost=nothing", "stages.0.checkpoint_every_steps=7"]).hash() == plain.hash()
    assert config.load("demo", ["stages.0.optimizer.lr=2e-2"]).hash() != plain.hash()


def test_recipe_library(tmp_path: Path) -> None:
    listed = {listing.name for listing in recipes.ls()}
    assert listed == set(SHIPPED)
    assert recipes.show("supra").startswith("# The paper")
    assert "decay: alibi" in recipes.show("supra", resolved=True)
    copied = recipes.cp("demo", tmp_path)
    assert recipes.validate(str(copied)) == config.load("demo")
    with pytest.raises(UserError, match="exists already"):
        recipes.cp("demo", copied)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.yaml"]


def test_a_recipe_name_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "supra").mkdir()
    monkeypatch.chdir(tmp_path)
    assert config.load("supra").name == "supra"
