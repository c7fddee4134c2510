"""Sorting and selecting the largest."""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import parameter, register
from remat_opt.operation import Operation


def _comparisons(operation: Operation, length: int, *, estimated: bool) -> Cost:
    """N log2(length) FLOPs for the n elements of the first array."""
    return Cost(
        flops=operation.inputs[0].size * max(length - 1, 0).bit_length(),
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
        estimated=estimated,
    )


@register("sort")
def sort(operation: Operation) -> Cost:
    """N log2(n) with n all elements of the first array, as XLA counts.

    It takes the logarithm of n even if many short lines are sorted, and does not count
    arrays that are carried along.
    """
    return _comparisons(operation, operation.inputs[0].size, estimated=False)


@register("top_k", "approx_top_k")
def top_k(operation: Operation) -> Cost:
    """N log2(k): a heap of k elements. It is a custom call, without FLOPs to the compiler."""
    return _comparisons(operation, int(parameter(operation, "k")) + 1, estimated=True)
