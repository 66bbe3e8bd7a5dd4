"""The HTML page: well-formed, self-contained, its text inert, its figures readable without seeing them."""

from __future__ import annotations

import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from supra_eval.page import write_page
from supra_eval.page.figures import draw_curves, draw_grids, inline_svg
from supra_eval.results import Curve, EvalRun, Grid, Score

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}
EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Every element with its attributes and the text within; fails where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1
        if tag not in VOID:
            self.open.append((tag, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        opened, texts = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        self.texts.append((tag, "".join(texts)))
        if self.open:
            self.open[-1][1].extend(texts)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1][1].append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text_of(self, tag: str) -> list[str]:
        return [" ".join(text.split()) for name, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    models = ("teacher", "student", EVIL)
    scores = [
        Score(task, "acc", model, value, 0.02, 100, 512, True, 0.25)
        for task in ("arc", EVIL)
        for model, value in zip(models, (0.5, 0.4, 0.3), strict=True)
    ]
    curves = [
        Curve(
            "perplexity", model, "context", EVIL, [128.0, 256.0, 512.0], [9.0, math.nan, 8.0], [0.1, 0.1, 0.1]
        )
        for model in models
    ]
    grids = [
        Grid("needle", m, "context", "depth", [1.0, 2.0], [0.0, 100.0], [[1.0, None], [0.5, 0.25]])
        for m in models
    ]
    run = EvalRun(
        "length", f"runs/{EVIL}", "llama", 0, {EVIL: EVIL}, {EVIL: EVIL}, scores, curves, grids, {EVIL: EVIL},
        f"name: {EVIL}\n", 5.0, f"supra {EVIL}", {EVIL: EVIL},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("page")
    paths = write_page([(Path(f"e/{EVIL}"), run)], folder, title=EVIL)
    return paths.html.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_nothing_comes_from_elsewhere_and_nothing_runs(source: str, page: Page) -> None:
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", source.replace(EVIL, ""))
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "img", "iframe", "object", "image", "foreignobject"}
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")


def test_a_path_with_a_script_in_it_is_shown_as_text(page: Page) -> None:
    assert page.text_of("h1") == [EVIL]
    assert page.text_of("title") == [EVIL]
    assert f"supra {EVIL}" in page.text_of("code")
    assert any(text.startswith(EVIL) for text in page.text_of("th"))
    assert any(EVIL in text for text in page.text_of("li"))


def test_ids_are_unique_and_every_reference_has_its_target(source: str, page: Page) -> None:
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert max(ids.values()) == 1
    wanted = {(a.get("href") or "")[1:] for _, a in page.elements if "href" in a}
    wanted |= {a["aria-labelledby"] or "" for _, a in page.elements if "aria-labelledby" in a}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", source))
    assert wanted <= set(ids)
    assert len(wanted) > 5


def test_tables_have_captions_scopes_and_whole_rows(page: Page) -> None:
    tables = page.named("table")
    assert len(page.text_of("caption")) == len(tables) == 6  # scores, models, four figures' values
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.named("th"))
    # task, context, three models, recovery, chance, samples; two tasks and their average
    assert page.rows[:4] == [8, 8, 8, 8]
    boxes = [a for a in page.named("div") if a.get("class") == "scroll"]
    assert len(boxes) == len(tables)
    assert all(a["role"] == "region" and a["aria-label"] and a["tabindex"] == "0" for a in boxes)


def test_figures_say_what_they_show(page: Page) -> None:
    labels = [a["aria-label"] or "" for a in page.named("div") if a.get("role") == "img"]
    assert len(labels) == len(page.named("svg")) == len(page.named("figure")) == 4
    assert "teacher: 9 at 128, 8 at 512" in labels[0]
    assert labels[1] == "needle, teacher: heat map over context and depth, from 0.25 to 1."
    assert f"perplexity: {EVIL}" in page.text_of("caption")
    assert all("viewbox" in a and "width" not in a and "height" not in a for a in page.named("svg"))


def test_the_page_is_for_phones_and_for_both_colour_schemes(source: str, page: Page) -> None:
    viewport = [a["content"] for a in page.named("meta") if a.get("name") == "viewport"]
    assert viewport == ["width=device-width, initial-scale=1"]
    assert "prefers-color-scheme: dark" in source
    assert "@media print" in source
    assert page.named("html") == [{"lang": "en"}]
    style = source.split("<style>")[1].split("</style>")[0]
    print_style = style.index("@media print")
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)rem", style[:print_style])]
    assert min(sizes) * 16 >= 15
    assert "#010203" not in source
    assert "currentColor" in source


def test_the_same_curves_give_the_same_drawing() -> None:
    curve = Curve("loss", "student", "x", "y", [1.0, 2.0], [3.0, 4.0])
    first, second = (
        draw_curves("length", ("loss", "x", "y"), [("student", "student", curve)]) for _ in range(2)
    )
    assert (first.svg, first.png) == (second.svg, second.png)
    assert first.rows == (("1", "3"), ("2", "4"))


def test_awkward_labels_and_values_are_drawn() -> None:
    lines = [
        ("student", label, Curve("n", label, "$x", "y", x, y))
        for label, x, y in (("_hidden", [0.0], [1.0]), ("$\\bad$", [], []), ("<&>", [5.0], [math.inf]))
    ]
    figure = draw_curves("length", ("n", "$x", "y"), lines)
    assert all(text in figure.svg for text in ("_hidden", "$\\bad$", "&lt;&amp;&gt;"))
    Page(figure.svg)
    assert "_hidden: 1 at 0;" in figure.alt
    long = "bytes: the largest resident memory of the whole process, weights included"
    curve = Curve("n", "m", "x", long, [1.0, 2.0], [1.1e9, 1.2e9])
    figure = draw_curves("length", ("n", "x", long), [("student", "m", curve)])
    assert "1e9" not in figure.svg  # no power of ten beside an axis
    assert long in figure.alt
    grid = Grid("g", "m", "x", "y", [1.0, 2.0], [1.0], [[None, None]])
    (empty,) = draw_grids("length", ("g", "x", "y"), [("m", grid)])
    assert "no value" in empty.alt


def test_an_inline_drawing_keeps_its_references() -> None:
    svg = '<?xml?><!DOCTYPE svg><svg xmlns:xlink="http://a" xmlns="http://b" width="1pt" height="2pt" '
    svg += 'viewBox="0 0 1 2"><metadata>http://c</metadata><g id="a">'
    svg += '<use xlink:href="#a" clip-path="url(#a)" style="fill: #010203"/></g></svg>'
    assert inline_svg(svg, "p") == (
        '<svg aria-hidden="true" viewBox="0 0 1 2"><g id="p-a">'
        '<use href="#p-a" clip-path="url(#p-a)" style="fill: currentColor"/></g></svg>'
    )
