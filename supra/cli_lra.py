"""`supra lra`: long-range tasks, their data, and models compared on them from scratch and after self-pretraining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .cli_lra_data import data_app
from .console import Device, Json, Threads, say, set_threads
from .errors import UserError

lra_app = typer.Typer(no_args_is_help=True)
lra_app.add_typer(data_app, name="data")


@lra_app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe of this kind (mnist1d, …) or a YAML file.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder of the runs; runs/NAME.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field: training.epochs=10, seeds=[0,1].")
    ] = None,
    device: Device = "auto",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Run a comparison's whole grid; run again, it does what is left. Several processes (torchrun) share it out."""
    from supra_eval.lra import recipe as recipes

    comparison = recipes.load(recipe, overrides or [])
    folder = out or Path("runs") / comparison.name
    set_threads(threads)
    from supra_eval.grid import num_finished, open_processes, share_of
    from supra_eval.lra.source import open_task
    from supra_eval.lra.sweep import require_same, run

    require_same(comparison, folder)
    state = open_processes(device)
    say(f"{state.num_processes} processes · device {state.device}")
    with state.main_process_first():
        task, baselines = open_task(comparison.task, folder / "task", say)
    for name, accuracy in baselines.items():
        say(f"{name}: {100 * accuracy:.1f} % on test")
    run(comparison, task, baselines, folder, share_of(state), say)
    # No barrier: a process whose runs are done need not wait hours for the others'.
    if state.is_main_process:
        cells = comparison.cells()
        finished, total = num_finished(cells, folder), len(cells)
        done = {"folder": str(folder), "runs": total, "finished": finished}
        typer.echo(json.dumps(done) if as_json else f"{folder}: {finished} of {total} runs finished")
        say(f"next: supra lra report {folder} -o {folder}/report")


@lra_app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `supra lra run` wrote.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder of table.md, results.json and accuracy.png.")
    ],
    as_json: Json = False,
) -> None:
    """One table and one plot from any set of runs: mean and standard deviation over seeds, trivial baselines."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(str(folder), "is no folder", "Give folders that `supra lra run` wrote")
    from supra_eval.lra.report import write

    table = write(folders, out)
    typer.echo((out / "results.json").read_text() if as_json else table)
    say(f"wrote {out}/table.md, {out}/accuracy.png")
