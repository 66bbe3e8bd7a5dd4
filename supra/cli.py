"""The `supra` command: thin functions over the library; nothing heavy is imported before a command runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .cli_convert import convert, inspect
from .cli_eval import evaluate, report
from .cli_extrapolate import extrapolate
from .cli_recipes import recipes_app
from .cli_train import train
from .console import Backend, Device, Dtype, Json, Threads, say, set_threads, show
from .errors import SupraError


class LraGroup(typer.core.TyperGroup):
    """`supra lra`, whose many commands are built when one is asked for: `supra --help` stays fast."""

    @property
    def _own(self) -> Any:
        from .cli_lra import lra_app

        return typer.main.get_group(lra_app)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._own.list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._own.get_command(ctx, cmd_name)


app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Turn pretrained Llama and Mistral checkpoints into RNNs that generate in constant memory.",
    epilog="Start with: supra demo · or: supra inspect MODEL, supra convert MODEL -o OUT, supra train RECIPE",
)  # fmt: skip
app.add_typer(recipes_app, name="recipes")
app.add_typer(
    typer.Typer(
        cls=LraGroup, no_args_is_help=True,
        help="Long-range tasks: their data, and softmax and linear models from scratch and after self-pretraining.",
    ),
    name="lra",
)  # fmt: skip
app.command()(inspect)
app.command()(convert)
app.command(name="eval")(evaluate)
app.command()(report)
app.command()(train)
app.command()(extrapolate)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Options before the command."""
    if debug:
        os.environ["SUPRA_DEBUG"] = "1"
    if version:
        typer.echo(f"supra {__version__}")
        raise typer.Exit


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A converted model's folder, or a teacher's.")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the prompt from a file, however long.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    chunk_tokens: Annotated[int, typer.Option(help="Prefill chunk in tokens.", min=1)] = 512,
    device: Device = "auto", dtype: Dtype = "float32", backend: Backend = "auto", threads: Threads = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Continue a prompt, streaming; memory stays constant however long the prompt is."""
    from .checks import Sampling, read_prompt, require_dtype, require_model_folder

    text = read_prompt(prompt, file)
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    sampling.check()
    require_dtype(dtype)
    require_model_folder(model)
    set_threads(threads)
    from .generate import stream
    from .loading import load_model

    loaded = load_model(model, device=device, dtype=dtype, backend=backend)
    say(loaded.describe())
    pieces = []
    for piece in stream(loaded.model, loaded.tokenizer, text, sampling, chunk_tokens=chunk_tokens, chat=chat):
        pieces.append(piece)
        if not as_json:
            typer.echo(piece, nl=False)
    typer.echo(json.dumps({"prompt": text, "continuation": "".join(pieces)}) if as_json else "")


@app.command()
def doctor(threads: Threads = 0, as_json: Json = False) -> None:
    """Versions, devices, and each kernel backend checked against the reference on this machine."""
    set_threads(threads)
    from .doctor import examine

    report = examine()
    if as_json:
        typer.echo(report.to_json())
    else:
        show(report.render())
    if not report.healthy:
        raise SupraError("supra doctor", "a check failed (see above)", "Reinstall from constraints.txt")
    say("next: supra demo")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the report.")] = Path("runs/demo"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a demo that was stopped.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the demo's recipe.")
    ] = None,
    threads: Threads = 2,
) -> None:
    """Convert a real Llama, train it for minutes, and measure what was lost and won."""
    set_threads(threads)
    from .demo import run_demo

    report = run_demo(out, resume=resume, overrides=overrides or [], say=say)
    typer.echo(str(report))
    say(f"next: read {report} · supra generate {out}/train/model 'Once upon a time'")


def report_failure(error: BaseException) -> int:
    """Print one clear line for a failure and return the exit code."""
    if isinstance(error, SupraError):
        say(f"error: {error}")
        return error.exit_code
    if isinstance(error, MemoryError):
        say("error: memory: there is not enough. Use a smaller length, micro_batch_size or dtype")
        return 1
    say(f"error: {type(error).__name__}: {error}. Run again as `supra --debug …` and report the traceback")
    return 1


class Stopped(BaseException):
    """Ctrl-C or a polite kill: everything half-written is cleaned up on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


def _stop(number: int, frame: Any) -> None:
    raise Stopped(number)


def main() -> None:
    """Run the command line; a failure is one line, and a traceback only under --debug."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        app(standalone_mode=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Stopped as stop:
        say("stopped; nothing half-written is left, and a training run goes on with --resume")
        sys.exit(128 + stop.number)
    except Exception as error:
        if os.environ.get("SUPRA_DEBUG"):
            raise
        sys.exit(report_failure(error))
