"""Canonical strategies again, written for the tests: plain sets, no shared code.

It is slow and follows the definitions of Kusumoto et al. (2019), sections 2 and 3.
"""

from __future__ import annotations

import dataclasses
from functools import cache

from hypothesis import strategies as st

from remat_opt.graph import Graph
from tests.graphs import FAMILIES

Set = frozenset[int]


@dataclasses.dataclass(frozen=True)
class Tried:
    sequence: tuple[Set, ...]
    peak: int
    paper_overhead: float
    overhead: float


def edges_of(graph: Graph) -> list[tuple[int, int]]:
    return [(s, t) for t, found in enumerate(graph.predecessors) for s in found]


def lower_sets(graph: Graph) -> list[Set]:
    edges = edges_of(graph)
    found = []
    for number in range(2 ** len(graph)):
        chosen = frozenset(v for v in range(len(graph)) if number >> v & 1)
        if all(s in chosen for s, t in edges if t in chosen):
            found.append(chosen)
    return sorted(found, key=lambda one: (len(one), sorted(one)))


def reaching(graph: Graph, vertex: int) -> Set:
    return frozenset({vertex}).union(*(reaching(graph, p) for p in graph.predecessors[vertex]))


def pruned(graph: Graph) -> list[Set]:
    family = {frozenset(), frozenset(range(len(graph)))}
    family |= {reaching(graph, vertex) for vertex in range(len(graph))}
    return sorted(family, key=lambda one: (len(one), sorted(one)))


def boundary(graph: Graph, lower: Set) -> Set:
    return frozenset(s for s, t in edges_of(graph) if s in lower and t not in lower)


def terms(graph: Graph, sequence: tuple[Set, ...]) -> list[tuple[int, int, int, int]]:
    """Eq. 2 of every block: (i), (ii), (iii), (iv)."""
    edges = edges_of(graph)
    result = []
    for i, lower in enumerate(sequence):
        before = sequence[i - 1] if i else frozenset()
        cached = frozenset().union(*(boundary(graph, one) for one in sequence[:i]))
        after = {t for s, t in edges if s in lower}
        feeding = {s for s, t in edges if t in after}
        result.append(
            (
                sum(graph.bytes[v] for v in cached),
                sum(graph.bytes[v] + graph.cotangent_bytes[v] for v in lower - before),
                sum(graph.cotangent_bytes[v] for v in after - lower),
                sum(graph.bytes[v] for v in feeding - lower),
            )
        )
    return result


def forgotten(graph: Graph, sequence: tuple[Set, ...]) -> list[float]:
    """The time that each block's recomputation takes."""
    previous: Set = frozenset()
    result = []
    for lower in sequence:
        block = lower - previous - boundary(graph, lower)
        result.append(sum(graph.seconds[v] for v in block))
        previous = lower
    return result


def live_peak(graph: Graph, sequence: tuple[Set, ...]) -> int:
    """The peak with every array freed after its last reader: lifetimes over a list of steps."""
    blocks = [
        sorted(lower - (sequence[i - 1] if i else frozenset())) for i, lower in enumerate(sequence)
    ]
    cached = frozenset().union(*(boundary(graph, lower) for lower in sequence))
    successors = graph.successors()
    steps = []  # what is made, what is read
    home = {}  # where the backward pass finds each value
    for position, block in enumerate(blocks):
        for v in block:
            steps.append((("f", v), [("f", p) for p in graph.predecessors[v]]))
            again = v not in cached and position < len(blocks) - 1
            home[v] = ("r", v) if again else ("f", v)
    for block in reversed(blocks):
        for v in block:
            if home[v] == ("r", v):
                steps.append((("r", v), [home[p] for p in graph.predecessors[v]]))
        for v in reversed(block):
            reads = {home[p] for w in successors[v] for p in graph.predecessors[w]}
            steps.append((("g", v), [*reads, *(("g", w) for w in successors[v])]))
    made = {array: number for number, (array, _) in enumerate(steps)}
    last = dict(made)
    for number, (_, reads) in enumerate(steps):
        for array in reads:
            assert made[array] < number
            last[array] = number

    def size(array: tuple[str, int]) -> int:
        kind, v = array
        return graph.cotangent_bytes[v] if kind == "g" else graph.bytes[v]

    # A value that no backward step reads is freed at the latest when the forward pass ends; the
    # package frees it no earlier if it is cached or in the last block.
    end = len(graph) - 1
    for v in range(len(graph)):
        stays = v in cached or v in blocks[-1]
        if stays:
            last[("f", v)] = max(last[("f", v)], end)
    return max(
        sum(size(array) for array in made if made[array] <= now <= last[array])
        for now in range(len(steps))
    )


def count(family: list[Set]) -> int:
    ways = {family[0]: 1}
    for lower in family[1:]:
        ways[lower] = sum(ways[part] for part in ways if part < lower)
    return ways[family[-1]]


def strategies(graph: Graph, family: list[Set]) -> list[Tried]:
    """All increasing sequences over a family, from nothing to everything."""
    edges = edges_of(graph)
    everything = family[-1]
    bound = {lower: boundary(graph, lower) for lower in family}
    tail = {}
    for lower in family:
        after = {t for s, t in edges if s in lower}
        feeding = {s for s, t in edges if t in after}
        tail[lower] = sum(graph.cotangent_bytes[v] for v in after - lower)
        tail[lower] += sum(graph.bytes[v] for v in feeding - lower)

    @cache
    def pair(small: Set, large: Set) -> tuple[int, float]:
        block = large - small
        both = sum(graph.bytes[v] + graph.cotangent_bytes[v] for v in block)
        return both + tail[large], sum(graph.seconds[v] for v in block - bound[large])

    larger = {lower: [other for other in family if lower < other] for lower in family}
    found = []
    pending = [((), family[0], frozenset(), 0, 0.0, 0.0)]
    while pending:
        sequence, reached, cached, peak, time, before = pending.pop()
        if reached == everything:
            found.append(Tried(sequence, peak, time, before))
            continue
        held = sum(graph.bytes[v] for v in cached)
        for lower in larger[reached]:
            block_bytes, seconds = pair(reached, lower)
            pending.append(
                (
                    (*sequence, lower),
                    lower,
                    cached | bound[lower],
                    max(peak, held + block_bytes),
                    time + seconds,
                    time,
                )
            )
    return found


def induced(graph: Graph, count_: int) -> Graph:
    """The first vertices of a graph like the papers', which form a lower set."""
    return Graph.from_edges(
        graph.bytes[:count_],
        [(s, t) for s, t in edges_of(graph) if t < count_],
        seconds=graph.seconds[:count_],
    )


@st.composite
def paper_graphs(draw: st.DrawFn, *, max_vertices: int = 10, most: int = 600) -> Graph:
    """Draws a graph like the paper's, with at most ``most`` canonical strategies.

    Graphs with more lose vertices at the end.
    """
    size = draw(st.integers(1, max_vertices))
    family = draw(st.sampled_from([*FAMILIES, "random"]))
    if family == "random":
        pairs = [(s, t) for t in range(size) for s in range(t)]
        chosen = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
        edges = [pair for pair, wanted in zip(pairs, chosen, strict=True) if wanted]
    else:
        edges = FAMILIES[family](size)
    numbers = draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=size, max_size=size)
    )
    graph = Graph.from_edges([a for a, _ in numbers], edges, seconds=[b / 4 for _, b in numbers])
    while count(lower_sets(graph)) > most:
        graph = induced(graph, len(graph) - 1)
    return graph
