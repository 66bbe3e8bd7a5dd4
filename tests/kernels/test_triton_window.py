"""Triton's window attention against the fp64 reference, and what its kernels need on each target.

Without a GPU the kernels run in Triton's interpreter, so shapes are small; tiles are those of the launcher.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from supra_kernels import BackendError, reference
from supra_kernels.window import window_attention_torch

pytest.importorskip("triton")
from supra_kernels.triton_backend.window import tile_table, window_attention

Near = Callable[..., None]
Inputs = dict[str, Tensor | None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory from `torch.empty` holds NaN, so that what a kernel does not write is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *sizes, **options: make(*sizes, **options).fill_(NAN)

    with (
        mock.patch.object(torch, "empty", poison(empty)),
        mock.patch.object(torch, "empty_like", poison(empty_like)),
    ):
        yield


def run(form: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """`o`, `lse` and the gradients of a random combination of them."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
    with poisoned():
        o, lse = form(**leaves, **options)
        d_o, d_lse = normal(7, *o.shape).to(o.dtype), normal(8, *lse.shape).to(lse.dtype)
        found = torch.autograd.grad(
            (o, lse), list(leaves.values()), (d_o, d_lse), allow_unused=True, materialize_grads=True
        )
    gradients = {f"d {name}": g for name, g in zip(leaves, found, strict=True)}
    return {"o": o.detach(), "lse": lse.detach()} | gradients


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: None if x is None else x.to(dtype) for name, x in inputs.items()}


def make(
    B: int = 1,
    T: int = 65,
    heads: tuple[int, int] = (2, 1),
    D: int = 16,
    V: int = 16,
    P: int = 0,
    bounds: list[int] | None = None,
    valid: list[int] | None = None,
    window: int = 16,
) -> tuple[Inputs, dict[str, Any]]:
    """Random inputs of T tokens (P before each sequence, of which `valid` are real and the rest NaN), and options."""
    H, G = heads
    N = B if bounds is None else len(bounds) - 1
    past_k, past_v = normal(3, N, P, G, D), normal(4, N, P, G, V)
    for row, count in enumerate(valid or []):
        past_k[row, : P - count], past_v[row, : P - count] = NAN, NAN
    inputs: Inputs = {"q": 2 * normal(0, B, T, H, D), "k": normal(1, B, T, G, D), "v": normal(2, B, T, G, V)}
    inputs |= {"past_k": past_k, "past_v": past_v} if P else {}
    options: dict[str, Any] = {"window": window, "scale": D**-0.5}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device=DEVICE)
    if valid is not None:
        options["past_valid"] = torch.tensor(valid, device=DEVICE)
    return inputs, options


def check_fp32(near: Near, **shape: Any) -> None:
    inputs, options = make(**shape)
    exact = run(reference.window_attention, inputs, **options)
    near(run(window_attention, cast(inputs, torch.float32), **options), exact, 1e-5)


SHAPES: list[dict[str, Any]] = [
    dict(T=0, P=3),
    dict(T=0, bounds=[0, 0, 0], P=3, valid=[2, 0]),
    dict(T=1, window=1),
    dict(T=1, P=20, window=7, heads=(4, 1)),
    dict(T=17, B=2, window=7, heads=(3, 1), D=80, V=16),
    dict(T=63, window=130, heads=(1, 1), D=64, V=64),
    dict(T=64, window=64, heads=(3, 3), D=16, V=80),
    dict(T=65, B=2, window=1, heads=(1, 1)),
    dict(T=65, window=64, heads=(8, 1), P=64, valid=[0]),
    dict(T=100, window=130, P=70, valid=[41]),
    dict(T=100, window=16, B=2, P=10, valid=[10, 3]),
    dict(T=100, window=64, heads=(4, 2), bounds=[0, 10, 10, 75, 100]),
    dict(T=100, window=30, heads=(2, 2), bounds=[0, 10, 10, 75, 100], P=40, valid=[0, 40, 3, 22]),
    dict(T=33, window=20, heads=(2, 1), D=128, V=96),
    dict(T=20, window=7, heads=(1, 1), D=256, V=256),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(f"{k}={v}" for k, v in shape.items()))
def test_equals_the_reference(near: Near, shape: dict[str, Any]) -> None:
    check_fp32(near, **shape)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    T, packed = draw(st.sampled_from([0, 1, 17, 63, 64, 65, 100]) | st.integers(0, 70)), draw(st.booleans())
    P = draw(st.sampled_from([0, 0, 1, 5, 40]))
    cuts = sorted(draw(st.lists(st.integers(0, T), max_size=3))) if packed else []
    B = 1 if packed else draw(st.sampled_from([1, 1, 2]))
    N = len(cuts) + 1 if packed else B
    return dict(
        B=B, T=T, P=P,
        heads=draw(st.sampled_from([(1, 1), (3, 1), (2, 2), (4, 1)])),
        D=draw(st.sampled_from([16, 16, 64, 80])), V=draw(st.sampled_from([16, 16, 64, 80])),
        bounds=[0, *cuts, T] if packed else None,
        valid=draw(st.lists(st.integers(0, P), min_size=N, max_size=N)) if P and draw(st.booleans()) else None,
        window=draw(st.sampled_from([1, 7, 16, 64, 130])),
    )  # fmt: skip


