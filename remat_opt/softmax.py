"""Softmax in float32 whose weights a product reads in bfloat16: attention in mixed precision.

XLA for TPU computes a row's maximum as it reads the row, and where the weights are rounded it
stores the exponentials: beside the scores, which are there until all of them are computed. From
then on the exponentials alone are read, backward too. What the product's gradient writes is as
narrow as the weights, and all that follows, to the products that the scores came from, is computed
as those read it. (Of weights that are not rounded, the scores alone are stored, and a cotangent as
wide as they are.)

Under a checkpoint the weights' cotangent may be a product of what is there before any score is
computed again: the cotangent that arrives, and the values of the attention. XLA takes it first, and
holds it beside both. So ``transform`` has the values wait for the exponentials (``comes_early``). A
GPT plan of 0.60 forward passes then takes 1,362 MiB on v5e instead of 1,567.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from remat_opt.program import Equation, Program

#: What still are the weights: exponentials divided, masked, rounded, laid out.
_WEIGHTS = frozenset(
    "convert_element_type div mul name reduce_precision reshape select_n transpose".split()
)
#: What still is the maximum of a row, or minus infinity where it has none.
_MAXIMUM = frozenset(
    "broadcast_in_dim convert_element_type max reshape select_n stop_gradient".split()
)
#: Linear in all operands together: no cotangent depends on a value of theirs.
_LINEAR = frozenset(
    "add add_any broadcast_in_dim convert_element_type copy neg pad reduce_sum reshape select_n "
    "slice squeeze sub transpose".split()
)
#: Linear in each operand: the cotangent of one depends on the other.
_BILINEAR = frozenset({"dot_general", "mul"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """A softmax between two products.

    Attributes:
      exponentials: the value that is summed and divided.
      weights: what comes of it, which the product reads.
      product: the number of the product's equation.
    """

    exponentials: int
    weights: int
    product: int


def rounded(program: Program) -> Iterator[Softmax]:
    """Each softmax whose weights are narrower than its exponentials where a product reads them."""
    maker = program.makers()
    readers: dict[int, list[int]] = {}
    for index, equation in enumerate(program.equations):
        for value in equation.value_inputs:
            readers.setdefault(value, []).append(index)
    for equation in program.equations:
        if equation.operation.primitive != "exp" or not _of_rows(program, equation, maker):
            continue
        (exponentials,) = equation.outputs
        summed = any(
            program.equations[index].operation.primitive == "reduce_sum"
            for index in readers.get(exponentials, ())
        )
        if summed:
            yield from _products(program, exponentials, readers)


def comes_early(program: Program, one: Softmax, equations: Iterable[int], kept: Set[int]) -> bool:
    """Whether the product's cotangent may be there before the exponentials are computed again.

    That is so if all that lies behind it, in a region, is linear or kept.

    Args:
      program: that the softmax is part of.
      one: of its softmaxes.
      equations: numbers of the region's, ascending.
      kept: those of them whose results are kept.
    """
    behind = set(program.equations[one.product].outputs)
    for index in equations:
        equation = program.equations[index]
        read = sum(value in behind for value in equation.value_inputs)
        if not read or index in kept:
            continue
        if not (
            equation.operation.primitive in _LINEAR
            or (equation.operation.primitive in _BILINEAR and read == 1)
        ):
            return False
        behind.update(equation.outputs)
    return True


def _of_rows(program: Program, equation: Equation, maker: Mapping[int, int]) -> bool:
    """Whether an exponential is of scores less the maximum of their row."""
    (operand,) = equation.inputs
    if not isinstance(operand, int) or operand not in maker:
        return False
    difference = program.equations[maker[operand]]
    if difference.operation.primitive != "sub" or len(difference.value_inputs) != 2:
        return False
    scores, subtracted = difference.value_inputs
    pending = [subtracted]
    while pending:
        value = pending.pop()
        if value not in maker:
            continue
        found = program.equations[maker[value]]
        if found.operation.primitive == "reduce_max":
            return found.inputs[0] == scores
        if found.operation.primitive in _MAXIMUM:
            pending += found.value_inputs
    return False


def _products(
    program: Program, exponentials: int, readers: Mapping[int, Sequence[int]]
) -> Iterator[Softmax]:
    full = program.types[exponentials]
    pending, seen = [exponentials], {exponentials}
    while pending:
        weights = pending.pop()
        for index in readers.get(weights, ()):
            equation = program.equations[index]
            if equation.operation.primitive == "dot_general":
                if program.types[weights].bytes < full.bytes:
                    yield Softmax(exponentials=exponentials, weights=weights, product=index)
            elif equation.operation.primitive in _WEIGHTS:
                for value in equation.outputs:
                    if value not in seen and program.types[value].size == full.size:
                        seen.add(value)
                        pending.append(value)
