"""Triton kernels of chunked linear attention against the fp64 reference; without a GPU in the interpreter."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from supra_kernels import BackendError, reference
from supra_kernels.triton_backend import linear_attention
from supra_kernels.triton_backend.chunks import cut_documents
from supra_kernels.triton_backend.tiling import tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("none", "query head", "key head", "token and query head", "token and key head")

Problem = Any


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel forgets to write is NaN."""

    def fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*arguments: Any, **options: Any) -> Tensor:
            made = make(*arguments, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return filled

    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", fill(Tensor.new_empty))


def run(p: Problem, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    """The kernels' results, on the CPU."""

    def on_device(*arguments: Any, **others: Any) -> Any:
        moved = [None if x is None else x.to(DEVICE) for x in arguments]
        others = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in others.items()}
        o, final = linear_attention(*moved, **others)
        return o.cpu(), None if final is None else final.cpu()

    found: dict[str, Tensor] = p.to(dtype).run(on_device, **options)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 21]], ids=["rows", "documents"])
def test_outputs_and_every_gradient(
    kind: str, bounds: list[int] | None, problem: Callable[..., Problem], near: Callable[..., None]
) -> None:
    p = problem(B=1 if bounds else 2, T=21 if bounds else 18, H=2, G=1, K=16, V=17, kind=kind, bounds=bounds)
    near(run(p, chunk_size=16), p.run(reference.linear_attention_recurrent), 1e-5)


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17])
def test_lengths_around_a_chunk(T: int, problem: Callable[..., Problem], near: Callable[..., None]) -> None:
    p = problem(T=T, H=2, G=1, K=16, V=16, kind="token and key head")
    near(run(p, chunk_size=16), p.run(reference.linear_attention_recurrent), 1e-5)


@pytest.mark.parametrize(
    ("H", "G", "K", "V", "T"),
    [
        (1, 1, 64, 65, 65),
        (3, 1, 80, 80, 20),
        (4, 1, 96, 97, 20),
        (8, 1, 16, 48, 20),
        (1, 1, 128, 129, 66),
        (1, 1, 153, 17, 20),
        (1, 1, 256, 16, 20),
        (1, 1, 16, 256, 20),
    ],
)
def test_head_dims_and_groups(
    H: int, G: int, K: int, V: int, T: int, problem: Callable[..., Problem], near: Callable[..., None]
) -> None:
    p = problem(T=T, H=H, G=G, K=K, V=V, kind="query head")
    near(run(p), p.run(reference.linear_attention_chunked), 1e-5)


@settings(max_examples=3)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from([1, 5, 16, 20]),
    st.sampled_from(KINDS),
)
def test_any_documents_and_any_chunk_size(
    problem: Callable[..., Problem], near: Callable[..., None], lengths: list[int], chunk_size: int, kind: str
) -> None:
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    p = problem(T=bounds[-1], H=2, G=1, K=8, V=6, kind=kind, bounds=bounds, initial=sum(lengths) % 2 == 0)
    near(run(p, chunk_size=chunk_size), p.run(reference.linear_attention_recurrent), 1e-5)


def same_dtype(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The parallel form as PyTorch computes it in the inputs' own dtype, for a decay per query head."""
    assert log_decay is not None
    n = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)
    T = q.shape[1]
    ages = torch.arange(T)[:, None] - torch.arange(T)
    between = (log_decay[:, None, None] * ages.masked_fill(ages < 0, 0)).exp().tril().to(q.dtype)
    read = (log_decay[:, None] * torch.arange(1, T + 1)).exp().to(q.dtype)
    kept = (log_decay[:, None] * torch.arange(T - 1, -1, -1)).exp().to(q.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q * scale, k, v))
    o = (q @ k.transpose(-1, -2) * between) @ v + (q * read[..., None]) @ initial_state.to(q.dtype)
    final = (k * kept[..., None]).transpose(-1, -2) @ v + initial_state * (log_decay * T).exp()[:, None, None]
    return o.transpose(1, 2), final


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_in_half_precision_is_that_of_torch(
    dtype: torch.dtype, problem: Callable[..., Problem]
) -> None:
    largest: dict[str, list[float]] = {}
    for seed in range(3):  # the largest error of a gradient with four entries is a matter of luck
        p = problem(T=24, H=4, G=1, K=16, V=17, kind="query head", seed=seed).to(dtype)
        exact = p.to(torch.float64).run(reference.linear_attention_parallel)
        ours, torchs = run(p, dtype), p.run(same_dtype)
        for name, want in exact.items():
            errors = (float((x[name].double() - want).abs().max()) for x in (ours, torchs))
            largest[name] = [max(pair) for pair in zip(largest.get(name, [0.0, 0.0]), errors, strict=True)]
    for name, (error, allowed) in largest.items():
        assert error <= 2 * allowed, f"{name}: {error:.2e} against {allowed:.2e}"


