"""How to open each ``cond`` of a program: what to keep inside its branches.

Problem. For its backward pass, a ``cond`` hands out whatever any of its branches would keep. Arrays
of one type in different branches share a place; the others are zeros whenever their branch does not
run. All of it exists from the forward pass on, and no name from outside reaches it.

Method. A branch is a program with its own model and schedules, and runs as a chain. All its regions
are under checkpoints, and what is not recomputed is kept by name: nothing behind a ``cond`` fuses
with what is inside it, and JAX would keep much that a backward step can make at no cost. So a
branch has three figures: what it keeps, by type; its recomputation; and the workspace of its
backward pass. Over all branches, the most of each type is kept, and the largest of the other two
figures counts, as for the cost of a ``cond``. For each limit on recomputation, every branch runs in
the way that takes the least memory.

Complexity: for a branch, that of a program of its size; the rest is arithmetic on a few dozen ways.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from remat_opt import _jax_internals as internals
from remat_opt import named_chains
from remat_opt.compilers.model import Model, computes_nothing
from remat_opt.compilers.opened import Opening
from remat_opt.program import bodies
from remat_opt.program.record import Derivative, Program
from remat_opt.schedule import Branch, Choice, Schedule
from remat_opt.simulator import demand
from remat_opt.solvers.base import Candidate, Overhead, thinned

#: Gives the model of a branch, with candidates for all budgets.
Search = Callable[[Program], tuple[Model, list[Candidate]]]

#: How many schedules of a branch, and limits on recomputation, are looked at.
_MOST_SCHEDULES, _MOST_LIMITS = 48, 96


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a branch.

    Attributes:
      branch: what is decided.
      kept: for each type of array that waits for the backward pass, how many there are and the
        bytes of one.
      workspace_bytes: what its backward pass takes besides.
      seconds: of recomputation.
      flops: likewise.
    """

    branch: Branch
    kept: Mapping[Hashable, tuple[int, int]]
    workspace_bytes: int
    seconds: float
    flops: int

    def cost(self, measure: Overhead) -> float:
        """The total recomputation."""
        return measure.of(self.seconds, self.flops)


def openings(
    program: Program,
    vertex: int,
    root: int,
    derivative: Derivative,
    expected: Model,
    measure: Overhead,
    of_branch: Callable[[Program], tuple[list[Way], float]],
) -> Iterator[Opening]:
    """Ways to open one choice, in any order; none if it cannot be.

    Args:
      program: the program it is in.
      vertex: that of the choice.
      root: position of its equation.
      derivative: of the choice as it is.
      expected: the program's model.
      measure: what recomputation is counted in.
      of_branch: gives the ways to run a branch, and its time forward (``ways``).
    """
    equation = program.equations[root]
    found = [of_branch(one) for one in bodies.branches_of(equation, bodies.varying(program))]
    if not all(of_one for of_one, _ in found):
        return
    graph = expected.graph
    # Use the rates that the rest is counted in.
    forward = max(seconds for _, seconds in found)
    scale = graph.seconds[vertex] / forward if forward else 0.0
    read_bytes = _read_bytes(program, root, derivative, expected)
    for chosen in _together([of_one for of_one, _ in found], measure):
        workspace = max(one.workspace_bytes for one in chosen)
        yield Opening(
            vertex=vertex,
            loop=Choice(root=root, branches=tuple(one.branch for one in chosen)),
            stacked_bytes=_merged_bytes(chosen) + read_bytes,
            # The cotangent it starts from is there in both.
            workspace_bytes=max(0, workspace - graph.cotangent_bytes[vertex]),
            closed_bytes=expected.inside.get(vertex, 0),
            seconds=scale * max(one.seconds for one in chosen),
            flops=max(one.flops for one in chosen),
        )


