"""What no cotangent is written over.

An elementwise backward step writes over the cotangent that it starts from, except one that the
library's product of matrices wrote: XLA for NVIDIA gets that together with the product's workspace,
and looks for no successor of one of two. Nor is the product's own value written over, which for
logits means that they and their cotangent are alive together. (An activation between two layers of
1,024 and 4,096 with 4,096 rows takes 192 MiB on h200 for ``silu`` and ``sin``, three arrays.)

A ``tanh``, whose derivative reads its result, is written over instead. (In the same place, it takes
128 MiB.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from remat_opt import costs
from remat_opt.compilers.cotangents import Cotangents, readers_of
from remat_opt.compilers.storage import Storage


def written_by_products(
    storage: Storage, predecessors: Sequence[tuple[int, ...]], active: Sequence[Sequence[int]]
) -> Iterator[int]:
    """The vertices whose cotangent one product writes, alone, and nothing may be written over.

    Args:
      storage: what is stored.
      predecessors: for each vertex, those that it reads.
      active: for each vertex, its values that have a cotangent.
    """
    if not storage.compiler.has("products_stay"):
        return
    equations = storage.flow.program.equations
    for vertex, readers in enumerate(readers_of(predecessors)):
        reading = [reader for reader in readers if active[reader]]
        if len(reading) == 1:
            reader = equations[storage.roots[reading[0]]]
            if reader.operation.primitive == "dot_general":
                yield vertex


def over_values(
    storage: Storage,
    written_by_products: Collection[int],
    needs: Sequence[Collection[int]],
    sizes: Sequence[int],
    found: Cotangents,
) -> Iterator[tuple[int, int]]:
    """Elementwise vertices whose value the next cotangent is written over, and what that takes.

    Args:
      storage: what is stored.
      written_by_products: the vertices whose cotangent nothing may be written over.
      needs: for each vertex, those that its backward step reads.
      sizes: for each vertex, the bytes of its value.
      found: the cotangents.
    """
    flow = storage.flow
    for vertex in written_by_products:
        root = storage.roots[vertex]
        if (
            flow.costs[root].fusion is costs.Fusion.FUSIBLE
            and set(needs[vertex]) == {vertex}
            and sizes[vertex] == found.bytes[vertex]
        ):
            yield vertex, sizes[vertex]
