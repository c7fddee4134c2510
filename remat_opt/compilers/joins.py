"""Products whose operand is a concatenation: of a skip and what comes up in a U-Net, for example.

XLA for TPU writes the cotangent of the whole operand, and its pieces are copied from there, so both
are there at once. Or something reads a piece only later, and all of it waits. Each piece is a
product of its own, though: that of the result's cotangent with some rows of the weight.

Pieces of few columns are left as they are: each by itself would be padded to 128, which the whole
is not. So are concatenations that are small beside the program's largest array. There is little to
gain, and with its pieces apart XLA may lay out what they come from in another order: in a
recommender, products of all pairs of 27 embeddings of 128, before which 30 MiB are joined, took
1,009 MiB instead of 970.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from remat_opt.compilers import product_sums
from remat_opt.compilers.compiler import LANES, Compiler
from remat_opt.compilers.effects import Effect, Figures
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.dataflow import Dataflow
from remat_opt.program.record import Equation, Program
from remat_opt.schedule import Schedule

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage

_T = TypeVar("_T")

#: The least size of a concatenation, in sizes of the largest array.
_MATTERS = 0.25
#: Pieces may take this much more than the whole.
_MOST_PADDING = 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A concatenation that one product reads, along an axis that it sums over.

    Attributes:
      equation: the concatenation.
      place: which of the product's two inputs it is.
      axis: along which axis of the other input the product sums.
      apart: whether plans write the product piece by piece.
    """

    equation: int
    place: int
    axis: int
    apart: bool

    def parted(self, inputs: Sequence[_T]) -> tuple[Sequence[_T], _T]:
        """The pieces, and the product's other input, of these in the order of its inputs."""
        return (inputs[:-1], inputs[-1]) if self.place == 0 else (inputs[1:], inputs[0])


def joins(program: Program) -> dict[int, Join]:
    """For products to be written piece by piece, the concatenation that each reads.

    Nothing else reads it. One of pieces that take more by themselves does not count, nor a small
    one.
    """
    return {index: join for index, join in _joins(program).items() if join.apart}


def _joins(program: Program) -> dict[int, Join]:
    """For products, the concatenation that each reads, if nothing else reads it.

    One of arguments alone, as of the weights of several heads, does not count.
    """
    given = product_sums.shaped(program, program.arguments)
    computed = (v for one in program.equations for v in one.outputs if v not in given)
    least = _MATTERS * max((program.types[value].bytes for value in computed), default=0)
    reads = Counter(program.output_values)
    for equation in program.equations:
        reads.update(equation.value_inputs)
    made = {
        equation.outputs[0]: index
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive == "concatenate"
        and reads[equation.outputs[0]] == 1
        and not given.issuperset(equation.value_inputs)
    }
    found: dict[int, Join] = {}
    for index, equation in enumerate(program.equations):
        if equation.operation.primitive not in PRODUCTS:
            continue
        for place, value in enumerate(equation.inputs):
            if isinstance(value, int) and value in made and index not in found:
                whole = program.equations[made[value]].operation
                other = _summed_with(equation, place, whole.params["dimension"])
                if other is not None:
                    found[index] = Join(
                        equation=made[value],
                        place=place,
                        axis=other,
                        apart=_is_worthwhile(whole, least),
                    )
    return found


def stored(flow: Dataflow, compiler: Compiler) -> set[int]:
    """The pieces of concatenations that products read: they are arrays, the whole is not."""
    if not compiler.has("pieces_stored"):
        return set()
    equations = flow.program.equations
    pieces = (
        flow.source[value]
        for join in _joins(flow.program).values()
        for value in equations[join.equation].value_inputs
    )
    return {value for value in pieces if value in flow.maker}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Effect):
    """Cotangents of whole concatenations, where their products are not written piece by piece.

    Each is there until the last of its pieces is read: that of a skip to the bottom of a U-Net.

    Attributes:
      rewritten: whether those products are, but in the unchanged function.
      cotangent_bytes: of the pieces that are read last.
      workspace_bytes: what is there beside the backward step of each vertex, since several lie in
        one piece's place.
    """

    rewritten: bool
    cotangent_bytes: Mapping[int, int]
    workspace_bytes: tuple[int, ...]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Puts it in the place of the pieces' own, if they are one array."""
        if schedule.unchanged or not self.rewritten:
            figures.workspace_bytes[:] += self.workspace_bytes
            for piece, size in self.cotangent_bytes.items():
                figures.cotangent_bytes[piece] = size


def effects(
    storage: Storage, readers: Sequence[Sequence[int]], active: Sequence[Sequence[int]]
) -> Iterator[Whole]:
    """What depends on the schedule.

    Args:
      storage: what is stored.
      readers: for each vertex, those that read it.
      active: for each vertex, its values that have a cotangent.
    """
    if not storage.compiler.has("whole_cotangents"):
        return
    program = storage.flow.program
    rewrites = storage.compiler.has("pieces_apart")
    cotangents: dict[bool, dict[int, int]] = {True: {}, False: {}}
    beside = {rewritten: [0] * len(storage.roots) for rewritten in cotangents}
    for index, join in _joins(program).items():
        equation = program.equations[join.equation]
        pieces = {
            vertex
            for value in equation.value_inputs
            for vertex in storage.holders(value)
            if active[vertex]
        }
        product = max(storage.holders(storage.result(index)), default=-1)
        if not pieces or product < 0:
            continue
        apart = rewrites and join.apart
        size, piece = storage.cotangent_bytes(equation.outputs), min(pieces)
        if max((one for one in readers[piece] if active[one]), default=-1) == product:
            cotangents[apart][piece] = size
        else:
            for vertex in range(piece + 1, product + 1):
                beside[apart][vertex] += size
    for rewritten, found in cotangents.items():
        if found or any(beside[rewritten]):
            yield Whole(
                rewritten=rewritten,
                cotangent_bytes=found,
                workspace_bytes=tuple(beside[rewritten]),
            )


def _is_worthwhile(concatenation: Operation, least_bytes: float) -> bool:
    """Whether it is as large, and its pieces hardly take more than it where rows are padded."""
    axis = concatenation.params["dimension"]
    pieces, (whole,) = concatenation.inputs, concatenation.outputs
    if whole.bytes < least_bytes:
        return False
    if axis < len(whole.shape) - 1:
        return True
    tiles = sum(math.ceil(one.shape[axis] / LANES) for one in pieces)
    return bool(tiles <= _MOST_PADDING * math.ceil(whole.shape[axis] / LANES))


def _summed_with(product: Equation, place: int, axis: int) -> int | None:
    """Along which axis of its other input a product sums, together with this one of an input."""
    params = product.operation.params
    if product.operation.primitive == "dot_general":
        if params.get("out_sharding") is not None:
            return None
        (summed, _) = params["dimension_numbers"]
        if axis in summed[place]:
            other: int = summed[1 - place][summed[place].index(axis)]
            return other
        return None
    numbers = params["dimension_numbers"]
    if place == 0 and params["feature_group_count"] == params["batch_group_count"] == 1:
        return int(numbers.rhs_spec[1]) if axis == numbers.lhs_spec[1] else None
    return None
