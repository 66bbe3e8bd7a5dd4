"""The operators and their dispatch: the only file that knows backends.

A backend is one entry of `BACKENDS`. `auto` takes the first entry of `AUTO_ORDER` for the tensors' device type
that is available there and takes heads so wide; any other name is used as asked or refused with the reason.
Nothing ever falls back silently. Backends that need Triton are imported when first used.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from supra_kernels import reference
from supra_kernels.chunk_torch import linear_attention_torch
from supra_kernels.errors import BackendError
from supra_kernels.step import linear_attention_step_torch
from supra_kernels.validate import check_linear_attention, check_step, check_window
from supra_kernels.window import window_attention_torch


@dataclass(frozen=True)
class Backend:
    """Implementations of the operators, `unavailable(device)`: why it cannot run (on that device, or at all
    if None), and `too_wide(K, V)`: why it cannot compute heads with so many features and values."""

    linear_attention: Callable[..., tuple[Tensor, Tensor | None]]
    linear_attention_step: Callable[..., tuple[Tensor, Tensor]]
    window_attention: Callable[..., tuple[Tensor, Tensor]]
    unavailable: Callable[[torch.device | None], str | None]
    fused: str | None = None  # the module of what it fuses beyond these operators
    too_wide: Callable[[int, int], str | None] = lambda key_dim, value_dim: None


def _everywhere(device: torch.device | None) -> str | None:
    return None


def _triton(device: torch.device | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; it exists for Linux)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return "it needs a GPU that torch sees (TRITON_INTERPRET=1 runs it on a CPU, slowly, for tests)"
    return None


def _later(module: str, name: str) -> Callable[..., Any]:
    """The operator `name` of `module`, imported at its first call."""

    def operator(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return operator


BACKENDS: dict[str, Backend] = {
    "torch": Backend(
        linear_attention_torch, linear_attention_step_torch, window_attention_torch, _everywhere
    ),
    "reference": Backend(
        reference.linear_attention_recurrent,
        reference.linear_attention_step,
        reference.window_attention,
        _everywhere,
    ),
}
TRITON = "supra_kernels.triton_backend"
BACKENDS["triton"] = Backend(
    _later(TRITON, "linear_attention"),
    _later(TRITON, "linear_attention_step"),
    _later(TRITON, "window_attention"),
    _triton,
    fused=f"{TRITON}.fused",
    too_wide=_later(f"{TRITON}.tiling", "too_wide"),
)
FLA = "supra_kernels.fla_backend"
BACKENDS["fla"] = Backend(
    _later(FLA, "linear_attention"),
    _later(FLA, "linear_attention_step"),
    _later(FLA, "window_attention"),
    _later(FLA, "unavailable"),
)
# By device type. The reference and Triton's interpreter are for tests: a program must never end up on them unasked.
AUTO_ORDER: dict[str, tuple[str, ...]] = {"cuda": ("triton", "torch")}
AUTO_ELSEWHERE = ("torch",)


def available_backends() -> dict[str, str]:
    """Every backend's name → "available", or the reason why it cannot run on this machine."""
    return {name: backend.unavailable(None) or "available" for name, backend in BACKENDS.items()}


def resolve_backend(name: str, device: torch.device | str, head_dims: tuple[int, int] = (0, 0)) -> str:
    """The backend that `name` means on `device`: itself, or for `auto` the first of `AUTO_ORDER` that can
    run there, and compute heads of `head_dims` (K, V).

    Raises BackendError, with the reason, if there is no such backend or it cannot run.
    """
    device = torch.device(device)

    def why_not(each: str) -> str | None:
        return BACKENDS[each].unavailable(device) or BACKENDS[each].too_wide(*head_dims)

    if name == "auto":
        order = AUTO_ORDER.get(device.type, AUTO_ELSEWHERE)
        reasons = {each: why_not(each) for each in order}
        for each, reason in reasons.items():
            if reason is None:
                return each
        raise BackendError(
            f"no backend can run on {device}: " + "; ".join(f"{k}: {r}" for k, r in reasons.items())
        )
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    reason = why_not(name)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot run on {device}: {reason}")
    return name


def fused_operators(name: str, device: torch.device | str) -> ModuleType | None:
    """The module of what the backend that `name` means fuses beyond the public operators; None where it has nothing.

    Raises as `resolve_backend`.
    """
    module = BACKENDS[resolve_backend(name, device)].fused
    return None if module is None else importlib.import_module(module)


def _backend(name: str, q: Tensor, v: Tensor) -> Any:
    return BACKENDS[resolve_backend(name, q.device, (q.shape[-1], v.shape[-1]))]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal linear attention `S_t = exp(log_decay_t) S_{t−1} + k_tᵀ v_t`, `o_t = scale · q_t S_t` → `(o,
    final state)`.

    `q` `[B, T, H, K]`, `k` `[B, T, G, K]`, `v` `[B, T, G, V]` with H a multiple of G; `log_decay` ≤ 0,
    finite: None, `[H]`, `[G]`, `[B, T, H]` or `[B, T, G]`. `o` `[B, T, H, V]` has `v`'s dtype. States `[N,
    S, K, V]` are fp32 (fp64 if an input is), S = G if the decay is None or has G heads, else H, and N = B,
    or the number of sequences packed in a batch of one by `cu_seqlens` (int64 `[N + 1]`). `chunk_size` None
    lets the backend choose. Differentiable once in `q, k, v, log_decay, initial_state`, through `o` and the
    final state. Raises ValueError if shapes do not fit, BackendError as `resolve_backend`.
    """
    check_linear_attention(q, k, v, log_decay, initial_state, cu_seqlens, chunk_size)
    return _backend(backend, q, v).linear_attention(
        q, k, v, log_decay, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of `linear_attention` → `(o [B, H, V], state)`; the state is updated in place unless a
    gradient needs it.

    `q` `[B, H, K]`, `k` `[B, G, K]`, `v` `[B, G, V]`, `state` `[B, S, K, V]`, `log_decay` None, `[H]`,
    `[G]`, `[B, H]` or `[B, G]`. Use the returned state: the reference backend leaves the given one alone.
    Raises as `linear_attention`.
    """
    check_step(q, k, v, state, log_decay)
    return _backend(backend, q, v).linear_attention_step(q, k, v, state, log_decay, scale=scale)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    past_valid: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Exact causal softmax attention over the last `window` tokens, self included → `(o, lse)`.

    `q` `[B, T, H, D]`, `k` `[B, T, G, D]`, `v` `[B, T, G, V]` → `o` `[B, T, H, V]` in `v`'s dtype and `lse`
    `[B, T, H]`, the log of the softmax denominator, fp32 (fp64 if an input is). `past_k`, `past_v` `[N, P,
    G, ·]` are the keys just before the segment, the newest last, of which the last `past_valid` int `[N]`
    are real (None: all). N and `cu_seqlens` as in `linear_attention`. Memory is linear in T; differentiable
    once, through both outputs. Raises as `linear_attention`.
    """
    check_window(q, k, v, window, cu_seqlens, past_k, past_v, past_valid)
    return _backend(backend, q, v).window_attention(
        q,
        k,
        v,
        window=window,
        scale=scale,
        cu_seqlens=cu_seqlens,
        past_k=past_k,
        past_v=past_v,
        past_valid=past_valid,
    )
