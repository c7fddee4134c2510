"""The zeros that XLA for CPU adds the gradients of looked-up rows to.

Such a gradient is added, in place, to an array as large as what is looked up in: a table, or the
result of an earlier step. The array depends on nothing, so XLA makes it at the start of the
program, whatever is under a checkpoint. It becomes the gradient. If a float32 gradient has other
contributions, the rows are added to one of these instead. A narrower one would have to be rounded
first, so each lookup has zeros of its own. A slice that begins at a computed place is a lookup too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from remat_opt.compilers.cpu_sums import widened
from remat_opt.compilers.storage import Storage

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
