"""A graph as numpy arrays, for computing figures of many schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Who reads whom, one entry for each pair, ascending by the reader.

    Attributes:
      reader: the vertex that reads.
      read: the vertex whose value it reads.
    """

    reader: np.ndarray
    read: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphArrays:
    """The figures of a graph, one entry for each vertex, and its edges; all read-only.

    Attributes:
      bytes: see ``Graph``.
      seconds: see ``Graph``.
      cotangent_bytes: see ``Graph``.
      internal_bytes: see ``Graph``.
      forward_workspace_bytes: see ``Graph``.
      workspace_bytes: see ``Graph``; 0 if no backward step runs.
      forward: reads of a vertex's own computation.
      backward: reads of its backward step.
      turns_in_place: see ``Graph``.
    """

    bytes: np.ndarray
    seconds: np.ndarray
    cotangent_bytes: np.ndarray
    internal_bytes: np.ndarray
    forward_workspace_bytes: np.ndarray
    workspace_bytes: np.ndarray
    forward: Reads
    backward: Reads
    turns_in_place: np.ndarray


#: The last few graphs with their arrays, by identity: hashing a large graph takes longer than most
#: uses of its arrays. Graphs held here stay alive, so an identity cannot be reused.
_known: dict[int, tuple[Graph, GraphArrays]] = {}
_MOST_KNOWN = 8


def arrays_of(graph: Graph) -> GraphArrays:
    """The arrays of a graph, cached for the last few graphs."""
    found = _known.get(id(graph))
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        found = _known[id(graph)] = graph, _arrays(graph)
    return found[1]


def _arrays(graph: Graph) -> GraphArrays:
    # Most graphs are a known one with other figures, and the same edges.
    alike = (
        arrays
        for known, arrays in _known.values()
        if known.predecessors is graph.predecessors and known.needs is graph.needs
    )
    same = next(alike, None)
    forward = same.forward if same else _reads(graph.predecessors)
    backward = same.backward if same else _reads(graph.needs)
    cotangent_bytes = np.asarray(graph.cotangent_bytes, dtype=np.int64)
    workspace_bytes = np.asarray(graph.workspace_bytes, dtype=np.int64)
    return GraphArrays(
        bytes=np.asarray(graph.bytes, dtype=np.int64),
        seconds=np.asarray(graph.seconds, dtype=float),
        cotangent_bytes=cotangent_bytes,
        internal_bytes=np.asarray(graph.internal_bytes, dtype=np.int64),
        forward_workspace_bytes=np.asarray(graph.forward_workspace_bytes, dtype=np.int64),
        workspace_bytes=workspace_bytes * (cotangent_bytes > 0),
        forward=forward,
        backward=backward,
        turns_in_place=_turns_in_place(graph, cotangent_bytes, forward),
    )


def _turns_in_place(graph: Graph, cotangent_bytes: np.ndarray, forward: Reads) -> np.ndarray:
    """``Graph.turns_in_place`` of all vertices."""
    read, reader = cotangent_bytes[forward.read], cotangent_bytes[forward.reader]
    fits = np.zeros(len(graph), dtype=bool)
    fits[forward.reader[(read > 0) & (read <= reader)]] = True
    fits &= np.asarray(graph.in_place, dtype=bool)
    return fits


def _reads(lists: Sequence[Sequence[int]]) -> Reads:
    counts = [len(found) for found in lists]
    return Reads(
        reader=np.repeat(np.arange(len(lists)), counts),
        read=np.array([read for found in lists for read in found], dtype=np.int64),
    )
