"""`supra lra data`: generate a long-range task, or look at one that lies in a folder."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import Json, say, show
from .errors import UserError

if TYPE_CHECKING:
    from supra_eval.lra.task import Task

data_app = typer.Typer(no_args_is_help=True, help="Generate long-range tasks, and look at them.")

Out = Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw: the same seed gives the same data.", min=0)]
Train = Annotated[int, typer.Option(help="Examples to train on.", min=1)]
Validation = Annotated[int, typer.Option(help="Examples to choose by.", min=1)]
Test = Annotated[int, typer.Option(help="Examples to test on.", min=1)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a generated task of that name.")]


@data_app.command()
def listops(
    out: Out, seed: Seed = 0, train: Train = 96_000, validation: Validation = 2_000, test: Test = 2_000,
    min_length: Annotated[int, typer.Option(help="Tokens that an expression must exceed.", min=0)] = 500,
    max_length: Annotated[int, typer.Option(help="Tokens that it must stay below.", min=5)] = 2_000,
    tsv: Annotated[bool, typer.Option("--tsv", help="Also write the original's basic_*.tsv files.")] = False,
    overwrite: Overwrite = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Nested MIN, MAX, MED and SM over digits, by Long Range Arena's rules and sizes."""
    settings = dict(
        train=train, validation=validation, test=test, min_length=min_length, max_length=max_length
    )

    def extra(task: Task, folder: Path) -> None:
        from supra_eval.lra.data.listops import write_tsv

        write_tsv(task, folder)

    _write("listops", out, seed, settings, overwrite, as_json, extra if tsv else None)


