"""Independent segments and the division tree: the basis of the arbitrary-graph solver.

Problem. Say which sets of vertices may be kept so that the rest falls apart into segments that can
run forward and backward on their own, what such a set costs, and how a graph is made of segments
within segments.

A segment between two kept vertices k and t is independent if nothing in it has an edge to
anything outside other than k and t. The memory of a kept set is

    sum of the kept bytes + the largest sum of bytes inside a segment.       (Eq. 1, Eq. 2 of OGC)

Method. ``assess`` takes a kept set, finds the connected components of the rest, and checks that
each has one vertex before it and one after it. ``division_tree`` splits the whole graph down to
single edges:

  leaf        a single edge.
  linear      has splitting vertices, through which every path goes; the children are the
              segments between them.
  branch      parallel segments between the same two vertices; the children are these.
  complicate  neither; the children are the largest independent segments inside (the maximal
              split).

Vertices are numbered in an order of execution, so v splits a segment exactly if no edge leads
past its number. In a complicate segment, what lies between k and t is dominated by k and
post-dominated by t; components of that set with an edge elsewhere are dropped (correction 5).

Why not a ready-made tool: SPQR trees and single-entry-single-exit regions are relatives, but no
Python library computes either with this treatment of parallel edges.

Complexity: O(n + e) for ``assess`` and per linear or branch node; for a complicate node a set
operation on n bits per edge of the pairs of (dominator, post-dominator), at most n**2 of them.

Guarantee: unique (Theorem 1). That it is complete is tested, not proven, for corrected
Algorithm 4: the optimum over the tree equals exhaustive search on thousands of graphs.

Readings. Source and target of the graph are always kept (correction 1). A graph with several
sources or sinks gets one of no bytes before or after them: vertex -1 or n. Parallel branches are
separate segments, so their maximum counts and not their sum (correction 3). Read literally,
Algorithm 4 takes all vertices between k and t or none; we take the largest independent part, and a
direct edge from k to t is a separate segment (correction 5).

Left out: gradients, recomputation time, segments with several sources or targets (the paper's
assumption).

Reference: Feng & Huang (2018), definitions 1-9 and Algorithms 2-4; (2021), Algorithms 2-4.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Iterator, Sequence

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule


class Kind(enum.Enum):
    """What a segment is made of."""

    LEAF = "leaf"
    LINEAR = "linear"
    BRANCH = "branch"
    COMPLICATE = "complicate"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An independent segment.

    Attributes:
      kind: what it is made of.
      source: the vertex before it; -1 stands before all sources if there are several.
      target: the vertex after it; n stands after all sinks if there are several.
      inside: the vertices between, ascending, both ends excluded.
      inside_bytes: their bytes.
      children: the segments of its division, ordered by source, target and inside.
    """

    kind: Kind
    source: int
    target: int
    inside: tuple[int, ...]
    inside_bytes: int
    children: tuple[Node, ...]

    def walk(self) -> Iterator[Node]:
        """This node and all below it, each before its children."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.children)

    def text(self, graph: Graph) -> str:
        """The tree as text, one line per node, with vertices by name."""

        def name(vertex: int) -> str:
            return graph.names[vertex] if 0 <= vertex < len(graph) else "()"

        lines = []
        pending = [(self, 0)]
        while pending:
            node, depth = pending.pop()
            lines.append(
                f"{'  ' * depth}{node.kind.value} {name(node.source)} -> {name(node.target)}: "
                f"{len(node.inside)} inside, {node.inside_bytes} bytes"
            )
            pending += [(child, depth + 1) for child in reversed(node.children)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One part of what a kept set leaves.

    Attributes:
      source: the kept vertex before it, or -1.
      target: the kept vertex after it, or n.
      inside: its vertices, ascending.
      bytes: their bytes.
    """

    source: int
    target: int
    inside: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """A kept set and its memory as Re-forwarding counts it.

    Attributes:
      kept: the kept vertices, including source and target if there is one of each.
      segments: what lies between them, ordered by target and first vertex.
      kept_bytes: bytes of all kept vertices.
      largest_segment_bytes: the largest bytes of a segment; 0 if everything is kept.
      total_bytes: the objective, Eq. 1: the sum of both.
      total_without_ends_bytes: the same less the bytes of source and target.
    """

    kept: tuple[int, ...]
    segments: tuple[Segment, ...]
    kept_bytes: int
    largest_segment_bytes: int
    total_bytes: int
    total_without_ends_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependent:
    """A kept set that leaves a part that is not an independent segment.

    Attributes:
      inside: the vertices of the first such part, ascending.
      sources: the kept vertices that it reads.
      targets: the kept vertices that read it.
    """

    inside: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def ends(graph: Graph) -> tuple[int, int]:
    """Source and target; -1 for the source and n for the target if there are several."""
    sources = [vertex for vertex, found in enumerate(graph.predecessors) if not found]
    targets = [vertex for vertex, found in enumerate(graph.successors()) if not found]
    return (
        sources[0] if len(sources) == 1 else -1,
        targets[0] if len(targets) == 1 else len(graph),
    )


