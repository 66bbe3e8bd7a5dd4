"""`supra inspect` and `supra convert`: what a conversion would do, and doing it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import Json, say, show
from .errors import UserError

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
RopePosition = Annotated[str | None, typer.Option(help="RoPE before or after the feature map.")]
Rope = Annotated[
    str | None,
    typer.Option(
        help="yarn:4 for a context 4 times the teacher's; or linear, ntk, llama3.", metavar="KIND:FACTOR"
    ),
]
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
KeepSoftmax = Annotated[
    str | None,
    typer.Option(help="Layers left as softmax: 0,5,11, all, or auto:4 for the 4 that lose most (measured)."),
]
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
    elif str(options["keep_softmax"]).startswith("auto"):
        raise UserError(
            f"--keep-softmax {options['keep_softmax']}",
            "which layers lose most is measured, and nothing is measured here",
            "Run `supra convert` without --dry-run, or name the layers",
        )
    conversion, recipe_yaml = build_conversion(recipe, **options)
    return make_plan(source, conversion, revision=revision, allow_pickle=allow_pickle), recipe_yaml


def choose_layers(
    source: str,
    recipe: str | None,
    out: Path,
    rank_tokens: int,
    revision: str | None,
    allow_pickle: bool,
    **options: Any,
) -> tuple[Any, str]:
    """For `--keep-softmax auto:N`: every layer's error, the largest first, and the N worst layers as `3,7,11`.

    Raises:
        UserError: N is no number of layers that the model has, or the recipe cannot rank them.
    """
    from . import config
    from .convert import make_plan

    asked = options["keep_softmax"]
    conversion, _ = build_conversion(recipe, **{**options, "keep_softmax": None})
    plan = make_plan(source, conversion, revision=revision, allow_pickle=allow_pickle)
    plan.require_convertible()
    count, num_layers = str(asked).removeprefix("auto:"), plan.config.num_hidden_layers
    if not count.isdigit() or not 0 < int(count) < num_layers:
        reason = f"N is no number of layers from 1 to {num_layers - 1}"
        raise UserError(f"--keep-softmax {asked}", reason, "Write auto:N, for example auto:4")
    from .ranking import rank_layers

    loaded = config.load(recipe or "hedgehog-window", []).model_copy(update={"conversion": conversion})
    errors = rank_layers(
        source, loaded, out, total_tokens=rank_tokens, revision=revision, allow_pickle=allow_pickle
    )
    return errors, ",".join(str(error.layer) for error in errors[: int(count)])


def inspect(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id or a .gguf file.")],
    recipe: ConversionRecipe = None, feature_map: FeatureMap = None, taylor_dim: TaylorDim = None,
    rope_position: RopePosition = None, rope: Rope = None, decay: Decay = None,
    decay_shared: DecayShared = None, norm: Norm = None, norm_affine: NormAffine = None, window: Window = None,
    num_sink_tokens: NumSinkTokens = None, keep_softmax: KeepSoftmax = None, revision: Revision = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what a conversion would keep, add and drop, and what it would cost; writes nothing."""
    plan, _ = plan_conversion(
        source, recipe, revision, allow_pickle, feature_map=feature_map, taylor_dim=taylor_dim,
        rope_position=rope_position, rope=rope, decay=decay, decay_shared=decay_shared, norm=norm,
        norm_affine=norm_affine, window=window, num_sink_tokens=num_sink_tokens, keep_softmax=keep_softmax,
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


def convert(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id or a .gguf file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; must not exist.")],
    recipe: ConversionRecipe = None, feature_map: FeatureMap = None, taylor_dim: TaylorDim = None,
    rope_position: RopePosition = None, rope: Rope = None, decay: Decay = None,
    decay_shared: DecayShared = None, norm: Norm = None, norm_affine: NormAffine = None, window: Window = None,
    num_sink_tokens: NumSinkTokens = None, keep_softmax: KeepSoftmax = None, revision: Revision = None,
    allow_pickle: AllowPickle = False,
    seed: Annotated[int, typer.Option(help="Seed of the new tensors.")] = 0,
    rank_tokens: Annotated[
        int, typer.Option(help="Tokens on which auto:N measures each layer.", min=1)
    ] = 32_768,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    verify: Annotated[bool, typer.Option(help="Reload, compare hashes and run one forward.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Convert a checkpoint: teacher tensors are copied byte for byte, new ones added beside them."""
    from .convert import check_place, check_target, execute, progress_bar

    options: dict[str, Any] = {
        "feature_map": feature_map, "taylor_dim": taylor_dim, "rope_position": rope_position, "rope": rope,
        "decay": decay, "decay_shared": decay_shared, "norm": norm, "norm_affine": norm_affine, "window": window,
        "num_sink_tokens": num_sink_tokens, "keep_softmax": keep_softmax,
    }  # fmt: skip
    layer_errors: Any = ()
    if (keep_softmax or "").startswith("auto") and not dry_run:
        check_place(out, overwrite)  # before minutes of measuring
        layer_errors, options["keep_softmax"] = choose_layers(
            source, recipe, out, rank_tokens, revision, allow_pickle, **options
        )
    plan, recipe_yaml = plan_conversion(source, recipe, revision, allow_pickle, **options)
    plan = replace(plan, layer_errors=layer_errors)
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
    name = recipe or "hedgehog-window"
    say(f"next: supra train {name} --model {out} -o runs/first{_as_overrides(name, plan.conversion)}")


def _as_overrides(recipe: str, conversion: Any) -> str:
    """The `--set` options with which a recipe says what was converted, where it says something else."""
    from . import config

    said = config.load(recipe, []).conversion.resolve().model_dump(mode="json")
    done = conversion.model_dump(mode="json")
    changed = [f"conversion.{key}={json.dumps(value)}" for key, value in done.items() if said[key] != value]
    return "".join(f" --set {shlex.quote(change)}" for change in changed)
