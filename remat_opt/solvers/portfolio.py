"""The default solver: many kept sets, each with its best chains of regions, judged by one referee.

Problem. For every budget, a schedule of least overhead; in other words the frontier of
(peak bytes, overhead).

Method. The kept sets on the convex hull of (kept bytes, cost of recomputation) come from
``min_cut``, once for the time of a recomputation and once for its FLOPs (two views of the
same cost: the first is short of what a memory-bound kernel can hide, the second of what it
cannot). Between neighbours on the hull that lie far apart, mixtures are added. For each
kept set ``region_chain`` gives the chain of least peak, and chains for larger bounds, whose
free last region is larger. ``simulator`` judges all of them.

The candidates do not depend on the budget. So a larger budget never gives a larger
overhead, and the plans for many budgets cost one sweep.

Complexity: (cuts + mixtures) * (bounds + 1) chains and replays; both counts are fixed.

Guarantee: none of optimality; every figure is the referee's. Deterministic.
"""

from __future__ import annotations

import itertools

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule, plain
from remat_opt.solvers import min_cut, region_chain
from remat_opt.solvers.base import Candidate, judge

#: Hull neighbours further apart than this share of the plain peak get mixtures between them.
_GAP_SHARE = 0.05
#: Largest number of mixtures between two neighbours (from either end of the program).
_MOST_MIXTURES = 6
#: Bounds tried above the least one of each kept set, as shares of the way to the plain peak.
_BOUND_SHARES = (0.0, 0.05, 0.15, 0.4)
#: Where the next larger kept set is far, bounds are tried across that gap: one for each such
#: share of the plain peak, up to so many.
_BOUND_STEP = 0.02
_MOST_BOUNDS = 40
#: A kept set is only worth trying if it differs in kept bytes by more than this share of the
#: plain peak from one already tried, or in cost by more than this share of the forward pass.
_RESOLUTION = 0.004


def frontier(graph: Graph) -> list[Candidate]:
    """Candidates for all budgets, the unchanged function among them.

    Args:
      graph: what to plan.

    Returns:
      Distinct schedules with the referee's figures, in the order found.
    """
    unchanged = judge(graph, plain(graph))
    candidates = [unchanged]
    seen: set[Schedule] = {unchanged.schedule}
    for kept, gap_bytes in _kept_sets(graph, unchanged.peak_bytes).items():
        figures = region_chain.segments(graph, kept)
        least = region_chain.least_bound(figures)
        room = max(0.0, unchanged.peak_bytes - least)
        shares = {*_BOUND_SHARES, *_shares_across(gap_bytes, room, unchanged.peak_bytes)}
        for boundaries in region_chain.relaxed_chains(
            figures, [least + share * room for share in sorted(shares)]
        ):
            if boundaries is None:
                continue
            schedule = region_chain.schedule_of(graph, kept, boundaries)
            if schedule not in seen:
                seen.add(schedule)
                candidates.append(judge(graph, schedule))
    return candidates


def _shares_across(gap_bytes: float, room_bytes: float, plain_peak_bytes: int) -> list[float]:
    """Bounds across the gap to the next larger kept set, as shares of the room above.

    Where layers are alike the hull jumps from all of them to none; the plans in between
    are those whose free last region takes in more and more layers.
    """
    if room_bytes <= 0:
        return []
    count = int(min(_MOST_BOUNDS, gap_bytes / (_BOUND_STEP * plain_peak_bytes or 1)))
    return [min(1.0, gap_bytes / room_bytes) * step / count for step in range(1, count)]


def _kept_sets(graph: Graph, plain_peak_bytes: int) -> dict[tuple[int, ...], float]:
    """Kept sets from both hulls, mixtures included, near-duplicates left out.

    Returns:
      For each kept set the bytes that the next larger one keeps more.
    """
    forward_seconds = graph.forward_seconds or 1.0
    flop_seconds = forward_seconds / (graph.forward_flops or 1)
    # The small share of time breaks ties between vertices that take no FLOPs.
    by_flops = [
        flops * flop_seconds + 1e-3 * seconds
        for flops, seconds in zip(graph.flops, graph.seconds, strict=True)
    ]
    gap_bytes = _GAP_SHARE * plain_peak_bytes
    found: dict[tuple[int, ...], float] = {}
    for costs in (graph.seconds, by_flops):
        hull = min_cut.breakpoints(graph, seconds=costs)
        cuts = list(hull)
        for left, right in itertools.pairwise(hull):
            if left.bytes - right.bytes > gap_bytes:
                mixed = list(min_cut.mixtures(graph, left, right, seconds=costs))
                stride = max(1, -(-len(mixed) // _MOST_MIXTURES))
                cuts += mixed[stride // 2 :: stride]
        taken: list[min_cut.Cut] = []
        for cut in sorted(cuts, key=lambda one: (-one.bytes, one.seconds, one.kept)):
            previous = taken[-1] if taken else None
            if (
                previous is None
                or cut is hull[-1]
                or previous.bytes - cut.bytes > _RESOLUTION * plain_peak_bytes
                or abs(cut.seconds - previous.seconds) > _RESOLUTION * forward_seconds
            ):
                taken.append(cut)
        for previous, cut in zip([None, *taken[:-1]], taken, strict=True):
            gap = float(previous.bytes - cut.bytes) if previous else 0.0
            found[cut.kept] = max(gap, found.get(cut.kept, 0.0))
    return found
