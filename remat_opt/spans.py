"""The life of every array of a schedule: the replay of ``simulator`` all at once, without a story.

Problem. ``simulator`` counts readers down, step by step, which tells what is alive when and why. A
search asks for the peak of some hundreds of schedules, and for nothing else.

Method. All steps are numbered in order of execution. An array lives from the step that writes it
to the last one that reads it; both are found for all arrays of one kind together. What a step
reads it finds at the innermost depth of checkpoints at which the value runs again, else stored:
the depths are gone through from the innermost out, and what is not found is handed on.

Why not a ready-made tool: the rules are those of ``simulator``.

Complexity: linear in vertices and edges, for each depth of nesting.

Guarantee: the simulator's peak and recomputation, to the byte.

Left out: steps that only free; nothing is written during one, so no peak is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import numpy as np

from remat_opt.graph import Graph
from remat_opt.graph_arrays import GraphArrays, arrays_of
from remat_opt.schedule import Region, Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The lives of arrays, one entry each.

    Attributes:
      first: number of the step that writes the array.
      last: number of the last step during which it is there.
      bytes: its size.
      backward: number of the first step of the backward pass.
      forward: for each vertex, the number of its step in the forward pass.
      turn: for each vertex, the number of its backward step.
      again: the vertices that run again, each as often as it does, in no order.
      again_at: the numbers of the steps in which they do.
      from_memory: what the regions at each depth read that they do not run again themselves; see
        ``read_from_memory``.
    """

    first: np.ndarray
    last: np.ndarray
    bytes: np.ndarray
    backward: int
    forward: np.ndarray
    turn: np.ndarray
    again: np.ndarray
    again_at: np.ndarray
    from_memory: Sequence[np.ndarray]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return int(self.live_bytes(int(self.last.max(initial=-1)) + 1).max(initial=0))

    def held_to_the_end(self) -> Spans:
        """The lives where all that waits for the backward pass is there until that ends."""
        waits = (self.first < self.backward) & (self.last >= self.backward)
        return dataclasses.replace(self, last=np.where(waits, self.last.max(initial=0), self.last))

    def with_forward(
        self, sizes: Sequence[int], early: Sequence[tuple[int, int, int]] = ()
    ) -> Spans:
        """The lives, with more arrays in the forward pass.

        Args:
          sizes: bytes of those that are there all the time.
          early: of others the first and the last vertex in whose forward steps they are there, and
            their bytes.
        """
        return self._with([*((0, self.backward - 1, size) for size in sizes), *early])

    def with_runs(self, sizes: Mapping[int, int]) -> Spans:
        """The lives, with an array of so many bytes wherever one of these vertices runs."""
        runs = zip(self.again.tolist(), self.again_at.tolist(), strict=True) if sizes else ()
        again = [(at, at, sizes[vertex]) for vertex, at in runs if vertex in sizes]
        forward = ((int(self.forward[vertex]), size) for vertex, size in sizes.items())
        return self._with([*((at, at, size) for at, size in forward), *again])

    def _with(self, more: Sequence[tuple[int, int, int]]) -> Spans:
        """The lives, with more arrays: first and last step, and bytes."""
        if not more:
            return self
        first, last, size = np.array(more, dtype=np.int64).T
        return dataclasses.replace(
            self,
            first=np.concatenate([self.first, first]),
            last=np.concatenate([self.last, last]),
            bytes=np.concatenate([self.bytes, size]),
        )

    def live_bytes(self, steps: int) -> np.ndarray:
        """The bytes alive at each of so many steps, no fewer than there are."""
        # As floating-point numbers: sums of whole ones below 2**53 are exact.
        change = np.bincount(self.first, self.bytes, steps + 1)
        change -= np.bincount(self.last + 1, self.bytes, steps + 1)
        return np.cumsum(change)[:steps]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentCopy:
    """A copy of an argument, made by every region that reads it, and again where that runs again.

    Outside checkpoints it is made once, and stays for the backward pass.

    Attributes:
      bytes: its size.
      readers: the vertices that read it.
      backward: those of them whose backward steps do.
      entry_of: if regions copy only the entries that they read, each when it is first read, the
        entry that each of the readers reads.
      entry_bytes: the bytes of an entry.
    """

    bytes: int
    readers: frozenset[int]
    backward: frozenset[int]
    entry_of: Mapping[int, int] | None = None
    entry_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Kernels that read arrays, but take those that wait in stacks from their places there.

    What runs again reads copies, made as the backward pass starts.

    Attributes:
      vertices: of each vertex whether such a kernel computes it and its backward step.
      inputs: of inputs that they read from stacks in the backward pass the bytes, and the vertices
        that read them.
      forward: the vertices that read inputs from stacks in the forward pass.
      workspace_bytes: of such a kernel, while it runs.
    """

    vertices: np.ndarray
    inputs: Sequence[tuple[int, Sequence[int]]]
    forward: Sequence[int]
    workspace_bytes: int

    def without(self, vertices: Set[int], inputs: Sequence[tuple[int, Sequence[int]]]) -> Library:
        """The same where some vertices read copies, and only these inputs are left."""
        left = self.vertices
        if left[list(vertices)].any():
            left = left.copy()
            left[list(vertices)] = False
        return dataclasses.replace(self, vertices=left, inputs=inputs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """What an iteration of a loop reads of stacks, one entry in which belongs to each iteration.

    Attributes:
      slicing: of each vertex whether it reads and writes arrays: what waits for the backward pass
        is copied from a stack for it, and what it writes is copied there as the forward pass ends.
        The others read and write entries in their places. None where what waits is in no stack.
      inputs: of inputs that are copied from stacks the bytes, the vertices that read them, and
        whether they are copied as the backward pass starts.
      carried_bytes: of what is handed from iteration to iteration.
      handed_out: of each vertex whether its value is: its cotangent is there from the start.
      taken: of what waits in the stacks of gradients the bytes, and the vertices that read it: it
        is copied as the backward pass starts, since a gradient takes its place.
      in_gradients: of each vertex whether its value waits there.
      library: those that read arrays, but take them from stacks.
      gradients: of what is written to stacks in the backward pass, all at once, the bytes, and the
        vertex in whose backward step it is complete.
      late: whether what runs again does so as it is first read, not as its region's turn comes.
    """

    slicing: np.ndarray | None
    inputs: Sequence[tuple[int, Sequence[int], bool]]
    carried_bytes: int
    handed_out: np.ndarray
    taken: Sequence[tuple[int, Sequence[int]]] = ()
    in_gradients: np.ndarray | None = None
    library: Library | None = None
    gradients: Sequence[tuple[int, int]] = ()
    late: bool = False


def spans(
    graph: Graph,
    schedule: Schedule,
    stacks: Stacks | None = None,
    pieces: Mapping[int, int] | None = None,
    argument_copies: Sequence[ArgumentCopy] = (),
) -> Spans:
    """The lives of all arrays of a schedule.

    Args:
      graph: what it is a schedule of.
      schedule: regions and fates.
      stacks: what it reads of these, where it is that of an iteration. What waits in a stack is
        not counted, but for the copies.
      pieces: the vertices whose cotangents are several arrays, and how many.
      argument_copies: arguments that regions copy.

    Raises:
      GraphError: the schedule leaves a vertex out, or reads what a later region computes.
    """
    arrays = arrays_of(graph)
    levels, leaves = _levels(graph, schedule)
    order = np.concatenate(leaves)
    if not _is_executable(arrays, levels, len(order)):
        schedule.check(graph)

    demanded = _demand(graph, arrays, levels)
    open_reads = demanded[0]
    times = _Times(len(graph), len(levels))
    times.run_forward(order)
    times.run_backward(schedule.regions, 0, levels)
    if stacks is not None and stacks.late:
        times.run_late(levels)

    count = len(graph)
    forward, step = times.forward, times.step
    first, last, sizes = [], [], []

    def add(start: np.ndarray, stop: np.ndarray, size: np.ndarray) -> None:
        first.append(start)
        last.append(stop)
        sizes.append(size)

    # Forward values: until the last forward reader, or the last backward reader where stored.
    end = forward.copy()
    np.maximum.at(end, arrays.forward.read, forward[arrays.forward.reader])
    there = np.full(count, True)
    taking = np.full(count, False)
    if stacks is None or stacks.slicing is None:
        np.maximum.at(end, open_reads.read, step[open_reads.step])
    else:
        slicing = stacks.slicing[open_reads.reader]
        if stacks.in_gradients is not None:
            slicing &= ~stacks.in_gradients[open_reads.read]
        if stacks.library is not None:
            in_place = slicing & stacks.library.vertices[open_reads.reader]
            in_place &= open_reads.step < count  # none that runs again
            taking[open_reads.reader[in_place]] = True
            slicing &= ~in_place
        copied = open_reads[slicing]
        add(step[copied.step], step[copied.step], arrays.bytes[copied.read])
        # What is written where it waits, and read there, is no array; the rest is put there late.
        there[open_reads.read] = stacks.slicing[open_reads.read]
        there[arrays.forward.read[stacks.slicing[arrays.forward.reader]]] = True
        end[open_reads.read] = count - 1
    add(forward[there], end[there], arrays.bytes[there])

    # Backward step of each vertex.
    turn = step[:count]
    internal = np.flatnonzero(arrays.internal_bytes)
    if len(internal):
        written = forward[internal]
        for depth, level in enumerate(levels):
            runs = level.runs_internal[internal]
            written[runs] = step[(depth + 1) * count + internal[runs]]
        add(written, turn[internal], arrays.internal_bytes[internal])

    for depth, level in enumerate(levels):
        again = np.flatnonzero(level.again)
        if not len(again):
            continue
        run = step[(depth + 1) * count : (depth + 2) * count]
        end = run.copy()
        np.maximum.at(end, level.local.read, step[level.local.step])
        add(run[again], end[again], arrays.bytes[again])

    if stacks is not None:
        add(*_copies(stacks, count, forward, step, levels))
        if stacks.library is not None:
            taking[[one for _, readers in stacks.library.inputs for one in readers]] = True
            at = np.concatenate([forward[list(stacks.library.forward)], turn[taking]])
            add(at, at, np.full(len(at), stacks.library.workspace_bytes))

    # Cotangents: from the backward step of the last reader that has one, or their own.
    start = np.where(arrays.turns_in_place, np.iinfo(np.int64).max, turn)
    sends = arrays.cotangent_bytes[arrays.forward.reader] > 0
    np.minimum.at(start, arrays.forward.read[sends], turn[arrays.forward.reader[sends]])
    if stacks is not None:
        start[stacks.handed_out] = count
    end = turn - arrays.turns_in_place
    there = (start <= end) & (arrays.cotangent_bytes > 0)
    own = arrays.cotangent_bytes.copy() if pieces else arrays.cotangent_bytes
    for vertex, many in (pieces or {}).items():
        if there[vertex]:
            piece = np.repeat(own[vertex] // many, many - 1)
            add(start[[vertex]].repeat(len(piece)), end[[vertex]].repeat(len(piece)), piece)
            own[vertex] -= piece.sum()
    add(start[there], end[there], own[there])
    for one in argument_copies:
        add(*_argument_copies(one, forward, step, levels, leaves))
    busy = np.flatnonzero(arrays.forward_workspace_bytes)
    add(forward[busy], forward[busy], arrays.forward_workspace_bytes[busy])
    busy = np.flatnonzero(arrays.workspace_bytes)
    add(turn[busy], turn[busy], arrays.workspace_bytes[busy])
    again_of = [np.flatnonzero(level.again) for level in levels]
    return Spans(
        first=np.concatenate(first),
        last=np.concatenate(last),
        bytes=np.concatenate(sizes),
        backward=count,
        forward=forward,
        turn=turn,
        again=np.concatenate(again_of),
        again_at=np.concatenate(
            [step[(depth + 1) * count + again] for depth, again in enumerate(again_of)]
        ),
        from_memory=_from_memory(count, levels, demanded),
    )


def _argument_copies(
    copy: ArgumentCopy,
    forward: np.ndarray,
    step: np.ndarray,
    levels: Sequence[_Level],
    leaves: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lives of copies of an argument.

    Args:
      copy: of what, and what reads them.
      forward: see ``_Times``.
      step: likewise.
      levels: what runs again.
      leaves: the vertices of the regions without regions inside.

    Returns:
      The first and the last step of each, and its bytes.
    """
    count = len(forward)
    lives: list[tuple[int, int, int]] = []

    def read(readers: Sequence[int], steps: Sequence[int]) -> None:
        if copy.entry_of is None:
            lives.append((min(steps), max(steps), copy.bytes))
            return
        of_entries: dict[int, list[int]] = {}
        for reader, at in zip(readers, steps, strict=True):
            of_entries.setdefault(copy.entry_of[reader], []).append(at)
        lives.extend((min(some), max(some), copy.entry_bytes) for some in of_entries.values())

    outside: list[int] = []
    for leaf in leaves:
        readers = [vertex for vertex in leaf.tolist() if vertex in copy.readers]
        if not readers:
            continue
        late = [vertex for vertex in readers if vertex in copy.backward]
        depths = [depth for depth, level in enumerate(levels) if level.checkpointed[readers[0]]]
        if depths:
            read(readers, forward[readers].tolist())
        elif copy.entry_of is None:
            outside += [*forward[readers].tolist(), *step[late].tolist()]
        else:
            read([*readers, *late], [*forward[readers].tolist(), *step[late].tolist()])
        for depth in depths:
            again = [vertex for vertex in readers if levels[depth].again[vertex]]
            at = step[[(depth + 1) * count + vertex for vertex in again]].tolist()
            if depth == depths[-1]:
                again, at = [*again, *late], [*at, *step[late].tolist()]
            if again:
                read(again, at)
    if outside:
        lives.append((min(outside), max(outside), copy.bytes))
    first, last, sizes = np.array(lives, dtype=np.int64).T
    return first, last, sizes


