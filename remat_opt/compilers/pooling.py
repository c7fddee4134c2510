"""What XLA holds from the forward pass to the backward pass for the gradients of max poolings.

The gradient of a max pooling is a scatter. If windows overlap, it goes into zeros of the operand's
shape; if not, each place is written once.

NVIDIA. A ``relu`` of that shape also compares with zeros. XLA makes one array of both, computes it
at the ``relu``, and copies it for the scatter to write to. So two arrays of that shape wait from
one pass to the other: 392 MiB in the gradient of ResNet-50 at batch 64, 737 MiB in that of
Inception v3 at batch 32. If the compiler cannot see that the relu's zero is one when it looks for
equal values, that memory is saved. ``transform`` ensures this for activations that are calls, such
as ``jax.nn.relu``. Padding before the pooling changes the shape of the scatter, and keeps the two
apart.

CPU. XLA finds the places to scatter to by a search over arrays of coordinates, one for each
dimension and each as large as the padded operand. Nothing keeps it from making these, and the
zeros, at the start of the program: 1,003 MiB in ResNet-50 at batch 64. If the pooling is under no
checkpoint, the search is done in the forward pass, and the gradient reads its result, one place for
each maximum, instead of the operand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect
from remat_opt.graph import Graph
from remat_opt.operation import Operation
from remat_opt.program.record import Equation, Program
from remat_opt.schedule import Schedule
from remat_opt.units import format_bytes

#: Bytes of a coordinate.
_COORDINATE_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedZeros(Effect):
    """Zeros that a relu and the gradient of the max pooling behind it share, on NVIDIA.

    Attributes:
      bytes: held by every plan.
      unchanged_bytes: by the unchanged function.
    """

    bytes: int
    unchanged_bytes: int

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """The zeros."""
        return self.unchanged_bytes if schedule.unchanged else self.bytes

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """What is spared, and what is left."""
        spared_bytes = 0 if schedule.unchanged else self.unchanged_bytes - self.bytes
        if spared_bytes:
            yield (
                f"The unchanged function holds {format_bytes(spared_bytes)} of zeros "
                "from the forward pass to the backward pass of a max pooling right after a relu: "
                "XLA for NVIDIA makes one array of the relu's zeros and the gradient's. This plan "
                "keeps them apart, whatever else it does, and needs that much less."
            )
        if self.bytes:
            yield (
                f"{format_bytes(self.bytes)} hold zeros from the forward pass to "
                "the backward pass of a max pooling right after a maximum with zero, whatever is "
                "planned: XLA for NVIDIA makes one array of the zeros of both. jax.nn.relu in its "
                "place lets remat_opt keep them apart and saves that memory."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyZeros(Effect):
    """Zeros that the gradients of max poolings scatter to, made at the start, on CPU.

    Attributes:
      bytes: their size.
    """

    bytes: int

    def held_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """The zeros."""
        return self.bytes

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """How much that is."""
        yield (
            f"{format_bytes(self.bytes)} hold coordinates and zeros for the gradients of max "
            "poolings, from the start of the program: XLA for CPU makes them there."
        )


def effects(
    program: Program, differentiated: Iterable[int], compiler: Compiler
) -> Iterator[Effect]:
    """What a compiler holds for the poolings among the differentiated equations.

    Args:
      program: a traced function.
      differentiated: numbers of the equations that have a backward step.
      compiler: which one it is.
    """
    chosen = set(differentiated)
    if compiler.has("pooling_zeros"):
        total = left = 0
        for index, value in activations(program).items():
            if index in chosen:
                size = 2 * compiler.buffer_bytes(program.types[value])
                apart = can_be_kept_apart(program.equations[index].operation)
                total += size
                left += 0 if apart and compiler.has("zeros_apart") else size
        if total:
            yield SharedZeros(bytes=left, unchanged_bytes=total)
    if compiler.has("pooling_search") and (size := _early_zeros_bytes(program, chosen, compiler)):
        yield EarlyZeros(bytes=size)


def _early_zeros_bytes(program: Program, chosen: set[int], compiler: Compiler) -> int:
    """Those of all poolings, alike ones shared."""
    overlapping = set()
    for index, equation in enumerate(program.equations):
        if index in chosen and _is_pooling(equation) and _windows_overlap(equation.operation):
            (operand,) = equation.value_inputs
            shape = _padded_shape(program, equation)
            overlapping.add(dataclasses.replace(program.types[operand], shape=shape))
    return sum(map(compiler.buffer_bytes, overlapping))


def places_bytes(program: Program, compiler: Compiler) -> dict[int, int]:
    """For each pooled value, the places of its maxima, if they replace the operand.

    On a CPU the gradient reads only these; they are found when the pooling is computed.
    """
    if not compiler.has("pooling_search"):
        return {}
    return {
        one.outputs[0]: _coordinates_bytes(program.types[one.outputs[0]].shape)
        for one in program.equations
        if _is_pooling(one)
    }


def search_bytes(program: Program, chosen: Iterable[int]) -> dict[int, int]:
    """What exists while the places of maxima are searched for on a CPU, by equation number.

    These are the arrays of coordinates of this and all later poolings; equal ones are shared.
    """
    found: dict[int, int] = {}
    coordinates: dict[tuple[int, ...], int] = {}
    for index in sorted(chosen, reverse=True):
        shape = _padded_shape(program, program.equations[index])
        coordinates[shape] = _coordinates_bytes(shape)
        found[index] = sum(coordinates.values())
    return found


def _padded_shape(program: Program, pooling: Equation) -> tuple[int, ...]:
    (operand,) = pooling.value_inputs
    shape = program.types[operand].shape
    padding = pooling.operation.params.get("padding") or [(0, 0)] * len(shape)
    return tuple(size + low + high for size, (low, high) in zip(shape, padding, strict=True))


def _coordinates_bytes(shape: tuple[int, ...]) -> int:
    """A coordinate for each dimension, at each place."""
    return _COORDINATE_BYTES * len(shape) * math.prod(shape)


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

    What their gradients search for depends only on the operand, and is four times as large as what
    is pooled: one coordinate for each dimension of a batch of images. XLA for NVIDIA searches as
    soon as the operand exists, unless the derivative must wait for its cotangent.
    """
    return [
        index
        for index, equation in enumerate(program.equations)
        if _is_pooling(equation) and not _windows_overlap(equation.operation)
    ]


def can_be_kept_apart(operation: Operation) -> bool:
    """Whether ``transform`` gives the activation a separate zero."""
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
