"""S4D's convolution is its recurrence, in both directions and for any length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from supra_eval.lra.models.config import EncoderConfig
from supra_eval.lra.models.encoder import Encoder
from supra_eval.lra.models.s4d import S4D, S4DKernel, convolve, fft_size, parameter_groups


def layer(direction: str, start: str = "lin", state_size: int = 8) -> S4D:
    config = EncoderConfig(
        mixer="s4d", direction=direction, positions="none", num_layers=1, hidden_size=6, intermediate_size=0,
        channels=1, state_size=state_size, state_start=start,
    )  # fmt: skip
    mixer = Encoder(config, seed=3).layers[0].mixer
    assert isinstance(mixer, S4D)
    return mixer.double()


def recurrence(kernel: S4DKernel, u: Tensor, way: int) -> Tensor:
    """Step by step from the parameters: x_t = Ā x_{t−1} + B̄ u_t, y_t = 2 Re Σ C x_t; u [B, hidden, T]."""
    A = torch.complex(-kernel.log_minus_real.exp(), kernel.imaginary)
    step = kernel.log_step.exp().unsqueeze(-1)
    A_bar, B_bar = torch.exp(step * A), (torch.exp(step * A) - 1) / A
    C = torch.view_as_complex(kernel.readout.detach())[way]
    x = torch.zeros(len(u), *A.shape, dtype=A.dtype)
    outputs = []
    for t in range(u.shape[-1]):
        x = A_bar * x + B_bar * u[..., t].unsqueeze(-1)
        outputs.append(2 * (C * x).sum(-1).real)
    return torch.stack(outputs, dim=-1)


@pytest.mark.parametrize("start", ["lin", "inv"])
@given(T=st.integers(1, 40), B=st.integers(1, 2))
def test_the_causal_convolution_is_the_recurrence(start: str, T: int, B: int) -> None:
    kernel = layer("causal", start).kernel
    u = torch.randn(B, 6, T, dtype=torch.float64)
    torch.testing.assert_close(convolve(u, kernel(T)), recurrence(kernel, u, 0), rtol=1e-9, atol=1e-9)


@given(T=st.integers(1, 40))
def test_the_second_kernel_reads_strictly_what_lies_behind(T: int) -> None:
    kernel = layer("bidirectional").kernel
    u = torch.randn(1, 6, T, dtype=torch.float64)
    behind = recurrence(kernel, u.flip(-1), 1).flip(-1)
    behind = torch.cat((behind[..., 1:], torch.zeros_like(behind[..., :1])), dim=-1)
    expected = recurrence(kernel, u, 0) + behind
    torch.testing.assert_close(convolve(u, kernel(T)), expected, rtol=1e-9, atol=1e-9)


def test_starting_values_are_the_papers() -> None:
    """S4D-Lin: −½ + iπn; S4D-Inv with 8 states: (8/π)(8/(2n+1) − 1)."""
    lin, inv = layer("causal", "lin").kernel, layer("causal", "inv").kernel
    torch.testing.assert_close(lin.imaginary[0], math.pi * torch.arange(4.0).double(), rtol=1e-6, atol=0)
    expected = torch.tensor([8 / math.pi * (8 / odd - 1) for odd in (1, 3, 5, 7)]).double()
    torch.testing.assert_close(inv.imaginary[5], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lin.log_minus_real.exp(), torch.full_like(lin.log_minus_real, 0.5))
    steps = layer("causal").kernel.log_step.exp()
    assert ((steps >= 1e-3) & (steps <= 1e-1)).all()
    readout = S4DKernel(64, 64, 2, "lin").initial_values(torch.Generator().manual_seed(0))["readout"]
    assert readout.square().sum(-1).mean() == pytest.approx(1, abs=0.05)  # 4,096 draws: deviation 0.016


def test_a_kernel_in_single_precision_is_that_in_double() -> None:
    """1,500 positions: powers are made as products, which must not lose digits along the way."""
    kernel = layer("bidirectional", state_size=64).kernel
    exact = kernel(1500)
    torch.testing.assert_close(
        kernel.float()(1500).double(), exact, rtol=0, atol=2e-4 * exact.abs().max().item()
    )


def test_parameters_that_decide_time_stay_in_single_precision() -> None:
    mixer = layer("causal").float().to(torch.bfloat16)
    assert {p.dtype for p in mixer.kernel.parameters()} == {torch.float32}
    assert mixer(torch.randn(2, 10, 6, dtype=torch.bfloat16), None, None).dtype == torch.bfloat16


@given(st.integers(1, 10**5))
def test_an_fft_is_long_enough_and_little_longer(least: int) -> None:
    assert least <= fft_size(least) <= least * 1.125 + 1


@pytest.mark.parametrize(("lr", "kernel_lr"), [(1e-2, 1e-3), (5e-4, 5e-4)])
def test_kernels_learn_slowly_and_do_not_decay(lr: float, kernel_lr: float) -> None:
    mixer = layer("bidirectional")
    rest, kernels = parameter_groups(mixer, lr, 0.1)
    assert {id(p) for p in kernels["params"]} == {id(p) for p in mixer.kernel.parameters()}
    assert len(rest["params"]) + len(kernels["params"]) == len(list(mixer.parameters()))
    assert (rest["lr"], rest["weight_decay"]) == (lr, 0.1)
    assert (kernels["lr"], kernels["weight_decay"]) == (kernel_lr, 0)
    assert len(parameter_groups(torch.nn.Linear(2, 2), lr, 0.1)) == 1
