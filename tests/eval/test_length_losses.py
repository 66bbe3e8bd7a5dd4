"""Chunked losses equal one plain forward, the protocols equal their definitions, and groups their hand-worked means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from supra.errors import SupraError, UserError
from supra.loading import load_model
from supra_eval.length.losses import (
    by_last_mention,
    by_position,
    clustered,
    loss_by_position,
    mention_distances,
    non_overlapping,
    position_buckets,
    read_losses,
    sliding,
)


@pytest.fixture(scope="module", params=["teacher", "student"])
def model(request: pytest.FixtureRequest, teacher_dir: Path, student_dir: Path) -> Any:
    return load_model(teacher_dir if request.param == "teacher" else student_dir).model


def some_ids(num_rows: int, length: int) -> Tensor:
    return torch.randint(0, 200, (num_rows, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def brute_force(model: Any, ids: Tensor) -> Tensor:
    """Losses [N, T-1] from one forward without a cache."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


@pytest.mark.parametrize(("chunk_tokens", "batch_size"), [(512, 1), (64, 1), (37, 3), (1, 2)])
def test_chunked_losses_equal_one_forward(model: Any, chunk_tokens: int, batch_size: int) -> None:
    ids = some_ids(3, 150)
    losses = loss_by_position(model, ids, chunk_tokens, batch_size=batch_size)
    torch.testing.assert_close(losses, brute_force(model, ids), atol=2e-5, rtol=1e-5)


def test_slices_of_the_head_change_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(2, 100)
    whole = loss_by_position(model, ids, 64, batch_size=2)
    monkeypatch.setattr("supra_eval.length.losses.HEAD_TOKENS", 14)
    torch.testing.assert_close(loss_by_position(model, ids, 64, batch_size=2), whole)


def test_a_recurrent_cache_stays_as_it_is_and_a_teacher_grows(teacher_dir: Path, student_dir: Path) -> None:
    def cache(folder: Path, length: int) -> int:
        return read_losses(load_model(folder).model, some_ids(2, length), 64, batch_size=2)[1]

    assert cache(student_dir, 129) == cache(student_dir, 1025)
    # 2 layers x keys and values x 2 heads x 8 dimensions x 4 bytes; the last token is never read.
    assert cache(teacher_dir, 129) == 128 * 2 * 2 * 2 * 8 * 4
    assert cache(teacher_dir, 1025) == 8 * cache(teacher_dir, 129)


def test_non_overlapping_blocks_are_read_alone(model: Any) -> None:
    ids = some_ids(2, 110)
    losses = non_overlapping(model, ids, 40, 16, batch_size=3)
    assert losses.shape == (2, 2, 39)  # 30 tokens make no block
    for row in range(2):
        for block in range(2):
            alone = brute_force(model, ids[row : row + 1, 40 * block : 40 * block + 40])[0]
            torch.testing.assert_close(losses[row, block], alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("length", "num_windows"), [(100, 4), (96, 4), (60, 1)])
def test_sliding_scores_each_windows_last_tokens(model: Any, length: int, num_windows: int) -> None:
    ids, context, stride = some_ids(2, length), 60, 12
    losses = sliding(model, ids, context, 25, stride=stride, batch_size=4)
    assert losses.shape == (2, num_windows * stride)
    expected = []
    for end in range(length - (num_windows - 1) * stride, length + 1, stride):
        expected.append(brute_force(model, ids[:, end - context : end])[:, -stride:])
    torch.testing.assert_close(losses, torch.cat(expected, 1), atol=2e-5, rtol=1e-5)


