"""A grid from recipe to table: its runs (killed and resumed as well), what may share a folder, what is averaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from supra.errors import SupraError, UserError
from supra.recipe_io import parse_as
from supra_eval.extrapolate import report, runner, sweep
from supra_eval.extrapolate.methods import Method, Mixer
from supra_eval.extrapolate.model import Tagger
from supra_eval.extrapolate.recipe import Cell, Extrapolation, load
from supra_eval.extrapolate.runner import run_cell
from supra_eval.grid import CELLS_NAME, RECIPE_NAME, Share

from .conftest import RECIPE

Recipe = Callable[..., Extrapolation]


def quiet(text: str) -> None:
    pass


def test_the_grid_has_every_run_once_and_scalings_share_one(recipe: Recipe) -> None:
    cells = recipe().cells()
    # none and rope by four mixers, alibi by two; rope+yarn is rope's training.
    assert len(cells) == len({cell.key for cell in cells}) == 3 * 2 * (2 * 4 + 2)
    assert recipe().tested(Method.ROPE) == [Method.ROPE, Method.ROPE_YARN]
    assert set(recipe().left_out()) == {"linear x alibi", "linear-gated x alibi"}
    assert recipe("methods=[rope+ntk]").cells() == recipe("methods=[rope]").cells()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("methods=[rpoe]", r"methods\.0 = 'rpoe'.*did you mean `rope`"),
        ("mixers=[softmax, softmax]", "mixers.*named twice: softmax"),
        ("tasks={}", "tasks.*name at least one of chain, recall"),
        ("tasks.recall.pair=3", r"tasks\.recall\.pair = 3: unknown field; did you mean `pairs`"),
        ("tasks.recall.pairs=9", r"tasks\.recall\.keys.*keys do not repeat"),
        ("tasks.passkey.digits=8", "training.*lengths: passkey needs 17 tokens"),
        ("training.lengths=[12, 8]", r"training\.lengths.*least"),
        ("training.tokens_per_step=9", r"training\.tokens_per_step.*at least one sequence"),
        ("training.tokens_per_step=481", r"training\.tokens_per_step.*more than total_tokens"),
        ("encoder.num_heads=3", "methods.*softmax x none with this encoder.*3 heads"),
        ("encoder.feature_map=taylro", r"encoder\.feature_map.*did you mean `taylor`"),
        ("multiples=[0]", r"multiples\.0.*greater than 0"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(recipe: Recipe, override: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"(?s){reason}"):
        recipe(override)


def test_what_makes_no_sense_is_refused_where_nothing_else_is_left(recipe: Recipe) -> None:
    with pytest.raises(UserError, match="nothing is left to run: ALiBi is a decay"):
        recipe("mixers=[linear]", "methods=[alibi]")
    with pytest.raises(UserError, match="xpos reaches 32"):
        recipe("methods=[xpos]", "multiples=[1, 64]")


def test_an_encoder_is_checked_against_all_methods_where_none_are_named() -> None:
    text = RECIPE.replace("methods: [none, alibi, rope, rope+yarn]\n", "")
    assert parse_as(Extrapolation, text, [], name="all").methods == tuple(Method)
    with pytest.raises(UserError, match="linear x xpos with this encoder: xpos scales mapped features"):
        parse_as(Extrapolation, text, ["encoder.feature_map=hedgehog"], name="all")


def test_shipped_recipes_load_and_say_what_they_are() -> None:
    from supra.recipe_io import shipped_folder

    paths = sorted((shipped_folder() / "extrapolate").glob("*.yaml"))
    assert paths
    for path in paths:
        loaded = load(path.stem)
        assert loaded.name == path.stem and loaded.source and loaded.cost and loaded.expected
        assert len(loaded.seeds) >= 3


@pytest.mark.parametrize(("mixer", "method"), [(Mixer.GATED, Method.RANDOM), (Mixer.SOFTMAX, Method.SHIFTED)])
def test_a_killed_run_goes_on_to_the_same_result(
    recipe: Recipe, mixer: Mixer, method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SAVE_SECONDS", -1.0)
    mine, cell = recipe(f"methods=[{method}]"), Cell("recall", mixer, method, 1)
    task = mine.open_task("recall")
    whole = run_cell(mine, cell, task, tmp_path / "whole.state", quiet)
    assert len(whole["losses"]) == mine.training.num_steps == 10
    for stop_after in (0, 2):
        state = tmp_path / f"{stop_after}.state"
        told: list[str] = []

        def kill(text: str, told: list[str] = told, stop_after: int = stop_after) -> None:
            if len(told) == stop_after:
                raise KeyboardInterrupt
            told.append(text)

        with pytest.raises(KeyboardInterrupt):
            run_cell(mine, cell, task, state, kill)
        assert state.exists()
        resumed = run_cell(mine, cell, task, state, quiet)
        assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}


def test_every_run_of_a_seed_sees_the_same_sequences(recipe: Recipe, tmp_path: Path) -> None:
    mine, task = recipe(), recipe().open_task("chain")
    seen: list[list[int]] = []
    for mixer, method in ((Mixer.SOFTMAX, Method.NONE), (Mixer.SUM, Method.ROPE)):
        drawn: list[int] = []

        def draw(rng: Any, rows: int, length: int, drawn: list[int] = drawn) -> Any:
            batch = task.draw(rng, rows, length)
            drawn += [length, *batch.tokens.flatten().tolist()]
            return batch

        watched = type(task)(task.name, task.num_tokens, task.num_classes, task.metric, draw)
        run_cell(mine, Cell("chain", mixer, method, 0), watched, tmp_path / "s", quiet)
        seen.append(drawn)
    assert seen[0] == seen[1] and {8, 12} & set(seen[0])


def test_a_task_is_learned_and_the_test_is_at_every_length(recipe: Recipe, tmp_path: Path) -> None:
    mine = recipe(
        "training.total_tokens=38400", "training.lengths=[6, 6]", "methods=[rope]", "encoder.num_layers=2",
        "test_sequences=100",
    )  # fmt: skip
    task = mine.open_task("recall")
    result = run_cell(mine, Cell("recall", Mixer.SOFTMAX, Method.ROPE, 0), task, tmp_path / "s", quiet)
    tests = result["tests"]["rope"]
    assert list(tests) == ["6", "12", "24"]
    assert tests["6"]["value"] > 80 > 45 > result["baselines"]["6"]["commonest class"] > 33
    assert result["losses"][-1] < 0.5 * result["losses"][0]


def test_a_loss_that_is_not_finite_stops_the_run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Tagger.forward
    monkeypatch.setattr(Tagger, "forward", lambda self, *given: plain(self, *given) * torch.nan)
    cell = Cell("chain", Mixer.SOFTMAX, Method.NONE, 0)
    with pytest.raises(SupraError, match=r"chain-softmax-none-seed0, step 1 of 10.*Lower the learning rate"):
        run_cell(recipe(), cell, recipe().open_task("chain"), tmp_path / "s", quiet)


def test_processes_share_the_grid_and_it_may_grow(recipe: Recipe, tmp_path: Path) -> None:
    little = ("mixers=[softmax, linear]", "tasks={chain: {}}", "methods=[none, rope]", "seeds=[0]")
    done = [sweep.run(recipe(*little), tmp_path, Share(i, 2), quiet) for i in (0, 1)]
    assert sorted(cell.key for part in done for cell in part) == sorted(
        c.key for c in recipe(*little).cells()
    )
    assert sweep.run(recipe(*little), tmp_path, Share(), quiet) == []
    assert not list(tmp_path.rglob("*.state"))
    grown = ("mixers=[softmax]", "tasks={chain: {}, passkey: {digits: 1}}", "methods=[none]", "seeds=[0, 5]")
    more = sweep.run(recipe(*grown), tmp_path, Share(), quiet)
    assert {(cell.task, cell.seed) for cell in more} == {("chain", 5), ("passkey", 0), ("passkey", 5)}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.total_tokens=960", "training"),
        ("multiples=[1]", "multiples"),
        ("tasks.chain.rule=modulo", r"tasks\.chain"),
        ("methods=[rope, rope+ntk]", "methods that test rope"),
    ],
)
def test_a_folder_holds_one_grid(recipe: Recipe, tmp_path: Path, override: str, named: str) -> None:
    little = ("mixers=[softmax]", "tasks={chain: {}}", "methods=[rope]", "seeds=[0]")
    sweep.run(recipe(*little), tmp_path, Share(), quiet)
    with pytest.raises(UserError, match=f"differs in {named}"):
        sweep.run(recipe(*little, override), tmp_path, Share(), quiet)


def test_a_folder_remembers_what_a_smaller_grid_leaves_out(recipe: Recipe, tmp_path: Path) -> None:
    little = ("mixers=[softmax]", "methods=[none]", "seeds=[0]")
    sweep.run(recipe(*little, "tasks={chain: {}, passkey: {digits: 1}}"), tmp_path, Share(), quiet)
    sweep.run(recipe(*little, "tasks={chain: {}}", "seeds=[1]"), tmp_path, Share(), quiet)
    kept = yaml.safe_load((tmp_path / RECIPE_NAME).read_text())
    assert kept["tasks"]["passkey"]["digits"] == 1 and sorted(kept["seeds"]) == [0, 1]
    with pytest.raises(UserError, match=r"differs in tasks\.passkey"):
        sweep.run(recipe(*little, "tasks={passkey: {digits: 2}}"), tmp_path, Share(), quiet)


def test_a_folder_of_another_kind_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / RECIPE_NAME).write_text("name: tiny\nencoder: {}\nmodels: []\n")
    with pytest.raises(UserError, match="differs in encoder, multiples"):
        sweep.run(recipe(), tmp_path, Share(), quiet)


def made_up(mixer: str, seed: int, values: dict[str, float], **more: Any) -> dict[str, Any]:
    tests = {
        length: {
            "value": value,
            "loss": value / 10,
            "by_position": [[8, 2.0, 0.0, 4], [int(length), 1.0, 0.0, 4]],
        }
        for length, value in values.items()
    }
    return {
        "name": "tiny", "task": "chain", "mixer": mixer, "method": "rope", "seed": seed, "metric": "accuracy",
        "train_tokens": 16, "tests": {"rope": tests}, "baselines": {n: {"guessing": 10.0} for n in values}, **more,
    }  # fmt: skip


def keep(folder: Path, *cells: dict[str, Any]) -> Path:
    (folder / CELLS_NAME).mkdir(parents=True)
    for number, cell in enumerate(cells):
        (folder / CELLS_NAME / f"{number}.json").write_text(json.dumps(cell))
    return folder


def test_means_and_deviations_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    linear = [made_up("linear", seed, {"16": v, "1600": v / 2}) for seed, v in enumerate((70.0, 74.0, 78.0))]
    folder = keep(tmp_path / "runs", *linear, made_up("softmax", 0, {"16": 80.0, "1600": 20.0}))
    page = report.write([folder], tmp_path / "out")
    assert page.splitlines()[:5] == [
        "| tiny, chain: accuracy (%), mean ± sd (seeds), trained at up to 16 | 16 (1×) | 1,600 (100×) |",
        "|---|---:|---:|",
        "| softmax · rope | 80.0 (1) | 20.0 (1) |",
        "| linear · rope | 74.0 ± 4.0 (3) | 37.0 ± 2.0 (3) |",
        "| guessing | 10.0 | 10.0 |",
    ]
    assert "| sinusoidal | 20.05 | 43.54 |" in page and "not comparable" in page
    assert (tmp_path / "out/table.md").read_text() == page + "\n"
    assert (tmp_path / "out/loss_by_position.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "out/results.json").read_text())["cells"]) == 4


def test_a_curve_is_by_position_or_of_ends_alone_by_length() -> None:
    (row,) = report.rows_of([made_up("linear", s, {"16": 10.0 * s, "64": 30.0}) for s in (1, 2)])
    assert row.curve() == [(8, 2.0), (64, 1.0)]
    ends = [made_up("linear", s, {"16": 10.0 * s, "64": 30.0}) for s in (1, 2)]
    for cell in ends:
        for length, test in cell["tests"]["rope"].items():
            test["by_position"] = [[int(length), test["loss"], 0.0, 4]]
    (row,) = report.rows_of(ends)
    assert row.curve() == [(16, 1.5), (64, 3.0)]


def test_folders_are_merged_unless_a_run_is_in_both(tmp_path: Path) -> None:
    one = keep(tmp_path / "one", made_up("linear", 0, {"16": 70.0}))
    two = keep(tmp_path / "two", made_up("linear", 1, {"16": 80.0}))
    assert "| linear · rope | 75.0 ± 7.1 (2) |" in report.write([one, two], tmp_path / "out")
    with pytest.raises(UserError, match=r"holds chain, linear, rope, seed 0, as .*one does"):
        report.write([one, keep(tmp_path / "three", made_up("linear", 0, {"16": 1.0}))], tmp_path / "out")


def test_folders_of_one_name_are_merged_if_they_were_trained_alike(recipe: Recipe, tmp_path: Path) -> None:
    little = ("mixers=[softmax]", "tasks={chain: {}}", "methods=[none]")
    for number, more in enumerate(("seeds=[0]", "seeds=[1]", "training.total_tokens=96", "name=other")):
        sweep.run(recipe(*little, "seeds=[2]", more), tmp_path / str(number), Share(), quiet)
    assert "(2) |" in report.write([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    with pytest.raises(UserError, match=r"2 and .*0: are both of tiny and differ in training"):
        report.write([tmp_path / "0", tmp_path / "2"], tmp_path / "out")
    assert "| other, chain" in report.write([tmp_path / "0", tmp_path / "3"], tmp_path / "out")


def test_a_folder_without_runs_and_a_broken_result_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        report.read_cells(tmp_path)
    keep(tmp_path / "runs", {"tests": {"rope": {"16": {"value": 3}}}})
    with pytest.raises(UserError, match=r"0\.json: is no run's result"):
        report.read_cells(tmp_path / "runs")
