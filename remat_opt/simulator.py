"""The referee: replays a schedule on a graph and says what it takes.

The replay follows what XLA does with a chain of ``jax.checkpoint`` regions.

Forward, vertices run in order. A value is freed after its last forward reader unless the
backward pass reads the stored copy: because it is kept by name in its region, because a
later region's backward pass reads it (a boundary value), or because its region is not
checkpointed and a backward step needs it.

Backward, regions run in reverse. A region first recomputes, in order, everything that its backward
steps need and that is not stored; each value is held until its last reader in the region; then its
vertices' backward steps run in reverse. A region with regions inside recomputes only what these
find in memory, as a separate forward pass, and then runs them backward in the same way. A step
turns the cotangent of its vertex into those of the predecessors; the step of an elementwise vertex
works in place if the buffer is large enough for one of them. (XLA may recompute a value later than
that, and often does. For short regions the two agree; for long ones, this errs on the safe side.)

Program outputs and gradients with respect to arguments live in output buffers and do not count
here. All figures are bytes of temporaries.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.spans import spans


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory while one step runs.

    Attributes:
      phase: ``forward``, ``recompute`` or ``backward``.
      region: number of the region the step belongs to.
      vertex: the vertex that is computed or differentiated.
      depth: how many checkpoints deep, below that of its region, the step runs again; 0 forward
        and backward.
      live_bytes: bytes of all temporaries alive during the step.
    """

    phase: str
    region: int
    vertex: int
    depth: int
    live_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One array alive at the peak.

    Attributes:
      vertex: the vertex it belongs to.
      role: ``kept`` (stored for the backward pass), ``forward`` (waits for a forward
        reader), ``recomputed``, ``cotangent``, ``internal`` (residuals that cannot be
        kept by name), or ``workspace`` (of a backward step).
      bytes: its size.
    """

    vertex: int
    role: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The life of one array.

    Attributes:
      vertex: the vertex it belongs to.
      role: as in ``Live``.
      bytes: its size.
      first: number, in ``moments``, of the first moment at which it is alive.
      last: likewise of the last.
    """

    vertex: int
    role: str
    bytes: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule takes.

    Attributes:
      peak_bytes: the most temporaries alive at once.
      peak: number, in ``moments``, of the first moment that reaches it.
      moments: one per step, in order of execution.
      alive: the arrays alive at the peak, largest first.
      lives: all arrays that take any bytes, in the order in which they are freed.
      stored: the vertices whose value the backward pass reads from memory, ascending.
      stored_bytes: their bytes.
      recomputed: the vertices that run again, ascending, each repeated as often as it runs.
      overhead_seconds: time of the recomputation.
      recomputed_flops: operations of the recomputation.
    """

    peak_bytes: int
    peak: int
    moments: tuple[Moment, ...]
    alive: tuple[Live, ...]
    lives: tuple[Life, ...]
    stored: tuple[int, ...]
    stored_bytes: int
    recomputed: tuple[int, ...]
    overhead_seconds: float
    recomputed_flops: int

    @property
    def stored_inside_bytes(self) -> int:
        """Bytes of unnamed residuals, such as loops', that also wait for the backward pass."""
        return sum(life.bytes for life in self.lives if self.waits_inside(life))

    def waits_inside(self, life: Life) -> bool:
        """Whether an array is such a residual."""
        return life.role == "internal" and self.moments[life.first].phase == "forward"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the backward pass of a chain of regions reads.

    Attributes:
      stored: vertices read from memory, across all regions of the chain.
      recomputed: for each region the vertices that run again when its turn comes.
      inside: for each region what the chain inside it reads beyond that, or None.
    """

    stored: frozenset[int]
    recomputed: tuple[frozenset[int], ...]
    inside: tuple[Demand | None, ...]

    def all_recomputed(self) -> Iterator[int]:
        """Every vertex, repeated as often as it runs again."""
        for again, inside in zip(self.recomputed, self.inside, strict=True):
            yield from again
            if inside is not None:
                yield from inside.all_recomputed()


def demand(graph: Graph, schedule: Schedule) -> Demand:
    """Traces what each region's backward pass reads back to what is stored."""
    return _demand(graph, schedule.regions)


def _demand(graph: Graph, regions: Sequence[Region]) -> Demand:
    stored: set[int] = set()
    recomputed: list[frozenset[int]] = []
    insides: list[Demand | None] = []
    for region in regions:
        if not region.checkpointed:
            stored.update(*(graph.needs[vertex] for vertex in region.vertices))
            recomputed.append(frozenset())
            insides.append(None)
            continue
        own = set(region.vertices)
        kept = set(region.kept)
        again: set[int] = set()
        pending: list[int] = []
        inside = _demand(graph, region.inside) if region.inside else None
        if inside is not None:
            pending += inside.stored
        else:
            for vertex in region.vertices:
                pending += graph.needs[vertex]
        for vertex in _with_internals(graph, region):
            again.add(vertex)
            pending += graph.predecessors[vertex]
        while pending:
            vertex = pending.pop()
            if vertex in stored and (vertex not in own or vertex in kept):
                continue
            if vertex in kept or vertex not in own:
                stored.add(vertex)
            elif vertex not in again:
                again.add(vertex)
                pending += graph.predecessors[vertex]
        recomputed.append(frozenset(again))
        insides.append(inside)
    return Demand(stored=frozenset(stored), recomputed=tuple(recomputed), inside=tuple(insides))


