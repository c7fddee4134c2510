"""The referee: replays a schedule on a graph and says what it takes.

The replay follows what XLA does with a chain of ``jax.checkpoint`` regions.

Forward, vertices run in order. A value is freed after its last forward reader unless the
backward pass reads the stored copy: because it is kept by name in its region, because a
later region's backward pass reads it (a boundary value), or because its region is not
checkpointed and a backward step needs it.

Backward, regions run in reverse. A region first recomputes, in order, all that its backward
steps need and that is not stored, each value held until its last reader in the region; then
its vertices' backward steps run in reverse. A step turns the cotangent of its vertex into
those of the predecessors; the step of an elementwise vertex works in place where the buffer
is large enough for one of them. (XLA is free to
recompute a value later than that, and often does. Where regions are short the two agree;
where they are long, this is the safe side.)

Program outputs and gradients with respect to arguments live in output buffers and count
nothing here. All figures are bytes of temporaries.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory while one step runs.

    Attributes:
      phase: ``forward``, ``recompute`` or ``backward``.
      region: number of the region the step belongs to.
      vertex: the vertex that is computed or differentiated.
      live_bytes: bytes of all temporaries alive during the step.
    """

    phase: str
    region: int
    vertex: int
    live_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One array alive at the peak.

    Attributes:
      vertex: the vertex it belongs to.
      role: ``kept`` (stored for the backward pass), ``forward`` (waits for a forward
        reader), ``recomputed``, ``cotangent``, or ``internal`` (residuals that cannot be
        kept by name).
      bytes: its size.
    """

    vertex: int
    role: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule takes.

    Attributes:
      peak_bytes: the most temporaries alive at once.
      peak: number, in ``moments``, of the first moment that reaches it.
      moments: one per step, in order of execution.
      alive: the arrays alive at the peak, largest first.
      stored: the vertices whose value the backward pass reads from memory, ascending.
      stored_bytes: their bytes.
      recomputed: the vertices that run a second time, ascending.
      overhead_seconds: time of the recomputation.
      recomputed_flops: operations of the recomputation.
    """

    peak_bytes: int
    peak: int
    moments: tuple[Moment, ...]
    alive: tuple[Live, ...]
    stored: tuple[int, ...]
    stored_bytes: int
    recomputed: tuple[int, ...]
    overhead_seconds: float
    recomputed_flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the backward pass of a schedule reads.

    Attributes:
      stored: vertices read from memory, across all regions.
      recomputed: for each region the vertices that run again in it.
    """

    stored: frozenset[int]
    recomputed: tuple[frozenset[int], ...]


def demand(graph: Graph, schedule: Schedule) -> Demand:
    """Follows what each region's backward pass reads back to what is stored."""
    stored: set[int] = set()
    recomputed: list[frozenset[int]] = []
    for region in schedule.regions:
        inside = set(region.vertices)
        kept = set(region.kept)
        again: set[int] = set()
        pending: list[int] = []
        for vertex in region.vertices:
            pending += graph.needs[vertex]
            if region.checkpointed and graph.internal_bytes[vertex]:
                again.add(vertex)
                pending += graph.predecessors[vertex]
        while pending:
            vertex = pending.pop()
            if vertex in stored and (vertex not in inside or vertex in kept):
                continue
            if not region.checkpointed or vertex in kept or vertex not in inside:
                stored.add(vertex)
            elif vertex not in again:
                again.add(vertex)
                pending += graph.predecessors[vertex]
        recomputed.append(frozenset(again))
    return Demand(stored=frozenset(stored), recomputed=tuple(recomputed))


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Replays ``schedule`` on ``graph``.

    Raises:
      GraphError: the schedule cannot be executed.
    """
    schedule.check(graph)
    wanted = demand(graph, schedule)
    moments = tuple(
        Moment(phase=phase, region=region, vertex=vertex, live_bytes=total)
        for phase, region, vertex, total, _ in _replay(graph, schedule, wanted)
    )
    peak = max(range(len(moments)), key=lambda number: (moments[number].live_bytes, -number))
    for number, (*_, live) in enumerate(_replay(graph, schedule, wanted)):
        if number == peak:
            alive = [
                Live(vertex=vertex, role=_role(role, vertex, wanted), bytes=size)
                for (role, vertex), size in live.items()
                if size
            ]
            break
    again = [vertex for region in wanted.recomputed for vertex in region]
    return Simulation(
        peak_bytes=moments[peak].live_bytes,
        peak=peak,
        moments=moments,
        alive=tuple(sorted(alive, key=lambda item: (-item.bytes, item.vertex, item.role))),
        stored=tuple(sorted(wanted.stored)),
        stored_bytes=sum(graph.bytes[vertex] for vertex in wanted.stored),
        recomputed=tuple(sorted(again)),
        overhead_seconds=math.fsum(graph.seconds[vertex] for vertex in again),
        recomputed_flops=sum(graph.flops[vertex] for vertex in again),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of ``Simulation`` without the story, for searches that ask for many.

    Attributes:
      peak_bytes: the most temporaries alive at once.
      overhead_seconds: time of the recomputation.
      recomputed_flops: operations of the recomputation.
    """

    peak_bytes: int
    overhead_seconds: float
    recomputed_flops: int


