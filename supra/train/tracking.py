"""What a run says of itself: metrics as JSON lines, and progress on stderr."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_QUIET_SECONDS = 20.0  # between lines where there is no terminal to draw a bar on


class Metrics:
    """`metrics.jsonl`: one line a step, in order, no step twice.

    `keep`: on resume, lines from the first that it does not keep are dropped; they belong to work that is done again.
    """

    def __init__(self, path: Path, *, keep: Callable[[dict[str, Any]], bool]) -> None:
        kept = b"".join(_whole_lines(path, keep)) if path.exists() else b""
        beside = path.with_suffix(".partial")
        beside.write_bytes(kept)
        os.replace(beside, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: Path, *, last_step: float = math.inf) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl` up to a step, of one that is still written too: none before it begins."""
    path = run_dir / "metrics.jsonl"
    lines = _whole_lines(path, lambda row: bool(row["step"] <= last_step)) if path.exists() else ()
    return [json.loads(line) for line in lines]


def _whole_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> Iterator[bytes]:
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or not keep(json.loads(line)):
                return
        except (ValueError, KeyError):
            return  # a line cut short by a crash
        yield line


class Reporter:
    """Messages and progress on stderr: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, soft_wrap=True, highlight=False)

    @staticmethod
    def silent() -> "Reporter":
        """Says nothing: for the processes beside the main one."""
        return Reporter(Console(quiet=True))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", markup=False)

    @contextmanager
    def stage(self, name: str, *, done: int, num_steps: int) -> Iterator["StageProgress"]:
        """Progress of one stage, `done` of its steps behind it."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        with bar:
            yield StageProgress(self, bar, name, done, num_steps)


class StageProgress:
    """Speed and loss of the stage that runs."""

    def __init__(self, reporter: Reporter, bar: Progress, name: str, done: int, num_steps: int) -> None:
        self._reporter, self._bar, self._name = reporter, bar, name
        self._start = self._last_line = time.monotonic()
        self._first, self._num_steps = done, num_steps
        self._task = bar.add_task(name, total=num_steps, completed=done, numbers="")

    def step(self, done: int, *, loss: float, tokens_per_second: float) -> None:
        numbers = f"loss {loss:.4g} · {tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=done, numbers=numbers)
        now = time.monotonic()
        if not self._reporter.console.is_terminal and (
            now - self._last_line > _QUIET_SECONDS or done == self._num_steps
        ):
            self._last_line = now
            left = (now - self._start) / (done - self._first) * (self._num_steps - done)
            self._reporter.say(f"{self._name} {done}/{self._num_steps} · {numbers} · ETA {left:.0f} s")
