"""The two kinds of attention in a converted model: the linear recurrent layer, and the teacher's softmax as it was.

Symbols: B batch, T tokens, H query heads, G key/value heads, D head dim, K feature dim, V state's value dim, w window.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from supra_kernels import linear_attention, linear_attention_step, window_attention

from .cache import RecurrentLayer, SupraCache
from .configuration_supra import SupraConfig
from .decay import build_decay, per_token
from .decode import roll, step_sinks, window_step
from .feature_maps import build_feature_maps
from .fused_sequence import fused_sequence, fuses_sequence
from .fused_step import fused_step, fuses
from .packing import Packing, delay_rows
from .sinks import add_sinks, update_sinks
from .window_mix import WindowMix

Ablation = Literal["window_only", "linear_only"]


class SupraSoftmaxAttention(Qwen3Attention):
    """A softmax layer kept as it was: bit for bit the teacher's, for every supported architecture.

    Qwen3's attention is the widest of the family; what a teacher lacks (q_norm, biases) is taken out here.
    """

    def __init__(self, config: SupraConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]  # it reads only fields that both have
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        if config.attention_output_bias != config.attention_bias:
            self.o_proj = nn.Linear(
                self.o_proj.in_features, self.o_proj.out_features, bias=config.attention_output_bias
            )


def build_new_modules(config: SupraConfig) -> dict[str, nn.Module]:
    """The modules of one linear layer that the teacher does not have, by attribute name."""
    assert config.head_dim is not None
    modules: dict[str, nn.Module] = build_feature_maps(config)
    decay = build_decay(config)
    if decay is not None:
        modules["decay"] = decay
    if config.attention_norm == "group_norm":
        heads = config.num_attention_heads
        modules["group_norm"] = nn.GroupNorm(
            heads, heads * config.head_dim, eps=1e-5, affine=config.group_norm_affine
        )
    if config.window:
        modules["window_mix"] = WindowMix(
            config.num_attention_heads, expands_exp=config.feature_map == "taylor"
        )
    return modules


class Past(NamedTuple):
    """What a layer remembers exactly: the window's streams, the sinks, and the tokens seen by each sequence [N]."""

    streams: tuple[Tensor, ...]
    sinks: tuple[Tensor, ...]
    num_seen: Tensor


