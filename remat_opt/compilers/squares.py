"""Products of a value with itself, as of features with one another.

The value's cotangent is the sum of two products: of the value with the result's cotangent as it is,
and transposed. XLA for CPU writes both before it adds them. XLA for TPU adds the first as it writes
the second, so there are two arrays only if the sum is rounded. XLA for NVIDIA adds the second where
the first is, unless a barrier lies between them and the sum (bags of embeddings: 251 MiB, or 179).

But if its operands are small, XLA for NVIDIA makes one product of both, which multiplies the value
by the two cotangents side by side. They are an array of their own, twice as large as one of them,
and so is the result. Behind a barrier, the value is another operand to each. (Similarities of 5,504
rows of 512 in bfloat16, least memory: 239 MiB, or 126; with 5,632 rows 129 either way. Products of
8 features of 64 with one another, 16,384 rows: 108 MiB, or 72 without any recomputation.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from remat_opt.compilers.compiler import Compiler, Rules
from remat_opt.compilers.effects import Effect, Unchanged
from remat_opt.program.dataflow import Dataflow, unaliased
from remat_opt.program.record import Program

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage

#: The most bytes that the operands of two products take together for them to become one.
_MERGED_BYTES = 64 * 2**20


def squares(program: Program) -> Iterator[tuple[int, int]]:
    """Products of matrices of a value with itself, perhaps transposed, each with the value."""
    maker = program.makers()
    for index, equation in enumerate(program.equations):
        if equation.operation.primitive == "dot_general" and len(equation.value_inputs) == 2:
            left, right = (unaliased(program, maker, value) for value in equation.value_inputs)
            if left == right:
                yield index, left


def apart(program: Program, rules: Rules) -> frozenset[int]:
    """The products whose operands must differ, lest their gradients become one product."""
    if not rules.has("squares_apart"):
        return frozenset()
    return frozenset(
        index for index, value in squares(program) if _is_merged(program, index, value)
    )


def _is_merged(program: Program, index: int, value: int) -> bool:
    (result,) = program.equations[index].outputs
    return program.types[result].bytes + program.types[value].bytes <= _MERGED_BYTES


def second_cotangents(
    flow: Dataflow, vertex_of: Mapping[int, int], compiler: Compiler
) -> Iterator[tuple[int, int]]:
    """Vertices of products whose operand has two cotangents at once, each with the operand's.

    Args:
      flow: the program's dataflow.
      vertex_of: for each stored value, its vertex.
      compiler: the compiler.
    """
    for index, value in squares(flow.program) if compiler.has("squares") else ():
        (result,) = flow.program.equations[index].outputs
        if index in flow.linearization.derivatives and {result, value} <= vertex_of.keys():
            yield vertex_of[result], vertex_of[value]


def effects(storage: Storage) -> Iterator[Effect]:
    """Both cotangents side by side, where nothing keeps the products apart."""
    program, derivatives = storage.flow.program, storage.flow.linearization.derivatives
    found = {}
    for index, value in squares(program) if apart(program, storage.compiler.rules) else ():
        (result,) = program.equations[index].outputs
        if index not in derivatives or not _is_merged(program, index, value):
            continue
        if {result, value} <= storage.vertex_of.keys():
            both = 2 * storage.compiler.buffer_bytes(program.types[result])
            # One of the two that are written side by side is the value's cotangent.
            other = storage.compiler.buffer_bytes(program.types[value])
            found[storage.vertex_of[result]] = both + other
    if found:
        yield Unchanged(workspace_bytes=found)
