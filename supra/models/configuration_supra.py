"""The model's own truth: a Llama configuration plus what each linear layer is made of."""

from __future__ import annotations

import difflib
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

FEATURE_MAPS = ("relu_dense", "relu", "hedgehog", "t2r", "elu", "taylor", "identity")
# φ(q)·φ(k) is never negative, so a sum of it can normalise.
NORMALISING_FEATURE_MAPS = ("relu_dense", "relu", "hedgehog", "t2r", "elu", "taylor")
ROPE_POSITIONS = ("after", "before")
DECAYS = ("none", "alibi", "retnet", "learned", "gated")
ATTENTION_NORMS = ("group_norm", "denominator")
LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")
# Frequencies of these move while the sequence grows; a recurrent state cannot be rotated again.
MOVING_ROPE_TYPES = ("dynamic", "longrope")


@strict
class SupraConfig(LlamaConfig):
    """Configuration of a converted model: the teacher's fields under their own names, and the linear layers'.

    Every linear layer computes `o_i = Σ_{j≤i} γ^(i−j) (φ(q_i)·φ(k_j)) v_j` (arXiv 2405.06640, section 3) with

    - `feature_map`: φ, one of `FEATURE_MAPS`; `rope_position` places RoPE `after` φ (SUPRA) or `before` it (LoLCATs);
      `taylor` expands a projection to `taylor_dim` dimensions (None with the other maps);
    - `decay`: `none`, `alibi` (γ_h = exp(−2^(−8(h+1)/H))), `retnet` (γ_h = 1 − 2^(−5−h)), `learned`, or `gated` (a γ_t
      from each token: γ^(i−j) is Π_{j<t≤i} γ_t); with `decay_shared` one value per key/value head, so that the state is
      kept per key/value head;
    - `attention_norm`: `group_norm` (one group per head) or `denominator` (Σ_j φ(q_i)·φ(k_j));
    - `rope_scaled_by`: the scaling, `yarn:4`, that the conversion put into `rope_parameters`, and by which it stretched
      the context from `teacher_max_position_embeddings` to `max_position_embeddings`; None, both, where it did not;
    - `teacher_layer_types`: what each layer was, so that training compares with the teacher as it is;
    - `window`: exact softmax over the last `window` tokens sharing the denominator with the linear part over the
      older ones, which reads the state of `window` tokens ago (keys, values and γ_t wait together: j's decay is
      Π_{j<t≤i−window} γ_t); 0 for none; with it, the first `num_sink_tokens` stay exact too (attention sinks).

    Raises:
        ValueError: an unknown field or value, or a combination that has no meaning, each named.
    """

    model_type = "supra"

    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_output_bias: bool = False
    qk_norm: bool = False
    feature_map: str = "relu_dense"
    taylor_dim: int | None = None
    rope_position: str = "after"
    decay: str = "alibi"
    decay_shared: bool = False
    attention_norm: str = "group_norm"
    group_norm_affine: bool = False
    window: int = 0
    num_sink_tokens: int = 0
    teacher_model_type: str = "llama"
    teacher_layer_types: list[str] | None = None
    teacher_max_position_embeddings: int | None = None
    rope_scaled_by: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_misspelt(kwargs)
        if self.layer_types is None:
            self.layer_types = ["linear_attention"] * self.num_hidden_layers
        if self.teacher_layer_types is None:
            kind = "sliding_attention" if self.sliding_window else "full_attention"
            self.teacher_layer_types = [kind] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        self._validate_linear_attention()

    def validate_architecture(self) -> None:
        """Heads need not divide `hidden_size` (Qwen3 sets `head_dim` on its own); key/value heads must divide heads."""
        assert self.num_key_value_heads is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )

    @property
    def num_linear_layers(self) -> int:
        """Number of layers with a recurrent state."""
        assert self.layer_types is not None
        return self.layer_types.count("linear_attention")

    @property
    def feature_dim(self) -> int:
        """Width K of φ's output for one head."""
        assert self.head_dim is not None
        if self.taylor_dim is not None:
            return 1 + self.taylor_dim + self.taylor_dim * (self.taylor_dim + 1) // 2
        return 2 * self.head_dim if self.feature_map == "hedgehog" else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width V of the state's value side for one head: the normaliser is one more column."""
        assert self.head_dim is not None
        return self.head_dim + 1 if self.attention_norm == "denominator" else self.head_dim

    @property
    def num_state_heads(self) -> int:
        """Number S of states a layer keeps: one per key/value head unless each query head has its own decay."""
        assert self.num_key_value_heads is not None
        per_kv_head = self.decay == "none" or self.decay_shared
        return self.num_key_value_heads if per_kv_head else self.num_attention_heads

    @classmethod
    def from_teacher(cls, teacher: dict[str, Any], **linear: Any) -> SupraConfig:
        """Build a configuration from the teacher's `config.json` and the linear layers' options.

        The teacher's fields that mean the same in both are kept; `linear` holds fields of this class and wins.
        """
        own = {name for name in cls.__dataclass_fields__ if not name.startswith("_")}
        shared = own | {"rope_theta", "rope_scaling", "torch_dtype"}
        kept = {
            key: value
            for key, value in teacher.items()
            if key in shared and key not in ("model_type", "architectures")
        }
        kept["teacher_model_type"] = teacher.get("model_type", "llama")
        return cls(architectures=["SupraForCausalLM"], **{**kept, **linear})

    def _refuse_misspelt(self, extra: dict[str, Any]) -> None:
        own = [name for name in SupraConfig.__annotations__ if name != "model_type"]
        for name in extra:
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.85)
            if near:
                raise ValueError(f"SupraConfig has no field {name!r}; did you mean {near[0]!r}?")

    def _validate_linear_attention(self) -> None:
        assert self.layer_types is not None and self.head_dim is not None
        for field, allowed in (
            ("feature_map", FEATURE_MAPS),
            ("rope_position", ROPE_POSITIONS),
            ("decay", DECAYS),
            ("attention_norm", ATTENTION_NORMS),
        ):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field}={value!r} is unknown; choose one of {', '.join(allowed)}")
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"layer_types holds {unknown}; choose among {', '.join(LAYER_TYPES)}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs")
        if self.window < 0:
            raise ValueError(f"window={self.window} is negative; 0 means no softmax window")
        if self.num_sink_tokens < 0 or (self.num_sink_tokens and not self.window):
            raise ValueError(
                f"num_sink_tokens={self.num_sink_tokens} must be 0, or positive together with a window: "
                "sinks are scored in the window's softmax"
            )
        if (
            "sliding_attention" in (*self.layer_types, *(self.teacher_layer_types or []))
            and not self.sliding_window
        ):
            raise ValueError("sliding_attention layers need sliding_window to be set")
        self._validate_taylor()
        if not self.num_linear_layers:
            return
        if self.attention_norm == "denominator":
            if self.feature_map not in NORMALISING_FEATURE_MAPS:
                raise ValueError(
                    f"attention_norm='denominator' needs a feature map whose φ(q)·φ(k) is never negative; "
                    f"{self.feature_map!r}'s can be"
                )
            if self.rope_position == "after":
                raise ValueError(
                    "attention_norm='denominator' needs rope_position='before': RoPE after the feature map makes "
                    "the denominator change sign"
                )
        if self.window and self.attention_norm != "denominator":
            raise ValueError(
                "window > 0 needs attention_norm='denominator': the softmax window shares its normaliser"
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type in MOVING_ROPE_TYPES:
            raise ValueError(
                f"rope_type={rope_type!r} changes its frequencies while the sequence grows; a recurrent state "
                "cannot be rotated again. Use linear, yarn or llama3 scaling"
            )

    def _validate_taylor(self) -> None:
        assert self.head_dim is not None
        if self.feature_map != "taylor":
            if self.taylor_dim is not None:
                raise ValueError(
                    f"taylor_dim={self.taylor_dim} has no meaning with feature_map={self.feature_map!r}"
                )
            return
        if self.taylor_dim is None or self.taylor_dim % 2 or not 2 <= self.taylor_dim <= self.head_dim:
            raise ValueError(
                f"taylor_dim={self.taylor_dim} must be even, as RoPE rotates pairs, and from 2 to the head_dim of "
                f"{self.head_dim}"
            )
        if self.rope_position == "after":
            raise ValueError(
                "feature_map='taylor' needs rope_position='before': its features are products, not pairs to rotate"
            )


def recurrent_state_bytes(config: SupraConfig, batch_size: int = 1, window_bytes_per_element: int = 2) -> int:
    """Bytes that generation keeps for the linear layers, whatever the context length.

    The state [S, K, V] and the window's log decays [w, S] are fp32; its keys, mapped keys and values have the weights'
    dtype, but for mapped keys of the Taylor map, which are fp32.
    """
    assert config.head_dim is not None and config.num_key_value_heads is not None
    state = config.num_state_heads * config.feature_dim * config.value_dim * 4
    kv_dims = config.num_key_value_heads * 2 * config.head_dim
    mapped_dims = config.window * config.num_key_value_heads * config.feature_dim
    mapped_bytes = 4 if config.feature_map == "taylor" else window_bytes_per_element
    exact_dims = (config.window + config.num_sink_tokens) * kv_dims
    num_seen = 8 if config.window else 0
    log_decays = config.window * config.num_state_heads * 4 if config.decay == "gated" else 0
    per_layer = (
        state + exact_dims * window_bytes_per_element + mapped_dims * mapped_bytes + log_decays + num_seen
    )
    return batch_size * config.num_linear_layers * per_layer


def kv_cache_bytes(
    config: SupraConfig, num_tokens: int, bytes_per_element: int = 2, batch_size: int = 1
) -> int:
    """Bytes of the teacher's key/value cache after `num_tokens` tokens (a sliding window caps it)."""
    assert config.head_dim is not None and config.num_key_value_heads is not None
    kept = min(num_tokens, config.sliding_window) if config.sliding_window else num_tokens
    return (
        batch_size
        * config.num_hidden_layers
        * 2
        * config.num_key_value_heads
        * config.head_dim
        * kept
        * bytes_per_element
    )
