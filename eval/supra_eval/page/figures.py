"""Plots for the page: each as an SVG that takes its colours from the page around it, and as a PNG.

An SVG is 360 units wide with letters of 16: on a phone they are as large as the text beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from supra.checks import require_matplotlib
from supra_eval.results import Curve, Grid

from .merge import PlotKey
from .tables import unit_of

INK = "#010203"  # becomes `currentColor`, so that it is light on a dark page
COLOURS = {
    "teacher": "#8a8f98",
    "teacher_yarn": "#0891b2",
    "student": "#d9480f",
    "window_only": "#3b82f6",
    "linear_only": "#16a34a",
    "untrained": "#a855f7",
}
FURTHER_COLOURS = ("#d97706", "#db2777", "#65a30d", "#6366f1", "#b45309")
MARKERS = "osD^vPX*<>"
MOST_MARKERS = 40  # points of a curve, beyond which it is a plain line
LOG_FACTOR = 50  # y is logarithmic where its values span more than this
_WIDTH, _HEIGHT, _LEGEND_LINE, _DPI = 5.0, 3.6, 0.3, 144
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif", "font.size": 16,
    "axes.labelsize": 16, "xtick.labelsize": 16, "ytick.labelsize": 16, "legend.fontsize": 16,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "axes.unicode_minus": False,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One plot: `svg` for an HTML page, `png` as a file, `alt` in words, and `header` and `rows` as a table."""

    title: str
    slug: str
    alt: str
    svg: str
    png: bytes
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def draw_curves(kind: str, key: PlotKey, lines: Sequence[tuple[str, str, Curve]]) -> Figure:
    """Every model's curve of one name in one plot, with bands of one standard error; `lines` holds role, label, curve.

    Raises:
        SupraError: matplotlib is not installed.
    """
    name, x_label, y_label = key
    colours = _colours([role for role, _, _ in lines])
    columns = 2 if max(len(label) for _, label, _ in lines) <= 12 else 1
    legend_lines = math.ceil(len(lines) / columns)
    with _style():
        figure, axes = _axes(_HEIGHT + _LEGEND_LINE * legend_lines)
        handles, xs, ys = [], set[float](), []
        for i, (_, _, curve) in enumerate(lines):
            x, y = _numbers(curve.x), _numbers(curve.y)
            marker = MARKERS[i % len(MARKERS)] if len(x) <= MOST_MARKERS else ""
            (line,) = axes.plot(x, y, marker=marker, color=colours[i], linewidth=2)
            if curve.stderr is not None:
                errors = _numbers(curve.stderr)
                low = [value - error for value, error in zip(y, errors, strict=True)]
                high = [value + error for value, error in zip(y, errors, strict=True)]
                axes.fill_between(x, low, high, color=colours[i], alpha=0.2, linewidth=0)
            handles.append(line)
            xs |= {value for value in x if math.isfinite(value)}
            ys += [value for value in y if math.isfinite(value)]
        _mark(axes, [curve for _, _, curve in lines])
        _scale_x(axes, sorted(xs), any(curve.log_x for _, _, curve in lines))
        _scale_y(axes, ys, is_fraction=unit_of(kind, y_label).scale == 100)
        axes.set_xlabel(_wrapped(x_label, 34))
        axes.set_ylabel(_wrapped(y_label, 24))
        axes.grid(alpha=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        # A legend leaves out what begins with an underscore.
        labels = [f" {_short(label)}" if label.startswith("_") else _short(label) for _, label, _ in lines]
        figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, frameon=False, borderaxespad=0
        )
        slug = slug_of(kind, name, x_label, y_label)
        svg, png = _save(figure, slug)
    values = [dict(zip(_numbers(curve.x), _numbers(curve.y), strict=True)) for _, _, curve in lines]
    rows = tuple(
        (_number(x), *("–" if x not in own else _number(own[x]) for own in values)) for x in sorted(xs)
    )
    header = (x_label, *(label for _, label, _ in lines))
    ends = "; ".join(_in_words(label, curve) for _, label, curve in lines)
    alt = f"{name}: {y_label} against {x_label}. {ends}."
    return Figure(name, slug, alt, svg, png, f"{name}: {y_label}", header, rows)


def draw_grids(kind: str, key: PlotKey, grids: Sequence[tuple[str, Grid]]) -> list[Figure]:
    """A heat map for each model's grid of one name, all with one scale of colours; `grids` holds label and grid.

    Raises:
        SupraError: matplotlib is not installed.
    """
    every = [v for _, grid in grids for row in grid.values for v in _numbers(row) if math.isfinite(v)]
    if all(0 <= value <= 1 for value in every):
        low, high = 0.0, 1.0
    else:
        low, high = min(every), max(every)
    return [_draw_grid(kind, key, label, grid, low, high) for label, grid in grids]


