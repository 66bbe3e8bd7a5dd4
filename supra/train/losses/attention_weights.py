"""Transfer of attention weights: where each query looks, before what it reads there.

Queries are taken a few rows at a time against all keys before them, forward and backward, so that no T×T matrix exists.

B batch, C query rows of a chunk, S keys up to the chunk's end, H query heads, G key/value heads, D head dim, K feature
dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from supra.models.attention import SupraLinearAttention, SupraSoftmaxAttention
from supra.models.packing import positions_from_boundaries
from supra.train.data import Batch
from supra.train.losses.context import LossContext, Targets

_CHUNK_ELEMENTS = (
    1 << 22
)  # weights of one chunk, over batch and heads: 16 MB in fp32, of which some ten exist at once
_SMALLEST_WEIGHT = 1e-12  # added to φ(q)·φ(k), which may be 0, for its logarithm


def attention_weights_loss(context: LossContext, batch: Batch, targets: Targets) -> Tensor:
    """Cross-entropy −Σ_j p_ij log a_ij, the mean over queries i, heads and linear layers (Hedgehog, 2402.04347).

    p are the teacher's softmax weights and a the linear layer's on the same hidden states. In a window hybrid a are
    the weights of the whole: softmax over window and sinks and φ(q)·φ(k) beyond, under their shared normaliser.
    """
    total = torch.zeros((), device=batch.input_ids.device)
    places = _Places(batch)
    num_terms = targets.num_tokens * context.student.config.num_attention_heads
    num_terms *= context.student.config.num_linear_layers

    def compare(
        ours: SupraLinearAttention,
        theirs: SupraSoftmaxAttention,
        args: Any,
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        hidden_states, rope = kwargs["hidden_states"], kwargs["position_embeddings"]
        softmax_q, softmax_k = _softmax_inputs(theirs, hidden_states, rope)
        with torch.enable_grad():
            q, k, _ = ours.project(hidden_states)
            q, k, *mapped = ours.map_features(q, k, rope)
        mapped_q, mapped_k = leaves = [x.detach().float().requires_grad_() for x in mapped]
        for rows in _chunks(q):
            keys = slice(0, rows.stop)
            with torch.autocast(q.device.type, enabled=False):
                seen = places.see(rows, keys)
                wanted = _softmax_weights(theirs, softmax_q[:, rows], softmax_k[:, keys], seen)
                with torch.enable_grad():
                    log_weights = _log_weights(
                        ours,
                        q[:, rows].detach(),
                        k[:, keys].detach(),
                        mapped_q[:, rows],
                        mapped_k[:, keys],
                        seen,
                    )
                    loss = -(wanted * log_weights).sum() / num_terms
                    context.backward(loss)
            total.add_(loss.detach())
        for x, leaf in zip(mapped, leaves, strict=True):
            if x.requires_grad and leaf.grad is not None:
                x.backward(leaf.grad.to(x.dtype))

    hooks = [
        theirs.register_forward_hook(partial(compare, ours), with_kwargs=True)
        for theirs, ours in context.linear_pairs()
    ]
    context.run_teacher(batch, hooks)
    return total


def _chunks(q: Tensor) -> Iterator[slice]:
    """Rows of q [B, T, H, D], so many at a time that their weights fill a chunk."""
    B, T, H, _ = q.shape
    num_rows = max(1, _CHUNK_ELEMENTS // (B * H * T))
    for start in range(0, T, num_rows):
        yield slice(start, min(start + num_rows, T))


class _Seen(NamedTuple):
    """What a chunk's queries see: `visible` and `age` (tokens back) [B, C, S], `place` of the keys [B, 1, S]."""

    visible: Tensor
    age: Tensor
    place: Tensor


class _Places:
    """Where the tokens of a batch stand: their row, document and place in it."""

    def __init__(self, batch: Batch) -> None:
        # Not the batch's position_ids, which may skip: window, sinks and decay count tokens.
        self.place = positions_from_boundaries(batch.cu_seqlens, *batch.input_ids.shape)
        flat = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        document = torch.searchsorted(batch.cu_seqlens, flat, right=True)
        self.document = document.view(batch.input_ids.shape)

    def see(self, rows: slice, keys: slice) -> _Seen:
        age = self.place[:, rows, None] - self.place[:, None, keys]
        same = self.document[:, rows, None] == self.document[:, None, keys]
        return _Seen(same & (age >= 0), age, self.place[:, None, keys])


def _softmax_inputs(
    theirs: SupraSoftmaxAttention, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The teacher's rotated q [B, T, H, D] and k [B, T, G, D]."""
    q = theirs.q_norm(theirs.q_proj(hidden_states).unflatten(-1, (-1, theirs.head_dim)))
    k = theirs.k_norm(theirs.k_proj(hidden_states).unflatten(-1, (-1, theirs.head_dim)))
    rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    return rotated


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q [B, C, H, D] and k [B, S, G, D] -> q·k in fp32, [B, H, C, S]."""
    grouped = q.float().unflatten(2, (k.shape[2], -1))
    return torch.einsum("bcgnd,bsgd->bgncs", grouped, k.float()).flatten(1, 2)


def _softmax_weights(theirs: SupraSoftmaxAttention, q: Tensor, k: Tensor, see: _Seen) -> Tensor:
    """The teacher's weights p [B, H, C, S]; a sliding window of its own counts."""
    visible = see.visible & (see.age < theirs.sliding_window) if theirs.sliding_window else see.visible
    scores = _products(q, k) * theirs.head_dim**-0.5
    return scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)


def _log_weights(
    layer: SupraLinearAttention, q: Tensor, k: Tensor, mapped_q: Tensor, mapped_k: Tensor, see: _Seen
) -> Tensor:
    """log a [B, H, C, S] of a linear layer, 0 where nothing is seen; what it normalises by is as in its forward."""
    window, visible = layer.window, see.visible.unsqueeze(1)
    exact = see.age < window
    if window:
        exact = exact | (see.place < layer.config.num_sink_tokens)
    recurrent, exact = visible & ~exact.unsqueeze(1), visible & exact.unsqueeze(1)
    linear = _products(mapped_q, mapped_k)
    if hasattr(layer, "decay"):
        log_decay = layer.decay(mapped_k)
        per_head = log_decay.repeat_interleave(layer.num_heads // log_decay.shape[0])
        # What leaves the window enters the state, and decays from there on.
        linear = linear * torch.exp(per_head[:, None, None] * (see.age - window).clamp(min=0).unsqueeze(1))
    linear = linear + _SMALLEST_WEIGHT
    denominator = (linear * recurrent).sum(-1, keepdim=True)
    log_linear = linear.log()
    if not window:
        return (log_linear - denominator.log()).masked_fill(~visible, 0.0)
    scores = (_products(q, k) * layer.head_dim**-0.5).masked_fill(~exact, -torch.inf)
    lse = scores.logsumexp(-1)
    log_ratio = layer.window_mix.log_ratio(lse.transpose(1, 2)).transpose(1, 2).unsqueeze(-1)
    log_softmax = scores.masked_fill(~exact, 0.0) - lse.unsqueeze(-1)
    log_all = torch.log1p(log_ratio.exp() * denominator)
    return (torch.where(exact, log_softmax, log_ratio + log_linear) - log_all).masked_fill(~visible, 0.0)
