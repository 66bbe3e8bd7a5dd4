"""Speed of the Triton kernels beside flash-linear-attention, flash SDPA and torch.compile, in one run on one GPU.

All contenders of a case take turns within each round; what is printed are medians over the rounds, the roofline time of
our kernels (supra_kernels/cost.py), and at the end each goal as met, missed or not measured. Whatever did not run is
listed with its reason. `--preset quick` ends within 4 minutes, whatever is left by then; a first run spends much of
them on fla's autotuning, which a second finds on disk.

    python kernels/benchmarks/run.py --preset quick --json results.json --plot results.png
    python kernels/benchmarks/run.py --dry-run        (no GPU: every path once at toy size, nothing measured)

Exit status: 0 when it ran (also if cases were left out), 1 if our backend failed, 2 if there is no GPU or an option is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
PACKAGES = ("torch", "triton", "fla-core", "flash-linear-attention")


@dataclass(frozen=True)
class Goal:
    """One aim: the worst value over the rows that `of` reads (None: does not concern it) must reach `target`."""

    text: str
    target: float
    of: Callable[[dict[str, Any]], float | None]

    def judge(self, rows: Sequence[dict[str, Any]], measured: bool) -> dict[str, Any]:
        found = [(value, row) for row in rows if (value := self.of(row)) is not None] if measured else []
        if not found:
            return {
                "goal": self.text,
                "target": self.target,
                "verdict": "not measured",
                "worst": None,
                "where": None,
            }
        worst, row = min(found, key=lambda pair: pair[0])
        where = f"{row['model']}, {row['operation']}, decay {row['decay']}, T = {row['T']}, B = {row['B']}"
        verdict = "met" if worst >= self.target else "missed"
        return {"goal": self.text, "target": self.target, "verdict": verdict, "worst": worst, "where": where}


def _beside_fla(decay: str) -> Callable[[dict[str, Any]], float | None]:
    def value(row: dict[str, Any]) -> float | None:
        concerned = (
            row["contender"] == "fla" and row["operation"] == "forward+backward" and row["decay"] == decay
        )
        return row["times_ours"] if concerned and row["H"] == 4 * row["G"] else None

    return value


def _beside_sdpa(row: dict[str, Any]) -> float | None:
    concerned = row["contender"] == "SDPA flash" and row["operation"] != "step" and row["T"] >= 4096
    return row["times_ours"] if concerned else None


def _bandwidth(row: dict[str, Any]) -> float | None:
    concerned = row["contender"] == "ours" and row["operation"] == "step" and row["B"] == 64
    return row["bandwidth_share"] if concerned else None


GOALS = (
    Goal("forward+backward ≥ 1.3 × fla at GQA 4, decay per query head", 1.3, _beside_fla("per query head")),
    Goal(
        "forward+backward ≥ 2 × fla at GQA 4, decay shared in the group",
        2.0,
        _beside_fla("shared in the group"),
    ),
    Goal("never slower than flash SDPA from T = 4096 on", 1.0, _beside_sdpa),
    Goal("step ≥ 70 % of the memory bandwidth at batch 64", 0.7, _bandwidth),
)


@dataclass
class Run:
    """A run in progress: rows so far, what was left out, and the cases still to come."""

    about: dict[str, Any]
    measured: bool
    json_path: Path | None
    plot_path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    closing: threading.Lock = field(default_factory=threading.Lock)

    def skip(self, what: str, why: str) -> None:
        self.skipped.append({"what": what, "why": why})
        print(f"  left out: {what}: {why}", flush=True)

    def fail(self, what: str, why: str) -> None:
        self.failed.append({"what": what, "why": why})
        print(f"  FAILED: {what}: {why}", flush=True)

    def report(self) -> dict[str, Any]:
        goals = [goal.judge(self.rows, self.measured) for goal in GOALS]
        seconds = round(time.monotonic() - STARTED, 1)
        return {
            **self.about, "measured": self.measured, "seconds": seconds, "cases": self.rows,
            "skipped": self.skipped, "failed": self.failed, "goals": goals,
        }  # fmt: skip

    def close(self, why_not: str) -> dict[str, Any] | None:
        """Print the rest, write the JSON and the plot; the first of two callers does it, the other gets None."""
        if not self.closing.acquire(blocking=False):
            return None
        for what in list(self.waiting):
            self.skip(what, why_not)
        report = self.report()
        print("\ngoals" if self.measured else "\ngoals (a dry run measures nothing)")
        for goal in report["goals"]:
            worst = "" if goal["worst"] is None else f": worst {goal['worst']:.2f} ({goal['where']})"
            print(f"  {goal['verdict']}: {goal['goal']}{worst}")
        print(
            f"{len(self.rows)} rows, {len(self.skipped)} left out, {len(self.failed)} failed, {report['seconds']} s"
        )
        if self.json_path is not None:
            part = self.json_path.with_name(self.json_path.name + ".part")
            part.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            part.replace(self.json_path)
            print(f"wrote {self.json_path}")
        if self.plot_path is not None:
            import plot

            try:
                plot.draw(report, self.plot_path)
                print(f"wrote {self.plot_path}")
            except ValueError as error:
                print(f"no plot: {error}")
        sys.stdout.flush()
        return report


def about(preset: str, tokens: int, dry: bool, backend: str) -> dict[str, Any]:
    """Card, versions, driver and commit."""
    import torch

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__
    here = str(Path(__file__).parent)
    return {
        "preset": preset,
        "backend": backend,
        "tokens": tokens,
        "dtype": "float32" if dry else "bfloat16",
        "card": platform.processor() or platform.machine() if dry else torch.cuda.get_device_name(0),
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader,nounits", "--id=0"
        ),
        "versions": versions,
        "commit": _output("git", "-C", here, "rev-parse", "HEAD"),
        "changed_files": len((_output("git", "-C", here, "status", "--porcelain") or "").splitlines()),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def card_of(name: str) -> Any:
    """The data sheet's numbers for a GPU by the name that torch gives it, or None: PCIe and NVL cards are slower."""
    from supra_kernels.cost import CARDS

    if any(other in name for other in ("PCIe", "PCIE", "NVL", "GH200", "MIG")):
        return None
    for key, card in CARDS.items():
        if all(part in name for part in key.replace("-", " ").replace(" SXM", "").split()):
            return card
    return None


