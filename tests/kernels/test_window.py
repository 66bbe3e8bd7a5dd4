"""Softmax over the last tokens: blocks = dense = torch's SDPA, with a past, packed documents, and
gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from supra_kernels import window_attention

Make = Callable[..., Any]
Inputs = dict[str, Tensor | None]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: None if x is None else x.to(dtype) for name, x in inputs.items()}


def run(backend: str, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """`o`, `lse` and the gradients of a random combination of them."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
    q, k, v = (leaves.pop(name) for name in ("q", "k", "v"))
    o, lse = window_attention(q, k, v, **leaves, backend=backend, **options)
    loss = (o * normal(7, *o.shape)).sum() + (lse * normal(8, *lse.shape)).sum()
    every = {"q": q, "k": k, "v": v} | leaves
    found = torch.autograd.grad(loss, list(every.values()), allow_unused=True, materialize_grads=True)
    gradients = {f"d {name}": g for name, g in zip(every, found, strict=True)}
    return {"o": o.detach(), "lse": lse.detach()} | gradients


@st.composite
def cases(draw: st.DrawFn) -> tuple[Inputs, dict[str, Any]]:
    T, D, V = draw(st.integers(0, 160)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    packed, P = draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 5, 40]))
    n, G = draw(st.sampled_from([(1, 1), (3, 1), (2, 2), (1, 3)]))
    B = 1 if packed else draw(st.sampled_from([1, 2]))
    cuts = sorted(draw(st.lists(st.integers(0, T), max_size=4))) if packed else []
    N = len(cuts) + 1 if packed else B
    past_k, past_v = (normal(seed, N, P, G, size) if P else None for seed, size in ((3, D), (4, V)))
    valid = None
    if past_k is not None and past_v is not None and draw(st.booleans()):
        valid = torch.tensor(draw(st.lists(st.integers(0, P), min_size=N, max_size=N)))
        for row, count in enumerate(valid.tolist()):
            past_k[row, : P - count], past_v[row, : P - count] = float("nan"), float("nan")
    inputs = {
        "q": normal(0, B, T, n * G, D), "k": normal(1, B, T, G, D), "v": normal(2, B, T, G, V),
        "past_k": past_k, "past_v": past_v,
    }  # fmt: skip
    options = {
        "window": draw(st.sampled_from([1, 2, 31, 64, 65, 200])), "scale": 0.4, "past_valid": valid,
        "cu_seqlens": torch.tensor([0, *cuts, T]) if packed else None,
    }  # fmt: skip
    return inputs, options


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_blocks_equal_the_dense_form(near: Make, case: tuple[Inputs, dict[str, Any]]) -> None:
    inputs, options = case
    near(run("torch", inputs, **options), run("reference", inputs, **options), 1e-10)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_equals_sdpa_with_a_banded_mask(near: Make, backend: str) -> None:
    q, k, v = normal(0, 2, 90, 6, 8), normal(1, 2, 90, 2, 8), normal(2, 2, 90, 2, 5)
    age = torch.arange(90).unsqueeze(1) - torch.arange(90)
    mask = (age >= 0) & (age < 17)
    inputs = {"q": q, "k": k, "v": v}
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    transposed = [x.transpose(1, 2) for x in leaves]
    want = scaled_dot_product_attention(*transposed, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(
        1, 2
    )
    ours = [x.clone().requires_grad_() for x in inputs.values()]
    o, _ = window_attention(*ours, window=17, scale=0.3, backend=backend)
    weights = normal(5, *want.shape)
    near({"o": o.detach()}, {"o": want.detach()}, 1e-10)
    for mine, theirs in zip(
        torch.autograd.grad((o * weights).sum(), ours),
        torch.autograd.grad((want * weights).sum(), leaves),
        strict=True,
    ):
        near({"gradient": mine}, {"gradient": theirs}, 1e-10)


def test_a_segment_with_its_past_equals_the_whole(near: Make) -> None:
    q, k, v = normal(0, 2, 120, 4, 8), normal(1, 2, 120, 2, 8), normal(2, 2, 120, 2, 8)
    whole = window_attention(q, k, v, window=32, scale=0.3)
    for cut in (1, 31, 64, 119):
        part = window_attention(
            q[:, cut:], k[:, cut:], v[:, cut:], window=32, scale=0.3,
            past_k=k[:, max(0, cut - 31) : cut], past_v=v[:, max(0, cut - 31) : cut],
        )  # fmt: skip
        near(
            dict(zip("ol", part, strict=True)),
            dict(zip("ol", (x[:, cut:] for x in whole), strict=True)),
            1e-10,
        )


def test_gradients_against_finite_differences() -> None:
    inputs = (
        normal(0, 1, 9, 4, 3),
        normal(1, 1, 9, 2, 3),
        normal(2, 1, 9, 2, 2),
        normal(3, 1, 2, 2, 3),
        normal(4, 1, 2, 2, 2),
    )

    def call(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor]:
        return window_attention(q, k, v, window=4, scale=0.5, past_k=past_k, past_v=past_v)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in inputs))


@pytest.mark.parametrize("window", [64, 300])
def test_precision(near: Make, window: int) -> None:
    """fp32 within 1e-5 of fp64; bf16 inputs cost at most twice the reference's error."""
    inputs: Inputs = {
        "q": 4 * normal(0, 2, 333, 6, 64),
        "k": normal(1, 2, 333, 2, 64),
        "v": normal(2, 2, 333, 2, 64),
    }
    options: dict[str, Any] = {"window": window, "scale": 0.125}
    exact = run("reference", inputs, **options)
    near(run("torch", cast(inputs, torch.float32), **options), exact, 1e-5)
    low = cast(inputs, torch.bfloat16)
    exact = run("reference", cast(low, torch.float64), **options)
    ours, theirs = run("torch", low, **options), run("reference", low, **options)
    assert ours["o"].dtype == torch.bfloat16
    assert ours["lse"].dtype == torch.float32
    for name, want in exact.items():
        limit = 2 * (theirs[name].double() - want).norm() + 1e-6 * want.norm()
        assert (ours[name].double() - want).norm() <= limit, name


def test_huge_scores_do_not_overflow() -> None:
    q = torch.full((1, 70, 1, 4), 300.0)
    o, lse = window_attention(q, q, q, window=8, scale=1.0)
    assert torch.allclose(o, q)
    assert lse.isfinite().all()


def test_autocast_does_not_lower_the_precision(near: Make) -> None:
    inputs = {
        "q": normal(0, 1, 50, 4, 8).float(),
        "k": normal(1, 1, 50, 2, 8).float(),
        "v": normal(2, 1, 50, 2, 8).float(),
    }
    plain = run("torch", inputs, window=16, scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near(run("torch", inputs, window=16, scale=0.3), plain, 0.0)


def test_memory_for_the_backward_pass_is_linear() -> None:
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes())
        return x

    q, k, v = (torch.randn(1, 2048, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        window_attention(q, k, v, window=256, scale=0.25)
    assert sum(saved) < 3 * sum(x.untyped_storage().nbytes() for x in (q, k, v))
