"""Which layers lose most when they become linear: measured by a short attention transfer of each on its own."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from .config import Recipe, Stage
from .convert import LayerError, execute, make_plan
from .errors import UserError
from .train import read_metrics, run_training

_LAST_SHARE = 0.25  # of the steps, over which a layer's error is averaged


def rank_layers(
    source: str,
    recipe: Recipe,
    beside: Path,
    *,
    total_tokens: int,
    revision: str | None = None,
    allow_pickle: bool = False,
) -> tuple[LayerError, ...]:
    """All layers of the teacher in `source`, the one that loses most first.

    The teacher is converted whole and its layers are trained one at a time by the recipe's attention transfer on
    `total_tokens` of its text; both lie in a folder next to `beside` that is removed.

    Raises:
        UserError: the recipe has no attention transfer of new parameters, or `total_tokens` is less than a step.
    """
    stage = _transfer_stage(recipe, total_tokens)
    conversion = recipe.conversion.model_copy(update={"keep_softmax": ()})
    short = recipe.model_copy(update={"conversion": conversion, "stages": (stage,)})
    folder = Path(tempfile.mkdtemp(prefix=f"{beside.name}.ranking-", dir=beside.parent))
    try:
        plan = make_plan(source, conversion, revision=revision, allow_pickle=allow_pickle)
        execute(plan, folder / "converted", seed=recipe.seed, recipe_yaml=short.to_yaml(), verify=False)
        run_training(short, folder / "converted", folder / "run")
        rows = read_metrics(folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    before = stage.num_steps - max(1, round(_LAST_SHARE * stage.num_steps))
    losses: dict[int, list[float]] = {}
    for row in rows:
        if row["stage_step"] > before:
            losses.setdefault(row["layer"], []).append(row["loss"])
    errors = [LayerError(layer, statistics.fmean(values)) for layer, values in losses.items()]
    return tuple(sorted(errors, key=lambda item: -item.error))


def _transfer_stage(recipe: Recipe, total_tokens: int) -> Stage:
    """The recipe's attention transfer, layer by layer and as short as asked for."""
    found = [stage for stage in recipe.stages if stage.loss == "attention" and stage.trainable == "new"]
    if not found:
        raise UserError(
            f"recipe {recipe.name}",
            "it has no attention transfer of new parameters, by which layers could be ranked",
            "Take a recipe with one (hedgehog-window), or name the layers",
        )
    stage = found[0]
    num_steps = total_tokens // stage.tokens_per_step
    if not num_steps:
        raise UserError(
            f"--rank-tokens {total_tokens}",
            f"less than one step of stage {stage.name}, {stage.tokens_per_step} tokens",
            "Give more",
        )
    warmup_steps = min(stage.optimizer.warmup_steps, num_steps // 4)
    return stage.model_copy(
        update={
            "layerwise": True,
            "total_tokens": num_steps * stage.tokens_per_step,
            "optimizer": stage.optimizer.model_copy(update={"warmup_steps": warmup_steps}),
        }
    )
