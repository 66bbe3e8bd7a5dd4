"""`supra train`: a recipe's stages on a converted model, and what they will cost before they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import Json, Threads, say, set_threads, show, speaks
from .errors import UserError


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name or a YAML file.")],
    model: Annotated[Path | None, typer.Option("--model", help="Folder that `supra convert` wrote.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder: metrics, checkpoints, final model.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint.")
    ] = False,
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
    set_threads(threads)
    from . import train as training

    if dry_run:
        estimate = training.dry_run(loaded, model, run_dir)
        if as_json:
            typer.echo(estimate.to_json())
        else:
            show(estimate.render())
        say(f"next: supra train {recipe} --model {model} -o {run_dir}")
        return
    final = training.run_training(loaded, model, run_dir, resume=resume)
    if speaks():
        typer.echo(json.dumps({"model": str(final), "run": str(run_dir)}) if as_json else str(final))
    say(f"next: supra generate {final} 'Once upon a time' · supra eval {final} --teacher TEACHER --data FILE")
