"""Parallel = chunked = recurrent = torch backend: output, final state and every gradient."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from supra_kernels import linear_attention
from supra_kernels.reference import (
    linear_attention_chunked,
    linear_attention_parallel,
    linear_attention_recurrent,
)

tuned = partial(linear_attention, backend="torch")
KINDS = ("none", "query head", "key head", "token and query head", "token and key head")
Make = Callable[..., Any]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    T = draw(st.integers(0, 70))
    packed = draw(st.booleans())
    cuts = sorted(draw(st.lists(st.integers(0, T), max_size=4))) if packed else []
    n, G = draw(st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2), (4, 1), (8, 1)]))
    return {
        "T": T, "H": n * G, "G": G, "B": 1 if packed else draw(st.sampled_from([1, 2])),
        "K": draw(st.integers(1, 9)), "V": draw(st.integers(1, 9)), "kind": draw(st.sampled_from(KINDS)),
        "bounds": [0, *cuts, T] if packed else None, "initial": draw(st.booleans()),
        "seed": draw(st.integers(0, 999)),
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), chunk_size=st.sampled_from([None, 1, 2, 7, 16, 64, 100]))
def test_all_forms_agree_in_fp64(
    problem: Make, near: Make, shape: dict[str, Any], chunk_size: int | None
) -> None:
    case = problem(**shape)
    spec = case.run(linear_attention_recurrent)
    for form in (linear_attention_parallel, linear_attention_chunked, tuned):
        near(case.run(form, chunk_size=chunk_size), spec, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [None, 16, 128])
def test_fp32_is_within_1e_5_of_fp64(problem: Make, near: Make, kind: str, chunk_size: int | None) -> None:
    case = problem(B=2, T=300, H=6, G=2, K=32, V=48, kind=kind)
    spec = case.run(linear_attention_parallel)
    near(case.to(torch.float32).run(tuned, chunk_size=chunk_size), spec, 1e-5)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize(("H", "G"), [(1, 1), (3, 1), (4, 1), (8, 1), (9, 3)])
def test_lengths_and_query_groups(problem: Make, near: Make, T: int, H: int, G: int) -> None:
    for kind in ("none", "query head", "token and key head"):
        case = problem(T=T, H=H, G=G, kind=kind)
        near(case.run(tuned), case.run(linear_attention_chunked), 1e-10)


@pytest.mark.parametrize("D", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["none", "query head"])
def test_head_dims(problem: Make, near: Make, D: int, kind: str) -> None:
    case = problem(T=65, H=4, G=2, K=D, V=D, kind=kind)
    near(case.run(tuned), case.run(linear_attention_parallel), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_finite_differences(problem: Make, kind: str) -> None:
    case = problem(T=7, H=4, G=2, K=3, V=2, kind=kind, bounds=[0, 3, 3, 7])
    inputs: Any = [
        None if x is None else x.requires_grad_() for x in (case.q, case.k, case.v, case.log_decay)
    ]

    def run(q: Any, k: Any, v: Any, log_decay: Any, state: Any) -> Any:
        return tuned(
            q, k, v, log_decay, scale=0.7, initial_state=state, output_final_state=True,
            cu_seqlens=case.cu_seqlens, chunk_size=2,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (*inputs, case.initial_state.requires_grad_()))


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_any_split_equals_the_whole(problem: Make, near: Make, kind: str) -> None:
    case = problem(B=2, T=150, H=4, G=2, kind=kind)
    whole, final = tuned(
        case.q, case.k, case.v, case.log_decay, initial_state=case.initial_state, output_final_state=True
    )
    for cuts in ([0, 150], [0, 1, 150], [0, 64, 65, 65, 149, 150], [0, 70, 90, 150]):
        state, outputs = case.initial_state, []
        for start, end in itertools.pairwise(cuts):
            decay = case.log_decay
            decay = decay[:, start:end] if decay is not None and decay.dim() == 3 else decay
            q, k, v = (x[:, start:end] for x in (case.q, case.k, case.v))
            o, state = tuned(q, k, v, decay, initial_state=state, output_final_state=True)
            outputs.append(o)
        near({"o": torch.cat(outputs, 1), "state": state}, {"o": whole, "state": final}, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_the_same_documents_apart(problem: Make, near: Make, kind: str) -> None:
    bounds = [0, 1, 1, 70, 134, 200]
    packed = problem(T=200, H=4, G=2, kind=kind, bounds=bounds)
    whole = packed.run(tuned)
    apart: dict[str, list[torch.Tensor]] = {}
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        decay = packed.log_decay
        one = type(packed)(
            *(x[:, start:end] for x in (packed.q, packed.k, packed.v)),
            log_decay=decay[:, start:end] if decay is not None and decay.dim() == 3 else decay,
            initial_state=packed.initial_state[i : i + 1], cu_seqlens=None,
            do=packed.do[:, start:end], d_final=packed.d_final[i : i + 1],
        )  # fmt: skip
        for name, x in one.run(tuned).items():
            apart.setdefault(name, []).append(x)
    joined = {
        name: torch.cat(xs, 0 if "state" in name else 1) if xs[0].dim() > 1 else torch.stack(xs).sum(0)
        for name, xs in apart.items()
    }
    near(whole, joined, 1e-10)


def test_a_document_does_not_see_another_one() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 100, 4, 8), torch.randn(1, 100, 2, 8), torch.randn(1, 100, 2, 8)
    bounds = torch.tensor([0, 40, 100])
    before, _ = tuned(q, k, v, cu_seqlens=bounds)
    k[:, :40], v[:, :40] = 1e6, -1e6
    after, _ = tuned(q, k, v, cu_seqlens=bounds)
    assert torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("log_decay", [-1e-6, -1.0, -50.0, -1e4])
@pytest.mark.parametrize("per_token", [False, True])
def test_decay_of_any_strength_is_finite_and_right(
    problem: Make, near: Make, log_decay: float, per_token: bool
) -> None:
    case = problem(T=200, kind="token and query head" if per_token else "query head")
    case.log_decay.fill_(log_decay)
    spec = case.run(linear_attention_recurrent)
    near(case.to(torch.float32).run(tuned, chunk_size=128), spec, 1e-4 if log_decay == -1e4 else 1e-5)


def test_dtypes_and_strides(problem: Make) -> None:
    """Half precision, transposed and expanded inputs, an `o` in v's dtype and an fp32 state."""
    case = problem(T=70, H=4, G=2, kind="query head", dtype=torch.bfloat16)
    found = case.run(tuned)
    assert found["o"].dtype == found["d q"].dtype == torch.bfloat16
    assert found["final_state"].dtype == found["d initial_state"].dtype == torch.float32
    by_head = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    o, _ = tuned(by_head, case.k, case.v, case.log_decay, scale=case.scale, initial_state=case.initial_state)
    assert torch.equal(o, found["o"])
    wide = case.v[:, :, :1].expand(-1, -1, 2, -1)
    assert torch.equal(tuned(case.q, case.k, wide)[0], tuned(case.q, case.k, wide.contiguous())[0])


