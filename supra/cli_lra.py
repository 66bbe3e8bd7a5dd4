"""`supra lra`: Long Range Arena's tasks, and small ones of their kind that are generated here."""

from __future__ import annotations

import typer

from .cli_lra_data import data_app

lra_app = typer.Typer(no_args_is_help=True, help="Long-range classification tasks: their data.")
lra_app.add_typer(data_app, name="data")
