"""The values of a plan as rows: what each is, what becomes of it, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.units import format_bytes, format_seconds
from remat_opt.view.plan_words import value_title

_MIB = 2**20
#: What is smaller than this part of the largest value is small.
_SMALL = 64

#: Why a value has its fate; with ``{bytes}``, ``{time}`` and ``{rate}``, a time for each MiB.
WHY = {
    "kept": "Dropping it would free {bytes} and cost at least {time} of recomputation: {rate} for "
    "each MiB.",
    "boundary": "A later region reads it. Dropping it would free {bytes} and cost at least {time} "
    "of recomputation: {rate} for each MiB.",
    "recomputed": "Keeping it would take {bytes} more and save at most {time} of recomputation: "
    "{rate} for each MiB.",
    "not needed": "No backward step reads it.",
    "nothing": "It takes no temporary memory of its own.",
}


def rows(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dictionary for each value, all with the same keys, in the order of the program.

    ``value``: what it is, in one line; ``what``, ``module``, ``source``, ``shape``, ``dtype``,
    ``primitive``; ``region``; ``fate``; ``times`` that it is computed again; ``bytes``;
    ``seconds`` and ``flops`` of computing it once; ``seconds_per_mib``: what one MiB more would
    save here, or one less would cost, and None where it takes nothing; ``why``, in words.

    Args:
      plan: what ``Plan.to_dict`` gives.
    """
    boundaries = boundary_roots(plan["stages"])
    found = []
    for one in plan["decisions"]:
        reason = reason_of(one, boundaries)
        rate = rate_of(one)
        found.append(
            {
                "value": value_title(one["name"]),
                **one["name"],
                "shape": tuple(one["name"]["shape"]),
                **{key: one[key] for key in ("region", "fate", "times", "bytes")},
                **{key: one[key] for key in ("seconds", "flops")},
                "seconds_per_mib": rate,
                "why": WHY[reason].format(
                    bytes=format_bytes(one["bytes"]),
                    time=format_seconds(_all_times(one)),
                    rate=format_seconds(rate or 0.0),
                ),
            }
        )
    return found


def boundary_roots(stages: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """What regions under a checkpoint do not keep by name: if it is kept, others read it."""
    return frozenset(
        root
        for stage in stages
        if stage["checkpointed"]
        for root in set(stage["roots"]).difference(stage["kept"])
    )


def reason_of(decision: Mapping[str, Any], boundaries: frozenset[int]) -> str:
    """Which of ``WHY`` goes for a value."""
    fate = decision["fate"]
    if fate != "not needed" and not decision["bytes"]:
        return "nothing"
    if fate == "kept" and decision["root"] in boundaries:
        return "boundary"
    return str(fate)


def rate_of(decision: Mapping[str, Any]) -> float | None:
    """Seconds of recomputation for each MiB of a value; None where it is not a matter of choice."""
    if decision["fate"] == "not needed" or not decision["bytes"]:
        return None
    size: int = decision["bytes"]
    return _all_times(decision) / (size / _MIB)


def margins(plan: Mapping[str, Any]) -> list[str]:
    """What one MiB more would save, and one less would cost, at best."""
    found = []
    # What is small is no way to save a MiB.
    least = max((one["bytes"] for one in plan["decisions"]), default=0) / _SMALL
    rated = [
        (rate, one)
        for one in plan["decisions"]
        if one["bytes"] >= least and (rate := rate_of(one)) is not None
    ]
    again = [(rate, one) for rate, one in rated if one["fate"] == "recomputed" and rate]
    kept = [(rate, one) for rate, one in rated if one["fate"] == "kept" and rate]
    if again:
        rate, one = max(again, key=lambda pair: pair[0])
        found.append(
            f"One more MiB would save at most {format_seconds(rate)}: "
            f"keep {value_title(one['name'])}."
        )
    if kept:
        rate, one = min(kept, key=lambda pair: pair[0])
        found.append(
            f"One MiB less would cost at least {format_seconds(rate)}: "
            f"drop {value_title(one['name'])}."
        )
    return found


def _all_times(decision: Mapping[str, Any]) -> float:
    return float(decision["seconds"] * max(1, decision["times"]))
