"""Products whose rows or columns are several axes: what XLA for NVIDIA stores because of them.

Problem. A product of examples, tokens and features is a matrix to XLA, and what it writes is
reshaped. XLA moves such a reshape behind elementwise operations, as far as it can. If something
else reads a value on both sides of the reshape, neither computes it: it is an array.

That happens in an exact GELU in bfloat16, so in most encoders of text and images. ``erfc`` is
computed in float32, and the reshape stays before it; the derivative reads the same operand before
the reshape. (Three layers of 512 and 2,048 take 458 MiB on h200 with 16 x 512 rows, 362 with 8,192.
With float32, 16 x 512 rows take 692, as without the rule.)

Method. Whether the reshape moves is decided by what else reads the product: elementwise operations
with another array would need that reshaped, so it stays, and the operand is computed again. Vectors
along the last axis, such as a bias, do not hinder it, nor do sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.turns import merged
from remat_opt.operation import ArrayType, Operation
from remat_opt.program.dataflow import Dataflow


def with_operands(flow: Dataflow, compiler: Compiler) -> dict[int, bool]:
    """The results of narrow ``erfc`` that are stored with what they are computed from.

    Args:
      flow: of the program.
      compiler: which one it is.

    Returns:
      For each, whether it is so in the unchanged function, too. There, products that are merged
      into one are sliced, and not reshaped.
    """
    if not compiler.has("flat_operands"):
        return {}
    equations = flow.program.equations
    narrow = [
        index
        for index, equation in enumerate(equations)
        if equation.operation.primitive == "erfc"
        and equation.operation.inputs[0].dtype in ("bfloat16", "float16")
        and flow.derivative_reads(index)
    ]
    if not narrow:
        return {}
    readers = flow.readers()
    apart = merged(flow.program)
    return {
        equations[index].outputs[0]: product not in apart
        for index in narrow
        for operand in flow.reads(index)
        if (product := _product(flow, operand, readers)) is not None
    }


def _product(flow: Dataflow, operand: int, readers: Mapping[int, Sequence[int]]) -> int | None:
    """The equation of the product whose reshape moves behind an operand, if there is one."""
    types, value = flow.program.types, operand
    while value in flow.maker:
        maker = flow.maker[value]
        operation = flow.program.equations[maker].operation
        if operation.primitive == "dot_general":
            return maker if value != operand and _is_reshaped(operation) else None
        read = _whole(flow, maker)
        if len(read) != 1 or types[read[0]].size != types[value].size:
            return None
        (value,) = read
        if not all(_moves(flow, one) for one in readers.get(value, ())):
            return None
    return None


def _is_reshaped(operation: Operation) -> bool:
    """Whether a product without batch axes has several axes of rows or of columns."""
    contracted, batched = operation.params["dimension_numbers"]
    return not batched[0] and any(
        sum(length > 1 and axis not in summed for axis, length in enumerate(kind.shape)) > 1
        for kind, summed in zip(operation.inputs, contracted, strict=True)
    )


def _moves(flow: Dataflow, index: int) -> bool:
    """Whether a reshape moves behind an equation, or does not hinder others from moving."""
    if flow.costs[index].fusion is costs.Fusion.REDUCTION:
        return True
    return flow.costs[index].fusion is costs.Fusion.FUSIBLE and len(_whole(flow, index)) == 1


def _whole(flow: Dataflow, index: int) -> list[int]:
    """The distinct values that an equation reads, aliases resolved, without scalars and vectors."""
    equation = flow.program.equations[index]
    read = dict.fromkeys(
        flow.source[atom]
        for atom, kind in zip(equation.inputs, equation.operation.inputs, strict=True)
        if isinstance(atom, int) and not _lies_along_last_axis(kind)
    )
    return [value for value in read if not _is_repeated(flow, value)]


def _is_repeated(flow: Dataflow, value: int) -> bool:
    """Whether a value is a scalar or a vector, repeated along all axes but the last."""
    if value not in flow.maker:
        return False
    made = flow.program.equations[flow.maker[value]].operation
    return made.primitive == "broadcast_in_dim" and made.inputs[0].size in (
        1,
        flow.program.types[value].shape[-1],
    )


def _lies_along_last_axis(kind: ArrayType) -> bool:
    """Whether an array is a scalar, or a vector along the last axis."""
    return kind.size == 1 or kind.size == kind.shape[-1]
