"""Mixers and methods as models: causal, scaled as transformers scales, with ids as their papers draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from supra_eval.extrapolate.methods import (
    Method,
    Mixer,
    positions_in_test,
    positions_in_training,
    why_not,
)
from supra_eval.extrapolate.model import Sizes, Tagger, scaled
from supra_eval.extrapolate.recipe import Extrapolation
from supra_eval.extrapolate.score import bucket_ends, measure
from supra_eval.extrapolate.task import UNSCORED, Batch, Task

SIZES = Sizes(num_layers=2, hidden_size=32, num_heads=2, intermediate_size=16)
TRAINED = list(dict.fromkeys(method.trained_as for method in Method))
PAIRS = [(mixer, method) for mixer in Mixer for method in TRAINED if why_not(mixer, method) is None]
LENGTH, REACH = 8, 64


def tagger(mixer: Mixer, method: Method) -> Tagger:
    model = Tagger(SIZES.encoder(mixer, method, num_tokens=20, train_tokens=LENGTH), 5, seed=0)
    for name, parameter in model.named_parameters():
        if "decay" in name:  # gates start at 0: make them count
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return model.double().eval()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("mixer", "method"), PAIRS, ids=lambda value: str(value))
@pytest.mark.parametrize("T", [12, 140])
def test_what_follows_changes_nothing(mixer: Mixer, method: Method, T: int) -> None:
    model, tokens = tagger(mixer, method), torch.randint(20, (2, T))
    positions = positions_in_training(method, 2, T, 3 * T, generator())
    other, kept = tokens.clone(), T // 2
    other[:, kept:] = (tokens[:, kept:] + 1 + torch.randint(18, (2, T - kept))) % 20
    with torch.no_grad():
        before, after = model(tokens, positions), model(other, positions)
    torch.testing.assert_close(before[:, :kept], after[:, :kept], rtol=1e-8, atol=1e-8)
    assert not torch.allclose(before[:, kept], after[:, kept])


def test_every_pair_is_another_model() -> None:
    tokens = torch.randint(20, (1, 30))
    with torch.no_grad():
        # What differs in training alone is the same model on counted positions.
        pairs = [(x, m) for x, m in PAIRS if m not in (Method.SHIFTED, Method.RANDOM, Method.POSE)]
        outputs = [tagger(mixer, method)(tokens) for mixer, method in pairs]
    same = [(a, b) for a in range(len(pairs)) for b in range(a) if torch.allclose(outputs[a], outputs[b])]
    assert same == []


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
@pytest.mark.parametrize("mixer", [Mixer.SOFTMAX, Mixer.SUM])
def test_scaled_frequencies_are_those_of_transformers(scaling: str, mixer: Mixer) -> None:
    model, factor, dim = tagger(mixer, Method.ROPE), 4.0, SIZES.hidden_size // SIZES.num_heads
    own = model.encoder.rotary
    ids = torch.arange(32).unsqueeze(0)
    rope: dict[str, Any] = {"rope_theta": 10_000.0, "rope_type": scaling, "factor": factor}
    if scaling == "ntk":
        rope = {"rope_theta": 10_000.0 * factor ** (dim / (dim - 2)), "rope_type": "default"}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = LENGTH
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=SIZES.hidden_size, num_attention_heads=SIZES.num_heads, rope_parameters=rope,
            max_position_embeddings=int(LENGTH * factor),
        )
    )  # fmt: skip
    tokens = torch.randint(20, (1, 32))
    with torch.no_grad():
        plain = model(tokens)
        with scaled(model, scaling, factor, LENGTH):
            assert model.encoder.rotary is not None
            mine = model.encoder.rotary(torch.zeros(1), ids)
            stretched = model(tokens)
        for a, b in zip(mine, theirs(torch.zeros(1), ids), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert model.encoder.rotary is own
        assert not torch.allclose(plain, stretched, rtol=1e-3)
        torch.testing.assert_close(plain, model(tokens), rtol=0, atol=0)


def test_interpolation_reads_a_position_as_a_fraction_of_itself() -> None:
    model, tokens = tagger(Mixer.SOFTMAX, Method.ROPE), torch.randint(20, (1, 32))
    with torch.no_grad(), scaled(model, "linear", 4.0, LENGTH):
        stretched = model(tokens, 4 * torch.arange(32).unsqueeze(0))
    with torch.no_grad():
        torch.testing.assert_close(stretched, model(tokens), rtol=1e-4, atol=1e-4)


def test_shifted_moves_a_whole_sequence_within_reach() -> None:
    ids = positions_in_training(Method.SHIFTED, 4000, LENGTH, REACH, generator())
    assert ids is not None and (ids.diff(dim=1) == 1).all()
    assert ids[:, 0].unique().tolist() == list(range(REACH - LENGTH + 1))


def test_random_draws_rising_ids_each_as_likely() -> None:
    ids = positions_in_training(Method.RANDOM, 4000, LENGTH, REACH, generator())
    assert ids is not None and ids.shape == (4000, LENGTH) and (ids.diff(dim=1) > 0).all()
    share = torch.bincount(ids.flatten(), minlength=REACH).double() / 4000
    assert len(share) == REACH
    torch.testing.assert_close(share, torch.full_like(share, LENGTH / REACH), rtol=0.2, atol=0)
    tested = positions_in_test(Method.RANDOM, 2, REACH, REACH, generator())
    assert tested is not None and torch.equal(tested, torch.arange(REACH).expand(2, -1))


def test_pose_moves_the_second_of_two_parts() -> None:
    ids = positions_in_training(Method.POSE, 4000, LENGTH, REACH, generator())
    assert ids is not None and (ids[:, 0] == 0).all() and (ids.diff(dim=1) >= 1).all()
    jumps = ids.diff(dim=1) > 1
    assert (jumps.sum(1) <= 1).all() and jumps.any(0).all()  # one cut at most, at any place
    skips = ids[:, -1] - (LENGTH - 1)
    assert skips.unique().tolist() == list(range(REACH - LENGTH + 1))


@pytest.mark.parametrize(
    "method", [m for m in Method if m not in (Method.SHIFTED, Method.RANDOM, Method.POSE)]
)
def test_the_others_count(method: Method) -> None:
    assert positions_in_training(method, 2, LENGTH, REACH, generator()) is None
    assert positions_in_test(method, 2, LENGTH, REACH, generator()) is None


def test_alibi_of_a_linear_model_is_its_decay(recipe: Callable[..., Extrapolation]) -> None:
    config = recipe().encoder.encoder(Mixer.DECAY, Method.ALIBI, 20, 12)
    assert (config.positions, config.decay) == ("none", "alibi")
    assert recipe().encoder.encoder(Mixer.SOFTMAX, Method.ALIBI, 20, 12).positions == "alibi"


def test_a_test_counts_each_target_once_whatever_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tagger(Mixer.SOFTMAX, Method.ROPE).float()
    tokens, targets = torch.randint(20, (5, 21)), torch.randint(5, (5, 21))
    targets[:, ::4] = UNSCORED
    targets[:, 10:15] = UNSCORED
    tokens[0], targets[0] = tokens[1], targets[1]
    task = Task("t", 20, 5, "exact match", lambda rng, rows, length: Batch(tokens, targets))
    with torch.no_grad():
        logits = model(tokens)
    targets[2] = torch.where(targets[2] == UNSCORED, UNSCORED, logits[2].argmax(-1))  # one row all right
    batch, options = Batch(tokens, targets), dict(train_tokens=LENGTH, reach=REACH)
    scored = targets != UNSCORED
    losses = -logits.log_softmax(-1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    right = logits.argmax(-1) == targets
    for at_once in (1, 40, 10_000):
        monkeypatch.setattr("supra_eval.extrapolate.score.BATCH_TOKENS", at_once)
        found = measure(model, task, batch, Method.ROPE, **options)  # type: ignore[arg-type]
        assert found["value"] == 20.0 and found["targets"] == int(scored.sum())
        assert found["loss"] == pytest.approx(losses[scored].mean().item(), rel=1e-4)
        start = 0
        for end, loss, accuracy, count in found["by_position"]:
            where = scored[:, start : int(end)]
            if end == 16:  # between 8 and 16 stand the positions 8 to 15
                assert count == int(scored[:, 8:16].sum())
            assert count == int(where.sum())
            assert loss == pytest.approx(losses[:, start : int(end)][where].mean().item(), rel=1e-4)
            assert accuracy == pytest.approx(100 * right[:, start : int(end)][where].double().mean().item())
            start = int(end)
        assert sum(row[3] for row in found["by_position"]) == found["targets"]


def test_buckets_are_fine_within_the_training_length_and_even_beyond() -> None:
    assert bucket_ends(64, 64) == [16, 32, 48, 64]
    assert bucket_ends(256, 64) == [16, 32, 48, 64, 128, 192, 256]
    assert bucket_ends(100, 64) == [16, 32, 48, 64, 100]
