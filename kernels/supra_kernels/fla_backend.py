"""The `fla` backend: our operators on the kernels of flash-linear-attention, to compare with and never chosen unasked.

`MAPPED` says what each of our settings becomes there and what that costs; `REFUSED` says what raises BackendError.
Both were read from the source of flash-linear-attention 0.6 (`fla/ops/simple_gla`, `fla/ops/common`); `markdown()`
renders them. fla computes the same sum: `S_t = exp(g_t) S_{t−1} + k_tᵀ v_t`, `o_t = scale · q_t S_t`, states `[N, H,
K, V]` in fp32.
"""

import functools
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from supra_kernels.errors import BackendError

CHUNK_SIZES = (16, 32, 64)  # tokens; fla's own default is 64
OLDEST_READ = "0.6"


@dataclass(frozen=True)
class Mapping:
    """One of our settings, the fla call that it becomes, and what the detour costs (empty: nothing)."""

    setting: str
    becomes: str
    cost: str = ""


@dataclass(frozen=True)
class Refusal:
    """A setting that this backend refuses: why, and what to do instead."""

    setting: str
    reason: str
    mend: str


MAPPED = (
    Mapping("`linear_attention`", "`chunk_simple_gla(q, k, v, scale=scale)`"),
    Mapping(
        "`linear_attention_step`",
        "`fused_recurrent_simple_gla` with T = 1",
        "returns a new state, never in place",
    ),
    Mapping("no decay", "`g=None, g_gamma=None`"),
    Mapping(
        "fixed decay `[H]`",
        "`g_gamma=log_decay` (`chunk_retention` is this call with retention's own decays)",
    ),
    Mapping(
        "fixed decay `[H]`, final state asked for, and a sequence may end inside a chunk",
        "`g=log_decay` spread over the tokens",
        "fp32 `[B, T, H]` written, summed and read; `g_gamma` gives NaN in that final state once a log decay is below "
        "−128 ln 2 / (chunk − 1), as masked rows multiply 0 by an overflowing exp2",
    ),
    Mapping(
        "learned decay `[H]` that wants its gradient",
        "`g=log_decay` spread over the tokens",
        "as above; `g_gamma` gets no gradient in fla",
    ),
    Mapping(
        "decay `[G]` or `[B, T, G]`", "as `[H]` or `[B, T, H]`, repeated over the query heads of a group"
    ),
    Mapping("decay `[B, T, H]` (a model's gated decay)", "`g=log_decay` in fp32"),
    Mapping(
        "H = n·G query heads",
        "keys and values repeated to H heads",
        "k and v are written and read n times; their gradients are summed over n. fla reads k with q's head count and "
        "checks nothing",
    ),
    Mapping(
        "states per key head (no decay, or one shared in the group)",
        "initial state repeated to H heads, every n-th final state returned",
        "n times the states and their traffic",
    ),
    Mapping(
        "bf16 and fp16",
        "as they are",
        "the forward pass keeps the states between chunks in that dtype, the backward pass in fp32",
    ),
    Mapping(
        "q, k, v of different dtypes",
        "all in the dtype they promote to",
        "copies; its kernels multiply tiles of one dtype only",
    ),
    Mapping("`scale`", "`scale` (always passed: fla's own default is 1/√K)"),
    Mapping(
        "`initial_state`, final state `[N, S, K, V]`",
        "`initial_state`, `output_final_state`, `state_v_first=False`",
    ),
    Mapping(
        "`cu_seqlens`", "`cu_seqlens` (fla remembers its chunks by tensor identity: never change it in place)"
    ),
    Mapping("`chunk_size` None, 16, 32 or 64", "`chunk_size` (None: 64)"),
    Mapping("T = 0", "nothing is launched; the final state is the initial one"),
    Mapping("any K and V in fp32; even K and V in bf16 and fp16", "tiles of at most 128, masked at the edge"),
)

REFUSED = {
    "window": Refusal(
        "window_attention",
        "flash-linear-attention has no attention over a window",
        "use backend='triton' or 'torch'",
    ),
    "fp64": Refusal("fp64 inputs", "its kernels accumulate in fp32", "use backend='torch'"),
    "odd": Refusal(
        "an odd K or V in bf16 or fp16",
        "its backward asserts even ones: Triton miscompiles the masked tail of the others",
        "pad K and V to an even number, or give q, k and v in fp32",
    ),
    "tf32": Refusal(
        "fp32 inputs while torch.get_float32_matmul_precision() is 'highest'",
        "its products then run in TF32, which keeps 10 bits of the mantissa",
        "accept it by torch.set_float32_matmul_precision('high'), set TRITON_F32_DEFAULT=ieee, or give bf16 inputs",
    ),
    "hopper": Refusal(
        "the gradient of a decay per token on Hopper GPUs under Triton 3.4 to 3.7.0",
        "fla refuses it in the backward pass because the gradients come out wrong (its issue 640)",
        "install triton>=3.7.1, or use backend='triton' or 'torch'",
    ),
    "chunk": Refusal(
        f"a chunk_size other than {', '.join(map(str, CHUNK_SIZES))}",
        "its kernels need a power of two, at least 16, and were made for 64",
        "leave chunk_size None",
    ),
}


def markdown() -> str:
    """`MAPPED` and `REFUSED` as two Markdown tables."""
    mapped = [f"| {m.setting} | {m.becomes} | {m.cost or '–'} |" for m in MAPPED]
    refused = [f"| {r.setting} | {r.reason} | {r.mend} |" for r in REFUSED.values()]
    return "\n".join(
        [
            "| ours | fla | cost |",
            "|---|---|---|",
            *mapped,
            "",
            "| refused | because | instead |",
            "|---|---|---|",
            *refused,
        ]
    )