def test_sliding_scores_the_same_tokens_at_every_context(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(1, 120)
    seen: list[Tensor] = []

    def remember(model: Any, windows: Tensor, *args: Any, first_scored: int, **kwargs: Any) -> Any:
        seen.append(windows[:, first_scored:].flatten())
        return torch.zeros(windows.shape[0], windows.shape[1] - first_scored), 0

    monkeypatch.setattr("supra_eval.length.losses.read_losses", remember)
    for context in (16, 50, 100):
        sliding(model, ids, context, stride=10, max_windows=3)
    assert all(torch.equal(scored, ids[0, -30:]) for scored in seen)


def test_sliding_needs_room_for_context(model: Any) -> None:
    with pytest.raises(UserError, match="must be longer than its stride of 60"):
        sliding(model, some_ids(1, 100), 60, stride=60)


def test_the_first_scored_token_may_be_any(model: Any) -> None:
    ids = some_ids(1, 90)
    whole = brute_force(model, ids)
    for first in (1, 2, 33, 64, 89):
        losses, _ = read_losses(model, ids, 32, first_scored=first)
        torch.testing.assert_close(losses, whole[:, first - 1 :], atol=2e-5, rtol=1e-5)


def test_another_vocabulary_and_a_broken_model_are_named(teacher_dir: Path) -> None:
    model = load_model(teacher_dir).model
    with pytest.raises(UserError, match="holds token 300 of another vocabulary"):
        loss_by_position(model, torch.tensor([[1, 300]]))
    model.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(SupraError, match="not finite"):
        loss_by_position(model, some_ids(1, 10))


def test_buckets_double_and_end_at_the_length() -> None:
    assert position_buckets(1000) == [(0, 128), (128, 256), (256, 512), (512, 1000)]
    assert position_buckets(65536)[-2:] == [(16384, 32768), (32768, 65536)]
    assert position_buckets(100) == [(0, 100)]


@given(st.integers(1, 5000))
def test_buckets_hold_every_position_once(length: int) -> None:
    buckets = position_buckets(length)
    assert [position for start, end in buckets for position in range(start, end)] == list(range(length))


def test_means_by_position() -> None:
    # The token at position p (1 … 299) has loss p in the first sequence and p + 2 in the second.
    losses = torch.arange(1.0, 300.0).repeat(2, 1) + torch.tensor([[0.0], [2.0]])
    rows = by_position(losses)
    assert [end for end, _ in rows] == [128, 256, 300]
    means = [mean for _, mean in rows]
    # Means of 1 … 127, 128 … 255 and 256 … 299, plus 1; the two sequences' means lie 2 apart: stderr 1.
    assert [mean.value for mean in means] == pytest.approx([65.0, 192.5, 278.5])
    assert [mean.stderr for mean in means] == pytest.approx([1.0, 1.0, 1.0])
    assert [mean.num_tokens for mean in means] == [2 * 127, 2 * 128, 2 * 44]


def test_distances_to_the_last_mention() -> None:
    ids = torch.tensor([[5, 7, 5, 5, 7, 9], [1, 2, 3, 4, 5, 1]])
    assert mention_distances(ids).tolist() == [[0, 0, 2, 1, 3, 0], [0, 0, 0, 0, 0, 5]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_distances_equal_looking_back(row: list[int]) -> None:
    expected = []
    for i, token in enumerate(row):
        earlier = [j for j in range(i) if row[j] == token]
        expected.append(i - earlier[-1] if earlier else 0)
    assert mention_distances(torch.tensor([row])).tolist() == [expected]


def test_means_by_last_mention() -> None:
    ids = torch.tensor([[5, 7, 5, 5, 7, 9]])
    losses = torch.tensor([[8.0, 2.0, 1.0, 4.0, 6.0]])  # of 7 5 5 7 9, at distances never 2 1 3 never
    buckets, never = by_last_mention(losses, ids)
    assert [(start, mean.value, mean.num_tokens) for start, mean in buckets] == [(1, 1.0, 1), (2, 3.0, 2)]
    assert never is not None and never.value == 7.0 and never.stderr is None


def test_error_of_unequal_clusters() -> None:
    losses = torch.tensor([[1.0, 3.0, 9.0], [4.0, 9.0, 9.0]])
    chosen = torch.tensor([[True, True, False], [True, False, False]])
    mean = clustered(losses, chosen)
    # m = 8/3; sums − m·counts = 4 − 16/3 and 4 − 8/3; √(2/1 · (16/9 + 16/9)) / 3
    assert mean.value == pytest.approx(8 / 3)
    assert mean.stderr == pytest.approx(math.sqrt(64 / 9) / 3)
    assert mean.num_tokens == 3
