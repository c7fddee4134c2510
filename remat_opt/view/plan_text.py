"""A plan in a terminal: facts, memory over time, tables; from plain data only.

A plan of a real network holds hundreds of values, most of them the same from layer to layer. Values
of one kind and source line share a row if their modules differ only in numbers.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_opt.units import format_bytes, format_flops, format_seconds
from remat_opt.view import plan_rows, plan_words, report

#: Rows of a table; the rest is summed up below it.
_MOST_ROWS = 12
#: Lines of at least this many characters have room for all columns.
_WIDE = 150
#: Characters of a picture.
_MOST_WIDTH = 100

_NUMBER = re.compile(r"\d+")


def text(plan: Mapping[str, Any], width: int = report.WIDTH) -> str:
    """A plan as text.

    Args:
      plan: what ``Plan.to_dict`` gives.
      width: that of the terminal, in characters. Longer lines are cut or wrapped.
    """
    plan = printable_data(plan)
    facts = plan_words.facts(plan)
    facts += [("warning", f"{what} {remedy}") for what, remedy in plan_words.warnings(plan)]
    facts += [("note", note) for note in plan_words.notes(plan)]
    head = f"{plan_words.title(plan)}\n{report.facts_text(facts, width)}"
    charts = [chart.text(min(width, _MOST_WIDTH)) for chart, _ in plan_words.charts(plan)]
    parts = [_wrapped(chart, width) for chart in charts]
    margins = _wrapped("\n".join(plan_rows.margins(plan)), width)
    parts += [_wrapped(table.text(width), width) for table in _tables(plan, width)]
    return "\n\n".join(filter(None, [head, *parts, margins]))


def _wrapped(text: str, width: int) -> str:
    """The text with its long lines broken."""
    return "\n".join(
        textwrap.fill(line, width) if len(line) > width else line for line in text.split("\n")
    )


def printable(text: str) -> str:
    r"""The text with everything that a terminal would take for commands escaped.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def printable_data(thing: Any) -> Any:
    """The plan with printable texts: names come from users' code or from files."""
    if isinstance(thing, str):
        return printable(thing)
    if isinstance(thing, Mapping):
        return {key: printable_data(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [printable_data(item) for item in thing]
    return thing


def _tables(plan: Mapping[str, Any], width: int) -> list[report.Table]:
    """What is kept, what is recomputed and what is alive at the peak.

    A value's description already implies most of its module, so in little room that column, FLOPs
    and function names are left out.
    """
    narrow = width < _WIDE
    tables = [
        _values_table("Kept", plan, "kept", by="bytes"),
        _values_table("Recomputed", plan, "recomputed", by="seconds"),
        _alive_table(plan),
    ]
    return [_narrow(table) if narrow else table for table in tables if table.rows]


def _narrow(table: report.Table) -> report.Table:
    """The table, without the columns that do not fit."""
    kept = [n for n, heading in enumerate(table.headings) if heading not in ("module", "FLOPs")]
    source = table.headings.index("source")

    def of(cells: Sequence[str]) -> tuple[str, ...]:
        return tuple(cells[n].partition(" (")[0] if n == source else cells[n] for n in kept)

    return dataclasses.replace(
        table,
        headings=of(table.headings),
        rows=tuple(map(of, table.rows)),
        align="".join(of(table.align)),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Values of repeated layers, merged."""

    value: str
    source: str
    module: str
    role: str
    count: int
    bytes: int
    seconds: float
    flops: int


def _folded(values: Iterable[Mapping[str, Any]]) -> list[_Row]:
    """Values that differ only in module numbers, added up; in order of first occurrence."""
    groups: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for value in values:
        name = value["name"]
        patterns = (tuple(_NUMBER.split(name[key])) for key in ("what", "module"))
        key = (
            *patterns,
            name["primitive"],
            name["source"],
            plan_words.value_title({**name, "what": ""}),
            value.get("role", ""),
        )
        groups.setdefault(key, []).append(value)
    return [
        _Row(
            value=plan_words.value_title(
                {**group[0]["name"], "what": _common([one["name"]["what"] for one in group])}
            ),
            source=group[0]["name"]["source"],
            module=_common([one["name"]["module"] for one in group]),
            role=group[0].get("role", ""),
            count=sum(one.get("count", 1) for one in group),
            bytes=sum(one["bytes"] for one in group),
            seconds=sum(_each_time(one, "seconds") for one in group),
            flops=int(sum(_each_time(one, "flops") for one in group)),
        )
        for group in groups.values()
    ]


def _each_time(value: Mapping[str, Any], what: str) -> float:
    """What recomputing a value takes, as often as planned."""
    return float(value.get(what, 0) * max(1, value.get("times", 1)))


def _common(texts: Sequence[str]) -> str:
    """One text for several that differ in numbers, with ``*`` for those.

    >>> _common(["stage_1/block_2", "stage_1/block_3"])
    'stage_1/block_*'
    """
    numbers = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    kept = iter([found[0] if len(set(found)) == 1 else "*" for found in numbers])
    return _NUMBER.sub(lambda _: next(kept), texts[0])


def _values_table(title: str, plan: Mapping[str, Any], fate: str, *, by: str) -> report.Table:
    values = [one for one in plan_words.values(plan) if one["fate"] == fate]
    rows = sorted(_folded(values), key=lambda row: -getattr(row, by))
    shown, left = rows[:_MOST_ROWS], rows[_MOST_ROWS:]
    total = sum(value["bytes"] for value in values)
    seconds = sum(_each_time(value, "seconds") for value in values)
    said = (
        f"{format_bytes(total)} of which computing again would take {format_seconds(seconds)}"
        if fate == "kept"
        else f"in {format_seconds(seconds)}"
    )
    return report.Table(
        title=f"{title}: {plan_words.counted(sum(v['count'] for v in values), 'value')}, {said}",
        headings=("value", "", "module", "source", "bytes", "to recompute", "FLOPs"),
        rows=tuple(
            (
                row.value,
                _times(row.count),
                row.module,
                row.source,
                format_bytes(row.bytes),
                format_seconds(row.seconds),
                format_flops(row.flops),
            )
            for row in shown
        ),
        align="lrllrrr",
        footer=_rest(left),
    )


def _alive_table(plan: Mapping[str, Any]) -> report.Table:
    pins = plan["predicted"]["pins"]
    rows = sorted(_folded(pins), key=lambda row: -row.bytes)
    left = plan["predicted"]["temporary_bytes"] - sum(pin["bytes"] for pin in pins)
    return report.Table(
        title="Alive at the predicted peak",
        headings=("value", "", "module", "source", "bytes", "why"),
        rows=tuple(
            (
                row.value,
                _times(row.count),
                row.module,
                row.source,
                format_bytes(row.bytes),
                plan_words.ROLES.get(row.role, row.role),
            )
            for row in rows
        ),
        align="lrllrl",
        footer=f"and others, {format_bytes(left)}" if left > 0 else "",
    )


def _rest(left: Sequence[_Row]) -> str:
    if not left:
        return ""
    count = sum(row.count for row in left)
    return f"and {count} more, {format_bytes(sum(row.bytes for row in left))}"


def _times(count: int) -> str:
    return f"{count} x" if count > 1 else ""
