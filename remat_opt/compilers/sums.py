"""Sums: their addends share one cotangent, that of the sum.

A sum passes on its cotangent unchanged. If nothing else reads an addend, that is also the addend's
cotangent, and no compiler makes another array of it. So skips that are summed at the end share one
cotangent, and a branch shares that of the residual stream it is added to. An addend with other
readers gets a separate array once their contributions are added.

XLA for NVIDIA takes a sum in two steps if more than 1,024 entries lie between two other axes, as
over the pixels of each image and channel: a mean that gates an activation, or instance
normalisation. What is summed is written then, if anything else reads it. (Seen with 33 x 33 pixels
and not with 32 x 32; nor with sums over the first or the last axes. Squeeze-and-excite was
predicted 11 to 28 % too small.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import Operation
from remat_opt.program.dataflow import Dataflow

_SUMS = frozenset({"add", "add_any"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
#: The most entries that are summed in one step.
_ONE_STEP = 1024
_FORMS = frozenset({"expand_dims", "reshape", "squeeze"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The vertices whose cotangent is that of another vertex, which lives as long.

    Attributes:
      holders: those others.
      alone: those whose cotangent is nothing else.
      until: for those that have an array of their own later the vertex whose backward step makes
        it.
      arguments: for arguments that share it the vertex that reads them both, and the one whose
        backward step is the last in which it is that other's.
    """

    holders: frozenset[int]
    alone: frozenset[int]
    until: Mapping[int, int]
    arguments: Mapping[int, tuple[int, int]]


def sharing(
    flow: Dataflow,
    vertex_of: Mapping[int, int],
    readers: Sequence[Sequence[int]],
    compiler: Compiler,
) -> Sharing:
    """Finds the vertices that share the cotangent of a sum.

    Args:
      flow: the program's dataflow.
      vertex_of: for each stored value that may share its cotangent, the vertex.
      readers: for each vertex, those that read it and have a cotangent, ascending.
      compiler: the compiler.
    """
    holders: set[int] = set()
    found: set[int] = set()
    until: dict[int, int] = {}
    arguments: dict[int, tuple[int, int]] = {}
    # For vertices of sums the last step, of the lowest vertex, during which their array is there.
    reach: dict[int, int] = {}
    for addends in _addends(flow) if compiler.has("sums_share") else ():
        read_by: dict[int, dict[int, bool]] = {}
        for value, alone in addends:
            if value in vertex_of and readers[vertex_of[value]]:
                vertex = vertex_of[value]
                # Later readers have already run backward when it is the sum's turn.
                read_by.setdefault(readers[vertex][-1], {})[vertex] = alone
        given = [value for value, _ in addends if value not in flow.maker]
        for reader, members in sorted(read_by.items()):
            holder = min(members, key=lambda vertex: reach.get(vertex, vertex))
            reach[reader] = reach.get(holder, holder)
            if len(members) > 1 or given:
                holders.add(holder)
            for value in given:
                arguments[value] = reader, reach[reader]
            for vertex in members.keys() - {holder}:
                if members[vertex]:
                    found.add(vertex)
                elif len(readers[vertex]) > 1:
                    until[vertex] = readers[vertex][-2]
    return Sharing(
        holders=frozenset(holders),
        alone=frozenset(found) - holders,
        until=until,
        arguments=arguments,
    )


def stored(flow: Dataflow, compiler: Compiler) -> set[int]:
    """What is written before it is summed in two steps.

    Args:
      flow: of the program.
      compiler: which one it is.
    """
    if not compiler.has("sums_split"):
        return set()
    summed = {
        value
        for index, equation in enumerate(flow.program.equations)
        if _is_split(equation.operation)
        for value in flow.reads(index)
    }
    if not summed:
        return set()
    readers = flow.reader_counts()
    return {value for value in summed if readers[value] > 1}


def _is_split(operation: Operation) -> bool:
    """Whether more than 1,024 entries between two other axes are summed."""
    if operation.primitive not in _REDUCTIONS:
        return False
    shape = operation.inputs[0].shape
    axes = sorted(axis for axis in operation.params["axes"] if shape[axis] > 1)
    if not axes:
        return False
    first, last = axes[0], axes[-1]
    between = math.prod(shape[first : last + 1])
    return (
        between == math.prod(shape[axis] for axis in axes)
        and between > _ONE_STEP
        and math.prod(shape[:first]) > 1
        and math.prod(shape[last + 1 :]) > 1
    )


def _addends(flow: Dataflow) -> Iterator[list[tuple[int, bool]]]:
    """The addends of each outermost sum, each with whether nothing else reads it."""
    program, active = flow.program, flow.linearization.active_values
    sums = {
        index
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive in _SUMS | _FORMS and active.issuperset(equation.outputs)
    }
    reads: dict[int, list[int]] = {}
    for index, equation in enumerate(program.equations):
        if not active.isdisjoint(equation.outputs):
            for value in equation.value_inputs:
                reads.setdefault(value, []).append(index)
    outputs = set(program.output_values)
    found: dict[int, list[tuple[int, bool]]] = {}
    # For each sum that is only an addend, the sum that it ends up in.
    whole: dict[int, int] = {}
    for index in sorted(sums, reverse=True):
        (result,) = program.equations[index].outputs
        top = whole.get(result, result)
        size = program.types[result].size
        for value in program.equations[index].value_inputs:
            # The cotangent of what is broadcast, such as a bias, is a smaller array.
            if value in active and program.types[value].size == size:
                alone = len(reads[value]) == 1 and value not in outputs
                found.setdefault(top, []).append((value, alone))
                if alone:
                    whole[value] = top
    yield from found.values()
