"""What commands print: results on stdout, chatter on stderr."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on stdout.")]


def say(text: str) -> None:
    """Chatter goes to stderr, so that stdout holds results only."""
    typer.echo(text, err=True)


def show(renderable: Any, *, on_stdout: bool = True) -> None:
    """Print a rich renderable at the terminal's width, or at 100 columns into a file."""
    from rich.console import Console

    console = Console(stderr=not on_stdout, width=None if sys.stdout.isatty() else 100)
    console.print(renderable)
