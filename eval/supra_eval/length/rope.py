"""The teacher with its rotary positions scaled, so that it may read past the context that it was trained at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from supra.errors import UserError
from supra.recipe_io import nearest

ROPE_SCALINGS = ("none", "linear", "ntk", "yarn")


def scaled_rope_parameters(config: Any, kind: str, factor: float) -> dict[str, Any]:
    """The `rope_parameters` that stretch a softmax model's context by κ = `factor`.

    - `linear`: position interpolation, f'(x, m) = f(x, m/κ) (arXiv 2306.15595);
    - `ntk`: a larger base, θ' = θ·κ^(d/(d−2)), the slowest frequency alone divided by κ (arXiv 2309.00071, def. 1);
    - `yarn`: NTK-by-parts with YaRN's temperature (arXiv 2309.00071, section 3.4).

    Raises:
        UserError: an unknown kind, or a model that comes with a scaling of its own.
    """
    require_scaling(kind)
    own = dict(config.rope_parameters or {})
    if own.get("rope_type", "default") != "default":
        raise UserError(
            f"--rope {kind}",
            f"the teacher has a scaling of its own already ({own['rope_type']})",
            "Use --rope none: it is read as it is",
        )
    if kind == "none":
        return own
    if kind == "ntk":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return own | {"rope_theta": own["rope_theta"] * factor ** (dim / (dim - 2))}
    extra = {"original_max_position_embeddings": config.max_position_embeddings} if kind == "yarn" else {}
    return own | {"rope_type": kind, "factor": factor} | extra


def require_scaling(kind: str) -> None:
    """UserError unless `kind` is one of `ROPE_SCALINGS`."""
    if kind not in ROPE_SCALINGS:
        hint = nearest(kind, ROPE_SCALINGS)
        mend = f"Did you mean {hint}? " if hint else ""
        raise UserError(f"--rope {kind}", "is no scaling", f"{mend}Choose one of {', '.join(ROPE_SCALINGS)}")


@contextmanager
def scaled_rope(model: Any, kind: str, factor: float) -> Iterator[None]:
    """Run a softmax `model` with its rotary positions scaled; its own are put back at the end.

    Raises:
        UserError: see `scaled_rope_parameters`.
    """
    own_config, own_rotary = model.config, model.model.rotary_emb
    config = copy.deepcopy(own_config)
    config.rope_parameters = scaled_rope_parameters(config, kind, factor)
    if kind == "yarn":  # transformers warns unless this is κ times the trained context
        config.max_position_embeddings = round(own_config.max_position_embeddings * factor)
    model.config = config
    model.model.rotary_emb = type(own_rotary)(config=config).to(model.device)
    try:
        yield
    finally:
        model.config, model.model.rotary_emb = own_config, own_rotary
