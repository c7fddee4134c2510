"""What compilers run earlier or later than the program has it, and hold meanwhile.

XLA for CPU runs everything as soon as it can. So a function starts with what no product leads to:
all rows that are looked up in tables, and all random numbers.

XLA for NVIDIA, of everything that can run, runs what frees most memory, less what it allocates.

*   To the scheduler, an update allocates the parameter and both of Adam's moments anew: it does not
    know that they take the place of donated ones. So an update runs only when everything else would
    allocate even more. Where no activation is as large as that, all gradients wait for the end of
    the program, as with few rows and large weights, or in a mixture of experts.
*   The conversion of a weight can run from the start. So it runs before the first operation that
    allocates more than it, and with it those of all later layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat_opt.compilers.storage import Storage
from remat_opt.compilers.turns import led_to
from remat_opt.gradients import Wait
from remat_opt.operation import PRODUCTS

#: What an update writes, in sizes of the parameter: the parameter, and Adam's two moments.
_WRITTEN = 3


class Updates:
    """When updates run.

    Args:
      storage: what is stored.
      allocated: for each vertex, the bytes that computing it, or its cotangent, allocates.
    """

    def __init__(self, storage: Storage, allocated: Sequence[int]) -> None:
        self._storage = storage
        self._allocated = allocated
        self._read_as = _read_as(storage)

    def wait(self, parameter: int, first: int) -> Wait | None:
        """How long the gradient of a parameter waits; None if not at all.

        Args:
          parameter: a differentiated argument.
          first: the vertex whose backward step completes its gradient.
        """
        if not self._storage.compiler.has("updates_wait"):
            return None
        size = self._storage.bytes_of(parameter)
        narrow = min(self._read_as.get(parameter, size), size)
        more, until = _WRITTEN * size - narrow, first
        while until and self._allocated[until - 1] <= more:
            until -= 1
        return Wait(until=until, bytes=narrow) if until < first else None


def early(storage: Storage, allocated: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Converted arguments that are there before their turn.

    Args:
      storage: what is stored.
      allocated: see ``Updates``.

    Yields:
      For each the first and the last vertex in whose forward steps it is there, and its bytes.
    """
    program = storage.flow.program
    arguments = set(program.arguments)
    for vertex, root in enumerate(storage.roots):
        equation = program.equations[root]
        if (
            equation.operation.primitive == "convert_element_type"
            and arguments.issuperset(equation.value_inputs)
            and storage.compiler.has("conversions_first")
        ):
            for before in range(vertex):
                if allocated[before] > allocated[vertex]:
                    yield before, vertex - 1, allocated[vertex]
                    break


def started(
    storage: Storage, allocated: Sequence[int], predecessors: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int]]:
    """What is there before its turn because the unchanged function starts with it; like ``early``.

    No product leads to it. What only other such vertices read is gone once all of them have run.
    """
    if not storage.compiler.has("starts_first"):
        return
    program = storage.flow.program
    led = led_to(program, PRODUCTS)
    vertices = {
        vertex
        for vertex, root in enumerate(storage.roots)
        if led.isdisjoint(program.equations[root].outputs)
    }
    wait = {
        read
        for vertex, values in enumerate(predecessors)
        for read in values
        if vertex not in vertices
    }
    for vertex in sorted(vertices):
        if vertex and allocated[vertex]:
            yield 0, vertex - 1 if vertex in wait else 0, allocated[vertex]


def _read_as(storage: Storage) -> dict[int, int]:
    """Arguments that are converted before anything else reads them: the bytes of what is read."""
    found: dict[int, int] = {}
    others: set[int] = set()
    program = storage.flow.program
    for equation in program.equations:
        if equation.operation.primitive != "convert_element_type":
            others.update(equation.value_inputs)
            continue
        for value in equation.value_inputs:
            found[value] = storage.bytes_of(equation.outputs[0])
    return {value: size for value, size in found.items() if value not in others}
