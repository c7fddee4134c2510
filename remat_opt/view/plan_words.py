"""What there is to say about a plan, in words and charts, for both the page and the terminal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.naming import extents
from remat_opt.recomputation import Recomputation
from remat_opt.units import format_bytes, format_flops, format_seconds, format_share
from remat_opt.view.memory_chart import Band, Level, Line, MemoryChart

#: Names for the kinds of a timeline.
KINDS = {
    "kept": "kept",
    "boundaries": "boundaries",
    "passing": "in passing",
    "recomputed": "recomputed",
    "gradients": "gradients",
    "workspace": "workspace",
}
#: What a training step holds throughout, besides temporaries: keys of ``resident`` in a plan, and
#: their names.
RESIDENT = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "inputs": "inputs",
    "results": "results",
}
#: What each of these is.
MEANINGS = {
    "parameters": "held throughout: what is trained",
    "optimizer state": "held throughout: what the optimizer keeps from step to step",
    "inputs": "held throughout: the batch and other arguments",
    "results": "held throughout: results of the step that fit into no donated argument",
    "kept": "waits for the backward pass of its own region",
    "boundaries": "waits for the backward pass of a later region",
    "passing": "waits for a later step of the forward pass",
    "recomputed": "computed again, for the backward pass of its region",
    "gradients": "gradients of values, and of parameters if these are temporaries",
    "workspace": "memory that a step takes while it runs",
}
#: What the roles of arrays at the peak are.
ROLES = {
    "kept": "kept for the backward pass",
    "forward": "waits for a later step of the forward pass",
    "recomputed": "recomputed",
    "cotangent": "gradient of the value",
    "internal": "inside the equation",
    "workspace": "needed while its gradient is taken",
}
#: Compiled figures this far from predicted ones are worth a warning, as a share.
_FAR = 0.15


def title(plan: Mapping[str, Any]) -> str:
    """The title of the whole."""
    return f"Plan of {plan['function']} for {plan['device']}"


def value_title(name: Mapping[str, Any]) -> str:
    """What a value is, with its extents."""
    return f"{name['what']}, {extents(tuple(name['shape']), name['dtype'])}"


def values(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The decisions of a plan, each loop's followed by those inside it, with the same keys.

    ``part`` says which iterations or branch, and is "" outside loops and choices; ``count`` is the
    number of similar values; ``outer_module``, ``outer_source`` and ``outer_primitive`` are those
    of the loop or choice.

    Args:
      plan: what ``Plan.to_dict`` gives.
    """
    inside: dict[int, list[Mapping[str, Any]]] = {}
    for one in plan["loop_values"]:
        inside.setdefault(one["loop"], []).append(one)
    found = []
    for one in plan["decisions"]:
        outer = {
            "outer_module": one["name"]["module"],
            "outer_source": one["name"]["source"],
            "outer_primitive": one["name"]["primitive"],
        }
        found.append({**one, **outer, "part": "", "count": 1, "handed_on": False})
        found += [
            {**_all_iterations(within), **outer, "root": one["root"], "region": one["region"]}
            for within in inside.get(one["root"], ())
        ]
    return found


def _all_iterations(value: Mapping[str, Any]) -> dict[str, Any]:
    """A value inside a loop, for all the iterations of its part together."""
    runs = value["runs"]
    return {
        **{key: value[key] for key in ("name", "fate", "times", "part", "handed_on")},
        "count": runs,
        **{key: runs * value[key] for key in ("bytes", "seconds", "flops")},
    }


def kept_count(plan: Mapping[str, Any]) -> int:
    """How many values wait for the backward pass; inside a loop, those of each iteration."""
    outside: int = sum(one["fate"] == "kept" for one in plan["decisions"])
    inside: int = sum(one["runs"] for one in plan["loop_values"] if one["fate"] == "kept")
    return outside + inside


def facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a word and what is said about it."""
    predicted = plan["predicted"]
    found = [
        ("asked for", asked(plan)),
        ("predicted", _peak(predicted)),
        *(("", said) for said in alive(plan)),
        ("recomputed", _overhead(predicted)),
        (
            "kept",
            f"{format_bytes(predicted['kept_bytes'])} in {counted(kept_count(plan), 'value')} "
            "wait for the backward pass",
        ),
        ("regions", _regions(plan)),
    ]
    sources = {one["root"]: one["name"]["source"] for one in plan["decisions"]}
    for loop in plan["loops"]:
        source = sources.get(loop["root"])
        kind = "branches" if "branches" in loop else "map" if "body" in loop else "loop"
        found.append((kind, loop_words(loop) + (f"; {source}" if source else "")))
    if plan["measured"] is not None:
        found += _measured(plan["measured"], predicted)
    found.append(
        (
            "made by",
            f"remat_opt {plan['remat_opt_version']}, JAX {plan['jax_version']}, "
            f"solver {plan['solver']}, program {plan['fingerprint'][:12]}",
        )
    )
    return found


def notes(plan: Mapping[str, Any]) -> list[str]:
    """What a reader must know about the plan and what was compiled."""
    measured = plan["measured"]
    return [*(measured["notes"] if measured is not None else ()), *plan["notes"]]


def warnings(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of what is wrong and what to do about it."""
    found = []
    measured, predicted, budget = plan["measured"], plan["predicted"], plan["budget_bytes"]
    if measured is None:
        return []
    compiled, expected = measured["temporary_bytes"], predicted["temporary_bytes"]
    if budget is not None and compiled > budget:
        found.append(
            (
                f"The budget is not met: compiled, the plan needs {format_bytes(compiled)}, and "
                f"{format_bytes(budget)} were asked for.",
                'verify="compile" chooses by what the compiler says.',
            )
        )
    elif expected and abs(compiled - expected) > _FAR * expected:
        found.append(
            (
                f"The compiler needs {compiled / expected:.0%} of what was "
                f"predicted: {format_bytes(compiled)}, not {format_bytes(expected)}.",
                'verify="compile" learns from what was compiled and solves again.',
            )
        )
    if measured["recomputation"] is not None:
        survival = Recomputation.from_plain(measured["recomputation"])
        if survival.undone:
            found.append(
                (
                    "The compiler has undone some of the recomputation.",
                    "The notes say which; compile with the options that they name.",
                )
            )
    return found


def asked(plan: Mapping[str, Any]) -> str:
    """What the plan was asked to achieve."""
    objective = plan["objective"]
    measure = "FLOPs" if objective["overhead"] == "flops" else "seconds"
    if objective["max_overhead"] is not None:
        share = format_share(objective["max_overhead"])
        return f"least memory with at most {share} of a forward pass recomputed (in {measure})"
    if plan["budget_bytes"] is not None:
        share = objective["budget_share"]
        said = f", {format_share(share)} of {_whole(plan, share)}" if share is not None else ""
        if objective["fit"]:
            said = (
                ", the device's memory less arguments, outputs and a reserve of "
                f"{format_bytes(objective['reserve_bytes'])}"
            )
        return (
            f"least overhead (in {measure}) with temporaries within "
            f"{format_bytes(plan['budget_bytes'])}{said}"
        )
    return "least memory"


def _whole(plan: Mapping[str, Any], share: float) -> str:
    """What a budget is a share of; in a step, what the unchanged function compiles to."""
    whole_bytes = plan["budget_bytes"] / share
    if abs(whole_bytes - plan["predicted"]["plain_temporary_bytes"]) <= 1 / share:
        return "the unchanged function's"
    return f"the {format_bytes(round(whole_bytes))} that the unchanged function compiles to"


def loop_words(loop: Mapping[str, Any]) -> str:
    """What iterations of an opened loop, branches of a choice, or the body of a map keep."""
    if "branches" in loop:
        branches = loop["branches"]
        return f"cond of {len(branches)}: " + ", or ".join(map(_branch, branches))
    if "body" in loop:
        return f"shard_map: {_kept(loop['body'])}"
    where = ", in the stacks of gradients where it fits" if loop["in_gradients"] else ""
    return f"scan of {_length(loop['parts'])}: {_parts(loop['parts'])}{where}"


def alive(plan: Mapping[str, Any]) -> list[str]:
    """Why temporaries differ from what is alive at once, if they do.

    The chart over time shows what is alive; temporaries are what the program needs in all.
    """
    predicted, measured = plan["predicted"], plan["measured"]
    found = _gaps("", predicted["temporary_bytes"], predicted["timeline"])
    found += _gaps(
        "of the unchanged function, ",
        predicted["plain_temporary_bytes"],
        predicted["plain_timeline"],
    )
    compiled = max(plan["as_compiled"], default=0)
    if measured is not None and compiled and _differ(compiled, measured["temporary_bytes"]):
        found.append(
            f"as compiled, up to {format_bytes(compiled)} are alive at once, in "
            f"{format_bytes(measured['temporary_bytes'])} of temporaries"
        )
    return found


