"""`supra extrapolate` as a user meets it: a tiny grid of all tasks, run twice, to a table and a plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from supra.cli import app
from supra.errors import UserError
from supra_eval.extrapolate import report


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["extrapolate", *words])


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Overrides of the shipped recipe that make it a matter of seconds."""
    for number in range(2):
        text = "\n".join(f"line {line} of text {number} is like no other." for line in range(300))
        (tmp_path / f"{number}.txt").write_text(text)
    overrides = (
        f"tasks.chars.train=['{tmp_path}/*.txt']", f"tasks.chars.heldout=['{tmp_path}/1.txt']",
        "training.lengths=[16, 16]", "training.total_tokens=256", "training.tokens_per_step=128",
        "training.optimizer.warmup_steps=1", "multiples=[1, 4]", "test_sequences=4", "seeds=[0]",
        "encoder.num_layers=1", "encoder.hidden_size=16", "mixers=[softmax, linear]", "methods=[none, alibi, rope+ntk]",
    )  # fmt: skip
    return [part for override in overrides for part in ("--set", override)]


def test_from_a_recipe_to_a_table(tmp_path: Path, tiny: list[str]) -> None:
    folder = tmp_path / "runs"
    done = call("small", "-o", str(folder), *tiny, "--json")
    assert done.exit_code == 0, done.output
    # Four tasks by softmax (none, alibi, rope) and linear (none, rope).
    assert json.loads(done.stdout) == {"folder": str(folder), "runs": 20, "finished": 20}
    assert "left out: linear x alibi: ALiBi is a decay to a linear model" in done.stderr
    page = (folder / "report/table.md").read_text()
    assert page.count("trained at up to 16 | 16 (1×) | 64 (4×) |") == 4
    assert page.count("| linear · rope+ntk |") == 4 and "| linear · rope |" not in page
    assert "- linear x alibi: ALiBi" in page and "| ALiBi | 19.73 | 18.73 |" in page
    assert (folder / "report/loss_by_position.png").stat().st_size > 1000
    assert len(json.loads((folder / "report/results.json").read_text())["cells"]) == 20
    times = {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    again = call("small", "-o", str(folder), *tiny)
    assert again.exit_code == 0 and "20 finished before" in again.stderr
    assert again.stdout.rstrip() == page.rstrip()
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "cells").iterdir()}
    other = tmp_path / "other"
    alone = [*tiny, "--set", "seeds=[1]", "--set", "tasks={chain: {}}", "--set", "methods=[none]"]
    merged = call("small", "-o", str(other), *alone, "--merge", str(folder))
    assert merged.exit_code == 0 and merged.stdout.count("(2) |") == 4, merged.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--set", "methods=[rpoe]"], "did you mean `rope`"),
        (["--merge", "nowhere"], "--merge nowhere: is no folder"),
        (["--set", "tasks.chars.heldout=['nowhere/*.txt']"], "tasks.chars.heldout nowhere"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, tiny: list[str], words: list[str], reason: str) -> None:
    done = call("small", "-o", str(tmp_path / "runs"), *tiny, *words)
    assert isinstance(done.exception, UserError) and reason in str(done.exception)


def test_folders_to_merge_are_read_before_anything_runs(tmp_path: Path, tiny: list[str]) -> None:
    few = [*tiny, "--set", "tasks={chain: {}}", "--set", "mixers=[linear]", "--set", "methods=[none]"]
    assert call("small", "-o", str(tmp_path / "other"), *few).exit_code == 0
    (tmp_path / "empty").mkdir()
    for folder, changes, reason in (
        ("empty", [], "holds no finished run"),
        ("other", [], "holds chain, linear, none, seed 0, which"),
        ("other", ["--set", "seeds=[1]", "--set", "test_sequences=8"], "differ in test_sequences"),
    ):
        done = call("small", "-o", str(tmp_path / "runs"), *few, *changes, "--merge", str(tmp_path / folder))
        assert isinstance(done.exception, UserError) and reason in str(done.exception)
        assert not (tmp_path / "runs").exists()


def test_one_process_at_a_time_reads_the_runs_and_writes_the_page(
    tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["small", "-o", str(tmp_path / "runs"), *tiny, "--set", "tasks={chain: {}}"]
    plain, free = report.write, []

    def write(folders: list[Path], out: Path) -> str:
        probe = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        asked = subprocess.run([sys.executable, "-c", probe, str(folders[0] / ".lock")], capture_output=True)
        free.append(asked.returncode == 0)
        return plain(folders, out)

    monkeypatch.setattr(report, "write", write)
    assert call(*command).exit_code == 0 and free == [False]


def test_two_processes_share_a_grid(tmp_path: Path, tiny: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "supra", "extrapolate", "small", "-o", str(tmp_path / "runs"), *tiny]
    command += ["--set", "tasks={chain: {}}", "--threads", "1"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "5 runs, 3 of this process, 0 finished before" in done.stderr
    assert len(list((tmp_path / "runs/cells").glob("*.json"))) == 5
    assert (tmp_path / "runs/report/table.md").exists()
