"""The page as one HTML file that needs nothing else: no script, no style sheet, no picture from elsewhere."""

from __future__ import annotations

import re
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from .view import Page


def render_html(page: Page) -> str:
    """The HTML text; everything that comes from a run is escaped, but for the figures drawn here."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page, safe_svg=Markup, breakable=_breakable) + "\n"


def _breakable(text: str) -> Markup:
    """Escaped text that may be broken behind an underscore or a slash, as no browser does by itself."""
    return Markup(re.sub(r"([_/])", r"\1<wbr>", str(escape(text))))
