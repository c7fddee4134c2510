"""A program's graph as papers draw it: a single result, with side results hung onto it.

Problem. The papers' solvers for linear and arbitrary graphs know one target, the loss. A traced
program has more: running statistics, metrics, auxiliary outputs; a ResNet has two small ones for
every normalisation. To them each such vertex is a target, all of them have to be kept apart
from one another, and no segment is independent of any other.

Method. What the loss does not read, directly or through others, is merged into the latest vertex of
the trunk that it depends on: it costs next to nothing, and runs when that vertex runs. Of several
sinks, the loss is the one with the most work behind it.

Why not a ready-made tool: networkx contracts edges one by one and does not know the merged figures.

Complexity: linear in the edges.

Guarantee: a schedule of the trunk, spread out again, is one of the whole graph.

Left out: vertices with side effects are merged like others; the solvers leave their region free.

Reference: none; it is what makes Feng & Huang (2018, 2021) applicable to programs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from remat_opt.graph import Graph
from remat_opt.solvers.coarsening import Coarse


def trunk(graph: Graph) -> Coarse:
    """The trunk of ``graph``."""
    behind = _behind(graph, _loss(graph))
    owner: dict[int, int] = {}
    for vertex, predecessors in enumerate(graph.predecessors):
        if vertex in behind:
            owner[vertex] = vertex
        else:
            # A vertex that reads nothing runs with the first vertex.
            owner[vertex] = max((owner[one] for one in predecessors), default=min(behind))
    kept = sorted(behind)
    number = {vertex: position for position, vertex in enumerate(kept)}
    groups: list[list[int]] = [[vertex] for vertex in kept]
    for vertex, into in owner.items():
        if vertex != into:
            groups[number[into]].append(vertex)

    def mapped(vertex: int, found: Iterable[Sequence[int]]) -> tuple[int, ...]:
        places = {number[owner[one]] for part in found for one in part}
        return tuple(sorted(place for place in places if place <= number[vertex]))

    return Coarse(
        graph=Graph(
            names=tuple(graph.names[vertex] for vertex in kept),
            bytes=_summed(graph.bytes, groups),
            seconds=tuple(math.fsum(graph.seconds[one] for one in group) for group in groups),
            flops=_summed(graph.flops, groups),
            predecessors=tuple(
                tuple(
                    place
                    for place in mapped(group[0], (graph.predecessors[one] for one in group))
                    if place < number[group[0]]
                )
                for group in groups
            ),
            needs=tuple(mapped(group[0], (graph.needs[one] for one in group)) for group in groups),
            cotangent_bytes=_summed(graph.cotangent_bytes, groups),
            internal_bytes=_summed(graph.internal_bytes, groups),
            workspace_bytes=_summed(graph.workspace_bytes, groups),
            forward_workspace_bytes=_summed(graph.forward_workspace_bytes, groups),
            in_place=tuple(graph.in_place[vertex] for vertex in kept),
            pinned=tuple(any(graph.pinned[one] for one in group) for group in groups),
        ),
        whole=graph,
        groups=tuple(map(tuple, groups)),
    )


def _summed(amounts: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(amounts[one] for one in group) for group in groups)


def _loss(graph: Graph) -> int:
    """The sink with the most work behind it; of equals, the last one."""
    sinks = [vertex for vertex, readers in enumerate(graph.successors()) if not readers]
    up_to = list(itertools.accumulate(graph.seconds))
    most, found = -1.0, sinks[-1]
    for sink in reversed(sinks):
        # The work behind a sink comes before it: from here on no sink has more.
        if up_to[sink] < most:
            break
        work = math.fsum(graph.seconds[vertex] for vertex in _behind(graph, sink))
        if work > most:
            most, found = work, sink
    return found


def _behind(graph: Graph, sink: int) -> set[int]:
    """The sink and everything it reads, directly or through others."""
    found = {sink}
    pending = [sink]
    while pending:
        for predecessor in graph.predecessors[pending.pop()]:
            if predecessor not in found:
                found.add(predecessor)
                pending.append(predecessor)
    return found
