"""`supra lra run` and `supra lra report` as a user meets them: a small grid, run twice, to a table and a plot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from supra.cli import app
from supra.errors import UserError

SMALL = (
    "task.settings={train: 40, validation: 20, test: 20}", "training.epochs=4", "training.optimizer.warmup_steps=0",
    "encoder.num_layers=1", "encoder.hidden_size=16", "seeds=[0]", "modes=[scratch, masked]", "shares=[0.5]",
)  # fmt: skip


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["lra", *words])


def small(*more: str) -> list[str]:
    return [part for override in (*SMALL, *more) for part in ("--set", override)]


def test_from_a_recipe_to_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    done = call("run", "mnist1d", "-o", str(folder), *small(), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"folder": str(folder), "runs": 6, "finished": 6}
    assert "majority class" in done.stderr
    assert done.stderr.splitlines()[-1] == f"next: supra lra report {folder} -o {folder}/report"
    times = {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    again = call("run", "mnist1d", "-o", str(folder), *small())
    assert again.exit_code == 0 and "6 finished before" in again.stderr
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    part = call("run", "mnist1d", "-o", str(folder), *small("modes=[scratch]"), "--json")
    assert json.loads(part.stdout) == {"folder": str(folder), "runs": 3, "finished": 3}
    table = call("report", str(folder), "-o", str(folder / "report"))
    assert table.exit_code == 0, table.output
    assert [line.split(" | ")[0] for line in table.stdout.splitlines()[2:]] == [
        "| linear", "| s4d", "| softmax", "| majority class",
    ]  # fmt: skip
    assert (folder / "report/accuracy.png").exists()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("task.name=mnist", "Did you mean mnist1d"),
        ("task.settings={size: 4}", "mnist1d has no such setting"),
        ("task.settings.train=many", "task.settings.train = 'many': must be a valid integer"),
        ("task.settings.test=null", "task.settings.test = None: must be a valid integer"),
        ("task.folder=nowhere", "task.settings"),
        ("training.budget=free", "must be one of tied, extra"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, override: str, reason: str) -> None:
    done = call("run", "mnist1d", "-o", str(tmp_path / "runs"), *small(override))
    assert isinstance(done.exception, UserError) and reason in str(done.exception)


def test_other_data_in_the_folder_is_refused(tmp_path: Path) -> None:
    assert (
        call(
            "run",
            "mnist1d",
            "-o",
            str(tmp_path),
            *small("models=[{name: s, encoder: {mixer: s4d, positions: none}}]"),
        ).exit_code
        == 0
    )
    done = call("run", "mnist1d", "-o", str(tmp_path), *small("task.seed=3"))
    assert isinstance(done.exception, UserError) and "differs in task" in str(done.exception)


def test_another_comparison_in_the_folder_is_refused_before_its_task_is_made(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: other\n")
    done = call("run", "mnist1d", "-o", str(tmp_path), *small())
    assert isinstance(done.exception, UserError) and "holds a comparison that differs in" in str(
        done.exception
    )
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_task_in_the_folder_of_no_comparison_is_looked_at(tmp_path: Path) -> None:
    settings = ("--train", "40", "--validation", "20", "--test", "20")
    assert call("data", "mnist1d", "-o", str(tmp_path / "task"), *settings).exit_code == 0
    done = call("run", "mnist1d", "-o", str(tmp_path), *small("task.seed=3"))
    assert isinstance(done.exception, UserError) and "another seed" in str(done.exception)
    assert not (tmp_path / "recipe.yaml").exists()


def test_two_processes_share_a_grid(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [
        sys.executable,
        "-m",
        "supra",
        "lra",
        "run",
        "mnist1d",
        "-o",
        str(tmp_path),
        *small(),
        "--threads",
        "1",
    ]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "6 runs, 3 of this process, 0 finished before" in done.stderr
    assert len(list((tmp_path / "cells").glob("*.json"))) == 6
