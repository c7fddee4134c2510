"""Kept sets and independent segments again, written for the tests: every subset is tried.

It follows definition 1 of Feng & Huang (2018): a part of the rest is independent if all its edges
to the outside come from one vertex and lead to one other.
"""

from __future__ import annotations

from hypothesis import strategies as st

from remat_opt.graph import Graph
from tests.graphs import FAMILIES

FIRST, LAST = "first", "last"


def neighbours(graph: Graph) -> tuple[list[set], list[set]]:
    """What each vertex reads and what reads it; FIRST and LAST stand for several ends."""
    reads = [set(found) for found in graph.predecessors]
    readers = [{t for t in range(len(graph)) if s in reads[t]} for s in range(len(graph))]
    for sets, name in ((reads, FIRST), (readers, LAST)):
        empty = [found for found in sets if not found]
        if len(empty) > 1:
            for found in empty:
                found.add(name)
    return reads, readers


def always_kept(graph: Graph) -> set[int]:
    reads, readers = neighbours(graph)
    return {v for v in range(len(graph)) if not reads[v] or not readers[v]}


def total(graph: Graph, kept: set[int], reads: list[set], readers: list[set]) -> int | None:
    """Kept bytes and the largest segment, or None if a part is not independent."""
    left = [v for v in range(len(graph)) if v not in kept]
    largest = 0
    group = {v: v for v in left}
    changed = True
    while changed:  # the smallest number spreads through each part
        changed = False
        for v in left:
            for w in (reads[v] | readers[v]) & group.keys():
                if group[w] < group[v]:
                    group[v], changed = group[w], True
    for name in set(group.values()):
        part = {v for v in left if group[v] == name}
        if len(set().union(*(reads[v] for v in part)) - part) != 1:
            return None
        if len(set().union(*(readers[v] for v in part)) - part) != 1:
            return None
        largest = max(largest, sum(graph.bytes[v] for v in part))
    return sum(graph.bytes[v] for v in kept) + largest


def kept_totals(graph: Graph) -> dict[frozenset[int], int]:
    """The totals of all valid kept sets."""
    reads, readers = neighbours(graph)
    ends = always_kept(graph)
    others = [v for v in range(len(graph)) if v not in ends]
    found = {}
    for number in range(2 ** len(others)):
        kept = ends | {v for bit, v in enumerate(others) if number >> bit & 1}
        if (cost := total(graph, kept, reads, readers)) is not None:
            found[frozenset(kept)] = cost
    return found


def sizes_of(most: int) -> st.SearchStrategy[list[int]]:
    """Bytes of 1 to ``most`` vertices, every number equally likely."""
    return st.integers(1, most).flatmap(
        lambda count: st.lists(st.integers(0, 12), min_size=count, max_size=count)
    )


@st.composite
def chains(draw: st.DrawFn, *, max_vertices: int = 10) -> Graph:
    sizes = draw(sizes_of(max_vertices))
    return Graph.from_edges(sizes, FAMILIES["chain"](len(sizes)))


@st.composite
def any_graphs(draw: st.DrawFn, *, max_vertices: int = 10) -> Graph:
    """Random graphs of all families, sometimes with one source and one sink.

    The last kind is rich in segments that are neither linear nor branched.
    """
    sizes = draw(sizes_of(max_vertices))
    count = len(sizes)
    family = draw(st.sampled_from([*FAMILIES, "random", "woven", "woven", "woven"]))
    if family == "random":
        pairs = [(s, t) for t in range(count) for s in range(t)]
        wanted = draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs)))
        edges = {pair for pair, number in zip(pairs, wanted, strict=True) if number == 2}
    elif family == "woven":
        steps = draw(
            st.lists(
                st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=count, max_size=count
            )
        )
        edges = {(max(0, v - back), v) for v, (back, _) in enumerate(steps) if v}
        edges |= {(v, min(count - 1, v + on)) for v, (_, on) in enumerate(steps[:-1])}
    else:
        edges = set(FAMILIES[family](count))
    return Graph.from_edges(sizes, sorted(edges))
