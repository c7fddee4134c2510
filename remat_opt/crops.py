"""Slices that are all that is left to read of an array, long before they are read themselves.

A U-Net crops what its contracting path hands to the expanding one, just before that reads it.
Holding the slice from where its operand is made takes less memory than holding the operand. XLA for
TPU does that of its own accord. Others compute the slice inside of what reads it; there
``transform`` has the slice stored where checkpoints are.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from remat_opt.products import PRODUCTS
from remat_opt.program import Equation, Program


def crops(program: Program) -> Iterator[int]:
    """The number of each slice that is worth being stored in the place of its operand.

    All other readers of the operand come first, then a product of matrices or a convolution, and
    only then what reads the slice. Together the slices of an array are smaller than it is.
    """
    yield from _crops(program.equations, program.output_values)


def early(equations: Sequence[Equation], outputs: Sequence[int]) -> tuple[Equation, ...]:
    """The equations in an order in which crops come as soon as their operands are there.

    Args:
      equations: of a program.
      outputs: its output values.
    """
    moved = set(_crops(equations, outputs))
    if not moved:
        return tuple(equations)
    behind: dict[int, list[Equation]] = {}
    for index in sorted(moved):
        behind.setdefault(equations[index].value_inputs[0], []).append(equations[index])
    found: list[Equation] = []

    def add(equation: Equation) -> None:
        found.append(equation)
        for value in equation.outputs:
            for crop in behind.get(value, ()):
                add(crop)

    for index, equation in enumerate(equations):
        if index not in moved:
            add(equation)
    return tuple(found)


def _crops(equations: Sequence[Equation], outputs: Sequence[int]) -> Iterator[int]:
    slices: dict[int, list[int]] = {}
    last_read: dict[int, int] = {}
    first_read: dict[int, int] = {}
    made: dict[int, int] = {}
    for index, equation in enumerate(equations):
        sliced = equation.operation.primitive == "slice"
        for value in equation.value_inputs:
            first_read.setdefault(value, index)
            if sliced:
                slices.setdefault(value, []).append(index)
            else:
                last_read[value] = index
        made.update(dict.fromkeys(equation.outputs, index))
    products = [
        n for n, equation in enumerate(equations) if equation.operation.primitive in PRODUCTS
    ]
    kept = set(outputs)
    for operand, readers in slices.items():
        results = [equations[index].outputs[0] for index in readers]
        if operand not in made or operand in kept or not kept.isdisjoint(results):
            continue
        size = equations[readers[0]].operation.inputs[0].bytes
        if sum(equations[index].operation.outputs[0].bytes for index in readers) >= size:
            continue
        start = max(made[operand], last_read.get(operand, 0))
        end = min(first_read[result] for result in results)
        if bisect.bisect_left(products, end) > bisect.bisect_right(products, start):
            yield from readers
