"""Reads and writes at computed places."""

from __future__ import annotations

import math

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import combiner_cost, parameter, register
from remat_opt.operation import Operation


@register("gather")
def gather(operation: Operation) -> Cost:
    """No FLOPs: the arithmetic on indices is in separate equations.

    It reads the elements it returns, not the whole operand. One that picks single
    elements (a label's logit) is small and fuses with what it picks from; one that
    picks rows (an embedding) reads a materialised table.
    """
    indices = operation.inputs[1]
    picks_elements = math.prod(parameter(operation, "slice_sizes")) == 1
    return Cost(
        flops=0,
        transcendentals=0,
        bytes_read=operation.output_bytes + indices.bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.FUSIBLE if picks_elements else Fusion.OPAQUE,
    )


@register("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(operation: Operation) -> Cost:
    """One step of the combiner for each update element; a plain ``scatter`` only writes.

    The operand counts as copied: the equation does not know whether the compiler may overwrite it.
    """
    updates = operation.inputs[2]
    flops, transcendentals = combiner_cost(operation)
    if operation.primitive == "scatter" and not operation.bodies:
        flops = 0
    return Cost(
        flops=flops * updates.size,
        transcendentals=transcendentals * updates.size,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
    )


@register("dynamic_update_slice")
def dynamic_update(operation: Operation) -> Cost:
    """Reads and writes the update alone: the compiler writes it into the operand in place."""
    _, update, *indices = operation.inputs
    return Cost(
        flops=0,
        transcendentals=0,
        bytes_read=update.bytes + sum(index.bytes for index in indices),
        bytes_written=update.bytes,
        fusion=Fusion.OPAQUE,
    )


@register("get", "swap", "addupdate")
def reference(operation: Operation) -> Cost:
    """Reads, writes or adds to part of a mutable array: as many elements as are passed."""
    moved = operation.outputs or operation.inputs[1:2]
    elements, size = sum(one.size for one in moved), sum(one.bytes for one in moved)
    adds = operation.primitive == "addupdate"
    return Cost(
        flops=elements if adds else 0,
        transcendentals=0,
        bytes_read=size if operation.primitive == "get" else 2 * size,
        bytes_written=size,
        fusion=Fusion.OPAQUE,
    )
