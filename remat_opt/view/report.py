"""Numbers to text, HTML and SVG: tables and two kinds of picture, from plain data only.

A ``Table`` shows itself as aligned text or as HTML, a ``Scatter`` (points and staircases)
and a ``Profile`` (memory over time) as SVG or as text. The text twin says what the picture
shows; it also goes into the SVG, for screen readers. The markup carries its style inline,
takes text colours from the page round it and fills with colours of middle brightness, so
that it is legible in light and dark notebooks. The same data give the same characters.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from remat_opt.units import format_bytes, format_share

_FONT = "font-family:system-ui,sans-serif;font-size:13px"
_CELL = "padding:2px 10px 2px 0;vertical-align:top;border:none;background:transparent"
_RULE = "border-bottom:1px solid rgba(128,128,128,0.5)"

#: One colour and one shape per series, so that neither is needed to tell them apart.
_COLORS = ("#2f81d8", "#d9731a", "#2a9d6f", "#b05cc6", "#c9475b", "#8a8a2b")
_SHAPES = ("circle", "square", "diamond", "triangle", "circle", "square")

_BLOCKS = "▁▂▃▄▅▆▇█"


def escape(text: str) -> str:
    """Text as it may stand in HTML, attributes included."""
    return html.escape(text, quote=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under headings.

    Attributes:
      headings: one per column.
      rows: the cells, as many in each row as there are headings.
      align: ``l`` or ``r`` for each column.
      title: stands above the table, or "".
      footer: stands below the table, or "".
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    title: str = ""
    footer: str = ""

    def __post_init__(self) -> None:
        widths = {len(self.headings), len(self.align), *map(len, self.rows)}
        if len(widths) != 1:
            raise ValueError(
                f"The table {self.title!r} has {len(self.headings)} headings, {len(self.align)} "
                f"alignments and rows of {sorted(set(map(len, self.rows)))} cells."
            )

    def text(self) -> str:
        """The table as aligned lines."""
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

        def line(cells: Sequence[str]) -> str:
            return "  ".join(
                cell.rjust(width) if side == "r" else cell.ljust(width)
                for cell, width, side in zip(cells, widths, self.align, strict=True)
            ).rstrip()

        rule = "  ".join("-" * width for width in widths)
        body = [line(self.headings), rule, *map(line, self.rows)]
        return "\n".join(filter(None, [self.title, *body, self.footer]))

    def html(self) -> str:
        """The table as an HTML element."""
        sides = ["right" if side == "r" else "left" for side in self.align]
        head = "".join(
            f'<th scope="col" style="{_CELL};{_RULE};text-align:{side}">{escape(cell)}</th>'
            for cell, side in zip(self.headings, sides, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{_CELL};text-align:{side};{_NUMERIC if side == "right" else _WRAP}">'
                f"{escape(cell)}</td>"
                for cell, side in zip(row, sides, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        caption = (
            f'<caption style="caption-side:top;text-align:left;font-weight:600;'
            f'padding:8px 0 4px;color:inherit">{escape(self.title)}</caption>'
            if self.title
            else ""
        )
        footer = f'<div style="opacity:0.75">{escape(self.footer)}</div>' if self.footer else ""
        return (
            f'<table style="{_FONT};border-collapse:collapse;border:none;margin:0;color:inherit">'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}"
        )


_NUMERIC = "white-space:nowrap;font-variant-numeric:tabular-nums"
_WRAP = "overflow-wrap:break-word"


def facts_text(facts: Sequence[tuple[str, str]]) -> str:
    """Pairs of a word and what is said of it, as aligned lines."""
    width = max((len(word) for word, _ in facts), default=0)
    return "\n".join(f"{word.ljust(width)}  {said}" for word, said in facts)


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Pairs of a word and what is said of it, as an HTML table without headings."""
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL};text-align:left;font-weight:400;opacity:0.75;'
        f'white-space:nowrap">{escape(word)}</th>'
        f'<td style="{_CELL};text-align:left">{escape(said)}</td></tr>'
        for word, said in facts
    )
    return (
        f'<table style="{_FONT};border-collapse:collapse;border:none;margin:0;color:inherit">'
        f"<tbody>{rows}</tbody></table>"
    )


def section(title: str, *parts: str) -> str:
    """HTML parts one below the other, under a title; what a notebook shows."""
    inside = "".join(f'<div style="margin:0 0 10px">{part}</div>' for part in parts if part)
    heading = f'<div style="font-size:15px;font-weight:600;margin:0 0 6px">{escape(title)}</div>'
    return f'<div style="{_FONT};line-height:1.4;color:inherit">{heading}{inside}</div>'


