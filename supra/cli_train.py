"""`supra train`: a recipe's stages on a converted model, and what they will cost before they run."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from .console import Json, Threads, say, set_threads, show, speaks
from .errors import SupraError, UserError


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name or a YAML file.")],
    model: Annotated[Path | None, typer.Option("--model", help="Folder that `supra convert` wrote.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder: metrics, checkpoints, final model.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint.")
    ] = False,
    skip_steps: Annotated[
        str | None,
        typer.Option(help="With --resume: train nothing in these steps of the run (120 or 120,130-140)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate tokens, time, memory and disk; train nothing.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field: stages.0.total_tokens=1e6.")
    ] = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Train a converted model by a recipe; kill it at any time and go on with --resume."""
    from . import config

    loaded = config.load(recipe, overrides or [])
    if model is None:
        raise UserError("--model", "is missing", "Give the folder that `supra convert` wrote")
    run_dir = out or Path("runs") / loaded.name
    skipped = _step_numbers(skip_steps)
    if skipped and not resume:
        raise UserError("--skip-steps", "goes with --resume", "Start the run first")
    set_threads(threads)
    from . import train as training

    if dry_run:
        estimate = training.dry_run(loaded, model, run_dir)
        if as_json and speaks():
            typer.echo(estimate.to_json())
        elif speaks():
            show(estimate.render())
        say(f"next: supra train {recipe} --model {model} -o {run_dir}")
        return
    try:
        final = training.run_training(loaded, model, run_dir, resume=resume, skip_steps=skipped)
    except training.DivergedError as error:
        again = [*launcher(), "train", recipe, "--model", str(model)]
        changes = [part for override in overrides or [] for part in ("--set", override)]
        changes += ["--threads", str(threads)] if threads else []
        skip = [*again, "-o", str(run_dir), *changes, "--resume", "--skip-steps", str(error.global_step)]
        lr = next(stage.optimizer.lr for stage in loaded.stages if stage.name == error.stage) / 2
        lower = f"stages.{error.stage}.optimizer.lr={lr:g}"
        slower = [*again, "-o", f"{run_dir}-slower", *changes, "--set", lower]
        # A layerwise stage, which meets a step in every layer, leaves none out.
        leave_out = f"Leave this step out: {shlex.join(skip)} ; or b" if error.global_step else "B"
        mend = f"{error.mend} {leave_out}egin anew with a lower rate: {shlex.join(slower)}"
        raise SupraError(error.thing, error.reason, mend) from None
    if speaks():
        typer.echo(json.dumps({"model": str(final), "run": str(run_dir)}) if as_json else str(final))
    say(f"next: supra generate {final} 'Once upon a time' · supra eval {final} --teacher TEACHER --data FILE")


def launcher() -> list[str]:
    """What comes before `train` on a command line that starts as many processes as there are now."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ["supra"]
    on_each = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    nodes = (
        ["--nnodes", str(count // on_each)] if on_each < count else []
    )  # where they meet is the user's to say
    return ["torchrun", *nodes, "--nproc-per-node", str(on_each), "-m", "supra"]


def _step_numbers(text: str | None) -> tuple[int, ...]:
    """`120,130-132` as 120, 130, 131, 132."""
    numbers: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if not text:
            break
        if not (first.isdigit() and (last or first).isdigit()) or int(last or first) < int(first):
            raise UserError(f"--skip-steps {text}", "is no list of steps", "Write for example 120,130-140")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
