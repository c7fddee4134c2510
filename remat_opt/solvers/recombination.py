"""Recombines well-known regions, for all budgets at once.

Problem. Given regions, each with what it needs, holds and costs, find for every amount of memory
the chain of them, from the first vertex to the last, that recomputes the least.

What a region takes need not come from a model: a chain of measured regions is better known than any
other. And what is best for one stretch of a program is best for equal ones, so each region is tried
wherever the graph is the same.

Method. While a region runs, memory holds what the regions before it hold, and its own needs. So
with m bytes left at position i, the least cost of the way to the end is

    way(i, m) = min over regions r from i to k of  cost(r) + way(k, m - held(r)),
                where needs(r) <= m.

Bytes are counted in slots, in several tables from coarse to fine, as in ``joint_chain``.

Why not a ready-made tool: it is a shortest path whose states are position and memory left; the rows
are filled with numpy.

Complexity: O(r s) additions for r regions and s slots.

Guarantee: for every number of slots, the least cost of all chains of the given regions, as far as
what a region takes does not depend on the others; bytes are rounded to the nearest slot. Left out:
regions that are not stretches of the order of execution.

Reference: the recursion is that of dynamic programming over a chain (Gruslys et al., 2016).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, merged
from remat_opt.solvers.base import thinned
from remat_opt.spans import read_from_memory

#: Slots of a table, and how much less memory each table has than the one before.
SLOTS = 256
_SCALES = (1.0, 0.4, 0.15)
#: How many vertices at each end of a region may be left out.
_MOST_TRIMMED = 2
#: Costs that differ by less than this share of a forward pass make no new schedule.
_RESOLUTION = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A region that a chain may have.

    Attributes:
      region: a stretch of the order of execution.
      needs_bytes: the most that is alive while it runs, forward, again and backward, besides what
        the regions before it hold.
      held_bytes: what it leaves for the backward pass.
      cost: the cost of what it runs again.
    """

    region: Region
    needs_bytes: int
    held_bytes: int
    cost: float


def is_stretch(region: Region) -> bool:
    """Whether the region's vertices follow one another in the order of execution."""
    return region.vertices[-1] - region.vertices[0] == len(region.vertices) - 1


class Alike:
    """Finds where a graph is the same."""

    def __init__(self, graph: Graph) -> None:
        known: dict[tuple[object, ...], int] = {}
        self._kinds = [
            known.setdefault(_figures(graph, vertex), len(known)) for vertex in range(len(graph))
        ]
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for vertex, kind in enumerate(self._kinds):
            self._places[kind].append(vertex)

    def shifts(self, region: Region) -> Iterator[int]:
        """How far a region can be shifted to where the graph is the same; includes 0.

        There, vertices have the same figures, and read and are needed in the same way.
        """
        first, stop = region.vertices[0], region.vertices[-1] + 1
        shape = self._kinds[first:stop]
        for start in self._places[shape[0]]:
            if self._kinds[start : start + len(shape)] == shape:
                yield start - first


def _figures(graph: Graph, vertex: int) -> tuple[object, ...]:
    return (
        graph.bytes[vertex],
        graph.seconds[vertex],
        graph.cotangent_bytes[vertex],
        graph.internal_bytes[vertex],
        graph.in_place[vertex],
        graph.pinned[vertex],
        tuple(vertex - read for read in graph.predecessors[vertex]),
        tuple(vertex - read for read in graph.needs[vertex]),
    )


def trimmed(region: Region) -> Iterator[Region]:
    """The region, also without some of its first and last vertices.

    If a block differs from others at its ends, what lies between may be the same.
    """
    for first, last in itertools.product(range(_MOST_TRIMMED + 1), repeat=2):
        stop = len(region.vertices) - last
        if not (first or last):
            yield region
        elif first < stop:
            left = frozenset(region.vertices[first:stop])
            if (found := _within(region, left)) is not None:
                yield found


