"""Mixtures: shares kept by every prefix, epochs kept by every component, and a run on two texts."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supra import recipe_io
from supra.config import Data, Recipe
from supra.errors import UserError
from supra.train.data import PackedData
from supra.train.mixture import MixedData, Mixture
from supra.train.plan import dry_run
from supra.train.tokens import TokenStore
from supra.train.tracking import read_metrics
from supra.train.trainer import run_training

WEIGHTS = st.one_of(st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.7, 2.5, 1e-2]))


def store_of(num_tokens: int, first: int = 0) -> TokenStore:
    """One document in which every token is different."""
    tokens = np.arange(first, first + num_tokens, dtype=np.uint32)
    return TokenStore(tokens, np.array([0, num_tokens]), "key")


def data_of(weights: list[float]) -> Data:
    return Data.model_validate({"mixture": [{"train": ["a.txt"], "weight": weight} for weight in weights]})


@settings(deadline=None, max_examples=30)
@given(weights=st.lists(WEIGHTS, min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_every_prefix_has_its_shares_and_no_sequence_comes_twice_in_an_epoch(
    weights: list[float], seed: int
) -> None:
    shares, length = data_of(weights).shares(), 4
    sizes = [5 * length + 3 * index for index in range(len(weights))]
    stores = tuple(store_of(size, 1000 * index) for index, size in enumerate(sizes))
    data = MixedData(Mixture(stores, shares), length=length, seed=seed)
    batch = data.batch(0, 300)
    component = np.array([ids[0] for ids in batch.sequence_ids])
    assert (batch.input_ids.numpy() // 1000 == component[:, None]).all(), "the tokens are the component's"
    counts = (component[:, None] == np.arange(len(weights))).cumsum(axis=0)
    wanted = np.arange(1, 301)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - wanted).max() <= max(0.0, 1 - 1 / max(1, 2 * len(weights) - 2)) + 1e-9
    for index, part in enumerate(data.parts):
        drawn = [ids[1:] for ids in batch.sequence_ids if ids[0] == index]
        assert [epoch for epoch, _ in drawn] == [n // part.num_sequences for n in range(len(drawn))]
        assert len(set(drawn)) == len(drawn)


def test_a_sequence_is_a_function_of_its_number_alone() -> None:
    mixture = Mixture((store_of(100), store_of(60, 1000)), (3, 2))
    one, two = (MixedData(mixture, length=8, seed=5) for _ in range(2))
    two.batch(90, 3)
    assert one.batch(40, 6).input_ids[4:].tolist() == two.batch(44, 2).input_ids.tolist()
    alone = MixedData(Mixture((store_of(100),), (1,)), length=8, seed=5)
    assert (
        alone.batch(7, 9).input_ids.tolist()
        == PackedData(store_of(100), length=8, seed=5).batch(7, 9).input_ids.tolist()
    ), "without a mixture nothing changes"
    orders = [[i for c, _, i in one.batch(0, 200).sequence_ids if c == wanted][:7] for wanted in (0, 1)]
    assert orders[0] != orders[1]


def test_components_take_over_what_they_leave_out() -> None:
    written = {
        "text_field": "body",
        "max_tokens": 900,
        "exclude": ["c*"],
        "mixture": [
            {"train": ["a.txt"], "weight": 0.75},
            {"train": ["b.jsonl"], "weight": "2.5e-1", "text_field": "text", "max_tokens": None},
        ],
    }
    data = Data.model_validate(written)
    assert data.shares() == (3, 1)
    assert data.components() == (
        Data(train=("a.txt",), text_field="body", max_tokens=900, exclude=("c*",)),
        Data(train=("b.jsonl",), exclude=("c*",)),
    )
    recipe = Recipe.model_validate({"name": "x", "data": data, "stages": [STAGE]})
    assert recipe.data == data
    assert recipe_io.parse(recipe.to_yaml(), [], name="x") == recipe
    plain = Data(train=("a.txt",))
    assert (plain.components(), plain.shares()) == ((plain,), (1,))


STAGE = {
    "name": "tune", "trainable": "all", "loss": "ce", "length": 16, "micro_batch_size": 2, "tokens_per_step": 64,
    "total_tokens": 256, "checkpoint_every_steps": 2, "optimizer": {"lr": 1e-3},
}  # fmt: skip


def test_a_run_on_a_mixture(tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"body": "the river sees a house " * 9}) for _ in range(9)))
    short = tiny.write_text(tmp_path / "short.txt", seed=2, num_words=12)
    raw = tiny.raw_recipe(text_file, STAGE)
    components = [
        {"train": [str(text_file)], "weight": 3},
        {"train": [str(rows), str(text_file)], "weight": 1, "text_field": "body"},
    ]
    raw["data"] = {"heldout": [str(short)], "mixture": components}
    recipe = Recipe.model_validate(raw)
    plan = dry_run(recipe, model_dir, tmp_path / "run", probe=False)
    (stage,) = plan.stages
    assert len(stage.epochs) == 2
    assert stage.data_tokens / 16 == pytest.approx(12 / stage.epochs[0] + 4 / stage.epochs[1], abs=2)
    run_training(recipe, model_dir, tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 4
    components[0]["weight"] = 2
    with pytest.raises(UserError, match=r"data\.mixture\.0\.weight: 3.0 -> 2.0"):
        run_training(Recipe.model_validate(raw), model_dir, tmp_path / "run", resume=True)
    components[1]["train"] = [str(short)]
    raw["data"]["heldout"] = []
    raw["stages"] = [{**STAGE, "length": 64, "micro_batch_size": 1}]
    with pytest.raises(UserError, match="component 1 of the mixture has"):
        dry_run(Recipe.model_validate(raw), model_dir, tmp_path / "other", probe=False)