@data_app.command()
def pathfinder(
    out: Out, seed: Seed = 0, train: Train = 160_000, validation: Validation = 20_000, test: Test = 20_000,
    size: Annotated[int, typer.Option(help="Pixels a side: 16, 32, 64, 128 (PathX) or 256.")] = 32,
    contour_length: Annotated[
        int | None, typer.Option(help="Paddles of a contour; the size's own (14, at 16 pixels 6) unless given.")
    ] = None,
    distractors: Annotated[int | None, typer.Option(help="Distractors, at most, instead of the size's own.")] = None,
    overwrite: Overwrite = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Pictures of dashed contours: do the two disks lie on the same one?"""
    settings: dict[str, Any] = dict(
        train=train, validation=validation, test=test, size=size, contour_length=contour_length,
        num_distractors=distractors,
    )  # fmt: skip

    _write("pathfinder", out, seed, settings, overwrite, as_json)


@data_app.command()
def mnist1d(
    out: Out, seed: Seed = 0, train: Train = 2_000, validation: Validation = 500, test: Test = 1_000,
    length: Annotated[int, typer.Option(help="Numbers of a signal.", min=2)] = 40,
    overwrite: Overwrite = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Ten short templates, stretched, moved and noised, by the generator of the package mnist1d."""
    settings = dict(train=train, validation=validation, test=test, length=length)

    _write("mnist1d", out, seed, settings, overwrite, as_json)


@data_app.command()
def chain(
    out: Out, seed: Seed = 0, train: Train = 10_000, validation: Validation = 1_000, test: Test = 1_000,
    steps: Annotated[str, typer.Option(help="Steps of a chain: 32, or 8-32.")] = "32",
    validation_steps: Annotated[str | None, typer.Option(help="The same for validation, unless as train.")] = None,
    test_steps: Annotated[str | None, typer.Option(help="The same for test: extrapolation.")] = None,
    largest_step: Annotated[int, typer.Option(help="Steps are ±1 to this.", min=1, max=9)] = 9,
    rule: Annotated[
        str, typer.Option(help="modulo wraps around at ten; within draws only steps that stay in 0 to 9.")
    ] = "modulo",
    overwrite: Overwrite = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Chains of additions and subtractions within ten: as hard at any length."""
    settings: dict[str, Any] = dict(
        train=train, validation=validation, test=test, train_steps=_range("--steps", steps),
        validation_steps=validation_steps and _range("--validation-steps", validation_steps),
        test_steps=test_steps and _range("--test-steps", test_steps), largest_step=largest_step, rule=rule,
    )  # fmt: skip

    _write("chain", out, seed, settings, overwrite, as_json)


@data_app.command()
def ucr(
    out: Out, seed: Seed = 0,
    name: Annotated[str, typer.Option(help="A set inside the wheel aeon: ACSF1, OSULeaf, ArrowHead …")] = "ACSF1",
    validation: Annotated[
        float, typer.Option(help="Share of each class of train that becomes validation.", min=0, max=1)
    ] = 0.2,
    overwrite: Overwrite = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Real time series of the UCR and UEA archives, out of the wheel aeon."""
    settings: dict[str, Any] = dict(name=name, validation=validation)

    _write("ucr", out, seed, settings, overwrite, as_json)


@data_app.command("show")
def show_task(
    folder: Annotated[Path, typer.Argument(help="What a command here wrote, or where released data lies.")],
    task: Annotated[
        str | None, typer.Option(help="Of released data: listops, text, retrieval, image, pathfinder, pathx, pathx256.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a validation split that the data lacks.", min=0)] = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Counts, lengths, label balance and trivial baselines of a task that lies in a folder."""
    from supra_eval.lra.data.load import load_task
    from supra_eval.lra.data.summary import summarise

    loaded = load_task(task, folder, seed=seed, say=say)
    summary = summarise(loaded)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "name": loaded.name, "summary": summary}))
        return
    typer.echo(f"{loaded.name}: {loaded.num_classes} classes")
    _tables(summary)


def _write(
    name: str, out: Path, seed: int, settings: dict[str, Any], overwrite: bool, as_json: bool,
    extra: Callable[[Task, Path], None] | None = None,
) -> None:  # fmt: skip
    """Make a task, write its folder, say what was written; refused before anything is made where it exists."""
    from supra_eval.lra.data.folder import refuse_existing, write_task
    from supra_eval.lra.data.summary import summarise
    from supra_eval.lra.recipe import TaskSource
    from supra_eval.lra.source import generate

    refuse_existing(out, overwrite)
    start = time.monotonic()
    task = generate(TaskSource(name=name, seed=seed, settings=settings), say)
    meta = write_task(
        task, out, seed=seed, settings=settings, summary=summarise(task), overwrite=overwrite,
        extra=None if extra is None else lambda folder: extra(task, folder),
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"folder": str(out), **meta}))
    else:
        what = "numbers" if task.num_tokens is None else f"{task.num_tokens} tokens"
        typer.echo(f"{task.name}: {task.num_classes} classes, {what}, seed {seed}, hash {meta['hash']}")
        _tables(meta["summary"])
    say(f"wrote {out} in {time.monotonic() - start:.1f} s")
    say(f"next: supra lra data show {shlex.quote(str(out))}")


def _tables(summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("split", "examples", "length", "share of each label, %")
    for name, split in summary["splits"].items():
        least, mean, most = (split[f"length_{key}"] for key in ("min", "mean", "max"))
        length = f"{least:,}" if least == most else f"{least:,} to {most:,}, mean {mean:,}"
        shares = " ".join(f"{100 * share:.1f}" for share in split["label_shares"])
        table.add_row(name, f"{split['count']:,}", length, shares)
    show(table)
    table = Table("trivial baseline, scored on test", "accuracy, %")
    for name, score in summary["baselines"].items():
        table.add_row(name, f"{100 * score:.1f}")
    show(table)


def _range(option: str, value: str) -> tuple[int, int]:
    least, dash, most = value.replace("_", "").partition("-")
    try:
        return int(least), int(most if dash else least)
    except ValueError:
        raise UserError(
            f"{option} {value}", "is no number of steps and no range", "Write for example 32 or 8-32"
        ) from None
