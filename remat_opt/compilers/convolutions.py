"""What XLA for NVIDIA does for its convolution library: copies of weights and operands, and time.

The library wants the output channels of a weight first; JAX has them last. So each weight is copied
before its convolution, and the copy waits for the gradient of the convolution's operand, which
reads it again. By the end of the forward pass all of them exist: 97 MiB in a ResNet-50, whatever is
recomputed.

The library pads both sides of a dimension alike. If the padding differs, as with "SAME" and a
stride of two, and in every causal convolution, the operand is copied with its padding: once for all
convolutions that pad it in the same way. Outside checkpoints the copy waits for the gradient of the
weight: in place of the operand, or beside it if another backward step reads that too. Under a
checkpoint it is made again.

The gradient of a kernel with holes (``rhs_dilation``) is no operation of the library: it is a
convolution in which examples are channels, so both the operand and the cotangent are transposed. So
is that of the kernel of a transposed convolution, which puts zeros between the elements of its
operand (``lhs_dilation``). The library runs such a convolution as the gradient of another one if
its kernel is reversed (``transpose_kernel=True``). Otherwise the operand is written with its zeros
and its padding whenever it runs.

Before a convolution that pads unevenly, a kernel with holes is filled with zeros, and the
library multiplies by these as well. On an H200, two taps that are 512 apart take 64 times as long
with all padding in front as with half of it on either side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect, Figures, handed_in, under_checkpoints
from remat_opt.operation import Operation
from remat_opt.program.dataflow import unaliased
from remat_opt.program.record import Derivative, Program
from remat_opt.schedule import Schedule

#: Operations after which an argument is still a weight.
_FORMS = frozenset({"convert_element_type", "reshape", "transpose"})

#: What a convolution takes, in times of its roofline. Measured on an H200 for 22 kinds of them: 1.3
#: to 8.4, 2.5 in the median, where products take 1.4 and elementwise operations 1.2
#: (``benchmarks/rates.py``). What counts for a plan is how they compare.
_OF_ROOFLINE = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of an operand.

    Attributes:
      operand: the vertex that is copied.
      padding: how it is padded; none if it is transposed.
      bytes: size of the copy.
    """

    operand: int
    padding: tuple[tuple[int, int], ...]
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopiedOperands(Effect):
    """Operands copied with their padding, or transposed.

    Causal convolutions on h200 as they are: without ``alone`` 23 to 37 % too large, with it 8 to
    14.

    Attributes:
      copies: for vertices of convolutions, what they read in place of their operand.
      alone: the operands that backward steps read by these copies alone.
      transposed: the vertices of convolutions whose cotangent is also written in a second order,
        each with those that read it. What comes from outside a checkpoint is copied when it is
        read.
    """

    copies: Mapping[int, Copy]
    alone: frozenset[int]
    transposed: Mapping[int, Sequence[int]]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Writes copies that wait, and those that are made again."""
        late = list(handed_in(schedule, self.transposed))
        figures.workspace_bytes[late] += figures.cotangent_bytes[late]
        figures.cotangent_bytes[list(self.transposed.keys() - late)] *= 2
        again = self.copies.keys() & under_checkpoints(schedule)
        for vertex in again:
            copy = self.copies[vertex]
            if copy.padding or copy.operand not in self.alone:
                figures.workspace_bytes[vertex] += copy.bytes
        # Copies of one operand with the same padding are one.
        waiting = {self.copies[vertex] for vertex in self.copies.keys() - again}
        copied_again = {self.copies[vertex].operand for vertex in again}
        for operand in {copy.operand for copy in waiting} & self.alone - copied_again:
            figures.bytes[operand] = 0
        for copy in waiting:
            figures.bytes[copy.operand] += copy.bytes


def alone(copies: Mapping[int, Copy], needs: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The operands that backward steps read by copies alone.

    Args:
      copies: for vertices of convolutions, what they read in place of their operand.
      needs: for each vertex those that its backward step reads.
    """
    found = {copy.operand for copy in copies.values()}
    for vertex, read in enumerate(needs):
        by_copy = {copies[vertex].operand} if vertex in copies else set()
        found -= set(read) - by_copy
    return frozenset(found)


def _is_lopsided(operation: Operation) -> bool:
    """Whether an operation is a convolution with more padding on one side than on the other."""
    return operation.primitive == "conv_general_dilated" and any(
        low != high for low, high in operation.params["padding"]
    )


def _is_spread(operation: Operation) -> bool:
    """Whether it is a convolution that puts zeros between elements, as a transposed one does."""
    return operation.primitive == "conv_general_dilated" and any(
        one > 1 for one in operation.params["lhs_dilation"]
    )


def is_transposed(operation: Operation, compiler: Compiler) -> bool:
    """Whether a weight's gradient reads its operand and its cotangent transposed."""
    if operation.primitive != "conv_general_dilated" or not compiler.has("operands_transposed"):
        return False
    with_holes = any(one > 1 for one in operation.params["rhs_dilation"])
    return _is_spread(operation) or (with_holes and not _is_lopsided(operation))


