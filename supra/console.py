"""What commands share: their common options, results on stdout, chatter on stderr."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

Device = Annotated[str, typer.Option(help="auto, cpu or cuda[:N].")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Backend = Annotated[str, typer.Option(help="Kernel backend: auto, torch, triton, fla or reference.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on stdout.")]


def set_threads(threads: int) -> None:
    """Fix torch's thread count before any work."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def speaks() -> bool:
    """Whether this process is the one of a multi-process launch that prints; alone it is."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Chatter goes to stderr, so that stdout holds results only."""
    if speaks():
        typer.echo(text, err=True)


def show(renderable: Any, *, on_stdout: bool = True) -> None:
    """Print a rich renderable at the terminal's width, or at 100 columns into a file."""
    from rich.console import Console

    console = Console(stderr=not on_stdout, width=None if sys.stdout.isatty() else 100)
    console.print(renderable)
