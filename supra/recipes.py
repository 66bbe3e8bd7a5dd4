"""The shipped recipes as a library: list, show, copy, validate."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from supra import config, recipe_io
from supra.config import Recipe
from supra.errors import SupraError, UserError


class Listing(NamedTuple):
    """One shipped recipe, as `supra recipes ls` prints it."""

    name: str
    description: str
    cost: str
    path: Path


def ls() -> list[Listing]:
    """Every shipped recipe, by name."""
    folder = recipe_io.shipped_folder()
    listings = []
    for path in sorted(folder.glob("*.yaml")):
        recipe = config.load(path)
        listings.append(Listing(path.stem, recipe.description, recipe.cost, path))
    return listings


def show(path_or_name: str, overrides: list[str] | None = None, *, resolved: bool = False) -> str:
    """A recipe's text as written (comments kept), or with every default and override filled in."""
    if resolved or overrides:
        return load_resolved(path_or_name, overrides).to_yaml()
    return recipe_io.locate(path_or_name).read_text(encoding="utf-8")


def load_resolved(path_or_name: str, overrides: list[str] | None = None) -> Recipe:
    """A recipe with every default of its conversion's method filled in."""
    recipe = config.load(path_or_name, overrides)
    return recipe.model_copy(update={"conversion": recipe.conversion.resolve()})


def cp(name: str, destination: str | Path) -> Path:
    """Copy a recipe to a new file (or into a folder) and return its path.

    Raises:
        UserError: there is no such recipe, or the destination exists already.
    """
    source, target = recipe_io.locate(name), Path(destination)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise UserError(str(target), "it exists already", "Choose another name; nothing was overwritten.")
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, beside)
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise SupraError(
            str(target), f"cannot be written ({error.strerror})", "Choose another place."
        ) from None
    return target


def validate(path_or_name: str, overrides: list[str] | None = None) -> Recipe:
    """The checked recipe.

    Raises:
        UserError: with every problem found.
    """
    return config.load(path_or_name, overrides)
