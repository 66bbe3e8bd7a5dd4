"""A run that is killed and resumed ends with the very bits of a run that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from supra.config import Recipe
from supra.errors import SupraError, UserError
from supra.models import SupraForCausalLM
from supra.train import checkpoint
from supra.train.checkpoint import Position
from supra.train.tracking import read_metrics
from supra.train.trainer import run_training

# Sums are split by thread, so equal bits need equal threads: the killed process gets as many as this one.
SAME_THREADS = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def three_stages(tiny: ModuleType, text: Path, **changes: Any) -> Recipe:
    """All that has random numbers or a state of its own, in all kinds of stage, a mixture and a stream."""
    parts = [{"train": [str(text)], "weight": 2}, {"train": [str(text)], "weight": 1, "streaming": True}]
    optimizer = {"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.01}
    average = {"ema": 0.8, "optimizer": {**optimizer, "schedule": "wsd", "decay_ratio": 0.4}}
    return Recipe.model_validate(
        tiny.raw_recipe(
            text,
            tiny.stage(total_tokens=320, window_dropout={"start": 0.8, "end": 0.2}, positions="random:64"),
            tiny.stage(
                name="distill",
                trainable="adapters",
                loss="kl",
                ce_weight=0.3,
                lora={"rank": 2, "dropout": 0.2, "dora": True},
                freeze=["*.k_proj.*"],
                total_tokens=320,
                **average,
            ),
            tiny.stage(
                name="tune",
                trainable="all",
                positions="pose:64",
                loss="kl",
                total_tokens=320,
                activation_checkpointing=True,
                freeze=["*.layers.0.mlp.*"],
                data={"mixture": parts},
                **average,
            ),
            **changes,
        )
    )


def same_run(one: Path, two: Path) -> None:
    weights, rows = [], []
    for run_dir in (one, two):
        weights.append((run_dir / "model" / "model.safetensors").read_bytes())
        rows.append([{**row, "tokens_per_second": 0} for row in read_metrics(run_dir)])
    assert weights[0] == weights[1]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == list(range(1, len(rows[0]) + 1))


def test_kill_9_at_any_instant_costs_no_bit(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    recipe = three_stages(tiny, text_file)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    run_training(recipe, model_dir, tmp_path / "whole")
    moments = [
        "lines:1",
        "lines:3",
        "before:2",
        "after:1",
        "lines:8",
        "before:1",
        "after:3",
        "lines:12",
        "export",
    ]
    subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("kill_worker.py")),
            str(tmp_path / "recipe.yaml"),
            str(model_dir),
            str(tmp_path / "killed"),
            *moments,
        ],
        env=SAME_THREADS,
        check=True,
        timeout=300,
    )
    assert not (tmp_path / "killed" / "model").exists()
    run_training(recipe, model_dir, tmp_path / "killed", resume=True)
    same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob("**/*.partial"))
    assert len(list((tmp_path / "killed" / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "no state", "state cut"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    damage: str,
    tiny: ModuleType,
    tmp_path: Path,
    text_file: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file, tiny.stage(total_tokens=448)))
    tiny.stop_after(monkeypatch, 2, recipe, model_dir, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    assert newest is not None
    file = newest / ("tensors.safetensors" if damage in ("truncated", "bit flipped") else "state.json")
    content = bytearray(file.read_bytes())
    if damage == "no state":
        file.unlink()
    elif damage == "bit flipped":
        content[-5] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2])
    run_training(recipe, model_dir, tmp_path / "run", resume=True)
    errors = capsys.readouterr().err
    assert f"{newest.name} is damaged" in errors
    assert "resuming from step-00000002" in errors
    run_training(recipe, model_dir, tmp_path / "whole")
    same_run(tmp_path / "whole", tmp_path / "run")


def test_a_run_from_before_a_field_existed_goes_on_where_the_field_has_its_default(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file))
    tiny.stop_after(monkeypatch, 1, recipe, model_dir, tmp_path / "run")
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    newer = [path for path in header["recipe"] if path.endswith((".attention_target", ".lora", ".split"))]
    assert len(newer) == 3
    for path in newer:
        del header["recipe"][path]
    (tmp_path / "run" / "run.json").write_text(json.dumps(header))
    changed = tiny.raw_recipe(text_file, tiny.stage(attention_target="before_o_proj"))
    with pytest.raises(UserError, match="attention_target: 'absent' -> 'before_o_proj'"):
        run_training(Recipe.model_validate(changed), model_dir, tmp_path / "run", resume=True)
    run_training(recipe, model_dir, tmp_path / "run", resume=True)


def test_all_checkpoints_damaged_is_an_error(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(tiny.raw_recipe(text_file))
    tiny.stop_after(monkeypatch, 1, recipe, model_dir, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        file.write_text("{")
    with pytest.raises(SupraError, match="every checkpoint is damaged"):
        run_training(recipe, model_dir, tmp_path / "run", resume=True)


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.ones(3)}
    first = checkpoint.save(tmp_path, Position(0, 1, 1), model=weights, adapters={}, moments={}, average={})
    with monkeypatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(SupraError, match="No space left"):
            checkpoint.save(tmp_path, Position(0, 2, 2), model=weights, adapters={}, moments={}, average={})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [first.name]
    loaded = checkpoint.load_newest(tmp_path, print)
    assert loaded is not None
    assert torch.equal(loaded.model["a"], weights["a"])


def test_a_callback_that_fails_can_be_taken_up_again(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    recipe = three_stages(tiny, text_file, adapters="keep")
    seen: list[str] = []

    def fail_once(name: str, model: SupraForCausalLM) -> None:
        seen.append(name)
        assert not model.training
        assert not any(".lora_" in parameter for parameter, _ in model.named_parameters())
        if seen == ["transfer", "distill"]:
            raise tiny.StopError

    with pytest.raises(tiny.StopError):
        run_training(recipe, model_dir, tmp_path / "run", on_stage_end=fail_once)
    run_training(recipe, model_dir, tmp_path / "run", on_stage_end=fail_once, resume=True)
    assert seen == ["transfer", "distill", "distill", "tune"]
    run_training(recipe, model_dir, tmp_path / "whole")
    same_run(tmp_path / "whole", tmp_path / "run")


def test_checkpoints_hold_only_what_trained(
    tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    run_training(Recipe.model_validate(tiny.raw_recipe(text_file)), model_dir, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    assert newest is not None
    names = load_file(newest / "tensors.safetensors")
    assert names
    assert all("feature_map" in name or "window_mix" in name for name in names)
