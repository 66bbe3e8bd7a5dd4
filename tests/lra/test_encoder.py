"""Encoders: padding is invisible, causal ones do not look ahead, heads pool what is real, and all of them learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from supra_eval.lra.models.config import EncoderConfig
from supra_eval.lra.models.encoder import Encoder, real_positions
from supra_eval.lra.models.heads import Classifier, pool
from supra_eval.lra.models.size import count_parameters, forward_flops
from supra_eval.lra.models.softmax import local_attention

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=8, intermediate_size=16)
ATTENTION: dict[str, Any] = dict(num_heads=2, **SIZES)
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": dict(mixer="softmax", **ATTENTION),
    "softmax, sinusoidal": dict(mixer="softmax", positions="sinusoidal", **ATTENTION),
    "softmax, alibi": dict(mixer="softmax", positions="alibi", **ATTENTION),
    "softmax, blocks": dict(mixer="softmax", block_tokens=4, **ATTENTION),
    "s4d": dict(mixer="s4d", positions="none", **SIZES),
    "s4d, sinusoidal": dict(mixer="s4d", positions="sinusoidal", state_start="inv", **SIZES),
    "linear, no positions": dict(mixer="linear", positions="none", **ATTENTION),
    **{
        f"linear, {decay}": dict(mixer="linear", decay=decay, **ATTENTION)
        for decay in ("none", "alibi", "retnet", "learned", "gated")
    },
    **{
        f"linear, {name}": dict(mixer="linear", feature_map=name, **ATTENTION)
        for name in ("relu_dense", "hedgehog", "t2r", "elu", "taylor", "identity")
    },
    "linear, gated, denominator": dict(mixer="linear", decay="gated", norm="denominator", **ATTENTION),
}


def encoder(name: str, direction: str, **changes: Any) -> Encoder:
    options = {"channels": 2, "direction": direction, **VARIANTS[name], **changes}
    if "num_tokens" in changes:
        del options["channels"]
    model = Encoder(EncoderConfig(**options), seed=1)
    for (
        parameter
    ) in model.parameters():  # gates and skips start so that they do nothing: make all of it count
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    return model.double()


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("name", VARIANTS)
def test_padding_changes_nothing_and_shows_nothing(name: str, direction: str) -> None:
    model = encoder(name, direction)
    lengths = torch.tensor([11, 7, 1, 4])
    inputs = torch.randn(4, 11, 2, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        inputs[row, length:] = torch.nan
    hidden = model(inputs, lengths)
    hidden.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.layers.parameters())
    for row, length in enumerate(lengths.tolist()):
        alone = model(inputs[row : row + 1, :length])
        torch.testing.assert_close(hidden[row : row + 1, :length], alone, rtol=1e-9, atol=1e-9)
        assert not hidden[row, length:].any()


@pytest.mark.parametrize("name", VARIANTS)
@given(data=st.data())
def test_a_causal_position_never_depends_on_later_ones(name: str, data: st.DataObject) -> None:
    T = data.draw(st.integers(2, 14))
    changed = data.draw(st.integers(1, T - 1))
    model = encoder(name, "causal")
    inputs = torch.randn(1, T, 2, dtype=torch.float64)
    other = inputs.clone()
    other[:, changed:] = 5 * torch.randn(1, T - changed, 2, dtype=torch.float64)
    with torch.no_grad():
        before, after = model(inputs), model(other)
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(before[:, changed], after[:, changed])


@pytest.mark.parametrize("name", ["softmax", "linear, gated", "linear, none"])
@pytest.mark.parametrize("T", [40, 200])
def test_a_long_causal_sequence_does_not_leak_either(name: str, T: int) -> None:
    """Past the length at which the linear layer changes its form."""
    model, inputs = encoder(name, "causal"), torch.randn(1, T, 2, dtype=torch.float64)
    other = inputs.clone()
    other[:, T // 2 :] += 3
    with torch.no_grad():
        before, after = model(inputs), model(other)
    torch.testing.assert_close(before[:, : T // 2], after[:, : T // 2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "softmax, blocks"])
def test_a_bidirectional_position_depends_on_all(name: str) -> None:
    model, inputs = encoder(name, "bidirectional"), torch.randn(1, 9, 2, dtype=torch.float64)
    inputs.requires_grad_()
    for position in (0, 4, 8):
        (gradient,) = torch.autograd.grad(model(inputs)[0, position].square().sum(), inputs)
        assert (gradient.abs().sum(-1) > 0).all()


@given(T=st.integers(1, 23), w=st.integers(1, 9), causal=st.booleans(), masked=st.booleans(), data=st.data())
def test_blocks_are_masked_softmax(T: int, w: int, causal: bool, masked: bool, data: st.DataObject) -> None:
    B, H, D = 2, 2, 4
    q, k, v = torch.randn(3, B, T, H, D, dtype=torch.float64)
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, T), min_size=B, max_size=B)))
    real = torch.arange(T) < lengths.unsqueeze(1) if masked else torch.ones(B, T, dtype=torch.bool)
    block = torch.arange(T) // w
    seen = (block.unsqueeze(1) - block).abs() <= 1
    if causal:
        seen = seen.tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    scores = scores.masked_fill(~(seen & real.unsqueeze(1)).unsqueeze(1), float("-inf"))
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    output = local_attention(q, k, v, real if masked else None, block_tokens=w, causal=causal)
    assert output.isfinite().all()
    torch.testing.assert_close(output[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_is_near_single(name: str) -> None:
    """Under autocast, weights in fp32: sums, kernels and decays are not rounded, matrix products are."""
    model = encoder(name, "bidirectional").float()
    inputs, lengths = torch.randn(2, 140, 2), torch.tensor([140, 90])
    exact = model(inputs, lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(inputs, lengths)
    hidden.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (hidden.float() - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_one_block_is_the_whole_sequence() -> None:
    inputs = torch.randn(2, 12, 2, dtype=torch.float64)
    whole, blocks = (encoder("softmax", "bidirectional", block_tokens=w) for w in (None, 12))
    blocks.load_state_dict(whole.state_dict())
    torch.testing.assert_close(whole(inputs), blocks(inputs), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_may_be_integers_of_any_width(dtype: torch.dtype) -> None:
    model, inputs = encoder("softmax", "causal", num_tokens=9), torch.randint(1, 9, (2, 5))
    torch.testing.assert_close(model(inputs.to(dtype)), model(inputs), rtol=0, atol=0)


def test_pooling_by_hand() -> None:
    hidden = torch.tensor([[[1.0], [3.0], [0.0]], [[-1.0], [-2.0], [-6.0]]])
    lengths = torch.tensor([2, 3])
    assert pool(hidden, lengths, "mean").flatten().tolist() == [2, -3]
    assert pool(hidden, lengths, "last").flatten().tolist() == [3, -6]
    assert pool(hidden, torch.tensor([2, 1]), "max").flatten().tolist() == [3, -1]
    assert pool(hidden, None, "mean").flatten().tolist() == pytest.approx([4 / 3, -3])
    assert pool(hidden, None, "last").flatten().tolist() == [0, -6]


def test_lengths_that_do_not_fit_are_refused() -> None:
    for lengths in ([0, 3], [3, 5]):
        with pytest.raises(ValueError, match="do not fit 4 positions"):
            real_positions(torch.tensor(lengths), 4, torch.device("cpu"))


@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
def test_two_towers_share_an_encoder_and_see_both_documents(pooling: str) -> None:
    model = Classifier(
        encoder("softmax", "bidirectional", num_tokens=9, two_towers=True, pooling=pooling), 2
    ).double()
    a, b = torch.randint(1, 9, (3, 7)), torch.randint(1, 9, (3, 5))
    lengths = torch.tensor([7, 2, 3]), torch.tensor([1, 5, 2])
    logits = model(a, lengths[0], b, lengths[1])
    x, y = pool(model.encoder(a, lengths[0]), lengths[0], pooling), pool(
        model.encoder(b, lengths[1]), lengths[1], pooling
    )  # fmt: skip
    torch.testing.assert_close(logits, model.head(torch.cat((x, y, x * y, x - y), -1)))
    with pytest.raises(ValueError, match="two documents"):
        model(a, lengths[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(channels=None), "set one of num_tokens and channels"),
        (dict(num_tokens=5), "set one of num_tokens and channels"),
        (dict(mixer="s4d", num_heads=None), "no queries and keys to rotate"),
        (dict(mixer="s4d", positions="none"), "s4d has no num_heads"),
        (dict(mixer="s4d", positions="none", num_heads=None, state_size=5), "even state_size"),
        (dict(decay="alibi"), "softmax has no decay: leave it out, or set mixer to linear"),
        (dict(state_size=8), "softmax has no state_size"),
        (dict(mixer="linear", block_tokens=4), "its cost grows with the length alone"),
        (dict(mixer="linear", feature_map="identity", norm="denominator"), "denominator can be zero"),
        (dict(num_heads=None), "softmax needs num_heads"),
        (dict(num_heads=3), "does not divide into 3 heads"),
        (dict(num_heads=8), "not made of pairs"),
        (dict(intermediate_size=0), "softmax needs an MLP"),
        (dict(mixer="mamba"), "Input should be 'softmax', 'linear' or 's4d'"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as raised:
        EncoderConfig(**{**dict(mixer="softmax", channels=1), **ATTENTION, **changes})
    assert raised.value.error_count() == 1


@pytest.mark.parametrize("name", ["softmax", "linear, learned", "s4d"])
def test_starting_values_come_from_the_seed_alone(name: str) -> None:
    config = EncoderConfig(channels=1, **VARIANTS[name])
    state = torch.get_rng_state()
    one, same, other = Encoder(config, 1), Encoder(config, 1), Encoder(config, 2)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(one.parameters(), same.parameters(), strict=True)
    assert all(p.isfinite().all() and torch.equal(p, q) for p, q in pairs)
    assert any(not torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_parameters_by_hand() -> None:
    """2 layers of 8: four 8 × 8 projections, an MLP of 16, norms; 10 tokens; 3 classes."""
    config = EncoderConfig(mixer="softmax", num_tokens=10, **ATTENTION)
    layer = 4 * 64 + 16 + 16 + (8 * 16 + 16 + 16 * 8 + 8)
    assert count_parameters(config, 3) == {"embedding": 80, "layers": 2 * layer + 16, "head": 27}
    model = Classifier(Encoder(config), 3)
    assert sum(count_parameters(config, 3).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("name", ["softmax", "linear, alibi", "linear, hedgehog", "linear, none"])
def test_flops_are_what_torch_counts(name: str, direction: str) -> None:
    """Whole sequences in the forms that are matrix products; torch does not count FFTs and kernels of its own."""
    config = EncoderConfig(channels=2, direction=direction, **VARIANTS[name])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        Encoder(config)(torch.randn(1, 24, 2))
    assert forward_flops(config, 24) == counter.get_total_flops()


def following(generator: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    """12 tokens, one of them the marker 1; the label is the token (2 to 5) right behind it."""
    inputs = torch.randint(2, 6, (num, 12), generator=generator)
    where = torch.randint(0, 11, (num,), generator=generator)
    rows = torch.arange(num)
    inputs[rows, where] = 1
    return inputs, inputs[rows, where + 1] - 2


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("mixer", ["softmax", "linear", "s4d"])
def test_every_mixer_learns(mixer: str, direction: str) -> None:
    """Chance is ln 4 = 1.39 nats."""
    own = dict(positions="none") if mixer == "s4d" else dict(num_heads=4)
    config = EncoderConfig(
        mixer=mixer, direction=direction, num_tokens=6, num_layers=2, hidden_size=32, intermediate_size=64, **own
    )  # fmt: skip
    model = Classifier(Encoder(config, seed=0), 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(150 if mixer == "s4d" else 100):
        inputs, labels = following(generator, 64)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.5, losses[::10]
