"""`supra recipes` for scripts: what it prints with --json, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supra import config
from supra.cli import app


def test_show_gives_the_recipe_with_every_default() -> None:
    done = CliRunner().invoke(app, ["recipes", "show", "demo", "--json", "--set", "seed=7"])
    shown = json.loads(done.stdout)
    assert shown["seed"] == 7
    left_open = {field for field, value in shown["conversion"].items() if value is None}
    assert left_open == {"taylor_dim"}, "only the option of another feature map"
    recipe = config.load("demo", ["seed=7"])
    assert config.Recipe.model_validate(shown).stages == recipe.stages


def test_validate_lists_every_problem(tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["recipes", "validate", "demo", "--json"])
    assert good.exit_code == 0
    hashed = config.load("demo").hash()
    assert json.loads(good.stdout) == {"recipe": "demo", "valid": True, "problems": [], "hash": hashed}
    wrong = ["--set", "stages.0.optimizer.lr=-1", "--set", "sed=1"]
    bad = CliRunner().invoke(app, ["recipes", "validate", "demo", "--json", *wrong])
    assert bad.exit_code == 2
    found = json.loads(bad.stdout)
    assert not found["valid"]
    problems = {problem["path"]: problem for problem in found["problems"]}
    assert problems.keys() == {"stages.transfer.optimizer.lr", "sed"}
    assert problems["stages.transfer.optimizer.lr"]["value"] == "-1"
    assert "greater than 0" in problems["stages.transfer.optimizer.lr"]["reason"]
    assert "did you mean `seed`" in problems["sed"]["reason"]


@pytest.mark.parametrize("text", [None, "a: [", "[1]"])
def test_what_is_no_recipe_is_one_problem(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(app, ["recipes", "validate", str(path), "--json"])
    assert done.exit_code == 2
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["reason"]