def seconds(operation: Operation, cost: costs.Cost, compiler: Compiler, dtype: str) -> float:
    """The time that an operation takes which runs on its own, a convolution or another one.

    Args:
      operation: which one.
      cost: its FLOPs and bytes.
      compiler: which one it is.
      dtype: the dtype that it computes in.
    """
    if not (operation.primitive == "conv_general_dilated" and compiler.has("convolution_time")):
        return costs.seconds(cost, compiler.device, dtype)
    filled = _filling(operation) if _is_lopsided(operation) else 1
    run = dataclasses.replace(cost, flops=round(cost.flops * filled))
    return _OF_ROOFLINE * costs.seconds(run, compiler.device, dtype)


def _filling(convolution: Operation) -> float:
    """How much larger a kernel becomes if its holes are filled."""
    shape = convolution.inputs[1].shape
    _, _, *spatial = convolution.params["dimension_numbers"].rhs_spec
    factors = (
        (1 + (shape[axis] - 1) * dilation) / shape[axis]
        for axis, dilation in zip(spatial, convolution.params["rhs_dilation"], strict=True)
        if shape[axis]
    )
    return math.prod(factors, start=1.0)


def copied(
    program: Program,
    derivatives: Mapping[int, Derivative],
    compiler: Compiler,
    vertex_of: Mapping[int, int],
) -> dict[int, Copy]:
    """For vertices of convolutions, the operand that is copied: with its padding, or transposed.

    Args:
      program: a traced function.
      derivatives: of the equations that have a backward step.
      compiler: which one it is.
      vertex_of: for each value that is stored the vertex that holds it.
    """
    found: dict[int, Copy] = {}
    for index, derivative in derivatives.items():
        equation = program.equations[index]
        operand = equation.inputs[0] if equation.inputs else None
        is_padded = (
            compiler.has("operands_padded")
            and _is_lopsided(equation.operation)
            and not _is_spread(equation.operation)
        )
        if (
            (is_padded or is_transposed(equation.operation, compiler))
            # The gradient of the weight reads the operand.
            and 0 in derivative.inputs
            and isinstance(operand, int)
            and operand in vertex_of
            and equation.outputs[0] in vertex_of
        ):
            kind = program.types[operand]
            padding = equation.operation.params["padding"] if is_padded else ()
            if is_padded:
                kind = dataclasses.replace(kind, shape=(_padded_size(equation.operation),))
            found[vertex_of[equation.outputs[0]]] = Copy(
                operand=vertex_of[operand],
                padding=tuple(map(tuple, padding)),
                bytes=kind.bytes,
            )
    return found


def spread_bytes(
    program: Program, compiler: Compiler, vertex_of: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Vertices of convolutions whose operand is written with zeros in between, and its bytes.

    Args:
      program: a traced function.
      compiler: which one it is.
      vertex_of: for each value that is stored the vertex that holds it.
    """
    if not compiler.has("operands_spread"):
        return
    maker = program.makers()
    for equation in program.equations:
        operation = equation.operation
        if _is_spread(operation) and equation.outputs[0] in vertex_of:
            kernel = equation.inputs[1]
            if isinstance(kernel, int):
                kernel = unaliased(program, maker, kernel)
            made = program.equations[maker[kernel]].operation if kernel in maker else None
            if made is None or made.primitive != "rev":
                kind = dataclasses.replace(operation.inputs[0], shape=(_padded_size(operation),))
                yield vertex_of[equation.outputs[0]], kind.bytes


def weight_copies(
    program: Program,
    derivatives: Mapping[int, Derivative],
    compiler: Compiler,
    vertex_of: Mapping[int, int],
) -> Iterator[tuple[int, int]]:
    """Vertices of convolutions, with the bytes of the weight's copy that waits from there on.

    Args:
      program: a traced function.
      derivatives: of the equations that have a backward step.
      compiler: which one it is.
      vertex_of: for each value that is stored the vertex that holds it.
    """
    if not compiler.has("weights_copied"):
        return
    weights = set(program.arguments)
    for index, equation in enumerate(program.equations):
        operation = equation.operation
        if operation.primitive in _FORMS and weights.issuperset(equation.value_inputs):
            weights.update(equation.outputs)
        elif operation.primitive == "conv_general_dilated" and index in derivatives:
            # The gradient of the operand reads the weight.
            weight = equation.inputs[1]
            if (
                1 in derivatives[index].inputs
                and weight in weights
                and equation.outputs[0] in vertex_of
            ):
                size = compiler.buffer_bytes(operation.inputs[1])
                yield vertex_of[equation.outputs[0]], size


def _padded_size(convolution: Operation) -> int:
    """Elements of the operand with its padding, and with zeros in between."""
    shape, params = convolution.inputs[0].shape, convolution.params
    _, _, *spatial = params["dimension_numbers"].lhs_spec
    sides = list(shape)
    for axis, (low, high), apart in zip(
        spatial, params["padding"], params["lhs_dilation"], strict=True
    ):
        sides[axis] = low + max(0, (shape[axis] - 1) * apart + 1) + high
    return math.prod(sides)
