"""The doctor tells a wrong kernel from a right one; the report page holds the numbers it was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from supra import doctor
from supra.report import context_table, perplexity_table, write_report

RESULTS = {
    "teacher_name": "Tiny", "recipe": "demo",
    "perplexity": {"teacher": 10.0, "untrained": 90.0, "transfer": 12.0, "final": 11.0,
                   "window_only": 15.0, "linear_only": 200.0, "paper_preset": 4000.0},
    "heldout": ["book.txt"], "eval_length": 64, "scored_tokens": 630,
    "decode_ms": {"teacher": {"128": 10.0, "2048": 20.0}, "student": {"128": 11.0, "2048": 11.0}},
    "context_bytes": {"teacher": {"128": 1e6, "2048": 16e6}, "student": {"128": 2e6, "2048": 2e6}},
    "peak_bytes": 2.5e9, "wall_s": 600.0, "train_s": 300.0, "tokens_trained": 100_000, "seed": 0,
    "command": "supra demo", "runs_on": "2 CPU threads", "versions": {"torch": "2.13.0"},
}  # fmt: skip


def test_doctor_checks_every_backend() -> None:
    report = doctor.examine()
    checked = {check.backend: check for check in report.backends}
    assert checked["torch"].max_error is not None
    assert report.healthy
    assert json.loads(report.to_json())["healthy"]
    assert report.auto_backend in checked


def test_doctor_reports_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor.linear_attention

    def wrong(q: torch.Tensor, *args: object, backend: str, **kwargs: object) -> tuple[torch.Tensor, object]:
        output, state = right(q, *args, backend=backend, **kwargs)
        return (output * 1.001 if backend == "torch" else output), state

    monkeypatch.setattr(doctor, "linear_attention", wrong)
    assert not doctor.examine().healthy


def test_report_page_and_plots(tmp_path: Path) -> None:
    metrics = [{"stage": "transfer", "tokens": 1000, "loss": 1 / i} for i in range(1, 9)]
    texts = {"prompt": "Once", "teacher": "upon a time", "student": "upon a\nhill"}
    page = write_report(tmp_path, RESULTS, metrics, texts).read_text()
    for part in (
        "11.00 | 1.100",
        "upon a hill",
        "2.50 GB",
        "100,000 tokens",
        perplexity_table(RESULTS),
        context_table(RESULTS),
    ):
        assert part in page
    for plot in ("loss.png", "memory.png", "time.png"):
        assert (tmp_path / plot).read_bytes()[:4] == b"\x89PNG"
        assert plot in page