def assess(graph: Graph, kept: Sequence[int]) -> Checkpoints | Dependent:
    """What a kept set costs, or which part of the rest is not independent.

    Args:
      graph: what to plan.
      kept: vertices to keep; source and target are added (correction 1).
    """
    source, target = ends(graph)
    count = len(graph)
    chosen = {*kept, *(end for end in (source, target) if 0 <= end < count)}
    before, after = _closed(graph)
    seen = set(chosen)
    segments = []
    for first in range(count):
        if first in seen:
            continue
        inside = {first}
        sources: set[int] = set()
        targets: set[int] = set()
        pending = [first]
        while pending:
            vertex = pending.pop()
            for neighbour, outside in [
                *((read, sources) for read in before[vertex]),
                *((reader, targets) for reader in after[vertex]),
            ]:
                if neighbour in chosen or not 0 <= neighbour < count:
                    outside.add(neighbour)
                elif neighbour not in inside:
                    inside.add(neighbour)
                    pending.append(neighbour)
        seen |= inside
        vertices = tuple(sorted(inside))
        if len(sources) != 1 or len(targets) != 1:
            return Dependent(
                inside=vertices, sources=tuple(sorted(sources)), targets=tuple(sorted(targets))
            )
        segments.append(
            Segment(
                source=sources.pop(),
                target=targets.pop(),
                inside=vertices,
                bytes=sum(graph.bytes[vertex] for vertex in vertices),
            )
        )
    kept_bytes = sum(graph.bytes[vertex] for vertex in chosen)
    # The maximum runs over all segments, parallel ones included (correction 3).
    largest = max((segment.bytes for segment in segments), default=0)
    end_bytes = sum(graph.bytes[end] for end in {source, target} if 0 <= end < count)
    return Checkpoints(
        kept=tuple(sorted(chosen)),
        segments=tuple(sorted(segments, key=lambda one: (one.target, one.inside))),
        kept_bytes=kept_bytes,
        largest_segment_bytes=largest,
        total_bytes=kept_bytes + largest,
        total_without_ends_bytes=kept_bytes + largest - end_bytes,
    )


