"""All chains of regions of a small graph, nested to a given depth, in the order of execution."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import Figures, evaluate
from tests.graphs import subsets


def every_figure(graph: Graph, depth: int) -> list[Figures]:
    """The referee's figures of every chain of regions."""
    return [
        evaluate(graph, Schedule(regions=chain)) for chain in _chains(graph, 0, len(graph), depth)
    ]


def _chains(graph: Graph, start: int, stop: int, depth: int) -> Iterator[tuple[Region, ...]]:
    for inner in subsets(list(range(start + 1, stop))):
        edges = [start, *inner, stop]
        fates = [list(_regions(graph, *ends, depth)) for ends in itertools.pairwise(edges)]
        for chain in itertools.product(*fates):
            # Two consecutive regions without a checkpoint are one.
            if all(one.checkpointed or two.checkpointed for one, two in itertools.pairwise(chain)):
                yield chain


def _regions(graph: Graph, start: int, stop: int, depth: int) -> Iterator[Region]:
    vertices = tuple(range(start, stop))
    yield Region(vertices=vertices, checkpointed=False)
    if any(graph.pinned[start:stop]):
        return
    insides: list[tuple[Region, ...]] = [()]
    if depth > 1:
        chains = _chains(graph, start, stop, depth - 1)
        insides += [chain for chain in chains if len(chain) > 1 or chain[0].checkpointed]
    for kept in subsets(list(vertices)):
        for inside in insides:
            yield Region(vertices=vertices, kept=kept, inside=inside)
