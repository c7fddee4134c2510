"""The decision record: regions in order, which may nest, and every vertex's fate in them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

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
      inside: a chain of regions that together hold ``vertices``. When the region's turn comes
        in the backward pass, its vertices do not run again all at once, but as this chain:
        each region of it keeps what is its own, and is recomputed once more in its turn.
    """

    vertices: tuple[int, ...]
    kept: tuple[int, ...] = ()
    checkpointed: bool = True
    inside: tuple[Region, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A chain of regions that together hold every vertex once, and what is done inside loops.

    Attributes:
      regions: the chain.
      loops: those that are opened, choices among them; the others run as they are.
    """

    regions: tuple[Region, ...]
    loops: tuple[Loop | Choice, ...] = ()

    @property
    def has_checkpoints(self) -> bool:
        """Whether anything runs under ``jax.checkpoint``."""
        return bool(self.loops) or any(region.checkpointed for region in self.regions)

    def region_of(self) -> dict[int, int]:
        """For each vertex the number of its region."""
        return {
            vertex: number
            for number, region in enumerate(self.regions)
            for vertex in region.vertices
        }

    def check(self, graph: Graph) -> None:
        """Raises GraphError unless the schedule can be executed on ``graph``."""
        _check_chain(graph, self.regions, "the schedule")
        missing = set(range(len(graph))) - set(self.region_of())
        if missing:
            raise GraphError(f"Vertex {graph.names[min(missing)]!r} is in no region.")
        number = self.region_of()
        for vertex, predecessors in enumerate(graph.predecessors):
            for predecessor in predecessors:
                if number[predecessor] > number[vertex]:
                    raise _reads_later(graph, vertex, predecessor)


def _check_chain(graph: Graph, regions: Sequence[Region], whole: str) -> None:
    number: dict[int, int] = {}
    for position, region in enumerate(regions):
        _check_region(graph, region, f"Region {position} of {whole}")
        for vertex in region.vertices:
            if vertex in number:
                raise GraphError(f"Vertex {graph.names[vertex]!r} is in two regions.")
            number[vertex] = position
        if not region.inside:
            continue
        within = f"the regions inside region {position} of {whole}"
        _check_chain(graph, region.inside, within)
        inner = {
            vertex: place for place, one in enumerate(region.inside) for vertex in one.vertices
        }
        if set(inner) != set(region.vertices):
            raise GraphError(
                f"{within[0].upper()}{within[1:]} do not hold the same vertices as that region."
            )
        for vertex in region.vertices:
            for predecessor in graph.predecessors[vertex]:
                if inner.get(predecessor, 0) > inner[vertex]:
                    raise _reads_later(graph, vertex, predecessor)


def _check_region(graph: Graph, region: Region, called: str) -> None:
    if not region.vertices:
        raise GraphError(f"{called} is empty.")
    for vertex in region.vertices:
        if not 0 <= vertex < len(graph):
            raise GraphError(
                f"{called} holds vertex {vertex}, but there are only {len(graph)} vertices, "
                "numbered from 0."
            )
        if graph.pinned[vertex] and region.checkpointed:
            raise GraphError(
                f"Vertex {graph.names[vertex]!r} has side effects and must not run under "
                "a checkpoint, which would repeat them."
            )
    if any(left >= right for left, right in itertools.pairwise(region.vertices)):
        raise GraphError(f"The vertices of {called[0].lower()}{called[1:]} are not ascending.")
    outside = set(region.kept) - set(region.vertices)
    if outside:
        raise GraphError(
            f"{called} keeps {graph.names[min(outside)]!r}, which another region computes."
        )
    if region.inside and not region.checkpointed:
        raise GraphError(
            f"{called} has regions inside but no checkpoint of its own: put them in its place."
        )


def _reads_later(graph: Graph, vertex: int, predecessor: int) -> GraphError:
    return GraphError(
        f"Vertex {graph.names[vertex]!r} reads {graph.names[predecessor]!r}, which a later region "
        "computes."
    )


def merged(chain: Iterable[Region | Sequence[int]]) -> list[Region]:
    """The chain with what stands in a row without a checkpoint made one region.

    Args:
      chain: regions; in place of those without a checkpoint their vertices will do.
    """
    found: list[Region] = []
    unchecked: list[Sequence[int]] = []

    def close() -> None:
        if unchecked:
            vertices = tuple(itertools.chain.from_iterable(unchecked))
            found.append(Region(vertices=vertices, checkpointed=False))
            unchecked.clear()

    for one in chain:
        if not isinstance(one, Region):
            unchecked.append(one)
        elif not one.checkpointed:
            unchecked.append(one.vertices)
        else:
            close()
            found.append(one)
    close()
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One region in terms of equations.

    Attributes:
      roots: positions of the equations whose results the region provides, ascending.
      kept: those of ``roots`` whose results are saved by name.
      checkpointed: whether the region runs under ``jax.checkpoint``.
      inside: a chain of regions that together have ``roots``, to run in its place when it is
        recomputed.
    """

    roots: tuple[int, ...]
    kept: tuple[int, ...]
    checkpointed: bool
    inside: tuple[Stage, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Iterations of a loop, one after the other, that run alike.

    Either each of them runs under a checkpoint of its own. Or they run in chunks, each of which is
    under a checkpoint that keeps what the first of its iterations is handed, and runs them all
    again, as a loop in parts of its own.

    Equations are those of the loop's body, numbered as a program of its own.

    Attributes:
      length: how many iterations.
      inside: the parts of a chunk, in order of execution; ``length`` is a multiple of what they are
        together. Empty where there are no chunks. Where there are, what follows is empty.
      kept: positions of the equations whose results are saved by name in every iteration.
      kept_bytes: of these, in one iteration.
      stages: the chain in which the body runs, and runs again.
      loops: those of the body that are opened, choices among them.
    """

    length: int
    inside: tuple[Part, ...] = ()
    kept: tuple[int, ...] = ()
    kept_bytes: int = 0
    stages: tuple[Stage, ...] = ()
    loops: tuple[Loop | Choice, ...] = ()

    @property
    def chunk(self) -> int:
        """How many iterations are in a chunk."""
        return sum(part.length for part in self.inside)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop, ``lax.scan``, that is opened: what its iterations keep.

    Attributes:
      root: position of its equation.
      parts: in order of execution; together they have its length.
    """

    root: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch of a choice, as a chain of its own.

    Equations are those of the branch, numbered as a program of its own.

    Attributes:
      stages: the chain; empty where the branch runs as it is.
      kept_bytes: of what waits for the backward pass if this is the branch that runs.
      loops: those of the branch that are opened, choices among them.
    """

    stages: tuple[Stage, ...]
    kept_bytes: int = 0
    loops: tuple[Loop | Choice, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice, ``lax.cond`` or ``lax.switch``, that is opened: what its branches keep.

    Attributes:
      root: position of its equation.
      branches: in the order of the equation's.
    """

    root: int
    branches: tuple[Branch, ...]


def plain(graph: Graph) -> Schedule:
    """The unchanged function: one region, nothing recomputed."""
    return Schedule(regions=(Region(vertices=tuple(range(len(graph))), checkpointed=False),))
