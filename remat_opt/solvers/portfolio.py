"""The default solver: many kept sets, the best chains of regions for them, one referee.

Problem. For every budget, find a schedule of least overhead; in other words, the frontier of (peak
bytes, overhead).

Method. Small values are always kept, and the graph is searched without them (``coarsening``). The
kept sets on the convex hull of (kept bytes, cost of recomputation) come from ``min_cut``. Then
follow two searches, whose models of memory differ, so that if one is wrong the other may be right.
``joint_chain`` takes a dozen kept sets and gives every region, nested ones included, its own fate;
it reaches the lowest peaks. ``region_chain`` takes one kept set for the whole program: two dozen
from all over the hull, and mixtures between distant neighbours. For each it finds the chain of
least peak, and chains for larger bounds, whose free last region is larger. To these we add the
schedules of those papers' solvers that are quick on any graph. ``local_search`` then improves on
everything found, and returns the best. ``simulator`` judges them.

The candidates do not depend on the budget. So a larger budget never gives a larger
overhead, and the plans for many budgets cost one sweep.

Complexity: (cuts + mixtures) * (bounds + 1) chains and replays, one joint search and one local one;
all counts are fixed.

Guarantee: none of optimality; every figure is the referee's. Deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule, plain
from remat_opt.simulator import evaluate
from remat_opt.solvers import (
    binomial,
    coarsening,
    joint_chain,
    local_search,
    min_cut,
    region_chain,
    sublinear,
    trunk,
)
from remat_opt.solvers.base import (
    Candidate,
    Overhead,
    Refused,
    judge,
    judged,
    priced,
    thinned,
)

#: Values that together take less than this share of the plain peak are always kept.
_SMALL_SHARE = 2e-3
#: If a larger share of the vertices is left, leaving out the small ones is not worthwhile.
_WORTH_SHARE = 0.9
#: Hull neighbours further apart than this share of the plain peak get mixtures between them.
_GAP_SHARE = 0.05
#: Largest number of mixtures between two neighbours (from either end of the program).
_MOST_MIXTURES = 6
#: Bounds tried above the least one of each kept set, as shares of the way to the plain peak.
_BOUND_SHARES = (0.0, 0.15)
#: If the next larger kept set is far, bounds are tried across that gap: one for each such share of
#: the plain peak, up to this many.
_BOUND_STEP = 0.02
_MOST_BOUNDS = 20
#: A kept set is only worth trying if it differs in kept bytes by more than this share of the
#: plain peak from one already tried, or in cost by more than this share of the forward pass.
_RESOLUTION = 0.004
#: Work to do for a large graph, in vertices: for flow problems, for kept sets with separate chains,
#: for schedules of the joint search and for those of Chen et al.
_FLOW_WORK, _CHAIN_WORK, _JOINT_WORK, _PAPERS_WORK = 50_000, 50_000, 100_000, 25_000
_FEWEST = 12
#: Most kept sets that get separate chains: with fewer, the cheapest is sometimes missed.
_MOST_SETS = 24
#: Kept sets for the joint search, the most of its schedules that are improved on, and the ratio of
#: bytes between the largest and the smallest kept set.
_JOINT_SETS, _MOST_JOINT = 12, 300
_RATIO = 64
#: Into how many parts the dynamic program for chains divides memory, and the entries of its table
#: times the choices at each; for long chains it divides memory more coarsely.
_SLOTS, _TABLE_WORK = 100, 10_000_000


def frontier(graph: Graph, measure: Overhead = Overhead.SECONDS) -> list[Candidate]:
    """The best schedules found for all budgets, each once, the unchanged function first.

    Args:
      graph: what to plan.
      measure: what recomputation is counted in.
    """
    unchanged = judge(graph, plain(graph))
    seen = coarsening.without_small(graph, _SMALL_SHARE * unchanged.peak_bytes)
    if len(graph) <= local_search.SMALL or len(seen.graph) > _WORTH_SHARE * len(graph):
        seen = coarsening.as_it_is(graph)
    as_counted = priced(seen.graph, measure)
    starts, papers = _starts(as_counted), list(_papers(as_counted))
    given = []
    if len(seen.graph) > local_search.SMALL:
        starts = list(dict.fromkeys(starts + papers))
    else:
        # Small graphs are searched from everywhere anyway, and more starts only crowd the pool.
        given = judged(graph, map(seen.spread, papers))
    return list(dict.fromkeys([unchanged, *given, *local_search.front(seen, starts, measure)]))


def _starts(graph: Graph) -> list[Schedule]:
    """Schedules to improve on, the unchanged function first.

    Args:
      graph: what to plan; its ``seconds`` are what recomputation costs.
    """
    unchanged = plain(graph)
    peak_bytes = evaluate(graph, unchanged).peak_bytes
    hull = min_cut.breakpoints(graph, most_cuts=min(96, _affordable(graph, _FLOW_WORK)))
    found = [unchanged]
    most = min(_MOST_JOINT, _affordable(graph, _JOINT_WORK))
    found += joint_chain.schedules(graph, _spread(hull), most=most)
    found += _one_kept_set_each(graph, hull, peak_bytes)
    return found


def _papers(graph: Graph) -> Iterator[Schedule]:
    """What those papers' solvers find that take any graph and little time.

    They see its trunk. On chains of equal blocks they know where to recompute several times.
    """
    seen = trunk.trunk(graph)
    choices = math.comb(len(binomial.links(seen.graph)) + 2, 3)
    slots = min(_SLOTS, max(_FEWEST, _TABLE_WORK // choices))
    for answer in (
        sublinear.schedules(seen.graph, most=_affordable(graph, _PAPERS_WORK)),
        binomial.schedules(seen.graph, slots=slots),
    ):
        if not isinstance(answer, Refused):
            yield from map(seen.spread, answer)


def _affordable(graph: Graph, work: int) -> int:
    """How many times to do something whose time grows with the number of vertices."""
    return max(_FEWEST, work // len(graph))


def _spread(hull: Sequence[min_cut.Cut]) -> list[tuple[int, ...]]:
    """Kept sets from all over the hull, in equal ratios of their bytes."""
    most = hull[0].bytes
    if not most:
        return [hull[0].kept]
    least = most / _RATIO
    wanted = [least * _RATIO ** (step / (_JOINT_SETS - 1)) for step in range(_JOINT_SETS)]
    chosen = {min(hull, key=lambda cut: abs(cut.bytes - share)).kept for share in wanted}
    return [cut.kept for cut in hull if cut.kept in chosen]


def _one_kept_set_each(
    graph: Graph, hull: Sequence[min_cut.Cut], plain_peak_bytes: int
) -> Iterator[Schedule]:
    kept_sets = list(_kept_sets(graph, hull, plain_peak_bytes).items())
    kept_sets = thinned(kept_sets, min(_MOST_SETS, _affordable(graph, _CHAIN_WORK)))
    figures = [region_chain.segments(graph, kept) for kept, _ in kept_sets]
    bounds = []
    for (_, gap_bytes), least in zip(kept_sets, region_chain.least_bounds(figures), strict=True):
        room = max(0.0, plain_peak_bytes - least)
        shares = {*_BOUND_SHARES, *_shares_across(gap_bytes, room, plain_peak_bytes)}
        bounds.append([least + share * room for share in sorted(shares)])
    for (kept, _), chains in zip(
        kept_sets, region_chain.relaxed_chains(figures, bounds), strict=True
    ):
        for boundaries in chains:
            if boundaries is not None:
                yield region_chain.schedule_of(graph, kept, boundaries)


def _shares_across(gap_bytes: float, room_bytes: float, plain_peak_bytes: int) -> list[float]:
    """Bounds across the gap to the next larger kept set, as shares of the room above.

    With equal layers the hull jumps from all of them to none; the plans in between are those whose
    free last region takes in more and more layers.
    """
    if room_bytes <= 0:
        return []
    count = int(min(_MOST_BOUNDS, gap_bytes / (_BOUND_STEP * plain_peak_bytes or 1)))
    return [min(1.0, gap_bytes / room_bytes) * step / count for step in range(1, count)]


def _kept_sets(
    graph: Graph, hull: Sequence[min_cut.Cut], plain_peak_bytes: int
) -> dict[tuple[int, ...], float]:
    """Kept sets of the hull, mixtures included, near-duplicates left out.

    Returns:
      For each kept set, how many more bytes the next larger one keeps.
    """
    resolution = _RESOLUTION * (graph.forward_seconds or 1.0)
    gap_bytes = _GAP_SHARE * plain_peak_bytes
    cuts = list(hull)
    for left, right in itertools.pairwise(hull):
        if left.bytes - right.bytes > gap_bytes:
            cuts += min_cut.mixtures(graph, left, right, most=_MOST_MIXTURES)
    taken: list[min_cut.Cut] = []
    for cut in sorted(cuts, key=lambda one: (-one.bytes, one.seconds, one.kept)):
        previous = taken[-1] if taken else None
        if (
            previous is None
            or cut is hull[-1]
            or previous.bytes - cut.bytes > _RESOLUTION * plain_peak_bytes
            or abs(cut.seconds - previous.seconds) > resolution
        ):
            taken.append(cut)
    found: dict[tuple[int, ...], float] = {}
    for previous, cut in zip([None, *taken[:-1]], taken, strict=True):
        gap = float(previous.bytes - cut.bytes) if previous else 0.0
        found[cut.kept] = max(gap, found.get(cut.kept, 0.0))
    return found
