"""Gathers that pick one element of each row, as a cross-entropy picks the logit of each label.

JAX's gradient of a gather is a scatter. XLA for NVIDIA scatters in place, into the array that holds
the rest of the operand's cotangent; and an array that is written in place is not laid over the one
that it is computed from. So the logits of a language model and their cotangent are alive together,
the largest arrays of the program. The gradient of picking is elementwise just as well, zero but
where an index says. ``transform`` writes it so, and the cotangent is computed in the place of the
logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from remat_opt.compilers.held import Cause, Held
from remat_opt.device import Device
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.record import Program


def held(program: Program, differentiated: Iterable[int], device: Device) -> Iterator[Held]:
    """What a device's compiler holds for such gathers from what products write.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      device: whose compiler it is.
    """
    if not device.overwrites_values:
        return
    maker = program.makers()
    for index in differentiated:
        equation = program.equations[index]
        operand = equation.inputs[0] if is_row_gather(equation.operation) else None
        if not isinstance(operand, int) or operand not in maker:
            continue
        if program.equations[maker[operand]].operation.primitive in PRODUCTS:
            yield Held(
                cause=Cause.ROWS,
                values=(),
                bytes=0,
                checkpointed_bytes=0,
                unchanged_bytes=device.buffer_bytes(program.types[operand]),
            )


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
