"""Chains of regions in which every value that is kept has a name.

Problem. Without a checkpoint around them, JAX hands from one pass to the other what each derivative
happens to read, such as every step of an activation. A compiler leaves out what it can compute from
the rest, but not where residuals wait in the stacks of a loop, or leave a branch. Under a
checkpoint, what waits is what has a name.

Method. All that can be is under checkpoints, in one for every run of vertices. What is left under
none must run once, or has residuals that no name reaches, as of a loop. What is kept is taken from
chains that were found for the program by itself, or is that of the minimum cut, which is best for
every exchange rate between bytes kept and recomputation.

Complexity: that of the default solver and of the minimum cuts.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import demand
from remat_opt.solvers import min_cut, portfolio
from remat_opt.solvers.base import Overhead, priced, thinned


def chains(
    graph: Graph, measure: Overhead, *, most_cuts: int, most_chains: int
) -> Iterator[Schedule]:
    """Such chains: those of the minimum cuts, and others.

    Args:
      graph: what to plan.
      measure: what recomputation is counted in.
      most_cuts: how many kept sets of minimum cuts are taken.
      most_chains: how many chains of the default solver.
    """
    yield from of_minimum_cuts(graph, measure, most_cuts)
    for one in thinned(portfolio.frontier(graph, measure), most_chains):
        yield from under_checkpoints(graph, one.schedule)


def of_minimum_cuts(graph: Graph, measure: Overhead, most: int) -> Iterator[Schedule]:
    """Chains that keep what minimum cuts do.

    Args:
      graph: what to plan.
      measure: what recomputation is counted in.
      most: how many kept sets are taken.
    """
    everything = range(len(graph))
    apart = _apart(graph)
    # What is under no checkpoint is kept in any case, and takes nothing more.
    sizes = (min(size, 1) if v in apart else size for v, size in enumerate(graph.bytes))
    free = priced(graph.with_bytes(bytes=tuple(sizes)), measure)
    for cut in min_cut.breakpoints(free, most_cuts=most):
        yield Schedule(regions=tuple(_regions(everything, apart, frozenset(cut.kept))))


def under_checkpoints(graph: Graph, schedule: Schedule) -> Iterator[Schedule]:
    """The schedule with all regions under checkpoints; what was under none is kept by name, or not.

    Args:
      graph: what it is a schedule of.
      schedule: regions and fates.
    """
    apart = _apart(graph)
    stored = demand(graph, schedule).stored
    for named in (stored, frozenset[int]()):
        regions: list[Region] = []
        for region in schedule.regions:
            if region.checkpointed:
                regions.append(region)
            else:
                regions += _regions(region.vertices, apart, named)
        yield dataclasses.replace(schedule, regions=tuple(regions), unchanged=False)


def _apart(graph: Graph) -> frozenset[int]:
    """The vertices that are under no checkpoint."""
    return frozenset(v for v in range(len(graph)) if graph.pinned[v] or graph.internal_bytes[v])


def _regions(
    vertices: range | tuple[int, ...], apart: Set[int], named: Set[int]
) -> Iterator[Region]:
    """Vertices in runs, each under a checkpoint that keeps some by name, except those apart."""
    for alone, run in itertools.groupby(vertices, apart.__contains__):
        members = tuple(run)
        kept = () if alone else tuple(v for v in members if v in named)
        yield Region(vertices=members, kept=kept, checkpointed=not alone)
