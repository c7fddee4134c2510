"""Gathers that pick one element of each row, as a cross-entropy picks the logit of each label.

JAX's gradient of a gather is a scatter. XLA for NVIDIA scatters in place, into the array that holds
the rest of the operand's cotangent; and an array that is written in place is not laid over the one
that it is computed from. So the logits of a language model and their cotangent are alive together,
the largest arrays of the program. The gradient of picking is elementwise just as well, zero but
where an index says. ``transform`` writes it so, and the cotangent is computed in place of the
logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set

from remat_opt.compilers import product_sums
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Held
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.record import Program

#: What the kernel of a product does to its result as well.
_BY_THE_PRODUCT = frozenset({"add", "sub", "mul", "div", "reshape"})


def held(program: Program, differentiated: Iterable[int], compiler: Compiler) -> Iterator[Held]:
    """What a compiler holds for such gathers from what products write, in unchanged functions.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      compiler: which one it is.
    """
    if not compiler.has("row_scatters"):
        return
    maker = program.makers()
    given = product_sums.shaped(program, (*program.arguments, *program.constants))
    for index in differentiated:
        equation = program.equations[index]
        operand = equation.inputs[0] if is_row_gather(equation.operation) else None
        if not isinstance(operand, int):
            continue
        if _is_written_by_product(program, maker, given, operand):
            size = compiler.buffer_bytes(program.types[operand])
            left = 0 if compiler.has("rows_picked") else size
            yield Held(vertices=(), bytes=left, checkpointed_bytes=left, unchanged_bytes=size)


def _is_written_by_product(
    program: Program, maker: Mapping[int, int], given: Set[int], value: int
) -> bool:
    """Whether a product writes a value: with a bias or a scale at most, which are ``given``."""
    while value in maker:
        equation = program.equations[maker[value]]
        if equation.operation.primitive in PRODUCTS:
            return True
        if equation.operation.primitive not in _BY_THE_PRODUCT:
            return False
        read = [one for one in equation.value_inputs if one not in given]
        if len(read) != 1:
            return False
        (value,) = read
    return False


def is_row_gather(operation: Operation) -> bool:
    """Whether an operation reads one element along its operand's last axis, for all other axes."""
    if operation.primitive != "gather":
        return False
    (operand, indices), numbers = operation.inputs, operation.params["dimension_numbers"]
    rows = tuple(range(len(operand.shape) - 1))
    return (
        bool(operand.shape)
        and tuple(numbers.offset_dims) == ()
        and tuple(numbers.collapsed_slice_dims) == (len(rows),)
        and tuple(numbers.start_index_map) == (len(rows),)
        and tuple(numbers.operand_batching_dims) == rows
        and tuple(numbers.start_indices_batching_dims) == rows
        and math.prod(indices.shape) == math.prod(operand.shape[:-1])
    )
