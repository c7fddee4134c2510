"""The figures of many chains of regions of one graph at once.

Problem. A local search asks for the peak and the overhead of thousands of chains that are almost
alike; one replay each takes too long.

Method. A chain whose regions follow the order of execution, nested at most twice, is four rows of
flags, one a vertex and level: whether a region of level l = 1, 2 starts there, and whether that
region drops the value. A region that drops nothing runs without a checkpoint. All chains are
columns of the same arrays. Every step that might run has a place in the order of execution, run or
not, which follows from where its vertex's regions start and end; and in descending order of the
vertices each read finds the copy it reads, at the inner level, the outer one, or stored. So the
first and the last step of every array are known, and sums over these are the peak.

Why not a ready-made tool: the rules are those of ``simulator``.

Complexity: for e reads of n vertices, some 10 e numpy operations on rows of one entry a chain.

Guarantee: the simulator's figures, to the byte.

Left out: regions out of the order of execution, checkpoints that drop nothing (they matter only
where there are residuals without a name), and deeper nesting.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.graph_arrays import arrays_of
from remat_opt.schedule import Region, Schedule, merged
from remat_opt.solvers.base import tidied

#: Levels of nesting.
LEVELS = 2
#: The strain is the norm of two to this power.
_SQUARINGS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Many chains of regions, one a column.

    Attributes:
      starts: [level, vertex, chain] whether a region starts there.
      drops: [level, vertex, chain] whether the region does not keep the value.
    """

    starts: np.ndarray
    drops: np.ndarray

    def __len__(self) -> int:
        return int(self.starts.shape[2])

    def __getitem__(self, chosen: np.ndarray | slice | list[int]) -> Chains:
        return Chains(starts=self.starts[:, :, chosen], drops=self.drops[:, :, chosen])

    def keys(self) -> list[bytes]:
        """What tells the chains apart."""
        flags = np.concatenate([*self.starts, *self.drops])
        return [row.tobytes() for row in np.packbits(flags, axis=0).T]


