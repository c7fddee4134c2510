"""Copies that a TPU makes: to and from its vector memory, and into another order of dimensions.

What its kernels read and write is copied before or after they run. Each copy has a signal, which
stays in the device's memory while the program runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from remat_opt.compilers import operands, softmax
from remat_opt.compilers.effects import Effect
from remat_opt.compilers.storage import Storage
from remat_opt.graph import Graph
from remat_opt.operation import Operation
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import demand

#: The bytes of one copy's signal, and the number of copies for each product computed, including
#: everything between products: 3 in an LSTM, whose arrays are small, 5 to 9 in a GPT and in
#: ViT-B/16.
_SIGNAL_BYTES, _COPIES_OF_A_PRODUCT = 16 * 1024, 4
#: A product whose arrays are all smaller than this is assumed to need no copies: they stay in
#: vector memory. (This was seen in programs that fit it entirely.)
_COPIED_BYTES = 2**20


def copied_for(product: Operation) -> bool:
    """Whether arrays of a product are copied to vector memory and back."""
    return any(kind.bytes >= _COPIED_BYTES for kind in (*product.inputs, *product.outputs))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Effect):
    """The signals of the forward pass, two gradients for each product, and everything run again.

    Attributes:
      products: for each vertex, how many products it computes whose arrays are copied.
    """

    products: tuple[int, ...]

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """The signals' bytes."""
        again = demand(graph, schedule).all_recomputed()
        count = 3 * sum(self.products) + sum(self.products[vertex] for vertex in again)
        return _SIGNAL_BYTES * _COPIES_OF_A_PRODUCT * count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandedOn(Effect):
    """Scores of a softmax that one region hands on to another.

    Within a region, a product writes them in the order that the softmax reads. Behind a barrier
    they are in the order of the program, and copied into the other one; small arrays that come to
    lie between split the memory that the first leaves.

    Attributes:
      bytes: by vertex.
      readers: for each of these vertices, those that read it.
    """

    bytes: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Bytes of the largest that is copied."""
        if schedule.unchanged:
            return 0
        place = dict(_places(schedule.regions))
        copied = (
            size
            for vertex, size in self.bytes.items()
            if any(place[reader] != place[vertex] for reader in self.readers[vertex])
        )
        return max(copied, default=0)


def handed_on(storage: Storage, readers: Sequence[Sequence[int]]) -> Iterator[HandedOn]:
    """The scores that batched products write.

    Args:
      storage: what is stored.
      readers: for each vertex, those that read it.
    """
    if not storage.compiler.has("scores_copied"):
        return
    program = storage.flow.program
    found = {}
    for value in softmax.scores(program):
        equation = program.equations[storage.flow.maker[value]]
        if operands.is_batched(equation.operation) and value in storage.vertex_of:
            found[storage.vertex_of[value]] = storage.bytes_of(value)
    if found:
        yield HandedOn(bytes=found, readers={vertex: readers[vertex] for vertex in found})


def _places(
    regions: Sequence[Region], path: tuple[int, ...] = ()
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each vertex with its innermost region."""
    for number, region in enumerate(regions):
        place = (*path, number)
        if region.inside:
            yield from _places(region.inside, place)
        else:
            yield from ((vertex, place) for vertex in region.vertices)