def _closed(graph: Graph) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Predecessors and successors, with the ends that stand for several."""
    source, target = ends(graph)
    before = [found or ((-1,) if source == -1 else ()) for found in graph.predecessors]
    after = [
        found or ((len(graph),) if target == len(graph) else ()) for found in graph.successors()
    ]
    return before, after


def schedule_of(graph: Graph, checkpoints: Checkpoints) -> Schedule:
    """A region per segment, each kept vertex in the region of the last segment before it.

    The last region is free: its backward pass follows at once, so it still holds what it would have
    to recompute. A region that holds a vertex with side effects is also free.
    """
    regions: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    waiting = list(checkpoints.segments)
    for end in (*checkpoints.kept, len(graph)):
        parts = [segment.inside for segment in waiting if segment.target == end]
        waiting = [segment for segment in waiting if segment.target != end]
        own = (end,) if end < len(graph) else ()
        regions += [(part, ()) for part in parts[:-1]]
        last = parts[-1] if parts else ()
        if last or own:
            regions.append((tuple(sorted((*last, *own))), own))
    free = [
        position == len(regions) - 1 or any(graph.pinned[vertex] for vertex in vertices)
        for position, (vertices, _) in enumerate(regions)
    ]
    return Schedule(
        regions=tuple(
            Region(vertices=vertices, kept=() if unchecked else kept, checkpointed=not unchecked)
            for (vertices, kept), unchecked in zip(regions, free, strict=True)
        )
    )


def division_tree(graph: Graph) -> Node:
    """The division tree of the whole graph (definition 9)."""
    source, target = ends(graph)
    inside = tuple(vertex for vertex in range(len(graph)) if vertex not in (source, target))
    before, _ = _closed(graph)
    edges = [(read, vertex) for vertex in range(len(graph)) for read in before[vertex]]
    if target == len(graph):
        edges += [(v, target) for v, found in enumerate(graph.successors()) if not found]
    return _divide(graph, source, target, inside, edges)


Edge = tuple[int, int]


def _divide(
    graph: Graph, source: int, target: int, inside: tuple[int, ...], edges: Sequence[Edge]
) -> Node:
    children: list[Node]
    if not inside:
        kind, children = Kind.LEAF, []
    elif splitting := splitting_vertices(inside, edges):
        kind, children = Kind.LINEAR, []
        stops = [*splitting, target]
        starts = [source, *splitting]
        parts: list[list[int]] = [[] for _ in stops]
        owned: list[list[Edge]] = [[] for _ in stops]
        position = 0
        for vertex in inside:
            if position < len(splitting) and vertex == splitting[position]:
                position += 1
            else:
                parts[position].append(vertex)
        place = {stop: number for number, stop in enumerate(stops)}
        place |= {vertex: number for number, part in enumerate(parts) for vertex in part}
        for tail, head in edges:
            owned[place[head]].append((tail, head))
        for start, stop, part, own in zip(starts, stops, parts, owned, strict=True):
            children.append(_divide(graph, start, stop, tuple(part), own))
    elif len(found := branches(source, target, inside, edges)) > 1:
        kind = Kind.BRANCH
        children = [_divide(graph, source, target, part, own) for part, own in found]
    else:
        kind = Kind.COMPLICATE
        children = [
            _divide(graph, start, stop, part, own)
            for start, stop, part, own in maximal_split(source, target, inside, edges)
        ]
    return Node(
        kind=kind,
        source=source,
        target=target,
        inside=inside,
        inside_bytes=sum(graph.bytes[vertex] for vertex in inside),
        children=tuple(children),
    )


def splitting_vertices(inside: Sequence[int], edges: Sequence[Edge]) -> list[int]:
    """The vertices that every path from source to target goes through, ascending (Algorithm 2).

    Args:
      inside: the vertices of the segment, ascending.
      edges: its edges, those from the source and to the target included.
    """
    # Numbers follow the order of execution, so v splits if no edge leads past its number.
    place = {vertex: number for number, vertex in enumerate(inside, start=1)}
    passing = [0] * (len(inside) + 3)
    for tail, head in edges:
        start = place.get(tail, 0)
        stop = place.get(head, len(inside) + 1)
        passing[start + 1] += 1
        passing[stop] -= 1
    found, over = [], 0
    for number, vertex in enumerate(inside, start=1):
        over += passing[number]
        if not over:
            found.append(vertex)
    return found


def branches(
    source: int, target: int, inside: Sequence[int], edges: Sequence[Edge]
) -> list[tuple[tuple[int, ...], list[Edge]]]:
    """The parallel parts of a segment, each with its edges (Algorithm 3).

    A direct edge from source to target is a part without vertices, and comes first.
    """
    parent = {vertex: vertex for vertex in inside}

    def find(vertex: int) -> int:
        while parent[vertex] != vertex:
            parent[vertex] = parent[parent[vertex]]
            vertex = parent[vertex]
        return vertex

    for tail, head in edges:
        if tail in parent and head in parent:
            parent[find(head)] = find(tail)
    parts: dict[int, tuple[list[int], list[Edge]]] = {}
    direct: list[Edge] = []
    for vertex in inside:
        parts.setdefault(find(vertex), ([], []))[0].append(vertex)
    for tail, head in edges:
        if (tail, head) == (source, target):
            direct.append((tail, head))
        else:
            parts[find(head if head in parent else tail)][1].append((tail, head))
    found = [(tuple(part), own) for part, own in parts.values()]
    return [((), direct), *found] if direct else found


def maximal_split(
    source: int, target: int, inside: Sequence[int], edges: Sequence[Edge]
) -> list[tuple[int, int, tuple[int, ...], list[Edge]]]:
    """The largest independent segments within one that is neither linear nor branched.

    Algorithm 4 with correction 5. Bit i of a set below is the i-th vertex of the segment.

    Returns:
      Source, target, inside and edges of each, ordered by the first two.
    """
    vertices = (source, *inside, target)
    place = {vertex: number for number, vertex in enumerate(vertices)}
    count = len(vertices)
    before, after = [0] * count, [0] * count
    for tail, head in edges:
        before[place[head]] |= 1 << place[tail]
        after[place[tail]] |= 1 << place[head]
    dominators, postdominators = [1] * count, [1 << count - 1] * count
    for number in range(1, count):
        dominators[number] = _common(dominators, before[number]) | 1 << number
    for number in range(count - 2, -1, -1):
        postdominators[number] = _common(postdominators, after[number]) | 1 << number
    dominated, postdominated = [0] * count, [0] * count
    pairs: set[Edge] = {(place[tail], place[head]) for tail, head in edges}
    for number in range(1, count - 1):
        above = list(_bits(dominators[number] & ~(1 << number)))
        below = list(_bits(postdominators[number] & ~(1 << number)))
        for one in above:
            dominated[one] |= 1 << number
        for one in below:
            postdominated[one] |= 1 << number
        pairs.update((start, stop) for start in above for stop in below)
    pairs.discard((0, count - 1))

    # Larger ones first: what lies within a segment that was taken is no member itself. The size
    # of the dominated set is a limit; a pair returns to the queue with what is left of it.
    queue = [
        (-between.bit_count(), *pair, False)
        for pair in pairs
        if (between := dominated[pair[0]] & postdominated[pair[1]])
    ]
    heapq.heapify(queue)
    members: dict[Edge, int] = {}
    covered = 0
    while queue:
        _, start, stop, settled = heapq.heappop(queue)
        between = dominated[start] & postdominated[stop]
        if not between & ~covered:
            continue
        part = _independent(between, start, stop, before, after)
        if not settled and part:
            heapq.heappush(queue, (-part.bit_count(), start, stop, True))
        elif part and not part & covered:
            members[start, stop] = part
            covered |= part
    # Edges that no larger member holds are members themselves, or join the one with the same ends.
    owned: dict[Edge, list[Edge]] = {pair: [] for pair in members}
    home = {number: pair for pair, part in members.items() for number in _bits(part)}
    for tail, head in edges:
        ends_of = (place[tail], place[head])
        pair = home.get(ends_of[1]) or home.get(ends_of[0]) or ends_of
        owned.setdefault(pair, []).append((tail, head))
    return [
        (
            vertices[pair[0]],
            vertices[pair[1]],
            tuple(vertices[number] for number in _bits(members.get(pair, 0))),
            owned[pair],
        )
        for pair in sorted(owned)
    ]


def _independent(
    between: int, start: int, stop: int, before: Sequence[int], after: Sequence[int]
) -> int:
    """``between`` without the components that have an edge to anything but the two ends."""
    allowed = between | 1 << start | 1 << stop
    pending = [n for n in _bits(between) if (before[n] | after[n]) & ~allowed]
    dropped = 0
    for number in pending:
        dropped |= 1 << number
    while pending:
        number = pending.pop()
        more = (before[number] | after[number]) & between & ~dropped
        dropped |= more
        pending += _bits(more)
    return between & ~dropped


def _common(sets: Sequence[int], mask: int) -> int:
    result = -1
    for number in _bits(mask):
        result &= sets[number]
    return result


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
