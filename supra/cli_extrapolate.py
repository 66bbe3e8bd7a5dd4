"""`supra extrapolate`: small models trained at one length and tested at many times it, by method of positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import Device, Json, Threads, say, set_threads
from .errors import UserError


def extrapolate(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe of this kind (small, …) or a YAML file.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder of the runs; runs/NAME.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field: seeds=[0], tasks.chars=null.")
    ] = None,
    merge: Annotated[
        list[Path] | None, typer.Option("--merge", help="Other folders of runs that go onto the page.")
    ] = None,
    device: Device = "auto",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Train short and test long, every method by every mixer: a table, and a plot of the loss by position.

    Run again, it does what is left; several processes (torchrun) share the runs out.
    """
    from supra_eval.extrapolate import recipe as recipes

    loaded = recipes.load(recipe, overrides or [])
    folder = out or Path("runs") / loaded.name
    for other in merge or []:
        if not other.is_dir():
            raise UserError(
                f"--merge {other}", "is no folder", "Give folders that `supra extrapolate -o` wrote"
            )
    set_threads(threads)
    from supra_eval.extrapolate.report import require_mergeable, write
    from supra_eval.extrapolate.sweep import run
    from supra_eval.grid import alone, num_finished, open_processes, share_of

    require_mergeable(loaded, folder, merge or [])
    state = open_processes(device)
    say(f"{state.num_processes} processes · device {state.device}")
    for pair, reason in loaded.left_out().items():
        say(f"left out: {pair}: {reason}")
    run(loaded, folder, share_of(state), say)
    # No barrier: a process whose runs are done need not wait for the others'. Whoever ends last writes the whole table.
    cells = loaded.cells()
    with alone(folder):
        finished, total = num_finished(cells, folder), len(cells)
        if not state.is_main_process and finished < total:
            return
        page = write([folder, *(merge or [])], folder / "report")
    if state.is_main_process:
        done = {"folder": str(folder), "runs": total, "finished": finished}
        typer.echo(json.dumps(done) if as_json else page)
        say(f"{finished} of {total} runs finished · wrote {folder}/report/table.md, loss_by_position.png")