class SupraLinearAttention(nn.Module):
    """Linear recurrent attention in the place of one softmax layer (arXiv 2405.06640, section 3).

    The teacher's q/k/v/o projections (and q_norm/k_norm) keep their names; `build_new_modules` adds the rest.
    `ablation` switches one branch off for measuring what it is worth; `backend` names the kernel backend.
    """

    feature_map_q: nn.Module
    feature_map_k: nn.Module
    decay: nn.Module
    group_norm: nn.GroupNorm
    window_mix: WindowMix

    def __init__(self, config: SupraConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.num_heads = config.head_dim, config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.backend = "auto"
        self.ablation: Ablation | None = None
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        for name, module in build_new_modules(config).items():
            self.add_module(name, module)

    @property
    def window(self) -> int:
        """Softmax window in tokens; 0 under the `linear_only` ablation, which hands every token to the linear part."""
        return 0 if self.ablation == "linear_only" else self.config.window

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: SupraCache | None = None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [B, T, hidden] -> ([B, T, hidden], None); pads and documents come in `packing`."""
        batch_size, num_columns, _ = hidden_states.shape
        q, k, v = self.project(hidden_states)
        log_decay = self.decay(hidden_states) if hasattr(self, "decay") else None
        memory: RecurrentLayer | None = None
        if cache is not None:
            layer = cache.layers[self.layer_idx]
            assert isinstance(layer, RecurrentLayer)
            memory = layer
        if packing is None and memory is not None and fuses(self, q, memory):
            output = fused_step(self, q, k, v, log_decay, position_embeddings, memory)
            return self.o_proj(output.flatten(-2).to(hidden_states.dtype)), None
        if fuses_sequence(self, q):
            output = fused_sequence(self, q, k, v, log_decay, position_embeddings, memory, packing)
        else:
            output = self._mix(q, k, v, log_decay, position_embeddings, memory, packing)
        if packing is not None:
            output = packing.unpack(output, batch_size, num_columns)
        return self.o_proj(output.flatten(-2).to(hidden_states.dtype)), None

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [B, T, hidden] -> q [B, T, H, D], k and v [B, T, G, D]."""
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def map_features(
        self, q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q and k [..., D], rotated for the window, and φ(q), φ(k) [..., K] for the state; None: no RoPE."""
        map_q = self.feature_map_q
        map_k = self.feature_map_k if hasattr(self, "feature_map_k") else self.feature_map_q
        if self.config.rope_position == "before":
            q, k = _rotate(q, k, position_embeddings)
            return q, k, map_q(q), map_k(k)
        mapped_q, mapped_k = _rotate(map_q(q), map_k(k), position_embeddings)
        return q, k, mapped_q, mapped_k

    def _mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        memory: RecurrentLayer | None,
        packing: Packing | None,
    ) -> Tensor:
        """Window and linear part operator by operator; q [B, T, H, D], k and v [B, T, G, D] as projected."""
        num_columns = q.shape[1]
        q, k, mapped_q, mapped_k = self.map_features(q, k, position_embeddings)
        if packing is not None:
            q, k, v, mapped_q, mapped_k = (packing.pack(x) for x in (q, k, v, mapped_q, mapped_k))
            log_decay = packing.pack(log_decay) if per_token(log_decay) else log_decay
        decoding = num_columns == 1 and packing is None and self.window and not torch.is_grad_enabled()
        if decoding and memory is not None and memory.recurrent_state is not None:
            return self._decode(q, k, v, mapped_q, mapped_k, log_decay, memory)
        return self._attend(q, k, v, mapped_q, mapped_k, log_decay, memory, packing, num_columns)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mapped_q: Tensor,
        mapped_k: Tensor,
        log_decay: Tensor | None,
        memory: RecurrentLayer | None,
        packing: Packing | None,
        num_columns: int,
    ) -> Tensor:
        """Mix values by the window and the state; all [B or 1, T or total, heads, ·] -> [B or 1, T or total, H, D]."""
        num_sequences = q.shape[0] if packing is None else packing.cu_seqlens.shape[0] - 1
        remembered = (k, mapped_k, v, log_decay) if per_token(log_decay) else (k, mapped_k, v)
        past = self._past(memory, num_sequences, remembered)
        window_part: tuple[Tensor, Tensor] | None = None
        streams: tuple[Tensor, ...] = ()
        sinks: tuple[Tensor, ...] = ()
        if self.window:
            where = past.num_seen[:, None] + torch.arange(num_columns, device=q.device) if packing is None else (
                packing.positions(past.num_seen).unsqueeze(0)
            )  # fmt: skip
            window_part = window_attention(
                q, k, v,
                window=self.window, scale=self.head_dim**-0.5,
                cu_seqlens=None if packing is None else packing.cu_seqlens,
                past_k=past.streams[0], past_v=past.streams[2],
                past_valid=past.num_seen.clamp(max=self.window), backend=self.backend,
            )  # fmt: skip
            if self.config.num_sink_tokens:
                window_part, sinks = self._with_sinks(window_part, q, k, v, past, where, packing)
            delay = delay_rows if packing is None else packing.delay
            pairs = zip(remembered, past.streams, strict=True)
            delayed, streams = zip(*(delay(new, earlier) for new, earlier in pairs), strict=True)
            _, mapped_k, v, *gate = delayed
            log_decay = gate[0] if gate else log_decay
            if self.config.num_sink_tokens:
                older = (where - self.window) >= self.config.num_sink_tokens
                mapped_k = mapped_k * older[..., None, None].to(mapped_k.dtype)
        if window_part is not None and self.ablation == "window_only":
            output, state = window_part[0], None
        else:
            linear_part, state = self._linear(mapped_q, mapped_k, v, log_decay, memory, packing)
            output = self.normalise(linear_part, window_part)
        if memory is not None:
            lengths = num_columns if packing is None else packing.lengths
            memory.store(num_columns, state, streams, sinks, past.num_seen + lengths if self.window else None)
        return output

    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mapped_q: Tensor,
        mapped_k: Tensor,
        log_decay: Tensor | None,
        memory: RecurrentLayer,
    ) -> Tensor:
        """`_attend` for one token [B, 1, heads, ·] of every row: what the window drops goes into the state."""
        assert memory.num_seen is not None
        num_seen, sinks, num_sinks = memory.num_seen, memory.sinks, self.config.num_sink_tokens
        remembered = (k, mapped_k, v, log_decay) if per_token(log_decay) else (k, mapped_k, v)
        pairs = zip(memory.window_streams, remembered, strict=True)
        streams, leaving = zip(*(roll(earlier, new) for earlier, new in pairs), strict=True)
        _, leaving_k, leaving_v, *gate = leaving
        log_decay = gate[0] if gate else log_decay
        if num_sinks:
            sinks = (step_sinks(k, sinks[0], num_seen), step_sinks(v, sinks[1], num_seen))
            older = (num_seen - self.window) >= num_sinks
            leaving_k = leaving_k * older.view(-1, 1, 1, 1).to(leaving_k.dtype)
        window_part = window_step(
            q, (streams[0], streams[2]), (sinks[0], sinks[1]) if num_sinks else None, num_seen, self.head_dim**-0.5
        )  # fmt: skip
        linear_part, state = self._linear(mapped_q, leaving_k, leaving_v, log_decay, memory, None)
        memory.store(1, state, streams, sinks, num_seen + 1)
        return window_part[0] if self.ablation == "window_only" else self.normalise(linear_part, window_part)

    def _past(
        self, memory: RecurrentLayer | None, num_sequences: int, remembered: tuple[Tensor, ...]
    ) -> Past:
        """What the window and the sinks hold before this segment: zeros at the start of a sequence.

        `remembered` are the segment's own keys, mapped keys, values and whatever else the window delays.
        """
        if memory is not None and memory.num_seen is not None:
            return Past(memory.window_streams, memory.sinks, memory.num_seen)
        k, _, v = remembered[:3]
        num_seen = torch.zeros(num_sequences, dtype=torch.int64, device=k.device)
        streams = tuple(x.new_zeros(num_sequences, self.window, *x.shape[2:]) for x in remembered)
        sinks = tuple(x.new_zeros(num_sequences, self.config.num_sink_tokens, *x.shape[2:]) for x in (k, v))
        return Past(streams, sinks, num_seen)

    def _with_sinks(
        self,
        window_part: tuple[Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Past,
        where: Tensor,
        packing: Packing | None,
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """The window's softmax with the sinks merged in, and the sinks after this segment."""
        num_sequences, device = past.num_seen.shape[0], k.device
        if packing is None:
            lengths = torch.full((num_sequences,), k.shape[1], device=device)
            starts = torch.arange(num_sequences, device=device) * k.shape[1]
        else:
            lengths, starts = packing.lengths, packing.cu_seqlens[:-1]
        sinks = tuple(
            update_sinks(x.flatten(0, 1), sink, past.num_seen, starts, lengths)
            for x, sink in zip((k, v), past.sinks, strict=True)
        )
        # Each token sees its own sequence's sinks: rows broadcast, packed tokens look theirs up.
        sink_k, sink_v = (
            sink.unsqueeze(1) if packing is None else sink[packing.sequence].unsqueeze(0) for sink in sinks
        )
        slots = torch.arange(self.config.num_sink_tokens, device=device)
        visible = (where - self.window).unsqueeze(-1) >= slots
        return add_sinks(window_part, q, sink_k, sink_v, visible, self.head_dim**-0.5), sinks

    def _linear(
        self,
        mapped_q: Tensor,
        mapped_k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        memory: RecurrentLayer | None,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The linear part [.., H, V] in fp32 (last column: the denominator, if there is one), and the new state."""
        v, scale = self.summands(v)
        initial_state = None if memory is None else memory.recurrent_state
        if packing is None and v.shape[1] == 1 and initial_state is not None:
            output, state = linear_attention_step(
                mapped_q[:, 0],
                mapped_k[:, 0],
                v[:, 0],
                initial_state,
                log_decay[:, 0] if per_token(log_decay) else log_decay,
                scale=scale,
                backend=self.backend,
            )
            return output.unsqueeze(1), state
        return linear_attention(
            mapped_q, mapped_k, v, log_decay,
            scale=scale, initial_state=initial_state, output_final_state=memory is not None,
            cu_seqlens=None if packing is None else packing.cu_seqlens, backend=self.backend,
        )  # fmt: skip

    def summands(self, v: Tensor) -> tuple[Tensor, float]:
        """v [.., H, D] -> what the state sums [.., H, V] in fp32 (fp64 where v is), and the scale of its output."""
        v = v.to(torch.float64 if v.dtype == torch.float64 else torch.float32)
        if self.config.attention_norm == "denominator":
            # The normaliser is a column of values that are all 1. Where the window delays the stream, slots before
            # the first token have φ(k) = 0, so their 1 counts nothing.
            return torch.cat((v, torch.ones_like(v[..., :1])), dim=-1), 1.0
        return v, self.head_dim**-0.5

    def normalise(self, linear_part: Tensor, window_part: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """linear_part [.., H, V] and the window's (output [.., H, D], lse [.., H]) -> output [.., H, D]."""
        if self.config.attention_norm == "group_norm":
            flat = linear_part.flatten(0, 1).flatten(1)
            weight, bias = self.group_norm.weight, self.group_norm.bias
            normed = torch.nn.functional.group_norm(
                flat, self.num_heads,
                None if weight is None else weight.to(flat.dtype), None if bias is None else bias.to(flat.dtype),
                self.group_norm.eps,
            )  # fmt: skip
            return normed.view(linear_part.shape)
        numerator, denominator = linear_part[..., :-1], linear_part[..., -1:]
        if window_part is None:
            return numerator / denominator.clamp_min(1e-12)
        output, lse = window_part
        ratio = self.window_mix(lse).unsqueeze(-1)
        return (output.to(numerator.dtype) + ratio * numerator) / (1 + ratio * denominator)


def _rotate(q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """RoPE on q [B, T, H, K] and k [B, T, G, K]; features wider than a head are rotated D at a time."""
    if position_embeddings is None:
        return q, k
    cos, sin = position_embeddings
    pieces = q.shape[-1] // cos.shape[-1]
    if pieces == 1:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q_pieces, k_pieces = (x.unflatten(-1, (pieces, -1)) for x in (q, k))
    q_rotated, k_rotated = apply_rotary_pos_emb(
        q_pieces.flatten(2, 3), k_pieces.flatten(2, 3), cos, sin, unsqueeze_dim=2
    )
    return q_rotated.view(q.shape), k_rotated.view(k.shape)
