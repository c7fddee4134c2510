"""The arbitrary computation graph (ACG) that solvers see: numbers and edges, no JAX.

A vertex is a materialised value together with the fused equations that make it. Vertices
are numbered in an order of execution, so every edge leads from a lower to a higher number.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remat_opt.errors import GraphError

if TYPE_CHECKING:
    import networkx

#: The fields that hold figures.
_FIGURES = (
    "bytes",
    "seconds",
    "flops",
    "cotangent_bytes",
    "internal_bytes",
    "workspace_bytes",
    "forward_workspace_bytes",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A forward computation and what its backward pass reads.

    All tuples have one entry per vertex.

    Attributes:
      names: what to call each vertex in messages; unique.
      bytes: bytes of the value if it is held in temporary memory (0 for a program output, which
        always lives in an output buffer).
      seconds: time to compute the value again from its predecessors.
      flops: floating-point operations to compute it again.
      predecessors: the vertices read to compute it, ascending.
      needs: the vertices whose values its backward step reads, ascending; may include the vertex
        itself. Empty if there is no backward step.
      cotangent_bytes: bytes of the gradient with respect to it; 0 if it has none.
      internal_bytes: bytes of residuals that only running the vertex provides and that no policy
        can keep by name.
      workspace_bytes: bytes that its backward step takes only while it runs. Negative if compiling
        showed that its arrays are not all alive at once (``learnt``).
      forward_workspace_bytes: bytes that it takes only while it runs in the forward pass; 0 unless
        it is pinned.
      in_place: whether its cotangent can be turned into that of a predecessor in the same
        buffer (elementwise vertices).
      pinned: whether the vertex must run exactly once: it has side effects, or the compiler would
        hold more for running it again than that saves.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    flops: tuple[int, ...]
    predecessors: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    cotangent_bytes: tuple[int, ...]
    internal_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    forward_workspace_bytes: tuple[int, ...]
    in_place: tuple[bool, ...]
    pinned: tuple[bool, ...]

    def __post_init__(self) -> None:
        _validate(self)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def forward_seconds(self) -> float:
        """Time of one forward pass."""
        return math.fsum(self.seconds)

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of one forward pass."""
        return sum(self.flops)

    def turns_in_place(self, vertex: int) -> bool:
        """Whether the vertex's backward step writes a predecessor's cotangent over its own."""
        size = self.cotangent_bytes[vertex]
        return self.in_place[vertex] and any(
            0 < self.cotangent_bytes[read] <= size for read in self.predecessors[vertex]
        )

    def with_bytes(self, **changed: tuple[int, ...]) -> Graph:
        """The graph with other figures in some of the fields that hold bytes.

        Only these are checked: edges and names, which take longest, are the same.

        Raises:
          GraphError: a negative or non-finite number, or workspace where there may be none.
        """
        found = copy.copy(self)
        for field, entries in changed.items():
            object.__setattr__(found, field, entries)
            _check_length(found, field)
            _check_figures(found, field)
        if "forward_workspace_bytes" in changed:
            _check_forward_workspaces(found)
        return found

    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each vertex, those that read it, ascending."""
        found: list[list[int]] = [[] for _ in self.names]
        for vertex, predecessors in enumerate(self.predecessors):
            for predecessor in predecessors:
                found[predecessor].append(vertex)
        return tuple(tuple(readers) for readers in found)

    @classmethod
    def from_edges(
        cls,
        bytes: Sequence[int],
        edges: Iterable[tuple[int, int]],
        *,
        seconds: Sequence[float] | None = None,
        flops: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Graph:
        """A graph as the papers draw it: each vertex's backward step reads itself and its inputs.

        Args:
          bytes: bytes of each vertex's value.
          edges: pairs (from, to); the numbers must be an order of execution.
          seconds: time of each vertex; 1.0 each when left out.
          flops: operations of each vertex; 0 each when left out.
          names: unique names; the numbers when left out.

        Raises:
          GraphError: duplicate or dangling edge, cycle, negative or non-finite number.
        """
        count = len(bytes)
        predecessors: list[list[int]] = [[] for _ in range(count)]
        for source, target in edges:
            for end in (source, target):
                if not 0 <= end < count:
                    raise GraphError(
                        f"Edge ({source}, {target}) leads to vertex {end}, but there are only "
                        f"{count} vertices, numbered from 0."
                    )
            if source >= target:
                raise GraphError(
                    f"Edge ({source}, {target}) does not lead forward. Number the vertices in an "
                    "order of execution (Graph.from_networkx does); a cycle cannot be executed."
                )
            if source in predecessors[target]:
                raise GraphError(f"Edge ({source}, {target}) is given twice.")
            predecessors[target].append(source)
        ordered = tuple(tuple(sorted(found)) for found in predecessors)
        return cls(
            names=tuple(names) if names is not None else tuple(map(str, range(count))),
            bytes=tuple(bytes),
            seconds=tuple(seconds) if seconds is not None else (1.0,) * count,
            flops=tuple(flops) if flops is not None else (0,) * count,
            predecessors=ordered,
            needs=tuple((*found, vertex) for vertex, found in enumerate(ordered)),
            cotangent_bytes=tuple(bytes),
            internal_bytes=(0,) * count,
            workspace_bytes=(0,) * count,
            forward_workspace_bytes=(0,) * count,
            in_place=(False,) * count,
            pinned=(False,) * count,
        )

    def to_networkx(self) -> networkx.DiGraph:
        """The graph as a networkx one; vertex attributes carry the names of the fields here."""
        import networkx

        result = networkx.DiGraph()
        for vertex, name in enumerate(self.names):
            result.add_node(
                name,
                bytes=self.bytes[vertex],
                seconds=self.seconds[vertex],
                flops=self.flops[vertex],
                needs=tuple(self.names[needed] for needed in self.needs[vertex]),
                cotangent_bytes=self.cotangent_bytes[vertex],
                internal_bytes=self.internal_bytes[vertex],
                workspace_bytes=self.workspace_bytes[vertex],
                forward_workspace_bytes=self.forward_workspace_bytes[vertex],
                in_place=self.in_place[vertex],
                pinned=self.pinned[vertex],
            )
        for vertex, predecessors in enumerate(self.predecessors):
            for predecessor in predecessors:
                result.add_edge(self.names[predecessor], self.names[vertex])
        return result

    @classmethod
    def from_networkx(cls, given: networkx.DiGraph) -> Graph:
        """A graph from a networkx one.

        Vertices are put in the first topological order in which ties follow the order of insertion.
        The attribute ``bytes`` is required; ``seconds`` is 1.0, ``flops`` 0, ``needs`` the vertex
        and its predecessors, and ``cotangent_bytes`` the bytes if they are not given.

        Raises:
          GraphError: a cycle, or an attribute that is missing or wrong.
        """
        import networkx

        if not given.is_directed() or given.is_multigraph():
            raise GraphError("Give a networkx.DiGraph: directed, without parallel edges.")
        inserted = {node: position for position, node in enumerate(given)}
        try:
            order: list[Hashable] = list(
                networkx.lexicographical_topological_sort(given, key=inserted.__getitem__)
            )
        except networkx.NetworkXUnfeasible:
            cycle = networkx.find_cycle(given)
            raise GraphError(
                "The graph has a cycle, so it has no order of execution: "
                + " -> ".join(str(edge[0]) for edge in cycle)
                + f" -> {cycle[0][0]}."
            ) from None
        number = {node: position for position, node in enumerate(order)}

        def attribute(node: Hashable, key: str, default: Any) -> Any:
            return given.nodes[node].get(key, default)

        for node in order:
            if "bytes" not in given.nodes[node]:
                raise GraphError(f"Vertex {node!r} has no attribute 'bytes'.")
        predecessors = [
            tuple(sorted(number[reader] for reader in given.predecessors(node))) for node in order
        ]

        def needs(node: Hashable) -> tuple[int, ...]:
            named = attribute(node, "needs", None)
            if named is None:
                return (*predecessors[number[node]], number[node])
            missing = [needed for needed in named if needed not in number]
            if missing:
                raise GraphError(f"Vertex {node!r} needs {missing[0]!r}, which is not a vertex.")
            return tuple(sorted(number[needed] for needed in named))

        sizes = [attribute(node, "bytes", 0) for node in order]
        return cls(
            names=tuple(str(node) for node in order),
            bytes=tuple(sizes),
            seconds=tuple(attribute(node, "seconds", 1.0) for node in order),
            flops=tuple(attribute(node, "flops", 0) for node in order),
            predecessors=tuple(predecessors),
            needs=tuple(needs(node) for node in order),
            cotangent_bytes=tuple(
                attribute(node, "cotangent_bytes", size)
                for node, size in zip(order, sizes, strict=True)
            ),
            internal_bytes=tuple(attribute(node, "internal_bytes", 0) for node in order),
            workspace_bytes=tuple(attribute(node, "workspace_bytes", 0) for node in order),
            forward_workspace_bytes=tuple(
                attribute(node, "forward_workspace_bytes", 0) for node in order
            ),
            in_place=tuple(attribute(node, "in_place", False) for node in order),
            pinned=tuple(attribute(node, "pinned", False) for node in order),
        )


def _validate(graph: Graph) -> None:
    count = len(graph.names)
    if count == 0:
        raise GraphError("The graph is empty: there is nothing to plan.")
    for one in dataclasses.fields(graph):
        _check_length(graph, one.name)
    if len(set(graph.names)) != count:
        doubled = next(name for name in graph.names if graph.names.count(name) > 1)
        raise GraphError(f"Two vertices are called {doubled!r}; names must be unique.")
    for field in _FIGURES:
        _check_figures(graph, field)
    _check_forward_workspaces(graph)
    for vertex, predecessors in enumerate(graph.predecessors):
        for predecessor in predecessors:
            if not 0 <= predecessor < vertex:
                raise GraphError(
                    f"Vertex {graph.names[vertex]!r} reads vertex {predecessor}, which does not "
                    "come before it; a graph must be given in an order of execution."
                )
        if list(predecessors) != sorted(set(predecessors)):
            raise GraphError(
                f"The predecessors of {graph.names[vertex]!r} are not ascending and distinct."
            )
    for vertex, needs in enumerate(graph.needs):
        for needed in needs:
            if not 0 <= needed <= vertex:
                raise GraphError(
                    f"The backward step of {graph.names[vertex]!r} reads vertex {needed}, which "
                    "is not computed by then."
                )
        if list(needs) != sorted(set(needs)):
            raise GraphError(
                f"What the backward step of {graph.names[vertex]!r} reads is not given ascending "
                "and distinct."
            )


def _check_length(graph: Graph, field: str) -> None:
    count = len(getattr(graph, field))
    if count != len(graph):
        raise GraphError(f"{field} has {count} entries for {len(graph)} vertices.")


def _check_figures(graph: Graph, field: str) -> None:
    signed = field == "workspace_bytes"
    entries: Sequence[Any] = getattr(graph, field)
    for vertex, number in enumerate(entries):
        # Asking for the type first is quicker: almost all are plain numbers.
        real = type(number) in (int, float) or isinstance(number, numbers.Real)
        if not (real and math.isfinite(number) and (signed or number >= 0)):
            raise GraphError(
                f"Vertex {graph.names[vertex]!r} has {field} = {number!r}; it must be a "
                "finite number, 0 or more."
            )


def _check_forward_workspaces(graph: Graph) -> None:
    for vertex, size in enumerate(graph.forward_workspace_bytes):
        if size and not graph.pinned[vertex]:
            raise GraphError(
                f"Vertex {graph.names[vertex]!r} has forward_workspace_bytes = {size!r} and is not "
                "pinned: only what runs exactly once may take memory just while it runs forward."
            )
