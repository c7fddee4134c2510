"""Softmax in float32 whose weights a product reads in bfloat16: attention in mixed precision.

Where the weights are rounded, XLA for TPU stores the exponentials: beside the scores, which are
there until all of them are computed. From then on the exponentials alone are read, backward too.
What the product's gradient writes is as narrow as the weights, and all that follows, to the
products that the scores came from, is computed as those read it. (Of weights that are not rounded,
the scores alone are stored, and a cotangent as wide as they are.)

Where the maxima of the rows are arrays of their own, there is one array, of scores or exponentials:
what reads the others computes them. So ``transform`` stores them wherever they are computed. A GPT
of three layers then takes 2,217 MiB on v5e instead of 2,632, and 904 instead of 1,144 with every
layer under a checkpoint; the maxima are 1 MiB.

No checkpoint keeps these statistics of the rows. They are written while the scores are there; above
them, they hold apart what is free around them for as long as they are kept. Twelve layers take
1,562 MiB with maxima kept under one checkpoint for every two or three layers, 1,162 without; with
an update of donated parameters in the same program, 1,568 and 1,214.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from remat_opt.compilers.compiler import Rules
from remat_opt.program.record import Equation, Program

#: What still are the weights: exponentials divided, masked, rounded, laid out.
_WEIGHTS = frozenset(
    "convert_element_type div mul name reduce_precision reshape select_n transpose".split()
)
#: What still is the maximum of a row, or minus infinity where it has none.
_MAXIMUM = frozenset(
    "broadcast_in_dim convert_element_type max reshape select_n stop_gradient".split()
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """A softmax between two products.

    Attributes:
      maxima: the largest score of each row.
      sums: of each row's exponentials.
      exponentials: the value that is summed and divided.
      weights: what comes of it, which the product reads.
    """

    maxima: int
    sums: int
    exponentials: int
    weights: int


def rounded(program: Program, rules: Rules) -> Iterator[Softmax]:
    """Each softmax whose weights are narrower than its exponentials where products read them.

    Of other compilers than that for TPU it is not known that it matters: none for these.
    """
    if not rules.has("softmax"):
        return
    maker = program.makers()
    readers: dict[int, list[int]] = {}
    for index, equation in enumerate(program.equations):
        for value in equation.value_inputs:
            readers.setdefault(value, []).append(index)
    for equation in program.equations:
        if equation.operation.primitive != "exp":
            continue
        maxima = _maxima(program, equation, maker)
        if maxima is None:
            continue
        (exponentials,) = equation.outputs
        reading = (program.equations[index] for index in readers.get(exponentials, ()))
        sums = [one.outputs[0] for one in reading if one.operation.primitive == "reduce_sum"]
        if sums:
            for weights in _narrower(program, exponentials, readers):
                yield Softmax(
                    maxima=maxima, sums=sums[0], exponentials=exponentials, weights=weights
                )


def _maxima(program: Program, equation: Equation, maker: Mapping[int, int]) -> int | None:
    """The maxima of rows, where an exponential is of scores less the maximum of their row."""
    (operand,) = equation.inputs
    if not isinstance(operand, int) or operand not in maker:
        return None
    difference = program.equations[maker[operand]]
    if difference.operation.primitive != "sub" or len(difference.value_inputs) != 2:
        return None
    scores, subtracted = difference.value_inputs
    pending = [subtracted]
    while pending:
        value = pending.pop()
        if value not in maker:
            continue
        found = program.equations[maker[value]]
        if found.operation.primitive == "reduce_max":
            return found.outputs[0] if found.inputs[0] == scores else None
        if found.operation.primitive in _MAXIMUM:
            pending += found.value_inputs
    return None


def _narrower(
    program: Program, exponentials: int, readers: Mapping[int, Sequence[int]]
) -> Iterator[int]:
    """What products read of some exponentials, where it is narrower than they are."""
    full = program.types[exponentials]
    pending, seen = [exponentials], {exponentials}
    while pending:
        weights = pending.pop()
        reading = [program.equations[index] for index in readers.get(weights, ())]
        primitives = {equation.operation.primitive for equation in reading}
        if "dot_general" in primitives and program.types[weights].bytes < full.bytes:
            yield weights
        for equation in reading:
            if equation.operation.primitive in _WEIGHTS:
                for value in equation.outputs:
                    if value not in seen and program.types[value].size == full.size:
                        seen.add(value)
                        pending.append(value)
