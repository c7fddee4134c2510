"""The bytes that it moves to compute a vertex again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from remat_opt import costs
from remat_opt.compilers.storage import Storage

#: What it takes to compute a value on the way, as a share of writing it. It breaks ties: a value
#: that would cost nothing is still kept where dropping it saves no memory.
_ON_THE_WAY = 0.01


class Traffic:
    """What each vertex reads and writes where it is computed again.

    An elementwise value is an array there only if something else than elementwise operations reads
    it, in either pass, or if what it is computed from is larger than itself. Otherwise whatever
    reads it computes it on the way, and reads what is behind it instead. An example is the ``tanh``
    of a GELU: the backward pass has it from the GELU's operand, which it reads anyway.

    Args:
      storage: what is stored.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._written = set(_written(storage))
        #: For each value that is no array, the arrays behind it.
        self._behind: dict[int, frozenset[int]] = {}

    def moved_bytes(self, held: Sequence[int], read: Set[int]) -> float:
        """The bytes of a vertex; to be asked for in the program's order.

        Args:
          held: its values.
          read: the values that it reads if all of them are arrays.
        """
        arrays = frozenset[int]().union(
            *(self._behind.get(value, frozenset({value})) for value in read)
        )
        if self._bytes(arrays) <= self._bytes(held) and self._written.isdisjoint(held):
            self._behind |= dict.fromkeys(held, arrays)
            return _ON_THE_WAY * self._bytes(held)
        return self._bytes(arrays.union(held))

    def _bytes(self, values: Sequence[int] | Set[int]) -> int:
        return sum(map(self._storage.bytes_of, values))


def _written(storage: Storage) -> Iterator[int]:
    """The values that are arrays whenever they are computed."""
    flow = storage.flow
    for index, equation in enumerate(flow.program.equations):
        if flow.costs[index].fusion is costs.Fusion.FUSIBLE and not equation.effects:
            continue
        yield from equation.outputs
        if not storage.computes_operands(index):
            yield from flow.reads(index)
            yield from flow.derivative_reads(index)
    yield from storage.outputs
