"""Gathers that pick one element of each row, as a cross-entropy picks the logit of each label.

JAX's gradient of a gather is a scatter. XLA for NVIDIA scatters in place, into an array that holds
the rest of the operand's cotangent, in its full width: of logits that a product wrote in bfloat16,
a second array twice as large. The gradient of picking can also be written elementwise: zero except
where an index says. ``transform`` does so, and the cotangent is rounded as it is written (2,048
rows of 32,000 logits on h200: 285 MiB instead of 410).

XLA for TPU stores rounded logits also in float32, for a gather that reads them in that form. There,
``transform`` picks from the rounded ones (``picking``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from remat_opt.compilers.compiler import Rules
from remat_opt.operation import Operation
from remat_opt.program.record import Program

#: For each dtype, those that can hold all its values.
_WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}


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
