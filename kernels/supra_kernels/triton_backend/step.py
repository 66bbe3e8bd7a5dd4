"""One token on the `triton` backend: the public step, and the whole of a layer's recurrent part in one launch.

`decode_step` is what `linear_attention_step` leaves to others at decoding: feature maps and RoPE before it, the
normalisation after it. Both update the state in place, read and write it once, and allocate nothing but their output,
so that a CUDA graph can hold them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from supra_kernels.errors import BackendError
from supra_kernels.step import linear_attention_step_torch
from supra_kernels.triton_backend.guard import on
from supra_kernels.triton_backend.step_kernels import decode_kernel, step_kernel

# fp32 numbers of the state that one program of `decode_kernel` holds: half the registers of an NVIDIA multiprocessor.
MAX_STATE_LANES = 32768


@dataclass(frozen=True)
class StepPlan:
    """What a `decode_step` does besides the recurrence itself; the defaults do nothing, so each part can be left out.

    - `feature_map` φ: "identity" (q and k are features already), "elu" (ELU(x) + 1), "relu" (ReLU(W x + b), with W
      one matrix per head, or already applied if no weight is given; b may be missing) or "hedgehog" (softmax of
      [W x; −W x], twice as wide as x);
    - `rope`: rotate q and k "before" φ, "after" it (features wider than a head D at a time), or "none";
    - `norm`: "group_norm" over the V channels of a head, "denominator" (the state's last column, kept up here, sums
      φ(k)), or "none".
    """

    feature_map: Literal["identity", "elu", "relu", "hedgehog"] = "identity"
    rope: Literal["none", "before", "after"] = "none"
    norm: Literal["none", "group_norm", "denominator"] = "none"
    scale: float = 1.0
    eps: float = 1e-5


@dataclass(frozen=True)
class StepWeights:
    """Parameters of a `decode_step`, any float dtype: maps `[H or G, D, D]`, their biases `[H or G, D]`, and the group
    norm's `[H, V]`. All may be missing but the maps of "hedgehog"."""

    q_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """In the order of the kernel's arguments."""
        return [
            None if x is None else x.contiguous()
            for x in (
                self.q_weight, self.q_bias, self.k_weight, self.k_bias, self.norm_weight, self.norm_bias
            )
        ]  # fmt: skip


