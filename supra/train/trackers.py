"""A run's metrics in TensorBoard, W&B or Trackio as well, through Accelerate; `metrics.jsonl` stays the truth.

On a resume, steps that `metrics.jsonl` had before are not sent again: they are done anew with the same numbers. A kill
between the two writes can cost a tracker one step. TensorBoard gets a further event file, W&B and Trackio go on with
the run whose name is kept in `trackers/run_name`.
"""

import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from supra.config import Recipe
from supra.errors import UserError
from supra.train.run_folder import write_whole

_PROJECT = "supra"


def require_trackers(recipe: Recipe) -> None:
    """Raise a UserError that names each tracker whose package is not installed."""
    missing = [name for name in recipe.trackers if find_spec(name) is None]
    if missing:
        raise UserError(
            f"trackers = {', '.join(missing)}", "not installed here", f"Run: pip install {' '.join(missing)}"
        )


class Trackers:
    """The recipe's trackers, in the main process; `last_sent` is the last step that they have already."""

    def __init__(self, accelerator: Accelerator, recipe: Recipe, run_dir: Path, last_sent: int) -> None:
        self.accelerator, self.last_sent = accelerator, last_sent
        if not recipe.trackers:
            return
        folder = run_dir / "trackers"
        folder.mkdir(exist_ok=True)
        kept = folder / "run_name"
        if not kept.exists():
            write_whole(kept, f"{run_dir.resolve().name}-{secrets.token_hex(3)}")
        name = kept.read_text()
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve()))  # it has no argument for its folder
        accelerator.log_with = list(recipe.trackers)
        accelerator.project_configuration.logging_dir = str(folder)
        accelerator.init_trackers(
            _PROJECT,
            init_kwargs={
                "wandb": {"id": name, "name": name, "resume": "allow", "dir": str(folder)},
                "trackio": {"name": name, "resume": "allow"},
            },
        )

    def log(self, row: dict[str, Any]) -> None:
        """Send a row of metrics under the step that it has."""
        if row["step"] > self.last_sent:
            values = {key: value for key, value in row.items() if key != "step" and value is not None}
            self.accelerator.log(values, step=row["step"])

    def close(self) -> None:
        """Finish each tracker; Accelerate's `end_training` would also end the process group that the export needs."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
