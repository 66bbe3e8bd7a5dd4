"""Kernels compile for GPUs that are not here: the interpreter accepts programs which the compiler rejects."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
KERNELS = {
    "chunk_states", "scan_states", "chunk_output", "scan_states_reversed", "chunk_dq", "chunk_dk", "chunk_dv",
    "chunk_d_log_decay", "hedgehog_normaliser", "features_backward", "group_norm_backward",
    "step_kernel", "decode_kernel", "window_forward", "window_dq", "window_dkv",
}  # fmt: skip


def report(out: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        ROOT / "kernels/benchmarks/compile_report.py",
        "--json",
        out,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def allowed_bytes(row: dict[str, Any]) -> int:
    """The fused kernels may spill a few registers, which costs less than another pass over memory."""
    return 128 if row["call"].startswith("fused") else 0


def test_every_kernel_compiles_for_every_target_and_spills_nothing_at_smollm2s_shape(tmp_path: Path) -> None:
    rows = report(tmp_path / "report.json", "--quick", "--jobs", "2")
    for target in ("sm_80", "sm_90", "gfx942"):
        assert {row["kernel"] for row in rows if row["target"] == target} == KERNELS
    assert [
        row for row in rows if row["target"] == "sm_90" and row["spilled_bytes"] > allowed_bytes(row)
    ] == []


@pytest.mark.slow
def test_every_dtype_head_dim_and_decay_compiles(tmp_path: Path) -> None:
    rows = report(tmp_path / "report.json")
    assert {row["kernel"] for row in rows} == KERNELS


def test_the_interpreter_is_refused() -> None:
    command = [sys.executable, ROOT / "kernels/benchmarks/compile_report.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 1 and "TRITON_INTERPRET=1" in done.stderr and "Traceback" not in done.stderr
