"""What compilers hold in addition to a graph, or change in it, depending on the schedule.

A graph has one size for each value, whatever is decided. If what a compiler does depends on the
decision, a rule gives an ``Effect``; the model applies all of them to the graph of a schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """What effects may change for each vertex of a graph, in bytes: arrays to write to.

    Attributes:
      bytes: its value.
      cotangent_bytes: its cotangent.
      workspace_bytes: held beside its backward step.
      forward_workspace_bytes: held beside its forward step, if it runs once.
      internal_bytes: residuals that only running it provides.
    """

    bytes: NDArray[np.int64]
    cotangent_bytes: NDArray[np.int64]
    internal_bytes: NDArray[np.int64]
    workspace_bytes: NDArray[np.int64]
    forward_workspace_bytes: NDArray[np.int64]

    @classmethod
    def of(cls, graph: Graph) -> Figures:
        """Those of a graph."""
        return cls(**{name: np.array(getattr(graph, name), np.int64) for name in cls.__slots__})

    def put_into(self, graph: Graph) -> Graph:
        """The graph with these figures; the same object if nothing changed.

        Building the arrays of a graph takes longer than comparing.
        """
        found = {name: tuple(getattr(self, name).tolist()) for name in self.__slots__}
        changed = {name: sizes for name, sizes in found.items() if sizes != getattr(graph, name)}
        return graph.with_bytes(**changed) if changed else graph


class Effect:
    """Something that depends on the schedule. Each subclass says one thing."""

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Writes what the vertices take under a schedule."""

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Bytes that are held throughout, besides what is alive."""
        return 0

    def recomputation(self, schedule: Schedule) -> tuple[float, int]:
        """Seconds and FLOPs of what runs again inside vertices."""
        return 0.0, 0

    def in_loop(self) -> Effect:
        """The same in an opened loop, whose iterations read stacks."""
        return self

    def as_written(self) -> Effect:
        """The same where nothing is rewritten, though there may be checkpoints."""
        return self

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """What a user should know about it."""
        return iter(())

    def remedy(self) -> str:
        """What would help if no plan is within a budget, in a sentence; or nothing."""
        return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held(Effect):
    """Bytes that are held from the forward pass, or from early in the backward pass, on.

    Attributes:
      vertices: those that compute the values whose gradients they are for.
      bytes: held by a plan that has none of them under a checkpoint.
      checkpointed_bytes: by one that has.
      unchanged_bytes: by the unchanged function.
    """

    vertices: tuple[int, ...]
    bytes: int
    checkpointed_bytes: int
    unchanged_bytes: int

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """One of the three."""
        if schedule.unchanged:
            return self.unchanged_bytes
        if under_checkpoints(schedule).isdisjoint(self.vertices):
            return self.bytes
        return self.checkpointed_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCheckpoints(Effect):
    """What is held more, or less, in the backward steps of vertices under no checkpoint.

    Attributes:
      workspace_bytes: by vertex.
    """

    workspace_bytes: Mapping[int, int]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Adds it."""
        under = under_checkpoints(schedule)
        for vertex, size in self.workspace_bytes.items():
            if vertex not in under:
                figures.workspace_bytes[vertex] += size

    def in_loop(self) -> Effect:
        """Nothing: an iteration runs again as if it were under one."""
        return Effect()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedResults(Effect):
    """Results that are residuals, too: one array, unless a checkpoint hands the result on.

    Then the backward pass reads that, and the residual is computed again beside it.

    Attributes:
      bytes: by vertex.
      readers: for each of these vertices, those that read it.
    """

    bytes: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Counts them once."""
        around = dict(checkpoints(schedule.regions))
        kept = set(kept_by_name(schedule.regions))
        for vertex, size in self.bytes.items():
            here = around[vertex]
            inside = all(around[reader] == here for reader in self.readers[vertex])
            if not here or (inside and vertex not in kept):
                figures.internal_bytes[vertex] -= size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged(Effect):
    """What is larger in the unchanged function.

    Attributes:
      workspace_bytes: by vertex, what is held in addition beside its backward step.
      cotangent_bytes: by vertex, what its cotangent takes instead.
    """

    workspace_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    cotangent_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Makes it as large, if nothing is rewritten."""
        if schedule.unchanged:
            for vertex, size in self.workspace_bytes.items():
                figures.workspace_bytes[vertex] += size
            for vertex, size in self.cotangent_bytes.items():
                figures.cotangent_bytes[vertex] = size


def under_checkpoints(schedule: Schedule) -> set[int]:
    """The vertices that run under a checkpoint; none for the unchanged function."""
    return {
        vertex for region in schedule.regions if region.checkpointed for vertex in region.vertices
    }


def kept_by_name(regions: Sequence[Region]) -> Iterator[int]:
    """The vertices that checkpoints keep."""
    for region in regions:
        if region.checkpointed:
            yield from region.kept
            yield from kept_by_name(region.inside)


def handed_in(schedule: Schedule, readers: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """Those of some vertices whose cotangent comes from outside a checkpoint that is around them.

    Args:
      schedule: what is under which checkpoint.
      readers: for each of the vertices, those that read it.
    """
    if schedule.unchanged or not readers:
        return
    around = dict(checkpoints(schedule.regions))
    for vertex, reading in readers.items():
        if any(not around[vertex] <= around[reader] for reader in reading):
            yield vertex


def checkpoints(
    regions: Sequence[Region],
    around: Set[tuple[int, ...]] = frozenset(),
    path: tuple[int, ...] = (),
) -> Iterator[tuple[int, Set[tuple[int, ...]]]]:
    """Each vertex with the checkpoints around it, named by their positions in the nest."""
    for number, region in enumerate(regions):
        place = (*path, number)
        inside = {*around, place} if region.checkpointed else around
        if region.inside:
            yield from checkpoints(region.inside, inside, place)
        else:
            yield from ((vertex, inside) for vertex in region.vertices)
