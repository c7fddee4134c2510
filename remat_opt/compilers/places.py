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

from typing import Final

from remat_opt.compilers.compiler import Compiler
from remat_opt.program.dataflow import Dataflow

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
