"""Pathfinder: contours as they are specified, labels that follow from the geometry, and no cheaper way to them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from supra.errors import SupraError, UserError
from supra_eval.lra.data import pathfinder
from supra_eval.lra.data.drawing import draw
from supra_eval.lra.data.pathfinder import STYLES, Drawings, draw_geometry

SIZES = (16, 32, 64, 128)


@lru_cache
def drawings(size: int, num_pictures: int = 256) -> Drawings:
    return draw_geometry(np.random.default_rng(1), STYLES[size], num_pictures)


def dense(paddles: np.ndarray, count: int = 41) -> np.ndarray:
    """Points [P, count, 2] along paddles [P, 4]."""
    share = np.linspace(0, 1, count)[:, None]
    return paddles[:, None, :2] * (1 - share) + paddles[:, None, 2:] * share


@pytest.mark.parametrize("size", SIZES)
def test_contours_are_as_specified(size: int) -> None:
    style, made = STYLES[size], drawings(size)
    assert len(made.labels) >= 20
    length = style.contour_length
    assert made.paddles.shape[1] == 2 * length + style.num_distractors * style.distractor_length
    vectors = made.paddles[..., 2:] - made.paddles[..., :2]
    sizes = np.hypot(vectors[..., 0], vectors[..., 1])
    np.testing.assert_allclose(sizes[~np.isnan(sizes)], style.paddle_length, rtol=1e-6)
    assert not np.isnan(sizes[:, : 2 * length]).any()
    inside = made.paddles[~np.isnan(made.paddles)]
    assert inside.min() > 0 and inside.max() < size
    parts = [made.paddles[:, :length], made.paddles[:, length : 2 * length]]
    rest = made.paddles[:, 2 * length :].reshape(-1, style.distractor_length, 4)
    for contour in (*parts, rest[~np.isnan(rest[:, 0, 0])]):
        gaps = contour[:, 1:, :2] - contour[:, :-1, 2:]
        gaps = np.hypot(gaps[..., 0], gaps[..., 1])
        assert (
            gaps.max() <= 2 * style.margin + 1e-6
            and gaps.min() >= 2 * style.margin * np.cos(np.pi / 4) - 1e-6
        )
        vectors = contour[..., 2:] - contour[..., :2]
        angles = np.arctan2(vectors[..., 1], vectors[..., 0])
        turns = np.abs((np.diff(angles, axis=1) + np.pi) % (2 * np.pi) - np.pi)
        assert turns.max() <= np.pi / 2 / style.continuity + 1e-6
    begins = parts[0][:, 0, :2] - parts[1][:, 0, :2]
    np.testing.assert_allclose(np.hypot(begins[:, 0], begins[:, 1]), style.seed_distance, rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_contours_keep_their_distance(size: int) -> None:
    style, made = STYLES[size], drawings(size)
    owner = np.concatenate([
        np.repeat([0, 1], style.contour_length),
        2 + np.repeat(np.arange(style.num_distractors), style.distractor_length),
    ])  # fmt: skip
    for paddles in made.paddles[:6]:
        there = ~np.isnan(paddles[:, 0])
        points, owners = dense(paddles[there]), owner[there]
        for number in range(len(points)):
            others = points[owners > owners[number]]
            if len(others):
                away = np.linalg.norm(others[:, :, None] - points[number], axis=-1).min()
                # No nearer than the free space between two paddles of one contour, edge to edge.
                assert away - style.thickness >= 2 * style.margin - 0.05
        for contour in (0, 1):  # nor does a contour come near itself
            own = points[owners == contour]
            for number in range(len(own) - 2):
                away = np.linalg.norm(own[number + 2 :, :, None] - own[number], axis=-1).min()
                assert away - style.thickness >= 2 * style.margin - 0.05


def test_labels_follow_from_the_geometry() -> None:
    style, made = STYLES[32], drawings(32)
    for paddles, disks, label in zip(made.paddles, made.disks, made.labels, strict=True):
        contours = paddles[:14], paddles[14:28]
        begins = [np.allclose(disks[0], contour[0, :2]) for contour in contours]
        ends = [np.allclose(disks[1], contour[-1, 2:]) for contour in contours]
        assert sum(begins) == sum(ends) == 1
        assert label == (begins == ends)
    assert style.contour_length == 14


def test_most_distractors_find_room() -> None:
    for size, least in ((16, 1.5), (32, 3), (64, 4), (128, 7)):
        style, made = STYLES[size], drawings(size)
        there = ~np.isnan(made.paddles[:, 2 * style.contour_length :, 0])
        per_picture = there.reshape(len(there), style.num_distractors, -1).all(axis=2).sum(axis=1)
        assert per_picture.mean() > least
        for label in (0, 1):  # and as many with either answer
            deviation = per_picture.std() / np.sqrt((made.labels == label).sum())
            assert abs(per_picture[made.labels == label].mean() - per_picture.mean()) < 4 * deviation + 1e-9


@lru_cache
def many() -> tuple[np.ndarray, np.ndarray]:
    return pathfinder.pictures(STYLES[16], 3_000, seed=(5,))


def test_nothing_cheap_tells_the_answer() -> None:
    """A fit on pixels, brightness and spread stays at chance: 1,000 pictures, 4 standard errors are 6.3 points."""
    shades, labels = many()
    assert labels.mean() == pytest.approx(0.5, abs=0.04)
    flat = shades.reshape(len(shades), -1) / 255
    moments = np.stack([flat.mean(axis=1), flat.std(axis=1), (flat > 0.99).sum(axis=1)], axis=1)
    moments = (moments - moments.mean(axis=0)) / moments.std(axis=0)
    for features in (flat, moments):
        fit = LogisticRegression(C=0.01, max_iter=200).fit(features[:2000], labels[:2000])
        assert fit.score(features[2000:], labels[2000:]) == pytest.approx(0.5, abs=0.063)


def test_the_distance_between_the_disks_tells_little() -> None:
    style = STYLES[32]
    made = [draw_geometry(np.random.default_rng((2, block)), style, 1024) for block in range(3)]
    away = np.concatenate([np.linalg.norm(one.disks[:, 0] - one.disks[:, 1], axis=1) for one in made])
    labels = np.concatenate([one.labels for one in made])
    half = len(away) // 2
    assert half > 400
    bins = np.digitize(away, np.quantile(away[:half], np.linspace(0, 1, 9)[1:-1]))
    answer = np.array([labels[:half][bins[:half] == number].mean() > 0.5 for number in range(8)])
    assert (
        answer[bins[half:]] == labels[half:]
    ).mean() < 0.5 + 0.12  # the leak is about 2, 4 standard errors 10


def test_seeds_reproduce_and_the_first_stay_the_first() -> None:
    shades, labels = pathfinder.pictures(STYLES[16], 40, seed=(5,))
    assert np.array_equal(shades, many()[0][:40]) and np.array_equal(labels, many()[1][:40])
    assert not np.array_equal(pathfinder.pictures(STYLES[16], 40, seed=(6,))[0], shades)


def test_shades_are_the_share_covered() -> None:
    style = replace(STYLES[32], thickness=2.5, contrast=1.0, disk_radius=3.0)
    line = np.array([[[4.0, 10.5, 28.0, 10.5]]])
    far = np.full((1, 2, 2), 200.0)
    picture = draw(line, far, style)[0] / 255
    np.testing.assert_allclose(picture[8:14, 16], [0, 0.75, 1, 0.75, 0, 0], atol=0.003)
    assert not picture[:, 31].any()
    disk = draw(np.full((1, 1, 4), np.nan), np.array([[[10.0, 10.0], [10.0, 10.0]]]), style)[0] / 255
    assert disk.sum() == pytest.approx(np.pi * 9, rel=0.03)
    thin = draw(line, far, replace(style, thickness=0.5, contrast=1.5))[0] / 255
    assert thin[10, 16] == pytest.approx(0.75, abs=0.003) and thin[9, 16] == thin[11, 16] == 0


def test_task_of_tokens() -> None:
    task = pathfinder.make(seed=0, train=20, validation=5, test=5, size=16)
    assert (task.name, task.num_classes, task.num_tokens) == ("pathfinder", 2, 257)
    assert (
        task.train.inputs.shape == (20, 256)
        and task.train.inputs.min() == 1
        and task.train.inputs.max() == 256
    )
    easier = pathfinder.make(
        seed=0, train=5, validation=5, test=5, size=32, contour_length=6, num_distractors=0
    )
    dark = (easier.train.inputs == 1).mean()
    assert dark > (pathfinder.make(seed=0, train=5, validation=5, test=5).train.inputs == 1).mean() + 0.1


@pytest.mark.parametrize(
    "wrong", [{"size": 48}, {"contour_length": 1}, {"num_distractors": -1}, {"validation": 0}]
)
def test_refuses_what_cannot_be_had(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        pathfinder.make(**dict(seed=0, train=5, validation=5, test=5, size=16) | wrong)


def test_says_when_no_contour_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathfinder, "MAX_BARREN", 3)
    with pytest.raises(SupraError, match="no room"):
        pathfinder.pictures(replace(STYLES[16], contour_length=60), 1, seed=(0,))
