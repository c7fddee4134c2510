"""A smaller graph that solvers see in place of a larger one, and the way back.

Problem. Two thirds of a ResNet's values are means and variances of its normalisations, which
together take less than a thousandth of the memory. What happens to them hardly matters, but a
search spends as much time on each as on a large value, and gets lost among them.

Method. A value that takes little memory is merged into the next vertex that takes more, and every
checkpoint keeps it: it costs almost nothing to hold, and never runs again. The smallest sizes come
first, as many as fit into the memory that we give up.

Why not a ready-made tool: multilevel methods for graphs contract edges by weight; here size decides
what is merged, and the merged figures are specific to this problem.

Complexity: O(n log n + e) for n vertices and e edges.

Guarantee: a schedule of the smaller graph whose regions are stretches of the order of execution,
spread out, is one of the whole graph, and recomputes what it says. Its peak is larger by at most
the small values, with two exceptions: what only the computation of a small value reads in the
forward pass counts as free by then, and merged backward steps count as one.

Left out: what only small values read is not a predecessor in the smaller graph, since they are kept
and do not make it run again. So if regions are not stretches, one may come before what its small
values read: the referee refuses such schedules.

Reference: the scheme is that of multilevel methods (Karypis & Kumar, *A fast and high quality
multilevel scheme for partitioning irregular graphs*, 1998): coarsen, solve, spread out.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coarse:
    """A smaller graph, and the way back.

    Attributes:
      graph: the smaller graph.
      whole: the graph that it stands for.
      groups: for each of its vertices, those of the whole graph; the first one is the vertex
        itself, the others, ascending, are merged into it.
      always_kept: those of the whole graph that every checkpoint keeps; all of them merged.
    """

    graph: Graph
    whole: Graph
    groups: tuple[tuple[int, ...], ...]
    always_kept: frozenset[int] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether nothing is merged."""
        return len(self.graph) == len(self.whole)

    def spread(self, schedule: Schedule) -> Schedule:
        """A schedule of the smaller graph as one of the whole graph."""
        if self.is_whole:
            return schedule
        return Schedule(regions=tuple(self._region(region) for region in schedule.regions))

    def _region(self, region: Region) -> Region:
        groups = map(self.groups.__getitem__, region.vertices)
        vertices = sorted(itertools.chain.from_iterable(groups))
        kept = [self.groups[vertex][0] for vertex in region.kept]
        if region.checkpointed:
            kept += self.always_kept.intersection(vertices)
        return dataclasses.replace(
            region,
            vertices=tuple(vertices),
            kept=tuple(sorted(kept)),
            inside=tuple(self._region(one) for one in region.inside),
        )


def as_it_is(graph: Graph) -> Coarse:
    """The graph in place of itself."""
    return Coarse(graph=graph, whole=graph, groups=tuple((one,) for one in range(len(graph))))


def without_small(graph: Graph, most_bytes: float) -> Coarse:
    """The graph with its smallest values merged into what follows them.

    Groups are stretches of the order of execution, so a chain of regions stays one.

    Args:
      graph: the whole graph.
      most_bytes: how much everything merged may take together.
    """
    small = _small(graph, most_bytes)
    groups: list[tuple[int, ...]] = []
    waiting: list[int] = []
    for vertex in range(len(graph)):
        if vertex in small:
            waiting.append(vertex)
        else:
            groups.append((vertex, *waiting))
            waiting = []
    groups[-1] += tuple(waiting)
    number = {group[0]: place for place, group in enumerate(groups)}

    def needs(group: tuple[int, ...]) -> tuple[int, ...]:
        found = {number[one] for vertex in group for one in graph.needs[vertex] if one in number}
        return tuple(sorted(found))

    def workspace_bytes(group: tuple[int, ...]) -> int:
        runs = (one for one in group if graph.cotangent_bytes[one])
        return max((graph.workspace_bytes[one] for one in runs), default=0)

    large = list(number)
    return Coarse(
        graph=Graph(
            names=tuple(graph.names[one] for one in large),
            bytes=tuple(graph.bytes[one] for one in large),
            seconds=tuple(graph.seconds[one] for one in large),
            flops=tuple(graph.flops[one] for one in large),
            predecessors=tuple(
                tuple(number[read] for read in graph.predecessors[one] if read in number)
                for one in large
            ),
            needs=tuple(map(needs, groups)),
            cotangent_bytes=tuple(graph.cotangent_bytes[one] for one in large),
            internal_bytes=tuple(graph.internal_bytes[one] for one in large),
            workspace_bytes=tuple(map(workspace_bytes, groups)),
            forward_workspace_bytes=tuple(graph.forward_workspace_bytes[one] for one in large),
            in_place=tuple(graph.in_place[one] for one in large),
            pinned=tuple(graph.pinned[one] for one in large),
        ),
        whole=graph,
        groups=tuple(groups),
        always_kept=small,
    )


def _small(graph: Graph, most_bytes: float) -> frozenset[int]:
    """The vertices to merge: small ones, and none that a region may have to avoid."""
    sizes = np.maximum(graph.bytes, graph.cotangent_bytes)
    ascending = np.sort(sizes)
    together = np.cumsum(ascending)
    # Values of one size are all merged or not at all: they are the same in equal layers.
    sums = together[np.searchsorted(ascending, sizes, side="right") - 1]
    few = np.flatnonzero((sums <= most_bytes) & (sizes < ascending[-1])).tolist()
    return frozenset(one for one in few if not graph.pinned[one] and not graph.internal_bytes[one])
