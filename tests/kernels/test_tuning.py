"""The table of warps and stages: looked up by card and shape, filled by timing, never guessed from another card."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from supra_kernels.triton_backend import tuned

SCRIPT = Path(__file__).parents[2] / "kernels/benchmarks/tune.py"


@pytest.fixture
def tune() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measured_options_are_used_for_what_was_measured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"num_warps": 2, "num_stages": 3}
    constants = {"K": 64, "V": 80, "C": 64, "DECAY": 1, "NORM": False, "PRECISION": "ieee"}
    entry = tuned.key("Card A", "chunk_dq", torch.bfloat16, constants)
    monkeypatch.setattr(tuned, "table", lambda: {entry: measured})
    monkeypatch.setattr(tuned, "card", lambda device: "Card A")
    x = torch.zeros(1, dtype=torch.bfloat16)
    default = {"num_warps": 8, "num_stages": 1}
    assert tuned.options("chunk_dq", x, constants, 8) == measured
    for other in ({"K": 128}, {"DECAY": 2}, {"NORM": True}):
        assert tuned.options("chunk_dq", x, constants | other, 8) == default
    assert (
        tuned.options("chunk_dk", x, constants, 8)
        == tuned.options("chunk_dq", x.half(), constants, 8)
        == default
    )
    monkeypatch.setattr(tuned, "card", lambda device: "Card B")
    assert tuned.options("chunk_dq", x, constants, 8) == default


def test_the_fastest_options_that_fit_are_chosen(tune: ModuleType) -> None:
    from triton.runtime.errors import OutOfResources

    def run(num_warps: int, num_stages: int) -> None:
        if num_stages == 3:
            raise OutOfResources(300_000, 232_448, "shared memory")
        times.append(1.0 / (num_warps + num_stages))

    def bench(call: Any) -> float:
        call()
        return times[-1]

    times: list[float] = []
    assert tune.fastest(run, bench) == {"num_warps": 8, "num_stages": 2}
    with pytest.raises(RuntimeError, match="no options fit"):
        tune.fastest(lambda **_: run(4, 3), bench)


def test_writing_keeps_other_cards(tune: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    tune.write(path, {"A": {"num_warps": 4}})
    tune.write(path, {"B": {"num_warps": 8}})
    assert json.loads(path.read_text()) == {"A": {"num_warps": 4}, "B": {"num_warps": 8}}
    assert [p.name for p in tmp_path.iterdir()] == ["tuned.json"]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2 and "no GPU" in done.stderr and "Traceback" not in done.stderr
