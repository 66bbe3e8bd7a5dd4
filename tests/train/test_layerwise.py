"""Layer by layer: the weights are those of all layers at once, a kill costs nothing, and no model is ever loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from supra.config import Recipe
from supra.errors import SupraError, UserError
from supra.models import is_new_parameter
from supra.train import dry_run, run_training
from supra.train.layerwise import hidden_states as hidden_states_module
from supra.train.layerwise import transfer as transfer_module
from supra.train.layerwise.hidden_states import HiddenStates
from supra.train.tracking import read_metrics

LAYERS = 4


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


@pytest.fixture(scope="module")
def model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the third of them softmax, in one file that mixes the teacher's tensors and new ones."""
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    folder = tmp_path_factory.mktemp("layerwise") / "model"
    return tiny.write_model(
        folder,
        num_hidden_layers=LAYERS,
        layer_types=kinds,
        teacher_layer_types=["full_attention"] * LAYERS,
        num_sink_tokens=1,
    )


def recipe(tiny: ModuleType, text: Path, *more: dict[str, Any], layerwise: bool = True) -> Recipe:
    # Without clipping: that of all layers together depends on every layer's gradient.
    optimizer = {"lr": 1e-2, "warmup_steps": 1, "grad_clip": None}
    first = tiny.stage(optimizer=optimizer, layerwise=layerwise)
    conversion = {"feature_map": "hedgehog", "window": 4, "num_sink_tokens": 1, "keep_softmax": [2]}
    return Recipe.model_validate(tiny.raw_recipe(text, first, *more, conversion=conversion))


@pytest.mark.parametrize("target", ["before_o_proj", "after_o_proj"])
def test_layers_alone_learn_what_they_learn_together(
    tiny: ModuleType, model: Path, text_file: Path, tmp_path: Path, target: str
) -> None:
    trained = {}
    for layerwise in (True, False):
        changed = recipe(tiny, text_file, layerwise=layerwise).model_dump(mode="json")
        changed["stages"][0]["attention_target"] = target
        run = tmp_path / str(layerwise)
        trained[layerwise] = weights(run_training(Recipe.model_validate(changed), model, run))
    start = weights(model)
    assert trained[True].keys() == trained[False].keys() == start.keys()
    for name, alone in trained[True].items():
        if is_new_parameter(name):
            assert not torch.equal(alone, start[name]), f"{name} has not been trained"
            torch.testing.assert_close(alone, trained[False][name], rtol=1e-3, atol=1e-5, msg=name)
        else:
            assert torch.equal(alone, start[name]), f"{name} is the teacher's"
    rows = {layerwise: read_metrics(tmp_path / str(layerwise)) for layerwise in (True, False)}
    assert [row["layer"] for row in rows[True]] == [0] * 4 + [1] * 4 + [3] * 4
    assert [row["step"] for row in rows[True]] == [1, 2, 3, 4] * 3
    for step, together in enumerate(rows[False], start=1):
        alone = [row["loss"] for row in rows[True] if row["stage_step"] == step]
        assert sum(alone) / 3 == pytest.approx(together["loss"], rel=1e-3)


