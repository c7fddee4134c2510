"""The zeros that the gradients of looked-up rows are added to.

On CPU, such a gradient is added, in place, to an array as large as what is looked up in: a table,
or the result of an earlier step. The array depends on nothing, so XLA makes it at the start of the
program, whatever is under a checkpoint. It becomes the gradient. If a float32 gradient has other
contributions, the rows are added to one of these instead. A narrower one would have to be rounded
first, so each lookup has zeros of its own. A slice that begins at a computed place is a lookup too.

XLA for NVIDIA begins all sums over places with the same zeros, if they are alike, forward and
backward, and copies them each time. If rows of a result are looked up several times, one sum is
written while another waits to be added to it; rows of a parameter are all added to its gradient, in
place. (Three graph layers of 32,768 nodes of 256 on h200, each with three lookups: 228 MiB, of
which 64 are such arrays.) Where single entries are looked up, each sum has zeros of its own, which
it writes over.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from remat_opt.compilers.cpu_sums import widened
from remat_opt.compilers.entry_gathers import is_entry_gather
from remat_opt.compilers.storage import Storage
from remat_opt.operation import ArrayType

_LOOKUPS = frozenset({"gather", "dynamic_slice"})

#: Whether the zeros that bfloat16 rows are added to are float32.
_WIDENED = version("jaxlib").startswith("0.10.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """The arrays of zeros in a program.

    Attributes:
      begun: the parameters whose gradient is, or is written over, such an array.
      converted: those whose gradient is computed from a narrower one.
      beside: arrays that are no parameter's gradient: their bytes, and the lowest vertex in whose
        backward step they are there in addition to other cotangents.
    """

    begun: frozenset[int]
    converted: frozenset[int]
    beside: tuple[tuple[int, int], ...]


def zeros(storage: Storage) -> Zeros:
    """The arrays of zeros in a program.

    Args:
      storage: what is stored of it.
    """
    flow, types = storage.flow, storage.flow.program.types
    begun: set[int] = set()
    converted: set[int] = set()
    beside: list[tuple[int, int]] = []
    readers = _readers(storage) if storage.compiler.has("zeros_first") else {}
    for value, vertices in sorted(_lookups(storage, readers).items()):
        kind = types[value]
        # What a sum adds is a number, and takes no array.
        others = sum(not _is_sum(storage, index) for index in readers[value]) - len(vertices)
        if widened(kind) == kind:
            vertices = [] if others else [max(vertices)]
        elif _WIDENED:
            kind = widened(kind)
        parameter = _computed_from(storage, value, readers)
        if vertices and parameter is not None:
            if kind.bytes == types[parameter].bytes:
                begun.add(parameter)
                vertices = vertices[1:]
            elif kind.bytes < types[parameter].bytes:
                converted.add(parameter)
        # The only contribution to a result's cotangent is that cotangent.
        alone = value in flow.maker and not others and len(vertices) == 1
        taken = alone and parameter not in converted
        size = storage.compiler.buffer_bytes(kind)
        beside += [(size, vertex + taken) for vertex in vertices]
    return Zeros(begun=frozenset(begun), converted=frozenset(converted), beside=tuple(beside))


def tables(storage: Storage) -> Iterator[int]:
    """The arguments to whose gradients looked-up rows contribute, and nothing else."""
    readers = _readers(storage)
    for value, vertices in sorted(_lookups(storage, readers).items()):
        if value not in storage.flow.maker and len(readers[value]) == len(vertices):
            yield value


def beside(storage: Storage) -> Iterator[tuple[int, int]]:
    """For vertices in whose backward step rows are added up: zeros, and a second sum.

    Args:
      storage: what is stored.

    Returns:
      The vertex, and the bytes that are held during its backward step.
    """
    flow, types = storage.flow, storage.flow.program.types
    # For each lookup in a result, that result: a gather has no other operand with a gradient.
    operands = {
        index: value
        for value, indices in (
            _readers(storage).items() if storage.compiler.has("zeros_shared") else ()
        )
        if value in flow.maker
        for index in indices
        if flow.program.equations[index].operation.primitive == "gather"
        and not is_entry_gather(flow.program.equations[index])
    }
    if not operands:
        return
    times = Counter(operands.values())
    alike = Counter(types[value] for value in operands.values()) + Counter(_begun(storage))
    sizes = {
        value: ((alike[types[value]] > 1) + (count > 1))
        * storage.compiler.buffer_bytes(types[value])
        for value, count in times.items()
    }
    for vertex, root in enumerate(storage.roots):
        lookups = operands.keys() & storage.cone(root)
        size = max((sizes[operands[index]] for index in lookups), default=0)
        if size:
            yield vertex, size


def _begun(storage: Storage) -> Iterator[ArrayType]:
    """The types of the zeros that a program itself adds to at places, as in a segment sum."""
    flow = storage.flow
    for equation in flow.program.equations:
        if equation.operation.primitive == "scatter-add" and isinstance(equation.inputs[0], int):
            maker = flow.maker.get(equation.inputs[0])
            if maker is not None and not flow.program.equations[maker].value_inputs:
                yield equation.operation.outputs[0]


def _is_sum(storage: Storage, index: int) -> bool:
    return storage.flow.program.equations[index].operation.primitive == "reduce_sum"


def _readers(storage: Storage) -> dict[int, list[int]]:
    """For each value with a gradient, the equations that contribute to it, aliases resolved."""
    flow = storage.flow
    active = flow.linearization.active_values.union(flow.program.differentiated)
    found: dict[int, list[int]] = {}
    for index in sorted(flow.linearization.derivatives):
        if not flow.is_alias(index):
            read = {flow.source[value] for value in flow.program.equations[index].value_inputs}
            for value in read & active:
                found.setdefault(value, []).append(index)
    return found


def _lookups(storage: Storage, readers: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """For each value in which rows are looked up, the vertices in whose backward step they are."""
    flow = storage.flow
    there = {
        index
        for index in itertools.chain.from_iterable(readers.values())
        if flow.program.equations[index].operation.primitive in _LOOKUPS
    }
    found: dict[int, list[int]] = {}
    for vertex, root in enumerate(storage.roots if there else ()):
        for index in sorted(there.intersection(storage.cone(root))):
            there.remove(index)
            operand = flow.program.equations[index].inputs[0]
            if isinstance(operand, int):
                found.setdefault(flow.source[operand], []).append(vertex)
    return found


def _computed_from(
    storage: Storage, value: int, readers: Mapping[int, Sequence[int]]
) -> int | None:
    """The parameter that a value is, or is an elementwise function of, if it has no other use."""
    flow = storage.flow
    while value in flow.maker and value not in storage.stored:
        equation = flow.program.equations[flow.maker[value]]
        read = [flow.source[one] for one in equation.value_inputs if flow.source[one] in readers]
        size = flow.program.types[value].size
        if len(read) != 1 or len(readers[read[0]]) > 1 or flow.program.types[read[0]].size != size:
            return None
        (value,) = read
    return None if value in flow.maker else value
