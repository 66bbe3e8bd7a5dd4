"""A comparison from recipe to table: its grid, its runs (killed and resumed as well), its means and deviations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from supra.errors import SupraError, UserError
from supra.recipe_io import parse_as
from supra_eval import grid
from supra_eval.grid import CELLS_NAME, Share
from supra_eval.lra import phase, report, runner, sweep
from supra_eval.lra.models.encoder import Encoder
from supra_eval.lra.models.heads import Classifier
from supra_eval.lra.recipe import Cell, Comparison, load
from supra_eval.lra.runner import nested_share, run_cell
from supra_eval.lra.task import Examples, Task

RECIPE = """
name: tiny
task: {name: made-up}
encoder: {num_layers: 1, hidden_size: 16, intermediate_size: 16, num_heads: 2}
models:
  - {name: softmax, encoder: {mixer: softmax}}
  - {name: linear, encoder: {mixer: linear}}
modes: [scratch, masked, causal]
shares: [0.5]
seeds: [0, 1]
training: {epochs: 4, batch_size: 8, optimizer: {lr: 5e-3, warmup_steps: 1}}
"""


def recipe(*overrides: str) -> Comparison:
    return parse_as(Comparison, RECIPE, list(overrides), name="tiny")


def examples(count: int, seed: int, second: bool = False) -> Examples:
    """The class is whether token 8 occurs."""
    random = np.random.default_rng(seed)
    inputs = random.integers(1, 9, (count, 6))
    lengths = random.integers(3, 7, count)
    inputs[np.arange(6) >= lengths[:, None]] = 0
    other = examples(count, seed + 100) if second else None
    return Examples(inputs, (inputs == 8).any(1).astype(np.int64), lengths, other)


def task(second: bool = False) -> Task:
    return Task("made-up", 2, 9, 1, *(examples(n, seed, second) for seed, n in enumerate((64, 16, 40))))


def quiet(text: str) -> None:
    pass


def test_the_grid_has_every_run_once_and_scratch_needs_no_share() -> None:
    cells = recipe("shares=[0.25,0.5]", "fractions=[0.5,1]").cells()
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 2 * 2 * (1 + 2 + 2)
    assert {cell.share for cell in cells if cell.mode == "scratch"} == {0.0}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("models.softmax.encoder.mixer=hyena", "mixer"),
        ("models.linear.encoder.depth=3", "depth"),
        ("modes=[scratch,scratch]", "named twice: scratch"),
        ("shares=[0.05]", "leave none for a part with share 0.05"),
        ("training.epoch=3", "did you mean `epochs`"),
        ("encoder={}", "softmax: num_layers"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(override: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        recipe(override)


def test_shipped_recipes_load_and_their_encoders_can_be_built() -> None:
    from supra.recipe_io import shipped_folder

    paths = sorted((shipped_folder() / "lra").glob("*.yaml"))
    assert paths
    for path in paths:
        comparison = load(path.stem)
        assert comparison.name == path.stem and comparison.source and comparison.cost and comparison.command
        for cell in comparison.cells():
            Encoder(comparison.encoder_of(cell, num_tokens=None, channels=1))


def test_one_epoch_is_enough_where_nothing_is_pretrained() -> None:
    assert recipe("training.epochs=1", "modes=[scratch]").training.epochs == 1
    with pytest.raises(UserError, match=r"leave none for a part with share 0\.5"):
        recipe("training.epochs=1", "modes=[scratch, masked]")


@pytest.mark.parametrize("budget", ["tied", "extra"])
def test_the_budget_is_what_the_protocol_says(budget: str) -> None:
    training = recipe(f"training.budget={budget}").training
    before, after = training.epochs_of(Cell("softmax", "masked", 0.5, 1.0, 0))
    assert (before, after) == ((2, 2) if budget == "tied" else (2, 4))
    assert training.epochs_of(Cell("softmax", "scratch", 0.0, 1.0, 0)) == (0, 4)


def test_smaller_fractions_lie_in_larger_ones() -> None:
    train = examples(50, 0)
    parts = [nested_share(train, Cell("softmax", "scratch", 0.0, f, 3)) for f in (0.1, 0.5, 1.0)]
    assert [len(part) for part in parts] == [5, 25, 50]
    rows = [{row.tobytes() for row in part.inputs} for part in parts]
    assert rows[0] < rows[1] < rows[2]


@pytest.mark.parametrize("mode", ["scratch", "masked", "causal"])
def test_a_killed_run_goes_on_to_the_same_result(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SAVE_SECONDS", 0.0)
    comparison, cell = recipe(), Cell("linear", mode, 0.0 if mode == "scratch" else 0.5, 1.0, 1)
    whole = run_cell(comparison, cell, task(), tmp_path / "whole.state", quiet)
    for stop_after in (1, 3):
        state = tmp_path / f"{stop_after}.state"
        told: list[str] = []

        def kill(text: str, told: list[str] = told, stop_after: int = stop_after) -> None:
            if len(told) == stop_after:
                raise KeyboardInterrupt
            told.append(text)

        with pytest.raises(KeyboardInterrupt):
            run_cell(comparison, cell, task(), state, kill)
        resumed = run_cell(comparison, cell, task(), state, quiet)
        assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}


def test_pretraining_moves_what_is_fine_tuned_and_the_task_is_learned(tmp_path: Path) -> None:
    comparison = recipe("training.epochs=30")
    masked = run_cell(comparison, Cell("softmax", "masked", 0.5, 1.0, 0), task(), tmp_path / "a", quiet)
    scratch = run_cell(comparison, Cell("softmax", "scratch", 0.0, 1.0, 0), task(), tmp_path / "b", quiet)
    assert masked["pretrain_epochs"] == masked["epochs"] == 15 and scratch["epochs"] == 30
    assert masked["curves"]["task"]["loss"][0] != scratch["curves"]["task"]["loss"][0]
    pretraining = masked["curves"]["pretraining"]["loss"]
    assert pretraining[-1] < pretraining[0] < 2 * np.log(9)
    assert scratch["test_accuracy"] > 0.9


def test_pairs_are_read_by_two_towers_and_both_are_pretrained_on(tmp_path: Path) -> None:
    comparison = recipe("encoder.two_towers=true", "training.epochs=2")
    result = run_cell(
        comparison, Cell("softmax", "masked", 0.5, 1.0, 0), task(second=True), tmp_path / "s", quiet
    )
    assert 0 <= result["test_accuracy"] <= 1


def test_the_test_split_decides_nothing(tmp_path: Path) -> None:
    mine, cell = task(), Cell("linear", "masked", 0.5, 1.0, 0)
    other = Task(mine.name, 2, 9, 1, mine.train, mine.validation, examples(40, 77))
    one, two = (run_cell(recipe(), cell, t, tmp_path / "s", quiet) for t in (mine, other))
    assert one["curves"] == two["curves"] and one["best_epoch"] == two["best_epoch"]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Classifier, "forward", lambda self, *inputs: self.head[0].weight.sum() * torch.full((8, 2), np.nan)
    )
    with pytest.raises(SupraError, match="Lower the learning rate"):
        run_cell(recipe(), Cell("softmax", "scratch", 0.0, 1.0, 0), task(), tmp_path / "s", quiet)


def test_processes_share_the_grid_and_nothing_runs_twice(tmp_path: Path) -> None:
    comparison = recipe("training.epochs=2")
    done = [sweep.run(comparison, task(), {}, tmp_path, Share(i, 2), quiet) for i in (0, 1)]
    assert sorted(cell.key for part in done for cell in part) == sorted(c.key for c in comparison.cells())
    assert sweep.run(comparison, task(), {}, tmp_path, Share(), quiet) == []
    assert not list(tmp_path.rglob("*.state"))
    more = sweep.run(recipe("training.epochs=2", "seeds=[0,1,2]"), task(), {}, tmp_path, Share(), quiet)
    assert {cell.seed for cell in more} == {2}


@pytest.mark.parametrize("override", ["training.epochs=6", "models.linear.encoder.decay=none", "task.seed=4"])
def test_a_folder_holds_one_comparison(tmp_path: Path, override: str) -> None:
    comparison = recipe("training.epochs=2", "seeds=[0]", "models=[{name: linear, encoder: {mixer: linear}}]")
    sweep.run(comparison, task(), {}, tmp_path, Share(), quiet)
    changed = parse_as(Comparison, (tmp_path / "recipe.yaml").read_text(), [override], name="changed")
    with pytest.raises(UserError, match=override.rpartition(".")[0].split(".")[0]):
        sweep.run(changed, task(), {}, tmp_path, Share(), quiet)


def cell_result(mode: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "comparison": "tiny", "task": "made-up", "model": "linear", "mode": mode, "fraction": 1.0, "seed": seed,
        "share": 0.0 if mode == "scratch" else 0.4, "test_accuracy": accuracy,
        "baselines": {"majority class": 0.1}, **more,
    }  # fmt: skip


def test_means_and_deviations_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    cells = [cell_result("scratch", seed, a) for seed, a in enumerate((0.70, 0.74, 0.78))]
    cells.append(cell_result("masked", 0, 0.8))
    (tmp_path / "run" / CELLS_NAME).mkdir(parents=True)
    for number, cell in enumerate(cells):
        (tmp_path / "run" / CELLS_NAME / f"{number}.json").write_text(json.dumps(cell))
    table = report.write([tmp_path / "run"], tmp_path / "out")
    assert table.splitlines() == [
        "| tiny: test accuracy, mean ± sd (seeds) | scratch | masked SPT |",
        "|---|---:|---:|",
        "| linear | 74.0 ± 4.0 (3) | 80.0 (1) |",
        "| majority class | 10.0 | |",
    ]
    assert (tmp_path / "out/table.md").read_text() == table + "\n"
    assert (tmp_path / "out/accuracy.png").stat().st_size > 1000
    assert len(json.loads((tmp_path / "out/results.json").read_text())["cells"]) == 4


def test_a_folder_without_runs_and_a_broken_result_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        report.read_cells(tmp_path)
    (tmp_path / CELLS_NAME).mkdir()
    (tmp_path / CELLS_NAME / "a.json").write_text("{}")
    with pytest.raises(UserError, match=r"a\.json: is no run's result"):
        report.read_cells(tmp_path)


def test_an_epoch_reads_every_example_once() -> None:
    seen: list[int] = []

    def loss(batch: Examples, random: torch.Generator) -> torch.Tensor:
        seen.extend(batch.labels.tolist())
        return module.weight.sum()

    module = torch.nn.Linear(2, 2)
    numbered = Examples(np.zeros((21, 3), int), np.arange(21), np.full(21, 3))
    settings = recipe().training.optimizer
    one = phase.Phase("p", module, loss, lambda: 0.0, epochs=1, batch_size=8, optimizer=settings, seed=0)
    one.run_epoch(numbered)
    assert sorted(seen) == list(range(21)) and one.is_finished


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tpu"])
def test_a_device_that_is_not_here_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda:1")
    with pytest.raises(UserError, match=f"device '{device}'"):
        grid.open_processes(device)


def test_a_run_reads_its_batches_where_its_weights_are() -> None:
    """Tensors of shape and place alone: a batch that stayed on the CPU would not meet them."""
    cell, own = Cell("softmax", "masked", 0.5, 1.0, 0), task(second=False)
    config = recipe().encoder_of(cell, num_tokens=own.num_tokens, channels=1)
    classifier = Classifier(Encoder(config), own.num_classes).to("meta")
    assert runner._logits(classifier, own.train[:4]).device.type == "meta"
