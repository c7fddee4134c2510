"""Kept vertices of a chain for the least memory: the linear computation graph (LCG) solver.

Problem. On a chain of n vertices, choose which to keep so that

    sum of the kept bytes + the largest sum of bytes between two neighbours kept      (Eq. 1)

is least. The first and the last vertex are always kept (correction 1).

Method. For a trial term C on the second summand, the accessibility graph has an edge from i to j
wherever the bytes between them are at most C; its shortest path, with the bytes of j as the length
of every edge to j, keeps the least. Every sum between two vertices is a trial term, among them 0
(keep all) and the whole inside (keep nothing inside). Trial terms are taken in falling order. If
the path found under C has a real maximum B, the terms B <= C' < C give the same path and are
skipped (Algorithm 1, line 7). So are terms that cannot win: under smaller terms the path keeps no
less, so a better total needs a maximum below best - kept.

Why not a ready-made tool: the accessibility graph has up to n**2/2 edges for every trial term,
but its windows only move forward, so a queue finds the path in n steps without building it.

Complexity: O(n) per trial term, up to n**2/2 terms; in practice a few dozen are left.

Guarantee: optimal in the paper's model. The total uses the real maximum of the path, not the trial
term (correction 4).

Left out: gradients and recomputation time.

Reference: Feng & Huang (2018), section 3, Algorithm 1; (2021), section 4.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.solvers.base import Refused, Solution, Status
from remat_opt.solvers.division_tree import Checkpoints, Dependent, assess, schedule_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainSearch:
    """The kept vertices found, and the search.

    Attributes:
      checkpoints: kept set and memory.
      trials: how many trial terms were solved for.
    """

    checkpoints: Checkpoints
    trials: int


def is_chain(graph: Graph) -> bool:
    """Whether every vertex but the first reads just the one before it."""
    return all(
        found == ((vertex - 1,) if vertex else ())
        for vertex, found in enumerate(graph.predecessors)
    )


def solve(graph: Graph) -> Solution[ChainSearch] | Refused:
    """The kept set of least total memory on a chain.

    Returns:
      A solution whose objective is the total bytes, both ends included; or a refusal of a graph
      that is not a chain.
    """
    if not is_chain(graph):
        wrong = next(
            graph.names[vertex]
            for vertex, found in enumerate(graph.predecessors)
            if found != ((vertex - 1,) if vertex else ())
        )
        return Refused(
            message=f"The graph is not a chain: vertex {wrong!r} does not read just the one before "
            "it. Use arbitrary_graph.solve."
        )
    kept, trials = least_total(graph.bytes)
    checkpoints = assess(graph, kept)
    assert not isinstance(checkpoints, Dependent), "on a chain every kept set is independent"
    return Solution(
        schedule=schedule_of(graph, checkpoints),
        figures=ChainSearch(checkpoints=checkpoints, trials=trials),
        status=Status.OPTIMAL,
        objective=float(checkpoints.total_bytes),
        bound=float(checkpoints.total_bytes),
    )


def least_total(bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The kept vertices of a chain of vertices with these bytes, and the number of trials."""
    before = list(itertools.accumulate(bytes, initial=0))
    best_total: float = math.inf
    best: tuple[int, ...] = (0,)
    # The whole inside is the first trial term (correction 4).
    trial: int | None = max(before[-2] - before[1], 0)
    trials = 0
    while trial is not None:
        trials += 1
        kept = shortest_path(bytes, trial)
        largest = max((before[b] - before[a + 1] for a, b in itertools.pairwise(kept)), default=0)
        kept_bytes = sum(bytes[vertex] for vertex in kept)
        if kept_bytes + largest < best_total:
            best_total, best = kept_bytes + largest, kept
        trial = largest_term_below(before, min(largest, best_total - kept_bytes))
    return best, trials


def largest_term_below(before: Sequence[int], limit: float) -> int | None:
    """The largest sum of bytes between two vertices that is below ``limit``.

    Args:
      before: for each vertex, the bytes of all before it, followed by those of all.
      limit: bytes.
    """
    edges = np.asarray(before)
    starts = np.arange(1, len(edges) - 1)
    # Between vertex start - 1 and vertex stop lie before[stop] - before[start] bytes.
    stops = np.searchsorted(edges, edges[starts] + limit, side="left") - 1
    stops = np.minimum(stops, len(edges) - 2)
    terms = (edges[stops] - edges[starts])[stops >= starts]
    return int(np.max(terms)) if len(terms) else None


def shortest_path(bytes: Sequence[int], trial: int) -> tuple[int, ...]:
    """The path of least bytes through the accessibility graph of one trial term."""
    reached = [bytes[0]]
    came_from = [0]
    before = list(itertools.accumulate(bytes, initial=0))
    # Vertices from which the current one is accessible, with increasing bytes reached.
    window = deque([0])
    for vertex in range(1, len(bytes)):
        while before[vertex] - before[window[0] + 1] > trial:  # l(v_i, v_j) <= C
            window.popleft()
        came_from.append(window[0])
        reached.append(reached[window[0]] + bytes[vertex])
        while window and reached[window[-1]] >= reached[vertex]:
            window.pop()
        window.append(vertex)
    path = [len(bytes) - 1]
    while path[-1]:
        path.append(came_from[path[-1]])
    return tuple(reversed(path))


def identical_cost_optimum(count: int) -> int:
    """The optimum for ``count`` vertices of one unit each, by its closed form.

    The papers' 2 / sqrt(n) of the total is a limit; the exact optimum is
    ceil(2 * sqrt(n - 1)) (correction 2), for two vertices or more.

    >>> [identical_cost_optimum(count) for count in (2, 5, 10, 101)]
    [2, 4, 6, 20]
    """
    if count < 2:
        return count
    # ceil(sqrt(4 (n - 1))) in integers.
    return math.isqrt(4 * (count - 1) - 1) + 1