def test_strong_decays_neither_overflow_nor_lose_the_weak_ones(
    problem: Callable[..., Problem], near: Callable[..., None]
) -> None:
    p = problem(T=40, H=2, G=1, K=16, V=16, kind="token and query head")
    assert p.log_decay is not None
    p.log_decay[:, ::7] = -1e4
    near(run(p, chunk_size=32), p.run(reference.linear_attention_recurrent), 1e-5)


def test_states_kept_or_computed_again_give_the_same_bits(
    problem: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(T=40, H=2, G=1, K=16, V=17, kind="key head")
    found = []
    for kept in (True, False):
        monkeypatch.setattr("supra_kernels.triton_backend.chunked.save_states", lambda *_, kept=kept: kept)
        found.append(run(p, chunk_size=16))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_strided_inputs_and_frozen_ones(problem: Callable[..., Problem], near: Callable[..., None]) -> None:
    p = problem(B=2, T=18, H=2, G=1, K=16, V=16, kind="none", initial=False).to(torch.float32)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE) for x in (p.q, p.k, p.v))
    v.requires_grad_()
    o, final = linear_attention(q, k, v, scale=p.scale)
    assert final is None
    (dv,) = torch.autograd.grad((o.cpu() * p.do).sum(), v)
    p.d_final.zero_()
    expected = p.to(torch.float64).run(reference.linear_attention_recurrent)
    near({"o": o.detach().cpu(), "d v": dv.cpu()}, {name: expected[name] for name in ("o", "d v")}, 1e-5)


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    x = torch.zeros(1, 3, 1, 16)
    with pytest.raises(
        BackendError, match=r"q is fp64, but backend 'triton' computes in fp32: use backend=\"torch\""
    ):
        linear_attention(x.double(), x, x)
    with pytest.raises(BackendError, match="chunk_size is 200: backend 'triton' takes at most 128"):
        linear_attention(x, x, x, chunk_size=200)
    wide = torch.zeros(1, 3, 1, 600)
    with pytest.raises(BackendError, match="head dims 600 and 600: backend 'triton' takes at most 512"):
        linear_attention(wide, wide, wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 16, 17, 48, 64, 65, 80, 96, 97, 128, 129, 200, 256, 257, 512])
def test_tiles_cover_every_column_once_and_a_normaliser_costs_at_most_sixteen(
    size: int, dtype: torch.dtype
) -> None:
    t = tile(size, size, 64, dtype)
    assert size <= t.NK * t.BK
    covered = t.NV * t.BV + t.TAIL
    assert size <= covered
    assert t.TAIL == 0 or t.NV * t.BV < size <= covered
    if size in (65, 129, 257):
        assert covered == size - 1 + 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_amd_is_never_asked_for_tf32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's targets only gfx942 knows it."""
    monkeypatch.setattr("supra_kernels.triton_backend.tiling.AMD", True)
    torch.set_float32_matmul_precision("high")
    try:
        assert tile(64, 64, 64, dtype).PRECISION == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("amd", "size"), [(True, 32), (False, 64)])
def test_wide_fp32_heads_take_short_chunks_where_shared_memory_is_small(
    amd: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ChosenError(Exception):
        pass

    def choose(rows: int, row_tokens: int, chunk_size: int, device: torch.device) -> None:
        raise ChosenError(chunk_size)

    monkeypatch.setattr("supra_kernels.triton_backend.tiling.AMD", amd)
    monkeypatch.setattr("supra_kernels.triton_backend.chunked.cut_rows", choose)
    x = torch.zeros(1, 256, 1, 256)
    with pytest.raises(ChosenError, match=str(size)):
        linear_attention(x, x, x)


def test_bounds_are_read_once_and_again_after_a_change() -> None:
    cu_seqlens = torch.tensor([0, 3, 5])
    first = cut_documents(cu_seqlens, 16, torch.device("cpu"))
    assert cut_documents(cu_seqlens, 16, torch.device("cpu")) is first
    assert cut_documents(cu_seqlens, 2, torch.device("cpu")).tokens.tolist() == [2, 1, 2]
    cu_seqlens[1] = 4
    assert cut_documents(cu_seqlens, 16, torch.device("cpu")).tokens.tolist() == [4, 1]
    with torch.device("meta"):
        assert cut_documents(torch.tensor([0, 2], device="cpu"), 16, torch.device("cpu")).tokens.tolist() == [
            2
        ]


def test_no_grid_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses an empty grid, the interpreter does not."""
    import triton.runtime.interpreter as interpreter

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the GPU itself refuses")
    grids: list[tuple[int, ...]] = []
    plain = interpreter.InterpretedFunction.__getitem__
    monkeypatch.setattr(
        interpreter.InterpretedFunction,
        "__getitem__",
        lambda self, grid: (grids.append(grid), plain(self, grid))[1],
    )
    x = torch.zeros(2, 0, 2, 16, requires_grad=True)
    state = torch.ones(2, 2, 16, 16)
    o, final = linear_attention(x, x, x, initial_state=state, output_final_state=True)
    assert final is not None and torch.equal(final.cpu(), state)
    (o.sum() + (final * x.sum()).sum()).backward()
    assert grids and all(size > 0 for grid in grids for size in grid)
