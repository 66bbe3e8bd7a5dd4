"""One token at a time: the step equals the recurrent form, in place or traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from supra_kernels import linear_attention, linear_attention_step

KINDS = ("none", "query head", "key head", "token and query head", "token and key head")
Make = Callable[..., Any]


def at(log_decay: torch.Tensor | None, t: int) -> torch.Tensor | None:
    return log_decay[:, t] if log_decay is not None and log_decay.dim() == 3 else log_decay


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("H", "G"), [(1, 1), (6, 2), (4, 4), (8, 1)])
def test_steps_equal_one_full_pass(problem: Make, near: Make, kind: str, H: int, G: int) -> None:
    case = problem(B=2, T=9, H=H, G=G, kind=kind)
    arguments = (case.q, case.k, case.v, case.log_decay)
    o, final = linear_attention(
        *arguments, scale=0.7, initial_state=case.initial_state, output_final_state=True, backend="reference"
    )
    state = case.initial_state.clone()
    outputs = []
    for t in range(9):
        decay = at(case.log_decay, t)
        o_t, new = linear_attention_step(case.q[:, t], case.k[:, t], case.v[:, t], state, decay, scale=0.7)
        assert new is state
        outputs.append(o_t)
    near({"o": torch.stack(outputs, 1), "state": state}, {"o": o, "state": final}, 1e-10)


def test_a_traced_step_leaves_the_state_alone_and_has_the_right_gradient(problem: Make) -> None:
    case = problem(B=2, T=1, H=4, G=2, K=3, V=2, kind="token and query head")
    inputs = [x[:, 0].clone().requires_grad_() for x in (case.q, case.k, case.v)]
    state, decay = case.initial_state.requires_grad_(), case.log_decay[:, 0].clone().requires_grad_()
    before = state.detach().clone()
    _, new = linear_attention_step(*inputs, state, decay)
    assert new is not state
    assert torch.equal(state, before)
    assert torch.autograd.gradcheck(linear_attention_step, (*inputs, state, decay))


def test_a_step_in_bf16_keeps_its_state_in_fp32(problem: Make) -> None:
    """1,024 steps with the slowest decay of the paper's set drift by no more than fp32 does."""
    case = problem(T=1024, H=1, G=1, K=4, V=4, initial=False)
    decay = torch.full((1,), -(2.0**-8))
    q, k, v = (x.bfloat16() for x in (case.q, case.k, case.v))
    state = torch.zeros(1, 1, 4, 4)
    for t in range(1024):
        o, state = linear_attention_step(q[:, t], k[:, t], v[:, t], state, decay)
    assert o.dtype == torch.bfloat16
    _, exact = linear_attention(q.double(), k.double(), v.double(), decay.double(), output_final_state=True)
    assert (state - exact).norm() < 1e-5 * exact.norm()


def test_a_state_in_low_precision_is_refused() -> None:
    x = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match=r"state has dtype torch.bfloat16; expected torch.float32"):
        linear_attention_step(x, x, x, torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16))
