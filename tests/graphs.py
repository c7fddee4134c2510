"""Small graphs to judge by: named instances, and Hypothesis strategies that draw more.

The instances are those of the papers in miniature. Numbers are small integers on purpose:
ties are frequent, and sums of seconds are exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule

Edges = list[tuple[int, int]]


def chain_edges(count: int) -> Edges:
    return [(vertex, vertex + 1) for vertex in range(count - 1)]


def residual_edges(count: int) -> Edges:
    """Every second vertex adds what came two vertices earlier."""
    return chain_edges(count) + [(vertex, vertex + 2) for vertex in range(0, count - 2, 2)]


def dense_edges(count: int) -> Edges:
    """Every vertex reads the three before it."""
    return [
        (source, target) for target in range(count) for source in range(max(0, target - 3), target)
    ]


def inception_edges(count: int) -> Edges:
    """Three branches from one vertex, joined in the next, and again."""
    edges: Edges = []
    for start in range(0, count, 4):
        for branch in range(start + 1, min(start + 4, count)):
            edges.append((start, branch))
            if start + 4 < count:
                edges.append((branch, start + 4))
    return edges


def skip_to_end_edges(count: int) -> Edges:
    """The last vertex reads the first two as well."""
    return sorted({*chain_edges(count), *((v, count - 1) for v in range(2) if v < count - 1)})


def sinks_edges(count: int) -> Edges:
    """A trunk of even vertices; each odd vertex hangs on it, and nothing reads it."""
    return [(vertex - (1 if vertex % 2 else 2), vertex) for vertex in range(1, count)]


FAMILIES = {
    "chain": chain_edges,
    "residual": residual_edges,
    "dense": dense_edges,
    "inception": inception_edges,
    "skip_to_end": skip_to_end_edges,
    "sinks": sinks_edges,
}


def layered(family: str, count: int, *, size: int = 4) -> Graph:
    """A graph of one family in which each backward step reads its inputs and output."""
    return Graph.from_edges([size] * count, FAMILIES[family](count))


def network(layers: int) -> Graph:
    """Layers as in a convolutional network: expensive, cheap, cheap.

    A convolution needs its input; a normalisation its input and its own (small) statistics;
    an activation its output. The last vertex is the loss, in an output buffer.
    """
    edges: Edges = []
    sizes, seconds, needs = [], [], []
    for layer in range(layers):
        first = 3 * layer
        if layer:
            edges.append((first - 1, first))
        edges += [(first, first + 1), (first + 1, first + 2)]
        sizes += [16, 16, 16]
        seconds += [8.0, 1.0, 0.5]
        needs += [(first - 1,) if layer else (), (first,), (first + 2,)]
    last = 3 * layers
    edges.append((last - 1, last))
    return dataclasses.replace(
        Graph.from_edges([*sizes, 0], edges, seconds=[*seconds, 0.25]),
        needs=(*needs, (last - 1,)),
        flops=(*(int(4 * second) for second in seconds), 1),
        in_place=(False, False, True) * layers + (False,),
    )


INSTANCES = {
    **{f"{family}_{count}": layered(family, count) for family in FAMILIES for count in (5, 9)},
    "one": Graph.from_edges([4], []),
    "network_3": network(3),
}


def ancestors(graph_predecessors: list[tuple[int, ...]], vertex: int) -> list[int]:
    found = {vertex}
    for candidate in range(vertex, -1, -1):
        if candidate in found:
            found.update(graph_predecessors[candidate])
    return sorted(found)


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    max_vertices: int = 10,
    internal: bool = True,
    in_place: bool = True,
    pinned: bool = True,
) -> Graph:
    """Draws a graph; the switches leave out what a test does not want to see."""
    count = draw(st.integers(1, max_vertices))
    family = draw(st.sampled_from([*FAMILIES, "random"]))
    if family == "random":
        edges = [
            (source, target)
            for target in range(count)
            for source in range(target)
            if draw(st.integers(0, 2)) == 0
        ]
    else:
        edges = FAMILIES[family](count)
    predecessors = [
        tuple(source for source, target in sorted(edges) if target == vertex)
        for vertex in range(count)
    ]

    def each(strategy: st.SearchStrategy) -> tuple:
        return tuple(draw(strategy) for _ in range(count))

    def rarely(wanted: bool) -> st.SearchStrategy[bool]:
        # The simplest draw, which examples shrink to, is False.
        return st.integers(0, 7).map(lambda n: n == 7) if wanted else st.just(False)

    sizes = each(st.integers(0, 12))
    needs = []
    for vertex in range(count):
        reads = draw(st.sampled_from(["both", "inputs", "output", "none", "any"]))
        if reads == "any":
            chosen = draw(st.sets(st.sampled_from(ancestors(predecessors, vertex)), max_size=3))
        else:
            chosen = set(predecessors[vertex]) if reads in ("both", "inputs") else set()
            chosen |= {vertex} if reads in ("both", "output") else set()
        needs.append(tuple(sorted(chosen)))
    once = each(rarely(pinned))
    return Graph(
        names=tuple(f"v{vertex}" for vertex in range(count)),
        bytes=sizes,
        seconds=each(st.integers(0, 16).map(lambda n: n / 4)),
        flops=each(st.integers(0, 9)),
        predecessors=tuple(predecessors),
        needs=tuple(needs),
        cotangent_bytes=tuple(0 if draw(st.integers(0, 4)) == 4 else size for size in sizes),
        internal_bytes=tuple(
            draw(st.integers(1, 8)) if draw(rarely(internal)) else 0 for _ in range(count)
        ),
        workspace_bytes=each(st.sampled_from((0, 0, 0, 5)) if internal else st.just(0)),
        forward_workspace_bytes=tuple(6 * one for one in once),
        in_place=each(st.booleans() if in_place else st.just(False)),
        pinned=once,
    )


@st.composite
def kept_sets(draw: st.DrawFn, graph: Graph) -> tuple[int, ...]:
    """Any subset of the vertices."""
    return tuple(vertex for vertex in range(len(graph)) if draw(st.booleans()))


@st.composite
def schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Any legal schedule whose regions follow the order of the vertices.

    Regions without a checkpoint occur anywhere, not only at the end.
    """
    count = len(graph)
    cuts = {0, count, *(v for v in range(1, count) if draw(st.integers(0, 2)) == 2)}
    regions = []
    for start, stop in itertools.pairwise(sorted(cuts)):
        vertices = tuple(range(start, stop))
        free = any(graph.pinned[vertex] for vertex in vertices) or draw(st.integers(0, 3)) == 3
        regions.append(
            Region(
                vertices=vertices,
                kept=tuple(v for v in vertices if draw(st.integers(0, 2)) == 2),
                checkpointed=not free,
            )
        )
    return Schedule(regions=tuple(regions))