@pytest.mark.parametrize("kind", ["none", "query head", "token and key head"])
def test_bf16_error_is_at_most_twice_that_of_the_reference(problem: Make, kind: str) -> None:
    """Both in bf16, both against fp64 on the same rounded inputs."""
    low = problem(T=500, H=4, G=2, K=64, V=64, kind=kind, dtype=torch.float32).to(torch.bfloat16)
    exact = low.to(torch.float64).run(linear_attention_chunked)
    ours, theirs = low.run(tuned), low.run(linear_attention_chunked)
    for name, want in exact.items():
        limit = 2 * (theirs[name].double() - want).norm() + 1e-6 * want.norm()
        assert (ours[name].double() - want).norm() <= limit, name


def test_autocast_does_not_lower_the_precision(problem: Make, near: Make) -> None:
    case = problem(T=70, kind="query head", dtype=torch.float32)
    plain = case.run(tuned)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near(case.run(tuned), plain, 0.0)


def test_memory_for_the_backward_pass_is_linear() -> None:
    """What is saved beside the inputs grows with T, and is less than the inputs themselves."""
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.untyped_storage().nbytes())
        return x

    for T in (1024, 4096):
        q, k, v = (
            torch.randn(1, T, 4, 16, requires_grad=True),
            torch.randn(1, T, 2, 16),
            torch.randn(1, T, 2, 16),
        )
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            tuned(q, k, v, torch.full((4,), -0.1))
        inputs = sum(x.untyped_storage().nbytes() for x in (q, k, v))
        assert inputs <= sum(saved) < 2 * inputs
