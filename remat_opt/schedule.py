"""The decision record: regions in order, and every vertex's fate in them."""

from __future__ import annotations

import dataclasses

from remat_opt.errors import GraphError
from remat_opt.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Vertices that run together.

    Attributes:
      vertices: ascending; a vertex reads only vertices of this or of earlier regions.
      kept: those of ``vertices`` that are saved by name for the backward pass.
      checkpointed: whether the region runs under ``jax.checkpoint``. Where it does not,
        all that its backward steps read is kept and nothing is recomputed.
    """

    vertices: tuple[int, ...]
    kept: tuple[int, ...] = ()
    checkpointed: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A chain of regions that together hold every vertex once."""

    regions: tuple[Region, ...]

    def region_of(self) -> dict[int, int]:
        """For each vertex the number of its region."""
        return {
            vertex: number
            for number, region in enumerate(self.regions)
            for vertex in region.vertices
        }

    def check(self, graph: Graph) -> None:
        """Raises GraphError unless the schedule can be executed on ``graph``."""
        number: dict[int, int] = {}
        for position, region in enumerate(self.regions):
            if not region.vertices:
                raise GraphError(f"Region {position} of the schedule is empty.")
            for vertex in region.vertices:
                if not 0 <= vertex < len(graph):
                    raise GraphError(
                        f"Region {position} holds vertex {vertex}, but there are only "
                        f"{len(graph)} vertices, numbered from 0."
                    )
                if vertex in number:
                    raise GraphError(f"Vertex {graph.names[vertex]!r} is in two regions.")
                number[vertex] = position
                if graph.pinned[vertex] and region.checkpointed:
                    raise GraphError(
                        f"Vertex {graph.names[vertex]!r} has side effects and must not run under "
                        "a checkpoint, which would repeat them."
                    )
            if list(region.vertices) != sorted(region.vertices):
                raise GraphError(f"The vertices of region {position} are not ascending.")
            outside = set(region.kept) - set(region.vertices)
            if outside:
                raise GraphError(
                    f"Region {position} keeps {graph.names[min(outside)]!r}, which another region "
                    "computes."
                )
        missing = set(range(len(graph))) - set(number)
        if missing:
            raise GraphError(f"Vertex {graph.names[min(missing)]!r} is in no region.")
        for vertex, predecessors in enumerate(graph.predecessors):
            for predecessor in predecessors:
                if number[predecessor] > number[vertex]:
                    raise GraphError(
                        f"Vertex {graph.names[vertex]!r} reads {graph.names[predecessor]!r}, "
                        "which a later region computes."
                    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One region in terms of equations.

    Attributes:
      roots: positions of the equations whose results the region provides, ascending.
      kept: those of ``roots`` whose results are saved by name.
      checkpointed: whether the region runs under ``jax.checkpoint``.
    """

    roots: tuple[int, ...]
    kept: tuple[int, ...]
    checkpointed: bool


def plain(graph: Graph) -> Schedule:
    """The unchanged function: one region, nothing recomputed."""
    return Schedule(regions=(Region(vertices=tuple(range(len(graph))), checkpointed=False),))
