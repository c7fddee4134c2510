"""Products of a value with itself, as of features with one another.

The value's cotangent is the sum of two products: of the value with the result's cotangent as it is,
and transposed. XLA for CPU writes both before it adds them. So does XLA for TPU if they have batch
axes. If not, it adds the first as it writes the second, so there are two arrays only if the sum is
rounded. XLA for NVIDIA adds the second where the first is, unless a barrier lies between them and
the sum (bags of embeddings: 251 MiB, or 179).

But if its operands are small, XLA for NVIDIA makes one product of both, which multiplies the value
by the two cotangents side by side. They are an array of their own, twice as large as one of them,
and so is the result. Behind a barrier, the value is another operand to each. (Similarities of 5,504
rows of 512 in bfloat16, least memory: 239 MiB, or 126; with 5,632 rows 129 either way. Products of
8 features of 64 with one another, 16,384 rows: 108 MiB, or 72 without any recomputation.)

Where both operands have their axes in the same order, the result does not change if its rows and
columns are exchanged. Then the two products are one, of the value with the sum of the result's
cotangent and the transposed one: half the FLOPs, and no second array. Plans for CPU and TPU write
it like that (``squares_once``) if the result is no larger than the value, since the sum is an array
of that size. (Products of 16 features of 128, joined from two, 16,384 examples, least memory: on
v5e 560 MiB, or 432.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remat_opt.compilers import operands
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.effects import Effect, Unchanged
from remat_opt.operation import ASSEMBLED
from remat_opt.program.dataflow import unaliased
from remat_opt.program.record import Equation, Program

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage

#: The most bytes that the operands of two products take together for them to become one.
_MERGED_BYTES = 64 * 2**20


def squares(program: Program) -> Iterator[tuple[int, int]]:
    """Products of matrices of a value with itself, perhaps transposed, each with the value."""
    maker = program.makers()
    for index, equation in enumerate(program.equations):
        if equation.operation.primitive == "dot_general" and len(equation.value_inputs) == 2:
            left, right = (unaliased(program, maker, value) for value in equation.value_inputs)
            if left == right:
                yield index, left


def once(program: Program, rules: Rules) -> frozenset[int]:
    """The products whose operand is to have one cotangent, by a single product."""
    if not rules.has("squares_once"):
        return frozenset()
    found = list(squares(program))
    maker = program.makers() if found else {}
    return frozenset(
        index
        for index, value in found
        if program.types[program.equations[index].outputs[0]].bytes <= program.types[value].bytes
        and _is_symmetric(program, maker, program.equations[index])
    )


def _is_symmetric(program: Program, maker: Mapping[int, int], product: Equation) -> bool:
    """Whether exchanging the rows and columns of a product of a value with itself changes nothing.

    On a mesh, one without batch axes may have its rows split, and to exchange them takes a
    collective.
    """
    (of_left, of_right), (batch_left, batch_right) = product.operation.params["dimension_numbers"]
    if program.placement is not None and not batch_left:
        return False
    left, right = (_in_order(program, maker, value) for value in product.value_inputs)
    free_left = [n for n in range(len(left.axes)) if n not in (*of_left, *batch_left)]
    free_right = [n for n in range(len(right.axes)) if n not in (*of_right, *batch_right)]
    return left.value == right.value and all(
        [left.axes[n] for n in ours] == [right.axes[n] for n in theirs]
        for ours, theirs in (
            (of_left, of_right),
            (batch_left, batch_right),
            (free_left, free_right),
        )
    )


class _Ordered(NamedTuple):
    """A value, and which of its axes is each axis of what is made of it by transposing."""

    value: Hashable
    axes: tuple[int, ...]


def _in_order(program: Program, maker: Mapping[int, int], value: int) -> _Ordered:
    """What a value is, but for the order of its axes."""
    axes = tuple(range(len(program.types[value].shape)))
    while value in maker and program.equations[maker[value]].operation.primitive == "transpose":
        made = program.equations[maker[value]]
        # Axis n of the result is axis permutation[n] of the operand.
        axes = tuple(made.operation.params["permutation"][n] for n in axes)
        (value,) = made.value_inputs
    steps: list[Hashable] = []
    while value in maker and program.equations[maker[value]].operation.primitive == "reshape":
        # Each operand may be reshaped by itself.
        steps.append(program.types[value].shape)
        (value,) = program.equations[maker[value]].value_inputs
    return _Ordered((value, *steps), axes)


def apart(program: Program, rules: Rules) -> frozenset[int]:
    """The products whose operands must differ, lest their gradients become one product."""
    if not rules.has("squares_apart"):
        return frozenset()
    return frozenset(
        index for index, value in squares(program) if _is_merged(program, index, value)
    )


def _is_merged(program: Program, index: int, value: int) -> bool:
    (result,) = program.equations[index].outputs
    return program.types[result].bytes + program.types[value].bytes <= _MERGED_BYTES


def second_cotangents(
    storage: Storage, sizes: Sequence[int], active: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, bool]]:
    """Vertices of products whose operand has two cotangents, unless they are one product.

    Args:
      storage: what is stored.
      sizes: bytes of each vertex's cotangent.
      active: the values of each vertex that have one.

    Returns:
      The vertex, the bytes beside the first cotangent, and whether plans have only one.
    """
    for index, product, operand, single in _vertices(storage):
        more = size = sizes[operand]
        if storage.compiler.has("sums_in_products"):
            full = storage.cotangent_bytes(active[operand])
            if _is_batched(storage, index):
                more = full - size + _second_bytes(storage, operand, full)
            elif _multiplies(storage, index, operand):
                # The second product adds the first, in its place unless the sum is rounded.
                more = full if size < full else 0
            else:
                more = full - size
        yield product, more, single


def whole(storage: Storage) -> frozenset[int]:
    """Vertices whose cotangent is not rounded for the product that reads it.

    It is the sum of two products, and is rounded only if these have no batch axes and the vertex is
    what they multiply, not what that is computed of.
    """
    if not storage.compiler.has("sums_in_products"):
        return frozenset()
    return frozenset(
        operand
        for index, _, operand, single in _vertices(storage)
        if not single and (_is_batched(storage, index) or not _multiplies(storage, index, operand))
    )


def _vertices(storage: Storage) -> Iterator[tuple[int, int, int, bool]]:
    """Products of a value with itself: equation, vertex, the value's vertex, and if in ``once``."""
    if not storage.compiler.has("squares"):
        return
    single = once(storage.flow.program, storage.compiler.rules)
    for index, value in squares(storage.flow.program):
        (result,) = storage.flow.program.equations[index].outputs
        holders = storage.holders(value)
        has_gradient = index in storage.flow.linearization.derivatives
        if has_gradient and result in storage.vertex_of and len(holders) == 1:
            yield index, storage.vertex_of[result], holders[0], index in single