@st.composite
def scheduled_graphs(draw: st.DrawFn, *, max_vertices: int = 10) -> tuple[Graph, Schedule]:
    graph = draw(graphs(max_vertices=max_vertices))
    return graph, draw(schedules(graph))


@st.composite
def nested_graphs(draw: st.DrawFn, *, max_vertices: int = 10) -> tuple[Graph, Schedule]:
    """A graph and a schedule, some of whose regions have chains of regions inside, and so on."""
    graph, schedule = draw(scheduled_graphs(max_vertices=max_vertices))
    regions = tuple(_with_some_inside(draw, region) for region in schedule.regions)
    return graph, Schedule(regions=regions)


def _with_some_inside(draw: st.DrawFn, region: Region) -> Region:
    count = len(region.vertices)
    if not region.checkpointed or count < 2 or draw(st.booleans()):
        return region
    starts = [0, *sorted(draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=3))), count]
    inside = []
    for start, end in itertools.pairwise(starts):
        vertices = region.vertices[start:end]
        kept = tuple(vertex for vertex in vertices if draw(st.booleans()))
        one = Region(vertices=vertices, kept=kept, checkpointed=draw(st.booleans()))
        inside.append(_with_some_inside(draw, one) if one.checkpointed else one)
    return dataclasses.replace(region, inside=tuple(inside))


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    """All subsets, the smallest first."""
    for size in range(len(items) + 1):
        yield from itertools.combinations(items, size)


def all_boundaries(graph: Graph) -> Iterator[list[int]]:
    """All ascending lists of region starts; the last region runs from its start to the end."""
    for inner in subsets(list(range(1, len(graph)))):
        yield [0, *inner]


def sampled(seed: int, *, max_vertices: int) -> Graph:
    """One of a fixed sequence of graphs, for statistics that must not depend on Hypothesis."""
    draw = random.Random(seed)
    count = draw.randint(2, max_vertices)
    family = draw.choice([*FAMILIES, "random"])
    if family == "random":
        edges = [
            (source, target)
            for target in range(count)
            for source in range(target)
            if draw.random() < 0.4
        ]
    else:
        edges = FAMILIES[family](count)
    graph = Graph.from_edges(
        [draw.randint(0, 12) for _ in range(count)],
        edges,
        seconds=[draw.randint(0, 16) / 4 for _ in range(count)],
        flops=[draw.randint(0, 9) for _ in range(count)],
    )
    needs = [
        draw.choice([reads, reads[:-1], reads[-1:], ()]) if draw.random() < 0.5 else reads
        for reads in graph.needs
    ]
    return dataclasses.replace(
        graph, needs=tuple(needs), in_place=tuple(draw.random() < 0.3 for _ in range(count))
    )


def depth(regions: Sequence[Region]) -> int:
    """How deep checkpoints nest at most."""
    return max((1 + depth(region.inside) for region in regions if region.checkpointed), default=0)
