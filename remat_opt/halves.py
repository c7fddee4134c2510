"""Stored values in halves: they leave no holes, and fit where gradients will be.

XLA for TPU writes some values straight to the heap, above what they are made of, and others by way
of vector memory, from where they are copied once that is gone (``heap``). Which, cannot be known.
Attention's values lie above scores in one plan of a GPT and not in the next: 1,231 and 1,152 MiB
are predicted, and 1,616 and 1,157 are what they take. The halves of a value are copied from it when
it is there. In halves the first of these plans takes 1,234.

Up to JAX 0.11.0 it also puts temporaries into the buffers of results that are not written yet, the
largest first, each where it fits whole. The gradients of a transformer's weights are such results,
and free all through the forward pass. What a layer hands to the next is often twice as large as any
of them, so none of it goes there; in halves it does: a GPT of 12 layers with a checkpoint round
each takes 1,270 MiB on a v5e, with halves 1,082. Where the gradients are no results, since the same
program updates donated parameters with them, nothing of this is won or lost: four of our plans of
that GPT took 1,268 to 2,584 MiB with halves, and 0.995 to 1.006 times that without.

Problem. Which of the stored values to halve: those that no backward step outside of checkpoints
reads, which would keep the whole; and how much of them the heap is rid of.

Method. All that fit some buffer are halved, and all that may be copied from vector memory. Of these
the one whose last reader comes latest is placed first, in the two smallest buffers that fit and are
written later still. All stored values are there when the forward pass ends, so a buffer takes one
half.

Why not a ready-made tool: a general matching of values to buffers would do; since what is free for
one value is free for all that are read for the last time earlier, this order is enough.

Guarantee: as many are placed as can be, where all buffers fit all halves.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from remat_opt.device import Device
from remat_opt.graph import Graph
from remat_opt.operation import ArrayType
from remat_opt.program import Program
from remat_opt.schedule import Schedule
from remat_opt.spans import Spans

#: Values are cut along this axis. The first is the batch, over which devices may be sharded.
AXIS = 1
#: A TPU's tile is at most so high, in elements of at least 8 bits.
_TILE = 32
#: What takes less than this share of all that is alive at once is not worth it.
_SMALL_SHARE = 1 / 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The buffer of a gradient.

    Attributes:
      bytes: its size.
      vertex: the one whose backward step may be the first to write it.
    """

    bytes: int
    vertex: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """What of a program's values can be stored in halves, and where, if not on the heap.

    Attributes:
      buffers: of gradients, by ascending size; none where only the heap holds halves.
      divisible: the vertices whose values can be cut.
    """

    buffers: tuple[Room, ...] = ()
    divisible: frozenset[int] = frozenset()

    def worth_halving(
        self, graph: Graph, schedule: Schedule, lives: Spans, copied_bytes: int
    ) -> tuple[int, ...]:
        """The vertices to store in halves, ascending; none of them may find room.

        Args:
          graph: what the schedule is one of.
          schedule: must be executable.
          lives: of the arrays of the schedule.
          copied_bytes: the most that is copied to the heap from vector memory.
        """
        if not self.divisible:
            return ()
        whole = {
            read
            for region in schedule.regions
            if not region.checkpointed
            for vertex in region.vertices
            for read in graph.needs[vertex]
        }
        least = lives.peak_bytes * _SMALL_SHARE
        most = max([copied_bytes, *(2 * room.bytes for room in self.buffers)])
        stored = np.flatnonzero(lives.last[: len(graph)] > lives.forward_last)
        return tuple(
            vertex
            for vertex in stored.tolist()
            if least <= graph.bytes[vertex] <= most
            and vertex in self.divisible
            and vertex not in whole
        )

    def without_placed(self, graph: Graph, lives: Spans, vertices: Iterable[int]) -> Spans:
        """The lives of what is left on the heap when these vertices are stored in halves.

        Of what finds room elsewhere that is the value in the forward pass, and the value put
        together again where the backward pass reads it. ``lives`` itself if nothing finds room.
        """
        chosen = np.array(self._placed(graph, lives, vertices), dtype=np.int64)
        if not len(chosen):
            return lives
        first_read = lives.last[: len(graph)].copy()
        np.minimum.at(first_read, lives.stored_reads, lives.stored_read_steps)
        last = lives.last.copy()
        last[chosen] = lives.forward_last[chosen]
        return dataclasses.replace(
            lives,
            first=np.concatenate([lives.first, first_read[chosen]]),
            last=np.concatenate([last, lives.last[chosen]]),
            bytes=np.concatenate([lives.bytes, lives.bytes[chosen]]),
        )

    def _placed(self, graph: Graph, lives: Spans, vertices: Iterable[int]) -> list[int]:
        free = list(self.buffers)
        found = []
        for vertex in sorted(vertices, key=lambda one: -lives.last[one]):
            fitting = [
                room
                for room in free
                if 2 * room.bytes >= graph.bytes[vertex]
                and lives.turns[room.vertex] > lives.last[vertex]
            ]
            if len(fitting) > 1:
                found.append(vertex)
                free.remove(fitting[0])
                free.remove(fitting[1])
        return sorted(found)


def rooms_of(program: Program, roots: Sequence[int], device: Device, *, in_results: bool) -> Rooms:
    """The rooms of a program.

    Args:
      program: a traced function.
      roots: for each vertex its equation, ascending.
      device: whose compiler it is.
      in_results: whether results hold temporaries before they are written.
    """
    last_reader: dict[int, int] = {}
    for index, equation in enumerate(program.equations):
        last_reader.update(dict.fromkeys(equation.value_inputs, index))
    buffers = [
        Room(
            bytes=device.buffer_bytes(program.types[value]),
            vertex=min(bisect.bisect_left(roots, last_reader[value]), len(roots) - 1),
        )
        for value in program.differentiated
        if in_results and value in last_reader
    ]
    # What the program puts out is there as a whole in any case.
    put_out = frozenset(program.output_values)
    return Rooms(
        buffers=tuple(sorted(buffers, key=lambda room: room.bytes)),
        divisible=frozenset(
            vertex
            for vertex, root in enumerate(roots)
            if can_be_halved(program, root) and put_out.isdisjoint(program.equations[root].outputs)
        ),
    )


def can_be_halved(program: Program, root: int) -> bool:
    """Whether all that an equation makes can be cut."""
    return all(_is_divisible(program.types[one]) for one in program.equations[root].outputs)


def _is_divisible(kind: ArrayType) -> bool:
    # The last two axes of an array may be in tiles, which stay whole.
    unit = 2 if len(kind.shape) > 3 else 2 * _TILE
    return (
        len(kind.shape) > 2
        and kind.shape[AXIS] % unit == 0
        and not str(kind.dtype).startswith("complex")
    )


def halved(schedule: Schedule, vertices: Iterable[int]) -> Schedule:
    """The schedule with the values of these vertices stored in halves, and no others."""
    chosen = frozenset(vertices)
    return Schedule(
        regions=tuple(
            dataclasses.replace(region, halved=tuple(v for v in region.vertices if v in chosen))
            for region in schedule.regions
        )
    )
