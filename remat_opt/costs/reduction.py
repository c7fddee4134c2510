"""Reductions over whole axes: as many steps as elements disappear.

XLA counts (input elements - output elements) times the FLOPs of one step. A reduction
takes its elementwise producers into its own loop; its output is materialised. The CPU
compiler may cut a long one into blocks and then counts a few steps more.
"""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import combiner_cost, register
from remat_opt.operation import Operation


def _reduction(operation: Operation, flops: int, transcendentals: int) -> Cost:
    """The cost of a number of FLOPs and transcendentals for each step."""
    # Arrays reduced together all have one shape: the first stands for them.
    steps = max(operation.inputs[0].size - operation.outputs[0].size, 0)
    return Cost(
        flops=flops * steps,
        transcendentals=transcendentals * steps,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.REDUCTION,
    )


@register(
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"),
    *("reduce_and", "reduce_or", "reduce_xor"),
    "reduce",
)
def reduction(operation: Operation) -> Cost:
    """One FLOP a step, or those of ``reduce``'s own inner program."""
    return _reduction(operation, *combiner_cost(operation))


@register("argmax", "argmin")
def extreme_position(operation: Operation) -> Cost:
    """A step compares and selects values and positions, and checks floats for NaN."""
    numbers_can_be_nan = operation.inputs[0].dtype.startswith(("float", "bfloat"))
    return _reduction(operation, 9 if numbers_can_be_nan else 7, 0)