@settings(max_examples=8)
@given(shape=shapes())
def test_any_shape_equals_the_reference(near: Near, shape: dict[str, Any]) -> None:
    check_fp32(near, **shape)


@pytest.mark.parametrize(
    ("qk", "v"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("D", [16, 80])
def test_half_precision_costs_at_most_twice_the_error_of_torch(
    qk: torch.dtype, v: torch.dtype, D: int
) -> None:
    shape: dict[str, Any] = dict(T=100, window=64, heads=(3, 1), D=D, V=D, P=20, valid=[17])
    inputs, options = make(**shape)
    low = {n: None if x is None else x.to(v if n in ("v", "past_v") else qk) for n, x in inputs.items()}
    exact = run(reference.window_attention, cast(low, torch.float64), **options)
    ours, theirs = run(window_attention, low, **options), run(window_attention_torch, low, **options)
    for name, want in exact.items():
        assert ours[name].dtype == theirs[name].dtype, name
        assert ours[name].isfinite().all(), name
        limit = 2 * (theirs[name].double() - want).norm() + 1e-6 * want.norm()
        assert (ours[name].double() - want).norm() <= limit, name


def test_strides_do_not_matter_and_gradients_may_be_expanded(near: Near) -> None:
    """Heads first in memory, gradients of a sum, and only v needs one: what a model's code passes."""
    inputs, options = make(B=2, T=20, heads=(2, 2), P=4)
    q, k, v, past_k, past_v = (
        x.float().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs.values() if x is not None
    )
    results = []
    for form in (window_attention, reference.window_attention):
        leaf = v.clone().requires_grad_()
        o, _ = form(q, k, leaf, past_k=past_k, past_v=past_v, **options)
        o.sum().backward()
        assert leaf.grad is not None
        results.append({"o": o.detach(), "d v": leaf.grad})
    near(results[0], results[1], 1e-5)


def test_huge_scores_do_not_overflow() -> None:
    q = torch.full((1, 70, 1, 16), 300.0, device=DEVICE, requires_grad=True)
    o, lse = window_attention(q, q, q, window=8, scale=1.0)
    (gradient,) = torch.autograd.grad(o.sum(), q)
    assert torch.allclose(o, q)
    assert lse.isfinite().all()
    assert gradient.isfinite().all()


def test_a_window_longer_than_any_integer_of_the_gpu_is_every_token(near: Near) -> None:
    inputs, options = make(T=20)
    exact = run(reference.window_attention, inputs, **options | {"window": 20})
    near(run(window_attention, cast(inputs, torch.float32), **options | {"window": 2**40}), exact, 1e-5)


def test_memory_for_the_backward_pass_is_linear() -> None:
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.untyped_storage().nbytes())
        return x

    q, k, v = (normal(i, 1, 256, heads, 16).float().requires_grad_() for i, heads in enumerate((2, 1, 1)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        window_attention(q, k, v, window=256, scale=0.25)
    assert sum(saved) < 3 * sum(x.untyped_storage().nbytes() for x in (q, k, v))


def test_what_the_backend_cannot_do_is_refused_with_the_mend() -> None:
    x = torch.zeros(1, 2, 1, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(BackendError, match=r'not torch.float64; backend="torch" takes it'):
        window_attention(x, x, x, window=2, scale=1.0)
    single, wide = x.float(), torch.zeros(1, 2, 1, 257, device=DEVICE)
    with pytest.raises(BackendError, match=r'not torch.float64; backend="torch" takes it'):
        window_attention(single, single, single, window=2, scale=1.0, past_k=x, past_v=x)
    for q, v in ((wide, single), (single, wide)):
        with pytest.raises(BackendError, match=r'up to 256 wide.*use backend="torch"'):
            window_attention(q, q, v, window=2, scale=1.0)


@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6), block=st.sampled_from([16, 32, 64]))
def test_tiles_cover_every_document_and_spare_ones_lie_behind_it(lengths: list[int], block: int) -> None:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    covered = [[0] * length for length in lengths]
    for document, first in tile_table(bounds, sum(lengths), block).tolist():
        for token in range(first, min(first + block, lengths[document])):
            covered[document][token] += 1
    assert all(count == 1 for document in covered for count in document)
