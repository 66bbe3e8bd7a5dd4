"""The benchmark walks through all it would measure, never loses or hides a case, and judges its goals rightly."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from supra_kernels import BackendError

FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"
sys.path.insert(0, str(FOLDER))

import cases  # noqa: E402
import plot  # noqa: E402
import run  # noqa: E402
import timing  # noqa: E402

has_fla = pytest.mark.skipif("fla" not in sys.modules and not run.metadata.packages_distributions().get("fla"),
                             reason="the extra `fla` is not installed")  # fmt: skip


@pytest.fixture(autouse=True)
def the_process_keeps_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


def test_without_a_gpu_the_command_stops_with_one_error() -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / "run.py"), "--preset", "quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=hidden)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: torch sees no GPU") and done.stderr.count("\n") == 1


def test_a_dry_run_refuses_a_plot(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        run.main(["--dry-run", "--plot", str(tmp_path / "x.png")])
    assert stop.value.code == 2
    assert "nothing to draw" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["--dry-run", "--json", str(tmp_path / "missing" / "x.json")])


@has_fla
def test_the_dry_run_runs_every_contender_of_every_case(tmp_path: Path) -> None:
    out = tmp_path / "dry.json"
    assert run.main(["--dry-run", "--backend", "torch", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["measured"] is False
    assert report["skipped"] == report["failed"] == []
    assert {goal["verdict"] for goal in report["goals"]} == {"not measured"}
    assert all(row["ms"] is None for row in report["cases"])
    seen = {(row["operation"], row["decay"], row["contender"]) for row in report["cases"]}
    passes = [(op, decay, name) for op in ("forward", "forward+backward") for decay in cases.DECAYS
              for name in (cases.OURS, cases.FLA, cases.FLA_REPEATED, cases.SDPA, cases.COMPILED)]  # fmt: skip
    steps = [("step", decay, name) for decay in cases.DECAYS
             for name in (cases.OURS, cases.FLA, cases.SDPA, cases.COMPILED)]  # fmt: skip
    assert seen == {*passes, *steps}
    assert report["versions"]["torch"] == torch.__version__
    assert report["commit"] is None or len(report["commit"]) == 40


@has_fla
@pytest.mark.parametrize("operation", [cases.FORWARD, cases.BOTH, cases.STEP])
@pytest.mark.parametrize("decay", list(cases.DECAYS))
def test_linear_contenders_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, operation: str, decay: str
) -> None:
    """Otherwise a ratio of their times would mean nothing."""
    monkeypatch.setattr(cases, "compiled", lambda function, dry: function)
    model = cases.TOY[0]
    case = cases.Case(model, decay, operation, 1 if operation == cases.STEP else 40, 2)
    found = {}
    for name, make in cases.contenders(case, "torch", dry=True).items():
        if name != cases.SDPA:
            result = make(cases.make_inputs(case, torch.device("cpu"), torch.float32, 3))()
            result = list(result) if isinstance(result, tuple) else [result]
            if name == cases.FLA_REPEATED and operation == cases.BOTH:
                result[1:3] = [x.unflatten(2, (model.G, -1)).sum(3) for x in result[1:3]]
            if operation == cases.STEP:
                result = [result[0].reshape(2, model.H, -1)]
            found[name] = result
    for name, result in found.items():
        assert len(result) == len(found[cases.OURS]), name
        for got, want in zip(result, found[cases.OURS], strict=True):
            torch.testing.assert_close(
                got, want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


class Event:
    """A CUDA event on the wall clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return max(1e-6, 1e3 * (end.at - self.at))


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured path on a CPU: what torch.cuda would answer on one H100, and toy sizes."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "NVIDIA H100 80GB HBM3")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(
        run, "place", lambda dry: run.Place(torch.device("cpu"), torch.float32, 200_000, 10**9)
    )
    monkeypatch.setattr(cases, "compiled", lambda function, dry: function)

    def no_fla(dry: bool) -> Any:
        raise BackendError("flash-linear-attention is not installed")

    monkeypatch.setattr(cases, "fla_functions", no_fla)
    quick = cases.Preset((64,), 64, (64,), 3, 5.0, 300.0, cases.TOY)
    monkeypatch.setattr(cases, "PRESETS", {"quick": quick, "full": quick})


