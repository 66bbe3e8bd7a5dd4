"""What a `supra` command line in a text would be taken for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.run import get_args_parser
from typer.core import TyperGroup
from typer.main import get_command

from supra.cli import app

Parse = Callable[[list[str]], tuple[str, dict[str, Any]]]


@pytest.fixture
def parse() -> Parse:
    """The name and the parameters of the `supra` command that these words give, under torchrun or not.

    Fails where there is no such command, or it has no such option.
    """
    return _parse


def _parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        assert (launch.module, launch.training_script) == (True, "supra"), words
        words = ["supra", *launch.training_script_args]
    assert words[0] == "supra", words
    command: Any = get_command(app)
    name, rest = "", words[1:]
    while isinstance(command, TyperGroup):
        context = command.make_context("supra", rest[:1], resilient_parsing=True)
        assert rest[0] in command.list_commands(context), words
        name, command, rest = f"{name} {rest[0]}".strip(), command.get_command(context, rest[0]), rest[1:]
    return name, command.make_context(name, rest).params
