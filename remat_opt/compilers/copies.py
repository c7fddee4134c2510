"""The signals of the copies that a TPU makes to and from its vector memory.

What its kernels read and write is copied before or after they run. Each copy has a signal, which
stays in the device's memory while the program runs.
"""

from __future__ import annotations

import dataclasses

from remat_opt.compilers.effects import Effect
from remat_opt.graph import Graph
from remat_opt.operation import Operation
from remat_opt.schedule import Schedule
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
