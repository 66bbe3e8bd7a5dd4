"""Training of converted models: stages of attention transfer, distillation and next-token prediction.

The names below load on first use, so that reading texts (`supra.train.documents`) does not wait for peft.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supra.train.divergence import DivergedError as DivergedError
    from supra.train.plan import dry_run as dry_run
    from supra.train.tracking import read_metrics as read_metrics
    from supra.train.trainer import run_training as run_training

# It speaks of every product in int8, and of kernels that it does not find; peft imports it, where it is installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_HOMES = {
    "DivergedError": "divergence",
    "dry_run": "plan",
    "read_metrics": "tracking",
    "run_training": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
