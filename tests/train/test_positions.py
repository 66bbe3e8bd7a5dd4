"""Positions that skip: how they are drawn, that nothing but RoPE sees them, and that every loss reads them."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from supra.config import PositionScheme, Recipe, Stage
from supra.models import SupraForCausalLM
from supra.train import dry_run, run_training
from supra.train.data import Batch
from supra.train.mixture import MixedData, Mixture
from supra.train.positions import draw_positions
from supra.train.token_store import TokenStore
from supra.train.tracking import Reporter

STRETCH = 4


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    extra=st.integers(0, 500),
    seed=st.integers(0, 2**62),
    number=st.integers(0, 2**40),
    kind=st.sampled_from(["random", "pose"]),
)
def test_draws_rise_within_the_span_of_each_document(
    lengths: list[int], extra: int, seed: int, number: int, kind: Any
) -> None:
    span = sum(lengths) + extra
    scheme = PositionScheme(kind, span)
    drawn = draw_positions(scheme, np.array(lengths), seed=seed, number=number)
    assert drawn.dtype == np.int64 and len(drawn) == sum(lengths)
    for document in np.split(drawn, np.cumsum(lengths)[:-1]):
        steps = np.diff(document)
        assert (steps > 0).all() and document[0] >= 0 and document[-1] < span
        if kind == "pose":
            assert document[0] == 0 and (steps > 1).sum() <= 1
    assert np.array_equal(drawn, draw_positions(scheme, np.array(lengths), seed=seed, number=number))


@pytest.mark.parametrize("kind", ["random", "pose"])
def test_draws_reach_everywhere_and_differ(kind: Any) -> None:
    scheme, lengths = PositionScheme(kind, 32), np.array([8])
    drawn = [draw_positions(scheme, lengths, seed=3, number=number) for number in range(2000)]
    assert {int(position) for positions in drawn for position in positions} == set(range(32))
    assert len({tuple(positions) for positions in drawn}) > 150
    if kind == "random":  # each position as often as any other: 8 of 32
        counts = np.bincount(np.concatenate(drawn), minlength=32) / len(drawn)
        assert np.abs(counts - 0.25).max() < 0.05
    else:  # cuts and skips are uniform: 7 places, skips of 0 to 24
        skips = np.array([np.diff(positions).max() - 1 for positions in drawn])
        assert skips.min() == 0 and skips.max() == 24 and abs(skips.mean() - 12) < 0.6
        cuts = [int(np.diff(positions).argmax()) + 1 for positions in drawn if np.diff(positions).max() > 1]
        assert np.abs(np.bincount(cuts, minlength=8)[1:] / len(cuts) - 1 / 7).max() < 0.04


def test_all_of_the_span_leaves_no_choice() -> None:
    for kind in ("random", "pose"):
        drawn = draw_positions(PositionScheme(kind, 7), np.array([7]), seed=0, number=0)  # type: ignore[arg-type]
        assert drawn.tolist() == list(range(7))


def mixed(positions: str | None, seed: int = 5) -> MixedData:
    tokens = np.arange(400, dtype=np.uint32)
    store = TokenStore(tokens, np.array([0, 30, 47, 150, 151, 400]), "key")
    scheme = Stage.model_validate(STAGE | {"positions": positions}).position_scheme
    return MixedData(Mixture((store, store), (2, 1)), length=16, seed=seed, positions=scheme)


STAGE: dict[str, Any] = {
    "name": "a", "trainable": "all", "loss": "ce", "length": 16, "tokens_per_step": 16, "total_tokens": 16,
    "optimizer": {"lr": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("positions", ["random:64", "pose:64"])
def test_they_are_a_pure_function_of_seed_and_number(positions: str) -> None:
    one, two = mixed(positions), mixed(positions)
    for number in (9, 3, 30):
        two.batch(number, 2)  # what was read before changes nothing
    whole = one.batch(10, 6).position_ids
    apart = torch.cat([two.batch(number, 1).position_ids for number in range(10, 16)])
    assert torch.equal(whole, apart)
    assert not torch.equal(whole, mixed(positions, seed=6).batch(10, 6).position_ids)
    assert not torch.equal(whole, one.batch(16, 6).position_ids)
    plain = mixed(None).batch(10, 6)
    for name in ("input_ids", "labels", "cu_seqlens"):
        assert torch.equal(getattr(one.batch(10, 6), name), getattr(plain, name))
    # In each document of each row the draw rises anew.
    flat = whole.flatten()
    for start, end in zip(plain.cu_seqlens[:-1].tolist(), plain.cu_seqlens[1:].tolist(), strict=True):
        assert (flat[start:end].diff() > 0).all()


LOSSES: dict[str, dict[str, Any]] = {
    "attention": {"loss": "attention"},
    "attention_weights": {"loss": "attention_weights"},
    "hidden": {"loss": "hidden", "trainable": "all"},
    "kl": {"loss": "kl", "trainable": "all", "ce_weight": 0.5},
    "ce": {"loss": "ce", "trainable": "all"},
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_reads_them_in_student_and_teacher(tiny: ModuleType, batch: Batch, name: str) -> None:
    """Frequencies divided by 4 read positions 0, 4, 8, … as the plain ones read 0, 1, 2, …: loss and gradients."""
    config = tiny.tiny_config(
        decay="learned", num_sink_tokens=1, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        teacher_layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=5,
    )  # fmt: skip
    stretched_config = copy.deepcopy(config)
    stretched_config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": float(STRETCH)}
    torch.manual_seed(0)
    plain = SupraForCausalLM(config)
    stretched = SupraForCausalLM(stretched_config)
    stretched.load_state_dict(plain.state_dict())
    skipping = replace(batch, position_ids=STRETCH * batch.position_ids)
    expected, gradients = tiny.run_loss(plain, batch, **LOSSES[name])
    found, stretched_gradients = tiny.run_loss(stretched, skipping, **LOSSES[name])
    assert found == pytest.approx(expected, rel=1e-5)
    tiny.assert_same(stretched_gradients, gradients)
    assert tiny.run_loss(stretched, batch, **LOSSES[name])[0] != pytest.approx(expected, rel=1e-5)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def test_a_run_says_it_and_layers_alone_learn_the_same(
    tiny: ModuleType, model_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    trained, said = {}, {}
    for name, changes in {
        "whole": {"positions": "pose:512"},
        "layerwise": {"positions": "pose:512", "layerwise": True},
        "plain": {},
    }.items():
        # Without clipping: that of all layers together depends on every layer's gradient.
        optimizer = {"lr": 1e-2, "warmup_steps": 1, "grad_clip": None}
        recipe = Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(optimizer=optimizer, **changes)))
        stream = io.StringIO()
        reporter = Reporter(Console(file=stream, soft_wrap=True))
        folder = run_training(recipe, model_dir, tmp_path / name, reporter=reporter)
        trained[name], said[name] = weights(folder), stream.getvalue()
    for name, tensor in trained["layerwise"].items():
        torch.testing.assert_close(tensor, trained["whole"][name], rtol=1e-3, atol=1e-5, msg=name)
    assert any(
        not torch.allclose(trained["whole"][name], x, atol=1e-4) for name, x in trained["plain"].items()
    )
    assert "transfer (positions pose:512) 4/4 · loss" in said["whole"]
    assert "transfer (positions pose:512) 8/8 · loss" in said["layerwise"]
    assert "positions" not in said["plain"]
    warning = "stages.transfer.positions = pose:512: the model's RoPE is made for 256 positions"
    assert warning in said["whole"]
    assert "transfer (positions pose:512) | new" in (tmp_path / "whole/model/README.md").read_text()


def test_the_dry_run_shows_them(tiny: ModuleType, model_dir: Path, text_file: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(positions="random:128")))
    stream = io.StringIO()
    reporter = Reporter(Console(file=stream, soft_wrap=True))
    plan = dry_run(recipe, model_dir, tmp_path / "run", probe=False, reporter=reporter)
    assert plan.stages[0].positions == "random:128"
    Console(file=stream, width=160).print(plan.render())
    assert "16, random:128" in stream.getvalue()
    assert "RoPE is made for" not in stream.getvalue()
