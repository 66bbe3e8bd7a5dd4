"""A model with its rotary positions scaled, so that it may read past the context that it was trained at."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from supra.errors import UserError
from supra.recipe_io import require_known
from supra.rope import ROPE_SCALINGS, RopeScaling, scaled_context, scaled_rope_parameters

KINDS = ("none", *ROPE_SCALINGS)


def rope_parameters(config: Any, kind: str, factor: float) -> dict[str, Any]:
    """The `rope_parameters` that stretch the context of a model κ = `factor` times; see `supra.rope`.

    Raises:
        UserError: a model that comes with a scaling of its own.
    """
    return scaled_rope_parameters(
        dict(config.rope_parameters or {}),
        RopeScaling(kind, factor),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        context_tokens=config.max_position_embeddings,
        asked=f"--rope {kind}",
    )


def require_scalings(kinds: Sequence[str]) -> None:
    """UserError unless `kinds` are `none` alone, or others of `KINDS`, each once."""
    if not kinds:
        raise UserError("--rope", "is empty", f"Choose among {', '.join(KINDS)}")
    require_known(kinds, KINDS, "--rope")
    if len(set(kinds)) < len(kinds) or ("none" in kinds and len(kinds) > 1):
        raise UserError(
            f"--rope {','.join(kinds)}",
            "names one twice, or none beside others",
            "The plain one is always read",
        )


@contextmanager
def scaled_rope(model: Any, kind: str, factor: float) -> Iterator[None]:
    """Run `model` with its rotary positions scaled; its own are put back at the end.

    Raises:
        UserError: see `rope_parameters`.
    """
    own_config, own_rotary = model.config, model.model.rotary_emb
    config = copy.deepcopy(own_config)
    config.rope_parameters = rope_parameters(config, kind, factor)
    # transformers warns unless this is κ times the trained context.
    config.max_position_embeddings = scaled_context(own_config.max_position_embeddings, factor)
    model.config = config
    model.model.rotary_emb = type(own_rotary)(config=config).to(model.device)
    try:
        yield
    finally:
        model.config, model.model.rotary_emb = own_config, own_rotary
