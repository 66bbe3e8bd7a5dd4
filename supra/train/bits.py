"""bitsandbytes, which a recipe's 8-bit moments and narrow teacher's weights are made by."""

from __future__ import annotations

from typing import Any

from supra.config import Recipe
from supra.errors import UserError


def require_bitsandbytes(recipe: Recipe) -> None:
    """UserError, before anything is loaded, where the recipe asks for bitsandbytes and it is not installed."""
    wanted = [
        f"{stage.name}.optimizer.moments int8" for stage in recipe.stages if stage.optimizer.moments == "int8"
    ]
    if recipe.teacher_weights in ("int8", "nf4"):
        wanted.append(f"teacher_weights {recipe.teacher_weights}")
    if wanted:
        bitsandbytes(wanted[0])


def bitsandbytes(what: str) -> Any:
    """The module, imported for `what`.

    Raises:
        UserError: it is not installed.
    """
    try:
        import bitsandbytes as module
    except ImportError:
        raise UserError(
            what, "bitsandbytes is not installed", "Run: pip install 'bitsandbytes>=0.50'"
        ) from None
    return module