def joined(parts: Sequence[Chains]) -> Chains:
    """All chains of the parts, in order."""
    return Chains(
        starts=np.concatenate([one.starts for one in parts], axis=2),
        drops=np.concatenate([one.drops for one in parts], axis=2),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of many chains, one entry or column each.

    Attributes:
      peak_bytes: most bytes alive at once.
      strain_bytes: a norm of the bytes alive over all steps, which counts those near the peak too.
      seconds: of recomputation.
      again: [vertex, chain] whether it runs again.
      held: [vertex, chain] whether its stored value is alive at the peak.
      turn: a vertex of the region whose turn it is at the peak; the last one if forward.
    """

    peak_bytes: np.ndarray
    strain_bytes: np.ndarray
    seconds: np.ndarray
    again: np.ndarray
    held: np.ndarray
    turn: np.ndarray

    def __getitem__(self, chosen: list[int]) -> Figures:
        return Figures(**{name: getattr(self, name)[..., chosen] for name in _FIELDS})

    def joined(self, others: Figures) -> Figures:
        """These, then the others."""
        return Figures(
            **{
                name: np.concatenate([getattr(self, name), getattr(others, name)], axis=-1)
                for name in _FIELDS
            }
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(Figures))


class ChainFigures:
    """Tells the figures of chains of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph)
        self._bytes = np.asarray(graph.bytes, dtype=float)
        self._internal = np.asarray(graph.internal_bytes, dtype=float)
        self._cotangent = np.asarray(graph.cotangent_bytes, dtype=float)
        self._forward_workspace = arrays_of(graph).forward_workspace_bytes.astype(float)
        self._workspace = arrays_of(graph).workspace_bytes.astype(float)
        self._seconds = np.asarray(graph.seconds, dtype=float)
        self._pinned = np.asarray(graph.pinned, dtype=bool)
        self._turns = arrays_of(graph).turns_in_place
        self.successors = graph.successors()
        self.needed_by: list[list[int]] = [[] for _ in graph.names]
        for vertex, needs in enumerate(graph.needs):
            for read in needs:
                self.needed_by[read].append(vertex)
        # The step that writes the cotangent first: of the last reader that has one, or its own.
        self._sender = np.array(
            [
                max((w for w in self.successors[v] if graph.cotangent_bytes[w]), default=-1)
                for v in range(count)
            ]
        )
        self._ends_forward = np.array(
            [max([v, *readers]) for v, readers in enumerate(self.successors)], dtype=np.int32
        )
        #: The last vertex that reads each one, forward or backward.
        self.last_read = np.array(
            [max([v, *self.successors[v], *self.needed_by[v]]) for v in range(count)]
        )
        #: What can be dropped to any use: it takes memory and is read.
        self.droppable = (self._bytes > 0) & ~self._pinned
        self.droppable &= np.array(
            [bool(self.successors[v] or self.needed_by[v]) for v in range(count)]
        )

    def settled(self, chains: Chains) -> Chains:
        """The chains made legal, and alike where they mean the same.

        What has side effects is in no checkpoint; a region starts where the one around it does;
        what is useless to drop is kept.
        """
        starts, drops = chains.starts.copy(), chains.drops.copy()
        starts[:, 0] = True
        drops[:, ~self.droppable] = False
        for level in range(LEVELS):
            if level:
                starts[level] |= starts[level - 1]
            if self._pinned.any():
                for first, stop, chain in _regions(starts[level]):
                    if self._pinned[first:stop].any():
                        drops[level, first:stop, chain] = False
        return Chains(starts=starts, drops=drops)

    def same_residuals(self, chains: Chains, settled: Chains) -> np.ndarray:
        """Of each chain whether residuals without a name are made when the settled one makes them.

        Settled, a checkpoint that drops nothing of use is none, and puts them off no more.
        """
        if not self._internal.any():
            return np.ones(len(chains), dtype=bool)
        first, stop = _ends_of(settled)
        made = self._made(chains.drops, first, stop) == self._made(settled.drops, first, stop)
        same: np.ndarray = made[self._internal > 0].all(axis=0)
        return same

    def figures(self, chains: Chains) -> Figures:
        """The figures of each of the settled chains."""
        count, many = len(self.graph), len(chains)
        first, stop = _ends_of(chains)
        vertex = np.arange(count, dtype=np.int32)[:, None]
        # Each vertex that is differentiated earlier has three places: two runs, and its step.
        begin = count + 3 * (count - stop[0])
        inner = begin + (stop[0] - first[0]) + 2 * (stop[0] - stop[1])
        runs = (begin + vertex - first[0], inner + vertex - first[1])
        turns = inner + (stop[1] - first[1]) + (stop[1] - 1 - vertex)
        made = self._made(chains.drops, first, stop) if self._internal.any() else None
        again, last = self._reads(chains.drops, stop, runs, turns, made)
        rows = [(np.repeat(vertex, many, axis=1), last[0], self._bytes[:, None])]
        for level in range(LEVELS):
            rows.append((runs[level], last[level + 1], again[level] * self._bytes[:, None]))
        # A cotangent that is written over its own reader's has no step of its own.
        start = np.where(self._sender[:, None] >= 0, turns[self._sender], turns)
        start += (self._sender[:, None] < 0) & self._turns[:, None]
        end = turns - self._turns[:, None]
        rows.append((start, end, (start <= end) * self._cotangent[:, None]))
        if self._forward_workspace.any():
            once = np.repeat(vertex, many, axis=1)
            rows.append((once, once, self._forward_workspace[:, None]))
        if self._workspace.any():
            rows.append((turns, turns, self._workspace[:, None]))
        if made is not None:
            rows.append((np.choose(made, [vertex, *runs]), turns, self._internal[:, None]))
        alive = _alive(rows, 4 * count, many)
        peak_bytes = alive.max(axis=0)
        peak_step = alive.argmax(axis=0)
        relative = alive / np.maximum(peak_bytes, 1.0)
        for _ in range(_SQUARINGS):
            relative *= relative
        return Figures(
            peak_bytes=peak_bytes,
            strain_bytes=peak_bytes * relative.sum(axis=0) ** (0.5**_SQUARINGS),
            seconds=(again * self._seconds[None, :, None]).sum(axis=(0, 1)),
            again=np.logical_or.reduce(again),
            held=(vertex <= peak_step) & (last[0] >= peak_step),
            turn=count - 1 - np.maximum(peak_step - count, 0) // 3,
        )

    def _reads(
        self,
        drops: np.ndarray,
        stop: Sequence[np.ndarray],
        runs: Sequence[np.ndarray],
        turns: np.ndarray,
        made: np.ndarray | None,
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """What runs again at each level, and the last step that reads each copy.

        Descending, what reads a vertex is known to run again or not when its turn comes. A read
        that finds no copy at the inner level goes to the outer one, and from there to what is
        stored.
        """
        count, many = drops.shape[1:]
        again = np.zeros((LEVELS, count, many), dtype=bool)
        last = [np.repeat(self._ends_forward[:, None], many, axis=1), runs[0].copy()]
        last.append(runs[1].copy())
        for v in range(count - 1, -1, -1):
            if made is not None and self._internal[v]:
                again[0, v] = made[v] == 1
                again[1, v] = made[v] == 2
            reads: list[tuple[int, np.ndarray, np.ndarray | None, int]] = []
            reads += [(w, turns[w], None, 1) for w in self.needed_by[v]]
            reads += [(w, runs[1][w], again[1, w], 1) for w in self.successors[v]]
            reads += [(w, runs[0][w], again[0, w], 0) for w in self.successors[v]]
            for w, step, happens, level in reads:
                outer = drops[0, v] & (stop[0][v] > w)
                if happens is not None:
                    outer &= happens
                stored = ~outer if happens is None else happens & ~outer
                if level:
                    inner = drops[1, v] & (stop[1][v] > w)
                    if happens is not None:
                        inner &= happens
                    outer &= ~inner
                    stored &= ~inner
                    again[1, v] |= inner
                    np.maximum(last[2][v], step * inner, out=last[2][v])
                again[0, v] |= outer
                np.maximum(last[1][v], step * outer, out=last[1][v])
                np.maximum(last[0][v], step * stored, out=last[0][v])
        return again, last

    def _made(
        self, drops: np.ndarray, first: Sequence[np.ndarray], stop: Sequence[np.ndarray]
    ) -> np.ndarray:
        """At which level each vertex runs for its residuals without a name; 0 for forward."""
        made = np.zeros(drops.shape[1:], dtype=np.int64)
        columns = np.arange(drops.shape[2])[None, :]
        for level in range(LEVELS):
            sums = np.zeros((len(self.graph) + 1, drops.shape[2]), dtype=np.int64)
            np.cumsum(drops[level], axis=0, out=sums[1:])
            under = sums[stop[level], columns] > sums[first[level], columns]
            made[under] = level + 1
        return made


def _ends_of(chains: Chains) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """For each level the ``_ends`` of its regions."""
    first, stop = zip(*map(_ends, chains.starts), strict=True)
    return first, stop


def _ends(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each vertex where its region starts, and where the next one does."""
    count = len(starts)
    vertex = np.arange(count, dtype=np.int32)[:, None]
    first = np.maximum.accumulate(np.where(starts, vertex, 0), axis=0)
    following = np.full(starts.shape, count, dtype=np.int32)
    following[:-1] = np.where(starts[1:], vertex[1:], count)
    stop = np.minimum.accumulate(following[::-1], axis=0)[::-1]
    return first, stop


def _alive(
    rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], steps: int, many: int
) -> np.ndarray:
    """The bytes alive at each step, of arrays each with its first step, last step and size."""
    columns = np.arange(many)
    change = np.zeros((steps + 1) * many)
    for first, last, size in rows:
        weights = np.broadcast_to(size, first.shape).ravel()
        change += np.bincount((first * many + columns).ravel(), weights, len(change))
        change -= np.bincount(((last + 1) * many + columns).ravel(), weights, len(change))
    return np.cumsum(change.reshape(steps + 1, many), axis=0)


def _regions(starts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """First vertex, the one after the last, and chain, of every region."""
    for chain in range(starts.shape[1]):
        edges = [*np.flatnonzero(starts[:, chain]).tolist(), len(starts)]
        for first, stop in itertools.pairwise(edges):
            yield first, stop, chain


def schedule_of(graph: Graph, chains: Chains, number: int) -> Schedule:
    """One of the settled chains as a schedule, without what is kept and never read."""
    starts, drops = chains.starts[:, :, number], chains.drops[:, :, number]
    return Schedule(regions=tidied(graph, _chain(starts, drops, 0, 0, len(graph))))


def _chain(starts: np.ndarray, drops: np.ndarray, level: int, begin: int, end: int) -> list[Region]:
    if level == LEVELS:
        return [Region(vertices=tuple(range(begin, end)), checkpointed=False)]
    edges = [begin, *(begin + 1 + np.flatnonzero(starts[level, begin + 1 : end])).tolist(), end]
    regions: list[Region] = []
    for first, stop in itertools.pairwise(edges):
        inside = _chain(starts, drops, level + 1, first, stop)
        if not drops[level, first:stop].any():
            regions += inside
            continue
        kept = tuple((first + np.flatnonzero(~drops[level, first:stop])).tolist())
        single = len(inside) == 1 and not inside[0].checkpointed
        regions.append(
            Region(
                vertices=tuple(range(first, stop)),
                kept=kept,
                inside=() if single else tuple(inside),
            )
        )
    return merged(regions)


def is_chain(schedule: Schedule) -> bool:
    """Whether its regions follow the order of execution, and nest no deeper than they may."""
    return _fits(schedule.regions, 0, 0)


def chains_of(graph: Graph, schedules: Sequence[Schedule]) -> Chains:
    """Schedules, each of which ``is_chain``, as chains."""
    shape = (LEVELS, len(graph), len(schedules))
    starts, drops = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    for number, schedule in enumerate(schedules):
        _write(schedule.regions, 0, starts[:, :, number], drops[:, :, number])
    return Chains(starts=starts, drops=drops)


def _fits(regions: Sequence[Region], level: int, first: int) -> bool:
    for region in regions:
        if region.vertices != tuple(range(first, first + len(region.vertices))):
            return False
        if region.inside and (level + 1 == LEVELS or not _fits(region.inside, level + 1, first)):
            return False
        first += len(region.vertices)
    return True


def _write(regions: Sequence[Region], level: int, starts: np.ndarray, drops: np.ndarray) -> None:
    for region in regions:
        starts[level:, region.vertices[0]] = True
        if region.checkpointed:
            drops[level, list(set(region.vertices) - set(region.kept))] = True
            _write(region.inside, level + 1, starts, drops)
