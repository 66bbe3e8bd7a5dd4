"""Linear attention in both directions: every form gives the same sums, gradients included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from supra_eval.lra.models import bidirectional
from supra_eval.lra.models.bidirectional import attend, chunked, quadratic, whole_sum
from supra_kernels import linear_attention


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, causal: bool = False
) -> Tensor:
    """The definition, pair by pair."""
    B, T, H, _ = q.shape
    gamma = q.new_ones(B, T, H) if log_decay is None else log_decay.exp().expand(B, T, H)
    output = torch.zeros_like(v)
    for i in range(T):
        for j in range(i + 1 if causal else T):
            weight = gamma[:, min(i, j) + 1 : max(i, j) + 1].prod(1)
            output[:, i] += (scale * weight * (q[:, i] * k[:, j]).sum(-1)).unsqueeze(-1) * v[:, j]
    return output


def two_recurrences(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float) -> Tensor:
    """Forward and backward by the causal operator, less the diagonal that both count."""
    forward, _ = linear_attention(q, k, v, log_decay, scale=scale)
    behind = log_decay
    if log_decay is not None and log_decay.ndim == 3:
        behind = log_decay.roll(-1, 1).flip(1)
    backward, _ = linear_attention(q.flip(1), k.flip(1), v.flip(1), behind, scale=scale)
    return forward + backward.flip(1) - scale * (q * k).sum(-1, keepdim=True) * v


def operands(
    B: int, T: int, H: int, K: int, V: int, decay: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k = torch.randn(2, B, T, H, K, dtype=torch.float64)
    v = torch.randn(B, T, H, V, dtype=torch.float64)
    fixed, gated = -torch.rand(H, dtype=torch.float64), -3 * torch.rand(B, T, H, dtype=torch.float64)
    return q, k, v, {"none": None, "fixed": fixed, "gated": gated}[decay]


shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 13), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)
)
decays = st.sampled_from(["none", "fixed", "gated"])


@given(shapes, decays, st.integers(1, 6))
def test_every_form_is_the_definition(shape: tuple[int, ...], decay: str, chunk_size: int) -> None:
    q, k, v, log_decay = operands(*shape, decay)
    expected = by_hand(q, k, v, log_decay, 0.3)
    forms = [
        quadratic(q, k, v, log_decay, scale=0.3, causal=False),
        two_recurrences(q, k, v, log_decay, 0.3),
        whole_sum(q, k, v, scale=0.3)
        if log_decay is None
        else chunked(q, k, v, log_decay, scale=0.3, chunk_size=chunk_size),
    ]
    for output in forms:
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


@given(shapes, decays)
def test_the_causal_quadratic_form_is_the_definition(shape: tuple[int, ...], decay: str) -> None:
    q, k, v, log_decay = operands(*shape, decay)
    output = quadratic(q, k, v, log_decay, scale=0.3, causal=True)
    torch.testing.assert_close(output, by_hand(q, k, v, log_decay, 0.3, causal=True), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decay", ["none", "fixed", "gated"])
def test_short_and_long_form_have_the_same_gradients(
    decay: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [x for x in operands(2, 150, 2, 4, 5, decay) if x is not None]
    weights = torch.randn(2, 150, 2, 5, dtype=torch.float64)
    results = []
    for longest in (10**6, 0):
        monkeypatch.setattr(bidirectional, "LONGEST_QUADRATIC", longest)
        leaves = [x.clone().requires_grad_() for x in tensors]
        q, k, v, log_decay = (*leaves, None)[:4]
        output = attend(q, k, v, log_decay, scale=0.5, causal=causal)
        results.append((output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)))
    for short, long in zip(*results, strict=True):
        torch.testing.assert_close(short, long, rtol=1e-9, atol=1e-9)


def test_three_tokens_by_hand() -> None:
    """One head, γ = ½, all keys and queries 1: v = (8, 4, 2) gives 8 + 4/2 + 2/4, 8/2 + 4 + 2/2, 8/4 + 4/2 + 2."""
    ones, v = torch.ones(1, 3, 1, 1), torch.tensor([8.0, 4.0, 2.0]).view(1, 3, 1, 1)
    output = attend(ones, ones, v, torch.tensor([0.5]).log(), scale=1.0, causal=False)
    assert output.flatten().tolist() == pytest.approx([10.5, 9.0, 6.0])


def test_a_gate_between_two_tokens_hides_each_from_the_other() -> None:
    """γ of the third token closes: nothing passes between the first two and the last two, in either direction."""
    q, k, v, _ = operands(1, 4, 1, 3, 3, "none")
    gate = torch.zeros(1, 4, 1, dtype=torch.float64)
    gate[:, 2] = -200
    output = attend(q, k, v, gate, scale=1.0, causal=False)
    for half in (slice(0, 2), slice(2, 4)):
        own = whole_sum(q[:, half], k[:, half], v[:, half], scale=1.0)
        torch.testing.assert_close(output[:, half], own)


def test_strong_decay_over_a_long_sequence_stays_finite() -> None:
    """In fp32, with sums of log γ far beyond what exp can hold."""
    q, k, v, _ = (x if x is None else x.float() for x in operands(1, 600, 2, 4, 4, "none"))
    log_decay = torch.full((1, 600, 2), -20.0).requires_grad_()
    output = attend(q, k, v, log_decay, scale=1.0, causal=False)
    output.sum().backward()
    assert output.isfinite().all() and log_decay.grad.isfinite().all()
    torch.testing.assert_close(output, (q * k).sum(-1, keepdim=True) * v, rtol=1e-4, atol=1e-5)