def _with_internals(graph: Graph, region: Region) -> list[int]:
    """The vertices that a checkpointed region must run again for unnamed residuals."""
    parts = region.inside or (region,)
    return [
        vertex
        for part in parts
        if part is region or not part.checkpointed
        for vertex in part.vertices
        if graph.internal_bytes[vertex]
    ]


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Replays ``schedule`` on ``graph``.

    Args:
      graph: what it is a schedule of.
      schedule: what to replay.

    Raises:
      GraphError: the schedule cannot be executed.
    """
    schedule.check(graph)
    wanted = demand(graph, schedule)
    moments: list[Moment] = []
    peak = -1

    def tell(phase: str, region: int, vertex: int, depth: int = 0) -> None:
        nonlocal peak
        total = run.total
        if peak < 0 or total > moments[peak].live_bytes:
            peak = len(moments)
        moments.append(
            Moment(phase=phase, region=region, vertex=vertex, depth=depth, live_bytes=total)
        )

    lives: list[Life] = []

    def gone(role: str, vertex: int, size: int, first: int) -> None:
        # What is freed before the next step was alive during the last one.
        if size and first < len(moments):
            lives.append(
                Life(
                    vertex=vertex,
                    role=_role(role, vertex, wanted),
                    bytes=size,
                    first=first,
                    last=len(moments) - 1,
                )
            )

    run = _Replay(graph, tell, gone)
    run.whole(schedule, wanted)
    alive = [
        Live(vertex=life.vertex, role=life.role, bytes=life.bytes)
        for life in lives
        if life.first <= peak <= life.last
    ]
    again = sorted(wanted.all_recomputed())
    return Simulation(
        peak_bytes=moments[peak].live_bytes,
        peak=peak,
        moments=tuple(moments),
        alive=tuple(sorted(alive, key=lambda item: (-item.bytes, item.vertex, item.role))),
        lives=tuple(lives),
        stored=tuple(sorted(wanted.stored)),
        stored_bytes=sum(graph.bytes[vertex] for vertex in wanted.stored),
        recomputed=tuple(again),
        overhead_seconds=math.fsum(graph.seconds[vertex] for vertex in again),
        recomputed_flops=sum(graph.flops[vertex] for vertex in again),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of ``Simulation`` without the details, for searches that need many.

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
    lives = spans(graph, schedule)
    return figures_of(graph, lives.peak_bytes, lives.again.tolist())


def figures_of(graph: Graph, peak_bytes: int, again: Sequence[int]) -> Figures:
    """The figures of a schedule with a known peak.

    Args:
      graph: what it is a schedule of.
      peak_bytes: its peak.
      again: the vertices that run again, repeated as often as they do, in any order.
    """
    return Figures(
        peak_bytes=peak_bytes,
        overhead_seconds=math.fsum(map(graph.seconds.__getitem__, again)),
        recomputed_flops=sum(map(graph.flops.__getitem__, again)),
    )


def _role(role: str, vertex: int, wanted: Demand) -> str:
    if role == "forward" and vertex in wanted.stored:
        return "kept"
    return role


#: Role, vertex, and how many checkpoints deep the copy was made.
_Live = dict[tuple[str, int, int], int]


@dataclasses.dataclass(slots=True)
class _Readers:
    """Backward reads that are still to come in one region.

    Attributes:
      local: of the values that the region recomputes itself.
      outer: of those that it finds in memory.
      inside: of the regions inside.
    """

    local: Counter[int]
    outer: Counter[int]
    inside: list[_Readers]


def _readers(
    graph: Graph, region: Region, again: frozenset[int], inside: Demand | None
) -> _Readers:
    reads: Counter[int] = Counter()
    for vertex in again:
        reads.update(graph.predecessors[vertex])
    nested: list[_Readers] = []
    if inside is None:
        for vertex in region.vertices:
            reads.update(graph.needs[vertex])
    else:
        nested = _readers_of_chain(graph, region.inside, inside)
        for one in nested:
            reads.update(one.outer)
    # A value can be both kept and run again, for unnamed residuals: then the stored copy is read.
    copies = again - frozenset(region.kept)
    local: Counter[int] = Counter()
    outer: Counter[int] = Counter()
    for read, count in reads.items():
        (local if read in copies else outer)[read] = count
    return _Readers(local=local, outer=outer, inside=nested)


def _readers_of_chain(graph: Graph, regions: Sequence[Region], wanted: Demand) -> list[_Readers]:
    return [
        _readers(graph, region, again, inside)
        for region, again, inside in zip(regions, wanted.recomputed, wanted.inside, strict=True)
    ]


class _Replay:
    """One run of a schedule: what is alive, step by step.

    Attributes:
      live: the arrays alive.
      total: their bytes.
    """

    def __init__(
        self,
        graph: Graph,
        on_step: Callable[..., None],
        on_free: Callable[[str, int, int, int], None],
    ) -> None:
        """Starts with nothing alive.

        Args:
          graph: what to run.
          on_step: called while each step runs, with its phase, region and vertex, and its depth if
            it runs again.
          on_free: called when an array is freed, with its role, vertex and size, and the number of
            steps that had run when it was created.
        """
        self.graph = graph
        self.live: _Live = {}
        self.total = 0
        self._since: dict[tuple[str, int, int], int] = {}
        self._steps = 0
        self._tell = on_step
        self._on_free = on_free

    def _on_step(self, phase: str, region: int, vertex: int, depth: int = 0) -> None:
        self._tell(phase, region, vertex, depth)
        self._steps += 1

    def _allocate(self, role: str, vertex: int, size: int, depth: int = 0) -> None:
        if (role, vertex, depth) not in self.live:
            self.live[role, vertex, depth] = size
            self._since[role, vertex, depth] = self._steps
            self.total += size

    def _free(self, role: str, vertex: int, depth: int = 0) -> None:
        size = self.live.pop((role, vertex, depth), None)
        if size is not None:
            self.total -= size
            self._on_free(role, vertex, size, self._since[role, vertex, depth])

    def whole(self, schedule: Schedule, wanted: Demand) -> None:
        """Runs the schedule forward and backward."""
        self._forward(schedule.regions, wanted)
        readers = _readers_of_chain(self.graph, schedule.regions, wanted)
        stored: Counter[int] = Counter()
        for one in readers:
            stored.update(one.outer)

        def release(read: int) -> None:
            stored[read] -= 1
            if not stored[read]:
                self._free("forward", read)

        for number in reversed(range(len(schedule.regions))):
            self._backward(number, schedule.regions, number, wanted, readers, release, 0)

    def _forward(self, regions: Sequence[Region], wanted: Demand) -> None:
        graph = self.graph
        readers = Counter(p for found in graph.predecessors for p in found)
        for number, region in enumerate(regions):
            for vertex in region.vertices:
                self._allocate("forward", vertex, graph.bytes[vertex])
                if not region.checkpointed:
                    self._allocate("internal", vertex, graph.internal_bytes[vertex])
                self._allocate("workspace", vertex, graph.forward_workspace_bytes[vertex])
                self._on_step("forward", number, vertex)
                self._free("workspace", vertex)
                for read in graph.predecessors[vertex]:
                    readers[read] -= 1
                    if not readers[read] and read not in wanted.stored:
                        self._free("forward", read)
                if not readers[vertex] and vertex not in wanted.stored:
                    self._free("forward", vertex)

    def _backward(
        self,
        top: int,
        regions: Sequence[Region],
        number: int,
        wanted: Demand,
        readers: Sequence[_Readers],
        release_outer: Callable[[int], None],
        depth: int,
    ) -> None:
        """Runs one region of a chain backward, within region ``top`` of the whole schedule."""
        region, inside = regions[number], wanted.inside[number]
        local = readers[number].local

        def release(read: int) -> None:
            if read in local:
                local[read] -= 1
                if not local[read]:
                    self._free("recomputed", read, depth)
            else:
                release_outer(read)

        self._recompute(top, region, wanted.recomputed[number], local, release, depth)
        if inside is None:
            self._differentiate(top, region, release)
            return
        for inner in reversed(range(len(region.inside))):
            self._backward(
                top, region.inside, inner, inside, readers[number].inside, release, depth + 1
            )

    def _recompute(
        self,
        top: int,
        region: Region,
        again: frozenset[int],
        local: Counter[int],
        release: Callable[[int], None],
        depth: int,
    ) -> None:
        graph = self.graph
        internals = set(_with_internals(graph, region))
        for vertex in sorted(again):
            self._allocate("recomputed", vertex, graph.bytes[vertex], depth)
            if vertex in internals:
                self._allocate("internal", vertex, graph.internal_bytes[vertex])
            self._on_step("recompute", top, vertex, depth)
            for read in graph.predecessors[vertex]:
                release(read)
            if not local[vertex]:
                self._free("recomputed", vertex, depth)

    def _differentiate(self, top: int, region: Region, release: Callable[[int], None]) -> None:
        graph = self.graph
        for vertex in reversed(region.vertices):
            if graph.cotangent_bytes[vertex]:
                if graph.turns_in_place(vertex):
                    self._free("cotangent", vertex)
                else:
                    self._allocate("cotangent", vertex, graph.cotangent_bytes[vertex])
                for predecessor in graph.predecessors[vertex]:
                    self._allocate("cotangent", predecessor, graph.cotangent_bytes[predecessor])
                self._allocate("workspace", vertex, graph.workspace_bytes[vertex])
                self._on_step("backward", top, vertex)
                self._free("workspace", vertex)
            self._free("cotangent", vertex)
            self._free("internal", vertex)
            for read in graph.needs[vertex]:
                release(read)
