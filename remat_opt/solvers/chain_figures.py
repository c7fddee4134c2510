"""The figures of many chains of regions of one graph at once.

Problem. A local search needs the peak and the overhead of thousands of almost equal chains; one
replay each takes too long.

Method. A chain whose regions follow the order of execution, nested at most twice, is four rows of
flags, one per vertex and level: whether a region of level l = 1, 2 starts there, and whether that
region drops the value. A region that drops nothing runs without a checkpoint. All chains are
columns of the same arrays. Every step that might run has a place in the order of execution, whether
or not it runs, which follows from where its vertex's regions start and end. In descending order of
vertices, each read finds the copy it reads: at the inner level, at the outer one, or stored. So the
first and the last step of every array are known, and sums over these give the peak.

Why not a ready-made tool: the rules are those of ``simulator``.

Complexity: O(n + e) per chain for n vertices and e reads. What runs again must be followed read by
read; there the flags of all chains are one long integer. Everything else is done for all reads at
once.

Guarantee: the simulator's figures, to the byte.

Left out: regions out of the order of execution, deeper nesting, and checkpoints that drop nothing
but put off unnamed residuals.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.graph_arrays import arrays_of
from remat_opt.schedule import Region, Schedule, merged
from remat_opt.simulator import figures_of
from remat_opt.solvers.base import Candidate, candidate
from remat_opt.solvers.coarsening import Coarse

#: Levels of nesting.
LEVELS = 2
#: The strain is the norm of two to this power.
_SQUARINGS = 4
#: Chains are replayed in batches whose steps make up this many entries.
_BLOCK_ENTRIES = 2**16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Many chains of regions, one per column.

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
        """What distinguishes the chains."""
        packed = np.packbits(np.concatenate([*self.starts, *self.drops]), axis=0)
        keys: list[bytes] = np.ascontiguousarray(packed.T).view(f"V{len(packed)}").ravel().tolist()
        return keys


def joined(parts: Sequence[Chains]) -> Chains:
    """All chains of the parts, in order."""
    return Chains(
        starts=np.concatenate([one.starts for one in parts], axis=2),
        drops=np.concatenate([one.drops for one in parts], axis=2),
    )


def spread(chains: Chains, seen: Coarse) -> Chains:
    """Chains of a smaller graph as chains of the one that it stands for.

    Args:
      chains: those of the smaller graph.
      seen: its groups are stretches of the order of execution.
    """
    starts, drops = np.zeros((2, LEVELS, len(seen.whole), len(chains)), dtype=bool)
    starts[:, [min(group) for group in seen.groups]] = chains.starts
    drops[:, [group[0] for group in seen.groups]] = chains.drops
    return Chains(starts=starts, drops=drops)


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

    @classmethod
    def joined(cls, parts: Sequence[Figures]) -> Figures:
        """All of the parts, in order."""
        return cls(
            **{
                name: np.concatenate([getattr(part, name) for part in parts], axis=-1)
                for name in _FIELDS
            }
        )


_FIELDS = tuple(field.name for field in dataclasses.fields(Figures))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reads:
    """Reads of one kind.

    Attributes:
      read: the vertex that is read, ascending; one entry per read.
      reader: what reads it.
      rounds: for each number of reads, the vertices that have as many, and the position of the next
        read of each.
    """

    read: np.ndarray
    reader: np.ndarray
    rounds: Sequence[tuple[np.ndarray, np.ndarray]]

    @classmethod
    def by(cls, readers: Sequence[Sequence[int]]) -> _Reads:
        """Builds it from what reads each vertex."""
        counts = np.array([len(each) for each in readers])
        firsts = np.cumsum(counts) - counts
        vertices = (np.flatnonzero(counts > number) for number in range(counts.max(initial=0)))
        return cls(
            read=np.repeat(np.arange(len(readers)), counts),
            reader=np.array(list(itertools.chain.from_iterable(readers)), dtype=int),
            rounds=[(chosen, firsts[chosen] + number) for number, chosen in enumerate(vertices)],
        )

    def raise_to(self, rows: np.ndarray, figures: np.ndarray) -> None:
        """Raises the row of each vertex to at least the figures of all its reads.

        Args:
          rows: [vertex, chain]; written to.
          figures: [read, chain].
        """
        # A quarter of the time that ``np.maximum.reduceat`` takes.
        for vertices, places in self.rounds:
            rows[vertices] = np.maximum(rows[vertices], figures[places])


class ChainFigures:
    """Computes the figures of chains of one graph."""

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
        self._pinned_before = np.concatenate([[0], np.cumsum(self._pinned)])
        self._turns = arrays_of(graph).turns_in_place
        self.successors = graph.successors()
        self.needed_by: list[list[int]] = [[] for _ in graph.names]
        for vertex, needs in enumerate(graph.needs):
            for read in needs:
                self.needed_by[read].append(vertex)
        self._turn_reads = _Reads.by(self.needed_by)
        self._run_reads = _Reads.by(self.successors)
        # The step that first writes the cotangent: that of the last reader with one, or its own.
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
        #: What is worth dropping: it takes memory and is read.
        self.droppable = (self._bytes > 0) & ~self._pinned
        self.droppable &= np.array(
            [bool(self.successors[v] or self.needed_by[v]) for v in range(count)]
        )

    def settled(self, chains: Chains) -> Chains:
        """The chains made legal, and equal if they mean the same.

        Side effects are in no checkpoint; a region starts where the one around it does; what is
        useless to drop is kept.
        """
        starts, drops = chains.starts.copy(), chains.drops.copy()
        starts[:, 0] = True
        drops[:, ~self.droppable] = False
        for level in range(LEVELS):
            if level:
                starts[level] |= starts[level - 1]
            if self._pinned.any():
                first, stop = _ends(starts[level])
                drops[level] &= self._pinned_before[first] == self._pinned_before[stop]
        return Chains(starts=starts, drops=drops)

    def same_residuals(self, chains: Chains, settled: Chains) -> np.ndarray:
        """For each chain, whether it makes unnamed residuals when its settled form does.

        In settled form, a checkpoint that drops nothing useful is removed, and no longer puts them
        off.
        """
        if not self._internal.any():
            return np.ones(len(chains), dtype=bool)
        first, stop = _ends_of(settled)
        made = self._made(chains.drops, first, stop) == self._made(settled.drops, first, stop)
        same: np.ndarray = made[self._internal > 0].all(axis=0)
        return same

    def figures(self, chains: Chains) -> Figures:
        """The figures of each of the settled chains."""
        first, stop = _ends_of(chains)
        turn_in, run_in, made = self._reads_in(chains, first, stop)
        again = self._again(turn_in, run_in, made)
        width = max(1, _BLOCK_ENTRIES // (4 * len(self.graph)))
        parts = []
        for start in range(0, len(chains), width):
            part = slice(start, start + width)
            parts.append(
                self._replayed(
                    first[..., part],
                    stop[..., part],
                    turn_in[..., part],
                    run_in[..., part],
                    again[..., part],
                    None if made is None else made[:, part],
                )
            )
        return Figures.joined(parts)

    def demands(self, chains: Chains) -> tuple[np.ndarray, np.ndarray]:
        """What each of the settled chains runs again, and reads from memory meanwhile.

        Returns:
          [level, vertex, chain] whether it runs again; and whether it is read by regions at that
          level that do not run it again themselves, see ``spans.read_from_memory``.
        """
        first, stop = _ends_of(chains)
        turn_in, run_in, made = self._reads_in(chains, first, stop)
        again = self._again(turn_in, run_in, made)
        from_memory = np.zeros_like(again)
        outer, inner = again[:, self._run_reads.reader]
        for reads, found_in, by_inner, by_outer in (
            (self._turn_reads, turn_in, np.True_, np.False_),
            (self._run_reads, run_in, inner, outer),
        ):
            handed_on = by_inner & ~found_in[1]
            same_nest = stop[0, reads.read] > reads.reader[:, None]
            reads.raise_to(from_memory[1], handed_on & same_nest)
            reads.raise_to(from_memory[0], (handed_on | by_outer) & ~found_in[0])
        return again, from_memory

    def candidates(
        self, graph: Graph, schedules: Sequence[Schedule], chains: Chains, figures: Figures
    ) -> list[Candidate]:
        """Schedules with the simulator's figures, in order.

        Args:
          graph: the same graph, perhaps with other costs.
          schedules: the chains as schedules.
          chains: settled.
          figures: theirs.
        """
        again, from_memory = self.demands(chains)
        return [
            candidate(
                schedule,
                figures_of(graph, int(peak_bytes), np.nonzero(again[:, :, place])[1].tolist()),
                list(from_memory[:, :, place]),
            )
            for place, (schedule, peak_bytes) in enumerate(
                zip(schedules, figures.peak_bytes, strict=True)
            )
        ]

    def _reads_in(
        self, chains: Chains, first: np.ndarray, stop: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Which reads may find a recomputed copy.

        Returns:
          [level, read, chain] for reads at a backward step: whether that step is in the level's
          region that contains the vertex and drops it; the same for reads by what runs again; and
          what is ``_made``, if anything has unnamed residuals.
        """
        turn_in, run_in = (
            chains.drops[:, reads.read] & (stop[:, reads.read] > reads.reader[:, None])
            for reads in (self._turn_reads, self._run_reads)
        )
        made = self._made(chains.drops, first, stop) if self._internal.any() else None
        return turn_in, run_in, made

    def _again(
        self, turn_in: np.ndarray, run_in: np.ndarray, made: np.ndarray | None
    ) -> np.ndarray:
        """What runs again: [level, vertex, chain].

        In descending order, it is known whether the readers of a vertex run again when its turn
        comes. A read that finds no copy at the inner level goes to the outer one, and from there to
        what is stored. The flags of all chains are the bits of one number.

        Args:
          turn_in: see ``_reads_in``.
          run_in: likewise.
          made: likewise.
        """
        many = turn_in.shape[2]
        outer, inner = [0] * len(self.graph), [0] * len(self.graph)
        if made is not None:
            outer, inner = (
                _numbers((made == level) & (self._internal > 0)[:, None]) for level in (1, 2)
            )
        for v, by_outer, by_inner in zip(
            self._turn_reads.read.tolist(),
            _numbers(turn_in[0] & ~turn_in[1]),
            _numbers(turn_in[1]),
            strict=True,
        ):
            outer[v] |= by_outer
            inner[v] |= by_inner
        reads = zip(
            self._run_reads.read.tolist(),
            self._run_reads.reader.tolist(),
            _numbers(run_in[0]),
            _numbers(run_in[0] & ~run_in[1]),
            _numbers(run_in[1]),
            strict=True,
        )
        for v, w, in_outer, in_outer_alone, in_inner in reversed(list(reads)):
            outer[v] |= outer[w] & in_outer | inner[w] & in_outer_alone
            inner[v] |= inner[w] & in_inner
        return np.stack([_flags(numbers, many) for numbers in (outer, inner)])

    def _replayed(
        self,
        first: np.ndarray,
        stop: np.ndarray,
        turn_in: np.ndarray,
        run_in: np.ndarray,
        again: np.ndarray,
        made: np.ndarray | None,
    ) -> Figures:
        """The figures of some chains, from where regions end and what runs again in them."""
        count, many = again.shape[1:]
        vertex = np.arange(count, dtype=np.int32)[:, None]
        # Each vertex that is differentiated earlier has three places: two runs, and its step.
        begin = count + 3 * (count - stop[0])
        inner = begin + (stop[0] - first[0]) + 2 * (stop[0] - stop[1])
        runs = (begin + vertex - first[0], inner + vertex - first[1])
        turns = inner + (stop[1] - first[1]) + (stop[1] - 1 - vertex)
        last = self._last_reads(turn_in, run_in, again, runs, turns)
        # A cotangent written over its own reader's has no separate step.
        start = np.where(self._sender[:, None] >= 0, turns[self._sender], turns)
        start += (self._sender[:, None] < 0) & self._turns[:, None]
        end = turns - self._turns[:, None]
        alive = _Alive(4 * count, many)
        alive.add(np.broadcast_to(vertex, again[0].shape), last[0], self._bytes)
        for level in range(LEVELS):
            alive.add(runs[level], last[level + 1], self._bytes, again[level])
        alive.add(start, end, self._cotangent, start <= end)
        alive.add(turns, turns, self._workspace)
        alive.add(
            np.broadcast_to(vertex, turns.shape),
            np.broadcast_to(vertex, turns.shape),
            self._forward_workspace,
        )
        if made is not None:
            alive.add(np.choose(made, [vertex, *runs]), turns, self._internal)
        by_step = alive.by_step()
        peak_bytes = by_step.max(axis=0)
        peak_step = by_step.argmax(axis=0)
        relative = by_step / np.maximum(peak_bytes, 1.0)
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

    def _last_reads(
        self,
        turn_in: np.ndarray,
        run_in: np.ndarray,
        again: np.ndarray,
        runs: Sequence[np.ndarray],
        turns: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The last step that reads each copy: the stored one, the outer one, the inner one."""
        stored = np.repeat(self._ends_forward[:, None], turns.shape[1], axis=1)
        outer, inner = runs[0].copy(), runs[1].copy()
        by = self._run_reads.reader
        for reads, steps, in_outer, in_inner in (
            (self._turn_reads, turns[self._turn_reads.reader], turn_in[0], turn_in[1]),
            (self._run_reads, runs[1][by] * again[1, by], run_in[0], run_in[1]),
            (self._run_reads, runs[0][by] * again[0, by], run_in[0], None),
        ):
            if in_inner is not None:
                reads.raise_to(inner, steps * in_inner)
                steps = steps * ~in_inner
            reads.raise_to(outer, steps * in_outer)
            reads.raise_to(stored, steps * ~in_outer)
        return stored, outer, inner

    def _made(self, drops: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """The level at which each vertex runs for its unnamed residuals; 0 for forward."""
        made = np.zeros(drops.shape[1:], dtype=np.int64)
        columns = np.arange(drops.shape[2])[None, :]
        for level in range(LEVELS):
            sums = np.zeros((len(self.graph) + 1, drops.shape[2]), dtype=np.int64)
            np.cumsum(drops[level], axis=0, out=sums[1:])
            under = sums[stop[level], columns] > sums[first[level], columns]
            made[under] = level + 1
        return made


def _ends_of(chains: Chains) -> tuple[np.ndarray, np.ndarray]:
    """[level, vertex, chain] where its region starts, and where the next one does."""
    first, stop = zip(*map(_ends, chains.starts), strict=True)
    return np.stack(first), np.stack(stop)


def _ends(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each vertex, where its region starts, and where the next one does."""
    count = len(starts)
    vertex = np.arange(count, dtype=np.int32)[:, None]
    first = np.maximum.accumulate(np.where(starts, vertex, 0), axis=0)
    following = np.full(starts.shape, count, dtype=np.int32)
    following[:-1] = np.where(starts[1:], vertex[1:], count)
    stop = np.minimum.accumulate(following[::-1], axis=0)[::-1]
    return first, stop


def _numbers(flags: np.ndarray) -> list[int]:
    """Each row of flags as a number; the first flag is its highest bit."""
    packed = np.packbits(flags, axis=1)
    data, width = packed.tobytes(), packed.shape[1]
    return [
        int.from_bytes(data[start : start + width], "big") for start in range(0, len(data), width)
    ]


def _flags(numbers: Sequence[int], many: int) -> np.ndarray:
    """The rows of ``many`` flags that are these ``_numbers``."""
    width = -(-many // 8)
    data = b"".join(number.to_bytes(width, "big") for number in numbers)
    packed = np.frombuffer(data, dtype=np.uint8).reshape(len(numbers), width)
    return np.unpackbits(packed, axis=1, count=many).view(bool)


class _Alive:
    """Adds up the bytes alive at each step, of arrays in many chains."""

    def __init__(self, steps: int, many: int) -> None:
        self._steps, self._many = steps, many
        self._places: list[np.ndarray] = []
        self._changes: list[np.ndarray] = []

    def add(
        self, first: np.ndarray, last: np.ndarray, size: np.ndarray, there: np.ndarray | None = None
    ) -> None:
        """Adds one array of each vertex and chain.

        Args:
          first: [vertex, chain] the first step at which it is alive.
          last: likewise, the last one.
          size: [vertex] its bytes.
          there: [vertex, chain] whether there is such an array; all if None.
        """
        rows = np.flatnonzero(size)
        first, last, sizes = first[rows], last[rows] + 1, size[rows]
        if there is None:
            chain = np.arange(self._many)
            sizes = np.repeat(sizes, self._many)
        else:
            row, chain = np.nonzero(there[rows])
            first, last, sizes = first[row, chain], last[row, chain], sizes[row]
        self._places += [
            (first * self._many + chain).ravel(),
            (last * self._many + chain).ravel(),
        ]
        self._changes += [sizes, -sizes]

    def by_step(self) -> np.ndarray:
        """Bytes: [step, chain]."""
        shape = (self._steps + 1, self._many)
        change = np.bincount(
            np.concatenate(self._places), np.concatenate(self._changes), shape[0] * shape[1]
        )
        return np.cumsum(change.reshape(shape), axis=0)


def schedule_of(chains: Chains, number: int) -> Schedule:
    """One of the settled chains as a schedule."""
    count = chains.starts.shape[1]
    starts = [np.flatnonzero(row).tolist() for row in chains.starts[:, :, number]]
    kept = [np.flatnonzero(~row).tolist() for row in chains.drops[:, :, number]]
    return Schedule(regions=tuple(merged(_chain(starts, kept, 0, 0, count))))


def _chain(
    starts: Sequence[list[int]], kept: Sequence[list[int]], level: int, begin: int, end: int
) -> list[Region | range]:
    """The regions of a level between two vertices, from where they start and what is kept.

    Regions without a checkpoint are not ``merged`` yet.
    """
    if level == LEVELS:
        return [range(begin, end)]
    regions: list[Region | range] = []
    for first, stop in itertools.pairwise([begin, *_between(starts[level], begin + 1, end), end]):
        inside = _chain(starts, kept, level + 1, first, stop)
        named = _between(kept[level], first, stop)
        if len(named) == stop - first:
            regions += inside
            continue
        nested = any(isinstance(one, Region) for one in inside)
        regions.append(
            Region(
                vertices=tuple(range(first, stop)),
                kept=tuple(named),
                inside=tuple(merged(inside)) if nested else (),
            )
        )
    return regions


def _between(ascending: list[int], first: int, stop: int) -> list[int]:
    """The numbers that are at least the first limit and less than the other."""
    return ascending[bisect.bisect_left(ascending, first) : bisect.bisect_left(ascending, stop)]


def is_chain(graph: Graph, schedule: Schedule) -> bool:
    """Whether its regions follow the order of execution, and do not nest too deep.

    If there are unnamed residuals, all checkpoints must also drop something.
    """
    if _some_drops_nothing(schedule.regions) and any(graph.internal_bytes):
        return False
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
        # They are ascending.
        stop = first + len(region.vertices)
        if (region.vertices[0], region.vertices[-1]) != (first, stop - 1):
            return False
        if region.inside and (level + 1 == LEVELS or not _fits(region.inside, level + 1, first)):
            return False
        first = stop
    return True


def _some_drops_nothing(regions: Sequence[Region]) -> bool:
    return any(
        region.checkpointed
        and (len(region.kept) == len(region.vertices) or _some_drops_nothing(region.inside))
        for region in regions
    )


def _write(regions: Sequence[Region], level: int, starts: np.ndarray, drops: np.ndarray) -> None:
    for region in regions:
        starts[level:, region.vertices[0]] = True
        if region.checkpointed:
            drops[level, region.vertices[0] : region.vertices[-1] + 1] = True
            drops[level, list(region.kept)] = False
            _write(region.inside, level + 1, starts, drops)
