"""What an iteration of a loop holds of the stacks that it reads (``entries_sliced``).

What the iterations keep for the backward pass waits in stacks, as what a loop goes through does.
XLA for NVIDIA reads an entry where it lies, unless a kernel does that it does not write itself:
for a product the entry is copied. That of something kept is copied shortly before it is read; that
of a weight before its first reader, and there up to the last. Where a loop is in parts, what they
read by index is copied by one kernel, as the backward pass of an iteration starts. Checkpoints
inside an iteration read arrays: all entries that they read are copied then, whatever reads them.

XLA for TPU reads what is kept where it lies (``entries_in_place``), products too; at least where
all iterations are one loop, which is what was looked at.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.model import Model
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Program
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import demand
from remat_opt.spans import Stacks


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
    """

    stacks: Stacks
    copied: Sequence[int]
    in_place: Mapping[int, tuple[int, Sequence[int]]]

    def under(self, regions: Sequence[Region]) -> Stacks:
        """What is copied where an iteration consists of regions."""
        inside = {v for region in regions if region.checkpointed for v in region.vertices}
        if not inside:
            return self.stacks
        inputs = [
            (size, readers, not inside.isdisjoint(readers))
            for size, readers, _ in self.stacks.inputs
        ]
        for size, readers in self.in_place.values():
            if found := tuple(sorted(inside.intersection(readers))):
                inputs.append((size, found, True))
        return dataclasses.replace(self.stacks, inputs=inputs)


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
    readers: dict[int, list[int]] = {}
    in_place: dict[int, list[int]] = {}
    for index, equation in enumerate(body.equations):
        read = [source[value] for value in equation.value_inputs if value in source]
        if equation.operation.primitive in ALIASES:
            source.update((value, read[0]) for value in equation.outputs if read)
        elif index in vertex_of and costs.cost(equation.operation).fusion is costs.Fusion.OPAQUE:
            copying[vertex_of[index]] = True
            for value in read:
                readers.setdefault(value, []).append(vertex_of[index])
        elif (vertex := bisect.bisect_left(expected.roots, index)) < len(expected.roots):
            for value in read:
                in_place.setdefault(value, []).append(vertex)
    handed_out = {atom for atom in body.outputs[: len(carries)] if isinstance(atom, int)}
    found = Stacks(
        slicing=copying,
        inputs=[(size([value]), tuple(found), False) for value, found in readers.items()],
        carried_bytes=size(carries),
        handed_out=np.array(
            [not handed_out.isdisjoint(body.equations[root].outputs) for root in expected.roots]
        ),
    )
    own = {v: (size([v]), tuple(at)) for v, at in in_place.items() if v not in readers}
    return Read(stacks=found, copied=tuple(readers), in_place=own)


def beside_stacks(expected: Model, schedule: Schedule, read: Read) -> Beside:
    """What the backward pass of an iteration takes beside the stacks.

    Args:
      expected: the model of the body.
      schedule: what it keeps, and how it runs again.
      read: what it reads of stacks.
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
    (region,) = schedule.regions
    whole = read.under(region.inside)
    at_once = [(size, readers, True) for size, readers, _ in whole.inputs]
    in_part = dataclasses.replace(whole, inputs=at_once)
    alone = dataclasses.replace(in_part, slicing=None, carried_bytes=0)

    def laid_out_bytes(stacks: Stacks) -> int:
        return expected.laid_out_bytes(expected.lives(graph, schedule, stacks), schedule)

    # An iteration alone has no stacks: what is kept waits as arrays.
    kept_bytes = sum(graph.bytes[vertex] for vertex in demand(graph, schedule).stored)
    whole_bytes = laid_out_bytes(whole)
    return Beside(
        whole_bytes=whole_bytes,
        part_bytes=whole_bytes if at_once == whole.inputs else laid_out_bytes(in_part),
        alone_bytes=max(0, laid_out_bytes(alone) - kept_bytes),
    )


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
    (region,) = schedule.regions
    if region.inside:  # whose checkpoints read arrays
        kept = {vertex: graph.bytes[vertex] for vertex in demand(graph, schedule).stored}
    read_by: dict[int, list[int]] = {vertex: [] for vertex in kept}
    for reader in range(len(graph)):
        for vertex in read_by.keys() & {*graph.needs[reader], *graph.predecessors[reader]}:
            read_by[vertex].append(reader)
    taken: list[tuple[int, Sequence[int]]] = []
    inputs: list[tuple[int, Sequence[int]]] = []
    taken += [(size, at) for vertex, size in kept.items() if (at := read_by[vertex])]
    for value, (size, by, _) in zip(read.copied, read.stacks.inputs, strict=True):
        (taken if value in carried else inputs).append((size, by))
    taken += [one for value, one in read.in_place.items() if value in carried]
    waiting = np.zeros(len(graph), dtype=bool)
    waiting[list(kept)] = True
    found = dataclasses.replace(
        read.under(region.inside),
        inputs=[(size, at, True) for size, at in inputs],
        taken=taken,
        in_gradients=waiting,
    )
    return expected.laid_out_bytes(expected.lives(graph, schedule, found), schedule)


def counted_around_bytes(carried_bytes: int, cotangent_bytes: int, compiler: Compiler) -> int:
    """What of a loop's cotangents is counted both in its iterations and around it.

    It is what the backward pass starts from, and hands from iteration to iteration in its place.

    Args:
      carried_bytes: of the cotangents that are handed on.
      cotangent_bytes: of what the loop puts out.
      compiler: which one it is.
    """
    return min(carried_bytes, cotangent_bytes) if compiler.has("entries_sliced") else 0
