"""The `triton` backend of `linear_attention`, alone or with feature maps and RoPE before it and GroupNorm behind it."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from supra_kernels.cost import DecayKind, Shape, choose_chunk_size, save_states
from supra_kernels.errors import BackendError
from supra_kernels.triton_backend import launch
from supra_kernels.triton_backend.chunks import cut_documents, cut_rows
from supra_kernels.triton_backend.feature_kernels import ELU, HEDGEHOG, NO_MAP, RELU
from supra_kernels.triton_backend.guard import on
from supra_kernels.triton_backend.launch import Call, Operands
from supra_kernels.triton_backend.tiles import FIXED, NO_DECAY, PER_TOKEN
from supra_kernels.triton_backend.tiling import (
    LARGEST_CHUNK,
    chunk_tile,
    largest_fitting_chunk,
    tile,
    too_wide,
)

LARGEST_NORM = 128  # columns of a row that is normalised in one piece: more spill, and overflow shared memory
MAPS = {"identity": NO_MAP, "relu": RELU, "elu": ELU, "hedgehog": HEDGEHOG}


@dataclass(frozen=True)
class Front:
    """What is done to q and k as they are loaded: φ from its pre-activation, then RoPE.

    `feature_map`: "identity", "relu" (ReLU(x + b), q_bias `[H, K]`, k_bias `[G, K]`), "elu" (ELU(x) + 1) or "hedgehog"
    (softmax of [x; −x]: K is twice x's width). `cos` and `sin` `[B or 1, T, D]`: features are rotated D at a time.
    """

    feature_map: Literal["identity", "relu", "elu", "hedgehog"] = "identity"
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None

    def __post_init__(self) -> None:
        if self.feature_map not in MAPS:
            raise ValueError(f"feature_map {self.feature_map!r} is unknown; known: {', '.join(MAPS)}")
        if (self.cos is None) != (self.sin is None):
            raise ValueError("cos and sin go together: give both, or neither")


@dataclass(frozen=True)
class Norm:
    """GroupNorm with a group per head over the V columns of the output; weight and bias `[H · V]` or None."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if (self.weight is None) != (self.bias is None):
            raise ValueError("a norm's weight and bias go together: give both, or neither")


class TritonLinearAttention(torch.autograd.Function):
    """`(y, final_state)` of one call from contiguous inputs; y is o where there is no norm."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None,
        q_bias: Tensor | None, k_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        cos: Tensor | None, sin: Tensor | None, c: Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = _operands(c, q, k, v, log_decay, q_bias, k_bias, cos, sin)
        states, final = launch.forward_states(c, x, initial)
        o, y = launch.output(c, x, states, (weight, bias))
        kept = (states if c.keep_states else None, o if c.norm else None)
        ctx.save_for_backward(q, k, v, log_decay, initial, q_bias, k_bias, weight, cos, sin, *kept)
        ctx.call = c
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, initial, q_bias, k_bias, weight, cos, sin, states, o = ctx.saved_tensors
        c: Call = ctx.call
        wants_decay = ctx.needs_input_grad[3]
        with on(q.device), torch.autocast(q.device.type, enabled=False):
            x = _operands(c, q, k, v, log_decay, q_bias, k_bias, cos, sin)
            if states is None:
                states, _ = launch.forward_states(c, x, initial)
            do, d_weight, d_bias = d_y.contiguous(), None, None
            if o is not None:
                do, d_weight, d_bias = launch.norm_gradients(c, o, do, weight)
            found = launch.backward_states(c, x, do, states, d_final.contiguous(), wants_decay)
            d_states, d_initial, d_whole = found
            dq, dk, dv, d_decay = launch.gradients(c, x, do, states, d_states, d_whole, wants_decay)
            dq, d_q_bias = launch.front_gradients(c, x.q_side, dq)
            dk, d_k_bias = launch.front_gradients(c, x.k_side, dk)
        as_given = [
            None if gradient is None else gradient.view(given.shape).to(given.dtype)
            for gradient, given in (
                (d_decay, log_decay), (d_q_bias, q_bias), (d_k_bias, k_bias), (d_weight, weight), (d_bias, weight)
            )
        ]  # fmt: skip
        d_given = None if initial is None else d_initial
        return dq, dk, dv, as_given[0], d_given, *as_given[1:], None, None, None


def _operands(
    c: Call, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
    q_bias: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
) -> Operands:  # fmt: skip
    decay = launch.accumulated(log_decay, c.decay == FIXED.value, c.chunks, q)
    hedgehog = c.feature_map == HEDGEHOG.value
    q_normaliser, k_normaliser = (launch.normaliser(q), launch.normaliser(k)) if hedgehog else (None, None)
    return Operands(q, k, v, decay, q_bias, k_bias, q_normaliser, k_normaliser, cos, sin)


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
    front: Front | None = None,
    norm: Norm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The public operator on the `triton` backend; arguments are already validated.

    `front` maps and rotates q and k where the kernels load them, `norm` normalises the output before it is stored; both
    are differentiated too. Raises BackendError for what the kernels do not compute: fp64, head dims beyond 512, chunks
    beyond 128 tokens, a norm over more than 128 columns.
    """
    front = front or Front()
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    if front.feature_map == "hedgehog":
        K = 2 * K
    _refuse(q, k, v, K, initial_state, chunk_size, norm)
    if front.cos is not None and K % front.cos.shape[-1]:
        raise ValueError(f"cos is {front.cos.shape[-1]} wide; expected a divisor of the {K} features")
    shape = _shape(q, k, v, log_decay, cu_seqlens, K)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    exact = torch.get_float32_matmul_precision() == "highest"
    fitting = largest_fitting_chunk(K, V, q.dtype)
    size = chunk_size or min(fitting, choose_chunk_size(shape, training=training, exact=exact))
    chunks = (
        cut_rows(B, T, size, q.device) if cu_seqlens is None else cut_documents(cu_seqlens, size, q.device)
    )
    dtype = torch.promote_types(q.dtype, k.dtype)
    kinds = {0: NO_DECAY, 1: FIXED, 3: PER_TOKEN}
    # Rows of 65 or 129 numbers would leave every load of values, outputs and states unaligned.
    width = triton.cdiv(V, 16) * 16
    c = Call(
        B, T, H, G, shape.state_heads, K, width, float(scale), kinds[0 if log_decay is None else log_decay.dim()].value,
        chunks, tile(K, width, chunk_tile(size), dtype, whole_rows=norm is not None), save_states(shape, size),
        feature_map=MAPS[front.feature_map].value, angles=0 if front.cos is None else front.cos.shape[-1],
        norm=norm is not None, norm_size=V, eps=0.0 if norm is None else norm.eps,
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False), on(q.device):
        if initial_state is not None:
            initial_state = _padded(initial_state.to(torch.float32), width)
        biases = [None if x is None else x.contiguous() for x in (front.q_bias, front.k_bias)]
        if front.feature_map == "relu":
            biases = [
                x.new_zeros(x.shape[2], K) if bias is None else bias
                for x, bias in zip((q, k), biases, strict=True)
            ]
        affine = (None, None) if norm is None or norm.weight is None else (norm.weight, norm.bias)
        angles = [None if x is None else x.expand(B, T, -1).contiguous() for x in (front.cos, front.sin)]
        o, final = TritonLinearAttention.apply(
            q.to(dtype).contiguous(), k.to(dtype).contiguous(), _padded(v, width), log_decay,
            initial_state, *biases, *affine, *angles, c,
        )  # fmt: skip
    return o[..., :V], final[..., :V].contiguous() if output_final_state else None


def _shape(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None, K: int
) -> Shape:
    """The call as the cost model sees it; packed documents count as rows of their mean length."""
    (B, T, H, _), (G, V) = q.shape, v.shape[-2:]
    if cu_seqlens is not None:
        B = cu_seqlens.shape[0] - 1
        T = -(-T // B)
    kind: DecayKind = "none"
    if log_decay is not None:
        by_group = log_decay.shape[-1] == G
        if log_decay.dim() == 1:
            kind = "key head" if by_group else "query head"
        else:
            kind = "token and key head" if by_group else "token and query head"
    return Shape(B, T, H, G, K, V, kind, q.element_size(), v.element_size())


def _padded(x: Tensor, width: int) -> Tensor:
    """[..., V] → contiguous [..., width], zeros behind; x itself where that is what it is."""
    return (F.pad(x, (0, width - x.shape[-1])) if width > x.shape[-1] else x).contiguous()


def _refuse(
    q: Tensor, k: Tensor, v: Tensor, K: int, initial_state: Tensor | None, chunk_size: int | None, norm: Norm | None
) -> None:  # fmt: skip
    mend = 'use backend="torch"'
    for name, x in {"q": q, "k": k, "v": v, "initial_state": initial_state}.items():
        if x is not None and x.dtype == torch.float64:
            raise BackendError(f"{name} is fp64, but backend 'triton' computes in fp32: {mend}")
    reason = too_wide(K, v.shape[-1])
    if reason is not None:
        raise BackendError(reason)
    if chunk_size is not None and chunk_size > LARGEST_CHUNK:
        raise BackendError(
            f"chunk_size is {chunk_size}: backend 'triton' takes at most {LARGEST_CHUNK}; leave it None, or {mend}"
        )
    if norm is not None and v.shape[-1] > LARGEST_NORM:
        raise BackendError(
            f"head dim {v.shape[-1]}: backend 'triton' normalises at most {LARGEST_NORM} columns; {mend}"
        )
