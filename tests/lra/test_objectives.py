"""Self-pretraining: what is masked is hidden, what is predicted is counted, and only the encoder is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from supra.errors import UserError
from supra_eval.lra.models.config import EncoderConfig
from supra_eval.lra.models.encoder import Encoder
from supra_eval.lra.models.heads import Classifier
from supra_eval.lra.objectives import Objective, Pretraining, check_objective, transfer

MASKED, CAUSAL = Objective(kind="masked", mask_rate=0.3), Objective(kind="causal")


def config(**changes: Any) -> EncoderConfig:
    options = dict(mixer="linear", num_layers=1, hidden_size=8, num_heads=2, intermediate_size=16)
    return EncoderConfig(**{**options, **changes})


def pretraining(objective: Objective, **changes: Any) -> Pretraining:
    direction = "causal" if objective.kind == "causal" else "bidirectional"
    return Pretraining(Encoder(config(direction=direction, **changes)), objective)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(model: Pretraining, B: int, T: int) -> Tensor:
    own = model.encoder.config
    return torch.randn(B, T, own.channels) if own.channels else torch.randint(1, own.num_tokens, (B, T))


INPUTS = [dict(num_tokens=7), dict(channels=2)]


def test_each_real_position_is_masked_independently_at_the_rate() -> None:
    """200 × 200 positions, half of them real: the share within 4 deviations, neighbours uncorrelated."""
    model = pretraining(MASKED, num_tokens=7)
    lengths = torch.full((200,), 100)
    mask = model.draw_mask(torch.ones(200, 200, dtype=torch.long), lengths, seeded(0))
    assert not mask[:, 100:].any()
    real = mask[:, :100].double()
    assert real.mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 20_000))
    together = (real[:, 1:] * real[:, :-1]).mean().item()
    assert together == pytest.approx(0.09, abs=0.01)
    assert (real[1:] * real[:-1]).mean().item() == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize("inputs", INPUTS)
def test_a_seed_gives_the_same_masks_and_another_gives_others(inputs: dict[str, int]) -> None:
    model = pretraining(MASKED, **inputs)
    x = batch(model, 4, 20)
    one, same, other = (model(x, generator=seeded(seed)) for seed in (5, 5, 6))
    assert torch.equal(one.total, same.total) and one.count == same.count
    assert not torch.equal(one.total, other.total)


@pytest.mark.parametrize("inputs", INPUTS)
@given(seed=st.integers(0, 1000))
def test_what_is_masked_reaches_no_hidden_state(inputs: dict[str, int], seed: int) -> None:
    model = pretraining(MASKED, **inputs)
    x, other = batch(model, 2, 9), batch(model, 2, 9)
    mask = model.draw_mask(x, None, seeded(seed))
    shown = mask if x.ndim == 2 else mask.unsqueeze(-1)
    changed = torch.where(shown, other, x)
    assert torch.equal(model.embed_masked(x, mask), model.embed_masked(changed, mask))


def test_masked_tokens_are_always_the_symbol_and_others_never() -> None:
    model = pretraining(MASKED, num_tokens=7)
    x = batch(model, 2, 9)
    mask = model.draw_mask(x, None, seeded(0))
    embedded = model.embed_masked(x, mask)
    assert torch.equal(embedded[mask], model.mask_vector.expand(int(mask.sum()), -1))
    assert torch.equal(embedded[~mask], model.encoder.embed(x)[~mask])


def test_masked_numbers_are_zero_beside_a_mask_channel() -> None:
    model = pretraining(MASKED, channels=2)
    x = batch(model, 2, 9)
    mask = model.draw_mask(x, None, seeded(0)).unsqueeze(-1).float()
    weight = torch.cat((model.encoder.embedding.weight, model.mask_vector.unsqueeze(1)), dim=1)
    expected = torch.nn.functional.linear(
        torch.cat((x * (1 - mask), mask), -1), weight, model.encoder.embedding.bias
    )
    torch.testing.assert_close(model.embed_masked(x, mask[..., 0].bool()), expected)


@pytest.mark.parametrize("objective", [MASKED, CAUSAL], ids=["masked", "causal"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_loss_is_that_of_each_predicted_position(objective: Objective, inputs: dict[str, int]) -> None:
    """Position by position, padding (NaN where it can be) left out."""
    model = pretraining(objective, **inputs)
    lengths = [9, 4, 1]
    x = batch(model, 3, 9)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan if x.is_floating_point() else 0
    loss = model(x, torch.tensor(lengths), seeded(3))
    mask = torch.zeros(3, 9, dtype=torch.bool)
    if objective.kind == "masked":
        mask = model.draw_mask(x, torch.tensor(lengths), seeded(3))
    hidden = model.encoder.encode(
        model.embed_masked(x, mask) if mask.any() else model.encoder.embed(x), torch.tensor(lengths)
    )
    terms = []
    for row, length in enumerate(lengths):
        for t in range(length):
            if objective.kind == "masked" and mask[row, t]:
                terms.append((hidden[row, t], x[row, t]))
            if objective.kind == "causal" and t + 1 < length:
                terms.append((hidden[row, t], x[row, t + 1]))
    total = 0.0
    for state, target in terms:
        predicted = model.head(state)
        if x.is_floating_point():
            total += (predicted - target).abs().mean().item()
        else:
            total -= predicted.log_softmax(-1)[target].item()
    assert loss.count == len(terms) and (objective.kind == "masked" or loss.count == 11)
    assert loss.total.item() == pytest.approx(total, rel=1e-4)
    loss.mean.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.head.parameters())


def test_nothing_to_predict_is_no_loss_and_no_nan() -> None:
    model = pretraining(CAUSAL, channels=1)
    loss = model(torch.randn(3, 1, 1))
    loss.mean.backward()
    assert loss.count == 0 and loss.mean.item() == 0


@pytest.mark.parametrize("mixer", ["softmax", "linear", "s4d"])
def test_the_causal_objective_cannot_see_its_answer(mixer: str) -> None:
    """What the last position holds changes the last prediction's target alone, not the prediction."""
    own = dict(num_heads=None, positions="none") if mixer == "s4d" else {}
    model = pretraining(CAUSAL, channels=1, mixer=mixer, **own).double()
    x = torch.randn(1, 8, 1, dtype=torch.float64)
    x.requires_grad_()
    predictions = model.head(model.encoder(x))[:, :-1]
    (gradient,) = torch.autograd.grad(predictions.square().sum(), x)
    assert gradient[0, -1].abs().item() < 1e-12 and (gradient[0, :-1].abs() > 1e-9).all()


