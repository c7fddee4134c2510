"""Points over two axes, memory against overhead: as SVG, and in words."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from remat_opt.view.drawing import Axis, Frame, pixels, svg_element, words
from remat_opt.view.report import Table, escape

#: One colour and one shape per series, so that either alone distinguishes them.
COLORS = ("#2f81d8", "#d9731a", "#2a9d6f", "#b05cc6", "#c9475b", "#8a8a2b")
#: A level is drawn up to this multiple of the highest point.
_FARTHEST = 2.0
#: Room above the highest point, for names.
_HEADROOM = 1.08
#: Height of a line of words, in pixels.
_LINE = 14
_SHAPES = ("circle", "square", "diamond", "triangle", "circle", "square")


#: Left, right, upper and lower edge of what is drawn, in pixels.
_Box: TypeAlias = tuple[float, float, float, float]


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
      staircase: whether they are alternatives to choose from: a line leads from each to the next
        one on the right, and the picture omits their names.
    """

    label: str
    points: tuple[Point, ...]
    staircase: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Points over two axes, both from zero.

    Attributes:
      title: whose points they are.
      x: horizontal axis.
      y: vertical axis.
      series: at most six.
      levels: amounts along the vertical axis to compare with, as (name, amount), such as the
        memory of a device.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    levels: tuple[tuple[str, float], ...] = ()

    @property
    def top(self) -> float:
        """The largest amount drawn: a level that dwarfs the points is written, not drawn."""
        highest = max((point.y for one in self.series for point in one.points), default=0.0)
        near = [level for _, level in self.levels if level <= _FARTHEST * highest]
        return max([highest, *near])

    @property
    def caption(self) -> str:
        """The title, and what is drawn against what."""
        return f"{self.title}: {self.y.title} against {self.x.title}"

    def text(self) -> str:
        """The picture in words: its title and a line for each point."""
        rows = tuple(
            (series.label, point.label, self.x.write(point.x), self.y.write(point.y))
            for series in self.series
            for point in series.points
        )
        rows += tuple(("level", name, "", self.y.write(level)) for name, level in self.levels)
        return Table(
            title=self.title,
            headings=("", "", self.x.title, self.y.title),
            rows=rows,
            align="llrr",
        ).text()

    def svg(self) -> str:
        """The picture as an SVG element."""
        points = [point for series in self.series for point in series.points]
        frame = Frame(
            x=self.x,
            y=self.y,
            width=640,
            height=360,
            low=min([0.0, *(point.x for point in points)]),
            right=max((point.x for point in points), default=0.0),
            top=_HEADROOM * self.top,
        )
        taken: list[_Box] = []
        parts = [frame.svg()]
        parts += [_level(frame, *level, self.top, taken) for level in self.levels]
        marks: list[str] = []
        for number, series in enumerate(self.series):
            color = COLORS[number % len(COLORS)]
            shape = _SHAPES[number % len(_SHAPES)]
            if series.staircase:
                corners = _staircase(frame, series)
                parts.append(_path(corners, color))
                taken += [
                    (min(x1, x2) - 2, max(x1, x2) + 2, min(y1, y2) - 1, max(y1, y2) + 1)
                    for (x1, y1), (x2, y2) in itertools.pairwise(corners)
                ]
            for point in sorted(series.points, key=lambda p: (p.x, p.y, p.label)):
                x, y = frame.across(point.x), frame.down(point.y)
                said = f"{point.label}: {self.y.write(point.y)}, {self.x.write(point.x)}"
                marks.append(_mark(shape, x, y, color, said))
                taken.append((x - 6, x + 6, y - 6, y + 6))
        names = [
            _name(frame, taken, frame.across(point.x), frame.down(point.y), point.label)
            for series in self.series
            if not series.staircase
            for point in sorted(series.points, key=lambda p: (p.y, p.x, p.label))
        ]
        keys = _legend([series.label for series in self.series], frame.left)
        return svg_element(
            self.text(), self.caption, 640, 360, "".join([*parts, *marks, *names, keys]), least=520
        )


