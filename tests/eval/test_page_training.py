"""Training runs on the page: finished, killed in the middle of a line, and side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from supra.cli import app
from supra.errors import UserError
from supra_eval.page import read_any, run_folders
from supra_eval.page.training import training_run

STAGES = [("transfer", 300, 0.5), ("tune", 100, 4.0)]


def write_run(folder: Path, num_steps: int = 400, **facts: Any) -> Path:
    folder.mkdir()
    stages = [{"name": name, "total_tokens": 64 * steps, "tokens_per_step": 64} for name, steps, _ in STAGES]
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"name": "mine", "seed": 3, "stages": stages}))
    (folder / "run.json").write_text(json.dumps({"model_dir": "/m", "versions": {"torch": "2"}, **facts}))
    lines = []
    for name, steps, loss in STAGES:
        for step in range(1, steps + 1):
            row = {
                "step": len(lines) + 1,
                "stage": name,
                "stage_step": step,
                "tokens": 64,
                "loss": loss / step,
            }
            lines.append(json.dumps({**row, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 32.0}))
    (folder / "metrics.jsonl").write_text("\n".join(lines[:num_steps]) + "\n")
    return folder


def test_the_curves_are_those_of_the_metrics(tmp_path: Path) -> None:
    run = training_run(write_run(tmp_path / "run", skipped_steps=[7]))
    curves = {curve.name: curve for curve in run.curves}
    names = {"loss", "learning rate", "gradient norm", "speed", "loss of transfer", "loss of tune"}
    assert curves.keys() == names
    loss = curves["loss"]
    assert loss.marks == {"transfer": 0.0, "tune": 64.0 * 300}
    assert len(loss.x) == len(loss.y) <= 160
    assert loss.x[-1] == 64 * 400 == run.settings["tokens_trained"]
    assert loss.y[0] == pytest.approx((0.5 + 0.5 / 2 + 0.5 / 3) / 3), "a point is the mean of its steps"
    assert curves["loss of tune"].x[0] == 64 * 301
    assert curves["loss of tune"].y[0] == 4.0
    assert run.settings["steps"] == "transfer 300 of 300, tune 100 of 100"
    assert run.settings["skipped_steps"] == [7]
    assert run.seconds == pytest.approx(400 * 2.0)
    scores = {score.task: score.value for score in run.scores}
    assert scores["tune"] == pytest.approx(sum(4 / step for step in range(91, 101)) / 10)


def test_a_layerwise_stage_shows_the_mean_over_its_layers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=4)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    second = [
        row | {"layer": 1, "loss": row["loss"] + 2.0} for row in rows[:3]
    ]  # killed before its fourth step
    first = [row | {"layer": 0} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first + second))
    run = training_run(folder)
    (loss,) = [curve for curve in run.curves if curve.name == "loss"]
    assert loss.x == [64.0, 128.0, 192.0, 256.0]
    assert loss.y == pytest.approx([1.5, 1.25, 0.5 / 3 + 1, 0.125])
    assert run.settings["tokens_trained"] == 256, "the layers all read the same tokens"
    assert run.seconds == pytest.approx(7 * 2.0)


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=30)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "sta')  # the line that is being written
    run = training_run(folder)
    assert run.settings["steps"] == "transfer 30 of 300, tune 0 of 100"
    assert run.settings["finished"] is False
    assert {curve.name for curve in run.curves} == {"loss", "learning rate", "gradient norm", "speed"}
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has not trained a step yet"):
        read_any(folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has not trained a step yet"):
        read_any(folder)


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
def test_a_damaged_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3)
    (folder / name).write_text("{")
    with pytest.raises(UserError, match="is no whole training run"):
        read_any(folder)


def test_two_runs_stand_side_by_side(tmp_path: Path) -> None:
    for name, steps in (("slow", 350), ("fast", 400)):
        write_run(tmp_path / name, steps)
    assert run_folders([tmp_path]) == [tmp_path / "fast", tmp_path / "slow"]
    out = tmp_path / "page"
    command = ["report", str(tmp_path / "slow"), str(tmp_path / "fast"), "-o", str(out), "--json"]
    done = CliRunner().invoke(app, command)
    told = json.loads(done.stdout)
    assert [run["kind"] for run in told["runs"]] == ["training", "training"]
    assert told["runs"][0]["settings"]["steps"] == "transfer 300 of 300, tune 50 of 100"
    text = (out / "report.md").read_text()
    assert text.startswith("# Training of slow, fast\n\n2 models, 2 training runs, 25.0 min of training.")
    assert "| tune | loss ↓ |" in text
    assert len(list(out.glob("report-training-*.png"))) == 6
    html = Path(told["html"]).read_text()
    assert html.count("transfer</text>") >= 4, "the stages are marked in the plots of the whole run"
