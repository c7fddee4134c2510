"""How to open each ``shard_map`` of a program: what to keep inside its body.

Problem. A map hands out whatever its body's backward pass needs, and no name from outside reaches
it. But compilers see through it: once a program is cut up for the devices of a mesh, what a map
does is part of the program around it.

Method. The body is a program of its own, of one device's parts, with its own model and schedules.
A schedule of it has three figures: what it keeps, its recomputation, and the workspace of its
backward pass, which are those of the map's vertex then. What communicates with other devices runs
once, and so is under no checkpoint.

Complexity: that of a program of the body's size.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from remat_opt import _jax_meshes, inner, named_chains
from remat_opt.compilers.model import Model, computes_nothing
from remat_opt.compilers.opened import Opening
from remat_opt.compilers.stacks import beside_stacks, stacks
from remat_opt.program import bodies
from remat_opt.program.record import Program
from remat_opt.schedule import Branch, Mapped
from remat_opt.simulator import demand
from remat_opt.solvers.base import Candidate, thinned

#: Gives the model of a body, with candidates for all budgets.
Search = Callable[[Program], tuple[Model, list[Candidate]]]

#: How many schedules of a body are looked at.
_MOST_SCHEDULES = 128


def openings(
    program: Program,
    vertex: int,
    root: int,
    expected: Model,
    search: Search,
    *,
    stacked: bool,
) -> Iterator[Opening]:
    """Ways to open one map, in any order; none if it cannot be.

    Args:
      program: the program it is in.
      vertex: that of the map.
      root: position of its equation.
      expected: the program's model.
      search: gives the model of its body, and candidates.
      stacked: whether what it keeps waits in stacks, as in the body of a loop. Then all that can
        be is under checkpoints (``named_chains``).
    """
    equation = program.equations[root]
    body = bodies.mapped_of(equation, bodies.varying(program))
    if computes_nothing(body) or not body.differentiated:
        return
    own, candidates = _jax_meshes.within_map(equation.jax_equation, lambda: search(body))
    # Use the rates that the rest is counted in.
    forward = own.graph.forward_seconds
    scale = expected.graph.seconds[vertex] / forward if forward else 0.0
    # The cotangent it starts from, and gradients that the rest counts, are there in both.
    counted = expected.graph.cotangent_bytes[vertex]
    counted += inner.gradients_inside_bytes(program, vertex, expected)
    drafts = [one.schedule for one in thinned(candidates, _MOST_SCHEDULES)]
    read = stacks(body, (), body.arguments, own) if stacked else None
    if stacked:
        found = (named_chains.under_checkpoints(own.graph_of(one), one) for one in drafts)
        drafts = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    for schedule in drafts:
        schedule = own.admitted(schedule)
        if schedule.unchanged:
            continue
        graph = own.graph_of(schedule)
        wanted = demand(graph, schedule)
        kept_bytes = sum(graph.bytes[v] for v in wanted.stored)
        kept_bytes += sum(graph.internal_bytes[v] for v in schedule.under_none())
        seconds, flops = own.run_again(graph, schedule, wanted)
        if read is None:
            workspace_bytes = own.peak_bytes(schedule) - kept_bytes
        else:
            workspace_bytes = beside_stacks(own, schedule, read, schedule.regions).whole_bytes
        yield Opening(
            vertex=vertex,
            loop=Mapped(
                root=root,
                body=Branch(
                    stages=own.stages(schedule), kept_bytes=kept_bytes, loops=schedule.loops
                ),
            ),
            stacked_bytes=kept_bytes,
            workspace_bytes=workspace_bytes - counted,
            closed_bytes=expected.inside.get(vertex, 0),
            seconds=scale * seconds,
            flops=flops,
        )
