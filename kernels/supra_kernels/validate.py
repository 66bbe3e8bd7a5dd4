"""Checks of the operators' arguments: every ValueError names the argument and the shapes."""

import torch
from torch import Tensor

from supra_kernels.documents import bounds_of


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _expect(x: Tensor, name: str, *allowed: tuple[int, ...], because: str) -> None:
    if tuple(x.shape) not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
        raise ValueError(f"{name} has shape {_shape(x)}; expected {wanted} ({because})")


def _same_place(**tensors: Tensor | None) -> None:
    q = next(x for x in tensors.values() if x is not None)
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; q is on {q.device}")
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}; expected a floating point dtype")


def _heads(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> None:
    """q, k, v must agree on everything but the number of heads; `tokens` is how many leading dims they
    share."""
    dims = tokens + 2
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {_shape(x)}; expected {dims} dimensions")
    lead, G = tuple(q.shape[:tokens]), k.shape[-2]
    _expect(k, "k", (*lead, G, q.shape[-1]), because=f"q has shape {_shape(q)}")
    _expect(v, "v", (*lead, G, v.shape[-1]), because=f"k has shape {_shape(k)}")
    if G == 0 or q.shape[-2] % G:
        raise ValueError(
            f"q has {q.shape[-2]} heads and k {G}: the query heads must be a multiple of the key heads"
        )


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int) -> None:
    """Raise ValueError unless `cu_seqlens` is int `[N + 1]`, rises from 0 to T, and the batch is one
    row."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens has shape {_shape(cu_seqlens)} and dtype {cu_seqlens.dtype}; "
            "expected int64 [N + 1] with N ≥ 1"
        )
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row, but the batch size is {B}; expected 1")
    bounds = bounds_of(cu_seqlens)
    if bounds[0] != 0 or bounds[-1] != T or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must rise from 0 to the {T} tokens of q; it is {bounds}")


def _decay_shapes(log_decay: Tensor, lead: tuple[int, ...], H: int, G: int) -> None:
    allowed = ((H,), (G,), (*lead, H), (*lead, G))
    _expect(log_decay, "log_decay", *allowed, because=f"{H} query heads, {G} key/value heads")


def check_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> None:
    """Raise ValueError unless the arguments of `linear_attention` fit each other."""
    _same_place(q=q, k=k, v=v, log_decay=log_decay, initial_state=initial_state)
    _heads(q, k, v, tokens=2)
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    if log_decay is not None:
        _decay_shapes(log_decay, (B, T), H, G)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if initial_state is not None:
        N = B if cu_seqlens is None else cu_seqlens.numel() - 1
        S = G if log_decay is None or log_decay.shape[-1] == G else H
        because = "sequences, state heads, key dim, value dim"
        _expect(initial_state, "initial_state", (N, S, K, V), because=because)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; expected a positive number of tokens, or None")


def check_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None) -> None:
    """Raise ValueError unless the arguments of `linear_attention_step` fit each other."""
    _same_place(q=q, k=k, v=v, state=state, log_decay=log_decay)
    _heads(q, k, v, tokens=1)
    (B, H, K), (G, V) = q.shape, v.shape[-2:]
    if log_decay is not None:
        _decay_shapes(log_decay, (B,), H, G)
    S = G if log_decay is None or log_decay.shape[-1] == G else H
    _expect(state, "state", (B, S, K, V), because="batch, state heads, key dim, value dim")
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32), v.dtype)
    if state.dtype != dtype:
        raise ValueError(f"state has dtype {state.dtype}; expected {dtype}: a state in low precision drifts")


def check_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    cu_seqlens: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    past_valid: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `window_attention` fit each other."""
    _same_place(q=q, k=k, v=v, past_k=past_k, past_v=past_v)
    _heads(q, k, v, tokens=2)
    B, T = q.shape[:2]
    if window < 1:
        raise ValueError(f"window is {window}; expected at least 1 token (a token always sees itself)")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    if (past_k is None) != (past_v is None):
        raise ValueError("past_k and past_v must be given together")
    if past_k is None or past_v is None:
        if past_valid is not None:
            raise ValueError("past_valid is given without past_k and past_v")
        return
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    P = past_k.shape[1] if past_k.dim() == 4 else 0
    _expect(past_k, "past_k", (N, P, *k.shape[2:]), because=f"{N} sequences, k has shape {_shape(k)}")
    _expect(past_v, "past_v", (N, P, *v.shape[2:]), because=f"past_k has shape {_shape(past_k)}")
    if past_valid is not None:
        _expect(past_valid, "past_valid", (N,), because=f"past_k has shape {_shape(past_k)}")
