"""`supra recipes`: list, show, copy and check recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import Json, say
from .errors import UserError

recipes_app = typer.Typer(no_args_is_help=True, help="List, show, copy and check recipes.")


@recipes_app.command("ls")
def recipes_ls(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from . import recipes

    rows = recipes.ls()
    if as_json:
        typer.echo(json.dumps([{"name": row.name, "description": row.description} for row in rows]))
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        typer.echo(f"{row.name:<{width}}  {row.description.strip().splitlines()[0]}")
    say("next: supra recipes show NAME")


@recipes_app.command("show")
def recipes_show(
    name: str,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change a field first.")] = None,
    as_json: Json = False,
) -> None:
    """Print a recipe; as JSON with every default filled in."""
    from . import recipes

    if as_json:
        typer.echo(json.dumps(recipes.load_resolved(name, overrides).model_dump(mode="json")))
        return
    typer.echo(recipes.show(name, overrides).rstrip("\n"))
    say(f"next: supra recipes cp {name} my.yaml")


@recipes_app.command("cp")
def recipes_cp(name: str, target: Path) -> None:
    """Copy a recipe to change it."""
    from . import recipes

    copied = recipes.cp(name, target)
    typer.echo(str(copied))
    say(f"next: edit it, then: supra recipes validate {copied}")


@recipes_app.command("validate")
def recipes_validate(
    path: str,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change a field first.")] = None,
    as_json: Json = False,
) -> None:
    """Check a recipe; every error is named at once, with --json as a list of path, value and reason."""
    from . import config
    from .recipe_io import Problem, RecipeError

    try:
        loaded = config.load(path, overrides or [])
    except UserError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, RecipeError) else [Problem("", "", error.reason)]
        found = [problem._asdict() for problem in problems]
        typer.echo(json.dumps({"recipe": path, "valid": False, "problems": found}))
        raise typer.Exit(error.exit_code) from None
    if as_json:
        typer.echo(json.dumps({"recipe": path, "valid": True, "problems": [], "hash": loaded.hash()}))
        return
    typer.echo(f"{path}: {len(loaded.stages)} stages, valid")
    say(f"next: supra train {path} --model MODEL --dry-run")