def evaluate(graph: Graph, schedule: Schedule) -> Figures:
    """Replays ``schedule`` on ``graph`` for its figures alone; it must be executable."""
    wanted = demand(graph, schedule)
    again = [vertex for region in wanted.recomputed for vertex in region]
    return Figures(
        peak_bytes=max(total for *_, total, _ in _replay(graph, schedule, wanted)),
        overhead_seconds=math.fsum(graph.seconds[vertex] for vertex in again),
        recomputed_flops=sum(graph.flops[vertex] for vertex in again),
    )


def turns_in_place(graph: Graph, vertex: int) -> bool:
    """Whether the vertex's backward step writes a predecessor's cotangent over its own."""
    size = graph.cotangent_bytes[vertex]
    return graph.in_place[vertex] and any(
        0 < graph.cotangent_bytes[predecessor] <= size for predecessor in graph.predecessors[vertex]
    )


def _role(role: str, vertex: int, wanted: Demand) -> str:
    if role == "forward" and vertex in wanted.stored:
        return "kept"
    return role


_Live = dict[tuple[str, int], int]


def _replay(
    graph: Graph, schedule: Schedule, wanted: Demand
) -> Iterator[tuple[str, int, int, int, _Live]]:
    """Yields for each step phase, region, vertex, live bytes, and the arrays alive.

    The caller must not change the last, and must not hold on to it.
    """
    live: _Live = {}
    total = 0

    def allocate(role: str, vertex: int, size: int) -> None:
        nonlocal total
        if (role, vertex) not in live:
            live[role, vertex] = size
            total += size

    def free(role: str, vertex: int) -> None:
        nonlocal total
        total -= live.pop((role, vertex), 0)

    forward_readers = Counter(p for found in graph.predecessors for p in found)
    for number, region in enumerate(schedule.regions):
        for vertex in region.vertices:
            allocate("forward", vertex, graph.bytes[vertex])
            if not region.checkpointed:
                allocate("internal", vertex, graph.internal_bytes[vertex])
            yield "forward", number, vertex, total, live
            for read in (*graph.predecessors[vertex], vertex):
                if read != vertex:
                    forward_readers[read] -= 1
                if not forward_readers[read] and read not in wanted.stored:
                    free("forward", read)

    # Backward reads of the stored values, over all regions; the last one frees.
    stored_readers: Counter[int] = Counter()
    local_readers: list[Counter[int]] = []
    for region, again in zip(schedule.regions, wanted.recomputed, strict=True):
        local: Counter[int] = Counter()
        # A value can be both kept and run again, for residuals that have no name: then the
        # stored copy is read.
        local_copies = again - frozenset(region.kept)
        for vertex in region.vertices:
            reads = list(graph.needs[vertex])
            if vertex in again:
                reads += graph.predecessors[vertex]
            for read in reads:
                if read in local_copies:
                    local[read] += 1
                else:
                    stored_readers[read] += 1
        local_readers.append(local)

    for number in reversed(range(len(schedule.regions))):
        region = schedule.regions[number]
        again = wanted.recomputed[number]
        readers = local_readers[number]

        def release(read: int, readers: Counter[int] = readers) -> None:
            if read in readers:
                readers[read] -= 1
                if not readers[read]:
                    free("recomputed", read)
            else:
                stored_readers[read] -= 1
                if not stored_readers[read]:
                    free("forward", read)

        for vertex in sorted(again):
            allocate("recomputed", vertex, graph.bytes[vertex])
            allocate("internal", vertex, graph.internal_bytes[vertex])
            yield "recompute", number, vertex, total, live
            for read in graph.predecessors[vertex]:
                release(read)
            if not readers[vertex]:
                free("recomputed", vertex)
        for vertex in reversed(region.vertices):
            if graph.cotangent_bytes[vertex]:
                if turns_in_place(graph, vertex):
                    free("cotangent", vertex)
                else:
                    allocate("cotangent", vertex, graph.cotangent_bytes[vertex])
                for predecessor in graph.predecessors[vertex]:
                    allocate("cotangent", predecessor, graph.cotangent_bytes[predecessor])
                yield "backward", number, vertex, total, live
            free("cotangent", vertex)
            free("internal", vertex)
            for read in graph.needs[vertex]:
                release(read)
