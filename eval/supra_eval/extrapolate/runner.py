"""One run of a grid: a model trained from random weights, then tested at every length by every method it serves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from supra_eval.grid import CPU, SAVE_SECONDS, device_of, load_state, save_state
from supra_eval.lra.descent import Descent

from .methods import positions_in_training
from .model import Tagger, scaled
from .recipe import Cell, Extrapolation
from .score import measure
from .task import UNSCORED, Task, baselines, generator

TOLD = 5  # times that a run says how its training goes
CURVE_POINTS = 20


def run_cell(
    recipe: Extrapolation,
    cell: Cell,
    task: Task,
    state: Path,
    say: Callable[[str], None],
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Train and test one run on `device`; its progress lies in the file `state` until it is finished.

    Raises:
        SupraError: a loss is not finite.
    """
    started = time.monotonic()
    config = recipe.encoder.encoder(cell.mixer, cell.method, task.num_tokens, recipe.train_tokens)
    model = Tagger(config, task.num_classes, cell.seed).to(device)
    losses, seconds_before = _train(recipe, cell, task, model, state, say)
    model.eval()
    tests: dict[str, dict[str, Any]] = {str(method): {} for method in recipe.tested(cell.method)}
    trivial: dict[str, dict[str, float]] = {}
    for multiple, length in recipe.test_lengths.items():
        batch = task.test_batch(recipe.test_sequences, length)
        trivial[str(length)] = baselines(task, batch)
        for method in recipe.tested(cell.method):
            with scaled(model, method.scaling, multiple, recipe.train_tokens):
                tests[method][str(length)] = measure(
                    model, task, batch, method, train_tokens=recipe.train_tokens, reach=recipe.reach
                )
    return {
        "name": recipe.name, "task": task.name, "mixer": cell.mixer, "method": cell.method, "seed": cell.seed,
        "metric": task.metric, "train_tokens": recipe.train_tokens,
        "tests": tests, "baselines": trivial, "losses": _thinned(losses),
        "tokens_seen": len(losses) * recipe.training.tokens_per_step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds_before + time.monotonic() - started, 1),
    }  # fmt: skip


def _train(
    recipe: Extrapolation, cell: Cell, task: Task, model: Tagger, state: Path, say: Callable[[str], None]
) -> tuple[list[float], float]:
    """Train from where `state` is; every step's loss, and the seconds that were spent before this start."""
    training = recipe.training
    descent, losses, seconds_before = Descent(model, training.optimizer), list[float](), 0.0
    if (kept := load_state(state)) is not None:
        descent.load_state(kept)
        losses, seconds_before = kept["losses"], kept["seconds"]
    started = saved = time.monotonic()
    model.train()
    for step in range(len(losses), training.num_steps):
        # What a step sees is known from the seed and its number alone, so that a killed run goes on bit for bit.
        length = int(
            generator(f"{task.name} length {cell.seed} {step}").integers(
                training.lengths[0], training.lengths[1], endpoint=True
            )
        )
        rows = training.tokens_per_step // length
        batch = task.train_batch(cell.seed, step, rows, length)
        random = torch.Generator().manual_seed(
            int(generator(f"positions {cell.seed} {step}").integers(1 << 62))
        )
        positions = positions_in_training(cell.method, rows, length, recipe.reach, random)
        device = device_of(model)
        logits = model(batch.tokens.to(device), None if positions is None else positions.to(device))
        loss = F.cross_entropy(logits.transpose(1, 2), batch.targets.to(device), ignore_index=UNSCORED)
        where = f"{cell.key}, step {step + 1} of {training.num_steps}"
        losses.append(descent.step(loss, step, training.num_steps, where))
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            spent = seconds_before + saved - started
            save_state({**descent.state(), "losses": losses, "seconds": spent}, state)
        part = max(1, training.num_steps // TOLD)
        if (step + 1) % part == 0:
            say(f"{cell.key}: {step + 1}/{training.num_steps} · loss {statistics.fmean(losses[-part:]):.3f}")
    return losses, seconds_before


def _thinned(losses: list[float]) -> list[float]:
    """The means of up to `CURVE_POINTS` equal parts."""
    part = -(-len(losses) // CURVE_POINTS)
    return [statistics.fmean(losses[first : first + part]) for first in range(0, len(losses), part)]
