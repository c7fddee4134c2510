"""Random bits and the keys they come from.

One hash of the default generator (Threefry-2x32: 20 rounds of add, rotate, xor, and 5 key
injections) makes 32 random bits or one key; compiled for GPU or TPU it takes 121 FLOPs. CPU rolls
the rounds into a loop, and ``cost_analysis()`` counts one turn of it (about 45 FLOPs): the work is
the same. The hash fuses with what reads its bits. The other generators take fewer operations, so
these figures are an upper bound for them.
"""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import parameter, register
from remat_opt.operation import Operation

_HASH_FLOPS = 121


def _hashes(operation: Operation, count: int) -> Cost:
    return Cost(
        flops=_HASH_FLOPS * count,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.FUSIBLE,
    )


@register("random_bits")
def random_bits(operation: Operation) -> Cost:
    """One hash for each number of up to 32 bits, two for each of 64."""
    words = -(-int(parameter(operation, "bit_width")) // 32)
    return _hashes(operation, words * operation.output_size)


@register("random_split", "random_fold_in")
def new_keys(operation: Operation) -> Cost:
    """A hash for each new key."""
    return _hashes(operation, operation.output_size)


@register("threefry2x32")
def threefry(operation: Operation) -> Cost:
    """A hash for each pair of output words."""
    return _hashes(operation, operation.outputs[0].size)


@register("random_seed")
def seed(operation: Operation) -> Cost:
    """Shifts and masks one integer into a key: three FLOPs a key."""
    return Cost(
        flops=3 * operation.output_size,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.FUSIBLE,
    )


@register("rng_bit_generator", "rng_uniform")
def hardware_bits(operation: Operation) -> Cost:
    """About 37 FLOPs a number, as CPU expands it; GPU and TPU differ."""
    return Cost(
        flops=37 * operation.outputs[-1].size,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
        estimated=True,
    )