@dataclass(frozen=True)
class Place:
    """Where the tensors go, and the sizes that decide how many sets of them there are."""

    device: Any
    dtype: Any
    l2_bytes: int = 0
    free_bytes: int = 0


def place(dry: bool) -> Place:
    import torch

    if dry:
        return Place(torch.device("cpu"), torch.float32)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return Place(torch.device("cuda"), torch.bfloat16, l2, torch.cuda.mem_get_info()[0])


def measure(run: Run, case: Any, preset: Any, dry: bool, backend: str, card: Any) -> None:
    """Add the rows of one case; whatever cannot run is left out with its reason."""
    import cases
    import timing
    import torch

    from supra_kernels import BackendError, cost

    at = place(dry)
    sets = [cases.make_inputs(case, at.device, at.dtype, 0)]
    if not dry:
        number = timing.number_of_sets(sets[0].nbytes, at.l2_bytes, at.free_bytes)
        sets += [cases.make_inputs(case, at.device, at.dtype, seed) for seed in range(1, number)]
    calls, once = {}, {}
    for name, make in cases.contenders(case, backend, dry).items():
        what = f"{case.describe()}: {name}"
        try:
            calls[name] = [make(x) for x in sets]
            timing.seconds_of(calls[name][0])  # compiles and tunes
            once[name] = 0.0 if dry else timing.seconds_of(calls[name][-1])
        except (BackendError, torch.OutOfMemoryError, ImportError) as error:
            run.skip(what, _first_line(error))
        except Exception as error:  # a rival may fail in any way; ours never may
            (run.fail if name == cases.OURS else run.skip)(what, _first_line(error))
        if name not in once:
            calls.pop(name, None)
            if not dry:
                torch.cuda.empty_cache()
    if dry:
        times = dict.fromkeys(calls)
    else:
        rounds, slow = timing.rounds_that_fit(once, preset.rounds, preset.case_seconds) if once else (0, [])
        for name in slow:
            calls.pop(name)
            run.skip(
                f"{case.describe()}: {name}",
                f"one call takes {once[name]:.1f} s: no {timing.LEAST_ROUNDS} rounds fit",
            )
        times = timing.take_turns(calls, rounds, 8 if case.operation == cases.STEP else 1) if calls else {}
    costs, ours = case.costs(), times.get(cases.OURS)
    for name, found in times.items():
        mine, moved = name == cases.OURS, cost.total(costs).bytes
        row = {
            "model": case.model.name, "H": case.model.H, "G": case.model.G, "D": case.model.D,
            "operation": case.operation, "decay": case.decay, "T": case.T, "B": case.B, "contender": name,
            "ms": None, "low_ms": None, "high_ms": None, "rounds": 1, "input_sets": len(sets), "times_ours": None,
            "roofline_ms": None, "bandwidth_share": None,
        }  # fmt: skip
        if found is not None:
            low, high = found.quartiles
            row |= {"ms": found.median, "low_ms": low, "high_ms": high, "rounds": len(found.ms)}
            row["times_ours"] = None if ours is None else timing.ratio(found, ours)
            if mine and card is not None:
                row["roofline_ms"] = 1e3 * cost.roofline_seconds(costs, card.peak(2), card.bandwidth)
                row["bandwidth_share"] = moved / (found.median * 1e-3) / card.bandwidth
        run.rows.append(row)
        print(line(row), flush=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    if row["ms"] is None:
        return f"  {row['contender']}: ran, not measured"
    text = f"  {row['contender']:<26}{row['ms']:10.3f} ms ({row['low_ms']:.3f} – {row['high_ms']:.3f})"
    if row["times_ours"] is not None and row["contender"] != "ours":
        text += f", {row['times_ours']:.2f} × ours"
    if row["roofline_ms"] is not None:
        text += f", roofline {row['roofline_ms']:.3f} ms"
        if row["operation"] == "step":
            text += f", {100 * row['bandwidth_share']:.0f} % of the bandwidth"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=("quick", "full"), default="quick")
    parser.add_argument("--json", type=Path, help="write every number there")
    parser.add_argument("--plot", type=Path, help="write a PNG there (needs matplotlib)")
    parser.add_argument("--backend", default="triton", help="the backend of ours")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU; nothing is measured")
    args = parser.parse_args(arguments)
    if args.dry_run and args.plot:
        parser.error("--plot: a dry run measures nothing, so there is nothing to draw")
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path.parent} is no folder")
    if args.dry_run:
        # Before Triton is imported: its kernels then run on the CPU, also where there is a GPU.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(
            "error: torch sees no GPU, and speed is measured on one only; --dry-run walks through without",
            file=sys.stderr,
        )
        return 2
    from supra_kernels import BackendError, resolve_backend

    try:
        resolve_backend(args.backend, "cpu" if args.dry_run else "cuda")
    except BackendError as error:
        parser.error(f"--backend {args.backend}: {error}")
    if args.plot:
        import matplotlib  # noqa: F401  # now, not after an hour of measuring
    sys.path.insert(0, str(Path(__file__).parent))
    import cases

    preset = cases.DRY if args.dry_run else cases.PRESETS[args.preset]
    facts = about(args.preset, preset.tokens, args.dry_run, args.backend)
    run = Run(facts, not args.dry_run, args.json, args.plot)
    todo = list(cases.cases(preset))
    run.waiting = [case.describe() for case in todo]
    card = None if args.dry_run else card_of(run.about["card"])
    print(json.dumps({name: run.about[name] for name in ("card", "driver", "versions", "commit")}))
    if card is None and not args.dry_run:
        run.skip(
            "roofline times and shares of the bandwidth", f"no data sheet numbers for {run.about['card']!r}"
        )
    out_of_time = f"the {preset.budget_seconds:.0f} s of this preset were over"

    def give_up() -> None:
        # Tuning and compiling cannot be interrupted from here, only left: the process ends with what it has.
        if run.close(out_of_time) is not None:
            os._exit(1 if run.failed else 0)

    alarm = threading.Timer(max(0.0, preset.budget_seconds - (time.monotonic() - STARTED)), give_up)
    alarm.daemon = True
    alarm.start()
    try:
        for case in todo:
            print(case.describe(), flush=True)
            try:
                measure(run, case, preset, args.dry_run, args.backend, card)
            except Exception as error:  # what is measured already must not be lost
                run.fail(case.describe(), _first_line(error))
            run.waiting.remove(case.describe())
            if not args.dry_run:
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        run.close("interrupted")
        return 130
    report = run.close(out_of_time)
    if report is None:
        alarm.join()  # it is writing, and ends the process
        return 0
    alarm.cancel()
    return 1 if run.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
