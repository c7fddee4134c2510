"""A plan as a page: figures, memory over time, every value and why, the program by regions.

Everything is in the markup, legible without scripts. A script adds the interactive parts: what is
alive at the moment under the pointer, a table that sorts and filters, values inside regions.
Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.units import format_bytes, format_seconds, format_share
from remat_opt.view import plan_rows, plan_words, regions
from remat_opt.view.memory_chart import MemoryChart, color
from remat_opt.view.page import part
from remat_opt.view.report import escape

#: How many values are on a notebook's page, which is stored with it, and on a separate page.
MOST_IN_NOTEBOOK, MOST_ALONE = 2_000, 100_000
#: Most rows of the table without scripts, and most modules shown in regions.
_MOST_STATIC, _MOST_NODES = 20, 400
#: How many arrays alive at a moment are named.
_MOST_ALIVE = 6
#: Sizes of pictures, in pixels, for a wide page and for a narrow one.
_WIDE, _NARROW = (820, 250), (400, 220)


def html(plan: Mapping[str, Any], most: int = MOST_IN_NOTEBOOK) -> str:
    """A plan as part of an HTML page.

    Args:
      plan: what ``Plan.to_dict`` gives, with printable texts.
      most: how many of the largest values are in its table.
    """
    charts = plan_words.charts(plan)
    margins = "".join(f"<li>{escape(one)}</li>" for one in plan_rows.margins(plan))
    values = plan_words.values(plan)
    shown = _shown(values, most)
    left = len(values) - len(shown)
    note = (
        f'<p class="ro-sub">The {len(shown):,} largest of {len(values):,} values; '
        "<code>plan.show()</code> and <code>plan.rows</code> have all.</p>"
        if left
        else ""
    )
    sections = [
        _header(plan),
        _warnings(plan),
        _memory(plan, charts),
        _section(
            "Values",
            f'<ul class="ro-margins">{margins}</ul>'
            f'<div class="ro-values">{_static_values(plan)}</div>{note}',
        )
        if values
        else "",
        _program(plan, values),
        _about(plan),
    ]
    return part("".join(sections), _data(plan, charts, values, shown))


def _section(heading: str, inside: str) -> str:
    return f"<section><h3>{escape(heading)}</h3>{inside}</section>"


# ---------------------------------------------------------------------------------- the figures


def _header(plan: Mapping[str, Any]) -> str:
    predicted, measured = plan["predicted"], plan["measured"]
    peak, unchanged = predicted["temporary_bytes"], predicted["plain_temporary_bytes"]
    of_time, of_flops = plan_words.overhead_shares(predicted)
    kept = plan_words.kept_count(plan)
    compiled = (
        _figure(
            "as compiled",
            format_bytes(measured["temporary_bytes"]),
            plan_words.difference(plan),
        )
        if measured is not None
        else _figure("as compiled", "not asked", "verify=True compiles the plan and measures it")
    )
    checkpointed = sum(stage["checkpointed"] for stage in plan["stages"])
    regions = str(len(plan["stages"])), f"{checkpointed} of them under jax.checkpoint"
    if plan["unchanged"]:
        regions = "none", "the function runs as it is"
    figures = [
        _figure(
            "peak of temporaries, predicted",
            format_bytes(peak),
            f"{format_share(peak / unchanged)} of the {format_bytes(unchanged)} of the unchanged "
            "function"
            if unchanged
            else "",
            share=peak / unchanged if unchanged else None,
        ),
        compiled,
        _figure(
            "recomputed",
            format_share(of_time),
            f"of a forward pass in time, {format_share(of_flops)} in FLOPs",
            share=of_time,
        ),
        _figure(
            "kept for the backward pass",
            format_bytes(predicted["kept_bytes"]),
            f"in {plan_words.counted(kept, 'value')}",
        ),
        _figure("regions", *regions),
    ]
    return (
        f"<header><h2>{escape(plan_words.title(plan))}</h2>"
        f'<p class="ro-sub">Asked for: {escape(plan_words.asked(plan))}</p></header>'
        f'<ul class="ro-figures">{"".join(figures)}</ul>'
    )


def _figure(label: str, said: str, more: str, share: float | None = None) -> str:
    meter = (
        f'<span class="ro-meter"><i style="width:{100 * min(share, 1.0):.1f}%"></i></span>'
        if share is not None
        else ""
    )
    return (
        # With spaces, because an untrusted notebook shows it without styles.
        f'<li><span class="ro-label">{escape(label)}</span> <b>{escape(said)}</b>{meter} '
        f'<span class="ro-sub">{escape(more)}</span></li>'
    )


def _warnings(plan: Mapping[str, Any]) -> str:
    found = plan_words.warnings(plan)
    if not found:
        return ""
    items = "".join(f"<li><b>{escape(what)}</b> {escape(remedy)}</li>" for what, remedy in found)
    return f'<ul class="ro-warnings">{items}</ul>'


def _about(plan: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(word)}</th><td>{escape(said)}</td></tr>'
        for word, said in [
            *plan_words.facts(plan),
            *(("note", note) for note in plan_words.notes(plan)),
        ]
    )
    return _section("About this plan", f'<table class="ro-facts"><tbody>{rows}</tbody></table>')


# ------------------------------------------------------------------------------ memory over time


def _memory(
    plan: Mapping[str, Any], charts: Sequence[tuple[MemoryChart, Mapping[str, Any]]]
) -> str:
    if not charts:
        return ""
    there = {
        band.kind: band.label for chart, _ in charts for band in chart.bands if any(band.amounts)
    }
    legend = "".join(
        f'<li title="{escape(plan_words.MEANINGS[kind])}">{_swatch(kind)}{escape(label)}</li>'
        for kind, label in there.items()
    )
    if any(chart.lines for chart, _ in charts):
        legend += '<li><span class="ro-swatch ro-line"></span>as compiled</li>'
    titles = {one["root"]: plan_words.value_title(one["name"]) for one in plan["decisions"]}
    notes = "".join(
        f"<li>{escape(said[0].upper() + said[1:])}.</li>" for said in plan_words.alive(plan)
    )
    figures = "".join(
        f'<figure class="ro-chart"><figcaption>{escape(caption)}{_parts(chart)}</figcaption>'
        '<div class="ro-plot">'
        f'<div class="ro-wide">{chart.svg(*_WIDE)}</div>'
        f'<div class="ro-narrow" style="display:none">{chart.svg(*_NARROW)}</div></div>'
        f'<div class="ro-alive">{_alive(chart, timeline, titles)}</div></figure>'
        for caption, (chart, timeline) in zip(
            ("With this plan", "The unchanged function"), charts, strict=True
        )
    )
    return _section(
        "Memory over time",
        f'<ul class="ro-legend">{legend}</ul><ul class="ro-margins">{notes}</ul>{figures}',
    )


def _parts(chart: MemoryChart) -> str:
    """How much of a picture is held throughout, and how much is temporaries."""
    if not chart.base:
        return ""
    most = chart.totals[chart.peak] - chart.base
    return (
        f' <span class="ro-sub">{format_bytes(chart.base)} held throughout, up to '
        f"{format_bytes(most)} of temporaries above</span>"
    )


def _swatch(kind: str) -> str:
    return f'<span class="ro-swatch" style="background:{color(kind)}"></span>'


def _alive(chart: MemoryChart, timeline: Mapping[str, Any], titles: Mapping[int, str]) -> str:
    """What is alive at the peak, largest first."""
    moment = chart.peak
    there = [one for one in timeline["arrays"] if one["first"] <= moment <= one["last"]]
    there.sort(key=lambda one: -one["bytes"])
    items = "".join(
        f'<li>{_swatch(one["kind"])}<span class="ro-name">'
        f"{_two_lines(_array_title(one, titles))}"
        f'</span><span class="ro-num">{format_bytes(one["bytes"])}</span></li>'
        for one in there[:_MOST_ALIVE]
    )
    rest = chart.totals[moment] - sum(one["bytes"] for one in there[:_MOST_ALIVE])
    more = (
        f'<li class="ro-sub"><span></span><span>and others</span><span class="ro-num">'
        f"{format_bytes(rest)}</span></li>"
        if rest > 0
        else ""
    )
    return (
        f'<p class="ro-moment"><b>At the peak: {format_bytes(chart.totals[moment])}</b>'
        f'<span class="ro-sub">step {timeline["at"][moment] + 1:,} of {timeline["steps"]:,}, '
        f"{timeline['phases'][moment]}</span></p><ul>{items}{more}</ul>"
    )


def _array_title(one: Mapping[str, Any], titles: Mapping[int, str]) -> str:
    """What an array is."""
    return str(one["title"]) if "title" in one else _title(one["root"], titles)


def _title(root: int, titles: Mapping[int, str]) -> str:
    """What the value made by an equation is."""
    return titles.get(root, "another value")


def _two_lines(title: str) -> str:
    """What a value is, with its extents below."""
    what, _, kind = title.rpartition(", ")
    return f'{escape(what)}<span class="ro-sub">{escape(kind)}</span>' if what else escape(kind)


# -------------------------------------------------------------------------------------- the values


def _shown(values: Sequence[Mapping[str, Any]], most: int) -> list[int]:
    """Numbers of the largest values, in order of the program."""
    order = sorted(range(len(values)), key=lambda number: -values[number]["bytes"])
    return sorted(order[:most])


def _static_values(plan: Mapping[str, Any]) -> str:
    """The largest values, as a table that needs no script."""
    rows = sorted(plan_rows.rows(plan), key=lambda row: -row["bytes"])
    body = "".join(
        f"<tr><td><b>{escape(row['value'])}</b>"
        f'<span class="ro-sub">{escape(_where(row))}</span></td>'
        f"<td>{_chip(row['fate'])}</td>"
        f'<td class="ro-num">{format_bytes(row["bytes"])}</td>'
        f'<td class="ro-num">{format_seconds(row["seconds"])}</td>'
        f'<td class="ro-why">{escape(row["why"])}</td></tr>'
        for row in rows[:_MOST_STATIC]
    )
    left = len(rows) - _MOST_STATIC
    more = (
        f'<p class="ro-sub">and {left:,} smaller ones. With scripts enabled, this is a table '
        "of all values that you can sort and filter.</p>"
        if left > 0
        else ""
    )
    return (
        '<table class="ro-table"><thead><tr><th scope="col">value</th><th scope="col">fate</th>'
        '<th scope="col" class="ro-num">bytes</th><th scope="col" class="ro-num">to recompute</th>'
        f'<th scope="col">why</th></tr></thead><tbody>{body}</tbody></table>{more}'
    )


def _where(row: Mapping[str, Any]) -> str:
    return " · ".join(filter(None, (row["iterations"], row["module"], row["source"])))


def _chip(fate: str) -> str:
    return f'<span class="ro-chip ro-{fate.replace(" ", "-")}">{escape(fate)}</span>'


# ------------------------------------------------------------------------------------- the program


def _program(plan: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> str:
    found = regions.regions(plan, values)
    if not found:
        return ""
    most = max((one.total_bytes for one in found), default=0)
    room = [_MOST_NODES]
    tree = "".join(_node(one, most, room) for one in found)
    legend = "".join(f"<li>{_chip(fate)}</li>" for fate in regions.FATES)
    return _section(
        "The program, by regions",
        f'<ul class="ro-legend">{legend}</ul><div class="ro-tree"><div class="ro-heads">'
        '<span>region, module, value</span><span class="ro-fate">bytes, by fate</span>'
        '<span class="ro-num">values</span><span class="ro-num">bytes</span>'
        f'<span class="ro-num">recomputed</span></div>{tree}</div>',
    )


def _node(node: regions.Node, most: int, room: list[int]) -> str:
    """A region, loop or module, folded; past a total limit, those inside are left out."""
    room[0] -= 1
    inner = ""
    for child in node.children:
        if room[0] > 0:
            inner += _node(child, most, room)
    bars = "".join(
        f'<i class="ro-{fate.replace(" ", "-")}" style="width:{100 * size / most:.2f}%" '
        f'title="{fate}: {format_bytes(size)}"></i>'
        for fate, size in zip(regions.FATES, node.bytes, strict=True)
        if size and most
    )
    recomputed = format_seconds(node.seconds) if node.seconds else ""
    values = ",".join(map(str, node.values))
    return (
        f'<details data-values="{values}"><summary><span class="ro-name">{escape(node.label)}'
        + (f' <span class="ro-sub">{escape(node.said)}</span>' if node.said else "")
        + f'</span><span class="ro-bar">{bars}</span>'
        f'<span class="ro-num">{node.count:,}</span>'
        f'<span class="ro-num">{format_bytes(node.total_bytes)}</span>'
        f'<span class="ro-num">{recomputed}</span></summary>'
        f'<div class="ro-inside">{inner}</div></details>'
    )


# --------------------------------------------------------------------------- what the script reads


def _data(
    plan: Mapping[str, Any],
    charts: Sequence[tuple[MemoryChart, Mapping[str, Any]]],
    listed: Sequence[Mapping[str, Any]],
    shown: Sequence[int],
) -> str:
    """Values and timelines as JSON, with each text stored once."""
    texts: dict[str, int] = {}

    def number_of(text: str) -> int:
        return texts.setdefault(text, len(texts))

    boundaries = plan_rows.boundary_roots(plan["stages"])
    reasons = list(plan_rows.WHY)
    values = [
        [
            number,
            number_of(plan_words.value_title(one["name"])),
            number_of(one["name"]["primitive"]),
            number_of(one["name"]["module"]),
            number_of(" · ".join(filter(None, (one["part"], one["name"]["source"])))),
            regions.FATES.index(one["fate"]),
            one["region"],
            one["times"],
            one["bytes"],
            _rounded(one["seconds"]),
            reasons.index(plan_rows.reason_of(one, boundaries)),
        ]
        for number in shown
        for one in [listed[number]]
    ]
    titles = {one["root"]: plan_words.value_title(one["name"]) for one in plan["decisions"]}

    # The same for all of them.
    kinds = [(band.kind, band.label) for chart, _ in charts[:1] for band in chart.bands]
    places = {kind: place for place, (kind, _) in enumerate(kinds)}
    told = [
        {
            "steps": timeline["steps"],
            "at": timeline["at"],
            "phases": timeline["phases"],
            "values": [number_of(_title(root, titles)) for root in timeline["roots"]],
            "bands": [list(band.amounts) for band in chart.bands],
            "arrays": [
                [
                    number_of(_array_title(one, titles)),
                    places[one["kind"]],
                    one["bytes"],
                    one["first"],
                    one["last"],
                ]
                for one in timeline["arrays"]
            ],
            "compiled": [[chart.base + one for one in line.amounts] for line in chart.lines],
        }
        for chart, timeline in charts
    ]
    return json.dumps(
        {
            "values": values,
            "charts": told,
            "kinds": [[color(kind), label] for kind, label in kinds],
            "fates": list(regions.FATES),
            "why": list(plan_rows.WHY.values()),
            "texts": list(texts),
        },
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _rounded(seconds: float) -> float:
    """To four digits."""
    if not seconds:
        return 0
    return round(seconds, 3 - math.floor(math.log10(abs(seconds))))
