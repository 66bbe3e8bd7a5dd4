"""Writing the HTML page, the Markdown page and its figures, each beside and then renamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from supra.errors import SupraError, UserError
from supra.train.run_folder import write_whole
from supra_eval.results import EvalRun

from .html import render_html
from .markdown import render_markdown
from .view import make_page

NAME = "report"
MARK = '<meta name="generator" content="supra report">'


@dataclass(frozen=True)
class PagePaths:
    """The two pages that were written."""

    html: Path
    markdown: Path


def write_page(runs: Sequence[tuple[Path, EvalRun]], folder: Path, title: str | None = None) -> PagePaths:
    """Write report.html, report.md and the latter's figures (PNG) into `folder`, each beside, then renamed.

    `runs` are results and where they were read from; the later of two results for the same thing is shown.

    Raises:
        UserError: there is no run, or `folder` holds a report.md that was not written here (a demo's).
        SupraError: a file cannot be written, or there are curves and matplotlib is not installed.
    """
    if not runs:
        raise UserError(
            "the page", "has no run to show", "Name at least one folder that `supra eval -o` wrote"
        )
    paths = PagePaths(folder / f"{NAME}.html", folder / f"{NAME}.md")
    if paths.markdown.exists() and not paths.html.exists():
        raise UserError(
            str(paths.markdown), "is there already, and not this page's", "Choose another place with -o"
        )
    if paths.html.exists() and MARK not in paths.html.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            str(paths.html), "is there already, and not this page", "Choose another place with -o"
        )
    page = make_page(runs, title)
    figures = [figure for section in page.sections for figure in section.figures]
    names = {figure.slug: f"{NAME}-{figure.slug}.png" for figure in figures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            write_whole(folder / names[figure.slug], figure.png)
        write_whole(paths.html, render_html(page))
        write_whole(paths.markdown, render_markdown(page, names))
    except OSError as error:
        raise SupraError(
            str(error.filename or folder),
            f"cannot be written ({error.strerror or error})",
            "Choose another place with -o",
        ) from error
    return paths
