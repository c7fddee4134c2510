"""What a training step's memory is spent on, as one screen or a page, from plain data."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.units import format_bytes, format_share
from remat_opt.view import report
from remat_opt.view.memory_chart import Band, Level, MemoryChart, color
from remat_opt.view.plan_text import printable
from remat_opt.view.plan_words import RESIDENT

#: Lines of a screen. Arrays get what the rest leaves, within these limits.
_SCREEN, _LEAST_ROWS, _MOST_ROWS = 30, 4, 8
#: Rows of the table of arrays on a page.
_MOST_ROWS_ON_A_PAGE = 30
#: Characters across of the picture in a terminal, and lines of the compiler's words.
_COLUMNS, _WORDS = 60, 2
#: Characters of the compiler's words on a page.
_MOST_WORDS = 300
#: Pixels across of the picture on a narrow page.
_LEAST_WIDTH = 680
#: Lines of at least this many characters have room for function names.
_WIDE = 110
#: How many moments are drawn; and up to what multiple of the peak the device's memory is drawn.
_MOST_MOMENTS, _FARTHEST = 240, 2.0
#: In a terminal, a share is drawn if it reaches one part in this many of the total; and it has a
#: row in the table if it is one part in this many at the peak.
_DRAWN, _LISTED = 50, 200
_BLOCKS = " ▁▂▃▄▅▆▇█"


def text(explanation: Mapping[str, Any], width: int = report.WIDTH) -> str:
    """An explanation as text.

    Args:
      explanation: what ``Explanation.to_dict`` gives.
      width: that of the terminal, in characters. Longer lines are cut or broken.
    """
    facts = report.facts_text(_facts(explanation, width - len("compiler  "), _WORDS), width)
    parts = [
        f"{_title(explanation)}\n{facts}",
        _shares_table(explanation, _LISTED).text(width),
        _curves(explanation, width),
    ]
    above = "\n\n".join(part for part in parts if part)
    # A blank line, the title, the headings, the rule, and the number of the rest.
    room = _SCREEN - len(above.splitlines()) - 5
    most = min(max(room, _LEAST_ROWS), _MOST_ROWS)
    arrays = _arrays_table(explanation, most, with_functions=width >= _WIDE)
    return f"{above}\n\n{arrays.text(width)}" if arrays.rows else above


def html(explanation: Mapping[str, Any]) -> str:
    """An explanation as part of an HTML page.

    Args:
      explanation: what ``Explanation.to_dict`` gives.
    """
    return report.section(
        _title(explanation),
        report.facts_html(_facts(explanation, _MOST_WORDS, 1)),
        _shares_table(explanation).html(),
        _picture(explanation),
        _arrays_table(explanation, _MOST_ROWS_ON_A_PAGE).html(),
    )


def _picture(explanation: Mapping[str, Any]) -> str:
    """Memory over time by share, with a legend; "" if unknown."""
    total = _total(explanation)
    if not total:
        return ""
    fullest = _fullest(total)
    bands = [
        *(
            Band(label=share, kind=share, amounts=(size,) * len(fullest))
            for share, size in _resident(explanation).items()
        ),
        *(
            Band(label=share, kind=share, amounts=tuple(amounts[step] for step in fullest))
            for share, amounts in explanation["timelines"].items()
        ),
    ]
    legend = "".join(
        '<span style="display:inline-block;margin-right:16px"><span style="display:inline-block;'
        f"width:11px;height:11px;border-radius:3px;margin-right:6px;background:{color(band.kind)}"
        f'"></span>{report.escape(band.label)}</span>'
        for band in bands
        if any(band.amounts)
    )
    chart = MemoryChart(
        title="Memory over time, as compiled",
        bands=tuple(bands),
        levels=(Level(label="the device's memory", amount=explanation["memory_bytes"]),)
        if explanation["memory_bytes"] <= _FARTHEST * max(total)
        else (),
    )
    return f"{legend}<br>{chart.svg(least=_LEAST_WIDTH)}"


def _fullest(total: Sequence[int]) -> list[int]:
    """For each stretch, the step at which most is alive."""
    count = min(_MOST_MOMENTS, len(total))
    edges = [len(total) * n // count for n in range(count + 1)]
    return [max(range(a, b), key=total.__getitem__) for a, b in itertools.pairwise(edges)]


def _title(explanation: Mapping[str, Any]) -> str:
    return f"Memory of {printable(explanation['function'])} on {explanation['device_title']}"


def _facts(explanation: Mapping[str, Any], width: int, lines: int) -> list[tuple[str, str]]:
    """What the title leaves to say; the compiler's words fill no more lines of this width."""
    needed, available = explanation["needed_bytes"], explanation["memory_bytes"]
    if needed > available:
        verdict = f"{format_bytes(needed - available)} too much: it does not fit"
    elif explanation["refusal"]:
        verdict = "the compiler still refused it"
    else:
        verdict = f"it fits, {format_bytes(available - needed)} are left"
    facts = [("needs", f"{format_bytes(needed)} of {format_bytes(available)}; {verdict}")]
    if explanation["refusal"]:
        words = printable(explanation["refusal"].replace("\n", " "))
        said = textwrap.wrap(
            words, max(width, 20), max_lines=lines, placeholder=" ...", break_on_hyphens=False
        )
        facts.append(("compiler", " ".join(said)))
    facts += [("note", printable(note)) for note in explanation["notes"]]
    return facts


