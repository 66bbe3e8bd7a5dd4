"""One run of a comparison: self-pretraining if its mode has it, then the task, from random weights to a test accuracy.

Notable: fine-tuned are the weights of the epoch with the best validation loss of pretraining, and tested those with the
best validation accuracy; the test split is read once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from supra_eval.grid import CPU, SAVE_SECONDS, device_of, load_state, save_state
from supra_eval.lra.models.encoder import Encoder
from supra_eval.lra.models.heads import Classifier
from supra_eval.lra.objectives import Objective, Pretraining, transfer
from supra_eval.lra.phase import Phase
from supra_eval.lra.recipe import Cell, Comparison
from supra_eval.lra.task import Examples, Task

_VALIDATION_MASKS_SEED = 20_230_604  # the same masks after every epoch, so that losses can be compared


def run_cell(
    comparison: Comparison,
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
    train = nested_share(task.train, cell)
    config = comparison.encoder_of(cell, num_tokens=task.num_tokens, channels=task.channels)
    classifier = Classifier(Encoder(config, cell.seed), task.num_classes, cell.seed).to(device)
    phases = []
    if cell.is_pretrained:
        rate = comparison.training.mask_rate if cell.mode == "masked" else None
        objective = Objective(kind="masked" if rate else "causal", mask_rate=rate)
        pretraining = Pretraining(Encoder(config, cell.seed), objective, cell.seed).to(device)
        phases.append(_pretrain_phase(comparison, cell, task, pretraining))
    phases.append(_task_phase(comparison, cell, task, classifier))
    seconds_before = _load(phases, state)
    saved = started
    for phase in phases:
        if phase is not phases[0] and not phase.epochs_done:
            phases[0].restore_best()
            transfer(pretraining, classifier)
        while not phase.is_finished:
            phase.run_epoch(train)
            say(f"{cell.key}: {phase.name} {phase.epochs_done}/{phase.epochs} · loss {phase.losses[-1]:.3f} · "
                f"validation {phase.curve[-1]:.3f}")  # fmt: skip
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                _save(phases, state, seconds_before + saved - started)
    last = phases[-1]
    last.restore_best()
    return {
        "comparison": comparison.name, "task": task.name, **cell._asdict(),
        "test_accuracy": accuracy(classifier, task.test, comparison.training.batch_size),
        "validation_accuracy": last.best,
        "best_epoch": last.best_epoch, "epochs": last.epochs, "pretrain_epochs": sum(p.epochs for p in phases[:-1]),
        "train_examples": len(train), "parameters": sum(p.numel() for p in classifier.parameters()),
        "curves": {phase.name: {"loss": phase.losses, "validation": phase.curve} for phase in phases},
        "seconds": round(seconds_before + time.monotonic() - started, 1),
    }  # fmt: skip


def nested_share(examples: Examples, cell: Cell) -> Examples:
    """The run's fraction of the examples: the first of a permutation by its seed; smaller ones lie in larger."""
    if cell.fraction == 1.0:
        return examples
    order = np.random.default_rng(cell.seed).permutation(len(examples))
    return examples[np.sort(order[: max(1, round(cell.fraction * len(examples)))])]


@torch.inference_mode()
def accuracy(classifier: Classifier, examples: Examples, batch_size: int) -> float:
    """The share of examples whose class comes out largest, 0 to 1."""
    batches = _batches(examples, batch_size)
    right = sum(int((_logits(classifier, b).argmax(-1).cpu() == _tensor(b.labels)).sum()) for b in batches)
    return right / len(examples)


def _pretrain_phase(comparison: Comparison, cell: Cell, task: Task, pretraining: Pretraining) -> Phase:
    training = comparison.training

    def total(batch: Examples, random: torch.Generator) -> tuple[Tensor, int]:
        """Both documents of a pair are read."""
        parts = [
            pretraining(_tensor(part.inputs).to(device_of(pretraining)), _tensor(part.lengths), random)
            for part in (batch, batch.second)
            if part is not None
        ]
        return sum((part.total for part in parts), torch.zeros(())), sum(part.count for part in parts)

    def loss(batch: Examples, random: torch.Generator) -> Tensor:
        value, count = total(batch, random)
        return value / max(1, count)

    def score() -> float:
        random = torch.Generator().manual_seed(_VALIDATION_MASKS_SEED)
        sums = [total(batch, random) for batch in _batches(task.validation, training.batch_size)]
        return -float(sum(value.item() for value, _ in sums)) / max(1, sum(count for _, count in sums))

    optimizer = training.optimizer.model_copy(update={"lr": training.pretrain_lr or comparison.lr_of(cell)})
    epochs, _ = training.epochs_of(cell)
    return Phase(
        "pretraining", pretraining, loss, score,
        epochs=epochs, batch_size=training.batch_size, optimizer=optimizer, seed=cell.seed,
    )  # fmt: skip


def _task_phase(comparison: Comparison, cell: Cell, task: Task, classifier: Classifier) -> Phase:
    training = comparison.training

    def loss(batch: Examples, random: torch.Generator) -> Tensor:
        logits = _logits(classifier, batch)
        return F.cross_entropy(logits, _tensor(batch.labels).to(logits.device))

    optimizer = training.optimizer.model_copy(update={"lr": comparison.lr_of(cell)})
    _, epochs = training.epochs_of(cell)
    return Phase(
        "task", classifier, loss, lambda: accuracy(classifier, task.validation, training.batch_size),
        epochs=epochs, batch_size=training.batch_size, optimizer=optimizer, seed=cell.seed,
    )  # fmt: skip


def _logits(classifier: Classifier, batch: Examples) -> Tensor:
    device = device_of(classifier)
    # Lengths stay on the CPU, where they are checked without waiting for a GPU.
    inputs = _tensor(batch.inputs).to(device), _tensor(batch.lengths)
    if batch.second is None:
        return classifier(*inputs)
    return classifier(*inputs, _tensor(batch.second.inputs).to(device), _tensor(batch.second.lengths))


def _batches(examples: Examples, size: int) -> list[Examples]:
    return [examples[first : first + size] for first in range(0, len(examples), size)]


def _tensor(array: np.ndarray) -> Tensor:
    """Token ids and counts as int64, numbers as they are; arrays may be mapped read-only, so they are copied."""
    return torch.tensor(np.asarray(array, dtype=np.float32 if array.dtype.kind == "f" else np.int64))


def _save(phases: list[Phase], state: Path, seconds: float) -> None:
    save_state({"phases": [phase.state() for phase in phases], "seconds": seconds}, state)


def _load(phases: list[Phase], state: Path) -> float:
    """Put the phases where the file has them; the seconds that were spent until then."""
    kept = load_state(state)
    if kept is None:
        return 0.0
    for phase, own in zip(phases, kept["phases"], strict=True):
        phase.load_state(own)
    return float(kept["seconds"])
