"""Reductions over sliding windows: pooling, its gradients, and cumulative sums."""

from __future__ import annotations

import math

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import combiner_cost, parameter, register
from remat_opt.operation import Operation


def _opaque(operation: Operation, flops: int, transcendentals: int = 0) -> Cost:
    return Cost(
        flops=flops,
        transcendentals=transcendentals,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
    )


def _window_size(operation: Operation) -> int:
    return math.prod(int(size) for size in parameter(operation, "window_dimensions"))


@register("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")
def pooling(operation: Operation) -> Cost:
    """(window - 1) steps for each output element, padding included, as XLA counts."""
    flops, transcendentals = combiner_cost(operation)
    steps = (_window_size(operation) - 1) * operation.outputs[0].size
    return _opaque(operation, steps * flops, steps * transcendentals)


@register("select_and_scatter_add", "select_and_scatter")
def pooling_gradient(operation: Operation) -> Cost:
    """(window - 1) comparisons and one addition for each incoming gradient element.

    XLA counts the operation itself in this way. CPU has no kernel for it and expands it to about
    ten times as many.
    """
    source = operation.inputs[0]
    return _opaque(operation, _window_size(operation) * source.size)


@register("select_and_gather_add")
def pooling_tangent(operation: Operation) -> Cost:
    """The forward derivative of pooling: a step takes a comparison and two selects."""
    steps = (_window_size(operation) - 1) * operation.outputs[0].size
    return _opaque(operation, 3 * steps)


# The CPU compiler cuts a cumulative operation into blocks of this many elements
# (ReduceWindowRewriter's base length).
_BLOCK = 16


def _cumulative_steps(length: int) -> int:
    """Steps the CPU compiler takes for a cumulative sum along one line.

    Each output element of a line of at most one block is summed from scratch. A longer line is cut
    into blocks; each block is summed, then the exclusive sums of the blocks' totals are added to
    its elements.
    """
    if length <= _BLOCK:
        return length * (length - 1)
    blocks = -(-length // _BLOCK)
    return blocks * _BLOCK * (_BLOCK - 1) + blocks * _BLOCK + _exclusive_steps(blocks)


def _exclusive_steps(length: int) -> int:
    """The same for exclusive sums: one more output element, each over ``length`` inputs."""
    if length <= _BLOCK:
        return (length + 1) * (length - 1)
    blocks = -(-(length + 1) // _BLOCK)
    return blocks * _BLOCK * _BLOCK + _exclusive_steps(blocks)


# FLOPs and transcendentals of one step of log(exp(a) + exp(b)), made safe for infinities.
_LOG_SUM_EXP_STEP = (8, 2)


@register("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulation(operation: Operation) -> Cost:
    """About 17 FLOPs an element: what CPU really does, down to the last FLOP.

    The same holds for TPU windows. For NVIDIA, JAX emits other programs, by version and length; all
    are bound by memory traffic, which outweighs these FLOPs.
    """
    array = operation.inputs[0]
    length = array.shape[parameter(operation, "axis")]
    steps = _cumulative_steps(length) * (array.size // length) if length else 0
    flops, transcendentals = _LOG_SUM_EXP_STEP if operation.primitive == "cumlogsumexp" else (1, 0)
    return _opaque(operation, steps * flops, steps * transcendentals)
