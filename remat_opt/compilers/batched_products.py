"""Batched products: what XLA for NVIDIA writes of the cotangents that they read.

The library takes a stack of matrices. If the rows or the columns of a batched product are several
axes of the program, as the queries and the heads of a group in grouped-query attention, XLA merges
them, and a matrix made of merged axes is read as it lies. The two products of the backward step
then want the cotangent of the result in one order if one operand of the product has its contracted
axes first and the other last, and otherwise in two. XLA writes both. (With fewer than two batch
axes, or if rows and columns are one axis each, one array is read either way.) Three layers of
grouped-query attention with weights of 128 MiB, each under a checkpoint, take 929 MiB on h200, and
673 with the keys repeated for every head.

The same goes for an operand. JAX reads the second one with its contracted axes first in the
product, and last in the gradient of the other. If it is computed elementwise, as weights from
scores or exponentials, each of the two computes it once more, in its order, and no array waits for
the backward pass (``Read.again``). This is not so where one kernel computes a softmax of rows that
lie together in the scores: it writes the weights, which stay, and what wants another order gets a
copy.

Rows need not lie together: ``bqghd,bkgd->bghqk`` is a product of keys and queries to ``(b, g, k, q,
h)`` and a transposition. The cotangent of the weights is then copied to the order of the scores
first, in the type of the softmax. If the innermost axis is short, XLA keeps that copy until both
orders of the scores' cotangent are written; otherwise the second is a copy of the first.

A product with an algorithm such as ``BF16_BF16_F32``, which ``jax.nn.dot_product_attention`` asks
for, reads its operands in that type. So what it writes in float32 has a cotangent in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.softmax import behind, is_computed_again
from remat_opt.operation import ArrayType, Operation
from remat_opt.program.dataflow import Dataflow
from remat_opt.program.record import Equation

#: The types that JAX's names of algorithms begin with, if narrower than what they write.
_READS: Final = {"BF16": "bfloat16", "F16": "float16"}
#: The shortest innermost axis whose transposition goes through tiles, for numbers of four bytes.
_TILED: Final = 8
_WORD: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How a batched product of merged axes, and the other operand's gradient, read an operand.

    Attributes:
      product: the number of the equation.
      operand: what it reads, elementwise made.
      scores: the product, if any, that the operand is computed from.
      waiting: the array, if any, that it is computed from: exponentials, or scores.
      again: whether it is computed for each of them, and no array waits for the backward pass.
      workspace_bytes: what is then held beside its cotangent.
      comes_last: whether, outside checkpoints, it is written for the gradient together with the
        scores' cotangent.
      copies_late: whether, outside checkpoints, the second order of the scores' cotangent is a copy
        of the first.
    """

    product: int
    operand: int
    scores: int | None
    waiting: int | None
    again: bool
    workspace_bytes: int
    comes_last: bool
    copies_late: bool


def reads(
    flow: Dataflow, compiler: Compiler, exponentials: Collection[int], stored: Collection[int]
) -> Iterator[Read]:
    """Finds the elementwise operands of batched products whose rows are merged axes.

    Args:
      flow: of the program.
      compiler: the compiler.
      exponentials: those of softmaxes.
      stored: those of them that are arrays, perhaps among others.
    """
    program = flow.program
    for index in flow.linearization.derivatives if compiler.has("operands_again") else ():
        equation = program.equations[index]
        if not _merges(equation.operation) or len(equation.value_inputs) != 2:
            continue
        contracted, batched = equation.operation.params["dimension_numbers"]
        for place, value in enumerate(equation.value_inputs):
            maker = flow.maker.get(flow.source[value])
            kind, summed, batch = program.types[value], contracted[place], batched[place]
            free = _long(kind, sorted({*range(len(kind.shape))}.difference(summed, batch)))
            if maker is None or flow.costs[maker].fusion is not costs.Fusion.FUSIBLE:
                continue
            if len(free) < 2:
                continue
            scores, lies = _lies(flow, value)
            order = _long(kind, lies)
            together = order[-1] in summed
            made_of = behind(program, value, flow.maker)
            below = next((one for one in made_of if one in exponentials), None)
            is_stored = below in stored or (
                below is not None
                and scores is not None
                and kind.bytes < program.types[below].bytes <= program.types[scores].bytes
                and not is_computed_again(program.types[below], compiler.device)
            )
            one_kernel = below is not None and not is_stored and together
            tiled = kind.shape[order[-1]] >= _TILED
            # Without sums in between, rows and columns stay what they are in the scores.
            as_scores = order in (
                _long(kind, batch) + free + _long(kind, summed),
                _long(kind, (*batch, *summed)) + free,
            )
            again = (
                (place == 1) != _is_swapped(flow, equation, 1 - place)
                and not (one_kernel or (below is None and as_scores))
                and (tiled or kind.bytes < _WORD * kind.size)
            )
            copied = program.types[below] if below is not None and not is_stored else kind
            yield Read(
                product=index,
                operand=flow.source[value],
                scores=scores,
                waiting=below if below in stored else scores,
                again=again,
                workspace_bytes=(kind if together else copied).bytes if again else 0,
                comes_last=again and is_stored and as_scores,
                copies_late=one_kernel or (again and not is_stored and tiled),
            )


