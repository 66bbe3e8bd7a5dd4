"""Conversion of a checkpoint: plan it (`make_plan`), then carry that very plan out (`execute`)."""

from supra.convert.plan import LayerError, Plan, make_plan
from supra.convert.progress import progress_bar
from supra.convert.write import ConversionResult, check_place, check_target, execute

__all__ = [
    "ConversionResult",
    "LayerError",
    "Plan",
    "check_place",
    "check_target",
    "execute",
    "make_plan",
    "progress_bar",
]
