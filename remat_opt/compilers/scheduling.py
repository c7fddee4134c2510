"""What compilers run earlier or later than the program has it, and hold meanwhile.

On a mesh, all of them let updates wait for the end whose gradients devices add up: XLA for NVIDIA
reads such a sum as late as possible, so that it can be computed beside other things, and those for
TPU and CPU compute many of them at once.

XLA for CPU runs everything as soon as it can. So a function starts with what no product leads to:
all rows that are looked up in tables, and all random numbers.

XLA for NVIDIA and for TPU, of everything that can run, run what frees most memory, less what it
allocates.

*   To the scheduler, an update allocates the parameter and both of Adam's moments anew: it does not
    know that they take the place of donated ones. So an update runs only when everything else would
    allocate even more. Where no activation is as large as that, all of them wait for the end of the
    program, as with few rows and large weights, or in a mixture of experts.
*   On NVIDIA gradients wait. On TPU an update computes its gradient itself, so everything waits
    that the gradient is computed from, which may be far more. There it is not always so, and cannot
    be predicted; a plan warns (``PutOff``). Told to keep to the program's order (``IN_ORDER``), XLA
    runs each update in its turn.
*   On NVIDIA, the conversion of a weight can run from the start. So it runs before the first
    operation that allocates more than it, and with it those of all later layers. So are the zeros
    made that looked-up rows are added to for the gradient of a table: where its words' logits come
    from another weight, most of a step has an array as large as the table.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from remat_opt.compilers import lookups
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.cotangents import Cotangents
from remat_opt.compilers.effects import Effect
from remat_opt.compilers.heap import vector_memory_bytes
from remat_opt.compilers.rules import IN_ORDER
from remat_opt.compilers.storage import Storage
from remat_opt.compilers.turns import led_to
from remat_opt.gradients import Gradients, Wait, workspace_bytes
from remat_opt.graph import Graph
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Program
from remat_opt.schedule import Schedule
from remat_opt.units import format_bytes

#: What an update writes, in sizes of the parameter: the parameter, and Adam's two moments.
_WRITTEN = 3
#: Updates that are put off matter if more waits than this share of what the forward pass computes.
#: (On v5e, 0.8 to 1.6 in own programs whose plans compile to up to three times what is predicted,
#: and at most 0.2 in others.)
_MATTERS = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update of a parameter, as the scheduler sees it.

    Attributes:
      ready: the vertex after whose backward step it can run.
      allocated_bytes: what it writes.
      reads: the arrays that it reads, by any names.
    """

    ready: int
    allocated_bytes: int
    reads: frozenset[Hashable]


def added_up(program: Program, compiler: Compiler) -> Mapping[int, int]:
    """The parameters whose updates wait because devices add up their gradients (``sums_wait``).

    Returns:
      For each, the value whose cotangent is added.
    """
    return program.added_up if compiler.has("sums_wait") else {}


def waits(
    updates: Iterable[Update],
    arrays: Mapping[Hashable, tuple[int, int]],
    allocated: Sequence[int],
) -> Iterator[Wait]:
    """What waits for updates: a replay of the scheduler.

    Args:
      updates: those of all parameters.
      arrays: for each array that they read, its bytes and the vertex in whose backward step it is
        read last by anything else.
      allocated: for each vertex, the bytes that its backward step allocates.
    """
    given = tuple(updates)
    readers = Counter(name for one in given for name in one.reads)
    reading: dict[Hashable, list[int]] = {}
    ready: dict[int, list[int]] = {}
    for number, one in enumerate(given):
        ready.setdefault(one.ready, []).append(number)
        for name in one.reads:
            reading.setdefault(name, []).append(number)
    # By what each allocates, less what it frees, and of equals in the order in which they come. Of
    # an update that frees more by now there are two entries, of which the first counts.
    waiting: list[tuple[int, int, int]] = []
    position: dict[int, int] = {}
    serial = itertools.count()

    def put(number: int) -> None:
        one = given[number]
        more = one.allocated_bytes - sum(arrays[n][0] for n in one.reads if readers[n] == 1)
        heapq.heappush(waiting, (more, position[number], number))

    for vertex in reversed(range(-1, len(allocated))):
        while waiting and (vertex < 0 or waiting[0][0] < allocated[vertex]):
            number = heapq.heappop(waiting)[2]
            if position.pop(number, None) is None:
                continue
            readers.subtract(given[number].reads)
            for name in given[number].reads:
                size, last = arrays[name]
                if not readers[name] and vertex + 1 < last:
                    yield Wait(first=vertex + 1, last=last - 1, bytes=size)
                if readers[name] == 1:
                    # The one that is left frees it.
                    for other in position.keys() & reading[name]:
                        put(other)
        for number in ready.get(vertex, ()):
            position[number] = next(serial)
            put(number)


