"""Teacher architectures as data: what each one has, and what in a config.json cannot be kept.

A new relative of Llama is one more row of `ARCHITECTURES`; nothing here imports torch. A configuration that
asks for something a converted model would silently lose (experts, logit caps, frequencies that move with the
length) is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from supra.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """One decoder family, and how its attention differs from Llama's; norms, rotary positions and MLP do not.

    A bias is there always, never, or where the named config field says so. `default_head_dim` and
    `default_kv_heads` are what its own config class supplies when config.json is silent (None: hidden_size /
    heads, and heads). `gguf_permuted`: GGUF files hold the rows of q and k interleaved.
    """

    model_type: str
    examples: str
    class_name: str
    query_key_value_bias: bool | str = False
    output_bias: bool | str = False
    query_key_norm: bool = False
    default_head_dim: int | None = None
    default_kv_heads: int | None = None
    gguf_permuted: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture(
            "llama",
            "Llama 1, 2, 3, 3.1, 3.2, SmolLM, SmolLM2, TinyLlama, Yi",
            "LlamaForCausalLM",
            query_key_value_bias="attention_bias",
            output_bias="attention_bias",
            gguf_permuted=True,
        ),
        Architecture("mistral", "Mistral 7B, Mistral NeMo, Zephyr", "MistralForCausalLM", default_kv_heads=8),
        Architecture(
            "qwen2",
            "Qwen1.5, Qwen2, Qwen2.5",
            "Qwen2ForCausalLM",
            query_key_value_bias=True,
            default_kv_heads=32,
        ),
        Architecture(
            "qwen3",
            "Qwen3 0.6B to 32B (dense)",
            "Qwen3ForCausalLM",
            query_key_value_bias="attention_bias",
            output_bias="attention_bias",
            query_key_norm=True,
            default_head_dim=128,
            default_kv_heads=32,
        ),
    )
}

# Rotary scalings whose frequencies are fixed: what the recurrent state holds stays valid as the text grows.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
MOVING_ROPE_TYPES = ("dynamic", "longrope", "su")

# Buffers of old checkpoints that are recomputed on loading; dropping them loses nothing.
DROPPABLE_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".masked_bias",
)


@dataclass(frozen=True)
class Refusal:
    """A config field (`fields`: its spellings) that cannot be honoured, unless its value is `harmless`."""

    fields: tuple[str, ...]
    reason: str
    mend: str
    harmless: Callable[[Any], bool] = lambda value: value in (None, False, 0)


_EXPERTS = "it is a mixture of experts, and only dense MLPs are converted"
_DENSE = "Choose a dense checkpoint of the same family"
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        ("quantization_config", "compression_config"),
        "its weights are quantised, and a feature map needs real numbers to train against",
        "Choose the unquantised checkpoint (bf16, fp16 or fp32), or dequantise it first",
    ),
    Refusal(
        (
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "moe_intermediate_size",
            "num_experts_per_tok",
        ),
        _EXPERTS,
        _DENSE,
    ),
    Refusal(
        ("attn_logit_softcapping", "final_logit_softcapping", "attention_logit_cap", "logit_cap"),
        "its logits are soft-capped, which linear attention has no place for",
        "Choose a model without soft-capping (Llama, Mistral, Qwen2, Qwen3)",
    ),
    Refusal(
        ("attention_sinks", "attn_sinks", "num_sink_tokens", "attention_sink_size"),
        "its softmax has attention sinks, which linear attention has no place for",
        "Choose a model without attention sinks (Llama, Mistral, Qwen2, Qwen3)",
    ),
    Refusal(
        (
            "logit_scale",
            "logits_scaling",
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
        ),
        "it scales its activations, and the converted model would lose that",
        "Choose a model without these multipliers (Llama, Mistral, Qwen2, Qwen3)",
        harmless=lambda value: value in (None, 1, 1.0),
    ),
    Refusal(
        ("no_rope_layers", "no_rope_layer_interval"),
        "some of its layers use no rotary positions, and the converted model would add them",
        "Choose a model with rotary positions in every layer",
        harmless=lambda value: value is None or value == [] or value == 0,
    ),
    Refusal(
        ("auto_map",),
        "it needs code of its own (trust_remote_code), so its block may differ from its model_type's",
        "Choose a checkpoint in the transformers format, or remove auto_map if its block is the standard one",
    ),
)


def _number(config: Mapping[str, Any], field: str, default: Any, where: str) -> int:
    """A positive whole number of config.json, or UserError."""
    value = config.get(field, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(
            f"{where}: {field} = {value!r}", "it must be a positive whole number", "Correct config.json"
        )
    return value


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.pop("type", None)
    settings.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return settings


def _check_rope(config: Mapping[str, Any], where: str) -> None:
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: rope settings {raw!r}", "they must be an object", "Correct config.json")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UserError(
            f"{where}: rope_parameters",
            "they differ from layer to layer",
            "Choose a model with one rotary setting",
        )
    settings = rope_parameters(config)
    kind = settings["rope_type"]
    if kind in MOVING_ROPE_TYPES:
        raise UserError(
            f"{where}: rope type {kind!r}",
            "its frequencies move with the text's length, but the recurrent state keeps keys of the old ones",
            f"Choose a model with one of {', '.join(ROPE_TYPES)}, or set a fixed scaling in config.json",
        )
    if kind not in ROPE_TYPES:
        near = difflib.get_close_matches(str(kind), ROPE_TYPES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"{where}: rope type {kind!r}", "it is not known", f"{hint}Known: {', '.join(ROPE_TYPES)}"
        )
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    # `proportional` gives the rest of a head a frequency of 0, so all of it is rotated all the same.
    if kind != "proportional" and partial not in (None, 1):
        raise UserError(
            f"{where}: partial_rotary_factor = {partial}",
            "only part of every head is rotated, and the converted model rotates all of it",
            "Choose a model that rotates whole heads",
        )


def find(model_type: object, where: str) -> Architecture:
    """The row of ARCHITECTURES for `model_type`; UserError with the nearest names when there is none."""
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    known = ", ".join(ARCHITECTURES)
    if not isinstance(model_type, str):
        raise UserError(
            f"{where}: model_type {model_type!r}",
            "config.json does not say what the model is",
            f"Known: {known}",
        )
    if "moe" in model_type.lower() or model_type == "mixtral":
        raise UserError(f"{where}: model_type {model_type!r}", _EXPERTS, _DENSE)
    near = difflib.get_close_matches(model_type, ARCHITECTURES, n=2, cutoff=0.4)
    hint = f"Nearest known: {', '.join(near)}. " if near else ""
    raise UserError(
        f"{where}: model_type {model_type!r}", "this architecture is not known", f"{hint}Known: {known}"
    )


def check(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture of a teacher's config.json, found at `where`; UserError for what cannot be kept."""
    row = find(config.get("model_type"), where)
    for refusal in REFUSALS:
        for field in refusal.fields:
            if field in config and not refusal.harmless(config[field]):
                raise UserError(f"{where}: {field}", refusal.reason, refusal.mend)
    classes = config.get("architectures") or [row.class_name]
    if row.class_name not in classes:
        raise UserError(
            f"{where}: architectures {classes!r}",
            f"only {row.class_name} has the language-model head that is needed",
            "Choose a causal language model",
        )
    hidden = _number(config, "hidden_size", 4096, where)
    heads = _number(config, "num_attention_heads", 32, where)
    kv_heads = _number(config, "num_key_value_heads", row.default_kv_heads or heads, where)
    for field in ("num_hidden_layers", "vocab_size", "intermediate_size"):
        _number(config, field, None, where)
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {heads}, num_key_value_heads {kv_heads}",
            "every key/value head must serve the same number of query heads",
            "Correct config.json",
        )
    stated = config.get("head_dim") or row.default_head_dim
    if stated is None and hidden % heads:
        raise UserError(
            f"{where}: hidden_size {hidden}",
            f"it is not a multiple of the {heads} heads",
            "Correct config.json, or set head_dim",
        )
    head_dim = _number(config, "head_dim", stated or hidden // heads, where)
    if head_dim % 2:
        raise UserError(
            f"{where}: head_dim {head_dim}",
            "rotary positions turn pairs, so it must be even",
            "Correct config.json",
        )
    _check_rope(config, where)
    return row


def has_bias(rule: bool | str, config: Mapping[str, Any]) -> bool:
    """Whether the projections governed by `rule` (a field of Architecture) have a bias under this config."""
    return bool(config.get(rule, False)) if isinstance(rule, str) else rule
