"""Calls: one inner program, run once in place.

The compiler inlines them, so a call fuses if everything in it does: ``relu`` is a
``custom_jvp_call`` of a ``max``, and lives inside a fusion just as the ``max`` would.
"""

from __future__ import annotations

import dataclasses
import math

from remat_opt.costs.bodies import costliest
from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import register, unknown_cost
from remat_opt.operation import Operation


@register(
    *("jit", "pjit", "closed_call", "core_call", "call", "composite", "compute_on"),
    *("custom_jvp_call", "custom_jvp_call_jaxpr", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    *("checkpoint", "remat", "remat2", "custom_vmap_call", "custom_lin", "linear_call"),
    *("xla_metadata_call", "shard_map"),
)
def call(operation: Operation) -> Cost:
    """The inner program's cost; a fusible one reads its inputs and writes its outputs.

    If there are several (a function and its ``fwd``), one of them runs: the costliest counts. A
    ``shard_map`` counts one device's share.
    """
    if not operation.bodies:
        return unknown_cost(operation)
    inner = costliest(operation.bodies)
    if inner.fusion is Fusion.OPAQUE:
        return inner
    return dataclasses.replace(
        inner, bytes_read=operation.input_bytes, bytes_written=operation.output_bytes
    )


@register("pallas_call")
def kernel(operation: Operation) -> Cost:
    """A hand-written kernel: the author's own ``cost_estimate`` if there is one.

    Otherwise estimated: what one block takes, times the size of the grid.
    """
    author = operation.params.get("cost_estimate")
    if author is None:
        # The body computes one block of the grid, and refers to memory by other means.
        known = unknown_cost(dataclasses.replace(operation, bodies=()))
        blocks = getattr(operation.params.get("grid_mapping"), "grid", ())
        if not operation.bodies or not all(isinstance(size, int) for size in blocks):
            return known
        block = costliest(operation.bodies)
        return dataclasses.replace(
            known,
            flops=math.prod(blocks) * block.flops,
            transcendentals=math.prod(blocks) * block.transcendentals,
        )
    return Cost(
        flops=int(author.flops),
        transcendentals=int(author.transcendentals),
        bytes_read=max(int(author.bytes_accessed) - operation.output_bytes, 0),
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
    )
