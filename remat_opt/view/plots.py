"""The same pictures on matplotlib's axes, for papers and notebooks.

matplotlib is imported only when a picture is asked for: nothing else here needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.errors import MissingPackageError
from remat_opt.view.memory_chart import COLORS, MemoryChart
from remat_opt.view.scatter import COLORS as SERIES_COLORS
from remat_opt.view.scatter import Scatter

#: Where a point's name may go: how many lines above it, and the line height in points.
_LINES, _LINE = (0, 1, -1, 2, -2, 3, -3, 4, -4), 10
_MARKERS = "osD^v*"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def scatter(picture: Scatter, ax: Any = None) -> Any:
    """Draws memory against overhead: the choices as a line, other points with names.

    Args:
      picture: shares along the horizontal axis, bytes along the vertical one.
      ax: axes; the current ones if None.

    Returns:
      The axes.

    Raises:
      MissingPackageError: matplotlib is not installed.
    """
    ax = _axes(ax)
    from matplotlib.transforms import Bbox

    unit, name = _unit(picture.top)
    staircases: list[Any] = []
    for number, series in enumerate(picture.series):
        points = sorted(series.points, key=lambda point: (point.x, point.y))
        if not points:
            continue
        (line,) = ax.plot(
            [100 * point.x for point in points],
            [point.y / unit for point in points],
            marker=_MARKERS[number % len(_MARKERS)],
            color=SERIES_COLORS[number % len(SERIES_COLORS)],
            markersize=4 if series.staircase else 6,
            linestyle="-" if series.staircase else "none",
            drawstyle="steps-post",
            label=series.label,
        )
        if series.staircase:
            staircases.append(line)
    # Room for the names of the highest points.
    ax.set_ylim(0, 1.12 * picture.top / unit or 1)
    shown = [(100 * point.x, point.y / unit) for one in picture.series for point in one.points]
    taken = [Bbox([at, at]).padded(4) for at in ax.transData.transform(shown)] if shown else []
    for line in staircases:
        taken += [Bbox(ends).padded(2) for ends in _segments(ax, line)]
    for name_of_level, level in picture.levels:
        drawn = level <= picture.top
        said = f"{name_of_level} {picture.y.write(level)}"
        text = ax.annotate(
            said if drawn else f"{said}, far above",
            (1, level / unit if drawn else 1),
            xycoords=("axes fraction", "data" if drawn else "axes fraction"),
            xytext=(-4, 3 if drawn else -3),
            textcoords="offset points",
            horizontalalignment="right",
            verticalalignment="bottom" if drawn else "top",
            fontsize="x-small",
        )
        taken.append(text.get_window_extent())
        if drawn:
            line = ax.axhline(level / unit, color="0.35", linestyle="--", linewidth=1)
            taken.append(line.get_window_extent().padded(2))
    for series in picture.series:
        for point in series.points if not series.staircase else ():
            _write_beside(ax, (100 * point.x, point.y / unit), point.label, taken)
    ax.set(
        title=picture.title,
        xlabel=f"{picture.x.title}, %",
        ylabel=f"{picture.y.title}, {name}",
    )
    if len(picture.series) > 1:
        ax.legend(frameon=False)
    return ax


def _segments(ax: Any, staircase: Any) -> list[Any]:
    """The straight pieces of a staircase line: their ends, in pixels."""
    points = list(zip(staircase.get_xdata(), staircase.get_ydata(), strict=True))
    corners = [
        corner
        for (x1, y1), (x2, y2) in itertools.pairwise(points)
        for corner in (((x1, y1), (x2, y1)), ((x2, y1), (x2, y2)))
    ]
    return [
        [(min(x), min(y)), (max(x), max(y))]
        for x, y in (ax.transData.transform(ends).T for ends in corners)
    ]


def _write_beside(ax: Any, at: tuple[float, float], said: str, taken: list[Any]) -> None:
    """Writes a point's name in a free place: to its right, to its left, or above or below.

    Args:
      ax: axes.
      at: where the point is.
      said: its name.
      taken: the occupied areas, in pixels; the name is added.
    """
    inside = ax.get_window_extent()
    points = 72 / ax.figure.dpi
    most = int(inside.height * points / _LINE)
    above_and_below = sorted({*range(-most, most + 1)} - {0}, key=abs)
    places = (*itertools.product(_LINES, (1, -1)), *((lines, 0) for lines in above_and_below))
    for lines, side in places:
        offset = (7 * side, lines * _LINE)
        text = ax.annotate(
            said,
            at,
            xytext=offset,
            textcoords="offset points",
            horizontalalignment={1: "left", -1: "right", 0: "center"}[side],
            verticalalignment="center",
            fontsize="x-small",
        )
        box = text.get_window_extent()
        if not side:
            over = max(inside.x0 - box.x0, 0) + min(inside.x1 - box.x1, 0)
            text.set_position((over * points, offset[1]))
            box = text.get_window_extent()
        fits = (
            inside.x0 - 1 <= box.x0
            and box.x1 <= inside.x1 + 1
            and inside.y0 <= box.y0
            and box.y1 <= inside.y1
        )
        if fits and not box.count_overlaps(taken):
            taken.append(box)
            if lines:
                arrow = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6}
                ax.annotate("", at, xytext=offset, textcoords="offset points", arrowprops=arrow)
            return
        text.remove()


def memory(
    charts: Sequence[tuple[MemoryChart, Mapping[str, Any]]], title: str, ax: Any = None
) -> Any:
    """Draws memory over time: the first chart by kind, the others as lines.

    Args:
      charts: with their timelines.
      title: the picture's title.
      ax: axes; the current ones if None.

    Returns:
      The axes.

    Raises:
      MissingPackageError: matplotlib is not installed.
    """
    ax = _axes(ax)
    ax.set(title=title)
    if not charts:
        return ax
    (chart, timeline), *others = charts
    unit, name = _unit(chart.top or chart.highest)

    def steps(amounts: Sequence[int]) -> list[float]:
        """A step lasts until the next one; the last amount is repeated at its end."""
        return [amount / unit for amount in (*amounts, amounts[-1])]

    edges = [*timeline["at"], timeline["steps"]]
    bands = [band for band in chart.bands if any(band.amounts)]
    below = [0.0] * len(edges)
    for band in bands:
        above = [low + more for low, more in zip(below, steps(band.amounts), strict=True)]
        ax.fill_between(
            edges, below, above, step="post", color=COLORS[band.kind], label=band.label, linewidth=0
        )
        below = above
    for line in chart.lines:
        count = len(line.amounts)
        where = [timeline["steps"] * place / count for place in range(count + 1)]
        ax.step(
            where,
            steps([chart.base + amount for amount in line.amounts]),
            where="post",
            color="black",
            linewidth=1,
            label=line.label,
        )
    for other, told in others:
        # Its steps are stretched: fewer run than with recomputation.
        scale = timeline["steps"] / max(told["steps"], 1)
        where = [scale * step for step in (*told["at"], told["steps"])]
        label = other.title.rpartition(", ")[2]
        ax.step(
            where,
            steps(other.totals),
            where="post",
            color="0.45",
            linewidth=1,
            linestyle=":",
            label=label,
        )
    # Of two lines, the upper has its name above, the lower below.
    levels = sorted(chart.levels, key=lambda level: level.amount)
    for number, level in enumerate(levels, 1):
        height = (chart.base + level.amount) / unit
        is_upper = number == len(levels)
        ax.axhline(height, color="0.35", linestyle="--", linewidth=1)
        ax.annotate(
            level.text,
            (0, height),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3 if is_upper else -3),
            textcoords="offset points",
            verticalalignment="bottom" if is_upper else "top",
            fontsize="x-small",
        )
    peak = timeline["at"][chart.peak]
    ax.plot(peak, chart.totals[chart.peak] / unit, marker="v", color="black", linestyle="none")
    ax.set(
        xlabel="step: forward, then backward",
        ylabel=f"{'memory' if chart.base else 'temporaries'}, {name}",
    )
    ax.set_ylim(bottom=0)
    ax.margins(x=0)
    # Beside the picture, which is full, and from the top down, in the order of the bands.
    ax.legend(
        reverse=True,
        frameon=False,
        fontsize="small",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return ax


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot
    except ImportError:
        raise MissingPackageError("A plot", package="matplotlib", extra="plots") from None
    return matplotlib.pyplot.gca()


def _unit(most: float) -> tuple[float, str]:
    """The unit in which the largest amount is written."""
    powers = itertools.takewhile(lambda power: most >= 1024**power, range(1, len(_UNITS)))
    power = max(powers, default=0)
    return float(1024**power), _UNITS[power]
