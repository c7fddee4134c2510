"""Kept sets by parametric minimum cut.

Problem. Choose which vertices to keep so that all that the backward pass needs can be had
from kept values by recomputation, minimising

    recompute seconds + multiplier * kept bytes.

Method. Each vertex v is split in two nodes: r(v), "v is computed again", and a(v), "v is
available backward". With the sink side meaning yes, the costs are edges of a cut:

    source -> r(v)   seconds(v)              paid when v is computed again
    r(v)   -> a(v)   multiplier * bytes(v)   paid when v is available but not computed again
    a(u)   -> r(v)   infinite                computing v again takes its predecessor u
    a(v)   -> sink   infinite                a backward step needs v

so a minimum cut is a best kept set. Sweeping the multiplier gives the lower convex hull of
(kept bytes, recompute seconds) exactly: between two neighbouring solutions, the multiplier
at which their costs are equal either yields a solution below both or proves that there is
none. Between the breakpoints, two neighbouring kept sets differ by independent components,
each of which can take the old or the new fate: ``mixtures`` walks through them.

Why not a ready-made tool: the maximum flow is scipy's; only the construction is ours.

Complexity: one maximum flow on 2 n + 2 nodes per breakpoint and edge of the hull.

Guarantee: exact on the hull of the additive objective, up to the rounding of capacities to
integers (for each vertex a part in 2**29 of the whole). It knows nothing of the peak: regions
and workspace are the business of ``region_chain``.

Reference: the formulation is the project-selection form of Picard (1976); PyTorch's
min-cut partitioner solves a like problem with a fixed cost model and one multiplier.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from remat_opt.graph import Graph

_SOURCE, _SINK = 0, 1
#: Finite capacities are scaled so that they sum to about this.
_SCALE = 1 << 29


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A kept set.

    Attributes:
      kept: vertices to keep, ascending.
      recomputed: vertices computed again, ascending.
      bytes: of the kept vertices.
      seconds: of the recomputed ones.
    """

    kept: tuple[int, ...]
    recomputed: tuple[int, ...]
    bytes: int
    seconds: float


def minimum_cut(graph: Graph, multiplier: float, *, seconds: Sequence[float] | None = None) -> Cut:
    """The kept set that is best at one multiplier.

    Args:
      graph: what to plan.
      multiplier: seconds that one kept byte is worth; 0 or more.
      seconds: recompute cost of each vertex, ``graph.seconds`` when left out.
    """
    cost = np.asarray(graph.seconds if seconds is None else seconds, dtype=float)
    held = np.asarray(graph.bytes, dtype=float) * multiplier
    count = len(graph)
    total = math.fsum(cost) + math.fsum(held)
    scale = _SCALE / total if total > 0 else 0.0
    infinite = 2 * _SCALE + 4 * count

    tails: list[int] = []
    heads: list[int] = []
    capacities: list[int] = []

    def edge(tail: int, head: int, capacity: int) -> None:
        tails.append(tail)
        heads.append(head)
        capacities.append(capacity)

    needed = {vertex for needs in graph.needs for vertex in needs}
    relevant = _ancestors(graph, needed)
    for vertex in sorted(relevant):
        again, available = 2 + 2 * vertex, 3 + 2 * vertex
        # At least 1, so that computing again is never free.
        edge(_SOURCE, again, 1 + round(float(cost[vertex]) * scale))
        edge(again, available, round(float(held[vertex]) * scale))
        for predecessor in graph.predecessors[vertex]:
            edge(3 + 2 * predecessor, again, infinite)
        if vertex in needed:
            edge(available, _SINK, infinite)
        if graph.internal_bytes[vertex]:
            edge(again, _SINK, infinite)
    if not tails:
        return Cut(kept=(), recomputed=(), bytes=0, seconds=0.0)
    size = 2 + 2 * count
    network = csr_array(
        (np.asarray(capacities, dtype=np.int32), (tails, heads)), shape=(size, size)
    )
    flow = maximum_flow(network, _SOURCE, _SINK, method="dinic").flow
    # Of all minimum cuts the one with the fewest vertices available: nothing is kept or
    # computed again without use, even where it costs nothing after rounding.
    sink_side = _reaching_sink(network, flow)
    kept, recomputed = [], []
    for vertex in sorted(relevant):
        again, available = 2 + 2 * vertex, 3 + 2 * vertex
        if sink_side[again]:
            recomputed.append(vertex)
        elif sink_side[available]:
            kept.append(vertex)
    return Cut(
        kept=tuple(kept),
        recomputed=tuple(recomputed),
        bytes=sum(graph.bytes[vertex] for vertex in kept),
        seconds=math.fsum(cost[vertex] for vertex in recomputed),
    )


def _ancestors(graph: Graph, vertices: set[int]) -> set[int]:
    found = set(vertices)
    for vertex in range(len(graph) - 1, -1, -1):
        if graph.internal_bytes[vertex]:
            found.add(vertex)
        if vertex in found:
            found.update(graph.predecessors[vertex])
    return found


