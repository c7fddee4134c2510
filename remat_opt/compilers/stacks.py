"""What an iteration of a loop holds of the stacks that it reads (``entries_sliced``).

What the iterations keep for the backward pass waits in stacks, as what a loop goes through does.
XLA for NVIDIA reads an entry where it lies, unless a kernel does that it does not write itself:
for a product the entry is copied. That of something kept is copied shortly before it is read; that
of a weight before its first reader, and there up to the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_opt import costs
from remat_opt.compilers.model import Model
from remat_opt.compilers.overwriting import overwritten_bytes
from remat_opt.graph import Graph
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Program
from remat_opt.schedule import Schedule
from remat_opt.simulator import demand
from remat_opt.spans import Stacks


def stacks(body: Program, entries: Sequence[int], expected: Model) -> Stacks | None:
    """What an iteration copies from stacks; None where it is not known to read any in place.

    Args:
      body: of the loop.
      entries: its arguments that are entries of stacks.
      expected: its model.
    """
    if not expected.compiler.has("entries_sliced"):
        return None
    source = {value: value for value in entries}
    copying = np.zeros(len(expected.roots), dtype=bool)
    vertex_of = {root: vertex for vertex, root in enumerate(expected.roots)}
    readers: dict[int, list[int]] = {}
    for index, equation in enumerate(body.equations):
        read = [source[value] for value in equation.value_inputs if value in source]
        if equation.operation.primitive in ALIASES:
            source.update((value, read[0]) for value in equation.outputs if read)
        elif index in vertex_of and costs.cost(equation.operation).fusion is costs.Fusion.OPAQUE:
            copying[vertex_of[index]] = True
            for value in read:
                readers.setdefault(value, []).append(vertex_of[index])
    return Stacks(
        slicing=copying,
        inputs=[
            (expected.compiler.buffer_bytes(body.types[value]), tuple(found))
            for value, found in readers.items()
        ],
    )


def iteration_bytes(expected: Model, schedule: Schedule, stacks: Stacks | None) -> int:
    """What the backward pass of an iteration takes beside the stacks.

    Args:
      expected: the model of the body.
      schedule: what it keeps, and how it runs again.
      stacks: what it copies; None if nothing is known of it.
    """
    if stacks is None:
        return expected.peak_bytes(schedule)
    graph = expected.graph_of(schedule)
    if stacks.slicing is not None:
        graph = _with_nothing_over_stacks(graph, schedule, expected)
    return expected.laid_out_bytes(graph, schedule, stacks)


def _with_nothing_over_stacks(graph: Graph, schedule: Schedule, expected: Model) -> Graph:
    """The graph where no cotangent takes the place of a value that is in a stack."""
    if not expected.compiler.has("values_go"):
        return graph
    workspaces = list(graph.workspace_bytes)
    in_stacks = demand(graph, schedule).stored
    less = overwritten_bytes(expected.graph, frozenset(in_stacks))
    for vertex, size in overwritten_bytes(expected.graph).items():
        workspaces[vertex] += size - less.get(vertex, 0)
    return dataclasses.replace(graph, workspace_bytes=tuple(workspaces))
