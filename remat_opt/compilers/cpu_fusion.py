"""What XLA for CPU stores where others fuse (``Device.fuses_into_sums``).

A sum there multiplies two arrays as it reads them, and computes no more than that. So what the
gradient of a broadcast operand multiplies is stored: what a scale was applied to, what a mean was
taken from.

Products are calls of a library for float32, which reads one order of dimensions: bfloat16 weights
are widened, and for the gradient of a weight the cotangent is transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from remat_opt import costs
from remat_opt.compilers.held import Cause, Held
from remat_opt.device import Device
from remat_opt.operation import PRODUCTS, ArrayType
from remat_opt.program.dataflow import Dataflow
from remat_opt.program.record import Atom, Program


def held(program: Program, differentiated: Iterable[int], device: Device) -> Iterator[Held]:
    """What a device's compiler holds for weights that are bfloat16.

    A product's weight is widened once, and read so in the forward and in the backward pass; under a
    checkpoint again in each. The gradient of looking up rows adds to an array of zeros, which
    depends on nothing and is made at the start.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      device: whose compiler it is.
    """
    if not device.widens_bfloat16:
        return
    products: dict[int, list[int]] = {}
    looked_up: set[int] = set()
    for index in sorted(differentiated):
        equation = program.equations[index]
        for value in set(program.differentiated).intersection(equation.value_inputs):
            if program.types[value].dtype != "bfloat16":
                continue
            if equation.operation.primitive in PRODUCTS:
                products.setdefault(value, []).extend(equation.outputs)
            elif equation.operation.primitive == "gather":
                looked_up.add(value)
    for value in sorted(looked_up):
        yield _held((), program.types[value], device)
    for value, results in sorted(products.items()):
        yield _held(results, program.types[value], device)


def _held(results: Sequence[int], kind: ArrayType, device: Device) -> Held:
    """What is there throughout, unless what is computed with it is under a checkpoint."""
    size = device.buffer_bytes(widened(kind))
    return Held(
        cause=Cause.WIDENED,
        values=tuple(results),
        bytes=size,
        checkpointed_bytes=0,
        unchanged_bytes=size,
    )


def widened(kind: ArrayType) -> ArrayType:
    """The type of array that an array of some type is stored as where products read it."""
    return dataclasses.replace(kind, dtype="float32") if kind.dtype == "bfloat16" else kind


def gradient_bytes(program: Program, index: int, device: Device) -> int:
    """What the gradient of a product's weight takes, in the product's backward step alone.

    Where it sums over several dimensions, such as examples and tokens, XLA makes them one: the
    cotangent is transposed. And it comes out as float32. Products with batch dimensions, as
    attention has, transpose smaller operands.

    Args:
      program: a traced function.
      index: of an equation.
      device: whose compiler it is.
    """
    equation = program.equations[index]
    operation = equation.operation
    if operation.primitive != "dot_general" or device.fuses_into_sums:
        return 0
    (contracted, _), (batch, _) = operation.params["dimension_numbers"]
    is_weight = [value in program.differentiated for value in equation.inputs]
    if batch or sum(is_weight) != 1:
        return 0
    place = is_weight.index(True)
    weight, other, result = (
        operation.inputs[place],
        operation.inputs[1 - place],
        operation.outputs[0],
    )
    transposed = len(other.shape) - len(contracted) > 1
    size = device.buffer_bytes(widened(result)) if transposed else 0
    return size + (device.buffer_bytes(widened(weight)) if widened(weight) != weight else 0)


def read_by_sums(flow: Dataflow) -> set[int]:
    """What the gradient of a broadcast operand reads: the cotangent times this is summed."""
    found: set[int] = set()
    for index, equation in enumerate(flow.program.equations):
        if flow.costs[index].fusion is not costs.Fusion.FUSIBLE:
            continue
        read = flow.derivative_reads(index)
        size = flow.program.types[equation.outputs[0]].size
        if read and any(_repeats(flow, value, size) for value in equation.value_inputs):
            found |= read
    return found & flow.maker.keys()


def divided(flow: Dataflow) -> set[int]:
    """What is divided by fewer entries, repeated, for a product of many matrices: attention.

    There the divisor is stored in full too, as long as what it divides.
    """
    found: set[int] = set()
    feeding: set[int] = set()
    for index in reversed(range(len(flow.program.equations))):
        equation = flow.program.equations[index]
        operation = equation.operation
        if operation.primitive == "dot_general":
            _, (batch, _) = operation.params["dimension_numbers"]
            feeding.update(equation.value_inputs if batch else ())
        elif not feeding.isdisjoint(equation.outputs) and not flow.opaque(index):
            feeding.update(equation.value_inputs)
            if operation.primitive == "div" and index in flow.linearization.derivatives:
                numerator, divisor = equation.inputs
                size = flow.program.types[equation.outputs[0]].size
                if (
                    isinstance(numerator, int)
                    and isinstance(divisor, int)
                    and _repeats(flow, divisor, size)
                ):
                    found.add(flow.source[numerator])
    return found


def _repeats(flow: Dataflow, value: int, size: int) -> bool:
    """Whether a value with a cotangent is made of fewer entries, repeated."""
    value = flow.source[value]
    if value not in flow.linearization.active_values:
        return False
    maker = flow.maker.get(value)
    atoms: Sequence[Atom] = (value,)
    if maker is not None and flow.costs[maker].fusion is costs.Fusion.FUSIBLE:
        atoms = flow.program.equations[maker].inputs
    return all(flow.program.types[atom].size < size for atom in atoms if isinstance(atom, int))
