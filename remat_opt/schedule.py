"""The decision record: regions in order, which may nest, and every vertex's fate in them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from remat_opt.errors import GraphError
from remat_opt.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Vertices that run together.

    Attributes:
      vertices: ascending; a vertex reads only vertices of this or of earlier regions.
      kept: those of ``vertices`` that are saved by name for the backward pass.
      checkpointed: whether the region runs under ``jax.checkpoint``. If not, everything its
        backward steps read is kept and nothing is recomputed.
      inside: a chain of regions that together hold ``vertices``. When the region's turn comes in
        the backward pass, its vertices run again as this chain rather than all at once: each inner
        region keeps its own values, and is recomputed again in its turn.
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
      loops: those that are opened, choices and maps among them; the others run as they are.
      unchanged: whether the function runs as it is: nothing is written differently for the
        compiler, and nothing runs under a checkpoint.
    """

    regions: tuple[Region, ...]
    loops: tuple[Inside, ...] = ()
    unchanged: bool = False

    @property
    def has_checkpoints(self) -> bool:
        """Whether anything runs under ``jax.checkpoint``."""
        return bool(self.loops) or any(region.checkpointed for region in self.regions)

    def region_of(self) -> dict[int, int]:
        """For each vertex, the number of its region."""
        return {
            vertex: number
            for number, region in enumerate(self.regions)
            for vertex in region.vertices
        }

    def under_none(self) -> Iterator[int]:
        """The vertices that are under no checkpoint."""
        for region in self.regions:
            if not region.checkpointed:
                yield from region.vertices

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
    """The chain with consecutive regions without a checkpoint merged into one.

    Args:
      chain: regions; one without a checkpoint may be given by its vertices alone.
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

    Either each iteration runs under its own checkpoint, or as a chain of regions without one around
    it, or they run in chunks. A chunk's checkpoint keeps what its first iteration receives and runs
    all its iterations again, as a loop with parts of its own.

    Equations are those of the loop's body, numbered as a separate program.

    Attributes:
      length: how many iterations.
      inside: the parts of a chunk, in order of execution; ``length`` is a multiple of their total
        length. Empty without chunks; with them, the fields below are empty.
      checkpointed: whether a checkpoint is around every iteration. A part in which it is not is
        all of its loop.
      kept: positions of the equations whose results are saved by name in every iteration; none
        without a checkpoint around it.
      kept_bytes: the size of what one iteration leaves for the backward pass, besides its inputs.
      stages: the chain in which the body runs, and runs again.
      loops: what is opened in the body.
    """

    length: int
    inside: tuple[Part, ...] = ()
    checkpointed: bool = True
    kept: tuple[int, ...] = ()
    kept_bytes: int = 0
    stages: tuple[Stage, ...] = ()
    loops: tuple[Inside, ...] = ()

    @property
    def chunk(self) -> int:
        """How many iterations are in a chunk."""
        return sum(part.length for part in self.inside)


#: How an array is split: for each axis the mesh axes that split it; further axes are not.
Split = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """An opened loop (``lax.scan``): what its iterations keep.

    Attributes:
      root: position of its equation.
      parts: in order of execution; together they have its length.
      in_gradients: positions, among the loop's stacked inputs, of those in the stacks of whose
        gradients waits what iterations keep, in so far as it fits. There are no chunks then.
      splits: on a mesh, how each of the loop's inputs was split; empty without one, or if that has
        no name.
    """

    root: int
    parts: tuple[Part, ...]
    in_gradients: tuple[int, ...] = ()
    splits: tuple[Split, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch of a choice, or the body of a map, as a separate chain.

    Equations are those of the branch, numbered as a separate program.

    Attributes:
      stages: the chain; empty if the branch runs as it is.
      kept_bytes: the size of what waits for the backward pass if this branch runs.
      loops: what is opened in it.
    """

    stages: tuple[Stage, ...]
    kept_bytes: int = 0
    loops: tuple[Inside, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An opened choice (``lax.cond`` or ``lax.switch``): what its branches keep.

    Attributes:
      root: position of its equation.
      branches: in the equation's order.
    """

    root: int
    branches: tuple[Branch, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """An opened map (``jax.shard_map``): what its body keeps on each device.

    Attributes:
      root: position of its equation.
      body: how it runs.
    """

    root: int
    body: Branch


#: An opened equation, with what is decided about the programs inside it.
Inside = Loop | Choice | Mapped


def plain(graph: Graph) -> Schedule:
    """One region, nothing recomputed."""
    return Schedule(regions=(Region(vertices=tuple(range(len(graph))), checkpointed=False),))


def unchanged(graph: Graph) -> Schedule:
    """The function as it is."""
    return dataclasses.replace(plain(graph), unchanged=True)
