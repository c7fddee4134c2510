"""Algorithms 2 and 3 again, written for the tests: loops as printed in the paper.

Nodes are tuples: ("f", v, 0), ("f", v, k) for the k-th copy, ("g", v, 0). Memory is counted from
lifetimes over the finished list of steps.
"""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from remat_opt.graph import Graph
from tests.graphs import graphs
from tests.solvers.kept_oracle import any_graphs, chains


def gradient_graph(graph: Graph, mirror) -> tuple[list[tuple], dict[tuple, list[tuple]]]:
    """Algorithm 2, round by round: the order of execution, and what each node reads."""
    vertices = range(len(graph))
    newest = {v: ("f", v, 0) for v in vertices}
    reads = {newest[v]: [newest[u] for u in graph.predecessors[v]] for v in vertices}
    order = list(newest.values())
    for k in range(1, max(mirror) + 1):
        for v in vertices:
            if k <= mirror[v]:
                newest[v] = ("f", v, k)
                reads[newest[v]] = [newest[u] for u in graph.predecessors[v]]
    made = list(reads)  # every node after those that it reads
    for v in reversed(vertices):
        gradient = ("g", v, 0)
        later = [("g", w, 0) for w in vertices if v in graph.predecessors[w]]
        reads[gradient] = [*later, *(newest[u] for u in graph.needs[v])]
        needed = ancestors(reads, gradient)
        order += [node for node in made if node in needed and node not in order]
        order.append(gradient)
    return order, reads


def ancestors(reads, node) -> set:
    found = set()
    pending = [node]
    while pending:
        for read in reads[pending.pop()]:
            if read not in found:
                found.add(read)
                pending.append(read)
    return found


def copies_run(graph: Graph, mirror) -> tuple[int, ...]:
    order, _ = gradient_graph(graph, mirror)
    return tuple(
        sum(kind == "f" and vertex == v and k > 0 for kind, vertex, k in order)
        for v in range(len(graph))
    )


def size(graph: Graph, node) -> int:
    kind, v, _ = node
    if kind == "g":
        return sum(graph.cotangent_bytes[u] for u in graph.predecessors[v])
    return graph.bytes[v]


def live_bytes(graph: Graph, mirror) -> int:
    """The most alive at a step; a step in place is not charged for its result."""
    order, reads = gradient_graph(graph, mirror)
    born = {node: step for step, node in enumerate(order)}
    last = dict(born)
    for node in order:
        for read in reads[node]:
            last[read] = max(last[read], born[node])
    most = 0
    for step, node in enumerate(order):
        alive = [one for one in order if born[one] <= step <= last[one]]
        total = sum(size(graph, one) for one in alive)
        if graph.in_place[node[1]] and any(
            last[read] == step and size(graph, read) >= size(graph, node) for read in reads[node]
        ):
            total -= size(graph, node)
        most = max(most, total)
    return most


def budget_plan(graph: Graph, budget, splits) -> tuple[int, int, int, tuple[int, ...]]:
    """Algorithm 3 stage by stage: x, y as printed, y with the last stage, and m."""
    found = []
    start = 0
    while start < len(graph):
        ends = [
            v
            for v in range(start, len(graph))
            if v in splits and sum(graph.bytes[start : v + 1]) > budget
        ]
        if not ends:
            break
        found.append((start, ends[0]))
        start = ends[0] + 1
    sizes = [sum(graph.bytes[first : end + 1]) for first, end in found]
    kept = {end for _, end in found}
    printed = max(sizes, default=0)
    return (
        sum(graph.bytes[v] for v in kept),
        printed,
        max(printed, sum(graph.bytes[start:])),
        tuple(int(v not in kept) for v in range(len(graph))),
    )


def splitting(graph: Graph) -> tuple[int, ...]:
    """By definition: no edge leads past v, and without v its part of the graph falls apart."""
    edges = [(s, t) for t, found in enumerate(graph.predecessors) for s in found]
    sources = [v for v, found in enumerate(graph.predecessors) if not found]

    def pieces(left) -> int:
        groups = {v: {v} for v in left}
        for s, t in edges:
            if s in groups and t in groups and groups[s] is not groups[t]:
                groups[s] |= groups[t]
                for v in groups[t]:
                    groups[v] = groups[s]
        return len({id(group) for group in groups.values()})

    everything = set(range(len(graph)))
    return tuple(
        v
        for v in range(len(graph) - 1)
        if not any(s < v < t for s, t in edges)
        and (sources == [v] or pieces(everything - {v}) > pieces(everything))
    )


def least_total(graph: Graph) -> int:
    """The least x + y of any set of splits of a chain."""
    count = len(graph)
    best = None
    for number in range(2 ** (count - 1)):
        cuts = [v for v in range(count - 1) if number >> v & 1]
        edges = [0, *(v + 1 for v in cuts), count]
        largest = max(sum(graph.bytes[a:b]) for a, b in itertools.pairwise(edges))
        total = sum(graph.bytes[v] for v in cuts) + largest
        best = total if best is None else min(best, total)
    return best


def nothing_internal(*, max_vertices: int = 10) -> st.SearchStrategy[Graph]:
    """Any graph without internal bytes, which gradient graphs ignore."""
    return st.one_of(
        any_graphs(max_vertices=max_vertices),
        chains(max_vertices=max_vertices),
        graphs(max_vertices=max_vertices, internal=False),
    )


def with_counts(most: int = 3, *, max_vertices: int = 10):
    """A graph and any mirror counts up to ``most``."""
    return nothing_internal(max_vertices=max_vertices).flatmap(
        lambda graph: st.tuples(
            st.just(graph),
            st.lists(st.integers(0, most), min_size=len(graph), max_size=len(graph)),
        )
    )
