"""What XLA holds from the forward pass to the backward pass for the gradients of max poolings.

The gradient of a max pooling is a scatter. Where windows overlap it goes into zeros of the
operand's shape; where they do not, each place is written once.

NVIDIA. A ``relu`` of that shape compares with zeros too; XLA makes one array of both, computes it
at the ``relu``, and copies it for the scatter to write to. So two arrays of that shape wait from
one pass to the other: in the gradient of ResNet-50 392 MiB at batch 64, in that of Inception v3
737 MiB at batch 32. Where the zero of the relu is not known to be one when the compiler looks for
equals, that memory is free. ``transform`` sees to it for activations that are calls, as
``jax.nn.relu`` is. Padding in front changes the shape of the scatter, and keeps the two apart.

CPU. XLA finds the places to scatter to by a search over arrays of coordinates, one for each
dimension and each as large as the padded operand. Nothing keeps it from making these, and the
zeros, at the start of the program: ResNet-50 holds 1,003 MiB so at batch 64. Where the pooling is
under no checkpoint the search is done in the forward pass, and the gradient reads its result, one
place for each maximum, and no longer the operand. At that time constants are there, too, if an
average pooling of a product follows: XLA has it computed with the product by a library, which reads
what is divided by, and the zeros of a ``relu`` in front, as arrays. They depend on nothing and are
made early: in a plan of DenseNet-121 at batch 32 95 MiB of them wait while the places of its only
max pooling are searched. Where a plan stores what the product hands on to another
region, there are no zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from remat_opt.compilers.held import Cause, Held
from remat_opt.device import Device
from remat_opt.operation import PRODUCTS, ArrayType, Operation
from remat_opt.program.record import Equation, Program

#: Bytes of a coordinate.
_COORDINATE_BYTES = 4


def held(program: Program, differentiated: Iterable[int], device: Device) -> Iterator[Held]:
    """What a device's compiler holds for the poolings among the differentiated equations.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      device: whose compiler it is.
    """
    chosen = set(differentiated)
    if device.platform == "cuda":
        yield from _shared_zeros(program, chosen, device)
    elif device.platform == "cpu":
        yield from _coordinates(program, chosen, device)


def _shared_zeros(program: Program, chosen: set[int], device: Device) -> Iterator[Held]:
    for index, value in activations(program).items():
        if index not in chosen:
            continue
        size = 2 * device.buffer_bytes(program.types[value])
        left = 0 if can_be_kept_apart(program.equations[index].operation) else size
        yield Held(
            cause=Cause.POOLING,
            values=(value,),
            bytes=left,
            checkpointed_bytes=left,
            unchanged_bytes=size,
        )


def _coordinates(program: Program, chosen: set[int], device: Device) -> Iterator[Held]:
    alike: dict[ArrayType, list[Equation]] = {}
    for index, equation in enumerate(program.equations):
        if index in chosen and _is_pooling(equation):
            (operand,) = equation.value_inputs
            kind = program.types[operand]
            padded = dataclasses.replace(kind, shape=_padded_shape(program, equation))
            alike.setdefault(padded, []).append(equation)
    for padded, poolings in alike.items():
        overlap = any(_windows_overlap(one.operation) for one in poolings)
        zeros = device.buffer_bytes(padded) if overlap else 0
        yield Held(
            cause=Cause.POOLING,
            values=tuple(one.outputs[0] for one in poolings),
            bytes=zeros,
            checkpointed_bytes=zeros,
            unchanged_bytes=zeros,
        )


def places_bytes(program: Program, device: Device) -> dict[int, int]:
    """For each pooled value the places of its maxima, where they replace the operand.

    On a CPU the gradient reads these and no more; they are found where the pooling is computed.
    """
    if device.platform != "cpu":
        return {}
    return {
        one.outputs[0]: _places_bytes(program.types[one.outputs[0]])
        for one in program.equations
        if _is_pooling(one)
    }


def search_bytes(program: Program, chosen: Iterable[int]) -> dict[int, int]:
    """What is there while the places of maxima are looked for, on a CPU, by number of equation.

    Those are the arrays of coordinates of this and of all later poolings, alike ones shared; and
    what later average poolings of products divide by.
    """
    found: dict[int, int] = {}
    coordinates: dict[tuple[int, ...], int] = {}
    averages = [index for index, _ in _averaged_products(program)]
    for index in sorted(chosen, reverse=True):
        equation = program.equations[index]
        shape = _padded_shape(program, equation)
        coordinates[shape] = _COORDINATE_BYTES * len(shape) * math.prod(shape)
        later = (program.equations[one].outputs[0] for one in averages if one > index)
        found[index] = sum(coordinates.values()) + sum(program.types[one].bytes for one in later)
    return found


def waiting_zeros(program: Program) -> Iterator[tuple[int, int]]:
    """Activations whose zeros wait during such searches, each with the average pooling behind it.

    Both as values. There are none where a barrier is between the two.
    """
    maker = program.makers()
    for index, product in _averaged_products(program):
        (pooled,) = program.equations[index].outputs
        for value in program.equations[product].value_inputs:
            if value in maker and _compares_with_scalar(program.equations[maker[value]].operation):
                yield value, pooled


def _averaged_products(program: Program) -> Iterator[tuple[int, int]]:
    """Average poolings that read a product, and the product, by number of equation."""
    maker = program.makers()
    for index, equation in enumerate(program.equations):
        if equation.operation.primitive == "reduce_window_sum":
            product = maker.get(equation.value_inputs[0])
            if product is not None and program.equations[product].operation.primitive in PRODUCTS:
                yield index, product


def _padded_shape(program: Program, pooling: Equation) -> tuple[int, ...]:
    (operand,) = pooling.value_inputs
    shape = program.types[operand].shape
    padding = pooling.operation.params.get("padding") or [(0, 0)] * len(shape)
    return tuple(size + low + high for size, (low, high) in zip(shape, padding, strict=True))


def _places_bytes(pooled: ArrayType) -> int:
    return _COORDINATE_BYTES * len(pooled.shape) * pooled.size


def workspace_bytes(program: Program, device: Device) -> dict[int, int]:
    """For each pooled value what XLA for NVIDIA holds while its gradient is taken, and only then.

    That is where each maximum was found, four coordinates for images; and where windows overlap one
    more array of zeros as large as what is scattered to. Both are beside the operand's cotangent,
    but not beside the operand, which has been searched by then: a simulation has both of these.
    The zeros are still there while the gradient of the activation before the pooling is taken.
    """
    found: dict[int, int] = {}
    if device.platform != "cuda":
        return found
    for value in beside_zeros(program, device):
        found[value] = device.buffer_bytes(program.types[value])
    for equation in program.equations:
        if _is_pooling(equation):
            (operand,) = equation.value_inputs
            (result,) = equation.outputs
            places = _places_bytes(program.types[result])
            searched = device.buffer_bytes(program.types[operand])
            zeros = searched if _windows_overlap(equation.operation) else 0
            found[result] = max(0, places + zeros - searched)
    return found


_CALLS = ("custom_jvp_call", "jit", "pjit")


def activations(program: Program) -> dict[int, int]:
    """The equations whose zeros XLA for NVIDIA shares, by number, with the value that is pooled."""
    maker = program.makers()
    found = {}
    for equation in program.equations:
        if not _is_pooling(equation):
            continue
        (operand,) = equation.value_inputs
        index = maker.get(operand)
        if (
            index is not None
            and _windows_overlap(equation.operation)
            and not _padded_in_front(equation.operation)
            and _compares_with_scalar(program.equations[index].operation)
        ):
            found[index] = operand
    return found


def searches(program: Program) -> list[int]:
    """The poolings whose windows do not overlap, by number.

    What their gradients search for depends on the operand alone, and is four times as large as what
    is pooled: one coordinate for each dimension of a batch of images. XLA for NVIDIA searches as
    soon as the operand is there, unless the derivative has to wait for its cotangent.
    """
    return [
        index
        for index, equation in enumerate(program.equations)
        if _is_pooling(equation) and not _windows_overlap(equation.operation)
    ]


def beside_zeros(program: Program, device: Device) -> set[int]:
    """The activations whose cotangents XLA for NVIDIA selects beside zeros, not in place."""
    return set(activations(program).values()) if device.platform == "cuda" else set()


def can_be_kept_apart(operation: Operation) -> bool:
    """Whether ``transform`` gives the activation a zero of its own."""
    return operation.primitive == "custom_jvp_call"


def _is_pooling(equation: Equation) -> bool:
    return equation.operation.primitive == "reduce_window_max" and bool(equation.value_inputs)


def _padded_in_front(pooling: Operation) -> bool:
    return any(low > 0 for low, _ in pooling.params.get("padding", ()))


def _windows_overlap(pooling: Operation) -> bool:
    return any(
        stride < length
        for stride, length in zip(
            pooling.params["window_strides"], pooling.params["window_dimensions"], strict=True
        )
    )


def _compares_with_scalar(operation: Operation) -> bool:
    """Whether the operation is a maximum with a scalar, or a call of one (``relu``)."""
    if operation.primitive == "max":
        return any(kind.shape == () for kind in operation.inputs)
    return operation.primitive in _CALLS and any(
        _compares_with_scalar(inner) for body in operation.bodies for inner in body.operations
    )
