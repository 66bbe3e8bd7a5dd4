"""Trains a recipe in children that die by SIGKILL at given moments; each takes up where the last one fell.

Usage: kill_worker.py RECIPE MODEL_DIR RUN_DIR MOMENT...
A moment is `lines:N` (the parent kills once metrics.jsonl has N lines, wherever the child then is),
`before:N` or `after:N` (the child dies just before or after it renames its N-th checkpoint into place), or
`export` (just before it renames the exported model).
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from supra import config
from supra.train import checkpoint, export, trainer


def main() -> None:
    recipe_path, model_dir, run_dir, *moments = sys.argv[1:]
    recipe = config.load(recipe_path)
    for moment in moments:
        child = os.fork()
        if child == 0:
            _prepare_to_die(moment)
            trainer.run_training(recipe, model_dir, run_dir, resume=Path(run_dir, "run.json").exists())
            os._exit(0)
        if moment.startswith("lines:"):
            _kill_after_lines(child, Path(run_dir, "metrics.jsonl"), int(moment.partition(":")[2]))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"the child for {moment} was not killed (status {status})")


def _kill_after_lines(child: int, metrics: Path, num_lines: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_lines:
            break
        time.sleep(0.003)
    os.kill(child, signal.SIGKILL)


def _prepare_to_die(moment: str) -> None:
    kind, _, number = moment.partition(":")
    if kind == "lines":
        return
    module: Any = export if kind == "export" else checkpoint
    renames = 0

    class DyingOs:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def rename(self, source: Any, target: Any) -> None:
            nonlocal renames
            renames += 1
            now = kind == "export" or renames == int(number)
            if now and kind != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            os.rename(source, target)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)

    module.os = DyingOs()


if __name__ == "__main__":
    main()
