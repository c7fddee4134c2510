"""What an iteration of a loop holds of the stacks that it reads (``entries_sliced``).

What the iterations keep for the backward pass waits in stacks, as what a loop goes through does.
XLA for NVIDIA reads an entry where it lies, unless a kernel does that it does not write itself:
for a convolution the entry is copied. That of something kept is copied shortly before it is read;
that of a weight before its first reader, and there up to the last. Products read entries in their
places, with a workspace of the library's, except those that run again (``entries_taken``). Where a
loop is in parts, what they read by index is copied by one kernel, as the backward pass of an
iteration starts. Checkpoints inside an iteration read arrays: all entries that they read are copied
then, whatever reads them. The gradients of entries are put into their stacks together.

XLA orders the steps of an iteration anew. If it takes less, what runs again does so when it is read
(``runs_when_read``).

XLA for TPU reads what is kept where it lies (``entries_in_place``), products too; at least where
all iterations are one loop, which is what was looked at.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Figures
from remat_opt.compilers.model import Model
from remat_opt.device import GpuTarget
from remat_opt.graph import Graph
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Program
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import demand
from remat_opt.spans import Library, Stacks

#: From Hopper on; before, an eighth of it.
_WORKSPACE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What an iteration takes beside the stacks.

    Attributes:
      whole_bytes: in a loop of all iterations.
      part_bytes: in one of some of them.
      alone_bytes: in none, beside what it keeps.
    """

    whole_bytes: int
    part_bytes: int
    alone_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What an iteration reads of stacks.

    Attributes:
      stacks: what is copied.
      copied: the values that are, in this order.
      in_place: likewise of what is read where it lies, by value.
      by_library: likewise of what a library's kernels read there, by value.
      converted: the bytes of gradients that are computed as they are put into their stacks, entry
        by entry, and the vertices in whose backward steps they would be complete.
      maps: the vertices that are maps. The compiler sees through them, and reads their residuals
        where they lie.
    """

    stacks: Stacks
    copied: Sequence[int]
    in_place: Mapping[int, tuple[int, Sequence[int]]]
    by_library: Mapping[int, tuple[int, Sequence[int]]]
    converted: Sequence[tuple[int, int]]
    maps: Sequence[int]

    def under(self, regions: Sequence[Region], taken: Set[int] = frozenset()) -> Stacks:
        """What is copied where an iteration consists of regions.

        Args:
          regions: none, if it is one.
          taken: values to leave out.
        """
        inside = {v for region in regions if region.checkpointed for v in region.vertices}
        if not inside and not taken:
            return self.stacks
        inputs = [
            (size, readers, at_once or not inside.isdisjoint(readers))
            for value, (size, readers, at_once) in zip(self.copied, self.stacks.inputs, strict=True)
            if value not in taken
        ]
        library = self.stacks.library
        if library is not None:
            own = [one for value, one in self.by_library.items() if value not in taken]
            inputs += [(*one, True) for one in own if not inside.isdisjoint(one[1])]
            library = library.without(inside, [one for one in own if inside.isdisjoint(one[1])])
        for value, (size, readers) in self.in_place.items():
            found = tuple(sorted(inside.intersection(readers)))
            if found and value not in taken:
                inputs.append((size, found, True))
        return dataclasses.replace(self.stacks, inputs=inputs, library=library)


def takes_entries(compiler: Compiler) -> bool:
    """Whether products read entries of stacks where they lie."""
    return compiler.has("entries_taken")


def stacks(body: Program, carries: Sequence[int], entries: Sequence[int], expected: Model) -> Read:
    """What an iteration reads of stacks.

    Args:
      body: of the loop.
      carries: its arguments that are carried.
      entries: its arguments that are entries of stacks.
      expected: its model.
    """

    def size(values: Iterable[int]) -> int:
        return sum(expected.compiler.buffer_bytes(body.types[value]) for value in values)

    # What is carried is an array forward, and waits for the backward pass in a stack.
    source = {value: value for value in (*carries, *entries)}
    copying = np.zeros(len(expected.roots), dtype=bool)
    vertex_of = {root: vertex for vertex, root in enumerate(expected.roots)}
    in_library = takes_entries(expected.compiler)
    taking = np.zeros(len(expected.roots), dtype=bool)
    readers: dict[int, list[int]] = {}
    by_library: dict[int, list[int]] = {}
    in_place: dict[int, list[int]] = {}
    for index, equation in enumerate(body.equations):
        read = [source[value] for value in equation.value_inputs if value in source]
        if equation.operation.primitive in ALIASES:
            source.update((value, read[0]) for value in equation.outputs if read)
        elif index in vertex_of and costs.cost(equation.operation).fusion is costs.Fusion.OPAQUE:
            copying[vertex_of[index]] = True
            of_library = in_library and equation.operation.primitive == "dot_general"
            taking[vertex_of[index]] = of_library
            for value in read:
                (by_library if of_library else readers).setdefault(value, []).append(
                    vertex_of[index]
                )
        elif (vertex := bisect.bisect_left(expected.roots, index)) < len(expected.roots):
            for value in read:
                in_place.setdefault(value, []).append(vertex)
    handed_out = {atom for atom in body.outputs[: len(carries)] if isinstance(atom, int)}
    taken = {value: (size([value]), tuple(at)) for value, at in by_library.items()}
    gradients: list[tuple[int, int]] = []
    converted: list[tuple[int, int]] = []
    for value in entries if in_library else ():
        at = {one for group in (readers, by_library, in_place) for one in group.get(value, ())}
        if value in body.differentiated and at:
            first = min(at)
            fused = len(at) == 1 and _converts(body, expected.roots[first], value)
            (converted if fused else gradients).append((size([value]), first))
    found = Stacks(
        library=Library(
            vertices=taking,
            inputs=list(taken.values()),
            forward=sorted({one for v in entries for one in by_library.get(v, ())}),
            workspace_bytes=_workspace_bytes(expected.compiler),
        )
        if in_library
        else None,
        gradients=gradients,
        slicing=copying,
        inputs=[(size([value]), tuple(found), False) for value, found in readers.items()],
        carried_bytes=size(carries),
        handed_out=np.array(
            [not handed_out.isdisjoint(body.equations[root].outputs) for root in expected.roots]
        ),
    )
    own = {v: (size([v]), tuple(at)) for v, at in in_place.items() if v not in readers}
    return Read(
        stacks=found,
        copied=tuple(readers),
        in_place=own,
        by_library=taken,
        converted=converted,
        maps=[
            vertex
            for vertex, root in enumerate(expected.roots)
            if body.equations[root].operation.primitive == "shard_map"
        ],
    )


def _converts(body: Program, root: int, value: int) -> bool:
    """Whether an equation computes an array from another, entry by entry."""
    operation = body.equations[root].operation
    return (
        costs.cost(operation).fusion is costs.Fusion.FUSIBLE
        and operation.outputs[0].shape == body.types[value].shape
    )


def _workspace_bytes(compiler: Compiler) -> int:
    """What a kernel of the library for products takes if it reads or writes a stack."""
    target = compiler.device.target
    older = isinstance(target, GpuTarget) and target.compute_capability < (9, 0)
    return _WORKSPACE_BYTES // 8 if older else _WORKSPACE_BYTES


def beside_stacks(
    expected: Model, schedule: Schedule, read: Read, chain: Sequence[Region]
) -> Beside:
    """What the backward pass of an iteration takes beside the stacks.

    Args:
      expected: the model of the body.
      schedule: what it keeps, and how it runs again.
      read: what it reads of stacks.
      chain: the regions in which it runs again, if not as it is.
    """
    graph = expected.graph_of(schedule)
    if not expected.compiler.has("entries_sliced"):
        # All is taken to be copied, and what is kept to be there both in the stack and beside it,
        # unless it is known to be read there.
        peak_bytes = expected.peak_bytes(schedule)
        whole_bytes = in_loop = peak_bytes + read.stacks.carried_bytes
        if expected.compiler.has("entries_in_place"):
            in_place = dataclasses.replace(
                read.stacks, slicing=np.zeros(len(graph), dtype=bool), inputs=[]
            )
            lives = expected.lives(graph, schedule, in_place)
            in_place_bytes = expected.laid_out_bytes(lives, schedule)
            whole_bytes = min(in_loop, in_place_bytes + read.stacks.carried_bytes)
        return Beside(whole_bytes=whole_bytes, part_bytes=in_loop, alone_bytes=peak_bytes)
    graph = _without(expected, graph, read.converted)
    graph = _without_residuals(graph, schedule, read.maps)
    whole = read.under(chain)
    at_once = [(size, readers, True) for size, readers, _ in whole.inputs]
    if (library := whole.library) is not None:
        # There they are read by index, under the checkpoint.
        at_once += [(size, readers, True) for size, readers in library.inputs]
        library = dataclasses.replace(library, inputs=())
    in_part = dataclasses.replace(whole, inputs=at_once, library=library)
    # Others are in loops, and need the library's workspace.
    alone = dataclasses.replace(in_part, slicing=None, carried_bytes=0)
    laid_out_bytes = functools.partial(_laid_out_bytes, expected, graph, schedule)
    # An iteration alone has no stacks: what is kept waits as arrays.
    kept_bytes = sum(graph.bytes[vertex] for vertex in demand(graph, schedule).stored)
    whole_bytes = laid_out_bytes(whole)
    return Beside(
        whole_bytes=whole_bytes,
        part_bytes=whole_bytes if at_once == whole.inputs else laid_out_bytes(in_part),
        alone_bytes=max(0, laid_out_bytes(alone) - kept_bytes),
    )


def _laid_out_bytes(expected: Model, graph: Graph, schedule: Schedule, read: Stacks) -> int:
    """What the backward pass of an iteration takes that reads this of stacks."""
    lives = expected.lives(graph, schedule, read)
    if expected.compiler.has("runs_when_read"):
        late = expected.lives(graph, schedule, dataclasses.replace(read, late=True))
        lives = min(lives, late, key=lambda one: one.peak_bytes)
    return expected.laid_out_bytes(lives, schedule)


def _without(expected: Model, graph: Graph, gradients: Sequence[tuple[int, int]]) -> Graph:
    """The graph, in which gradients of so many bytes are no arrays in these backward steps."""
    figures = Figures.of(graph)
    for size, vertex in gradients:
        figures.workspace_bytes[vertex] -= min(size, expected.gradient_bytes[vertex])
    return figures.put_into(graph)


def _without_residuals(graph: Graph, schedule: Schedule, maps: Sequence[int]) -> Graph:
    """The graph, in which the residuals of maps that lie in stacks are not counted."""
    in_stacks = set(maps).intersection(schedule.under_none())
    if not in_stacks:
        return graph
    figures = Figures.of(graph)
    for vertex in in_stacks:
        figures.internal_bytes[vertex] = 0
    return figures.put_into(graph)


def as_written_bytes(
    body: Program,
    carries: Sequence[int],
    entries: Sequence[int],
    expected: Model,
    schedule: Schedule,
    *,
    reads_copies: bool = False,
) -> int:
    """What the backward pass of an iteration takes beside what is kept if nothing is rewritten.

    Where products read entries where they lie (``takes_entries``).

    Args:
      body: of the loop.
      carries: see ``stacks``.
      entries: likewise.
      expected: its model, as it is.
      schedule: what it keeps, and runs again, by a checkpoint of its own.
      reads_copies: whether a barrier is before what runs again.
    """
    read = stacks(body, carries, entries, expected)
    # Gradients of entries are written where they belong.
    graph = expected.graph_of(schedule)
    graph = _without(expected, graph, [*read.stacks.gradients, *read.converted])
    graph = _without_residuals(graph, schedule, read.maps)
    found = dataclasses.replace(read.stacks, gradients=())
    if found.library is not None and not reads_copies:
        in_place = [(0, readers) for _, readers in found.library.inputs]
        found = dataclasses.replace(
            found, library=dataclasses.replace(found.library, inputs=in_place)
        )
    return _laid_out_bytes(expected, graph, schedule, found)


def in_gradients_bytes(
    expected: Model, schedule: Schedule, read: Read, kept: Mapping[int, int], carried: Set[int]
) -> int:
    """What the backward pass of an iteration takes if what it keeps waits in gradients' stacks.

    Args:
      expected: the model of the body.
      schedule: what it keeps, and how it runs again.
      read: what it reads of stacks.
      kept: the bytes that wait there of what vertices compute, by vertex.
      carried: the values that are carried, and wait there.
    """
    graph = expected.graph_of(schedule)
    if not expected.compiler.has("entries_sliced"):
        return expected.peak_bytes(schedule) + read.stacks.carried_bytes
    graph = _without(expected, graph, read.converted)
    (region,) = schedule.regions
    if region.inside:  # whose checkpoints read arrays
        kept = {vertex: graph.bytes[vertex] for vertex in demand(graph, schedule).stored}
    read_by: dict[int, list[int]] = {vertex: [] for vertex in kept}
    for reader in range(len(graph)):
        for vertex in read_by.keys() & {*graph.needs[reader], *graph.predecessors[reader]}:
            read_by[vertex].append(reader)
    taken: list[tuple[int, Sequence[int]]] = []
    taken += [(size, at) for vertex, size in kept.items() if (at := read_by[vertex])]
    by_copy = zip(read.copied, read.stacks.inputs, strict=True)
    taken += [(size, at) for value, (size, at, _) in by_copy if value in carried]
    for group in (read.in_place, read.by_library):
        taken += [one for value, one in group.items() if value in carried]
    waiting = np.zeros(len(graph), dtype=bool)
    waiting[list(kept)] = True
    left = read.under(region.inside, carried)
    found = dataclasses.replace(
        left,
        inputs=[(size, at, True) for size, at, _ in left.inputs],
        taken=taken,
        in_gradients=waiting,
    )
    return _laid_out_bytes(expected, graph, schedule, found)


def counted_around_bytes(carried_bytes: int, cotangent_bytes: int, compiler: Compiler) -> int:
    """What of a loop's cotangents is counted both in its iterations and around it.

    It is what the backward pass starts from, and hands from iteration to iteration in its place.

    Args:
      carried_bytes: of the cotangents that are handed on.
      cotangent_bytes: of what the loop puts out.
      compiler: which one it is.
    """
    return min(carried_bytes, cotangent_bytes) if compiler.has("entries_sliced") else 0
