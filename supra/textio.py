"""Reading a prompt from the argument, a file or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from .errors import UserError


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt text.

    Raises:
        UserError: both or neither given, a file that is missing or no UTF-8 text, or an empty prompt.
    """
    if (prompt is None) == (file is None):
        raise UserError("the prompt", "give exactly one of PROMPT and --file", "PROMPT may be - to read stdin")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(str(file), f"is not UTF-8 text ({error.reason})", "Convert it to UTF-8") from error
        except OSError as error:
            raise UserError(str(file), error.strerror or str(error), "Give a readable text file") from error
    else:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
    if not text:
        raise UserError("the prompt", "is empty", "Give at least one token of text")
    return text