def gradients_wait(
    storage: Storage, ready: Mapping[int, int], allocated: Sequence[int]
) -> Iterator[Wait]:
    """The gradients that wait for updates.

    Args:
      storage: what is stored.
      ready: for each differentiated argument, the vertex whose backward step completes its
        gradient.
      allocated: for each vertex, the bytes that computing it allocates.
    """
    if not storage.compiler.has("updates_wait"):
        return
    read_as = _read_as(storage)
    updates: list[Update] = []
    arrays: dict[Hashable, tuple[int, int]] = {}
    for argument, vertex in ready.items():
        size = storage.bytes_of(argument)
        arrays[argument] = min(read_as.get(argument, size), size), vertex
        updates.append(
            Update(ready=vertex, allocated_bytes=_WRITTEN * size, reads=frozenset({argument}))
        )
    yield from waits(updates, arrays, allocated)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PutOff(Effect):
    """Updates that XLA for TPU may put off, with all that their gradients are computed from.

    Attributes:
      bytes: the most that waits at once if all are put off.
    """

    bytes: int

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """Why, how much, and what helps."""
        yield (
            "The updates of this program's parameters write more than what their gradients are "
            "computed from: there are few rows for the size of the weights. XLA for TPU then puts "
            f"updates off, and up to {format_bytes(self.bytes)} may wait for them, with "
            f"jax.checkpoint as with plans. {self.remedy()}"
        )

    def remedy(self) -> str:
        """The option that helps."""
        options = ", ".join(f"{name!r}: {value!r}" for name, value in IN_ORDER.items())
        return (
            f"jax.jit(step, compiler_options={{{options}}}) keeps the compiler to the order of the "
            "plan; give make_plan the step under it."
        )


def put_off(
    storage: Storage, graph: Graph, ready: Mapping[int, int], found: Cotangents
) -> Iterator[PutOff]:
    """Whether updates may be put off, with more than half of what the forward pass computes.

    What stays in vector memory anyway does not count.

    Args:
      storage: what is stored.
      graph: the vertices.
      ready: see ``gradients_wait``.
      found: what cotangents take.
    """
    device = storage.compiler.device
    if device.platform != "tpu" or not IN_ORDER.keys().isdisjoint(device.compiler_options):
        return
    last_read = {
        read: vertex for vertex, needs in reversed([*enumerate(graph.needs)]) for read in needs
    }
    arrays: dict[Hashable, tuple[int, int]] = {}
    updates = []
    for argument, vertex in ready.items():
        own = {*graph.needs[vertex], *found.factors.get(vertex, ())}
        values: dict[Hashable, tuple[int, int]] = {
            ("value", v): (graph.bytes[v], last_read.get(v, v)) for v in own
        }
        cotangents: dict[Hashable, tuple[int, int]] = {
            ("cotangent", v): (graph.cotangent_bytes[v], v) for v in found.read_for(vertex)
        }
        arrays |= values | cotangents
        updates.append(
            Update(
                ready=vertex,
                allocated_bytes=_WRITTEN * storage.bytes_of(argument),
                reads=frozenset({*values, *cotangents}),
            )
        )
    allocated = [max(pair) for pair in zip(graph.bytes, graph.cotangent_bytes, strict=True)]
    waiting = waits(updates, arrays, allocated)
    most = int(workspace_bytes((), Gradients.CONSUMED, len(graph), waiting).max(initial=0))
    if most > max(_MATTERS * sum(graph.bytes), vector_memory_bytes(storage.compiler)):
        yield PutOff(bytes=most)


def fuses_update(storage: Storage, first: int, last: int) -> bool:
    """Whether an update computes the gradient that it consumes: that of a single product.

    Args:
      storage: what is stored.
      first: the vertex whose backward step completes the gradient.
      last: the one whose step begins it.
    """
    return (
        first == last
        and storage.compiler.has("updates_fused")
        and storage.is_fusing_product(storage.written_by(first))
    )


def early(storage: Storage, allocated: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Converted arguments that are there before their turn.

    Args:
      storage: what is stored.
      allocated: see ``gradients_wait``.

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


def tables(
    storage: Storage,
    sizes: Sequence[int],
    cotangents: Sequence[int],
    predecessors: Sequence[Sequence[int]],
) -> dict[int, int]:
    """Arguments whose gradients are begun as zeros before their turn.

    Args:
      storage: what is stored.
      sizes: for each vertex, the bytes that computing it allocates.
      cotangents: those of its cotangent.
      predecessors: the vertices that it reads.

    Returns:
      For each the step before which the zeros are made: one for each vertex forward, and then one
      for each backward, the last vertex first.
    """
    if not storage.compiler.has("tables_first"):
        return {}
    allocated = list(sizes)
    last_reader = {one: vertex for vertex, read in enumerate(predecessors) for one in read}
    for one, vertex in last_reader.items():
        # It is freed.
        allocated[vertex] -= sizes[one]
    allocated += reversed(cotangents)
    types = storage.flow.program.types
    found = {}
    # To the scheduler, tables that are alike have the same zeros, which are copied in their turn.
    for argument in {types[one]: one for one in lookups.tables(storage)}.values():
        size = storage.bytes_of(argument)
        step = next((step for step, amount in enumerate(allocated) if amount > size), None)
        if step is not None:
            found[argument] = step
    return found


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
