"""Finds a task by its name in a folder, generated or released, whichever lies there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from supra.errors import UserError

from ..task import Task
from . import images, release
from .folder import META, read_task

RELEASED = ("listops", "text", "retrieval", "image", "pathfinder", "pathx", "pathx256")
SIZES = {"pathfinder": 32, "pathx": 128, "pathx256": 256}
# As the benchmark has them: a picture of CIFAR-10 is regressed, one of Pathfinder has a class a shade.
PIXELS = {"image": "numbers", "pathfinder": "tokens", "pathx": "tokens", "pathx256": "tokens"}


def load_task(
    name: str | None,
    folder: str | Path,
    *,
    seed: int = 0,
    pixels: str | None = None,
    validate_on_test: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Task:
    """The task `name` from `folder`: what `supra lra data` wrote there, else what was released (both layouts).

    `seed` draws a validation split where the data has none; `pixels` makes pictures `tokens` or `numbers`; text is
    validated on its test split, as published runs do, only with `validate_on_test`. Without a name a generated task is
    whatever it is.

    Raises:
        UserError: an unknown name, a file that is missing (with where it is had) or broken, an option without effect.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(
            str(path), "is no folder", "Name what `supra lra data` wrote, or where released data lies"
        )
    generated = (path / META).is_file()
    if generated:
        task = read_task(path)
        if name is not None and name != task.name:
            raise UserError(str(path), f"holds the task {task.name}, not {name}", f"Ask for {task.name}")
    elif name is None:
        raise UserError(
            str(path), f"holds no {META}: which task is it?", f"Name one of {', '.join(RELEASED)}"
        )
    elif name not in RELEASED:
        raise UserError(
            f"task {name!r}", "is not one that was released", f"Choose from {', '.join(RELEASED)}"
        )
    kind = name or task.name
    if pixels is not None and (kind not in PIXELS or pixels not in ("tokens", "numbers")):
        raise UserError(
            f"pixels {pixels!r}", f"does not go with {kind}", f"tokens or numbers, with {', '.join(PIXELS)}"
        )
    if validate_on_test and (kind != "text" or generated):
        raise UserError(
            "validate_on_test", f"has no effect on {kind}", "Leave it out: only released text has it"
        )
    if not generated:
        task = read_released(kind, path, seed=seed, validate_on_test=validate_on_test, say=say)
    if kind in PIXELS and (pixels or PIXELS[kind]) == "numbers":
        train, validation, test = (
            images.as_numbers(kind, part) for part in (task.train, task.validation, task.test)
        )
        task = replace(task, num_tokens=None, train=train, validation=validation, test=test)
    return task


def read_released(
    name: str, folder: Path, *, seed: int, validate_on_test: bool, say: Callable[[str], None]
) -> Task:
    """A released task; pictures as tokens."""
    if name == "listops":
        return release.read_listops(folder)
    if name == "text":
        return release.read_text(folder, seed=seed, validate_on_test=validate_on_test)
    if name == "retrieval":
        return release.read_retrieval(folder)
    if name == "image":
        return images.read_image(folder, seed=seed)
    return images.read_pathfinder(folder, name, SIZES[name], seed=seed, say=say)
