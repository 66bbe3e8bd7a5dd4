"""Random problems and one way to run any form of the operator, shared by the tests of the kernels."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def round_as_hardware() -> None:
    """Mend bf16 in Triton's interpreter, which cuts numbers off where a GPU rounds to nearest, and multiplies bit
    patterns in `tl.dot`: what the tests see is then what the kernels compute."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(data: Any) -> Any:
        return (data.astype(np.uint32) << 16).view(np.float32)

    def narrow(data: Any) -> Any:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), nearest)

    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return TensorHandle(narrow(source.data), tl.bfloat16)
        return plain_cast(self, source, dtype)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (
            TensorHandle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return plain_dot(self, a, b, *others)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    round_as_hardware()

NAMES = ("q", "k", "v", "log_decay", "initial_state")
KINDS = ("none", "query head", "key head", "token and query head", "token and key head")


@dataclass(frozen=True)
class Problem:
    """The arguments of one call of `linear_attention`, and random weights of `o` and the final state in the
    loss."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    do: Tensor
    d_final: Tensor
    scale: float = 0.7

    def to(self, dtype: torch.dtype, **others: Any) -> "Problem":
        """The same problem with floating tensors in another dtype; states and decays stay at least fp32."""
        high = torch.promote_types(dtype, torch.float32)
        return replace(
            self,
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            do=self.do.to(dtype),
            log_decay=None if self.log_decay is None else self.log_decay.to(high),
            initial_state=None if self.initial_state is None else self.initial_state.to(high),
            d_final=self.d_final.to(high),
            **others,
        )

    def run(self, form: Callable[..., tuple[Tensor, Tensor | None]], **options: Any) -> dict[str, Tensor]:
        """`o`, the final state and the gradient of every differentiable argument under `form`."""
        inputs = {
            name: getattr(self, name).detach().clone().requires_grad_()
            for name in NAMES
            if getattr(self, name) is not None
        }
        o, final = form(
            inputs["q"], inputs["k"], inputs["v"], inputs.get("log_decay"), scale=self.scale,
            initial_state=inputs.get("initial_state"), output_final_state=True, cu_seqlens=self.cu_seqlens,
            **options,
        )  # fmt: skip
        assert final is not None
        loss = (o * self.do).sum() + (final * self.d_final).sum()
        gradients = torch.autograd.grad(
            loss, list(inputs.values()), allow_unused=True, materialize_grads=True
        )
        found = {"o": o.detach(), "final_state": final.detach()}
        return found | {f"d {name}": g for name, g in zip(inputs, gradients, strict=True)}


def make_problem(
    B: int = 1,
    T: int = 37,
    H: int = 4,
    G: int = 2,
    K: int = 8,
    V: int = 6,
    kind: str = "none",
    bounds: list[int] | None = None,
    initial: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Fresh random inputs of realistic size: unit normal values, keys of unit length, decays from 0.999 to
    0.05."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {"none": None, "query head": (H,), "key head": (G,), "token and query head": (B, T, H)}
    shape = shapes.get(kind, (B, T, G))
    S = G if shape is None or shape[-1] == G else H
    N = B if bounds is None else len(bounds) - 1
    decay = None if shape is None else -torch.exp(normal(*shape) * 1.5 - 2).clamp(1e-3, 3.0)
    return Problem(
        q=normal(B, T, H, K),
        k=normal(B, T, G, K) * K**-0.5,
        v=normal(B, T, G, V),
        log_decay=decay,
        initial_state=normal(N, S, K, V) if initial else None,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
        do=normal(B, T, H, V),
        d_final=normal(N, S, K, V),
    ).to(dtype)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor finite, of the same shape, and within `tolerance` relative to the largest value
    wanted."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        assert got.shape == want.shape, name
        assert got.isfinite().all(), name
        if want.numel():
            error = (got.to(torch.float64) - want.to(torch.float64)).abs().max()
            size = want.abs().max().to(torch.float64).clamp(min=1e-3)
            assert error <= tolerance * size, f"{name}: relative error {float(error / size):.2e}"


@pytest.fixture(scope="session")
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(scope="session")
def near() -> Callable[..., None]:
    return assert_near


@pytest.fixture(scope="session")
def decay_kinds() -> tuple[str, ...]:
    return KINDS
