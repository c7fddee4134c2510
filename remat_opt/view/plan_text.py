"""A plan for the eye: tables in a terminal, a page in a notebook. From plain data only.

A plan of a real network holds hundreds of values, most of them the same from layer to
layer. Values of one label and source line, under modules that differ in their numbers
alone, share a row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_opt.recomputation import Recomputation
from remat_opt.units import format_bytes, format_flops, format_seconds, format_share
from remat_opt.view import report

#: Rows of a table; what is left is summed up below it.
_MOST_ROWS = 12
#: Characters of a module's path in a terminal; the end says most.
_MOST_MODULE = 44

_NUMBER = re.compile(r"\d+")

_ROLES = {
    "kept": "kept for the backward pass",
    "forward": "waits for a later step of the forward pass",
    "recomputed": "recomputed",
    "cotangent": "gradient of the value",
    "internal": "inside the equation",
    "workspace": "needed while its gradient is taken",
}


def text(plan: Mapping[str, Any]) -> str:
    """A plan as text.

    Args:
      plan: what ``Plan.to_dict`` gives.
    """
    plan = _printable(plan)
    parts = [_title(plan), report.facts_text(_facts(plan))]
    parts += [profile.text() for profile in _profiles(plan)]
    parts += [table.text() for table in _tables(plan, shorten=True)]
    return "\n\n".join(["\n".join(parts[:2]), *parts[2:]])


def html(plan: Mapping[str, Any]) -> str:
    """A plan as a part of an HTML page: tables and the picture of memory over time.

    Args:
      plan: what ``Plan.to_dict`` gives.
    """
    plan = _printable(plan)
    parts = [report.facts_html(_facts(plan))]
    parts += [profile.svg() for profile in _profiles(plan)]
    parts += [table.html() for table in _tables(plan, shorten=False)]
    return report.section(_title(plan), *parts)


def printable(text: str) -> str:
    r"""The text with escapes in the place of what a terminal would take for commands.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _printable(thing: Any) -> Any:
    """The plan with printable texts: names come from users' code or from files."""
    if isinstance(thing, str):
        return printable(thing)
    if isinstance(thing, Mapping):
        return {key: _printable(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_printable(item) for item in thing]
    return thing


def _title(plan: Mapping[str, Any]) -> str:
    return f"Plan of {plan['function']} for {plan['device']}"


def _facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    predicted = plan["predicted"]
    kept = _with_fate(plan, "kept")
    facts = [
        ("asked for", _asked(plan)),
        ("predicted", _peak(predicted)),
        ("recomputed", _overhead(predicted)),
        (
            "kept",
            f"{format_bytes(predicted['kept_bytes'])} in {_count(len(kept), 'value')} "
            "wait for the backward pass",
        ),
        ("regions", _regions(plan["stages"])),
    ]
    sources = {decision["root"]: decision["source"] for decision in plan["decisions"]}
    for loop in plan["loops"]:
        source = sources.get(loop["root"])
        facts.append(("loop", _loop(loop) + (f"; {source}" if source else "")))
    if plan["measured"] is not None:
        facts += _measured(plan["measured"], predicted)
    facts.append(
        (
            "made by",
            f"remat_opt {plan['remat_opt_version']}, JAX {plan['jax_version']}, "
            f"solver {plan['solver']}, program {plan['fingerprint'][:12]}",
        )
    )
    facts += [("note", note) for note in plan["notes"]]
    return facts


def _regions(stages: Sequence[Mapping[str, Any]]) -> str:
    checkpointed = sum(stage["checkpointed"] for stage in stages)
    said = f"{len(stages)}, {checkpointed} of them under jax.checkpoint"
    nested = sum(_inside(stage) for stage in stages)
    return f"{said}, {nested} more inside them" if nested else said


def _loop(loop: Mapping[str, Any]) -> str:
    """What the iterations of an opened loop keep."""
    return f"scan of {_length(loop['parts'])}: " + ", then ".join(map(_part, loop["parts"]))


def _length(parts: Sequence[Mapping[str, Any]]) -> int:
    return sum(part["length"] for part in parts)


def _part(part: Mapping[str, Any]) -> str:
    said = f"{part['length']}"
    if part["inside"]:
        size = _length(part["inside"])
        return f"{said} in chunks of {size} ({', then '.join(map(_part, part['inside']))})"
    kept = _count(len(part["kept"]), "value")
    said += (
        f" that keep {format_bytes(part['kept_bytes'])} in {kept} each"
        if part["kept"]
        else (" that keep nothing but what they are handed")
    )
    nested = [_loop(one) for one in part["loops"]]
    return said + (f" (inside: {'; '.join(nested)})" if nested else "")


def _inside(stage: Mapping[str, Any]) -> int:
    return sum(1 + _inside(one) for one in stage["inside"])


def _asked(plan: Mapping[str, Any]) -> str:
    objective = plan["objective"]
    counted = "FLOPs" if objective["overhead"] == "flops" else "seconds"
    if objective["max_overhead"] is not None:
        share = format_share(objective["max_overhead"])
        return f"least memory with at most {share} of a forward pass recomputed (in {counted})"
    if plan["budget_bytes"] is not None:
        share = objective["budget_share"]
        said = f", {format_share(share)} of the unchanged function's" if share is not None else ""
        if objective["fit"]:
            said = (
                ", the device's memory less arguments, outputs and a reserve of "
                f"{format_bytes(objective['reserve_bytes'])}"
            )
        return (
            f"least overhead (in {counted}) with temporaries within "
            f"{format_bytes(plan['budget_bytes'])}{said}"
        )
    return "least memory"


def _peak(predicted: Mapping[str, Any]) -> str:
    peak, unchanged = predicted["temporary_bytes"], predicted["plain_temporary_bytes"]
    share = f", {format_share(peak / unchanged)} of it" if unchanged else ""
    model = predicted["model_bytes"]
    before = f", and {format_bytes(model)} before anything was learnt" if model != peak else ""
    return (
        f"{format_bytes(peak)} of temporaries at the peak{before} "
        f"(unchanged function: {format_bytes(unchanged)}{share})"
    )


def _overhead(predicted: Mapping[str, Any]) -> str:
    seconds, forward = predicted["overhead_seconds"], predicted["forward_seconds"]
    flops, forward_flops = predicted["recomputed_flops"], predicted["forward_flops"]
    return (
        f"{format_share(seconds / forward if forward else 0.0)} of a forward pass in time "
        f"({format_seconds(seconds)}), "
        f"{format_share(flops / forward_flops if forward_flops else 0.0)} in FLOPs "
        f"({format_flops(flops)})"
    )


def _measured(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    expected = predicted["temporary_bytes"]
    found = measured["temporary_bytes"]
    difference = f", {(found - expected) / expected:+.1%} from predicted" if expected else ""
    facts = [
        (
            "compiled",
            f"{format_bytes(found)} of temporaries{difference}; arguments "
            f"{format_bytes(measured['argument_bytes'])}, outputs "
            f"{format_bytes(measured['output_bytes'])}; "
            f"in {format_seconds(measured['compile_seconds'])}",
        )
    ]
    if measured["recomputation"] is not None:
        survival = Recomputation.from_plain(measured["recomputation"])
        if not survival.undone:  # Else a note says so.
            facts.append(("survived", survival.text()))
    if measured["host_bytes"]:
        facts.append(("host memory", format_bytes(measured["host_bytes"])))
    return facts + [("note", note) for note in measured["notes"]]


def _profiles(plan: Mapping[str, Any]) -> list[report.Profile]:
    """Memory over time as predicted, and as compiled where that is known, on the same axes."""
    predicted = plan["predicted"]
    if not predicted["timeline"]:
        return []
    levels = [("unchanged function", predicted["plain_temporary_bytes"])]
    if plan["budget_bytes"] is not None:
        levels.append(("budget", plan["budget_bytes"]))
    timelines = [("predicted", predicted["timeline"]), ("as compiled", plan["as_compiled"])]
    highest = max([*predicted["timeline"], *plan["as_compiled"], *(level for _, level in levels)])
    return [
        report.Profile(
            title=f"Temporaries over time ({title})",
            amounts=tuple(amounts),
            x=report.steps_axis("step: forward, then backward"),
            y=report.bytes_axis("temporaries", highest),
            levels=tuple(levels),
        )
        for title, amounts in timelines
        if amounts
    ]


def _tables(plan: Mapping[str, Any], *, shorten: bool) -> list[report.Table]:
    tables = [
        _values_table("Kept", plan, "kept", by="bytes", shorten=shorten),
        _values_table("Recomputed", plan, "recomputed", by="seconds", shorten=shorten),
        _alive_table(plan, shorten=shorten),
    ]
    return [table for table in tables if table.rows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Values of repeated layers, together."""

    label: str
    source: str
    module: str
    role: str
    count: int
    bytes: int
    seconds: float
    flops: int


def _with_fate(plan: Mapping[str, Any], fate: str) -> list[Mapping[str, Any]]:
    return [decision for decision in plan["decisions"] if decision["fate"] == fate]


def _folded(values: Iterable[Mapping[str, Any]]) -> list[_Row]:
    """Values that differ in the numbers of their modules alone, added up; in order of first."""
    groups: dict[tuple[str, str, tuple[str, ...], str], list[Mapping[str, Any]]] = {}
    for value in values:
        pattern = tuple(_NUMBER.split(value["module"]))
        key = (value["label"], value["source"], pattern, value.get("role", ""))
        groups.setdefault(key, []).append(value)
    return [
        _Row(
            label=label,
            source=source,
            module=_common([value["module"] for value in group]),
            role=role,
            count=len(group),
            bytes=sum(value["bytes"] for value in group),
            seconds=sum(_each_time(value, "seconds") for value in group),
            flops=int(sum(_each_time(value, "flops") for value in group)),
        )
        for (label, source, _, role), group in groups.items()
    ]


def _each_time(value: Mapping[str, Any], what: str) -> float:
    """What computing a value again takes, as often as it is planned."""
    return float(value.get(what, 0) * max(1, value.get("times", 1)))


def _common(modules: Sequence[str]) -> str:
    """The one path of modules that differ in numbers: ``*`` where they do.

    >>> _common(["stage_1/block_2", "stage_1/block_3"])
    'stage_1/block_*'
    """
    numbers = zip(*(_NUMBER.findall(module) for module in modules), strict=True)
    kept = iter([found[0] if len(set(found)) == 1 else "*" for found in numbers])
    return _NUMBER.sub(lambda _: next(kept), modules[0])


def _values_table(
    title: str, plan: Mapping[str, Any], fate: str, *, by: str, shorten: bool
) -> report.Table:
    values = _with_fate(plan, fate)
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
        title=f"{title}: {_count(len(values), 'value')}, {said}",
        headings=("value", "", "module", "source", "bytes", "to recompute", "FLOPs"),
        rows=tuple(
            (
                row.label,
                _times(row.count),
                _shortened(row.module) if shorten else row.module,
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


def _alive_table(plan: Mapping[str, Any], *, shorten: bool) -> report.Table:
    pins = plan["predicted"]["pins"]
    rows = sorted(_folded(pins), key=lambda row: -row.bytes)
    left = plan["predicted"]["temporary_bytes"] - sum(pin["bytes"] for pin in pins)
    return report.Table(
        title="Alive at the predicted peak",
        headings=("value", "", "module", "source", "bytes", "why"),
        rows=tuple(
            (
                row.label,
                _times(row.count),
                _shortened(row.module) if shorten else row.module,
                row.source,
                format_bytes(row.bytes),
                _ROLES.get(row.role, row.role),
            )
            for row in rows
        ),
        align="lrllrl",
        footer=f"and smaller ones, {format_bytes(left)}" if left > 0 else "",
    )


def _rest(left: Sequence[_Row]) -> str:
    if not left:
        return ""
    count = sum(row.count for row in left)
    return f"and {count} more, {format_bytes(sum(row.bytes for row in left))}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _times(count: int) -> str:
    return f"{count} x" if count > 1 else ""


def _shortened(module: str) -> str:
    if len(module) <= _MOST_MODULE:
        return module
    return "..." + module[-(_MOST_MODULE - 3) :]
