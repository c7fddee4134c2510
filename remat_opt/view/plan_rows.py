"""The values of a plan as rows: what each is, what happens to it, and why.

They include those inside opened loops, with the bytes and time of all the iterations of their part
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.units import format_bytes, format_seconds
from remat_opt.view.plan_words import value_title, values

_MIB = 2**20
#: A value smaller than this part of the largest is small.
_SMALL = 64

#: Why a value has its fate; with ``{bytes}``, ``{time}`` and ``{rate}``, a time for each MiB.
WHY = {
    "kept": "Dropping it would free {bytes} and cost at least {time} of recomputation: {rate} for "
    "each MiB.",
    "boundary": "A later region reads it. Dropping it would free {bytes} and cost at least {time} "
    "of recomputation: {rate} for each MiB.",
    "handed on": "The next iteration starts from it. Fewer are kept if several iterations share a "
    "checkpoint.",
    "recomputed": "Keeping it would take {bytes} more and save at most {time} of recomputation: "
    "{rate} for each MiB.",
    "not needed": "No backward step reads it.",
    "nothing": "It takes no temporary memory of its own.",
}


def rows(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dictionary for each value, all with the same keys, in the order of the program.

    ``value``: what it is, in one line; ``what``, ``module``, ``source``, ``shape``, ``dtype``,
    ``primitive``; ``region``; ``iterations``: inside an opened loop, which, else ""; ``fate``;
    ``times`` that it is computed again; ``bytes``; ``seconds`` and ``flops`` of computing it once;
    ``seconds_per_mib``: what one MiB more would save here, or one less would cost, and None where
    it takes nothing; ``why``, in words. Inside a loop, bytes, seconds and FLOPs are those of all
    these iterations.

    Args:
      plan: what ``Plan.to_dict`` gives.
    """
    boundaries = boundary_roots(plan["stages"])
    found = []
    for one in values(plan):
        reason = reason_of(one, boundaries)
        rate = rate_of(one)
        found.append(
            {
                "value": value_title(one["name"]),
                **one["name"],
                "shape": tuple(one["name"]["shape"]),
                "region": one["region"],
                "iterations": one["part"],
                **{key: one[key] for key in ("fate", "times", "bytes")},
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
    """What checkpointed regions do not keep by name: if such a value is kept, others read it."""
    return frozenset(
        root
        for stage in stages
        if stage["checkpointed"]
        for root in set(stage["roots"]).difference(stage["kept"])
    )


def reason_of(decision: Mapping[str, Any], boundaries: frozenset[int]) -> str:
    """Which of ``WHY`` applies to a value."""
    fate = decision["fate"]
    if decision["handed_on"] and fate == "kept":
        return "handed on"
    if fate != "not needed" and not decision["bytes"]:
        return "nothing"
    if fate == "kept" and not decision["part"] and decision["root"] in boundaries:
        return "boundary"
    return str(fate)


def rate_of(decision: Mapping[str, Any]) -> float | None:
    """Seconds of recomputation for each MiB of a value; None if there is no choice."""
    if decision["fate"] == "not needed" or decision["handed_on"] or not decision["bytes"]:
        return None
    size: int = decision["bytes"]
    return _all_times(decision) / (size / _MIB)


def margins(plan: Mapping[str, Any]) -> list[str]:
    """What one MiB more would save, and one less would cost, at best."""
    found = []
    told = values(plan)
    # A small value is no way to save a MiB.
    least = max((one["bytes"] for one in told), default=0) / _SMALL
    rated = [
        (rate, one) for one in told if one["bytes"] >= least and (rate := rate_of(one)) is not None
    ]
    again = [(rate, one) for rate, one in rated if one["fate"] == "recomputed" and rate]
    kept = [(rate, one) for rate, one in rated if one["fate"] == "kept" and rate]
    if again:
        rate, one = max(again, key=lambda pair: pair[0])
        found.append(f"One more MiB would save at most {format_seconds(rate)}: keep {_which(one)}.")
    if kept:
        rate, one = min(kept, key=lambda pair: pair[0])
        found.append(
            f"One MiB less would cost at least {format_seconds(rate)}: drop {_which(one)}."
        )
    return found


def _which(value: Mapping[str, Any]) -> str:
    title = value_title(value["name"])
    return f"{title}, of {value['part']}" if value["part"] else title


def _all_times(decision: Mapping[str, Any]) -> float:
    return float(decision["seconds"] * max(1, decision["times"]))
