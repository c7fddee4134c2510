"""Kept vertices of any graph for the least memory: the arbitrary computation graph (ACG) solver.

Problem. Choose which vertices to keep so that the rest falls apart into independent segments, and

    sum of the kept bytes + the largest sum of bytes inside a segment       (Eq. 2 of OGC)

is least. Source and target are always kept (correction 1).

Method. For a trial term C on the second summand, the division tree is solved from the leaves up
for the least kept bytes with all segments within C. A segment within C is not expanded. Else:

  branch      each branch by itself: they are separate segments (correction 3).
  complicate  all vertices where two members meet are kept, and each member is solved.
  linear      a shortest path over the splitting vertices, as for a chain, where a step over a
              single child may also expand that child (Algorithm 5).

Trial terms are all sums that some segment can have, among them 0 and the whole graph, without
which a root that is a complicate segment of bare edges has no answer (correction 4). They are taken
in falling order; those that a solution with maximum B covers (B <= C' < C), and those that cannot
win because no less is kept under a smaller term, are skipped.

Why not a ready-made tool: there is none; ``division_tree`` says what comes near.

Complexity: the division tree, and O(n) per trial term; up to n**2/2 terms, of which few are left.

Guarantee: optimal over all kept sets that leave independent segments, given that the division
tree is complete. The total uses the real maximum of the solution, not C (correction 4).

Left out: gradients, recomputation time, segments with several sources or targets.

Reference: Feng & Huang (2018), Algorithm 5; (2021), Algorithms 5 and 6.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from remat_opt.graph import Graph
from remat_opt.solvers.base import Solution, Status
from remat_opt.solvers.division_tree import (
    Checkpoints,
    Dependent,
    Kind,
    Node,
    assess,
    division_tree,
    schedule_of,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeSearch:
    """The kept vertices found, and the search.

    Attributes:
      checkpoints: kept set and memory.
      tree: the division tree.
      trials: how many trial terms were solved for.
    """

    checkpoints: Checkpoints
    tree: Node
    trials: int


def solve(graph: Graph) -> Solution[TreeSearch]:
    """The kept set of least total memory.

    Returns:
      A solution whose objective is the total bytes, both ends included. Without the ends it is
      less by a constant, so the kept set is the best for either.
    """
    tree = division_tree(graph)
    terms = sorted({0, tree.inside_bytes, *_terms(graph, tree)})
    best_total: float = math.inf
    best: tuple[int, ...] = ()
    trials = 0
    position = len(terms) - 1
    while position >= 0:
        trials += 1
        kept = tuple(_kept(graph, tree, terms[position]))
        found = _checked(graph, kept)
        if found.total_bytes < best_total:
            best_total, best = found.total_bytes, kept
        limit = min(found.largest_segment_bytes, best_total - found.kept_bytes)
        position = bisect_left(terms, limit) - 1
    checkpoints = _checked(graph, best)
    return Solution(
        schedule=schedule_of(graph, checkpoints),
        figures=TreeSearch(checkpoints=checkpoints, tree=tree, trials=trials),
        status=Status.OPTIMAL,
        objective=float(checkpoints.total_bytes),
        bound=float(checkpoints.total_bytes),
    )


def _checked(graph: Graph, kept: tuple[int, ...]) -> Checkpoints:
    found = assess(graph, kept)
    assert not isinstance(found, Dependent), "the tree gives independent segments only"
    return found


def _terms(graph: Graph, tree: Node) -> Iterator[int]:
    """The bytes of all segments that some kept set leaves (Algorithm 6)."""
    for node in tree.walk():
        if node.kind is Kind.COMPLICATE:
            yield node.inside_bytes
        elif node.kind is Kind.LINEAR:
            # All runs of children, with the splitting vertices within the run.
            sizes = [child.inside_bytes for child in node.children]
            ends = [graph.bytes[child.target] for child in node.children[:-1]]
            for start in range(len(sizes)):
                total = sizes[start]
                for stop in range(start + 1, len(sizes)):
                    total += ends[stop - 1] + sizes[stop]
                    yield total


def _kept(graph: Graph, node: Node, trial: int) -> list[int]:
    """The vertices inside ``node`` to keep: least bytes, all segments within ``trial``."""
    if node.kind is Kind.BRANCH:
        # Each branch is a segment of its own, however large their sum is (correction 3).
        return [v for child in node.children for v in _kept(graph, child, trial)]
    if node.inside_bytes <= trial:
        return []
    if node.kind is Kind.COMPLICATE:
        ends = {end for child in node.children for end in (child.source, child.target)}
        meeting = sorted(ends - {node.source, node.target})
        return meeting + [v for child in node.children for v in _kept(graph, child, trial)]
    assert node.kind is Kind.LINEAR, "a leaf has no bytes inside"
    return _kept_linear(graph, node, trial)


def _kept_linear(graph: Graph, node: Node, trial: int) -> list[int]:
    """The shortest path over the splitting vertices (Algorithm 5, Fig. 6 of OGC)."""
    children = node.children
    stops = [0, *(graph.bytes[child.target] for child in children[:-1]), 0]
    # Bytes of everything after the source and before stop number i.
    before = [0]
    for number, child in enumerate(children):
        before.append(before[-1] + stops[number] + child.inside_bytes)
    inside = [_kept(graph, child, trial) for child in children]
    costs = [sum(graph.bytes[v] for v in found) for found in inside]
    reached, came_from = [0], [0]
    window = deque([0])
    for stop in range(1, len(stops)):
        # From i to stop in one segment: all between, splitting vertices included.
        while window and before[stop] - before[window[0]] - stops[window[0]] > trial:
            window.popleft()
        # Or over the last child alone, which may be expanded.
        least, start = reached[stop - 1] + costs[stop - 1], stop - 1
        if window and reached[window[0]] <= least:
            least, start = reached[window[0]], window[0]
        reached.append(least + stops[stop])
        came_from.append(start)
        while window and reached[window[-1]] >= reached[stop]:
            window.pop()
        window.append(stop)
    path = [len(children)]
    while path[-1]:
        path.append(came_from[path[-1]])
    kept = [children[number - 1].target for number in path[1:-1]]
    for start, stop in itertools.pairwise(reversed(path)):
        if stop - start == 1:
            kept += inside[start]
    return kept
