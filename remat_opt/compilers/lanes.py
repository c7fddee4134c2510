"""Which axes of an array may be innermost, in the lanes of a TPU's tiles, if not all may.

Gathered rows are written as they are read. Operands and results of convolutions have their channels
in the lanes, or their batch (``f32[128,32,32,64]``, of a batch of 128, is not padded), but never an
axis along which they slide: ``f32[32,4096,64]`` is padded to 128 channels, though the 4,096 would
need no padding. Elementwise values beside these are stored like them. That goes before what batched
products want (``matrix_axes``), which read a copy: four layers of convolutions of 64 channels whose
products with one another are summed up take 406 MiB on v5e, and not 102.
"""

from __future__ import annotations

from collections.abc import Iterable

from remat_opt import costs
from remat_opt.program.record import Equation, Program


def gathered(program: Program) -> dict[int, tuple[int, ...]]:
    """For each value that is gathered row by row, the axis that may be innermost."""
    return {
        equation.outputs[0]: (len(equation.operation.outputs[0].shape) - 1,)
        for equation in program.equations
        if _gathers_rows(equation)
    }


def convolved(program: Program) -> dict[int, tuple[int, ...]]:
    """Operands and results of convolutions, and elementwise values beside them, with such axes."""
    found: dict[int, tuple[int, ...]] = {}
    for equation in program.equations:
        if equation.operation.primitive == "conv_general_dilated":
            numbers = equation.operation.params["dimension_numbers"]
            found[equation.outputs[0]] = tuple(numbers.out_spec[:2])
            if isinstance(equation.inputs[0], int):
                found.setdefault(equation.inputs[0], tuple(numbers.lhs_spec[:2]))
    if found:
        _spread(program.equations, found)
        _spread(reversed(program.equations), found)
    return found


def _spread(equations: Iterable[Equation], found: dict[int, tuple[int, ...]]) -> None:
    """Notes the same for elementwise values beside such values."""
    for equation in equations:
        operation = equation.operation
        if costs.cost(operation).fusion is not costs.Fusion.FUSIBLE:
            continue
        shape = operation.outputs[0].shape
        kinds = zip(equation.inputs, operation.inputs, strict=True)
        beside = [atom for atom, kind in kinds if isinstance(atom, int) and kind.shape == shape]
        beside += equation.outputs
        axes = next((found[value] for value in beside if value in found), None)
        if axes is not None:
            for value in beside:
                found.setdefault(value, axes)


def _gathers_rows(equation: Equation) -> bool:
    operation = equation.operation
    if operation.primitive != "gather" or not operation.outputs[0].shape:
        return False
    last = len(operation.outputs[0].shape) - 1
    return bool(
        operation.params["dimension_numbers"].offset_dims[-1:] == (last,)
        and operation.params["slice_sizes"][-1] == operation.inputs[0].shape[-1]
    )
