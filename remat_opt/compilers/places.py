"""What a kernel reads at several places, through slices, reversals and the like.

There an entry would be computed once for each place. XLA for TPU stores what is read so
(``places_stored``), however little it is made of: of ``p, q = z[:, ::2], z[:, 1::2]`` and ``p * q``
with an ``f32[4,1024,16,256]`` that is computed from one a sixteenth as large, ``z`` is an array,
and so is each level of an associative scan of states, as in Mamba. (Three layers of the former,
unchanged: 240 MiB, predicted before 34.) XLA for NVIDIA computes it once for each place, if
none of the functions is expensive; if one is, the slice is stored, for all places but one
(``places_apart``; with a sigmoid there, 194 MiB, predicted before 40; without, 42 and 40).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from remat_opt.compilers import strides
from remat_opt.compilers.compiler import Compiler
from remat_opt.program.dataflow import Dataflow

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage

#: How many arrays of its size two kernels read again for a value, rather than that it is stored.
MOST_READ: Final = 3
#: Equations that read no more than they return.
SLICES: Final = frozenset({"slice", "split", "unstack", "dynamic_slice"})
#: Equations that read entries elsewhere than they write them.
MOVES: Final = SLICES | {"concatenate", "pad", "rev"}
#: Functions that one kernel does not compute at two places.
_EXPENSIVE: Final = frozenset("cbrt exp exp2 expm1 log log1p logistic rsqrt sqrt tan tanh".split())


def moved(flow: Dataflow, compiler: Compiler) -> set[int]:
    """What is stored if anything but one move reads it, and not what it is computed from alone."""
    return _read_by_moves(flow) if compiler.has("places_stored") else set()


def _read_by_moves(flow: Dataflow) -> set[int]:
    return {
        value
        for index, equation in enumerate(flow.program.equations)
        if equation.operation.primitive in MOVES
        for value in flow.reads(index)
    }


def spread(storage: Storage) -> dict[int, tuple[int, int]]:
    """For vertices whose cotangents are written in pieces, their bytes, and how many.

    There is one for each slice. That is what a kernel writes that makes them together, before
    others add them up. Slices that are only added up have one cotangent.
    """
    if not storage.compiler.has("places_spread"):
        return {}
    flow = storage.flow
    active = flow.linearization.active_values
    readers = flow.readers()
    of_slices: dict[tuple[int, int], set[int]] = {}
    for index, equation in enumerate(flow.program.equations):
        operation = equation.operation
        if operation.primitive not in SLICES or any(stride > 1 for stride in strides.of(operation)):
            continue
        if flow.is_alias(index) or active.isdisjoint(equation.outputs):
            continue
        sliced = _sliced(storage, index)
        if sliced not in storage.vertex_of:
            continue
        for value in active.intersection(equation.outputs):
            piece = _added_up(flow, readers, value)
            vertex = _computed_for(storage, readers, piece)
            if vertex is None:
                vertex = storage.vertex_of[sliced]
            of_slices.setdefault((sliced, vertex), set()).add(piece)
    found: dict[int, tuple[int, int]] = {}
    for (sliced, vertex), pieces in of_slices.items():
        size = storage.cotangent_bytes(pieces)
        if len(pieces) > 1 and size > storage.cotangent_bytes([sliced]):
            found[vertex] = max((size, len(pieces)), found.get(vertex, (0, 1)))
    return found


def _sliced(storage: Storage, index: int) -> int | None:
    """The array that a slice reads, padded or not."""
    flow = storage.flow
    (value, *_) = flow.reads(index) or (None,)
    while value is not None and value not in storage.vertex_of:
        maker = flow.maker[value]
        if flow.program.equations[maker].operation.primitive != "pad":
            return None
        (value, *_) = flow.reads(maker) or (None,)
    return value


def _computed_for(storage: Storage, readers: Mapping[int, Sequence[int]], value: int) -> int | None:
    """The array that elementwise functions of a value end in, if in no other."""
    while value not in storage.vertex_of:
        if len(readers.get(value, ())) != 1:
            return None
        (reader,) = readers[value]
        if storage.flow.opaque(reader):
            return None
        (value, *_) = storage.flow.program.equations[reader].outputs
    return storage.vertex_of[value]


def _added_up(flow: Dataflow, readers: Mapping[int, Sequence[int]], value: int) -> int:
    """The sum whose cotangent is that of a value, or the value itself."""
    while len(readers.get(value, ())) == 1:
        (reader,) = readers[value]
        equation = flow.program.equations[reader]
        if equation.operation.primitive != "add":
            break
        (value,) = equation.outputs
    return value


def apart(flow: Dataflow, stored: set[int], compiler: Compiler) -> set[int]:
    """The results of moves that are stored because one kernel reads what they move elsewhere, too.

    Args:
      flow: of the program.
      stored: what is stored otherwise.
      compiler: the compiler.
    """
    read_by_moves = _read_by_moves(flow) if compiler.has("places_apart") else set()
    expensive = read_by_moves & _expensive(flow, stored) if read_by_moves else set()
    if not expensive:
        return set()
    equations = flow.program.equations
    # For each value the kernels that compute it, by the equation whose result each writes.
    kernels: dict[int, set[int]] = {}
    readers: dict[int, list[int]] = {}
    for index in reversed(range(len(equations))):
        if flow.is_alias(index):
            continue
        written = flow.opaque(index) or not stored.isdisjoint(equations[index].outputs)
        own = [kernels.setdefault(value, set()) for value in equations[index].outputs]
        if written:
            for kernels_of_one in own:
                kernels_of_one.add(index)
        reached = {index} if written else set().union(*own)
        for value in flow.reads(index):
            if value in expensive:
                readers.setdefault(value, []).append(index)
            if value not in stored:
                kernels.setdefault(value, set()).update(reached)
    found: set[int] = set()
    for value in expensive:
        seen: set[int] = set()
        moved_to: list[int] = []
        for index in reversed(readers[value]):
            if equations[index].operation.primitive in MOVES:
                moved_to += equations[index].outputs
            else:
                seen.update(*(kernels[one] for one in equations[index].outputs))
        for one in moved_to:
            if not seen.isdisjoint(kernels[one]):
                found.add(one)
            seen |= kernels[one]
    return found


def _expensive(flow: Dataflow, stored: set[int]) -> set[int]:
    """What is not stored and computed with an expensive function, but for something smaller."""
    found: set[int] = set()
    merged = _merged(flow)
    for index, equation in enumerate(flow.program.equations):
        operation = equation.operation
        if flow.is_alias(index) or operation.primitive == "broadcast_in_dim":
            continue
        own = operation.primitive in _EXPENSIVE and index not in merged
        if own or not found.isdisjoint(flow.reads(index)):
            found.update(set(equation.outputs) - stored)
    return found


def _merged(flow: Dataflow) -> set[int]:
    """The exponentials two slices of which are multiplied: XLA adds their exponents instead."""
    equations = flow.program.equations
    found: set[int] = set()
    for equation in equations:
        if equation.operation.primitive == "mul":
            makers = [_exponential(flow, value) for value in equation.value_inputs]
            if len(makers) == 2 and makers[0] is not None and makers[0] == makers[1]:
                found.add(makers[0])
    return found


def _exponential(flow: Dataflow, value: int) -> int | None:
    """The exponential that a value is a part of, if it is."""
    index = flow.maker.get(flow.source[value])
    while index is not None and flow.program.equations[index].operation.primitive in SLICES:
        (value, *_) = flow.program.equations[index].value_inputs
        index = flow.maker.get(flow.source[value])
    is_one = index is not None and flow.program.equations[index].operation.primitive == "exp"
    return index if is_one else None