def _together(branches: Sequence[Sequence[Way]], measure: Overhead) -> Iterator[tuple[Way, ...]]:
    """One way for each branch, for every limit on recomputation."""
    costs = sorted({way.cost(measure) for ways in branches for way in ways})
    least = max(min(way.cost(measure) for way in ways) for ways in branches)
    memory: tuple[Callable[[Way], int], ...] = (
        lambda way: way.branch.kept_bytes + way.workspace_bytes,
        lambda way: way.branch.kept_bytes,
    )
    for limit in thinned([cost for cost in costs if cost >= least], _MOST_LIMITS):
        for size in memory:
            yield tuple(
                min(
                    (way for way in ways if way.cost(measure) <= limit),
                    key=lambda way: (size(way), way.cost(measure)),
                )
                for ways in branches
            )


def _merged_bytes(chosen: Sequence[Way]) -> int:
    """What a choice hands out for its backward pass: as many of each type as any branch keeps."""
    most: dict[Hashable, int] = {}
    for way in chosen:
        for kind, (count, size) in way.kept.items():
            most[kind] = max(most.get(kind, 0), count * size)
    return sum(most.values())


def _read_bytes(program: Program, root: int, derivative: Derivative, expected: Model) -> int:
    """Inputs that wait for the backward pass where checkpoints in the branches read them.

    What the choice also reads when unopened is counted as its predecessor.
    """
    equation = program.equations[root]
    read = {place: atom for place, atom in enumerate(equation.inputs) if isinstance(atom, int)}
    if not internals.branches_copy_inputs():
        given = {*program.arguments, *program.constants}
        read = {p: v for p, v in read.items() if v not in given and p not in derivative.inputs}
    return sum(
        expected.compiler.buffer_bytes(program.types[value])
        for place, value in read.items()
        if place
    )


# --- one branch ---------------------------------------------------------------------------


def ways(body: Program, search: Search) -> tuple[list[Way], float]:
    """The ways to run a branch that no other beats in every figure, and its forward time."""
    if computes_nothing(body):
        as_it_is = Branch(stages=())
        return [Way(branch=as_it_is, kept={}, workspace_bytes=0, seconds=0.0, flops=0)], 0.0
    expected, candidates = search(body)
    schedules = dict.fromkeys(
        schedule
        for one in thinned(candidates, _MOST_SCHEDULES)
        for schedule in named_chains.under_checkpoints(
            expected.graph_of(one.schedule), one.schedule
        )
    )
    found = [_way(body, expected, schedule) for schedule in schedules]
    figures = [
        (one.branch.kept_bytes, one.workspace_bytes, one.seconds, one.flops) for one in found
    ]
    best = [
        one
        for number, one in enumerate(found)
        if not any(
            all(theirs <= own for theirs, own in zip(other, figures[number], strict=True))
            and (other != figures[number] or place < number)
            for place, other in enumerate(figures)
        )
    ]
    return best, expected.graph.forward_seconds


def _way(body: Program, expected: Model, schedule: Schedule) -> Way:
    """A schedule of a branch, with its figures."""
    schedule = expected.admitted(schedule)
    graph = expected.graph_of(schedule)
    wanted = demand(graph, schedule)
    again = list(wanted.all_recomputed())
    seconds, flops = expected.recomputation(schedule)
    counts: Counter[tuple[Hashable, int]] = Counter(
        (tuple(body.types[value] for value in body.equations[expected.roots[v]].outputs), size)
        for v in wanted.stored
        if (size := graph.bytes[v])
    )
    # What loops keep has no type here; it is the same in branches that are alike.
    counts.update(
        ("inside", size) for v in schedule.under_none() if (size := graph.internal_bytes[v])
    )
    kept: dict[Hashable, tuple[int, int]] = {
        kind: (count, kind[1]) for kind, count in counts.items()
    }
    kept_bytes = sum(count * size for count, size in kept.values())
    return Way(
        branch=Branch(
            stages=expected.stages(schedule), kept_bytes=kept_bytes, loops=schedule.loops
        ),
        kept=kept,
        workspace_bytes=max(0, expected.branch_peak_bytes(schedule) - kept_bytes),
        seconds=sum(graph.seconds[vertex] for vertex in again) + seconds,
        flops=sum(graph.flops[vertex] for vertex in again) + flops,
    )
