"""Reads the articles of a MediaWiki dump (`*-pages-articles*.xml[.bz2]`), as Wikipedia publishes its text."""

import bz2
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from supra.errors import UserError

_NO_PROSE = re.compile(r"^(file|image|category|media|[a-z]{2,3}(-[a-z]+)?):", re.IGNORECASE)
# Lists of links and sources stand after the prose, under one of these.
_BACK_MATTER = re.compile(
    r"\n==\s*(see also|notes|notes and references|footnotes|references|citations|sources|bibliography|further reading|"
    r"external links)\s*==\s*\n",
    re.IGNORECASE,
)


def read_articles(path: Path, first: int = 0) -> Iterator[dict[str, str]]:
    """The articles of a dump from number `first` on as `{"title", "text"}`: no redirects, no talk, and prose alone.

    Memory holds one page at a time; wikitext before `first` is not parsed.

    Raises:
        UserError: it is no such dump, it is cut off, or mwparserfromhell is not installed.
    """
    parser = _wikitext_parser(path)
    number, found = 0, False
    try:
        for page in _pages(path):
            fields = {child.tag.rpartition("}")[2]: child for child in page.iter()}
            found = True
            if fields["ns"].text != "0" or "redirect" in fields:
                continue
            if number >= first:
                text = _prose(parser, fields["text"].text or "")
                yield {"title": fields["title"].text or "", "text": text}
            number += 1
    except (ElementTree.ParseError, EOFError, KeyError) as error:
        reason = f"is no whole MediaWiki dump ({error or type(error).__name__})"
        raise UserError(
            str(path), reason, "Name a *-pages-articles*.xml or .xml.bz2, and download it whole."
        ) from None
    except OSError as error:  # bz2's word for "not compressed" as well
        raise UserError(
            str(path), f"cannot be read ({error})", "Check the file and its permissions."
        ) from None
    if not found:
        raise UserError(
            str(path), "holds no article", "Name a MediaWiki dump: *-pages-articles*.xml or .xml.bz2."
        )


def _pages(path: Path) -> Iterator[ElementTree.Element]:
    with bz2.open(path) if path.suffix == ".bz2" else open(path, "rb") as stream:
        events = ElementTree.iterparse(stream, events=("start", "end"))
        _, root = next(events)
        for event, element in events:
            if event == "end" and element.tag.rpartition("}")[2] == "page":
                yield element
                root.clear()  # else the emptied pages of a whole Wikipedia pile up under it


def _wikitext_parser(path: Path) -> Any:
    try:
        import mwparserfromhell
    except ImportError:
        raise UserError(
            str(path),
            "reading wikitext needs mwparserfromhell, which is not installed",
            "Run: pip install mwparserfromhell",
        ) from None
    return mwparserfromhell


def _prose(parser: Any, wikitext: str) -> str:
    """Paragraphs and headings of an article, without tables, references, pictures and what stands after the prose."""
    code = parser.parse(_BACK_MATTER.split(wikitext, maxsplit=1)[0])
    for link in code.filter_wikilinks():
        if _NO_PROSE.match(str(link.title).strip()):
            _remove(code, link)
    for tag in code.filter_tags(
        matches=lambda tag: str(tag.tag).lower() in ("ref", "table", "gallery", "math")
    ):
        _remove(code, tag)
    text = code.strip_code(keep_template_params=False)
    paragraphs = (re.sub(r"[ \t]+", " ", line).strip() for line in text.split("\n"))
    return "\n\n".join(line for line in paragraphs if line)


def _remove(code: Any, node: Any) -> None:
    with contextlib.suppress(ValueError):  # it went with the node around it
        code.remove(node)