def _level(frame: Frame, name: str, level: float, top: float, taken: list[_Box]) -> str:
    """A dashed line with its name; if it is far above everything, only its name at the top."""
    said = f"{name} {frame.y.write(level)}"
    drawn = level <= top
    y = frame.down(level) if drawn else frame.ceiling
    middle = y - 9 if drawn else y
    taken.append((frame.end - 6.4 * len(said), frame.end, middle - 6, middle + 6))
    if not drawn:
        return words(frame.end, y + 4, f"{said}, far above", "end")
    return (
        f'<line x1="{pixels(frame.left)}" x2="{pixels(frame.end)}" y1="{pixels(y)}" '
        f'y2="{pixels(y)}" stroke="currentColor" stroke-dasharray="6 4"/>'
        + words(frame.end, y - 5, said, "end")
    )


def _staircase(frame: Frame, series: Series) -> list[tuple[float, float]]:
    """The corners of a staircase line: level from each point to the next, then a step."""
    points = sorted(series.points, key=lambda point: (point.x, point.y))
    corners: list[tuple[float, float]] = []
    for point in points:
        x, y = frame.across(point.x), frame.down(point.y)
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners


def _path(corners: Sequence[tuple[float, float]], color: str) -> str:
    if len(corners) < 2:
        return ""
    (x, y), *rest = corners
    steps = zip(rest[::2], rest[1::2], strict=True)
    path = f"M{pixels(x)},{pixels(y)}" + "".join(
        f"H{pixels(across)}V{pixels(down)}" for (across, _), (_, down) in steps
    )
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def _mark(shape: str, x: float, y: float, color: str, said: str) -> str:
    if shape == "circle":
        drawn = f'<circle cx="{pixels(x)}" cy="{pixels(y)}" r="4.5" fill="{color}">'
        close = "</circle>"
    else:
        corners = {
            "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
            "diamond": ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
            "triangle": ((0, -5), (5, 4), (-5, 4)),
        }[shape]
        points = " ".join(f"{pixels(x + across)},{pixels(y + down)}" for across, down in corners)
        drawn, close = f'<polygon points="{points}" fill="{color}">', "</polygon>"
    return f"{drawn}<title>{escape(said)}</title>{close}"


def _name(frame: Frame, taken: list[_Box], x: float, y: float, label: str) -> str:
    """A point's name beside it, where nothing is drawn yet."""
    width = 6.4 * len(label)
    for left, at, side in _places(frame, x, y, width):
        if not (frame.ceiling - 4 <= at <= frame.floor - 4):
            continue
        if left + width > frame.width or left < frame.left:
            continue
        box = (left, left + width, at - 6, at + 6)
        if any(_overlap(box, other) for other in taken):
            continue
        taken.append(box)
        if side:
            end, edge = x + 7 * side, at
        else:
            end, edge = min(max(x, left), left + width), at + (6 if at < y else -6)
        lead = (
            f'<line x1="{pixels(x)}" y1="{pixels(y)}" x2="{pixels(end)}" y2="{pixels(edge)}" '
            'stroke="currentColor" stroke-opacity="0.4"/>'
            if at != y
            else ""
        )
        if side < 0:
            return lead + words(x - 9, at + 4, label, "end")
        return lead + words(left, at + 4, label, "start")
    return ""  # No room: the mark's own title says it.


def _places(frame: Frame, x: float, y: float, width: float) -> Iterator[tuple[float, float, int]]:
    """Where a name may go, the best first: its left end, its middle's height, and its side.

    A name is to the right of its point, to the left, or, if too long for both, above or below.
    """
    for lines in (0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6):
        yield x + 9, y + _LINE * lines, 1
        yield x - 9 - width, y + _LINE * lines, -1
    most = round((frame.floor - frame.ceiling) / _LINE)
    for lines in sorted({*range(-most, most + 1)} - {0}, key=lambda n: (abs(n), n)):
        yield max(frame.left, min(x - width / 2, frame.width - width)), y + _LINE * lines, 0


def _overlap(one: _Box, other: _Box) -> bool:
    left, right, upper, lower = one
    return left <= other[1] and other[0] <= right and upper < other[3] and other[2] < lower


def _legend(labels: Sequence[str], left: float) -> str:
    parts, x = [], left
    for number, label in enumerate(labels):
        color, shape = COLORS[number % len(COLORS)], _SHAPES[number % len(_SHAPES)]
        parts.append(_mark(shape, x + 6, 14, color, label) + words(x + 16, 18, label, "start"))
        x += 34 + 7 * len(label)
    return "".join(parts)
