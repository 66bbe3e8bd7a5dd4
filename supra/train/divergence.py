"""When a loss is not to be trained on: not finite, or far above what it was; and what a run that stops there tells.

The weights are those before the step. As every step is a pure function of the state before it and of its number, a
resumed run would meet the same loss again, unless it leaves that step out (`run_folder.skip_steps`).
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from supra.errors import SupraError

WINDOW_STEPS = 32  # the running value is the median of so many losses of the stage: no spike moves it
_LEAST_STEPS = 8


class DivergedError(SupraError):
    """A step's loss is not to be trained on; `global_step` counts over all stages from 1."""

    def __init__(self, thing: str, reason: str, mend: str, *, stage: str, global_step: int = 0) -> None:
        super().__init__(thing, reason, mend)
        self.stage, self.global_step = stage, global_step


class LossGuard:
    """Compares each loss with the median of the stage's last `WINDOW_STEPS`; `losses` are those before a resume."""

    def __init__(self, max_loss_ratio: float | None = None, losses: Iterable[float] = ()) -> None:
        self.ratio = max_loss_ratio
        self.recent = deque(losses, maxlen=WINDOW_STEPS)

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """Why a step with this loss must not be taken, or None."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss}, gradient norm {grad_norm}"
        if self.ratio is None or len(self.recent) < _LEAST_STEPS:
            return None
        typical = median(self.recent)
        if loss <= self.ratio * typical:
            return None
        return (
            f"loss {loss:.6g} is more than max_loss_ratio {self.ratio:g} × {typical:.6g}, the median of the last "
            f"{len(self.recent)} steps"
        )

    def passed(self, loss: float) -> None:
        """Count the loss of a step that was taken."""
        self.recent.append(loss)
