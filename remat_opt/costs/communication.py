"""Collectives: data that moves between devices.

They count no FLOPs; XLA counts one for each element of an all-reduce as if there were two devices.
Bytes are those that leave and enter this device's memory. The network decides the time: the bytes
sent are the larger of those read and written, about what a ring of devices does, so the figures are
flagged as estimated.
"""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import register
from remat_opt.operation import Operation


@register(
    *("psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin"),
    *("unreduced_pmax", "unreduced_pmin"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
    *("reduce_scatter", "unreduced_reduce_scatter"),
    *("all_to_all", "ragged_all_to_all", "ppermute", "pbroadcast", "psend", "precv"),
    "with_memory_space_constraint",
)
def collective(operation: Operation) -> Cost:
    """No FLOPs; reads its inputs and writes its outputs."""
    return Cost(
        flops=0,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        bytes_sent=max(operation.input_bytes, operation.output_bytes),
        fusion=Fusion.OPAQUE,
        estimated=True,
    )


@register("device_put")
def placement(operation: Operation) -> Cost:
    """A move to another device or memory; nothing at all if no target is given."""
    if any(target is not None for target in operation.params.get("devices", (True,))):
        return collective(operation)
    return _nothing()


@register("reshard")
def reshard(operation: Operation) -> Cost:
    """A move to other devices; nothing at all for a scalar, which all of them have."""
    if any(kind.shape for kind in operation.inputs):
        return collective(operation)
    return _nothing()


def _nothing() -> Cost:
    return Cost(flops=0, transcendentals=0, bytes_read=0, bytes_written=0, fusion=Fusion.FUSIBLE)
