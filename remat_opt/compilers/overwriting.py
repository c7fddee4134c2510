"""What no cotangent is written over.

An elementwise backward step writes over the cotangent that it starts from, except one that the
library's product of matrices wrote: XLA for NVIDIA gets that together with the product's workspace,
and looks for no successor of one of two. If several products read a value, the last one to run adds
what the others made of its cotangent. Nor is the product's own value written over, which for
logits means that they and their cotangent are alive together. (An activation between two layers of
1,024 and 4,096 with 4,096 rows takes 192 MiB on h200 for ``silu`` and ``sin``, three arrays.)

A ``tanh``, whose derivative reads its result, is written over instead. (In the same place, it takes
128 MiB.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from remat_opt import costs
from remat_opt.compilers.cotangents import Cotangents, readers_of
from remat_opt.compilers.storage import Storage


def written_by_products(
    storage: Storage, predecessors: Sequence[tuple[int, ...]], active: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Sequence[int]]]:
    """The vertices whose cotangent products write, alone, and nothing may be written over.

    Args:
      storage: what is stored.
      predecessors: for each vertex, those that it reads.
      active: for each vertex, its values that have a cotangent.

    Yields:
      Such a vertex, and the products that read it, ascending.
    """
    if not storage.compiler.has("products_stay"):
        return
    equations = storage.flow.program.equations
    for vertex, readers in enumerate(readers_of(predecessors)):
        reading = [reader for reader in readers if active[reader]]
        products = [equations[storage.roots[reader]].operation.primitive for reader in reading]
        if reading and set(products) == {"dot_general"}:
            yield vertex, reading


def added_apart(
    written_by_products: Mapping[int, Sequence[int]], sizes: Sequence[int]
) -> dict[int, int]:
    """What is held beside backward steps if nothing is rewritten, in bytes.

    Of more than two products that read a value, the last to run adds nothing: the sum of the others
    is there beside what it writes, until a third array takes both.

    Args:
      written_by_products: see there.
      sizes: for each vertex, the bytes of its cotangent.
    """
    found: Counter[int] = Counter()
    for vertex, readers in written_by_products.items():
        if len(readers) > 2:
            found.update({readers[0]: sizes[vertex], vertex: sizes[vertex]})
    return dict(found)


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