def _within(region: Region, left: frozenset[int]) -> Region | None:
    """What is left of a region with only these vertices."""
    vertices = tuple(vertex for vertex in region.vertices if vertex in left)
    if not vertices:
        return None
    inside = [found for one in region.inside if (found := _within(one, left)) is not None]
    return Region(
        vertices=vertices,
        kept=tuple(vertex for vertex in region.kept if vertex in left),
        checkpointed=region.checkpointed,
        inside=tuple(inside) if len(inside) > 1 else (),
    )


def shifted(region: Region, by: int) -> Region:
    """The region shifted by a number of vertices."""
    if not by:
        return region
    return Region(
        vertices=tuple(vertex + by for vertex in region.vertices),
        kept=tuple(vertex + by for vertex in region.kept),
        checkpointed=region.checkpointed,
        inside=tuple(shifted(one, by) for one in region.inside),
    )


def schedules(
    graph: Graph, parts: Sequence[Part], most_bytes: int, *, most: int | None = None
) -> list[Schedule]:
    """Chains of the parts, from the least memory up, one for every step of the cost.

    Args:
      graph: what they are regions of.
      parts: regions that are stretches.
      most_bytes: the largest amount of memory of interest.
      most: how many steps to take at most, evenly from all; all if None.
    """
    by_start: defaultdict[int, list[Part]] = defaultdict(list)
    for part in _unbeaten(parts):
        by_start[part.region.vertices[0]].append(part)
    found: list[Schedule] = []
    for scale in _SCALES:
        chains = _chains(graph, by_start, scale * most_bytes / SLOTS)
        found += chains if most is None else thinned(chains, most)
    return list(dict.fromkeys(found))


def _unbeaten(parts: Sequence[Part]) -> Iterator[Part]:
    """Those for which no other of the same stretch is as good in everything."""
    stretches: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
    order = sorted(parts, key=lambda one: (one.needs_bytes, one.held_bytes, one.cost))
    for part in order:
        known = stretches[part.region.vertices[0], part.region.vertices[-1]]
        if not any(one.held_bytes <= part.held_bytes and one.cost <= part.cost for one in known):
            known.append(part)
    for known in stretches.values():
        yield from known


def _chains(graph: Graph, by_start: dict[int, list[Part]], slot: float) -> list[Schedule]:
    count = len(graph)
    cost = np.full((count + 1, SLOTS + 1), np.inf)
    cost[count] = 0.0
    choice = np.full((count, SLOTS + 1), -1, dtype=np.int64)
    held = {
        start: [round(part.held_bytes / slot) for part in parts]
        for start, parts in by_start.items()
    }
    for start in sorted(by_start, reverse=True):
        for number, (part, holds) in enumerate(zip(by_start[start], held[start], strict=True)):
            least = max(holds, int(np.ceil(part.needs_bytes / slot - 0.5)), 0)
            if least > SLOTS:
                continue
            after = cost[part.region.vertices[-1] + 1]
            way = after[least - holds : SLOTS + 1 - holds] + part.cost
            better = way < cost[start, least:] - 1e-15
            cost[start, least:][better] = way[better]
            choice[start, least:][better] = number
    found = []
    before = np.inf
    for level, total in enumerate(cost[0].tolist()):
        if total < before - _RESOLUTION * graph.forward_seconds:
            before = total
            found.append(_schedule(graph, by_start, held, choice, level))
    return found


def _schedule(
    graph: Graph,
    by_start: dict[int, list[Part]],
    held: dict[int, list[int]],
    choice: np.ndarray,
    level: int,
) -> Schedule:
    """The chain chosen at a level; what it holds for later regions is kept by name."""
    regions: list[Region] = []
    start = 0
    while start < len(graph):
        number = int(choice[start, level])
        regions.append(by_start[start][number].region)
        level -= held[start][number]
        start = regions[-1].vertices[-1] + 1
    draft = Schedule(regions=tuple(merged(regions)))
    stored = read_from_memory(graph, draft)[0].tolist()
    return Schedule(
        regions=tuple(
            dataclasses.replace(region, kept=tuple(v for v in region.vertices if stored[v]))
            if region.checkpointed
            else region
            for region in draft.regions
        )
    )
