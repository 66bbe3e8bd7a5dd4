"""A trained model's test at one length: the task's metric, and loss and accuracy by position."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from supra_eval.grid import device_of

from .methods import Method, positions_in_test
from .model import Tagger
from .task import UNSCORED, Batch, Task

BATCH_TOKENS = 8192
BUCKETS_WITHIN_TRAINING = 4  # beyond, a bucket is as wide as the training length
_TEST_POSITIONS_SEED = 23_051_684


@torch.inference_mode()
def measure(
    model: Tagger, task: Task, batch: Batch, method: Method, *, train_tokens: int, reach: int
) -> dict[str, Any]:
    """Read all of `batch` [N, T] from the start, nothing cut off, a few sequences at a time.

    `by_position`: of each bucket of positions with a target its end, mean loss (nats), accuracy (%) and targets.
    """
    rows, T = batch.tokens.shape
    loss, right, count = (torch.zeros(T, dtype=torch.float64) for _ in range(3))
    whole = 0
    device = device_of(model)
    at_once = max(1, BATCH_TOKENS // T)
    random = torch.Generator().manual_seed(_TEST_POSITIONS_SEED)
    for first in range(0, rows, at_once):
        tokens, targets = (x[first : first + at_once] for x in batch)
        positions = positions_in_test(method, len(tokens), T, reach, random)
        logits = model(tokens.to(device), None if positions is None else positions.to(device)).float().cpu()
        scored = targets != UNSCORED
        correct = (logits.argmax(-1) == targets) & scored
        losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=UNSCORED, reduction="none")
        loss += losses.double().sum(0)
        right += correct.double().sum(0)
        count += scored.double().sum(0)
        whole += int((correct | ~scored).all(1).sum())
    mean = (loss.sum() / count.sum()).item()
    value = {
        "perplexity": math.exp(min(mean, 700.0)),
        "accuracy": 100 * (right.sum() / count.sum()).item(),
        "exact match": 100 * whole / rows,
    }[task.metric]
    return {
        "value": value, "loss": mean, "targets": int(count.sum()), "sequences": rows,
        "by_position": _buckets(loss, right, count, train_tokens),
    }  # fmt: skip


def bucket_ends(length: int, train_tokens: int) -> list[int]:
    """The positions behind each bucket's last: fine within the training length, then one for each more of it."""
    fine = max(1, train_tokens // BUCKETS_WITHIN_TRAINING)
    ends = [*range(fine, train_tokens, fine), *range(train_tokens, length + train_tokens, train_tokens)]
    return [*(end for end in ends if end < length), length]


def _buckets(loss: Tensor, right: Tensor, count: Tensor, train_tokens: int) -> list[list[float]]:
    rows, start = [], 0
    for end in bucket_ends(len(loss), train_tokens):
        targets = count[start:end].sum().item()
        if targets:
            mean, share = (x[start:end].sum().item() / targets for x in (loss, right))
            rows.append([end, mean, 100 * share, targets])
        start = end
    return rows