def test_an_objective_needs_its_direction() -> None:
    with pytest.raises(UserError, match="sees the position that it is to predict"):
        Pretraining(Encoder(config(channels=1)), CAUSAL)
    with pytest.raises(UserError, match="fill in a mask without what follows it"):
        check_objective(MASKED, "causal")
    for wrong in (dict(kind="masked"), dict(kind="causal", mask_rate=0.5), dict(kind="masked", mask_rate=1)):
        with pytest.raises(ValidationError):
            Objective(**wrong)


@pytest.mark.parametrize("inputs", INPUTS)
def test_transfer_moves_the_encoder_alone(inputs: dict[str, int]) -> None:
    model = pretraining(MASKED, **inputs)
    classifier = Classifier(Encoder(config(pooling="max", **inputs), seed=1), 3, seed=2)
    head = {name: value.clone() for name, value in classifier.head.state_dict().items()}
    names = set(classifier.state_dict())
    x = batch(model, 2, 9)
    before = classifier.encoder(x)
    transfer(model, classifier)
    assert torch.equal(classifier.encoder(x), model.encoder(x)) and not torch.equal(before, model.encoder(x))
    assert all(torch.equal(value, head[name]) for name, value in classifier.head.state_dict().items())
    assert set(classifier.state_dict()) == names and not any("mask" in name for name in names)
    # A copy: training the one leaves the other as it was.
    next(classifier.encoder.parameters()).data.zero_()
    assert not torch.equal(classifier.encoder(x), model.encoder(x))


def test_another_encoder_is_refused_by_what_differs() -> None:
    classifier = Classifier(Encoder(config(channels=2, decay="learned")), 3)
    with pytest.raises(UserError, match="differs from the classifier's in decay"):
        transfer(pretraining(MASKED, channels=2), classifier)


@pytest.mark.parametrize("objective", [MASKED, CAUSAL], ids=["masked", "causal"])
@pytest.mark.parametrize("inputs", [dict(num_tokens=5), dict(channels=1)])
def test_pretraining_learns_a_repeating_sequence(objective: Objective, inputs: dict[str, int]) -> None:
    """Four values that repeat, from a random start: 1.39 nats, or 1 a number, without the context."""
    model = pretraining(
        objective, mixer="softmax", num_layers=2, hidden_size=32, num_heads=4, intermediate_size=64, **inputs
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = seeded(0), []
    for _ in range(120):
        phase = torch.randint(0, 4, (32, 1), generator=generator) + torch.arange(16)
        x = phase % 4 + 1
        if "channels" in inputs:
            x = (x - 2.5).unsqueeze(-1)
        loss = model(x, generator=generator).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.5, losses[::5]