def page(title: str, body: str) -> str:
    """A whole HTML document around a part; follows the reader's choice of light or dark."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{max-width:80em;margin:2em auto;padding:0 1em}"
        f"</style></head><body>{body}</body></html>\n"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a picture.

    Attributes:
      title: what is shown along it.
      write: how an amount on it is written.
      tick: how a round amount along it is written.
      unit: ticks are round multiples of it, such as 1024**2 for MiB.
    """

    title: str
    write: Callable[[float], str]
    tick: Callable[[float], str]
    unit: float = 1.0


def steps_axis(title: str) -> Axis:
    """An axis of counted steps."""

    def write(amount: float) -> str:
        return f"{amount:.0f}"

    return Axis(title=title, write=write, tick=write)


def share_axis(title: str) -> Axis:
    """An axis of shares, 1.0 for all of it."""

    def tick(share: float) -> str:
        return f"{share * 100:.4g} %"

    return Axis(title=title, write=format_share, tick=tick, unit=0.01)


def bytes_axis(title: str, most: float) -> Axis:
    """An axis of bytes, with ticks that are round in the unit that ``most`` is written in.

    Args:
      title: what is shown along it, without a unit.
      most: the largest amount to show, in bytes.
    """
    power = 0
    while power < 5 and most >= 1024 ** (power + 1):
        power += 1
    name = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power]
    unit = float(1024**power)

    def write(amount: float) -> str:
        return format_bytes(round(amount))

    def tick(amount: float) -> str:
        return f"{amount / unit:.4g} {name}"

    return Axis(title=title, write=write, tick=tick, unit=unit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a scatter.

    Attributes:
      x: along the horizontal axis.
      y: along the vertical axis.
      label: its name.
    """

    x: float
    y: float
    label: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points that belong together.

    Attributes:
      label: their common name.
      points: in any order.
      staircase: whether they are alternatives to choose from: a line leads from each to the
        next one to the right, and their names are left out of the picture.
    """

    label: str
    points: tuple[Point, ...]
    staircase: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Points over two axes, both from zero.

    Attributes:
      title: what the picture shows.
      x: horizontal axis.
      y: vertical axis.
      series: at most six.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]

    def text(self) -> str:
        """The picture in words: its title and a line for each point."""
        rows = tuple(
            (series.label, point.label, self.x.write(point.x), self.y.write(point.y))
            for series in self.series
            for point in series.points
        )
        return Table(
            title=self.title,
            headings=("", "", self.x.title, self.y.title),
            rows=rows,
            align="llrr",
        ).text()

    def svg(self) -> str:
        """The picture as an SVG element."""
        points = [point for series in self.series for point in series.points]
        frame = _Frame(
            x=self.x,
            y=self.y,
            width=640,
            height=360,
            low=min([0.0, *(point.x for point in points)]),
            right=max((point.x for point in points), default=0.0),
            top=max((point.y for point in points), default=0.0),
        )
        taken: list[tuple[float, float, float]] = []
        parts = [frame.svg()]
        marks: list[str] = []
        for number, series in enumerate(self.series):
            color = _COLORS[number % len(_COLORS)]
            shape = _SHAPES[number % len(_SHAPES)]
            if series.staircase:
                parts.append(_staircase(frame, series, color))
            for point in sorted(series.points, key=lambda p: (p.x, p.y, p.label)):
                x, y = frame.across(point.x), frame.down(point.y)
                said = f"{point.label}: {self.y.write(point.y)}, {self.x.write(point.x)}"
                marks.append(_mark(shape, x, y, color, said))
                taken.append((x - 6, y, 12.0))
        names = [
            _name(frame, taken, frame.across(point.x), frame.down(point.y), point.label)
            for series in self.series
            if not series.staircase
            for point in sorted(series.points, key=lambda p: (p.y, p.x, p.label))
        ]
        keys = _legend([series.label for series in self.series], frame.left)
        return _svg(self.text(), self.title, 640, 360, "".join([*parts, *marks, *names, keys]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """An amount over the steps of a run.

    Attributes:
      title: what the picture shows.
      amounts: one per step.
      x: horizontal axis; its numbers are steps.
      y: vertical axis.
      levels: amounts to compare with, as (name, amount).
    """

    title: str
    amounts: tuple[float, ...]
    x: Axis
    y: Axis
    levels: tuple[tuple[str, float], ...] = ()

    def text(self) -> str:
        """The picture in one line of characters, and its highest point and levels in words."""
        if not self.amounts:
            return f"{self.title}: nothing to show."
        highest = max(self.amounts)
        columns = _thinned(self.amounts, 72)
        line = "".join(
            _BLOCKS[min(7, int(8 * amount / highest))] if highest else _BLOCKS[0]
            for amount in columns
        )
        return f"{self._caption()}\n{line}"

    def _caption(self) -> str:
        if not self.amounts:
            return f"{self.title}: nothing to show."
        highest = max(self.amounts)
        compared = "".join(f"; {name} {self.y.write(level)}" for name, level in self.levels)
        return (
            f"{self.title}: highest {self.y.write(highest)} at step "
            f"{self.amounts.index(highest) + 1} of {len(self.amounts)}{compared}"
        )

    def svg(self) -> str:
        """The picture as an SVG element."""
        width, height = 640, 240
        highest = max(self.amounts, default=0.0)
        frame = _Frame(
            x=self.x,
            y=self.y,
            width=width,
            height=height,
            low=0.0,
            right=float(max(len(self.amounts), 1)),
            top=max([highest, *(level for _, level in self.levels)]),
        )
        parts = [frame.svg()]
        if self.amounts:
            amounts = _thinned(self.amounts, 560)
            step = len(self.amounts) / len(amounts)
            corners = [f"M{_n(frame.across(0))},{_n(frame.down(0))}"]
            for number, amount in enumerate(amounts):
                corners.append(f"V{_n(frame.down(amount))}")
                corners.append(f"H{_n(frame.across((number + 1) * step))}")
            corners.append(f"V{_n(frame.down(0))}Z")
            parts.append(
                f'<path d="{"".join(corners)}" fill="{_COLORS[0]}" fill-opacity="0.35" '
                f'stroke="{_COLORS[0]}" stroke-width="1"/>'
            )
            where = self.amounts.index(highest) + 0.5
            said = f"highest: {self.y.write(highest)}"
            parts.append(
                _mark("circle", frame.across(where), frame.down(highest), _COLORS[0], said)
            )
        taken: list[float] = []
        for number, (name, level) in enumerate(self.levels, start=1):
            color = _COLORS[number % len(_COLORS)]
            y = frame.down(level)
            below = any(abs(y - 5 - other) < 13 for other in taken)
            at = y + 14 if below else y - 5
            taken.append(at)
            parts.append(
                f'<line x1="{_n(frame.left)}" x2="{_n(frame.end)}" y1="{_n(y)}" y2="{_n(y)}" '
                f'stroke="{color}" stroke-width="1.5" stroke-dasharray="6 4"/>'
                + _text(frame.end, at, f"{name} {self.y.write(level)}", "end")
            )
        return _svg(self._caption(), self._caption(), width, height, "".join(parts))


def _thinned(amounts: Sequence[float], most: int) -> list[float]:
    """At most ``most`` amounts, each the largest of its stretch, so that no peak is lost."""
    count = len(amounts)
    if count <= most:
        return list(amounts)
    edges = [count * number // most for number in range(most + 1)]
    return [max(amounts[start:end]) for start, end in itertools.pairwise(edges)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The axes of a picture and where on it amounts lie, in pixels."""

    x: Axis
    y: Axis
    width: int
    height: int
    low: float
    right: float
    top: float

    @property
    def left(self) -> float:
        return 84.0

    @property
    def end(self) -> float:
        return self.width - 24.0

    @property
    def ceiling(self) -> float:
        return 34.0

    @property
    def floor(self) -> float:
        return self.height - 46.0

    def across(self, amount: float) -> float:
        span = (self.right - self.low) or 1.0
        return self.left + (amount - self.low) / span * (self.end - self.left)

    def down(self, amount: float) -> float:
        return self.floor - amount / (self.top or 1.0) * (self.floor - self.ceiling)

    def svg(self) -> str:
        parts = []
        for tick in _ticks(0.0, self.top, self.y.unit):
            y = self.down(tick)
            parts.append(
                f'<line x1="{_n(self.left)}" x2="{_n(self.end)}" y1="{_n(y)}" y2="{_n(y)}" '
                'stroke="currentColor" stroke-opacity="0.15"/>'
                + _text(self.left - 8, y + 4, self.y.tick(tick), "end")
            )
        for tick in _ticks(self.low, self.right, self.x.unit):
            x = self.across(tick)
            parts.append(
                f'<line x1="{_n(x)}" x2="{_n(x)}" y1="{_n(self.floor)}" '
                f'y2="{_n(self.floor + 5)}" stroke="currentColor" stroke-opacity="0.6"/>'
                + _text(x, self.floor + 19, self.x.tick(tick), "middle")
            )
        parts.append(
            f'<line x1="{_n(self.left)}" x2="{_n(self.end)}" y1="{_n(self.floor)}" '
            f'y2="{_n(self.floor)}" stroke="currentColor" stroke-opacity="0.6"/>'
        )
        parts.append(
            _text((self.left + self.end) / 2, self.height - 8, self.x.title, "middle")
            + f'<g transform="rotate(-90 14 {_n((self.ceiling + self.floor) / 2)})">'
            + _text(14, (self.ceiling + self.floor) / 2, self.y.title, "middle")
            + "</g>"
        )
        return "".join(parts)


def _ticks(low: float, high: float, unit: float) -> Iterator[float]:
    """Round numbers from ``low`` to ``high``, about five of them."""
    rough = (high - low) / unit / 5
    if not rough > 0:
        yield low
        return
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / unit / step - 1e-3)
    last = math.floor(high / unit / step + 1e-3)
    for number in range(first, last + 1):
        yield number * step * unit


def _staircase(frame: _Frame, series: Series, color: str) -> str:
    ordered = sorted(series.points, key=lambda point: (point.x, point.y))
    if len(ordered) < 2:
        return ""
    first, *rest = ordered
    path = f"M{_n(frame.across(first.x))},{_n(frame.down(first.y))}" + "".join(
        f"H{_n(frame.across(point.x))}V{_n(frame.down(point.y))}" for point in rest
    )
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def _mark(shape: str, x: float, y: float, color: str, said: str) -> str:
    if shape == "circle":
        drawn = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="4.5" fill="{color}">'
        close = "</circle>"
    else:
        corners = {
            "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
            "diamond": ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
            "triangle": ((0, -5), (5, 4), (-5, 4)),
        }[shape]
        points = " ".join(f"{_n(x + across)},{_n(y + down)}" for across, down in corners)
        drawn, close = f'<polygon points="{points}" fill="{color}">', "</polygon>"
    return f"{drawn}<title>{escape(said)}</title>{close}"


def _name(
    frame: _Frame, taken: list[tuple[float, float, float]], x: float, y: float, label: str
) -> str:
    """A point's name beside it, where it lies on none of the (left, middle, width) taken."""
    width = 6.4 * len(label)
    for lines in (0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6):
        at = y + 14 * lines
        if not frame.ceiling - 4 <= at <= frame.floor - 4:
            continue
        for left, anchor in ((x + 9, "start"), (x - 9 - width, "end")):
            if left + width > frame.width or left < frame.left:
                continue
            if all(
                abs(at - middle) >= 12 or left + width < other or other + wide < left
                for other, middle, wide in taken
            ):
                taken.append((left, at, width))
                side = 1 if anchor == "start" else -1
                lead = (
                    f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(x + 7 * side)}" y2="{_n(at)}" '
                    'stroke="currentColor" stroke-opacity="0.4"/>'
                    if lines
                    else ""
                )
                return lead + _text(x + 9 * side, at + 4, label, anchor)
    return ""  # No room: the mark's own title says it.


def _legend(labels: Sequence[str], left: float) -> str:
    parts, x = [], left
    for number, label in enumerate(labels):
        color, shape = _COLORS[number % len(_COLORS)], _SHAPES[number % len(_SHAPES)]
        parts.append(_mark(shape, x + 6, 14, color, label) + _text(x + 16, 18, label, "start"))
        x += 34 + 7 * len(label)
    return "".join(parts)


def _text(x: float, y: float, said: str, anchor: str) -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" fill="currentColor">'
        f"{escape(said)}</text>"
    )


def _svg(description: str, title: str, width: int, height: int, inside: str) -> str:
    described = f"<desc>{escape(description)}</desc>" if description != title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'style="max-width:100%;height:auto;color:inherit" '
        'font-family="system-ui,sans-serif" font-size="12">'
        f"<title>{escape(title)}</title>{described}{inside}</svg>"
    )


def _n(number: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")
