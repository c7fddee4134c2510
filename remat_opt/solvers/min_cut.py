"""Kept sets by parametric minimum cut.

Problem. Choose which vertices to keep so that everything that the backward pass needs can be had
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

Guarantee: exact on the hull of the additive objective, up to the rounding of capacities to integers
(for each vertex, one part in 2**29 of the whole). It knows nothing about the peak: regions and
workspace are left to ``region_chain``.

Reference: the formulation is the project-selection form of Picard (1976); PyTorch's min-cut
partitioner solves a similar problem with a fixed cost model and one multiplier.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from remat_opt.graph import Graph
from remat_opt.graph_arrays import arrays_of

_SOURCE, _SINK = 0, 1
#: Finite capacities are scaled so that they sum to about this.
_SCALE = 1 << 29


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A kept set.

    Attributes:
      kept: vertices to keep, ascending.
      recomputed: vertices computed again, ascending.
      bytes: total size of the kept vertices.
      seconds: total time of the recomputed ones.
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
    return _minimum_cut(_network(graph), cost, multiplier)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """The flow problem of a graph, without the capacities that depend on the multiplier.

    Attributes:
      bytes: size of each vertex.
      relevant: the vertices that the backward pass can use, ascending.
      edges: reversed, with the capacities of uncuttable ones; the others are set when the
        multiplier is known.
      again: for each relevant vertex, the position of the edge paid for running it again.
      held: likewise, for keeping it.
    """

    bytes: np.ndarray
    relevant: np.ndarray
    edges: csr_array
    again: np.ndarray
    held: np.ndarray


def _network(graph: Graph) -> _Network:
    arrays = arrays_of(graph)
    needed = np.unique(arrays.backward.read)
    found = _ancestors(graph, set(needed.tolist()))
    relevant = np.array(sorted(found), dtype=np.int64)
    reads = arrays.forward
    chosen = np.isin(reads.reader, relevant)
    internal = relevant[arrays.internal_bytes[relevant] > 0]
    edges = (
        (np.full(len(relevant), _SOURCE), _again(relevant)),
        (_again(relevant), _available(relevant)),
        (_available(reads.read[chosen]), _again(reads.reader[chosen])),
        (_available(needed), np.full(len(needed), _SINK)),
        (_again(internal), np.full(len(internal), _SINK)),
    )
    size = 2 + 2 * len(graph)
    from_to = [heads * size + tails for tails, heads in edges]
    places = np.unique(np.concatenate(from_to))
    return _Network(
        bytes=arrays.bytes,
        relevant=relevant,
        edges=csr_array(
            (
                np.full(len(places), 2 * _SCALE + 4 * len(graph), dtype=np.int32),
                places % size,
                np.searchsorted(places, size * np.arange(size + 1)),
            ),
            shape=(size, size),
        ),
        again=np.searchsorted(places, from_to[0]),
        held=np.searchsorted(places, from_to[1]),
    )


def _again(vertices: np.ndarray) -> np.ndarray:
    return 2 + 2 * vertices


def _available(vertices: np.ndarray) -> np.ndarray:
    return 3 + 2 * vertices


def _minimum_cut(network: _Network, cost: np.ndarray, multiplier: float) -> Cut:
    relevant = network.relevant
    if not len(relevant):
        return Cut(kept=(), recomputed=(), bytes=0, seconds=0.0)
    held = network.bytes * multiplier
    total = math.fsum(cost) + math.fsum(held)
    scale = _SCALE / total if total > 0 else 0.0
    edges = network.edges
    # At least 1, so that computing again is never free.
    edges.data[network.again] = 1 + np.rint(cost[relevant] * scale)
    edges.data[network.held] = np.rint(held[relevant] * scale)
    # Of all minimum cuts, the one with the fewest vertices available: nothing is kept or recomputed
    # needlessly, even if it costs nothing after rounding.
    sink_side = _reaching_sink(edges)
    runs = sink_side[_again(relevant)]
    recomputed = relevant[runs]
    kept = relevant[~runs & sink_side[_available(relevant)]]
    return Cut(
        kept=tuple(kept.tolist()),
        recomputed=tuple(recomputed.tolist()),
        bytes=int(network.bytes[kept].sum()),
        seconds=math.fsum(cost[recomputed]),
    )


def _ancestors(graph: Graph, vertices: set[int]) -> set[int]:
    found = set(vertices)
    for vertex in range(len(graph) - 1, -1, -1):
        if graph.internal_bytes[vertex]:
            found.add(vertex)
        if vertex in found:
            found.update(graph.predecessors[vertex])
    return found


def _reaching_sink(edges: csr_array) -> np.ndarray:
    """Nodes from which the sink can be reached with spare capacity, under a maximum flow.

    Edges are reversed, so that a node's row holds those that lead to it.
    """
    residual = edges - maximum_flow(edges, _SINK, _SOURCE, method="dinic").flow
    residual.eliminate_zeros()
    seen = np.zeros(edges.shape[0], dtype=bool)
    seen[breadth_first_order(residual, _SINK, return_predecessors=False)] = True
    return seen


def breakpoints(
    graph: Graph, *, seconds: Sequence[float] | None = None, most_cuts: int = 96
) -> list[Cut]:
    """The kept sets on the lower convex hull, from most kept bytes to least.

    Args:
      graph: what to plan.
      seconds: recompute cost of each vertex, ``graph.seconds`` when left out.
      most_cuts: how many flow problems to solve at most. The hull is refined where neighbours are
        furthest apart, so stopping early leaves no large gaps.
    """
    network = _network(graph)
    costs = np.asarray(graph.seconds if seconds is None else seconds, dtype=float)
    total_seconds = math.fsum(costs) or 1.0
    total_bytes = sum(graph.bytes) or 1
    # Bytes so expensive that keeping any is worse than recomputing everything, and the reverse.
    extremes = (0.0, total_seconds * 4.0)
    first = _minimum_cut(network, costs, 1e-9 * total_seconds / total_bytes)
    last = _minimum_cut(network, costs, extremes[1])
    hull = [first, last]
    open_gaps = [(first, last)]
    cuts = 2
    while open_gaps and cuts < most_cuts:
        open_gaps.sort(key=lambda gap: gap[0].bytes - gap[1].bytes)
        left, right = open_gaps.pop()
        if left.bytes <= right.bytes or right.seconds <= left.seconds:
            continue
        multiplier = (right.seconds - left.seconds) / (left.bytes - right.bytes)
        middle = _minimum_cut(network, costs, multiplier)
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


def mixtures(graph: Graph, left: Cut, right: Cut, *, most: int | None = None) -> Iterator[Cut]:
    """Kept sets between two neighbours, one independent component after the other.

    Args:
      graph: what to plan; its ``seconds`` are the costs.
      left: the neighbour that keeps more.
      right: the neighbour that keeps less.
      most: how many to choose, evenly from all; all if None.

    Yields:
      Cuts in which a growing part of the components, in order of execution, has the fate
      that ``right`` gives it; first from the front of the program, then from its back.
    """
    kept, again = _mask(graph, left.kept), _mask(graph, left.recomputed)
    kept_right, again_right = _mask(graph, right.kept), _mask(graph, right.recomputed)
    changed = np.flatnonzero((kept != kept_right) | (again != again_right))
    components = _components(graph, changed.tolist())
    total = 2 * max(0, len(components) - 1)
    stride = 1 if most is None else max(1, -(-total // most))
    # For each vertex, how many components come before its own, from the front.
    place = np.full(len(graph), len(components))
    for number, component in enumerate(components):
        place[list(component)] = number
    arrays = arrays_of(graph)
    for step in range(stride // 2, total, stride):
        count = step % (total // 2) + 1
        flipped = place < count if step < total // 2 else place >= len(components) - count
        flipped &= place < len(components)
        mixed = np.where(flipped, kept_right, kept)
        runs = np.where(flipped, again_right, again)
        yield Cut(
            kept=tuple(np.flatnonzero(mixed).tolist()),
            recomputed=tuple(np.flatnonzero(runs).tolist()),
            bytes=int(arrays.bytes[mixed].sum()),
            seconds=math.fsum(arrays.seconds[runs]),
        )


def _mask(graph: Graph, vertices: Sequence[int]) -> np.ndarray:
    mask = np.zeros(len(graph), dtype=bool)
    mask[list(vertices)] = True
    return mask


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
