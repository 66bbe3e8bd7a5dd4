"""`python -m supra` is the `supra` command."""

from .cli import main

main()