def _long(kind: ArrayType, axes: Iterable[int]) -> list[int]:
    """Those axes that are longer than 1."""
    return [axis for axis in axes if kind.shape[axis] > 1]


def rows_lie_apart(flow: Dataflow, operand: int, compiler: Compiler, batch_axes: int = 1) -> bool:
    """Whether weights that a batched product reads are made of scores whose rows lie apart.

    Their cotangent is then copied to the order of the scores.

    Args:
      flow: of the program.
      operand: the weights of a softmax.
      compiler: the compiler.
      batch_axes: the fewest batch axes that the product has.
    """
    program = flow.program
    for equation in program.equations if compiler.has("operands_again") else ():
        if equation.operation.primitive != "dot_general" or operand not in equation.value_inputs:
            continue
        place = equation.inputs.index(operand)
        contracted, batched = equation.operation.params["dimension_numbers"]
        kind, _, lies = program.types[operand], *_lies(flow, operand)
        order, batch = _long(kind, lies), _long(kind, batched[place])
        free = set(order).difference(contracted[place], batch)
        if len(free) > 1 and len(batch) >= batch_axes and order[-1] in free:
            return True
    return False


def _is_swapped(flow: Dataflow, equation: Equation, other: int) -> bool:
    """Whether the product for an operand's gradient is written with its factors swapped.

    XLA does that to leave out a transposition of its result, if that exchanges the last two axes.
    """
    value = equation.value_inputs[other]
    contracted, batched = equation.operation.params["dimension_numbers"]
    batch, axes = tuple(batched[other]), len(flow.program.types[value].shape)
    maker = flow.maker.get(value)
    return (
        batch == tuple(range(len(batch)))
        and axes == len(batch) + 2
        and tuple(contracted[other]) == (axes - 2,)
        and (maker is None or flow.program.equations[maker].operation.primitive != "transpose")
    )


def _lies(flow: Dataflow, value: int) -> tuple[int | None, tuple[int, ...]]:
    """The product that a value is computed from, and the value's axes in the order of its result.

    The value lies in that order, the last axis innermost, if it is written elementwise.
    """
    program = flow.program
    whole = tuple(range(len(program.types[value].shape)))
    pending, seen = [(value, whole)], {value}
    while pending:
        one, axes = pending.pop()
        if one not in flow.maker:
            continue
        equation = program.equations[flow.maker[one]]
        primitive, kind = equation.operation.primitive, program.types[one]
        if primitive == "dot_general":
            return one, axes
        for read in equation.value_inputs:
            if read in seen or program.types[read].size != kind.size:
                continue
            if primitive == "transpose":
                permutation = equation.operation.params["permutation"]
                axes = tuple(axes[permutation.index(axis)] for axis in range(len(axes)))
            elif program.types[read].shape != kind.shape:
                continue
            seen.add(read)
            pending.append((read, axes))
    return None, whole


def reads_two_orders(operation: Operation, compiler: Compiler) -> bool:
    """Whether the products of the backward step read the result's cotangent in two orders.

    Args:
      operation: any.
      compiler: the compiler.
    """
    if not compiler.has("orders") or not _merges(operation):
        return False
    contracted, batched = operation.params["dimension_numbers"]
    contracted_first = set()
    for kind, summed, batch in zip(operation.inputs, contracted, batched, strict=True):
        free = [
            axis
            for axis, length in enumerate(kind.shape)
            if length > 1 and axis not in (*summed, *batch)
        ]
        contracted_first.add(min(summed, default=-1) < min(free, default=0))
    return len(contracted_first) == 1


def _merges(operation: Operation) -> bool:
    """Whether it is a product with two batch axes whose rows or columns are several axes."""
    if operation.primitive != "dot_general":
        return False
    contracted, batched = operation.params["dimension_numbers"]
    # The batch axes of both operands have the same lengths.
    if sum(operation.inputs[0].shape[axis] > 1 for axis in batched[0]) < 2:
        return False
    return any(
        sum(length > 1 and axis not in (*summed, *batch) for axis, length in enumerate(kind.shape))
        > 1
        for kind, summed, batch in zip(operation.inputs, contracted, batched, strict=True)
    )


def as_read(operation: Operation, kind: ArrayType, compiler: Compiler) -> ArrayType:
    """The type in which products read the cotangent of what the operation writes.

    Args:
      operation: any.
      kind: the type of what it writes.
      compiler: the compiler.
    """
    algorithm = getattr(operation.params.get("precision"), "name", "")
    dtype = _READS.get(algorithm.partition("_")[0])
    if dtype is None or kind.dtype != "float32" or not compiler.has("algorithms"):
        return kind
    return dataclasses.replace(kind, dtype=dtype)
