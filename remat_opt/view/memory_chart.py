"""Memory over time: what is alive, stacked by kind, as an SVG element and in words.

A plain function of data. Each band has one amount per moment, all bands equally many; bands are
stacked from the bottom in the given order. Over them go lines (another account of the same time,
such as the compiler's) and levels (a budget, a device's memory). On the plan page a script shows
what is alive at the moment under the pointer; the picture is complete without one.

>>> chart = MemoryChart(
...     title="Memory over time",
...     bands=(
...         Band(label="kept", kind="kept", amounts=(2**20, 2**21, 2**21)),
...         Band(label="gradients", kind="gradients", amounts=(0, 0, 2**20)),
...     ),
...     levels=(Level(label="budget", amount=2**22),),
...     turn=2,
... )
>>> print(chart.text(width=24))
Memory over time: highest 3.00 MiB at moment 3 of 3 (backward); budget 4.00 MiB
▃▃▃▃▃▃▃▃▅▅▅▅▅▅▅▅████████
at the highest: kept 2.00 MiB, gradients 1.00 MiB
>>> chart.svg().startswith("<svg")
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.units import format_bytes
from remat_opt.view.drawing import bytes_axis, pixels, svg_element, thinned, ticks
from remat_opt.view.report import escape

#: The colour of each kind if the page gives none (as ``--ro-KIND``); distinguishable also for the
#: colour-blind.
COLORS = {
    "kept": "#3568b2",
    "boundaries": "#7fb3e6",
    "passing": "#b4bdc9",
    "recomputed": "#e08a1e",
    "gradients": "#2b9a78",
    "workspace": "#a878c8",
    "parameters": "#5f6b7a",
    "optimizer state": "#8a6a3c",
    "inputs": "#8fa08a",
    "results": "#c2b49a",
    "activations": "#3568b2",
    "other": "#9a9a9a",
}

_BLOCKS = "▁▂▃▄▅▆▇█"
_LEFT, _RIGHT, _CEILING, _FLOOR = 66.0, 14.0, 22.0, 26.0
#: Pixels between two lines of text so that they do not touch.
_LINE = 15.0


def color(kind: str) -> str:
    """The colour of a kind in CSS: the page's, or that of ``COLORS``.

    >>> color("kept")
    'var(--ro-kept,#3568b2)'
    """
    return f"var(--ro-{kind.replace(' ', '-')},{COLORS.get(kind, COLORS['other'])})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What one kind takes.

    Attributes:
      label: what to call it.
      kind: one of ``COLORS``, for its colour.
      amounts: bytes, one for each moment.
    """

    label: str
    kind: str
    amounts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Another account of the temporaries over the same time.

    Attributes:
      label: what to call it.
      amounts: bytes at evenly spaced moments; there may be more or fewer than the bands have.
    """

    label: str
    amounts: tuple[int, ...]

    @property
    def text(self) -> str:
        """Its label with its highest amount."""
        return f"{self.label} {format_bytes(max(self.amounts))}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """An amount to compare the temporaries with.

    Attributes:
      label: what to call it.
      amount: bytes.
    """

    label: str
    amount: int

    @property
    def text(self) -> str:
        """Its label with its amount."""
        return f"{self.label} {format_bytes(self.amount)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChart:
    """What is alive over time.

    Attributes:
      title: what the picture shows.
      bands: stacked from the bottom.
      lines: drawn over the bands.
      levels: drawn over both.
      turn: number of the first moment of the backward pass, or None if there is none.
      base: bytes at the bottom of the stack that are held throughout, such as parameters. Lines and
        levels, which are about temporaries, are drawn above them.
      top: bytes at the top of the picture, so that several can share a scale; None to fit the data.
    """

    title: str
    bands: tuple[Band, ...]
    lines: tuple[Line, ...] = ()
    levels: tuple[Level, ...] = ()
    turn: int | None = None
    base: int = 0
    top: int | None = None

    def __post_init__(self) -> None:
        counts = {len(band.amounts) for band in self.bands}
        if len(counts) > 1:
            raise ValueError(
                f"The bands of {self.title!r} have {sorted(counts)} moments: all must have as many."
            )

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes alive at each moment."""
        return tuple(sum(amounts) for amounts in zip(*(b.amounts for b in self.bands), strict=True))

    @property
    def peak(self) -> int:
        """Number of the moment at which most is alive."""
        totals = self.totals
        return totals.index(max(totals))

    @property
    def highest(self) -> int:
        """The largest amount drawn."""
        beside = [one.amount for one in self.levels]
        beside += [most for line in self.lines for most in line.amounts]
        return max([*self.totals, *(self.base + amount for amount in beside)], default=0)

    def caption(self) -> str:
        """Title, peak and levels in one sentence."""
        if not self.totals:
            return f"{self.title}: nothing to show."
        highest = self.totals[self.peak]
        temporary = f", {format_bytes(highest - self.base)} of it temporaries" if self.base else ""
        said = [line.text for line in self.lines if line.amounts]
        said += [level.text for level in self.levels]
        return "; ".join(
            [
                f"{self.title}: highest {format_bytes(highest)} at moment {self.peak + 1} of "
                f"{len(self.totals)}{self._phase(self.peak)}{temporary}",
                *said,
            ]
        )

    def _phase(self, moment: int) -> str:
        if self.turn is None:
            return ""
        return " (backward)" if moment >= self.turn else " (forward)"

    def text(self, width: int = 72) -> str:
        """The picture in characters, and what is alive at its highest point.

        Args:
          width: that of the terminal, in characters.
        """
        totals = self.totals
        if not totals:
            return self.caption()
        if len(totals) < width:
            columns = [float(totals[place * len(totals) // width]) for place in range(width)]
        else:
            columns = thinned(totals, width)
        most = self.top or max(totals)
        line = "".join(
            _BLOCKS[max(0, min(7, round(8 * amount / most) - 1))] if most else _BLOCKS[0]
            for amount in columns
        )
        shares = ", ".join(
            f"{band.label} {format_bytes(band.amounts[self.peak])}"
            for band in self.bands
            if band.amounts[self.peak]
        )
        return "\n".join([self.caption(), line, f"at the highest: {shares or 'nothing'}"])

    def svg(self, width: int = 860, height: int = 250, least: int = 0) -> str:
        """The picture as an SVG element, on narrow pages at least ``least`` pixels across.

        Its attributes ``data-left``, ``data-right`` and ``data-moments`` give the positions of
        moments, in its own coordinates.
        """
        count = len(self.totals)
        frame = _Frame(width=width, height=height, count=count, top=self.top or self.highest)
        parts = [frame.grid(self.highest)]
        below = [0] * count
        for band in self.bands:
            above = [low + amount for low, amount in zip(below, band.amounts, strict=True)]
            if any(band.amounts):
                parts.append(_area(frame, band, below, above))
            below = above
        parts += [_line(frame, line, self.base) for line in self.lines if line.amounts]
        parts.append(self._turn(frame))
        taken: list[tuple[float, float, float]] = []
        if count:
            parts.append(self._peak_mark(frame, taken))
        levels = sorted(self.levels, key=lambda level: -level.amount)
        parts += [
            _level(frame, level, self.base, taken, is_highest=level is levels[0])
            for level in levels
        ]
        drawn = svg_element(self.text(), self.caption(), width, height, "".join(parts), least)
        return drawn.replace(
            "<svg ",
            f'<svg data-left="{pixels(frame.left)}" data-right="{pixels(frame.right)}" '
            f'data-ceiling="{pixels(frame.ceiling)}" data-floor="{pixels(frame.floor)}" '
            f'data-moments="{count}" ',
            1,
        )

    def _turn(self, frame: _Frame) -> str:
        y = frame.floor + 17
        if self.turn is None or not frame.count:
            return _words((frame.left + frame.right) / 2, y, "time", "middle")
        x = frame.across(self.turn)
        parts = [
            f'<line x1="{pixels(x)}" x2="{pixels(x)}" y1="{pixels(frame.ceiling)}" '
            f'y2="{pixels(frame.floor + 6)}" stroke="currentColor" stroke-opacity="0.45" '
            'stroke-dasharray="2 3"/>'
        ]
        for start, end, said in ((frame.left, x, "forward"), (x, frame.right, "backward")):
            if end - start > 8 * len(said):
                parts.append(_words((start + end) / 2, y, said, "middle"))
        return "".join(parts)

    def _peak_mark(self, frame: _Frame, taken: list[tuple[float, float, float]]) -> str:
        x, y = frame.across(self.peak + 0.5), frame.down(self.totals[self.peak])
        said = f"peak {format_bytes(self.totals[self.peak])}"
        half = 3.6 * len(said)
        middle = min(max(x, frame.left + half), frame.right - half)
        at = max(y - 10, 11.0)
        taken.append((middle - half, middle + half, at))
        return f'<path d="M{pixels(x)},{pixels(y - 1)}l-4.5,-6h9z" fill="currentColor"/>' + _words(
            middle, at, said, "middle", bold=True
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The positions of moments and amounts on the picture, in pixels."""

    width: int
    height: int
    count: int
    top: int

    @property
    def left(self) -> float:
        return _LEFT

    @property
    def right(self) -> float:
        return self.width - _RIGHT

    @property
    def ceiling(self) -> float:
        return _CEILING

    @property
    def floor(self) -> float:
        return self.height - _FLOOR

    def across(self, moment: float, count: int | None = None) -> float:
        return self.left + moment / max(count or self.count, 1) * (self.right - self.left)

    def down(self, amount: float) -> float:
        return self.floor - amount / (self.top or 1) * (self.floor - self.ceiling)

    def grid(self, highest: int) -> str:
        axis = bytes_axis("", self.top or highest)
        parts = []
        for tick in ticks(0.0, self.top, axis.unit):
            y = self.down(tick)
            parts.append(
                f'<line x1="{pixels(self.left)}" x2="{pixels(self.right)}" y1="{pixels(y)}" '
                f'y2="{pixels(y)}" stroke="currentColor" stroke-opacity="0.13"/>'
                + _words(self.left - 8, y + 4, axis.tick(tick), "end")
            )
        return "".join(parts)


def _area(frame: _Frame, band: Band, below: Sequence[int], above: Sequence[int]) -> str:
    """A band: along its upper edge and back along the lower one."""
    there = [f"M{pixels(frame.left)},{pixels(frame.down(below[0]))}"]
    there += _steps(frame, above, range(frame.count), ahead=True)
    back = [f"V{pixels(frame.down(below[-1]))}"]
    back += _steps(frame, below, range(frame.count - 1, -1, -1), ahead=False)
    said = f"{band.label}: at most {format_bytes(max(band.amounts))}"
    return (
        f'<path d="{"".join([*there, *back])}Z" style="fill:{color(band.kind)}">'
        f"<title>{escape(said)}</title></path>"
    )


def _steps(
    frame: _Frame, amounts: Sequence[int], order: Sequence[int], *, ahead: bool
) -> list[str]:
    """Vertical and horizontal strokes from moment to moment; equal ones are one stroke."""
    parts: list[str] = []
    level: str | None = None
    for place, moment in enumerate(order):
        found = pixels(frame.down(amounts[moment]))
        if found != level:
            parts.append(f"V{found}")
            level = found
        last = place + 1 == len(order)
        if last or pixels(frame.down(amounts[order[place + 1]])) != level:
            parts.append(f"H{pixels(frame.across(moment + 1 if ahead else moment))}")
    return parts


def _line(frame: _Frame, line: Line, base: int) -> str:
    count = len(line.amounts)
    heights = [pixels(frame.down(base + amount)) for amount in line.amounts]
    parts = [f"M{pixels(frame.left)},{heights[0]}"]
    for moment, height in enumerate(heights):
        parts.append(f"V{height}H{pixels(frame.across(moment + 1, count))}")
    said = f"{line.label}: at most {format_bytes(max(line.amounts))}"
    return (
        f'<path d="{"".join(parts)}" fill="none" stroke="currentColor" stroke-width="1.6" '
        f'stroke-linejoin="round"><title>{escape(said)}</title></path>'
    )


def _level(
    frame: _Frame,
    level: Level,
    base: int,
    taken: list[tuple[float, float, float]],
    *,
    is_highest: bool,
) -> str:
    """A dashed line and its name in a free place: above the highest line, below others."""
    y = frame.down(base + level.amount)
    said = level.text
    wide = 6.9 * len(said)
    downs = (-5, -5 - _LINE, 14) if is_highest else (14, 14 + _LINE, -5)
    places = [(left, y + down) for down in downs for left in (frame.right - wide, frame.left + 4)]
    left, at = next(
        (
            place
            for place in places
            if all(
                place[0] > end or place[0] + wide < start or abs(place[1] - other) >= _LINE
                for start, end, other in taken
            )
            and _LINE <= place[1] < frame.floor
        ),
        places[0],
    )
    taken.append((left, left + wide, at))
    anchor = "end" if left > frame.left + 4 else "start"
    return (
        f'<line x1="{pixels(frame.left)}" x2="{pixels(frame.right)}" y1="{pixels(y)}" '
        f'y2="{pixels(y)}" stroke="currentColor" stroke-width="1.2" stroke-opacity="0.8" '
        'stroke-dasharray="6 4"/>'
        + _words(left + wide if anchor == "end" else left, at, said, anchor)
    )


def _words(x: float, y: float, said: str, anchor: str, *, bold: bool = False) -> str:
    """Text with a rim in the page's colour, so that it is legible on bands."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{pixels(x)}" y="{pixels(y)}" text-anchor="{anchor}"{weight} fill="currentColor" '
        'style="paint-order:stroke;stroke:var(--ro-ground,transparent);stroke-width:3px">'
        f"{escape(said)}</text>"
    )
