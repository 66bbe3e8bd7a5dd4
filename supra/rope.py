"""Rotary positions stretched by a kind and a factor, `yarn:4`, as transformers' `rope_parameters`; no torch here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from supra.architectures import MOVING_ROPE_TYPES
from supra.errors import UserError

ROPE_SCALINGS = ("linear", "ntk", "yarn", "llama3")
# Llama 3.1's own: what turns more than 4 times within the trained context stays, what turns less than once is
# divided.
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class RopeScaling(NamedTuple):
    """A context stretched `factor` times by one of `ROPE_SCALINGS`, written `kind:factor`."""

    kind: str
    factor: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.factor:.12g}"


def parse_scaling(text: str) -> RopeScaling:
    """`yarn:4` as a scaling.

    Raises:
        ValueError: it is not written so, or its kind cannot be given so; says what to write instead.
    """
    kind, colon, number = (part.strip() for part in text.partition(":"))
    if kind in ("before", "after"):
        raise ValueError(f"RoPE before or after the feature map is called rope_position: set it to {kind}")
    if kind in MOVING_ROPE_TYPES:
        raise ValueError(
            "its frequencies move while the sequence grows, and a recurrent state cannot be rotated again: "
            f"use yarn:{number or 4}"
        )
    if kind == "proportional":
        raise ValueError(
            "it differs from linear only where part of a head is rotated, which a factor does not say: "
            f"use linear:{number or 4}"
        )
    if kind not in ROPE_SCALINGS:
        near = difflib.get_close_matches(kind, ROPE_SCALINGS, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ValueError(f"must be KIND:FACTOR, with a kind of {', '.join(ROPE_SCALINGS)}{hint}")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not colon or not 1 < factor < math.inf:
        raise ValueError(
            f"the factor must be a number above 1: write {kind}:4 for a context four times as long"
        )
    return RopeScaling(kind, factor)


def scaled_rope_parameters(
    own: Mapping[str, Any], scaling: RopeScaling, *, head_dim: int, context_tokens: int, asked: str
) -> dict[str, Any]:
    """The `rope_parameters` that stretch the context of `context_tokens` that a model with `own` was trained at.

    With κ the factor:

    - `linear`: position interpolation, f'(x, m) = f(x, m/κ) (arXiv 2306.15595);
    - `ntk`: a larger base, θ' = θ·κ^(d/(d−2)), the slowest frequency alone divided by κ (arXiv 2309.00071, def. 1);
    - `yarn`: NTK-by-parts with YaRN's temperature (arXiv 2309.00071, section 3.4);
    - `llama3`: by parts with Llama 3.1's bands (transformers' `_compute_llama3_parameters`).

    Raises:
        UserError: the model has a scaling of its own; `asked` is what the user wrote.
    """
    kind, factor = scaling
    if own.get("rope_type", "default") != "default":
        raise UserError(
            asked,
            f"the teacher has a scaling of its own already ({own['rope_type']}), and two do not add up",
            "Leave it out: the teacher's positions are kept as they are",
        )
    if kind == "ntk":
        if head_dim < 4:
            raise UserError(asked, f"heads of {head_dim} have one frequency, which ntk keeps", "Use linear")
        return {**own, "rope_theta": own["rope_theta"] * factor ** (head_dim / (head_dim - 2))}
    extra: dict[str, Any] = {"factor": factor}
    if kind in ("yarn", "llama3"):
        extra["original_max_position_embeddings"] = context_tokens
    if kind == "llama3":
        extra |= LLAMA3_BANDS
    return {**own, "rope_type": kind, **extra}


def scaled_context(context_tokens: int, factor: float) -> int:
    """Tokens of a context of so many, stretched."""
    return round(context_tokens * factor)
