"""`supra lra data` as a user meets it: what was written on stdout, chatter on stderr, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from supra.cli import app
from supra.errors import UserError
from supra_eval.lra.data.load import load_task

SMALL = ["--train", "40", "--validation", "10", "--test", "10"]
COMMANDS = {
    "listops": ["--min-length", "5", "--max-length", "40", *SMALL],
    "pathfinder": ["--size", "16", *SMALL],
    "mnist1d": SMALL,
    "chain": ["--steps", "3-6", "--test-steps", "9", *SMALL],
    "ucr": ["--name", "GunPoint"],
}


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["lra", "data", *words])


@pytest.mark.parametrize("name", COMMANDS)
def test_writes_a_folder_that_is_read_back(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    done = call(name, "--seed", "5", "-o", str(folder), *COMMANDS[name], "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    task = load_task(None, folder)
    assert said["name"] == task.name and said["seed"] == 5 and said["folder"] == str(folder)
    assert said["counts"] == {split: len(getattr(task, split)) for split in ("train", "validation", "test")}
    shares = said["summary"]["splits"]["test"]["label_shares"]
    assert np.allclose(
        shares, np.bincount(task.test.labels, minlength=task.num_classes) / len(task.test), atol=1e-4
    )
    assert 0 <= said["summary"]["baselines"]["majority class"] <= 1
    assert done.stderr.splitlines()[-1] == f"next: supra lra data show {folder}"
    again = json.loads(call(name, "--seed", "5", "-o", f"{folder}2", *COMMANDS[name], "--json").stdout)
    other = json.loads(call(name, "--seed", "6", "-o", f"{folder}3", *COMMANDS[name], "--json").stdout)
    assert again["hash"] == said["hash"] != other["hash"]


def test_says_what_is_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "task")
    done = call("listops", "-o", folder, *COMMANDS["listops"], "--tsv")
    for part in (
        "seed 0",
        "majority class",
        "heuristic on the root operator",
        "40",
        "length",
        "share of each label",
    ):
        assert part in done.stdout
    assert "examples/s" in done.stderr
    shown = call("show", folder)
    assert shown.exit_code == 0 and "heuristic on the root operator" in shown.stdout
    # The TSV files beside are what a reader of released data takes.
    for name in ("train", "val", "test"):
        (tmp_path / "released").mkdir(exist_ok=True)
        (tmp_path / f"task/basic_{name}.tsv").rename(tmp_path / f"released/basic_{name}.tsv")
    found = [
        json.loads(call("show", where, "--task", "listops", "--json").stdout)["summary"]
        for where in (folder, str(tmp_path / "released"))
    ]
    assert found[0] == found[1]


def test_mistakes_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    folder = str(tmp_path / "task")
    assert call("chain", "-o", folder, *SMALL).exit_code == 0
    refused = call("chain", "-o", folder, *SMALL)
    assert isinstance(refused.exception, UserError) and "--overwrite" in str(refused.exception)
    assert call("chain", "-o", folder, *SMALL, "--seed", "1", "--overwrite").exit_code == 0
    for words in (
        ["chain", "--steps", "many"],
        ["chain", "--rule", "wrap"],
        ["pathfinder", "--size", "48"],
        ["mnist1d", "--train", "41"],
        ["ucr", "--name", "Nope"],
        ["listops", "--min-length", "99", "--max-length", "100"],
    ):
        refused = call(*words, "-o", str(tmp_path / "other"))
        assert isinstance(refused.exception, UserError), words
    assert [path.name for path in tmp_path.iterdir()] == ["task"]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['supra', 'lra', 'data', '--help']\n"
        "from supra.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'supra_eval', 'mnist1d'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for name in COMMANDS:
        assert name in result.stdout
