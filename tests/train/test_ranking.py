"""`--keep-softmax auto:N` finds the layer that linear attention cannot replace, says why, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from supra.cli import app
from supra.config import load
from supra.errors import UserError

HARD = 2


@pytest.fixture(scope="module")
def teacher(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers that look at all tokens alike, but one whose attention is sharp."""
    folder = tmp_path_factory.mktemp("ranking") / "teacher"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.weight.mul_(100.0 if index == HARD else 0.0)
            layer.self_attn.k_proj.weight.mul_(10.0)
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tiny: ModuleType, text_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny.raw_recipe(text_file, tiny.stage(), tiny.stage(name="more"))))
    return path


def test_the_layer_that_loses_most_stays_softmax(teacher: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app,
        ["convert", str(teacher), "-o", str(out), "--recipe", str(recipe), "--keep-softmax", "auto:1",
         "--rank-tokens", "512"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    kinds = json.loads((out / "config.json").read_text())["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind != "linear_attention"] == [HARD]
    facts = json.loads((out / "supra.json").read_text())
    ranking = facts["layer_errors"]
    assert ranking[0]["layer"] == HARD and len(ranking) == 4
    errors = [item["error"] for item in ranking]
    assert errors == sorted(errors, reverse=True) and errors[0] > 10 * errors[1] > 0
    assert facts["conversion"]["keep_softmax"] == [HARD]
    assert f"| {HARD} | {errors[0]:.4f} | softmax |" in (out / "README.md").read_text()
    assert "Layers by what they lose" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "recipe.yaml"], (
        "nothing stays beside it"
    )

    # What is printed to run next does run: the recipe is told which layer stayed.
    command = next(line for line in done.output.splitlines() if line.startswith("next: "))
    assert command.endswith("--set 'conversion.keep_softmax=[2]'")
    assert load(str(recipe), ["conversion.keep_softmax=[2]"]).conversion.keep_softmax == (HARD,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-softmax", "auto:4"], r"auto:4: N is no number of layers from 1 to 3"),
        (["--keep-softmax", "auto:x"], r"auto:x: N is no number of layers"),
        (["--keep-softmax", "auto"], r"N is no number of layers"),
        (["--keep-softmax", "auto:1", "--rank-tokens", "63"], r"--rank-tokens 63: less than one step of stage"),
        (["--keep-softmax", "auto:1", "--dry-run"], r"nothing is measured here"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    teacher: Path, recipe: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    arguments = ["convert", str(teacher), "-o", str(tmp_path / "out"), "--recipe", str(recipe), *options]
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def test_a_recipe_without_a_transfer_cannot_rank(
    tiny: ModuleType, teacher: Path, text_file: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    stage = tiny.stage(trainable="all", loss="ce")
    recipe.write_text(yaml.safe_dump(tiny.raw_recipe(text_file, stage)))
    arguments = ["convert", str(teacher), "-o", str(tmp_path / "out"), "--recipe", str(recipe)]
    with pytest.raises(UserError, match="no attention transfer of new parameters"):
        CliRunner().invoke(app, [*arguments, "--keep-softmax", "auto:1"], catch_exceptions=False)
