"""Gradients of weights that several products read, such as those of an unrolled recurrent network.

Each product contributes a part of the weight's size. XLA computes these parts when it can, and adds
them at the end: 64 steps of an RNN hold 64 times its weights. ``transform`` has each part added
before the next is computed. Then the sum waits, and one part beside it.

XLA for TPU was not seen to do this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from remat_opt.device import Device
from remat_opt.held import Cause, Held
from remat_opt.program import Program

#: The equations whose derivatives are products of their own.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def held(program: Program, differentiated: Iterable[int], device: Device) -> Iterator[Held]:
    """What a device's compiler holds for weights that several products read.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      device: whose compiler it is.
    """
    if device.platform == "tpu":
        return
    weights = set(program.differentiated)
    readers: Counter[int] = Counter()
    for index in differentiated:
        equation = program.equations[index]
        if equation.operation.primitive in PRODUCTS:
            readers.update(weights.intersection(equation.value_inputs))
    for weight, parts in sorted(readers.items()):
        if parts > 1:
            size = device.buffer_bytes(program.types[weight])
            yield Held(
                cause=Cause.WEIGHT,
                values=(),
                bytes=2 * size,
                checkpointed_bytes=2 * size,
                unchanged_bytes=parts * size,
            )