def _gaps(whose: str, needed: int, timeline: Mapping[str, Any]) -> list[str]:
    most = _most_alive(timeline)
    if not most or not _differ(needed, most):
        return []
    if needed > most:
        return [
            f"{whose}at most {format_bytes(most)} are alive at once; the other "
            f"{format_bytes(needed - most)} are gaps between arrays"
        ]
    return [
        f"{whose}up to {format_bytes(most)} are alive at once; {format_bytes(most - needed)} of it "
        "take no temporary memory, but lie where results go, or on the chip"
    ]


def _most_alive(timeline: Mapping[str, Any]) -> int:
    return max(map(sum, zip(*(timeline[kind] for kind in KINDS), strict=True)), default=0)


def _differ(one: int, other: int) -> bool:
    """Whether two amounts differ when written out."""
    return format_bytes(one) != format_bytes(other)


def charts(plan: Mapping[str, Any]) -> list[tuple[MemoryChart, Mapping[str, Any]]]:
    """Memory over time as planned and for the unchanged function, on one scale.

    If the plan was made in a training step, what the step holds throughout is below the
    temporaries.

    Returns:
      Each with its timeline: what is alive when. An array there that is not a value of the program
      has a ``title``.
    """
    predicted = plan["predicted"]
    if not predicted["timeline"]["at"]:
        return []
    planned = _chart(
        plan,
        "planned",
        predicted["timeline"],
        predicted["temporary_bytes"],
        tuple(plan["as_compiled"]),
    )
    unchanged = _chart(
        plan,
        "unchanged function",
        predicted["plain_timeline"],
        predicted["plain_temporary_bytes"],
        (),
    )
    top = max(planned.highest, unchanged.highest)
    return [
        (dataclasses.replace(planned, top=top), _with_resident(plan, predicted["timeline"])),
        (
            dataclasses.replace(unchanged, top=top),
            _with_resident(plan, predicted["plain_timeline"]),
        ),
    ]


def _resident(plan: Mapping[str, Any]) -> dict[str, int]:
    """What is held throughout, by its name."""
    there = plan["resident"] or {}
    return {label: there[key] for key, label in RESIDENT.items() if there.get(key)}


def _chart(
    plan: Mapping[str, Any],
    title: str,
    timeline: Mapping[str, Any],
    needed_bytes: int,
    as_compiled: tuple[int, ...],
) -> MemoryChart:
    phases, resident = timeline["phases"], _resident(plan)
    bands = [
        Band(label=label, kind=label, amounts=(size,) * len(phases))
        for label, size in resident.items()
    ]
    bands += [
        Band(label=label, kind=kind, amounts=tuple(timeline[kind])) for kind, label in KINDS.items()
    ]
    levels = []
    if plan["budget_bytes"] is not None:
        label = "budget for temporaries" if resident else "budget"
        levels.append(Level(label=label, amount=plan["budget_bytes"]))
    if _differ(needed_bytes, _most_alive(timeline)):
        levels.append(Level(label="temporaries", amount=needed_bytes))
    return MemoryChart(
        title=f"Memory over time, {title}",
        bands=tuple(bands),
        lines=(Line(label="as compiled", amounts=as_compiled),) if as_compiled else (),
        levels=tuple(levels),
        turn=next((n for n, phase in enumerate(phases) if phase != "forward"), None),
        base=sum(resident.values()),
    )


def _with_resident(plan: Mapping[str, Any], timeline: Mapping[str, Any]) -> Mapping[str, Any]:
    """The timeline with what is held throughout added to its arrays."""
    last = len(timeline["at"]) - 1
    there = [
        {"root": -1, "title": label, "kind": label, "bytes": size, "first": 0, "last": last}
        for label, size in _resident(plan).items()
    ]
    return {**timeline, "arrays": [*there, *timeline["arrays"]]}