def _second_bytes(storage: Storage, operand: int, full: int) -> int:
    """Bytes of the second of two cotangents that are written one after the other.

    If the operand was put together from pieces, both are copied into the order of the pieces, in
    which nothing is padded.
    """
    maker = storage.flow.program.equations[storage.roots[operand]]
    if maker.operation.primitive in ASSEMBLED:
        return min(full, storage.flow.program.types[maker.outputs[0]].bytes)
    return full


def _is_batched(storage: Storage, index: int) -> bool:
    return operands.is_batched(storage.flow.program.equations[index].operation)


def _multiplies(storage: Storage, index: int, vertex: int) -> bool:
    """Whether a product reads a vertex as it is."""
    return vertex in storage.vertices_of(storage.flow.reads(index))


def effects(storage: Storage) -> Iterator[Effect]:
    """Both cotangents side by side, where nothing keeps the products apart."""
    program, derivatives = storage.flow.program, storage.flow.linearization.derivatives
    found = {}
    for index, value in squares(program) if apart(program, storage.compiler.rules) else ():
        (result,) = program.equations[index].outputs
        if index not in derivatives or not _is_merged(program, index, value):
            continue
        if {result, value} <= storage.vertex_of.keys():
            both = 2 * storage.compiler.buffer_bytes(program.types[result])
            # One of the two that are written side by side is the value's cotangent.
            other = storage.compiler.buffer_bytes(program.types[value])
            found[storage.vertex_of[result]] = both + other
    if found:
        yield Unchanged(workspace_bytes=found)
