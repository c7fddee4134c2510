"""What an elementwise backward step writes over values that it reads for the last time.

One kernel computes the cotangents of all inputs of an elementwise operation. The first takes the
place of the cotangent it starts from; each further one takes that of a value of its size that
nothing reads later, such as a factor of a product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from remat_opt.graph import Graph


def overwritten_bytes(graph: Graph, elsewhere: Set[int] = frozenset()) -> dict[int, int]:
    """For vertices the bytes of cotangents that lie in the place of values that go.

    Args:
      graph: what is stored.
      elsewhere: the vertices whose values lie where nothing may be written.
    """
    readers = _readers(graph, graph.predecessors)
    users = _readers(graph, graph.needs)
    found = {}
    for vertex in range(len(graph)):
        if not graph.turns_in_place(vertex):
            continue
        begun = Counter(
            graph.cotangent_bytes[read]
            for read in graph.predecessors[vertex]
            if graph.cotangent_bytes[read] and _last_with_cotangent(graph, readers[read]) == vertex
        )
        # One of them takes the place of the vertex's own.
        begun[graph.cotangent_bytes[vertex]] -= 1
        going = Counter(
            graph.bytes[read]
            for read in graph.needs[vertex]
            if read != vertex and read not in elsewhere and readers[read] == users[read] == [vertex]
        )
        size = sum(size * min(count, going[size]) for size, count in begun.items() if count > 0)
        if size:
            found[vertex] = size
    return found


def _readers(graph: Graph, reads: Sequence[Sequence[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(len(graph))]
    for vertex, read in enumerate(reads):
        for one in read:
            found[one].append(vertex)
    return found


def _last_with_cotangent(graph: Graph, readers: Sequence[int]) -> int:
    return max((reader for reader in readers if graph.cotangent_bytes[reader]), default=-1)