NO_WEIGHTS = StepWeights()


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The public operator in one launch; arguments are already validated. The state changes in place.

    Where a gradient is needed the `torch` step runs instead and leaves the given state alone: decoding never
    differentiates, so there is no backward kernel. Raises BackendError for fp64.
    """
    inputs = (q, k, v, state, log_decay)
    _refuse_float64(q, k, v, state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return linear_attention_step_torch(q, k, v, state, log_decay, scale=scale)
    (B, H, K), (G, V), S = q.shape, v.shape[-2:], state.shape[1]
    o = torch.empty(B, H, V, dtype=v.dtype, device=q.device)
    if o.numel() == 0:
        return o, state
    own = state.contiguous()
    blocks, options = _step_config(K, V)
    with on(q.device):
        step_kernel[(B * S, blocks)](
            q.contiguous(), k.contiguous(), v.contiguous(), own, _contiguous(log_decay), o, _stride(log_decay),
            scale, S, H // S, SHARE=S // G, **options,
        )  # fmt: skip
    return o, state if own is state else state.copy_(own)


def why_not_fused(head_dim: int, feature_dim: int, value_dim: int) -> str | None:
    """Why `decode_step` cannot take heads with D, K and V this wide, or None if it can."""
    lanes = _lanes(head_dim, feature_dim) * triton.next_power_of_2(value_dim)
    if lanes > MAX_STATE_LANES:
        return f"a state [{feature_dim}, {value_dim}] takes {lanes} lanes, and one program holds {MAX_STATE_LANES}"
    return None


def decode_step(
    plan: StepPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    weights: StepWeights = NO_WEIGHTS,
    out: Tensor | None = None,
) -> Tensor:
    """One token of one layer for a whole batch in one launch: `q` `[B, H, D]`, `k` `[B, G, D]`, `v` `[B, G, V]` →
    `[B, H, V]`.

    `state` `[B, S, K, V]` fp32, contiguous, is updated in place (`[B, S, K, V + 1]` with the "denominator", whose
    column need not be in `v`); `log_decay` None, `[S]` or `[B, S]` with S = G or H, as in `linear_attention_step`;
    `cos` and `sin` `[B, D]` or `[1, D]`. K is D, or 2D for "hedgehog" and for features given 2D wide (D is then known
    from `cos`). `out` may have any float dtype and defaults to a new tensor of `v`'s. Only shapes decide what is
    launched and allocated. Not differentiable: the caller sees to it that no gradient is needed. Raises ValueError if
    the arguments do not fit each other, BackendError for fp64 and for states too large for one program.
    """
    _refuse_float64(q, k, v, state, out)
    (B, H, width), (G, V), (S, K) = q.shape, v.shape[-2:], state.shape[1:3]
    D = width if cos is None else cos.shape[-1]
    _check_decode_step(plan, q, k, v, state, log_decay, cos, sin, weights, out)
    reason = why_not_fused(D, K, V)
    if reason is not None:
        raise BackendError(f"decode_step: {reason}; use linear_attention_step")
    if out is None:
        out = torch.empty(B, H, V, dtype=v.dtype, device=q.device)
    if out.numel() == 0:
        return out
    with on(q.device):
        decode_kernel[(B * S,)](
            q.contiguous(), k.contiguous(), v.contiguous(), state, _contiguous(log_decay), _contiguous(cos),
            _contiguous(sin), *weights.tensors(), out, _stride(log_decay), _stride(cos), plan.scale, plan.eps, S,
            H // S, SHARE=S // G, **_decode_config(plan, D, K, V),
        )  # fmt: skip
    return out


def _check_decode_step(
    plan: StepPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    weights: StepWeights,
    out: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `decode_step` fit each other."""
    (B, H, width), (G, V), S = q.shape, v.shape[-2:], state.shape[1]
    D = width if cos is None else cos.shape[-1]
    K = 2 * width if plan.feature_map == "hedgehog" else width
    for name, value, known in (
        ("feature_map", plan.feature_map, ("identity", "elu", "relu", "hedgehog")),
        ("rope", plan.rope, ("none", "before", "after")),
        ("norm", plan.norm, ("none", "group_norm", "denominator")),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is unknown; known: {', '.join(known)}")
    if (plan.rope == "none") != (cos is None) or (cos is None) != (sin is None):
        raise ValueError(
            f"rope is {plan.rope!r}: give cos and sin together, where there is something to rotate"
        )
    if width != D and (plan.feature_map != "identity" or width != 2 * D):
        raise ValueError(f"q has width {width}; expected {D} as cos, or features {2 * D} wide")
    if D % 2 or G == 0 or H % G or S not in (G, H):
        raise ValueError(f"{H} query heads, {G} key heads, {S} states and head dim {D} do not fit each other")
    columns = V + (plan.norm == "denominator")
    norm = plan.norm == "group_norm"
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("k", k, (B, G, width)),
        ("v", v, (B, G, V)),
        ("state", state, (B, S, K, columns)),
        ("out", out, (B, H, V)),
        ("q_weight", weights.q_weight, (H, D, D)),
        ("k_weight", weights.k_weight, (G, D, D)),
        ("q_bias", weights.q_bias, (H, D)),
        ("k_bias", weights.k_bias, (G, D)),
        ("norm_weight", weights.norm_weight, (H, V)),
        ("norm_bias", weights.norm_bias, (H, V)),
    ]
    for name, x, shape in expected:
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {list(shape)}")
    for name, x, shape in (("log_decay", log_decay, (S,)), ("cos", cos, (D,)), ("sin", sin, (D,))):
        rows = ((), (B,)) if name == "log_decay" else ((B,), (1,))
        if x is not None and tuple(x.shape) not in [(*row, *shape) for row in rows]:
            wanted = " or ".join(str([*row, *shape]) for row in rows)
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {wanted}")
    if log_decay is None and S != G:
        raise ValueError(f"state has {S} heads; without a decay expected {G}, one per key head")
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(
            f"state has dtype {state.dtype} and strides {state.stride()}; expected contiguous fp32"
        )
    if out is not None and not out.is_contiguous():
        raise ValueError("out is not contiguous")
    maps = (weights.q_weight, weights.k_weight)
    if plan.feature_map == "hedgehog" and any(x is None for x in maps):
        raise ValueError("feature map 'hedgehog' needs q_weight and k_weight")
    if plan.feature_map in ("identity", "elu") and any(
        x is not None for x in (*maps, weights.q_bias, weights.k_bias)
    ):
        raise ValueError(f"feature map {plan.feature_map!r} has no parameters")
    if not norm and (weights.norm_weight is not None or weights.norm_bias is not None):
        raise ValueError(f"norm {plan.norm!r} has no parameters")


def _refuse_float64(*tensors: Tensor | None) -> None:
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        raise BackendError(
            "backend 'triton' computes in fp32 and does not take fp64; use 'torch' or 'reference'"
        )


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _stride(x: Tensor | None) -> int:
    """From one row of the batch to the next in a contiguous `x`: 0 where the rows share one."""
    return 0 if x is None or x.dim() == 1 or x.shape[0] == 1 else x.shape[1]


def _lanes(D: int, K: int) -> int:
    """Lanes that K features take: each half of D of them is padded to a power of two."""
    return K // (D // 2) * triton.next_power_of_2(D // 2)


def _warps(lanes: int) -> int:
    """Such that a thread of 32 to a warp holds at most 64 numbers of a tile with so many."""
    return min(16, max(4, lanes // 2048))


def _decode_config(plan: StepPlan, D: int, K: int, V: int) -> dict[str, Any]:
    """Constants and warps of `decode_kernel`."""
    half, width = triton.next_power_of_2(D // 2), triton.next_power_of_2(V)
    return dict(
        D=D, V=V, WIDE=K == 2 * D, MAP=plan.feature_map, ROPE=plan.rope, NORM=plan.norm, HALF=half, WIDTH=width,
        num_warps=_warps(_lanes(D, K) * width),
    )  # fmt: skip


def _step_config(K: int, V: int) -> tuple[int, dict[str, Any]]:
    """Blocks of columns, and the constants and warps of `step_kernel`: tiles of all K rows and 16 or 32 columns.

    Narrow tiles give one long sequence enough programs to fill a GPU, and 16 columns are still two whole sectors.
    """
    rows = triton.next_power_of_2(K)
    columns = min(32 if rows <= 256 else 16, triton.next_power_of_2(V))
    # A normaliser behind a round number of values would be one lane of a block of its own.
    tail = V > 1 and V % columns == 1
    blocks = V // columns if tail else triton.cdiv(V, columns)
    tile = dict(K=K, V=V, BLOCK_K=rows, BLOCK_V=columns, TAIL=tail, num_warps=_warps(rows * columns))
    return blocks, tile
