"""The launch files: what they would start, seen by stand-ins for torchrun and SLURM's commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

LAUNCH = Path(__file__).parents[2] / "recipes/launch"
FILES = sorted(LAUNCH.glob("*.sh"))
NODES = {"NODES": "2", "HEAD": "node7"}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_CPUS_PER_TASK": "64",
}


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which torchrun, srun and scontrol write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    told = f'printf "%s\\0" "$(basename "$0")" "$@" >> {shlex.quote(str(tmp_path))}/$(basename "$0").calls'
    bodies = {
        "torchrun": told,
        "srun": f'{told}\nwhile [[ $1 != torchrun ]]; do shift; done\n"$@"\nsleep "${{WORK_S:-0}}"',
        "scontrol": f"{told}\nif [[ $1 == show ]]; then printf 'node7\\nnode8\\n'; fi",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, **NODES, **SLURM, "PATH": f"{folder}:{os.environ['PATH']}"}


def calls(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.calls").read_text().split("\0")[1:-1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_trains_and_goes_on_where_the_run_stopped(
    path: Path, stand_ins: dict[str, str], tmp_path: Path, parse: Any
) -> None:
    run = tmp_path / "a run"
    for is_resumed in (False, True):
        (tmp_path / "torchrun.calls").unlink(missing_ok=True)
        arguments = ["hedgehog-window", "a model", str(run), "--set", "strategy=fsdp2"]
        subprocess.run(["bash", path, *arguments], env=stand_ins, check=True, cwd=tmp_path, timeout=60)
        called = calls(tmp_path, "torchrun")
        launch = get_args_parser().parse_args(called)
        assert launch.nproc_per_node == "gpu"
        if path.name != "torchrun.sh":
            assert (launch.nnodes, launch.rdzv_endpoint) == ("2", "node7:29500")
        command, given = parse(["torchrun", *called])
        assert command == "train"
        assert (given["recipe"], given["model"], given["out"]) == ("hedgehog-window", Path("a model"), run)
        assert (given["overrides"], given["resume"]) == (["strategy=fsdp2"], is_resumed)
        run.mkdir(exist_ok=True)
        (run / "run.json").write_text("{}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_sound_and_says_how_it_is_used(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    assert os.access(path, os.X_OK)
    assert f"recipes/launch/{path.name} RECIPE MODEL RUN" in text


def test_a_slurm_job_queues_itself_again_when_its_time_is_over(
    stand_ins: dict[str, str], tmp_path: Path
) -> None:
    text = (LAUNCH / "slurm.sh").read_text()
    assert re.search(r"^#SBATCH --requeue$", text, flags=re.MULTILINE)
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, flags=re.MULTILINE)
    command = ["bash", LAUNCH / "slurm.sh", "demo", "model", "run"]
    job = subprocess.Popen(command, env={**stand_ins, "WORK_S": "30"}, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "torchrun.calls").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        job.wait(timeout=20)
        assert calls(tmp_path, "scontrol")[-2:] == ["requeue", "12"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # the stand-in of srun too
