"""Articles of a MediaWiki dump: what is prose and what is left out, and files that are no whole dump."""

import bz2
import sys
import tracemalloc
from pathlib import Path

import pytest

from supra.config import Data
from supra.errors import UserError
from supra.train import mediawiki
from supra.train.documents import read_documents, read_rows
from supra.train.sources import find_sources

ARTICLE = """{{Infobox|name=Albedo}}
[[File:Moon.jpg|thumb|The [[Moon]] at night]]
'''Albedo''' is the {{convert|1|m}} reflecting [[power (physics)|power]] of a surface.<ref>A book, page 3</ref>

{| class="wikitable"
! Ice || 0.6
|}
== Snow ==
Snow is ''bright''.
== See also ==
* [[Whiteness]]
[[Category:Light]]
"""


def page(title: str, text: str, ns: int = 0, more: str = "") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f"<page><title>{title}</title><ns>{ns}</ns>{more}<revision><text>{escaped}</text></revision></page>"
    )


def dump(*pages: str) -> bytes:
    namespace = 'xmlns="http://www.mediawiki.org/xml/export-0.10/"'
    return f"<mediawiki {namespace}>{''.join(pages)}</mediawiki>".encode()


def documents(path: Path, **options: object) -> list[str]:
    data = Data(train=(str(path),), **options)  # type: ignore[arg-type]
    (source,), _ = find_sources(data)
    return list(read_documents(source, data))


@pytest.mark.parametrize("name", ["pages-articles.xml", "pages-articles.xml.bz2"])
def test_prose_of_articles(tmp_path: Path, name: str) -> None:
    whole = dump(
        page("Light", "#REDIRECT [[Albedo]]", more='<redirect title="Albedo" />'),
        page("Albedo", ARTICLE),
        page("Talk:Albedo", "I disagree.", ns=1),
        page("Ice", "Ice is cold & hard."),
    )
    path = tmp_path / name
    path.write_bytes(bz2.compress(whole) if name.endswith("bz2") else whole)
    assert documents(path) == [
        "Albedo is the reflecting power of a surface.\n\nSnow\n\nSnow is bright.",
        "Ice is cold & hard.",
    ]
    assert documents(path, text_field="title") == ["Albedo", "Ice"]


def test_a_name_without_xml_is_read_when_the_format_is_given(tmp_path: Path) -> None:
    path = tmp_path / "articles.data"
    path.write_bytes(dump(page("Ice", "Cold.")))
    assert documents(path, format="mediawiki") == ["Cold."]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.xml.bz2", bz2.compress(dump(page("Ice", "Cold. " * 999)))[:-20], "is no whole MediaWiki dump"),
        ("cut.xml", dump(page("Ice", "Cold."))[:-9], "is no whole MediaWiki dump"),
        ("other.xml", b"<svg><path/></svg>", "holds no article"),
        ("odd.xml", b"<mediawiki><page><title>Ice</title></page></mediawiki>", "is no whole MediaWiki dump"),
        ("plain.bz2", b"Ice is cold.", "cannot be read"),
    ],
)
def test_no_whole_dump(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        documents(tmp_path / name)
    assert name in caught.value.thing


def test_the_parser_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.xml").write_bytes(dump(page("Ice", "Cold.")))
    monkeypatch.setitem(sys.modules, "mwparserfromhell", None)
    with pytest.raises(UserError, match="pip install mwparserfromhell"):
        documents(tmp_path / "a.xml")


def test_reading_on_from_an_article_parses_none_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.xml"
    talk = page("Talk:A", "No.", ns=1)
    path.write_bytes(dump(page("A", "First."), talk, page("B", "Second."), page("C", "Third.")))
    parsed: list[str] = []
    prose = mediawiki._prose
    monkeypatch.setattr(mediawiki, "_prose", lambda parser, text: parsed.append(text) or prose(parser, text))
    data = Data(train=(str(path),))
    rows = list(read_rows(find_sources(data)[0][0], data, first=1))
    assert [(row.number, row.value) for row in rows] == [(1, "Second."), (2, "Third.")]
    assert parsed == ["Second.", "Third."]


def test_memory_does_not_grow_with_the_number_of_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    redirect = page("R", "#REDIRECT [[A]]", more='<redirect title="A" />')
    peaks = []
    for count in (2_000, 20_000):
        path.write_bytes(dump(*[redirect] * count, page("A", "Text.")))
        tracemalloc.start()
        assert [article["title"] for article in mediawiki.read_articles(path)] == ["A"]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000  # ten times the pages; each took some 300 bytes while they piled up
