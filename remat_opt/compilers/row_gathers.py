"""Gathers that pick one element of each row, as a cross-entropy picks the logit of each label.

JAX's gradient of a gather is a scatter. XLA for NVIDIA scatters in place, into the array that holds
the rest of the operand's cotangent; and an array written in place does not overlap the one it is
computed from. So the logits of a language model and their cotangent, the largest arrays of the
program, are alive together. The gradient of picking can also be written elementwise: zero except
where an index says. ``transform`` does so, and the cotangent is computed in place of the logits.

XLA for TPU stores rounded logits also in float32, for a gather that reads them in that form. There,
``transform`` picks from the rounded ones (``picking``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set

from remat_opt.compilers import product_sums
from remat_opt.compilers.compiler import Compiler, Rules
from remat_opt.compilers.effects import Held
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.record import Program

#: For each dtype, those that can hold all its values.
_WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
#: What a product's kernel can also do to its result.
_BY_THE_PRODUCT = frozenset({"add", "sub", "mul", "div", "reshape"})


def held(program: Program, differentiated: Iterable[int], compiler: Compiler) -> Iterator[Held]:
    """What a compiler holds for such gathers from a product's result, in unchanged functions.

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


def picking(program: Program, rules: Rules) -> dict[int, str]:
    """The gathers to write differently, each with the dtype it should read.

    If a rule says so, that is the one before a conversion to a wider one.
    """
    maker = program.makers()
    found = {}
    for index, equation in enumerate(program.equations):
        if not is_row_gather(equation.operation):
            continue
        dtype = equation.operation.inputs[0].dtype
        narrow = _before_conversion(program, maker, equation.inputs[0])
        if narrow is not None and rules.has("picked_narrow"):
            found[index] = narrow
        elif rules.has("rows_picked"):
            found[index] = dtype
    return found


def _before_conversion(program: Program, maker: Mapping[int, int], value: object) -> str | None:
    """The dtype that a value was converted from, if nothing was lost."""
    made = maker.get(value) if isinstance(value, int) else None
    if made is None:
        return None
    operation = program.equations[made].operation
    if operation.primitive == "reshape":
        return _before_conversion(program, maker, program.equations[made].inputs[0])
    if operation.primitive != "convert_element_type":
        return None
    (before,), (after,) = operation.inputs, operation.outputs
    return before.dtype if after.dtype in _WIDER.get(before.dtype, ()) else None


def _is_written_by_product(
    program: Program, maker: Mapping[int, int], given: Set[int], value: int
) -> bool:
    """Whether a product writes a value, perhaps with a bias or a scale (``given``)."""
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
    """Whether an operation reads one element along its operand's last axis, for all others."""
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
