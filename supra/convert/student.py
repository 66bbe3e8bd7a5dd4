"""From a teacher's config.json and a Conversion to the student's configuration: the one place for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from supra.architectures import Architecture, check, has_bias
from supra.config import Conversion
from supra.errors import UserError
from supra.rope import parse_scaling, scaled_context, scaled_rope_parameters

if TYPE_CHECKING:
    from supra.models import SupraConfig


def teacher_config(raw: dict[str, Any], where: str) -> tuple[Architecture, dict[str, Any]]:
    """The architecture, and config.json with its class's defaults filled in; UserError when it is unfit."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    row = check(raw, where)
    silenced = logging.getLogger("transformers.modeling_rope_utils")
    level = silenced.level
    try:
        silenced.setLevel(logging.ERROR)
        full = AutoConfig.for_model(**raw).to_dict()
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            where, f"transformers refuses it ({_first_line(error)})", "Correct config.json"
        ) from None
    finally:
        silenced.setLevel(level)
    if full.get("head_dim") is None:
        full["head_dim"] = full["hidden_size"] // full["num_attention_heads"]
    return row, full


def softmax_layer_types(full: dict[str, Any]) -> list[str]:
    """What each of the teacher's layers is: `full_attention` or `sliding_attention`."""
    stated = full.get("layer_types")
    if stated:
        return list(stated)
    kind = "sliding_attention" if full.get("sliding_window") else "full_attention"
    return [kind] * int(full["num_hidden_layers"])


def student_config(
    full: dict[str, Any], row: Architecture, conversion: Conversion, dtype: str, where: str
) -> SupraConfig:
    """The student's configuration; UserError for a layer index or a combination that makes no sense.

    `dtype` is the teacher's, as config.json names it; `conversion` is already resolved.
    """
    from huggingface_hub.errors import StrictDataclassError

    from supra.models import SupraConfig

    full = full | _scaled_positions(full, conversion, where)
    layers = softmax_layer_types(full)
    for index in conversion.keep_softmax:
        if not 0 <= index < len(layers):
            raise UserError(
                f"keep_softmax: layer {index}",
                f"the teacher's layers are 0 to {len(layers) - 1}",
                "Name layers that exist",
            )
    kept = set(conversion.keep_softmax)
    layer_types = [kind if i in kept else "linear_attention" for i, kind in enumerate(layers)]
    try:
        return SupraConfig.from_teacher(
            full,
            layer_types=layer_types,
            teacher_layer_types=layers,
            sliding_window=full.get("sliding_window") if "sliding_attention" in layers else None,
            attention_bias=has_bias(row.query_key_value_bias, full),
            attention_output_bias=has_bias(row.output_bias, full),
            qk_norm=row.query_key_norm,
            dtype=dtype,
            feature_map=conversion.feature_map,
            taylor_dim=conversion.taylor_dim,
            rope_position=conversion.rope_position,
            decay=conversion.decay,
            decay_shared=conversion.decay_shared,
            attention_norm=conversion.norm,
            group_norm_affine=conversion.norm_affine,
            window=conversion.window,
            num_sink_tokens=conversion.num_sink_tokens,
        )
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UserError(where, _first_line(error), "Change the conversion's options") from None


def teacher_notes(full: dict[str, Any], config: SupraConfig) -> list[str]:
    """What a reader should know of this teacher: its sliding window, rotary scaling and output layer."""
    notes = []
    sliding = softmax_layer_types(full).count("sliding_attention")
    if sliding:
        kept = (config.layer_types or []).count("sliding_attention")
        notes.append(
            f"the teacher's sliding window of {full['sliding_window']:,} tokens ({sliding} layers): gone in "
            f"linear layers, which see all older tokens through the state; kept in {kept} softmax layers"
        )
    rope = full.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        notes.append(
            f"rotary scaling {rope['rope_type']}, factor {rope.get('factor')}: its fixed frequencies are kept"
        )
    if config.tie_word_embeddings:
        notes.append("the output layer shares the embeddings, as in the teacher")
    return notes


def describe_positions(config: SupraConfig) -> str:
    """The rotary positions and the context that they are made for, in a few words."""
    tokens = config.max_position_embeddings
    if config.rope_scaled_by is None:
        return f"RoPE as the teacher has it, for {tokens:,} tokens"
    trained = config.teacher_max_position_embeddings
    return f"RoPE scaled by {config.rope_scaled_by}, from the teacher's {trained:,} tokens to {tokens:,}"


def _scaled_positions(full: dict[str, Any], conversion: Conversion, where: str) -> dict[str, Any]:
    """The fields of the configuration in which a conversion that scales RoPE differs from the teacher's `full`."""
    if conversion.rope is None:
        return {}
    scaling, context = parse_scaling(conversion.rope), int(full["max_position_embeddings"])
    return {
        "rope_parameters": scaled_rope_parameters(
            full["rope_parameters"],
            scaling,
            head_dim=full["head_dim"],
            context_tokens=context,
            asked=f"{where}: rope {scaling}",
        ),
        "max_position_embeddings": scaled_context(context, scaling.factor),
        "teacher_max_position_embeddings": context,
        "rope_scaled_by": str(scaling),
    }


def _first_line(error: Exception) -> str:
    """The part of a validation error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
