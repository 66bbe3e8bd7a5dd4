"""The README's file tree names every source file, and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_names_every_file() -> None:
    folders = ("supra", "kernels", "eval", "recipes", "docs")
    files = [
        p
        for folder in folders
        for p in (ROOT / folder).rglob("*")
        if p.suffix in (".py", ".sh", ".yaml", ".md")
    ]
    missing = [str(p.relative_to(ROOT)) for p in files if f"{p.relative_to(ROOT)}" not in README]
    assert not missing, "write one line on each"


def test_no_file_in_the_tree_is_gone() -> None:
    named = re.findall(r"^\| `([\w./-]+)` \|", README.split("## Files")[1], flags=re.MULTILINE)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    assert [picture for picture in pictures if not (ROOT / picture).exists()] == []


def test_every_command_line_can_be_given(parse: Any) -> None:
    text = f"{README}\n{(ROOT / 'eval/README.md').read_text(encoding='utf-8')}".replace("\\\n", " ")
    lines = re.findall(r"^ *(?:[A-Z_]+=\S+ )*((?:supra|torchrun) .*)", text, flags=re.MULTILINE)
    used = {parse(shlex.split(line, comments=True))[0] for line in lines}
    assert {
        "convert",
        "train",
        "eval",
        "report",
        "generate",
        "recipes show",
        "lra run",
        "lra data chain",
        "extrapolate",
    } <= used


def test_every_launch_file_is_named_as_it_is_used() -> None:
    used = set(re.findall(r"recipes/launch/[\w-]+\.sh(?= \S+ \S+ \S+)", README))
    assert used == {str(path.relative_to(ROOT)) for path in (ROOT / "recipes/launch").iterdir()}