def _reaching_sink(network: csr_array, flow: csr_array) -> np.ndarray:
    """Nodes from which the sink is reached with capacity to spare."""
    # Transposed, so that a node's row holds the edges that lead to it.
    residual = (network - flow).T.tocsr()
    residual.eliminate_zeros()
    seen = np.zeros(network.shape[0], dtype=bool)
    seen[_SINK] = True
    pending = deque([_SINK])
    starts, tails, spare = residual.indptr, residual.indices, residual.data
    while pending:
        node = pending.popleft()
        for position in range(starts[node], starts[node + 1]):
            tail = tails[position]
            if spare[position] > 0 and not seen[tail]:
                seen[tail] = True
                pending.append(int(tail))
    return seen


def breakpoints(
    graph: Graph, *, seconds: Sequence[float] | None = None, most_cuts: int = 96
) -> list[Cut]:
    """The kept sets on the lower convex hull, from most kept bytes to least.

    Args:
      graph: what to plan.
      seconds: recompute cost of each vertex, ``graph.seconds`` when left out.
      most_cuts: how many flow problems to solve at the most. The hull is refined where
        neighbours are furthest apart, so stopping early leaves the coarsest gaps small.
    """
    costs = graph.seconds if seconds is None else seconds
    total_seconds = math.fsum(costs) or 1.0
    total_bytes = sum(graph.bytes) or 1
    # So dear a byte that keeping any is worse than computing all again, and the reverse.
    extremes = (0.0, total_seconds * 4.0)
    first = minimum_cut(graph, 1e-9 * total_seconds / total_bytes, seconds=costs)
    last = minimum_cut(graph, extremes[1], seconds=costs)
    hull = [first, last]
    open_gaps = [(first, last)]
    cuts = 2
    while open_gaps and cuts < most_cuts:
        open_gaps.sort(key=lambda gap: gap[0].bytes - gap[1].bytes)
        left, right = open_gaps.pop()
        if left.bytes <= right.bytes or right.seconds <= left.seconds:
            continue
        multiplier = (right.seconds - left.seconds) / (left.bytes - right.bytes)
        middle = minimum_cut(graph, multiplier, seconds=costs)
        cuts += 1
        if middle.kept in (left.kept, right.kept):
            continue
        value = middle.seconds + multiplier * middle.bytes
        edge = left.seconds + multiplier * left.bytes
        if value >= edge * (1 - 1e-7):
            continue
        hull.append(middle)
        open_gaps += [(left, middle), (middle, right)]
    hull.sort(key=lambda cut: (-cut.bytes, cut.seconds))
    return hull


def mixtures(
    graph: Graph, left: Cut, right: Cut, *, seconds: Sequence[float] | None = None
) -> Iterator[Cut]:
    """Kept sets between two neighbours, one independent component after the other.

    Args:
      graph: what to plan.
      left: the neighbour that keeps more.
      right: the neighbour that keeps less.
      seconds: recompute cost of each vertex, ``graph.seconds`` when left out.

    Yields:
      Cuts in which a growing part of the components, in order of execution, has the fate
      that ``right`` gives it; first from the front of the program, then from its back.
    """
    costs = graph.seconds if seconds is None else seconds
    state_left, state_right = _states(left), _states(right)
    changed = sorted(
        vertex
        for vertex in {*state_left, *state_right}
        if state_left.get(vertex) != state_right.get(vertex)
    )
    components = _components(graph, changed)
    for order in (components, components[::-1]):
        flipped: set[int] = set()
        for component in order[:-1]:
            flipped |= component
            states = {
                vertex: state for vertex, state in state_left.items() if vertex not in flipped
            }
            states.update(
                (vertex, state_right[vertex]) for vertex in flipped if vertex in state_right
            )
            kept = tuple(sorted(v for v, state in states.items() if state == "kept"))
            again = tuple(sorted(v for v, state in states.items() if state == "recomputed"))
            yield Cut(
                kept=kept,
                recomputed=again,
                bytes=sum(graph.bytes[vertex] for vertex in kept),
                seconds=math.fsum(costs[vertex] for vertex in again),
            )


def _states(cut: Cut) -> dict[int, str]:
    return dict.fromkeys(cut.kept, "kept") | dict.fromkeys(cut.recomputed, "recomputed")


def _components(graph: Graph, vertices: Sequence[int]) -> list[set[int]]:
    """Connected components of the graph on ``vertices``, by their first vertex."""
    parent = {vertex: vertex for vertex in vertices}

    def find(vertex: int) -> int:
        while parent[vertex] != vertex:
            parent[vertex] = parent[parent[vertex]]
            vertex = parent[vertex]
        return vertex

    for vertex in vertices:
        for predecessor in graph.predecessors[vertex]:
            if predecessor in parent:
                parent[find(vertex)] = find(predecessor)
    groups: dict[int, set[int]] = {}
    for vertex in vertices:
        groups.setdefault(find(vertex), set()).add(vertex)
    return sorted(groups.values(), key=min)
