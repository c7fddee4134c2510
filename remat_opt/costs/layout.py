"""Operations that move or name elements and compute nothing: no FLOPs."""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import register
from remat_opt.operation import Operation


def _movement(operation: Operation, *, bytes_read: int) -> Cost:
    return Cost(
        flops=0,
        transcendentals=0,
        bytes_read=bytes_read,
        bytes_written=operation.output_bytes,
        fusion=Fusion.FUSIBLE,
    )


@register("broadcast_in_dim", "concatenate", "pad", "rev", "stack", "tile", "transpose")
def rearrangement(operation: Operation) -> Cost:
    """Reads all of its inputs and writes them elsewhere."""
    return _movement(operation, bytes_read=operation.input_bytes)


@register("slice", "split", "unstack")
def part(operation: Operation) -> Cost:
    """Reads only what it returns."""
    return _movement(operation, bytes_read=operation.output_bytes)


@register("dynamic_slice")
def dynamic_part(operation: Operation) -> Cost:
    """Reads only what it returns, and the start indices; it fuses as a slice does."""
    indices = sum(array_type.bytes for array_type in operation.inputs[1:])
    return _movement(operation, bytes_read=operation.output_bytes + indices)


@register(
    "iota", "iota_2x32_shape", "axis_index", "platform_index", "empty", "empty2", "dimension_size"
)
def generation(operation: Operation) -> Cost:
    """Reads nothing."""
    return _movement(operation, bytes_read=0)


@register(
    *("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "copy", "tie"),
    *("random_wrap", "random_unwrap", "random_clone"),
    *("sharding_constraint", "layout_constraint", "mesh_cast", "shard_alike"),
    *("pvary", "preduced", "reduced_vary_cast", "vary_unreduced_cast"),
)
def view(operation: Operation) -> Cost:
    """The same bytes under another shape, type or name: no traffic of its own."""
    return Cost(flops=0, transcendentals=0, bytes_read=0, bytes_written=0, fusion=Fusion.FUSIBLE)


@register("optimization_barrier")
def barrier(operation: Operation) -> Cost:
    """Moves nothing, but nothing fuses across it: its inputs are materialised."""
    return Cost(flops=0, transcendentals=0, bytes_read=0, bytes_written=0, fusion=Fusion.OPAQUE)
