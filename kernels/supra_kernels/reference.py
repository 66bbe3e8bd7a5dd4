"""Linear attention and windowed softmax attention in their plainest form: this file is the specification.

Per head, with state `S` `[K, V]` and decay `γ_t = exp(log_decay_t)`,

    S_t = γ_t S_{t−1} + k_tᵀ v_t ,      o_t = scale · q_t S_t .

Unrolled, `o_t = scale · (Σ_{j≤t} exp(b_t − b_j) (q_t·k_j) v_j + exp(b_t) q_t S_0)` with `b_t = Σ_{s≤t}
log_decay_s`. The three forms below compute that same sum (SUPRA, arXiv 2405.06640, eq. 4–6; chunks: GLA,
arXiv 2312.06635, sec. 4).

Shapes: `q` `[B, T, H, K]`, `k` `[B, T, G, K]`, `v` `[B, T, G, V]` with `H = n·G` (query head h reads
key/value head h // n); `log_decay` None, `[H]`, `[G]`, `[B, T, H]` or `[B, T, G]`; states `[N, S, K, V]`
where `S = G` if the decay is None or has G heads, else `S = H`, and `N = B`, or the number of sequences
when `cu_seqlens` packs several into a batch of one. Everything is computed in fp32, or in fp64 if an input
is fp64; `o` is returned in `v.dtype`.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Output = tuple[Tensor, Tensor | None]


def _spread(x: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat each of the heads along `dim` so that there are `heads` of them."""
    return x.repeat_interleave(heads // x.shape[dim], dim=dim)


def _per_document(
    form: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> Output:
    """Run `form` on each document apart, with every head spread out and the decay given per token and head.

    `form(q, k, v, log_decay, state)` sees `q, k, v` `[N, T, H, ·]`, `log_decay` `[N, T, H]` and the state `[N, H,
    K, V]`.
    """
    (B, T, H, K), (G, V) = q.shape, v.shape[-2:]
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32), v.dtype)
    state_heads = G if log_decay is None or log_decay.shape[-1] == G else H
    decay = q.new_zeros(H, dtype=dtype) if log_decay is None else _spread(log_decay.to(dtype), H, -1)
    decay = decay.expand(B, T, H)
    q_, k_, v_ = q.to(dtype) * scale, _spread(k.to(dtype), H, 2), _spread(v.to(dtype), H, 2)

    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    documents = list(itertools.pairwise(bounds))
    if initial_state is None:
        initial_state = q.new_zeros(B * len(documents), state_heads, K, V, dtype=dtype)
    states = _spread(initial_state.to(dtype), H, 1).split(B)
    outputs, finals = [], []
    for (start, end), state in zip(documents, states, strict=True):
        own = slice(start, end)
        o, final = form(q_[:, own], k_[:, own], v_[:, own], decay[:, own], state)
        outputs.append(o)
        finals.append(final)
    o = torch.cat(outputs, dim=1).to(v.dtype)
    # Heads which share a decay share their state: any of them is the group's.
    return o, torch.cat(finals)[:, :: H // state_heads] if output_final_state else None


def _scores(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """Causal, decayed `q_i·k_j exp(b_i − b_j)`, `[N, H, T, T]`; differences first, so `exp` never sees a
    positive number."""
    b = b.transpose(1, 2)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    difference = (b.unsqueeze(-1) - b.unsqueeze(-2)).masked_fill(future, float("-inf"))
    return torch.einsum("nihk,njhk->nhij", q, k) * difference.exp()


def _parallel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    b = log_decay.cumsum(1)
    b_end = log_decay.sum(1)
    from_tokens = torch.einsum("nhij,njhv->nihv", _scores(q, k, b), v)
    from_state = torch.einsum("nihk,nhkv->nihv", q * b.exp().unsqueeze(-1), state)
    k_end = k * (b_end.unsqueeze(1) - b).exp().unsqueeze(-1)
    final = state * b_end.exp()[..., None, None] + torch.einsum("njhk,njhv->nhkv", k_end, v)
    return from_tokens + from_state, final


def linear_attention_parallel(
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
) -> Output:
    """The quadratic form: all pairs of tokens at once (`chunk_size` has no meaning here). Shapes as in the
    module."""
    return _per_document(_parallel, q, k, v, log_decay, scale, initial_state, output_final_state, cu_seqlens)


def linear_attention_chunked(
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
) -> Output:
    """The parallel form within chunks of `chunk_size` (64) tokens, the recurrent one between. Shapes as in
    the module."""
    size = chunk_size or 64

    def chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [v[:, :0]]
        for start in range(0, q.shape[1], size):
            own = slice(start, start + size)
            o, state = _parallel(q[:, own], k[:, own], v[:, own], log_decay[:, own], state)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    return _per_document(chunked, q, k, v, log_decay, scale, initial_state, output_final_state, cu_seqlens)


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state * log_decay.exp()[..., None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
    return torch.einsum("nhk,nhkv->nhv", q, state), state


def linear_attention_recurrent(
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
) -> Output:
    """The definition itself, token by token (`chunk_size` has no meaning here). Shapes as in the module."""

    def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [v[:, :0]]
        for t in range(q.shape[1]):
            o, state = _step(q[:, t], k[:, t], v[:, t], log_decay[:, t], state)
            outputs.append(o.unsqueeze(1))
        return torch.cat(outputs, dim=1), state

    return _per_document(recurrent, q, k, v, log_decay, scale, initial_state, output_final_state, cu_seqlens)


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One token: `q` `[B, H, K]`, `k` `[B, G, K]`, `v` `[B, G, V]`, `state` `[B, S, K, V]`, `log_decay` as
    above without T.

    Returns `o` `[B, H, V]` and a new state; the given one is left alone.
    """
    if log_decay is not None and log_decay.dim() == 2:
        log_decay = log_decay.unsqueeze(1)
    o, final = linear_attention_recurrent(
        q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), log_decay,
        scale=scale, initial_state=state, output_final_state=True,
    )  # fmt: skip
    assert final is not None
    return o.squeeze(1), final


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
    """Softmax over the last `window` tokens, self included, as one dense masked attention.

    `q` `[B, T, H, D]`, `k` `[B, T, G, D]`, `v` `[B, T, G, V]` → `o` `[B, T, H, V]` and the log of its
    denominator `lse` `[B, T, H]`. `past_k` `[N, P, G, D]` and `past_v` are the keys just before each of the
    N sequences, the newest last, of which the last `past_valid` `[N]` are real (None: all).
    """
    (B, T, H, _), device = q.shape, q.device
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32), v.dtype)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    P = 0 if past_k is None else past_k.shape[1]
    outputs, lses = [], []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = slice(n, n + 1) if cu_seqlens is not None else slice(None)
        q_, k_, v_ = (x[:, start:end].to(dtype) for x in (q, k, v))
        key_position = torch.arange(-P, end - start, device=device)
        real = (key_position >= -P).expand(B, -1)
        if past_k is not None and past_v is not None:
            k_, v_ = torch.cat([past_k[own].to(dtype), k_], 1), torch.cat([past_v[own].to(dtype), v_], 1)
            if past_valid is not None:
                real = key_position >= -past_valid[own].unsqueeze(1)
                # A slot without a token may hold anything, NaN included.
                k_, v_ = (x.masked_fill(~real[:, :, None, None], 0) for x in (k_, v_))
        age = torch.arange(end - start, device=device).unsqueeze(1) - key_position
        seen = (age >= 0) & (age < window) & real.unsqueeze(1)
        scores = torch.einsum("bihd,bjhd->bhij", q_ * scale, _spread(k_, H, 2))
        scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
        outputs.append(torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), _spread(v_, H, 2)))
        lses.append(scores.logsumexp(-1).transpose(1, 2))
    return torch.cat(outputs, 1).to(v.dtype), torch.cat(lses, 1)
