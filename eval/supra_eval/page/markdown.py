"""The page as GitHub-flavoured Markdown, with its figures as PNG files beside it."""

from __future__ import annotations

import html
import re

from .tables import Cell, Table
from .view import Page


def render_markdown(page: Page, picture_names: dict[str, str]) -> str:
    """The Markdown text; `picture_names` maps a figure's slug to its file's name."""
    lines = [f"# {plain(page.title)}", "", plain(page.summary), ""]
    if page.failures:
        lines += ["## Failed", ""]
        for failure in page.failures:
            mended = f" (a result is in {plain(failure.elsewhere)})" if failure.elsewhere else ""
            where = f"{plain(failure.kind)}, {plain(failure.run)}"
            lines.append(f"- **{plain(failure.task)}** ({where}): {plain(failure.reason)}{mended}")
        lines.append("")
    for section in page.sections:
        lines += [f"## {plain(section.title)}", ""]
        if section.table:
            lines += [*table_lines(section.table), ""]
        lines += [f"- {plain(note)}" for note in section.notes] + [""] * bool(section.notes)
        for figure in section.figures:
            picture = f"![{plain(figure.alt)}]({picture_names[figure.slug]})"
            lines += [f"### {plain(figure.title)}", "", picture, ""]
    lines += ["## How it was measured", "", "| models | weights |", "| --- | --- |"]
    lines += [_line([plain(model.labels), plain(model.folder)]) for model in page.models]
    lines.append("")
    for run in page.runs:
        lines += [
            f"### {plain(run.label)}: {plain(dict(run.facts)['kind'])}",
            "",
            *fenced(run.command, "sh"),
            "",
        ]
        lines += [f"- {name}: {plain(value)}" for name, value in run.facts if name != "kind"] + [""]
    for names, text in page.recipes:
        lines += [
            "<details>",
            f"<summary>Recipe of {html.escape(names)}</summary>",
            "",
            *fenced(text, "yaml"),
            "",
        ]
        lines += ["</details>", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def table_lines(table: Table) -> list[str]:
    """A table's lines; its caption is left to the heading above it."""
    header = ["task", "metric", *["context (tokens)"] * table.has_context, *table.columns]
    header += [f"recovery: {name}" for name in table.recovery_of]
    header += ["chance"] * table.has_chance + ["samples"] * table.has_samples
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    lines = [_line([plain(name) for name in header]), _line(rule)]
    for row in table.rows:
        task = f"*{plain(row.task)}*" if row.is_average else plain(row.task)
        cells = [task, plain(row.metric), *[row.context] * table.has_context, *map(_shown, row.cells)]
        cells += [*row.recovery, *[row.chance] * table.has_chance, *[row.samples] * table.has_samples]
        lines.append(_line(cells))
    return lines


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line; `<` is escaped, so no HTML can come of it."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*\[\]<>|~&])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)  # inside a word it means nothing
    return re.sub(r"^(\d*)([-+=#.)])", r"\1\\\2", text)  # a list's, a heading's or a rule's beginning


def fenced(text: str, language: str) -> list[str]:
    """A code block whose fence is longer than any run of backticks within."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text.rstrip("\n"), fence]


def _shown(cell: Cell) -> str:
    text = f"{cell.text} ± {cell.error}" if cell.error else cell.text
    return f"**{text}**" if cell.best else text


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
