"""An independent oracle: the naive operators of flash-linear-attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from supra_kernels import linear_attention

pytest.importorskip("fla", reason="the extra `fla` is not installed")

Make = Callable[..., Any]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_decay_per_token_and_head_equals_simple_gla(problem: Make, backend: str) -> None:
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla, naive_recurrent_simple_gla

    case = problem(B=2, T=100, H=3, G=3, K=16, V=16, kind="token and query head", dtype=torch.float32)
    o, final = linear_attention(
        case.q, case.k, case.v, case.log_decay, scale=0.25, initial_state=case.initial_state,
        output_final_state=True, backend=backend,
    )  # fmt: skip
    for oracle in (naive_recurrent_simple_gla, naive_chunk_simple_gla):
        want, want_state = oracle(
            case.q, case.k, case.v, case.log_decay, scale=0.25, initial_state=case.initial_state.clone(),
            output_final_state=True,
        )  # fmt: skip
        assert_close(o, want, rtol=1e-4, atol=1e-4)
        assert_close(final, want_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_fixed_decay_equals_retention(problem: Make, backend: str) -> None:
    from fla.ops.retention.naive import naive_retention

    case = problem(B=2, T=100, H=6, G=2, K=16, V=16, dtype=torch.float32)
    log_decay = torch.log1p(-torch.pow(2.0, -5.0 - torch.arange(6)))
    o, _ = linear_attention(case.q, case.k, case.v, log_decay, scale=16**-0.5, backend=backend)
    k, v = (x.repeat_interleave(3, dim=2).transpose(1, 2) for x in (case.k, case.v))
    want = naive_retention(case.q.transpose(1, 2), k, v).transpose(1, 2)
    assert_close(o, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_decay_and_its_gradients_equal_linear_attention(problem: Make, backend: str) -> None:
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    case = problem(B=2, T=50, H=3, G=3, K=16, V=16, initial=False, dtype=torch.float32)
    gradients = []
    for run in (
        lambda q, k, v: linear_attention(q, k, v, scale=0.25, backend=backend)[0],
        lambda q, k, v: naive_recurrent_linear_attn(q, k, v, scale=0.25)[0],
    ):
        inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        o = run(*inputs)
        gradients.append([o.detach(), *torch.autograd.grad((o * case.do).sum(), inputs)])
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
