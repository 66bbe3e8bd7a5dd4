"""The README's file tree names every source file, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_every_command_is_known() -> None:
    from typer.main import get_command

    from supra.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"^supra (\w+)", README, flags=re.MULTILINE))
    assert used <= known
    assert len(used) >= 5
