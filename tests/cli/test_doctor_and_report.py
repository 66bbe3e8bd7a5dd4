"""The doctor tells a wrong kernel from a right one; the report page holds the numbers it was given."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from supra import doctor
from supra.report import context_table, perplexity_table, write_report
from supra_kernels import BackendError

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


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TOKENS", 70)


@pytest.fixture(scope="module")
def examined() -> doctor.Examination:
    """One examination of this machine, for the tests that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "TOKENS", 70)
        return doctor.examine()


def test_doctor_checks_every_operator_of_every_backend(examined: doctor.Examination) -> None:
    report = examined
    checked = {check.backend: check for check in report.backends}
    assert {check.operator for check in checked["torch"].operators} == {*doctor.OPERATORS, *doctor.LAYERS}
    for check in (*checked["torch"].operators, *checked["reference"].operators):
        assert check.result == "passed"
        assert check.max_error is not None and check.milliseconds is not None
    assert report.healthy
    assert report.auto_backend in checked
    found = json.loads(report.to_json())
    assert found["healthy"]
    assert [each["backend"] for each in found["backends"]] == list(checked)
    text = rendered(report)
    for part in ("torch", "forward", "backward", "step", "window", "fp32", "passed"):
        assert part in text


def rendered(report: doctor.Examination) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.render())
    return console.export_text()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for a GPU here")
def test_doctor_says_that_triton_is_interpreted(examined: doctor.Examination) -> None:
    pytest.importorskip("triton")
    check = next(check for check in examined.backends if check.backend == "triton")
    assert check.status == "interpreted"
    assert [each.result for each in check.operators] == ["passed"] * 7
    assert all(each.milliseconds is None for each in check.operators)
    assert "triton, interpreted" in rendered(examined)


def only(monkeypatch: pytest.MonkeyPatch, **backends: str) -> None:
    """Only these backends, and their operators without whole layers."""
    monkeypatch.setattr(doctor, "available_backends", lambda: backends)
    monkeypatch.setattr(doctor, "LAYERS", {})


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("operator", ["linear_attention", "linear_attention_step", "window_attention"])
def test_doctor_reports_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    only(monkeypatch, torch="available")
    right = getattr(doctor, operator)

    def wrong(*args: object, backend: str, **kwargs: object) -> tuple[torch.Tensor, object]:
        output, other = right(*args, backend=backend, **kwargs)
        return (output * 1.001 if backend == "torch" else output), other

    monkeypatch.setattr(doctor, operator, wrong)
    report = doctor.examine()
    assert not report.healthy
    names = {
        "linear_attention": {"forward", "backward", "decay per token"},
        "linear_attention_step": {"step"},
        "window_attention": {"window"},
    }
    wrongs = {check.operator for check in report.backends[0].operators if check.result == "wrong result"}
    assert wrongs == names[operator]
    assert "WRONG RESULT" in rendered(report)


@pytest.mark.usefixtures("short")
def test_refusals_failures_and_absent_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is no failure, an exception is one, and neither ends the examination."""
    only(monkeypatch, picky="available", absent="it needs a GPU", torch="available")
    right = doctor.linear_attention

    def picky(*args: Any, backend: str, **kwargs: Any) -> Any:
        if backend == "picky":
            raise BackendError("backend 'picky' refuses fp32 inputs")
        return right(*args, backend=backend, **kwargs)

    monkeypatch.setattr(doctor, "linear_attention", picky)
    for name in ("linear_attention_step", "window_attention"):
        inner = getattr(doctor, name)
        monkeypatch.setattr(
            doctor,
            name,
            lambda *a, backend, inner=inner, **k: inner(*a, backend=backend.replace("picky", "torch"), **k),
        )
    report = doctor.examine()
    refused, absent, _ = report.backends
    assert [check.result for check in refused.operators] == [
        *["refused: backend 'picky' refuses fp32 inputs"] * 3, "passed", "passed"
    ]  # fmt: skip
    assert absent.status == "it needs a GPU" and not absent.operators
    assert report.healthy
    text = rendered(report)
    assert "refused: backend 'picky' refuses fp32 inputs" in text
    assert "unavailable" in text and "it needs a GPU" in text

    def broken(*args: Any, backend: str, **kwargs: Any) -> Any:
        if backend == "picky":
            raise RuntimeError("no kernel image")
        return right(*args, backend=backend, **kwargs)

    monkeypatch.setattr(doctor, "linear_attention", broken)
    report = doctor.examine()
    assert report.backends[0].operators[0].result == "failed: RuntimeError: no kernel image"
    assert not report.healthy


def test_doctor_in_bf16_and_with_nan() -> None:
    """What a GPU adds to the examination, on the backend that runs anywhere."""
    bench, cpu = doctor.Bench(), torch.device("cpu")
    for operator in doctor.OPERATORS:
        check = bench.check("torch", operator, torch.bfloat16, cpu, 70, False)
        assert (check.dtype, check.result) == ("bf16", "passed"), check
    assert math.isnan(doctor._error([torch.tensor([1.0, math.nan])], [torch.ones(2)]))


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
