"""Lifetimes in the backward pass: what the solvers of region boundaries share.

All figures are for one region that spans the program, run backward from the last vertex to the
first; a stretch of the program uses its part of them.
"""

from __future__ import annotations

import numpy as np

from remat_opt.graph import Graph
from remat_opt.graph_arrays import arrays_of

#: A vertex weighs its bytes to this power.
_WEIGHT_POWER = 0.7


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
    arrays = arrays_of(graph)
    needs, reads = arrays.backward, arrays.forward
    last_need = np.full(count, count)
    np.minimum.at(last_need, needs.read, needs.reader)
    end_use = np.full(count, -1)
    np.maximum.at(end_use, needs.read, needs.reader)
    runs = np.zeros(count, dtype=bool)
    runs[list(again)] = True
    runs = runs[reads.reader]
    last_reader = last_need.copy()
    np.minimum.at(last_reader, reads.read[runs], reads.reader[runs])
    np.maximum.at(end_use, reads.read[runs], reads.reader[runs])
    return last_reader, last_need, end_use


def cotangent_profile(graph: Graph) -> np.ndarray:
    """Bytes of cotangents and workspace at each backward step; regions do not matter."""
    count = len(graph)
    arrays = arrays_of(graph)
    sizes, reads = arrays.cotangent_bytes, arrays.forward
    # The cotangent of v lives from the step of its last forward reader down to its own.
    newest = np.arange(count)
    sends = sizes[reads.reader] > 0
    np.maximum.at(newest, reads.read[sends], reads.reader[sends])
    change = np.zeros(count + 1)
    np.add.at(change, np.arange(count) + arrays.turns_in_place, sizes)
    np.subtract.at(change, newest + 1, sizes)
    profile: np.ndarray = np.cumsum(change)[:count] + arrays.workspace_bytes
    return profile


def cotangents(graph: Graph) -> dict[int, tuple[int, int]]:
    """For each vertex, the bytes of cotangents before its backward step, and while it runs.

    The latter include its workspace.
    """
    sizes = graph.cotangent_bytes
    alive: dict[int, int] = {}
    found = {}
    for vertex in reversed(range(len(graph))):
        before = sum(alive.values())
        if sizes[vertex]:
            if graph.turns_in_place(vertex):
                alive.pop(vertex, None)
            else:
                alive[vertex] = sizes[vertex]
            alive.update((read, sizes[read]) for read in graph.predecessors[vertex])
        workspace = graph.workspace_bytes[vertex] if sizes[vertex] else 0
        found[vertex] = before, sum(alive.values()) + workspace
        alive.pop(vertex, None)
    return found


def crossing_bytes(graph: Graph, end_use: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """Bytes that cross each position between vertices, from 0 to their number.

    Args:
      graph: what to plan.
      end_use: see ``lifetimes``.
      kept: a mask of values that do not count because they are held anyway.
    """
    count = len(graph)
    crosses = end_use > np.arange(count)
    if kept is not None:
        crosses &= ~kept
    vertices = np.flatnonzero(crosses)
    sizes = arrays_of(graph).bytes[vertices]
    crossing = np.zeros(count + 2)
    np.add.at(crossing, vertices + 1, sizes)
    np.subtract.at(crossing, end_use[vertices] + 1, sizes)
    return np.cumsum(crossing)[: count + 1]


def weights(graph: Graph) -> np.ndarray:
    """The weight of each vertex for ``positions``: large values offer more to choose from.

    It lies between an even spread over the vertices and one over the bytes, nearer to the latter.
    """
    found: np.ndarray = np.maximum(arrays_of(graph).bytes, 1) ** _WEIGHT_POWER
    return found


def positions(crossing: np.ndarray, weights: np.ndarray, most: int) -> np.ndarray:
    """Candidate boundaries: those that the fewest bytes cross, spread over the program.

    The program is cut into stretches of equal weight, and the cheapest position in each is taken. A
    vertex that weighs more than a stretch counts as one.

    Args:
      crossing: bytes that cross each position.
      weights: the weight between each position and the next one.
      most: how many positions to choose besides the first and the last.
    """
    last = len(crossing) - 1
    if last - 1 <= most:
        return np.arange(last + 1)
    heaviest = np.sort(weights)[::-1]
    rest = np.cumsum(heaviest[::-1])[::-1]
    limits = rest[:most] / (most - np.arange(most))
    limit = limits[np.argmax(heaviest[:most] <= limits)]
    before = np.cumsum(np.minimum(weights, limit))[:-1]
    stretch = (before / limit + 1e-9).astype(int)
    order = np.lexsort((crossing[1:-1], stretch))
    inner = 1 + order[np.unique(stretch[order], return_index=True)[1]]
    return np.concatenate(([0], inner, [last]))


def sums_from(
    first: np.ndarray, column: np.ndarray, sizes: np.ndarray, *, rows: int, columns: int
) -> np.ndarray:
    """A table of what has joined as the start of a stretch goes down.

    Args:
      first: for each value, the last row that it is part of; it is part of all before.
      column: for each value, the first column in which it counts; beyond the last it never counts.
      sizes: of the values, in whole bytes.
      rows: how many there are.
      columns: how many there are.

    Returns:
      [column, row] the total size of the values that are part of the row and count in the column.
    """
    within = column < columns
    places = column[within] * rows + first[within]
    table = np.bincount(places, sizes[within], columns * rows).reshape(columns, rows)
    np.cumsum(table, axis=0, out=table)
    joined: np.ndarray = np.cumsum(table[:, ::-1], axis=1)[:, ::-1]
    return joined
