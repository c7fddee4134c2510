"""What pictures share: axes, the frame they span, and small pieces of SVG.

Text takes its colour from the surrounding page, so that it is legible in light and dark. The same
data gives the same characters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from remat_opt.units import format_bytes, format_share
from remat_opt.view.report import escape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a picture.

    Attributes:
      title: what is shown along it.
      write: how an amount on it is written.
      tick: how a round amount on it is written.
      unit: ticks are round multiples of it, such as 1024**2 for MiB.
    """

    title: str
    write: Callable[[float], str]
    tick: Callable[[float], str]
    unit: float = 1.0


def share_axis(title: str) -> Axis:
    """An axis of shares, 1.0 for all of it."""

    def tick(share: float) -> str:
        return f"{share * 100:.4g} %"

    return Axis(title=title, write=format_share, tick=tick, unit=0.01)


def bytes_axis(title: str, most: float) -> Axis:
    """An axis of bytes, with round ticks in the unit in which ``most`` is written.

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


def thinned(amounts: Sequence[float], most: int) -> list[float]:
    """At most ``most`` amounts, each the largest of its stretch, so that no peak is lost."""
    count = len(amounts)
    if count <= most:
        return list(amounts)
    edges = [count * number // most for number in range(most + 1)]
    return [max(amounts[start:end]) for start, end in itertools.pairwise(edges)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The axes of a picture and the positions of amounts on it, in pixels."""

    x: Axis
    y: Axis
    width: int
    height: int
    low: float
    right: float
    top: float

    @property
    def left(self) -> float:
        """Of the left edge."""
        return 84.0

    @property
    def end(self) -> float:
        """Of the right edge."""
        return self.width - 24.0

    @property
    def ceiling(self) -> float:
        """Of the upper edge."""
        return 34.0

    @property
    def floor(self) -> float:
        """Of the lower edge."""
        return self.height - 46.0

    def across(self, amount: float) -> float:
        """Of an amount along the horizontal axis."""
        span = (self.right - self.low) or 1.0
        return self.left + (amount - self.low) / span * (self.end - self.left)

    def down(self, amount: float) -> float:
        """Of an amount along the vertical axis."""
        return self.floor - amount / (self.top or 1.0) * (self.floor - self.ceiling)

    def svg(self) -> str:
        """Both axes with their ticks and titles."""
        parts = []
        for tick in ticks(0.0, self.top, self.y.unit):
            y = self.down(tick)
            parts.append(
                f'<line x1="{pixels(self.left)}" x2="{pixels(self.end)}" y1="{pixels(y)}" '
                f'y2="{pixels(y)}" '
                'stroke="currentColor" stroke-opacity="0.15"/>'
                + words(self.left - 8, y + 4, self.y.tick(tick), "end")
            )
        for tick in ticks(self.low, self.right, self.x.unit):
            x = self.across(tick)
            parts.append(
                f'<line x1="{pixels(x)}" x2="{pixels(x)}" y1="{pixels(self.floor)}" '
                f'y2="{pixels(self.floor + 5)}" stroke="currentColor" stroke-opacity="0.6"/>'
                + words(x, self.floor + 19, self.x.tick(tick), "middle")
            )
        parts.append(
            f'<line x1="{pixels(self.left)}" x2="{pixels(self.end)}" y1="{pixels(self.floor)}" '
            f'y2="{pixels(self.floor)}" stroke="currentColor" stroke-opacity="0.6"/>'
        )
        parts.append(
            words((self.left + self.end) / 2, self.height - 8, self.x.title, "middle")
            + f'<g transform="rotate(-90 14 {pixels((self.ceiling + self.floor) / 2)})">'
            + words(14, (self.ceiling + self.floor) / 2, self.y.title, "middle")
            + "</g>"
        )
        return "".join(parts)


def ticks(low: float, high: float, unit: float) -> Iterator[float]:
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


def words(x: float, y: float, said: str, anchor: str) -> str:
    """Text at a point, in the colour of the page's text."""
    return (
        f'<text x="{pixels(x)}" y="{pixels(y)}" text-anchor="{anchor}" fill="currentColor">'
        f"{escape(said)}</text>"
    )


def svg_element(
    description: str, title: str, width: int, height: int, inside: str, least: int = 0
) -> str:
    """A picture with what screen readers should say about it.

    It shrinks with the page, but no further than to ``least`` pixels across, so that its words
    stay legible where the page scrolls.
    """
    described = f"<desc>{escape(description)}</desc>" if description != title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width:100%;{f"min-width:{least}px;" if least else ""}height:auto;'
        'color:inherit" '
        'font-family="system-ui,sans-serif" font-size="12">'
        f"<title>{escape(title)}</title>{described}{inside}</svg>"
    )


def pixels(number: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")
