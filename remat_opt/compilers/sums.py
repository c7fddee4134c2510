"""Sums, whose addends have one cotangent: that of the sum.

A sum hands its cotangent on as it is. Where nothing else reads an addend, that is the addend's
cotangent, too, and no compiler makes another array of it. So skips that are summed up in the end
have one cotangent together, and a branch has that of the residual stream that it is added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from remat_opt.compilers.compiler import Compiler
from remat_opt.program.dataflow import Dataflow

_SUMS = frozenset({"add", "add_any"})
_FORMS = frozenset({"expand_dims", "reshape", "squeeze"})


def sharing(
    flow: Dataflow,
    vertex_of: Mapping[int, int],
    last_reader: Sequence[int],
    compiler: Compiler,
) -> Iterator[int]:
    """The vertices whose cotangent is the array of another vertex's, which is there as long.

    Args:
      flow: of the program.
      vertex_of: for each stored value its vertex.
      last_reader: for each vertex the last that reads it and has a cotangent, or -1.
      compiler: which one it is.
    """
    if not compiler.has("sums_share"):
        return
    for addends in _addends(flow):
        own = {vertex_of[value] for value, alone in addends if alone and value in vertex_of}
        others = {vertex_of[value] for value, _ in addends if value in vertex_of}
        latest = max((last_reader[vertex] for vertex in own), default=-1)
        # What others read too has that array to begin with, where they have not been backward yet.
        holder = min((v for v in others if last_reader[v] == latest), default=-1)
        yield from (vertex for vertex in sorted(own) if vertex > holder >= 0)


def _addends(flow: Dataflow) -> Iterator[list[tuple[int, bool]]]:
    """What is summed up, of each sum that is no addend, each with whether nothing else reads it."""
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
    # For each sum that is an addend, and nothing else, the sum that it ends up in.
    whole: dict[int, int] = {}
    for index in sorted(sums, reverse=True):
        (result,) = program.equations[index].outputs
        top = whole.get(result, result)
        for value in program.equations[index].value_inputs:
            if value in active:
                alone = len(reads[value]) == 1 and value not in outputs
                found.setdefault(top, []).append((value, alone))
                if alone:
                    whole[value] = top
    yield from found.values()