@pytest.mark.usefixtures("pretended_gpu")
def test_a_measured_run_has_times_ratios_goals_and_a_plot(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "r.json", tmp_path / "r.png"
    assert run.main(["--backend", "torch", "--json", str(out), "--plot", str(png)]) == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    report = json.loads(out.read_text())
    assert report["measured"] is True and report["card"] == "NVIDIA H100 80GB HBM3"
    assert not report["failed"]
    assert {skip["why"] for skip in report["skipped"]} <= {
        "BackendError: flash-linear-attention is not installed",
        *(skip["why"] for skip in report["skipped"] if "no 3 rounds fit" in skip["why"]),
    }
    ours = [row for row in report["cases"] if row["contender"] == "ours"]
    assert len(ours) == 12
    for row in ours:
        assert row["low_ms"] <= row["ms"] <= row["high_ms"]
        assert row["times_ours"] == 1.0
        assert 0 < row["roofline_ms"] < row["ms"] and 0 < row["bandwidth_share"] < 1
        assert row["input_sets"] > 1 or row["operation"] != "step"
    verdicts = {goal["goal"]: goal["verdict"] for goal in report["goals"]}
    assert list(verdicts.values())[:2] == ["not measured"] * 2  # fla did not run
    assert verdicts["step ≥ 70 % of the memory bandwidth at batch 64"] == "missed"
    assert "left out" in capsys.readouterr().out


@pytest.mark.usefixtures("pretended_gpu")
def test_what_does_not_fit_the_time_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The timer ends the process although the first case would never finish."""
    ended = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(run, "measure", lambda *arguments: ended.wait(60))
    quick = cases.Preset((16,), 16, (1,), 3, 5.0, time.monotonic() - run.STARTED + 0.5, cases.TOY)
    monkeypatch.setattr(cases, "PRESETS", {"quick": quick})
    out = tmp_path / "r.json"
    assert run.main(["--json", str(out)]) == 0
    assert codes == [0]
    report = json.loads(out.read_text())
    assert [skip["what"] for skip in report["skipped"]] == [case.describe() for case in cases.cases(quick)]
    assert all("s of this preset were over" in skip["why"] for skip in report["skipped"])


@pytest.mark.usefixtures("pretended_gpu")
def test_our_failure_is_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("illegal memory access\nsecond line")

    monkeypatch.setattr(cases, "linear_attention", broken)
    out = tmp_path / "r.json"
    assert run.main(["--backend", "torch", "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert len(report["failed"]) == 8
    assert {failure["why"] for failure in report["failed"]} == {"RuntimeError: illegal memory access"}
    assert any(row["contender"] == cases.SDPA for row in report["cases"])


def row(**changes: Any) -> dict[str, Any]:
    base = {"model": "m", "H": 32, "G": 8, "D": 128, "operation": "forward+backward", "decay": "per query head",
            "T": 4096, "B": 1, "contender": "fla", "ms": 1.0, "times_ours": 1.5, "roofline_ms": None,
            "bandwidth_share": None}  # fmt: skip
    return base | changes


@pytest.mark.parametrize(
    ("goal", "rows", "verdict"),
    [
        (0, [row(), row(T=8192, times_ours=1.31)], "met"),
        (0, [row(), row(T=8192, times_ours=1.29)], "missed"),
        (0, [row(H=9, G=3), row(operation="forward"), row(contender=cases.FLA_REPEATED)], "not measured"),
        (1, [row(decay="shared in the group", times_ours=2.1), row()], "met"),
        (1, [row(decay="shared in the group", times_ours=None)], "not measured"),
        (2, [row(contender=cases.SDPA, times_ours=1.0)], "met"),
        (2, [row(contender=cases.SDPA, times_ours=0.99, operation="forward", decay="none")], "missed"),
        (2, [row(contender=cases.SDPA, times_ours=0.5, T=2048)], "not measured"),
        (3, [row(contender="ours", operation="step", B=64, T=1, bandwidth_share=0.71)], "met"),
        (3, [row(contender="ours", operation="step", B=1, T=1, bandwidth_share=0.1)], "not measured"),
    ],
)
def test_goals(goal: int, rows: list[dict[str, Any]], verdict: str) -> None:
    judged = run.GOALS[goal].judge(rows, measured=True)
    assert judged["verdict"] == verdict
    assert (judged["where"] is None) == (verdict == "not measured")
    assert run.GOALS[goal].judge(rows, measured=False)["verdict"] == "not measured"


def test_presets_cover_the_lengths_and_put_goals_first() -> None:
    for preset in cases.PRESETS.values():
        todo = list(cases.cases(preset))
        assert len(set(todo)) == len(todo)
        assert {(case.model, case.decay) for case in todo} == {
            (m, d) for m in cases.MODELS for d in cases.DECAYS
        }
        assert {case.T for case in todo} >= {1024, 4096, 131072}
        assert all(preset.tokens == case.T * case.B for case in todo if case.operation != cases.STEP)
        assert todo[0] == cases.Case(
            cases.MODELS[0],
            "per query head",
            cases.BOTH,
            preset.lengths[0],
            preset.tokens // preset.lengths[0],
        )
        assert any(case.operation == cases.STEP and case.B == 64 for case in todo)
    assert set(cases.PRESETS["full"].lengths) == {1024 * 2**i for i in range(8)}
    assert cases.PRESETS["quick"].budget_seconds < 240


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100-80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA H100 PCIe", None), ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None), ("NVIDIA A100 80GB PCIe", None),
    ],
)  # fmt: skip
def test_cards_by_the_name_that_torch_gives(name: str, card: str | None) -> None:
    found = run.card_of(name)
    assert (None if found is None else found.name) == card


def test_rounds_and_sets() -> None:
    assert timing.rounds_that_fit({"ours": 0.01, "fla": 0.01}, 30, 4.0) == (30, [])
    assert timing.rounds_that_fit({"ours": 0.5, "fla": 0.5}, 30, 4.0) == (4, [])
    assert timing.rounds_that_fit({"ours": 0.1, "slow": 2.0, "fla": 0.1}, 30, 4.0) == (20, ["slow"])
    assert timing.rounds_that_fit({"ours": 9.0, "fla": 0.1}, 30, 4.0) == (1, ["fla"])
    assert timing.rounds_that_fit({"ours": 0.1, "SDPA": 1.2, "compiled": 1.0}, 30, 4.0) == (3, ["compiled"])
    assert timing.number_of_sets(10, 100, 10**6) == 40
    assert timing.number_of_sets(10**9, 100, 10**10) == 1
    assert timing.number_of_sets(10**9, 10**10, 10**9) == 1
    ours, theirs = timing.Times((1.0, 2.0, 4.0)), timing.Times((2.0, 4.0, 4.0))
    assert timing.ratio(theirs, ours) == 2.0


def test_every_contender_meets_every_set_and_starts_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    log: list[tuple[str, int]] = []

    def call(name: str, i: int) -> Callable[[], None]:
        return lambda: log.append((name, i))

    times = timing.take_turns({name: [call(name, i) for i in range(3)] for name in "ab"}, 4, 2)
    assert {name: len(found.ms) for name, found in times.items()} == {"a": 4, "b": 4}
    assert [name for name, _ in log[::4]] == ["a", "b", "a", "b"]
    assert [i for name, i in log if name == "a"] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        plot.draw({"measured": False, "cases": []}, tmp_path / "x.png")