def counted(number: int, what: str) -> str:
    """A number of things, in words.

    >>> counted(1, "value"), counted(3, "value")
    ('1 value', '3 values')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def difference(plan: Mapping[str, Any]) -> str:
    """How far the compiled figure is from the predicted one; "" if unknown."""
    expected = plan["predicted"]["temporary_bytes"]
    if plan["measured"] is None or not expected:
        return ""
    return f"{(plan['measured']['temporary_bytes'] - expected) / expected:+.1%} from predicted"


def _regions(plan: Mapping[str, Any]) -> str:
    if plan["unchanged"]:
        return "none: the function runs as it is"
    stages = plan["stages"]
    checkpointed = sum(stage["checkpointed"] for stage in stages)
    said = f"{len(stages)}, {checkpointed} of them under jax.checkpoint"
    nested = sum(inside(stage) for stage in stages)
    return f"{said}, {nested} more inside them" if nested else said


def inside(stage: Mapping[str, Any]) -> int:
    """How many regions a region holds."""
    return sum(1 + inside(one) for one in stage["inside"])


def _length(parts: Sequence[Mapping[str, Any]]) -> int:
    return sum(part["length"] for part in parts)


def _parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """What the parts of a loop keep, in order; neighbours with equal descriptions are merged."""
    groups = itertools.groupby(parts, key=lambda part: _part({**part, "length": 2}))
    return ", then ".join(
        _part({**part, "length": _length([part, *others])}) for _, (part, *others) in groups
    )


def _part(part: Mapping[str, Any]) -> str:
    said = f"{part['length']}"
    if part["inside"]:
        return f"{said} in chunks of {_length(part['inside'])} ({_parts(part['inside'])})"
    kept = counted(len(part["kept"]), "value")
    keep, each, their = ("keeps", "", "its") if part["length"] == 1 else ("keep", " each", "their")
    if not part["checkpointed"]:
        regions = counted(len(part["stages"]), "region")
        said += f" that {keep} {format_bytes(part['kept_bytes'])} in {regions}{each}"
    elif part["kept"]:
        said += f" that {keep} {format_bytes(part['kept_bytes'])} in {kept}{each}"
    else:
        said += f" that {keep} only {their} inputs"
    nested = [loop_words(one) for one in part["loops"]]
    return said + (f" (inside: {'; '.join(nested)})" if nested else "")


def _branch(branch: Mapping[str, Any]) -> str:
    return f"one that {_kept(branch)}" if branch["stages"] else "one as it is"


def _kept(branch: Mapping[str, Any]) -> str:
    regions = counted(len(branch["stages"]), "region")
    said = f"keeps {format_bytes(branch['kept_bytes'])} in {regions}"
    nested = [loop_words(one) for one in branch["loops"]]
    return said + (f" (inside: {'; '.join(nested)})" if nested else "")


def _peak(predicted: Mapping[str, Any]) -> str:
    peak, unchanged = predicted["temporary_bytes"], predicted["plain_temporary_bytes"]
    share = f", {format_share(peak / unchanged)} of it" if unchanged else ""
    model = predicted["model_bytes"]
    before = f", and {format_bytes(model)} before anything was learnt" if model != peak else ""
    return (
        f"{format_bytes(peak)} of temporaries at the peak{before} "
        f"(unchanged function: {format_bytes(unchanged)}{share})"
    )


def overhead_shares(predicted: Mapping[str, Any]) -> tuple[float, float]:
    """Recomputation as shares of one forward pass: of its time, and of its FLOPs."""
    seconds, flops = predicted["forward_seconds"], predicted["forward_flops"]
    return (
        predicted["overhead_seconds"] / seconds if seconds else 0.0,
        predicted["recomputed_flops"] / flops if flops else 0.0,
    )


def _overhead(predicted: Mapping[str, Any]) -> str:
    of_time, of_flops = overhead_shares(predicted)
    return (
        f"{format_share(of_time)} of a forward pass in time "
        f"({format_seconds(predicted['overhead_seconds'])}), "
        f"{format_share(of_flops)} in FLOPs ({format_flops(predicted['recomputed_flops'])})"
    )


def _measured(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    far = difference({"predicted": predicted, "measured": measured})
    found = [
        (
            "compiled",
            f"{format_bytes(measured['temporary_bytes'])} of temporaries{far and f', {far}'}; "
            f"arguments {format_bytes(measured['argument_bytes'])}, outputs "
            f"{format_bytes(measured['output_bytes'])}; "
            f"in {format_seconds(measured['compile_seconds'])}",
        )
    ]
    if measured["recomputation"] is not None:
        survival = Recomputation.from_plain(measured["recomputation"])
        if not survival.undone:  # Else a warning and a note say so.
            found.append(("survived", survival.text()))
    if measured["host_bytes"]:
        found.append(("host memory", format_bytes(measured["host_bytes"])))
    return found
