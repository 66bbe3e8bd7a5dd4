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
from .cli_eval import evaluate, report
from .cli_recipes import recipes_app
from .console import Backend, Device, Dtype, Json, Threads, say, set_threads, show, speaks
from .errors import SupraError, UserError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Turn pretrained Llama and Mistral checkpoints into RNNs that generate in constant memory.",
    epilog="Start with: supra demo · or: supra inspect MODEL, supra convert MODEL -o OUT, supra train RECIPE",
)  # fmt: skip
app.add_typer(recipes_app, name="recipes")
app.command(name="eval")(evaluate)
app.command()(report)


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


ConversionRecipe = Annotated[
    str | None, typer.Option("--recipe", help="A recipe's conversion: a name or a YAML file.")
]
FeatureMap = Annotated[
    str | None,
    typer.Option(
        help="relu_dense, relu, hedgehog, t2r, elu, taylor or identity; its method sets the other defaults."
    ),
]
TaylorDim = Annotated[
    int | None, typer.Option(help="Dimensions that the taylor map projects to and expands: 16 unless given.")
]
Rope = Annotated[str | None, typer.Option(help="RoPE before or after the feature map.")]
Decay = Annotated[str | None, typer.Option(help="none, alibi, retnet, learned or gated (by each token).")]
DecayShared = Annotated[
    bool | None, typer.Option(help="One decay per key/value head: the state is kept per KV head.")
]
Norm = Annotated[str | None, typer.Option(help="group_norm or denominator.")]
NormAffine = Annotated[bool | None, typer.Option(help="Learned scale and shift after group_norm.")]
Window = Annotated[int | None, typer.Option(help="Exact softmax over this many last tokens; 0 for none.")]
NumSinkTokens = Annotated[
    int | None, typer.Option(help="First tokens kept exact for ever, beside the window.")
]
KeepSoftmax = Annotated[str | None, typer.Option(help="Layers left as softmax: 0,5,11 or all.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
AllowPickle = Annotated[bool, typer.Option(help="Accept .bin weights, read without running code in them.")]


def build_conversion(recipe: str | None, **options: Any) -> tuple[Any, str]:
    """The conversion asked for, and its YAML: a recipe's (preset `hedgehog-window` if none), changed by options.

    Naming a feature map without a recipe starts from that method's own defaults.
    """
    from . import config

    given = {name: value for name, value in options.items() if value is not None}
    if recipe is None and "feature_map" in given:
        return config.conversion_from_options(given)
    base = config.load(recipe or "hedgehog-window", [])
    return config.conversion_from_options({**base.conversion.model_dump(exclude_none=True), **given})


def plan_conversion(
    source: str, recipe: str | None, revision: str | None, allow_pickle: bool, **options: Any
) -> tuple[Any, str]:
    """The plan for a source under the conversion asked for, and the conversion's YAML."""
    from .convert import make_plan

    if options["keep_softmax"] == "all":
        conversion, _ = build_conversion(recipe, **{**options, "keep_softmax": None})
        num_layers = make_plan(
            source, conversion, revision=revision, allow_pickle=allow_pickle
        ).config.num_hidden_layers
        options["keep_softmax"] = ",".join(str(layer) for layer in range(num_layers))
    conversion, recipe_yaml = build_conversion(recipe, **options)
    return make_plan(source, conversion, revision=revision, allow_pickle=allow_pickle), recipe_yaml


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id or a .gguf file.")],
    recipe: ConversionRecipe = None, feature_map: FeatureMap = None, taylor_dim: TaylorDim = None,
    rope: Rope = None, decay: Decay = None,
    decay_shared: DecayShared = None, norm: Norm = None, norm_affine: NormAffine = None, window: Window = None,
    num_sink_tokens: NumSinkTokens = None, keep_softmax: KeepSoftmax = None, revision: Revision = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what a conversion would keep, add and drop, and what it would cost; writes nothing."""
    plan, _ = plan_conversion(
        source, recipe, revision, allow_pickle, feature_map=feature_map, taylor_dim=taylor_dim, rope=rope, decay=decay,
        decay_shared=decay_shared, norm=norm, norm_affine=norm_affine, window=window,
        num_sink_tokens=num_sink_tokens, keep_softmax=keep_softmax,
    )  # fmt: skip
    print_plan(plan, as_json)
    plan.require_convertible()
    say(f"next: supra convert {source} -o OUT")


def print_plan(plan: Any, as_json: bool) -> None:
    """The plan as JSON or as tables, on stdout."""
    if as_json:
        typer.echo(plan.to_json())
    else:
        show(plan.render())


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id or a .gguf file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; must not exist.")],
    recipe: ConversionRecipe = None, feature_map: FeatureMap = None, taylor_dim: TaylorDim = None,
    rope: Rope = None, decay: Decay = None,
    decay_shared: DecayShared = None, norm: Norm = None, norm_affine: NormAffine = None, window: Window = None,
    num_sink_tokens: NumSinkTokens = None, keep_softmax: KeepSoftmax = None, revision: Revision = None,
    allow_pickle: AllowPickle = False,
    seed: Annotated[int, typer.Option(help="Seed of the new tensors.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    verify: Annotated[bool, typer.Option(help="Reload, compare hashes and run one forward.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Convert a checkpoint: teacher tensors are copied byte for byte, new ones added beside them."""
    from .convert import check_target, execute, progress_bar

    plan, recipe_yaml = plan_conversion(
        source, recipe, revision, allow_pickle, feature_map=feature_map, taylor_dim=taylor_dim, rope=rope, decay=decay,
        decay_shared=decay_shared, norm=norm, norm_affine=norm_affine, window=window,
        num_sink_tokens=num_sink_tokens, keep_softmax=keep_softmax,
    )  # fmt: skip
    if dry_run:
        print_plan(plan, as_json)
        plan.require_convertible()
        say(f"next: supra convert {source} -o {out}")
        return
    check_target(plan, out, overwrite)
    if not as_json:
        show(plan.render(), on_stdout=False)
    with progress_bar() as progress:
        result = execute(
            plan,
            out,
            seed=seed,
            recipe_yaml=recipe_yaml,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
        )
    typer.echo(result.to_json() if as_json else str(out))
    say(f"next: supra train {recipe or 'hedgehog-window'} --model {out} -o runs/first")


@app.command()
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
