"""Matrix products."""

from __future__ import annotations

import dataclasses
import math

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import parameter, register
from remat_opt.operation import Operation

#: What products are called that a compiler computes as a sum, or elementwise.
VECTOR_PRODUCT, OUTER_PRODUCT = "vector_product", "outer_product"


def _product(operation: Operation, contracted: tuple[int, ...]) -> Cost:
    """Two FLOPs for each output element and each position along the contracted axes."""
    left, output = operation.inputs[0], operation.outputs[0]
    depth = math.prod(left.shape[axis] for axis in contracted)
    return Cost(
        flops=2 * output.size * depth,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
    )


@register("dot_general")
def matrix_product(operation: Operation) -> Cost:
    """2 M N K for each batch element, as XLA's HandleDot.

    The compiler may turn a product of two vectors into multiply and sum, and then
    counts one addition less for each output element.
    """
    (contracted, _), _ = parameter(operation, "dimension_numbers")
    return _product(operation, contracted)


@register(VECTOR_PRODUCT)
def vector_product(operation: Operation) -> Cost:
    """The same, as a sum."""
    return dataclasses.replace(matrix_product(operation), fusion=Fusion.REDUCTION)


@register(OUTER_PRODUCT)
def outer_product(operation: Operation) -> Cost:
    """The same, elementwise."""
    return dataclasses.replace(matrix_product(operation), fusion=Fusion.FUSIBLE)


@register("ragged_dot_general")
def ragged_product(operation: Operation) -> Cost:
    """2 M N K, each row taken through its own group's matrix, as XLA's HandleRaggedDot.

    CPU has no kernel, so it multiplies every row with every group and masks: the cost is multiplied
    by the number of groups.
    """
    numbers = parameter(operation, "ragged_dot_dimension_numbers")
    (contracted, _), _ = numbers.dot_dimension_numbers
    return _product(operation, contracted)
