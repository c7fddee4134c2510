"""Regions of known schedules with their learnt figures, for recombination.

What a region takes comes from the replay of a schedule that has it, corrected by what was learnt
(``learnt``), and holds wherever the graph is the same: in each of a program's equal layers. See
``solvers.recombination`` for what happens to them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from remat_opt.compilers.learnt import Corrections, places
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import Moment, demand
from remat_opt.solvers.lifetimes import lifetimes
from remat_opt.solvers.recombination import Alike, Part, is_stretch, shifted, trimmed

#: Regions with more vertices are not shortened: there would be too many.
_MOST_VERTICES = 60
#: How many moments are looked at.
_MOST_MOMENTS = 150_000


class Parts:
    """Collects the regions of schedules.

    Args:
      graph: the program's graph.
      corrections: what was learnt.
      seconds: what each vertex costs to run again.
    """

    def __init__(self, graph: Graph, corrections: Corrections, seconds: Sequence[float]) -> None:
        self._graph = graph
        self._corrections = corrections
        self._seconds = seconds
        self._alike = Alike(graph)
        whole = Schedule(regions=(Region(vertices=tuple(range(len(graph)))),))
        again = demand(graph, whole).recomputed[0]
        self._end_use = lifetimes(graph, again)[2].tolist()
        self._left = _MOST_MOMENTS
        self._known: dict[Region, Part] = {}

    @property
    def found(self) -> tuple[Part, ...]:
        """All that were found."""
        return tuple(self._known.values())

    def add(self, schedule: Schedule, moments: Sequence[Moment]) -> None:
        """Adds the regions of a schedule, in place and wherever the graph is the same.

        Args:
          schedule: the schedule with the regions.
          moments: those of its replay by the model.
        """
        graph = self._graph
        wanted = demand(graph, schedule)
        region_of = schedule.region_of()
        held = [0] * len(schedule.regions)
        for vertex in wanted.stored:
            held[region_of[vertex]] += graph.bytes[vertex]
        before = list(itertools.accumulate(held, initial=0))
        stories: defaultdict[int, list[tuple[int, tuple[str, str, int]]]] = defaultdict(list)
        for moment, place in zip(moments, places(graph, schedule, moments), strict=True):
            number = moment.region
            stories[number].append((moment.live_bytes - before[number], place))
        for number, region in enumerate(schedule.regions):
            if not is_stretch(region) or region in self._known:
                continue
            again = [*wanted.recomputed[number]]
            if (nest := wanted.inside[number]) is not None:
                again += nest.all_recomputed()
            few = len(region.vertices) <= _MOST_VERTICES
            for one in trimmed(region) if few else (region,):
                inside = frozenset(one.vertices)
                story = [found for found in stories[number] if found[1][2] in inside]
                cost = math.fsum(self._seconds[vertex] for vertex in again if vertex in inside)
                held_bytes = sum(graph.bytes[vertex] for vertex in wanted.stored & inside)
                if one is not region:
                    # What ended in the original region may cross the end of this one.
                    held_bytes += sum(
                        graph.bytes[vertex]
                        for vertex in inside - wanted.stored
                        if self._end_use[vertex] > one.vertices[-1]
                    )
                self._everywhere(one, story, held_bytes, cost)

    def _everywhere(
        self,
        region: Region,
        story: Sequence[tuple[int, tuple[str, str, int]]],
        held_bytes: int,
        cost: float,
    ) -> None:
        for by in self._alike.shifts(region) if story else ():
            there = shifted(region, by)
            if there in self._known:
                continue
            self._left -= len(story)
            if self._left < 0:
                return
            needs_bytes = max(
                live + self._corrections.bytes(phase, situation, vertex + by)
                for live, (phase, situation, vertex) in story
            )
            self._known[there] = Part(
                region=there, needs_bytes=needs_bytes, held_bytes=held_bytes, cost=cost
            )
