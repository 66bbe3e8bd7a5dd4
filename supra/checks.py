"""What a command checks before it loads torch: so a mistake is answered at once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SupraError, UserError

DTYPES = ("float32", "bfloat16", "float16")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt text.

    Raises:
        UserError: both or neither given, a file that is missing or no UTF-8 text, or an empty prompt.
    """
    if (prompt is None) == (file is None):
        raise UserError(
            "the prompt", "give exactly one of PROMPT and --file", "PROMPT may be - to read stdin"
        )
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                str(file), f"is not UTF-8 text ({error.reason})", "Convert it to UTF-8"
            ) from error
        except OSError as error:
            raise UserError(str(file), error.strerror or str(error), "Give a readable text file") from error
    else:
        text = _read_stdin() if prompt == "-" else str(prompt)
    if not text:
        raise UserError("the prompt", "is empty", "Give at least one token of text")
    return text


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError("stdin", f"is not UTF-8 text ({error.reason})", "Convert it to UTF-8") from error


def require_dtype(dtype: str) -> None:
    """Raise a UserError unless `dtype` names one that models run in."""
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}", "is unknown", f"Choose one of {', '.join(DTYPES)}")


def require_model_folder(path: Path) -> None:
    """Raise a UserError unless `path` is a folder with a config.json."""
    if not path.exists():
        raise UserError(
            str(path), "does not exist", "Give the folder that `supra convert` or `supra train` wrote"
        )
    if not path.is_dir():
        raise UserError(
            str(path), "is a file, not a model folder", "Give the folder; convert a .gguf file first"
        )
    if not (path / "config.json").is_file():
        raise UserError(
            str(path),
            "has no config.json, so it is no model folder",
            "Give the folder that holds config.json",
        )


def require_matplotlib() -> Any:
    """matplotlib, drawing to files only.

    Raises:
        SupraError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SupraError(
            "plots", "matplotlib is not installed", "Run: pip install 'supra-lm[plots]'"
        ) from error
    matplotlib.use("Agg")
    return matplotlib


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise a UserError that names the first value out of range."""
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "repetition_penalty": (self.repetition_penalty > 0, "more than 0"),
        }
        for name, (fits, allowed) in ranges.items():
            if not fits:
                option = name.replace("_", "-")
                raise UserError(
                    f"--{option} {getattr(self, name)}", "is out of range", f"Use a value {allowed}"
                )