def _refuse(name: str, seen: str = "") -> NoReturn:
    r = REFUSED[name]
    raise BackendError(
        f"backend 'fla' refuses {r.setting}{f' ({seen})' if seen else ''}: {r.reason}; {r.mend}"
    )


def unavailable(device: torch.device | None) -> str | None:
    """Why fla cannot run (on that device, or at all if None), or None if it can."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "flash-linear-attention is not installed (pip install 'supra-lm[fla]')"
    if tuple(map(int, version.split(".")[:2])) < tuple(map(int, OLDEST_READ.split("."))):
        return f"fla-core {version} is older than {OLDEST_READ} (pip install -U 'supra-lm[fla]')"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "its kernels do not run in Triton's interpreter: they time themselves on a GPU"
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return "it needs a GPU that torch sees"
    return None


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    return chunk_simple_gla, fused_recurrent_simple_gla


@functools.cache
def _gated_backward_is_wrong() -> bool:
    """fla's own condition for raising in the backward pass (`chunk_bwd_dqkwg`)."""
    from fla import utils
    from fla.backends import TileLangBackend

    affected = utils.IS_NVIDIA_HOPPER and utils.TRITON_ABOVE_3_4_0 and not utils.TRITON_ABOVE_3_7_1
    return bool(affected and not TileLangBackend.can_use())


def _products_in_tf32(q: Tensor) -> bool:
    """Whether Triton multiplies fp32 tiles in TF32: the default on NVIDIA GPUs."""
    if not q.is_cuda or torch.version.hip is not None:
        return False
    from triton import knobs

    return (knobs.language.fp32_default or "tf32") != "ieee"


def _spread(x: Tensor, heads: int, dim: int) -> Tensor:
    n = heads // x.shape[dim]
    return x if n == 1 else x.repeat_interleave(n, dim=dim)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The dtype in which fla computes; refuses fp64 and odd head dims in 16 bits."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if dtype == torch.float64:
        _refuse("fp64")
    if dtype.itemsize == 2 and (q.shape[-1] % 2 or v.shape[-1] % 2):
        _refuse("odd", f"K = {q.shape[-1]}, V = {v.shape[-1]}, {dtype}")
    return dtype


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
) -> tuple[Tensor, Tensor | None]:
    """The public operator on fla; arguments are already validated. Raises BackendError for what `REFUSED` lists."""
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    S = G if log_decay is None or log_decay.shape[-1] == G else H
    dtype = _one_dtype(q, k, v)
    if chunk_size is not None and chunk_size not in CHUNK_SIZES:
        _refuse("chunk", f"{chunk_size}")
    # bf16 and fp16 fit in TF32, so that only inputs which were all fp32 lose bits of their own.
    pure = q.dtype == k.dtype == v.dtype == torch.float32
    if pure and torch.get_float32_matmul_precision() == "highest" and _products_in_tf32(q):
        _refuse("tf32")
    decay, per_token = log_decay, log_decay is not None and log_decay.dim() == 3
    if decay is not None and not per_token:
        wanted = torch.is_grad_enabled() and decay.requires_grad
        partial = cu_seqlens is not None or T % (chunk_size or 64) != 0
        if wanted or (output_final_state and partial):
            decay, per_token = decay.expand(B, T, -1), True
    inputs = (q, k, v, log_decay, initial_state)
    traced = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if per_token and traced and _gated_backward_is_wrong():
        _refuse("hopper")
    if decay is not None:
        decay = _spread(decay.float(), H, -1)

    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    v_ = _spread(v.to(dtype), H, 2)
    if B * T == 0:
        state = torch.zeros(N, S, K, V, device=q.device) if initial_state is None else initial_state.float()
        return v_.to(v.dtype), state if output_final_state else None
    chunked, _ = _kernels()
    o, final = chunked(
        q.to(dtype), _spread(k.to(dtype), H, 2), v_,
        g=decay if per_token else None, g_gamma=None if per_token else decay, scale=scale,
        initial_state=None if initial_state is None else _spread(initial_state.float(), H, 1),
        output_final_state=output_final_state, chunk_size=chunk_size,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device=q.device, dtype=torch.int64),
    )  # fmt: skip
    return o.to(v.dtype), final[:, :: H // S] if output_final_state else None


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One token on fla; arguments are already validated. Returns a new state; raises as `linear_attention`."""
    H, S = q.shape[1], state.shape[1]
    dtype = _one_dtype(q, k, v)
    decay = None if log_decay is None else _spread(log_decay.float(), H, -1)
    fixed = decay is not None and decay.dim() == 1
    if decay is not None and fixed and torch.is_grad_enabled() and decay.requires_grad:
        decay, fixed = decay.expand(q.shape[0], -1), False
    _, recurrent = _kernels()
    o, final = recurrent(
        q.to(dtype).unsqueeze(1), _spread(k.to(dtype), H, 1).unsqueeze(1), _spread(v.to(dtype), H, 1).unsqueeze(1),
        g=None if fixed or decay is None else decay.unsqueeze(1), g_gamma=decay if fixed else None, scale=scale,
        initial_state=_spread(state, H, 1), output_final_state=True,
    )  # fmt: skip
    return o.squeeze(1).to(v.dtype), final[:, :: H // S]


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
) -> tuple[Tensor, Tensor]:
    """Always raises BackendError: fla has no such operator."""
    _refuse("window")