def _shares_table(explanation: Mapping[str, Any], listed: int | None = None) -> report.Table:
    """What each share takes; those below one part in ``listed`` share a line at the end."""
    total = max(explanation["needed_bytes"], 1)
    shares = [row for row in explanation["shares"] if row["bytes"]]
    small = [row for row in shares if listed is not None and row["bytes"] * listed < total]
    few = format_bytes(sum(row["bytes"] for row in small))
    return report.Table(
        headings=("at the peak", "bytes", "share", "what can be done"),
        rows=tuple(
            (
                row["share"],
                format_bytes(row["bytes"]),
                format_share(row["bytes"] / total),
                printable(row["remedy"]),
            )
            for row in shares
            if row not in small
        ),
        align="lrrl",
        footer=f"and {few} of {', '.join(row['share'] for row in small)}" if small else "",
        prose=True,
    )


def _resident(explanation: Mapping[str, Any]) -> dict[str, int]:
    """What is held throughout, by share."""
    return {
        row["share"]: row["bytes"]
        for row in explanation["shares"]
        if row["share"] in RESIDENT.values()
    }


def _total(explanation: Mapping[str, Any]) -> list[int]:
    curves = list(explanation["timelines"].values())
    resident = explanation["resident_bytes"]
    return [resident + sum(amounts) for amounts in zip(*curves, strict=True)]


def _curves(explanation: Mapping[str, Any], width: int) -> str:
    """Memory over time: a line of characters for the total and for each share of temporaries."""
    total = _total(explanation)
    if not total:
        return ""
    highest = max(total)
    where = f"step {total.index(highest) + 1:,} of {len(total):,}"
    kinds = {
        share: amounts
        for share, amounts in explanation["timelines"].items()
        if max(amounts) * _DRAWN >= highest
    }
    rows = [("over time", total, f"{format_bytes(highest)} at {where}")]
    rows += [(name, own, f"most {format_bytes(max(own))}") for name, own in kinds.items()]
    margin = max(len(name) for name, _, _ in rows)
    beside = margin + max(len(said) for _, _, said in rows) + 4
    columns = min(_COLUMNS, max(1, width - beside))
    return "\n".join(
        f"{name.ljust(margin)}  {_curve(amounts, highest, columns)}  {said}"
        for name, amounts, said in rows
    )


def _curve(amounts: Sequence[int], highest: int, columns: int) -> str:
    count = min(columns, len(amounts))
    most = [
        max(amounts[len(amounts) * n // count : len(amounts) * (n + 1) // count])
        for n in range(count)
    ]
    # Rounded up, so that even the smallest amount shows.
    return "".join(_BLOCKS[-(-8 * amount // highest)] for amount in most)


def _arrays_table(
    explanation: Mapping[str, Any], most: int, *, with_functions: bool = True
) -> report.Table:
    rows = explanation["rows"]
    left = rows[most:]
    return report.Table(
        title="Largest arrays at the peak",
        headings=("bytes", "", "share", "made by", "type", "module", "source"),
        rows=tuple(
            (
                format_bytes(row["bytes"]),
                f"{row['count']} x" if row["count"] > 1 else "",
                row["share"],
                printable(row["label"]),
                row["type"],
                printable(row["module"]),
                printable(row["source"] if with_functions else row["source"].partition(" (")[0]),
            )
            for row in rows[:most]
        ),
        align="rrlllll",
        footer=(
            f"and {sum(row['count'] for row in left):,} more, "
            f"{format_bytes(sum(row['bytes'] for row in left))}"
            if left
            else ""
        ),
        spare=("type",),
    )
