"""Lifetimes in the backward pass: what the solvers of region boundaries share.

All figures are of one region that spans the program, run backward from the last vertex to the
first; a stretch of the program takes its part of them.
"""

from __future__ import annotations

import numpy as np

from remat_opt.graph import Graph
from remat_opt.simulator import turns_in_place


def lifetimes(graph: Graph, again: frozenset[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When each value is read backward.

    Args:
      graph: what to plan.
      again: the vertices that run again.

    Returns:
      last_reader: the earliest vertex whose backward step, or whose recomputation, reads it
        (backward runs from high to low, so that is the last reader of a stored value).
      last_need: the earliest vertex whose backward step reads it, which is the last reader
        of a recomputed value; the number of vertices if only recomputation reads it.
      end_use: the latest vertex whose backward step or recomputation reads it; a boundary
        at or before it must export the value.
    """
    count = len(graph)
    last_need = np.full(count, count)
    end_use = np.full(count, -1)
    for vertex in range(count):
        for needed in graph.needs[vertex]:
            last_need[needed] = min(last_need[needed], vertex)
            end_use[needed] = max(end_use[needed], vertex)
    last_reader = last_need.copy()
    for vertex in sorted(again):
        for predecessor in graph.predecessors[vertex]:
            last_reader[predecessor] = min(last_reader[predecessor], vertex)
            end_use[predecessor] = max(end_use[predecessor], vertex)
    return last_reader, last_need, end_use


def cotangent_profile(graph: Graph) -> np.ndarray:
    """Bytes of cotangents alive at the backward step of each vertex; regions do not matter."""
    count = len(graph)
    change = np.zeros(count + 1)
    # The cotangent of v lives from the step of its last forward reader down to its own.
    newest = list(range(count))
    for vertex, predecessors in enumerate(graph.predecessors):
        if graph.cotangent_bytes[vertex]:
            for predecessor in predecessors:
                newest[predecessor] = max(newest[predecessor], vertex)
    for vertex in range(count):
        size = graph.cotangent_bytes[vertex]
        if size:
            start = vertex + 1 if turns_in_place(graph, vertex) else vertex
            change[start] += size
            change[newest[vertex] + 1] -= size
    return np.cumsum(change)[:count]


def crossing_bytes(graph: Graph, end_use: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """Bytes that cross each position between vertices, from 0 to their number.

    Args:
      graph: what to plan.
      end_use: see ``lifetimes``.
      kept: a mask of values that do not count, since they are held anyway.
    """
    count = len(graph)
    crossing = np.zeros(count + 2)
    for vertex in range(count):
        if end_use[vertex] > vertex and not (kept is not None and kept[vertex]):
            crossing[vertex + 1] += graph.bytes[vertex]
            crossing[end_use[vertex] + 1] -= graph.bytes[vertex]
    return np.cumsum(crossing)[: count + 1]


def positions(crossing: np.ndarray, most: int) -> np.ndarray:
    """Candidate boundaries: those that the fewest bytes cross, spread over the program.

    Args:
      crossing: bytes that cross each position.
      most: how many positions to choose beside the first and the last.
    """
    inner = np.arange(1, len(crossing) - 1)
    if len(inner) > most:
        # The cheapest position of each of `most` equal stretches.
        stretches = np.array_split(inner, most)
        inner = np.array([stretch[np.argmin(crossing[stretch])] for stretch in stretches])
    return np.concatenate(([0], inner, [len(crossing) - 1]))