def _copies(
    stacks: Stacks, count: int, forward: np.ndarray, step: np.ndarray, levels: Sequence[_Level]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lives of copies of inputs, and of what is carried.

    Args:
      stacks: what is read.
      count: how many vertices there are.
      forward: see ``_Times``.
      step: likewise.
      levels: what runs again.

    Returns:
      The first and the last step of each, and its bytes.
    """

    def read_at(reader: np.ndarray) -> np.ndarray:
        again = [
            step[(depth + 1) * count + reader[level.again[reader]]]
            for depth, level in enumerate(levels)
        ]
        return np.concatenate([step[reader], *again])

    lives = [(0, count - 1, stacks.carried_bytes)]
    for size, readers, at_once in stacks.inputs:
        reader = np.asarray(readers)
        lives += [(at, at, size) for at in forward[reader].tolist()]
        read = read_at(reader)
        lives.append((count if at_once else read.min(), read.max(), size))
    for size, readers in stacks.taken:
        lives.append((count, read_at(np.asarray(readers)).max(), size))
    written = max((step[vertex] for _, vertex in stacks.gradients), default=0)
    lives += [(step[vertex] + 1, written, size) for size, vertex in stacks.gradients]
    for size, readers in () if stacks.library is None else stacks.library.inputs:
        again = read_at(np.asarray(readers))[len(readers) :]
        lives.append((count, again.max(initial=0), size))
    starts, ends, sizes = np.array(lives, dtype=np.int64).T
    there = starts <= ends
    return starts[there], ends[there], sizes[there]


def _is_executable(arrays: GraphArrays, levels: Sequence[_Level], leaves: int) -> bool:
    """Whether each vertex is in a region, and none reads what a later region computes."""
    # Regions that lie equally deep are numbered in their order, so that of two in different nests
    # the later one has the larger number. What is in no region so deep has -1.
    if leaves != len(arrays.bytes) or (levels[0].number < 0).any():
        return False
    read, reader = arrays.forward.read, arrays.forward.reader
    for level in levels:
        numbers = level.number[reader]
        if ((level.number[read] > numbers) & (numbers >= 0)).any():
            return False
    return True


def read_from_memory(graph: Graph, schedule: Schedule) -> list[np.ndarray]:
    """What the regions at each depth read that they do not run again themselves.

    Args:
      graph: what it is a schedule of.
      schedule: must be executable.

    Returns:
      For each depth of nesting, of each vertex whether it is such a value: of a region at that
      depth, or of one beside it in the same nest.
    """
    levels, _ = _levels(graph, schedule)
    return _from_memory(len(graph), levels, _demand(graph, arrays_of(graph), levels))


def _from_memory(
    count: int, levels: Sequence[_Level], demanded: Sequence[_Reads]
) -> list[np.ndarray]:
    found = []
    around = np.zeros(count, dtype=np.int64)
    for level, reads in zip(levels, demanded, strict=True):
        wanted = np.zeros(count, dtype=bool)
        wanted[reads.read[around[reads.reader] == around[reads.read]]] = True
        found.append(wanted)
        around = level.number
    return found


def _levels(graph: Graph, schedule: Schedule) -> tuple[list[_Level], list[np.ndarray]]:
    """The regions of a schedule by depth, and the vertices of those without regions inside."""
    levels: list[_Level] = []
    leaves: list[np.ndarray] = []
    _read_in(len(graph), schedule.regions, 0, levels, leaves)
    return levels, leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reads:
    """Backward reads, one entry each.

    Attributes:
      step: number of what reads: of a backward step that of its vertex; of a vertex that runs
        again at depth d the same, d + 1 times the number of vertices later.
      reader: that vertex.
      read: the vertex whose value is read.
    """

    step: np.ndarray
    reader: np.ndarray
    read: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> _Reads:
        return _Reads(step=self.step[chosen], reader=self.reader[chosen], read=self.read[chosen])


def _joined(parts: Sequence[_Reads]) -> _Reads:
    return _Reads(
        step=np.concatenate([one.step for one in parts]),
        reader=np.concatenate([one.reader for one in parts]),
        read=np.concatenate([one.read for one in parts]),
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class _Level:
    """All regions that lie equally deep, one entry for each vertex.

    Attributes:
      number: of the region the vertex is in, -1 if it is in none that deep.
      kept: whether that region keeps it by name.
      checkpointed: whether that region runs under a checkpoint.
      again: whether it runs again at this depth.
      runs_internal: whether it does so for residuals that have no name.
      local: what reads the copies made here.
      regions: vertices of each region, in the order in which they were read in.
    """

    number: np.ndarray
    kept: np.ndarray
    checkpointed: np.ndarray
    again: np.ndarray
    runs_internal: np.ndarray
    local: _Reads
    regions: list[np.ndarray]


def _read_in(
    count: int,
    regions: Sequence[Region],
    depth: int,
    levels: list[_Level],
    leaves: list[np.ndarray],
) -> None:
    """Writes a chain of regions into its level, and those inside into the next ones."""
    if depth == len(levels):
        nothing = np.zeros(0, dtype=np.int64)
        levels.append(
            _Level(
                number=np.full(count, -1),
                kept=np.zeros(count, dtype=bool),
                checkpointed=np.zeros(count, dtype=bool),
                again=np.zeros(count, dtype=bool),
                runs_internal=np.zeros(count, dtype=bool),
                local=_Reads(step=nothing, reader=nothing, read=nothing),
                regions=[],
            )
        )
    level = levels[depth]
    for region in regions:
        vertices = np.array(region.vertices, dtype=np.int64)
        level.number[vertices] = len(level.regions)
        level.checkpointed[vertices] = region.checkpointed
        level.kept[list(region.kept)] = True
        level.regions.append(vertices)
        if region.inside:
            _read_in(count, region.inside, depth + 1, levels, leaves)
        else:
            leaves.append(vertices)


def _demand(graph: Graph, arrays: GraphArrays, levels: Sequence[_Level]) -> list[_Reads]:
    """Finds what runs again at each level; returns for each the reads that find nothing there."""
    count = len(graph)
    leaf_depth = np.zeros(count, dtype=np.int64)
    for depth, level in enumerate(levels):
        leaf_depth[level.number >= 0] = depth
    internal = arrays.internal_bytes > 0
    found: list[_Reads] = []
    for depth in range(len(levels) - 1, -1, -1):
        level = levels[depth]
        here = leaf_depth == depth
        # A chain inside leaves it to the run of the whole where it has no checkpoint itself.
        runs = here.copy()
        if depth + 1 < len(levels):
            inner = levels[depth + 1]
            runs |= (inner.number >= 0) & ~inner.checkpointed
        level.runs_internal = runs & internal & level.checkpointed
        local_to = np.where(level.checkpointed, level.number, -1)
        can_run = level.checkpointed & ~level.kept

        chosen = here[arrays.backward.reader]
        reader, read = arrays.backward.reader[chosen], arrays.backward.read[chosen]
        reads = _joined([_Reads(step=reader, reader=reader, read=read), *found[-1:]])
        is_local = can_run[reads.read] & (level.number[reads.read] == local_to[reads.reader])
        seeds = level.runs_internal.copy()
        seeds[reads.read[is_local]] = True
        level.again = _spread(graph, seeds, level.number, can_run)

        chosen = level.again[arrays.forward.reader]
        reader, read = arrays.forward.reader[chosen], arrays.forward.read[chosen]
        own = can_run[read] & (level.number[read] == level.number[reader])
        rerun = _Reads(step=(depth + 1) * count + reader, reader=reader, read=read)
        level.local = _joined([reads[is_local], rerun[own]])
        found.append(_joined([reads[~is_local], rerun[~own]]))
    return found[::-1]


def _spread(graph: Graph, seeds: np.ndarray, number: np.ndarray, can_run: np.ndarray) -> np.ndarray:
    """The seeds, and all behind them that must run again for them in their region."""
    again = bytearray(seeds)
    numbers, allowed = number.tolist(), can_run.tolist()
    predecessors = graph.predecessors
    pending = np.flatnonzero(seeds).tolist()
    while pending:
        vertex = pending.pop()
        own = numbers[vertex]
        for read in predecessors[vertex]:
            if allowed[read] and not again[read] and numbers[read] == own:
                again[read] = 1
                pending.append(read)
    return np.frombuffer(again, dtype=bool)


class _Times:
    """Numbers of steps in order of execution.

    Attributes:
      forward: of each vertex's run in the forward pass.
      step: of backward steps and further runs, numbered as ``_Reads.step`` says.
    """

    def __init__(self, count: int, depth: int) -> None:
        self.forward = np.zeros(count, dtype=np.int64)
        self.step = np.zeros((depth + 1) * count, dtype=np.int64)
        self._count = count
        self._next = 0

    def run_forward(self, order: np.ndarray) -> None:
        self.forward[order] = np.arange(self._count)
        self._next = self._count

    def run_backward(self, regions: Sequence[Region], depth: int, levels: Sequence[_Level]) -> None:
        level = levels[depth]
        for region in reversed(regions):
            vertices = level.regions[level.number[region.vertices[0]]]
            if region.checkpointed:
                again = vertices[level.again[vertices]]
                self._run((depth + 1) * self._count + again)
            if region.inside:
                self.run_backward(region.inside, depth + 1, levels)
            else:
                self._run(vertices[::-1])

    def run_late(self, levels: Sequence[_Level]) -> None:
        """Moves further runs to the steps that first read them."""
        readers: dict[int, list[int]] = {}
        for depth, level in enumerate(levels):
            for reader, read in zip(
                level.local.step.tolist(), level.local.read.tolist(), strict=True
            ):
                readers.setdefault((depth + 1) * self._count + read, []).append(reader)
        # What reads something runs after it.
        for own in sorted(readers, key=self.step.__getitem__, reverse=True):
            self.step[own] = min(self.step[reader] for reader in readers[own])

    def _run(self, steps: np.ndarray) -> None:
        self.step[steps] = np.arange(self._next, self._next + len(steps))
        self._next += len(steps)