def _draw_grid(kind: str, key: PlotKey, label: str, grid: Grid, low: float, high: float) -> Figure:
    name, x_label, y_label = key
    with _style() as matplotlib:
        figure, axes = _axes(_HEIGHT)
        columns, rows = len(grid.x), len(grid.y)
        cells = [_numbers(row) for row in grid.values]
        colours = matplotlib.colormaps["viridis"].resampled(32)  # from 50 on, the bar would be a bitmap
        mesh = axes.pcolormesh(
            range(columns + 1), range(rows + 1), cells, cmap=colours, vmin=low, vmax=high,
            edgecolors="face", linewidth=0.5,
        )  # fmt: skip
        axes.invert_yaxis()
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                if not math.isfinite(value):
                    axes.text(j + 0.5, i + 0.5, "–", ha="center", va="center")
        for axis, values in ((axes.xaxis, grid.x), (axes.yaxis, grid.y)):
            shown = _spread(list(range(len(values))), 4 if axis is axes.xaxis else 6)
            axis.set_ticks([index + 0.5 for index in shown], [_number(values[index]) for index in shown])
        axes.set_xlabel(_wrapped(x_label, 34))
        axes.set_ylabel(_wrapped(y_label, 24))
        bar = figure.colorbar(mesh, ax=axes, pad=0.03, fraction=0.08)
        bar.outline.set_visible(False)
        bar.solids.set_edgecolor("face")  # or fine lines show between the colours
        slug = slug_of(kind, name, label, x_label, y_label)
        svg, png = _save(figure, slug)
    known = [value for row in cells for value in row if math.isfinite(value)]
    words = f"from {_number(min(known))} to {_number(max(known))}" if known else "no value"
    table = tuple((_number(y), *map(_number, row)) for y, row in zip(grid.y, cells, strict=True))
    header = (f"{y_label} \\ {x_label}", *map(_number, grid.x))
    alt = f"{name}, {label}: heat map over {x_label} and {y_label}, {words}."
    title = f"{name}: {label}"
    return Figure(title, slug, alt, svg, png, title, header, table)


@contextlib.contextmanager
def _style() -> Iterator[Any]:
    """matplotlib, with the page's style for as long as this is open."""
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(_STYLE):
        yield matplotlib


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure as Canvas  # not pyplot: no window, and nothing kept when it is done

    figure = Canvas(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, slug: str) -> tuple[str, bytes]:
    import matplotlib

    drawn, picture = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": slug}):  # the same figure gives the same file
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    figure.savefig(picture, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return inline_svg(drawn.getvalue(), slug), picture.getvalue()


def inline_svg(svg: str, prefix: str) -> str:
    """An SVG file's text as an element of an HTML page: no header, no URL, its own ids, the page's ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg, count=2).replace("xlink:href", "href")
    svg = re.sub(r'(<[^>]* )id="', rf'\1id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    # Its size is the page's to choose; the viewBox stays.
    svg = re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    return svg.replace(INK, "currentColor").replace("<svg", '<svg aria-hidden="true"', 1).strip()


def _scale_x(axes: Any, xs: list[float], logarithmic: bool) -> None:
    if logarithmic and xs and xs[0] > 0:
        axes.set_xscale("log", base=2)
        shown = _spread(xs, 4)
        axes.set_xticks(shown, [_number(x) for x in shown])
        axes.set_xticks([], minor=True)
    else:
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: _number(value))


def _scale_y(axes: Any, ys: list[float], is_fraction: bool) -> None:
    """From 0 to 1 for fractions, logarithmic for what spans orders of magnitude, no power of ten beside the axis."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    if is_fraction and all(0 <= y <= 1 for y in ys):
        axes.set_ylim(-0.03, 1.03)
    elif ys and min(ys) > 0 and max(ys) / min(ys) > LOG_FACTOR:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(EngFormatter(sep="") if max(ys) >= 1e6 else lambda y, _: _number(y))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif ys and max(map(abs, ys)) >= 1e6:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)


def _mark(axes: Any, curves: Sequence[Curve]) -> None:
    """A dotted line with its name at each place that any of the curves marks."""
    for name, x in dict.fromkeys(mark for curve in curves for mark in (curve.marks or {}).items()):
        axes.axvline(x, color=INK, alpha=0.4, linewidth=1, linestyle=":")
        axes.annotate(_short(name, 14), (x, 1), xycoords=("data", "axes fraction"), va="bottom", fontsize=12)


def _spread(values: list[Any], most: int) -> list[Any]:
    """The first value and every n-th after it, so that there are at most `most`."""
    return values[:: max(1, math.ceil((len(values) - 1) / (most - 1)))]


def _colours(roles: list[str]) -> list[str]:
    """The role's own colour for its first model, further ones for all others."""
    used: set[str] = set()
    spare = iter(FURTHER_COLOURS * (len(roles) // len(FURTHER_COLOURS) + 1))
    colours = []
    for role in roles:
        own = COLOURS.get(role)
        colours.append(next(spare) if own is None or own in used else own)
        used.add(colours[-1])
    return colours


def _numbers(values: Sequence[float | None]) -> list[float]:
    """A number that was not finite was written as null: it leaves a gap."""
    return [math.nan if value is None or not math.isfinite(value) else float(value) for value in values]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:,.4g}"


def _in_words(label: str, curve: Curve) -> str:
    points = [
        (x, y) for x, y in zip(_numbers(curve.x), _numbers(curve.y), strict=True) if math.isfinite(x + y)
    ]
    if not points:
        return f"{label}: no value"
    ends = dict.fromkeys([points[0], points[-1]])
    return f"{label}: " + ", ".join(f"{_number(y)} at {_number(x)}" for x, y in ends)


def _wrapped(text: str, width: int) -> str:
    """An axis's label on at most two lines; the figure's table has it whole."""
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …"))


def _short(text: str, most: int = 34) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"


def slug_of(*parts: str) -> str:
    """A file's and an element's name: what can be read of the first two parts, and a hash of all."""
    plain = re.sub(r"[^a-z0-9]+", "-", " ".join(parts[:2]).lower()).strip("-")[:40].strip("-")
    return f"{plain or 'figure'}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:6]}"
