"""`supra eval` and `supra report`: what a model lost and won, and the page that shows it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import Backend, Device, Dtype, Json, Threads, say, set_threads, show
from .errors import SupraError, UserError

TASKS, LENGTH, PERPLEXITY, MACHINE = "Tasks", "Past the training length", "Perplexity", "Machine"


Teacher = Annotated[Path | None, typer.Option(help="The teacher, scored beside it.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Held-out text (files, globs, package:NAME/path); with --tasks a folder of data sets, packages or hub."
    ),
]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="Folder for results.json, plots and predictions.")
]
Ablations = Annotated[
    bool,
    typer.Option(
        help="Also score the window alone, the linear part alone and, with --teacher, the untrained conversion."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        help="Documents of each task (spread evenly; SCROLLS: the first), sequences of --length, prompts of --recall.",
        min=1,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of shots, generated tasks and bootstraps.")]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=TASKS,
        help="Groups quick, supra-paper, scrolls; scrolls_NAME; qasper_yes_no; any lm-eval task. Comma-separated.",
    ),
]
NumFewshot = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=TASKS, help="Shots of lm-eval tasks, instead of each one's own number.", min=0
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", rich_help_panel=TASKS, help="Wrap prompts in the chat template.")
]
Split = Annotated[str, typer.Option(rich_help_panel=TASKS, help="Split of SCROLLS: validation or test.")]
Truncate = Annotated[
    str,
    typer.Option(
        rich_help_panel=TASKS,
        help="What is kept of a document too long: middle cuts its middle out, end keeps its end.",
    ),
]
Length = Annotated[
    bool,
    typer.Option(
        "--length",
        rich_help_panel=LENGTH,
        help="Loss by position and by distance on whole books, and memory and time by context.",
    ),
]
Recall = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=LENGTH,
        help="Generated recall tasks, scored exactly: all, or passkey, needle and so on. Comma-separated.",
    ),
]
Contexts = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LENGTH,
        help="Context lengths in tokens, for --length, --recall and SCROLLS: 2048,4096.",
    ),
]
Rope = Annotated[
    str,
    typer.Option(
        rich_help_panel=LENGTH,
        help="Scalings of the teacher's RoPE, each read beside the plain one: linear,ntk,yarn,llama3, or none.",
    ),
]
StudentRope = Annotated[
    bool,
    typer.Option("--student-rope", rich_help_panel=LENGTH, help="Also read the student with each --rope."),
]
Protocols = Annotated[
    str,
    typer.Option(
        rich_help_panel=LENGTH,
        help="How --length scores every context: non_overlapping, sliding (16 reads of the context), carried, or none.",
    ),
]
Cost = Annotated[
    bool,
    typer.Option(
        "--cost/--no-cost",
        rich_help_panel=LENGTH,
        help="Of --length: memory and time by context too, for which every model reads the contexts once more.",
    ),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=PERPLEXITY,
        help="Tokens per block, read from an empty state; 1024 or the model's maximum.",
        min=2,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(rich_help_panel=PERPLEXITY, help="Score at most so many tokens, over all files.", min=2),
]
Documents = Annotated[
    Literal["all", "even", "odd"],
    typer.Option(
        rich_help_panel=PERPLEXITY,
        help="Which documents of each file, counted from 0: the half that a recipe's data.documents did not train on.",
    ),
]
BatchSize = Annotated[int, typer.Option(rich_help_panel=MACHINE, help="Rows of a batch, at most.", min=1)]
BatchTokens = Annotated[int, typer.Option(rich_help_panel=MACHINE, help="Tokens of a batch, at most.", min=1)]
ChunkTokens = Annotated[
    int, typer.Option(rich_help_panel=MACHINE, help="Piece in which a long text is read, in tokens.", min=1)
]


# Options that only some kinds of evaluation look at; one that is given to another kind is refused, not ignored.
ONLY_FOR = {
    "tasks": {"num_fewshot", "chat", "split", "truncate", "contexts", "limit", "seed", "batch_size", "batch_tokens",
              "chunk_tokens"},
    "length": {"contexts", "rope", "student_rope", "cost", "protocols", "limit", "seed", "chunk_tokens"},
    "perplexity": {"block_tokens", "max_tokens", "documents"},
}  # fmt: skip


def refuse_without_effect(context: typer.Context, kind: str) -> None:
    """UserError for an option on the command line that this kind of evaluation does not look at."""
    others = set().union(*ONLY_FOR.values()) - ONLY_FOR[kind]
    for name in sorted(others):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            what = {"tasks": "--tasks", "length": "--length and --recall", "perplexity": "perplexity"}[kind]
            raise UserError(f"--{name.replace('_', '-')}", f"has no effect on {what}", "Leave it out")


def evaluate(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A converted model's folder.")],
    teacher: Teacher = None, data: Data = None, out: Out = None, ablations: Ablations = True,
    limit: Limit = None, seed: Seed = 0,
    tasks: Tasks = None, num_fewshot: NumFewshot = None, chat: Chat = False, split: Split = "validation",
    truncate: Truncate = "middle",
    length: Length = False, recall: Recall = None, contexts: Contexts = None, rope: Rope = "yarn",
    student_rope: StudentRope = False, cost: Cost = True,
    protocols: Protocols = "non_overlapping,sliding,carried",
    block_tokens: BlockTokens = None, max_tokens: MaxTokens = 32768,
    documents: Documents = "all",
    batch_size: BatchSize = 64, batch_tokens: BatchTokens = 4096, chunk_tokens: ChunkTokens = 512,
    device: Device = "auto", dtype: Dtype = "float32", backend: Backend = "auto", threads: Threads = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Teacher, student and ablations in one table: perplexity, benchmark tasks, or long contexts."""
    from .checks import require_dtype, require_model_folder

    for folder in (model, teacher):
        if folder is not None:
            require_model_folder(folder)
    require_dtype(dtype)
    named = _names(tasks)
    lengths = _numbers(contexts)
    refuse_without_effect(context, "tasks" if named else "length" if length or recall else "perplexity")
    if not cost and not length:
        raise UserError("--no-cost", "has an effect on --length alone", "Leave it out")
    if named and (length or recall):
        raise UserError("--tasks", "does not go with --length or --recall", "Run them one after the other")
    if not (named or recall or data or length):
        raise UserError(
            "--data", "is missing: there is nothing to score", "Name a text file, or give --tasks"
        )
    # Before torch brings in tqdm: a bar for each of lm-eval's steps drowns the one that shows the time left.
    os.environ.setdefault("TQDM_DISABLE", "1")
    set_threads(threads)
    from supra_eval import run as kinds

    if out is not None:
        kinds.require_writable(out)
    machine = kinds.Machine(device, dtype, backend, batch_size, batch_tokens, chunk_tokens)
    runs: list[kinds.EvalRun]
    if named:
        runs = kinds.score_tasks(
            model, teacher, named, data, contexts=lengths, limit=limit, num_fewshot=num_fewshot, chat=chat,
            split=split, truncate=truncate, ablations=ablations, seed=seed, out=out, machine=machine, say=say,
        )  # fmt: skip
    elif length or recall:
        runs = kinds.score_length(
            model, teacher, data or [], length=length, recall=_names(recall), contexts=lengths, rope=_names([rope]),
            student_rope=student_rope, cost=cost,
            protocols=() if protocols == "none" else _names([protocols]), limit=limit, ablations=ablations, seed=seed,
            out=out, machine=machine, say=say,
        )  # fmt: skip
    else:
        runs = kinds.score_perplexity(
            model, teacher, data or [], block_tokens=block_tokens, max_tokens=max_tokens, documents=documents,
            ablations=ablations, machine=machine, say=say,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"runs": [json.loads(run.to_json()) for run in runs]}, indent=2))
    else:
        for run in runs:
            say(kinds.describe_settings(run))
            show(kinds.render(run))
    for path in kinds.keep(runs, out) if out is not None else ():
        say(f"wrote {path}")
    failures = [what for run in runs for what in run.failures]
    if failures:
        raise SupraError(
            f"{len(failures)} part{'s' if len(failures) > 1 else ''} of the evaluation",
            f"failed ({'; '.join(failures[:3])}{' and more' if len(failures) > 3 else ''}); the rest is shown above",
            "Mend what is said there and run it again: what is done is not done twice",
        )
    say(
        f"next: supra report {out}"
        if out is not None
        else "next: the same with -o DIR, then supra report DIR"
    )


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `supra eval -o`, `demo` or `train` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for report.html and report.md.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Merge several runs, of training or evaluation, into one HTML page and one Markdown page."""
    from supra_eval.page import read_any, run_folders, write_page

    found = [(path, read_any(path)) for path in run_folders(runs)]
    pages = write_page(found, out, title)
    if as_json:
        shown = [{"folder": str(path), **json.loads(run.to_json())} for path, run in found]
        typer.echo(json.dumps({"html": str(pages.html), "markdown": str(pages.markdown), "runs": shown}))
    else:
        typer.echo(str(pages.html))
        typer.echo(str(pages.markdown))
    say(f"next: open {pages.html} in a browser")


def _names(values: list[str] | None) -> tuple[str, ...]:
    """Names given by repeating an option, by commas, or both."""
    return tuple(name.strip() for value in values or [] for name in value.split(",") if name.strip())


def _numbers(value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    try:
        numbers = tuple(int(part.strip().replace("_", "")) for part in value.split(",") if part.strip())
    except ValueError:
        raise UserError(
            f"--contexts {value}", "is no list of whole numbers", "Write for example 2048,8192"
        ) from None
    if not numbers or min(numbers) < 2:
        raise UserError(
            f"--contexts {value}", "each context is 2 tokens or more", "Write for example 2048,8192"
        )
    return numbers
