"""Zeros that XLA for NVIDIA shares between a relu and the gradient of a max pooling after it.

The gradient of a max pooling is a scatter into zeros of the operand's shape. A ``relu`` of that
shape compares with zeros too; XLA makes one array of both, computes it at the ``relu``, and copies
it for the scatter to write to. So two arrays of that shape wait from one pass to the other: in the
gradient of ResNet-50 392 MiB at batch 64, in that of Inception v3 737 MiB at batch 32. Where the
zero of the relu is not known to be one when the compiler looks for equals, that memory is free.
``transform`` sees to it for activations that are calls, as ``jax.nn.relu`` is.

Padding in front changes the shape of the scatter, and keeps the two apart. Windows that do not
overlap scatter to places of their own, and need no such array.
"""

from __future__ import annotations

from remat_opt.operation import Operation
from remat_opt.program import Program

_CALLS = ("custom_jvp_call", "jit", "pjit")


def activations(program: Program) -> dict[int, int]:
    """The equations whose zeros are shared, by number, with the value that is pooled."""
    maker = {
        value: index
        for index, equation in enumerate(program.equations)
        for value in equation.outputs
    }
    found = {}
    for equation in program.equations:
        if equation.operation.primitive != "reduce_window_max" or not equation.value_inputs:
            continue
        (operand,) = equation.value_inputs
        index = maker.get(operand)
        if (
            index is not None
            and _windows_overlap(equation.operation)
            and _compares_with_scalar(program.equations[index].operation)
        ):
            found[index] = operand
    return found


def can_be_kept_apart(operation: Operation) -> bool:
    """Whether ``transform`` gives the activation a zero of its own."""
    return operation.primitive == "custom_jvp_call"


def _windows_overlap(pooling: Operation) -> bool:
    if any(low > 0 for low, _ in pooling.params.get("padding", ())):
        return False
    return any(
        stride < length
        for stride, length in zip(
            pooling.params["window_strides"], pooling.params["window_dimensions"], strict=True
        )
    )


def _compares_with_scalar(operation: Operation) -> bool:
    """Whether the operation is a maximum with a scalar, or a call of one (``relu``)."""
    if operation.primitive == "max":
        return any(kind.shape == () for kind in operation.inputs)
    return operation.primitive in _CALLS and any(
        _compares_with_scalar(inner) for body in operation.bodies for inner in body.operations
    )
