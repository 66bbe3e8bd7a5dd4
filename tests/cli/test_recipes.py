"""`supra recipes` for scripts, and the commands that the shipped recipes give."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from supra import config, recipe_io, recipes
from supra.cli import app
from supra_eval.extrapolate import recipe as extrapolations
from supra_eval.lra import recipe as comparisons

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.stem for path in recipe_io.shipped_folder().glob("*.yaml"))


def test_show_gives_the_recipe_with_every_default() -> None:
    done = CliRunner().invoke(app, ["recipes", "show", "demo", "--json", "--set", "seed=7"])
    shown = json.loads(done.stdout)
    assert shown["seed"] == 7
    # Only `taylor` has dimensions to choose, and the positions stay the teacher's.
    assert [field for field, value in shown["conversion"].items() if value is None] == ["taylor_dim", "rope"]
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


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipes_command_can_be_given(name: str, parse: Any) -> None:
    recipe = config.load(name)
    if recipe.command.startswith("make "):
        target = recipe.command.removeprefix("make ")
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return
    (first, convert), *trainings = [parse(shlex.split(part)) for part in recipe.command.split(" && ")]
    assert (first, trainings[-1][1]["recipe"]) == ("convert", name)
    converted = config.load(convert["recipe"]).conversion.resolve()
    model = convert["out"]
    for command, options in trainings:
        trained = config.load(options["recipe"], options["overrides"])
        assert (command, options["model"]) == ("train", model)
        assert trained.conversion.resolve() == converted
        model = options["out"] / "model"
    assert ("torchrun" in recipe.command) >= (recipe.strategy == "fsdp2"), "it refuses a single process"


@pytest.mark.parametrize(
    "path", sorted((recipe_io.shipped_folder() / "lra").glob("*.yaml")), ids=lambda p: p.stem
)
def test_a_comparisons_command_can_be_given(path: Path, parse: Any) -> None:
    comparison = comparisons.load(path)
    (run, options), (report, reported) = [
        parse(shlex.split(part)) for part in comparison.command.split(" && ")
    ]
    assert (run, report) == ("lra run", "lra report")
    assert options["recipe"] == path.stem and reported["folders"] == [options["out"]]


@pytest.mark.parametrize(
    "path", sorted((recipe_io.shipped_folder() / "extrapolate").glob("*.yaml")), ids=lambda p: p.stem
)
def test_an_extrapolations_command_can_be_given(path: Path, parse: Any) -> None:
    words = shlex.split(extrapolations.load(path).command)
    command, options = parse(words[words.index("torchrun") :])
    assert (command, options["recipe"]) == ("extrapolate", path.stem)


def test_computed_hours_are_not_passed_off_as_measured() -> None:
    for listing in recipes.ls():
        if "H100-hours" in listing.cost:
            assert "computed, not measured" in listing.cost, listing.name
            assert "Ours: not run" in config.load(listing.name).expected, listing.name