def test_a_kill_between_or_within_layers_costs_no_bit(
    tiny: ModuleType, model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted wherever a micro-batch of hidden states is written, and wherever a layer is put away."""
    wanted = weights(run_training(recipe(tiny, text_file), model, tmp_path / "whole"))
    run, places = tmp_path / "run", []

    def breaking(name: str, owner: Any) -> Any:
        original, calls = getattr(owner, name), [0]

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if (name, calls[0]) in {
                ("write", 3),
                ("write", 11),
                ("write", 20),
                ("write_whole", 2),
                ("finish", 3),
            }:
                places.append(name)
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(HiddenStates, "write", breaking("write", HiddenStates))
    monkeypatch.setattr(HiddenStates, "finish", breaking("finish", HiddenStates))
    monkeypatch.setattr(transfer_module, "write_whole", breaking("write_whole", transfer_module))
    for _ in range(10):
        try:
            trained = run_training(recipe(tiny, text_file), model, run, resume=(run / "run.json").exists())
            break
        except KeyboardInterrupt:
            continue
    assert sorted(places) == ["finish", "write", "write", "write", "write_whole"]
    for name, tensor in weights(trained).items():
        assert torch.equal(tensor, wanted[name]), name
    whole, pieces = read_metrics(tmp_path / "whole"), read_metrics(run)
    assert [row["loss"] for row in pieces] == [row["loss"] for row in whole]
    assert not (run / "layerwise").exists(), "hidden states are large: none stays"


def test_later_stages_start_from_what_the_layers_learned(
    tiny: ModuleType, model: Path, text_file: Path, tmp_path: Path
) -> None:
    after = tiny.stage(name="distill", trainable="adapters", loss="kl", lora={"rank": 2})
    seen: list[str] = []
    run_training(
        recipe(tiny, text_file, after),
        model,
        tmp_path / "layerwise",
        on_stage_end=lambda stage, _: seen.append(stage),
    )
    run_training(recipe(tiny, text_file, after, layerwise=False), model, tmp_path / "together")
    assert seen == ["distill"]
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name) if row["stage"] == "distill"]
        for name in ("layerwise", "together")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    rows = read_metrics(tmp_path / "layerwise")
    assert rows[-1]["total_tokens"] == 256 + 256, "the layers all read the same tokens"
    assert rows[-1]["step"] == 8


def test_the_whole_model_is_never_loaded(
    tiny: ModuleType, model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("supra.train.prepare.load_model", refuse)
    assert (run_training(recipe(tiny, text_file), model, tmp_path / "run") / "config.json").exists()


def test_a_disk_that_cannot_hold_the_hidden_states_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(hidden_states_module.shutil, "disk_usage", lambda _: usage)
    HiddenStates(tmp_path / "fits", (1, 5, 10), torch.float32, create_count=5).close()
    with pytest.raises(SupraError, match=r"0\.00 GB of hidden states do not fit into 0\.00 GB of free disk"):
        HiddenStates(tmp_path / "does-not", (1, 5, 10), torch.float32, create_count=6)


def test_the_dry_run_foresees_disk_and_probes_one_layer(
    tiny: ModuleType, model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "supra.train.prepare.load_model", lambda *args, **kwargs: pytest.fail("the model was loaded")
    )
    plan = dry_run(recipe(tiny, text_file), model, tmp_path / "run")
    assert plan.seconds is not None and plan.stages[0].seconds_per_step is not None
    assert plan.stages[0].seconds is not None
    assert plan.stages[0].seconds > 3 * 4 * plan.stages[0].seconds_per_step, "four steps in three layers"
    assert not (tmp_path / "run").exists()
    largest = 0
    original = HiddenStates.finish

    def finish(states: HiddenStates) -> None:
        nonlocal largest
        original(states)
        largest = max(largest, sum(f.stat().st_size for f in (tmp_path / "run").rglob("*") if f.is_file()))

    monkeypatch.setattr(HiddenStates, "finish", finish)
    run_training(recipe(tiny, text_file), model, tmp_path / "run")
    left = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert left == pytest.approx(plan.disk_bytes, rel=0.2)
    assert largest <= plan.peak_disk_bytes
    weights_of_layer = sum(x.numel() for n, x in weights(model).items() if ".layers.0." in n) * 4
    assert weights_of_layer < plan.memory_bytes < 2 * weights_of_layer, (
        "one layer, not four and the embedding"
    )


def test_files_that_do_not_hold_the_model_are_named(
    tiny: ModuleType, model: Path, text_file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 97'))
    with pytest.raises(UserError, match=r"do not hold the model: model\.layers\.0\.mlp"):
        run_training(recipe(tiny, text_file), broken, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"loss": "kl"}, "works layer by layer"), ({"trainable": "adapters"}, "works layer by layer")],
)
def test_only_attention_transfer_of_new_parameters(
    tiny: ModuleType, text_file: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(layerwise=True, **changes)))


def test_only_the_first_stage(tiny: ModuleType, text_file: Path) -> None:
    with pytest.raises(ValueError, match="only the first stage can be layerwise, not second"):
        Recipe.model_validate(
            tiny.raw_recipe(text_file, tiny.stage(), tiny.stage(name="second", layerwise=True))
        )
