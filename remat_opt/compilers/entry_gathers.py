"""Gathers of entries along one axis, for each place along the others: ``take_along_axis``.

XLA for NVIDIA looks entries up by their indices along all axes, and writes those side by side as
one array, before the lookup and again, if it is under a checkpoint, before its gradient: 16 bytes
for every entry of a four-dimensional result. (Four layers over 8 x 8 x 512 x 512 float32, each
reordered along its last axis, on h200: 1,089 MiB, of which these indices are 256. Where each layer
has its own, as after an ``argsort``: 1,793, and 1,024.)

An array that is read as a flat one has one index for each entry, which is a part of the kernel that
looks it up, and none is written. ``transform`` does so: 384 MiB with least memory instead of 592,
and 386 instead of 642.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from remat_opt import costs
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.row_gathers import is_row_gather
from remat_opt.program.record import Atom, Equation, Program

if TYPE_CHECKING:
    from remat_opt.program.dataflow import Dataflow

#: What an index into a flat array counts up to.
_LARGEST = 2**31 - 1


def flattening(program: Program, rules: Rules) -> frozenset[int]:
    """The gathers that are to read their operand as a flat array.

    None on a mesh: where the other axes are split, each device looks up its own part, and a flat
    array would have to be gathered for that.
    """
    if program.placement is not None or not rules.has("entries_flat"):
        return frozenset()
    return frozenset(_entry_gathers(program))


def listed(flow: Dataflow, rules: Rules) -> dict[int, int]:
    """The values that are written beside positions along all other axes, as indices.

    Args:
      flow: of a program.
      rules: those of the compiler.

    Returns:
      For each, how many times as large the array of indices is. XLA computes the same value once:
      its array is there for the first that is read, and nothing for another.
    """
    if not rules.has("indices_listed"):
        return {}
    found: dict[int, int] = {}
    first: dict[Hashable, int] = {}
    known: dict[int, Hashable] = {}
    for index in _entry_gathers(flow.program):
        equation = flow.program.equations[index]
        indices = equation.inputs[1]
        if isinstance(indices, int) and flow.source[indices] in flow.maker:
            value = flow.source[indices]
            axes = 1 + len(equation.operation.params["dimension_numbers"].operand_batching_dims)
            one = first.setdefault(_computed_as(flow, value, known), value)
            found.setdefault(value, 0)
            found[one] = max(axes, found[one])
    return found


def _entry_gathers(program: Program) -> Iterator[int]:
    """The gathers of entries, but for those of one from each row, in order."""
    found = [index for index, one in enumerate(program.equations) if is_entry_gather(one)]
    maker = program.makers() if found else {}
    for index in found:
        if not is_row_gather(program, maker, program.equations[index]):
            yield index


def _computed_as(flow: Dataflow, atom: Atom, known: dict[int, Hashable]) -> Hashable:
    """How a value is computed by elementwise equations: equal for those that XLA computes once."""
    if not isinstance(atom, int):
        return atom.text
    value = flow.source[atom]
    maker = flow.maker.get(value)
    if maker is None or flow.costs[maker].fusion is not costs.Fusion.FUSIBLE:
        return value
    if value not in known:
        equation = flow.program.equations[maker]
        place = equation.outputs.index(value)
        operands = tuple(_computed_as(flow, one, known) for one in equation.inputs)
        # Its hash: what it is made of may be made of the same in turn, many times over.
        described = (equation.operation.primitive, equation.parameters, place, operands)
        known[value] = hash(described)
    return known[value]


def is_entry_gather(equation: Equation) -> bool:
    """Whether an equation reads single entries along one axis, for each place along some others.

    Along the rest, its operand has a length of one.
    """
    operation = equation.operation
    if operation.primitive != "gather":
        return False
    numbers = operation.params["dimension_numbers"]
    operand = operation.inputs[0]
    (axis, *more), batched = numbers.start_index_map, tuple(numbers.operand_batching_dims)
    return (
        not more
        and len(batched) > 0
        and set(operation.params["slice_sizes"]) == {1}
        and 0 < operand.size <= _LARGEST
        and operand.size == math.prod(operand.shape[place] for place in {axis, *batched})
    )
