"""A plan's stages made ready to run: which equations, what goes in and what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.joins import Join
from remat_opt.compilers.rewrites import Place, Rewrites, rewrites
from remat_opt.program import bodies
from remat_opt.program.record import Atom, Program
from remat_opt.schedule import Stage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A stage made ready to run: which equations, what goes in and what comes out.

    Attributes:
      equations: those to emit, in order; none if there are steps inside.
      inputs: values that it reads.
      outputs: values that later steps or the result read.
      kept: equations whose outputs are saved by the step's own policy.
      named: those whose outputs carry a name, for its policy or that of a step around it.
      checkpointed: whether it runs under ``jax.checkpoint``.
      inside: steps to run in place of ``equations``.
      twice: some of its equations, in groups that follow one another: each is under one more
        checkpoint, which keeps nothing (``Rewrites.twice``).
      joined: for products, the concatenation in whose place they read its pieces. It is none of the
        equations.
    """

    equations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: frozenset[int]
    named: frozenset[int]
    checkpointed: bool
    inside: tuple[Step, ...]
    twice: tuple[tuple[int, ...], ...] = ()
    joined: Mapping[int, Join] = dataclasses.field(default_factory=dict)

    def all_equations(self) -> Iterator[int]:
        """Its equations, and those of the steps inside."""
        yield from self.equations
        for step in self.inside:
            yield from step.all_equations()

    def read_by(self, program: Program, index: int) -> list[Atom]:
        """The inputs of one of its equations; see ``places_read``."""
        places = places_read(program, index, self.joined.get(index))
        return [program.equations[one].inputs[place] for one, place in places]

    def values_read_by(self, program: Program, index: int) -> list[int]:
        """Those of the inputs that are no literals."""
        return [atom for atom in self.read_by(program, index) if isinstance(atom, int)]

    def inputs_for(self, program: Program, index: int, maker: Mapping[int, int]) -> tuple[int, ...]:
        """What one of its equations reads of its inputs, perhaps through others."""
        return inputs_of(program, _emitted(program, (index,), maker, {*self.inputs}))


def places_read(program: Program, index: int, join: Join | None) -> list[tuple[int, int]]:
    """The inputs of an equation, each as an equation and a position among the inputs of that.

    They are its own, but for a concatenation in whose place its pieces are read, if any.
    """
    found = [(index, place) for place in range(len(program.equations[index].inputs))]
    if join is not None:
        count = len(program.equations[join.equation].inputs)
        found[join.place : join.place + 1] = [(join.equation, place) for place in range(count)]
    return found


#: Runs an opened loop on its inputs.
Opened = Callable[[Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """What holds for all steps.

    Attributes:
      program: what to run.
      summed: the values that derivatives are taken of, or with respect to.
      ways: what to write differently.
      loops: those that are opened, by equation.
      within: what distinguishes the names of values from those of the surrounding program.
    """

    program: Program
    summed: frozenset[int]
    ways: Rewrites
    loops: Mapping[int, Opened] = dataclasses.field(default_factory=dict)
    within: str = ""


def prepared(
    program: Program,
    stages: Sequence[Stage],
    rules: Rules,
    *,
    named: frozenset[int] = frozenset(),
    place: Place = Place.TOP,
) -> tuple[Rewriting, list[Step]]:
    """What a program's stages become for a compiler: what to write differently, and the steps.

    Args:
      program: a traced function.
      stages: its stages.
      rules: those of the compiler.
      named: equations whose outputs carry a name for a policy around all of them.
      place: where the program runs.
    """
    recomputes = any(stage.checkpointed for stage in stages)
    ways = rewrites(program, rules, recomputes=recomputes, place=place)
    again = place is Place.ITERATION
    steps = _steps(program, stages, named, twice=ways.twice, again=again)
    steps = [_with_pieces(step, ways.joined) for step in steps] if ways.joined else steps
    return Rewriting(program=program, summed=bodies.summed(program), ways=ways), steps


def _steps(
    program: Program,
    stages: Sequence[Stage],
    named: frozenset[int],
    *,
    twice: Mapping[int, tuple[int, ...]],
    again: bool,
) -> list[Step]:
    """The stages in order, and one more for what the result needs and none of them has.

    Args:
      program: a traced function.
      stages: its stages.
      named: equations whose outputs carry a name for a policy around all of them.
      twice: what is computed twice where it runs again (``Rewrites.twice``).
      again: whether all of it runs again, as an iteration does, whose ``named`` equations lie in
        stacks.
    """
    maker = program.makers()
    all_roots = {root for stage in stages for root in stage.roots}
    available = set(program.constants) | set(program.arguments)
    drafts = _drafts(program, stages, named, maker, available)
    # Outputs that are only another shape of a root are emitted at the end, without a checkpoint. So
    # are side effects that no stage has.
    left = {maker[value] for value in program.output_values if value in maker} | {
        index for index, equation in enumerate(program.equations) if equation.effects
    }
    trailing = _emitted(program, sorted(left - all_roots), maker, available)
    if trailing:
        drafts.append(
            Step(
                outputs=tuple(v for index in trailing for v in program.equations[index].outputs),
                equations=tuple(trailing),
                inputs=inputs_of(program, trailing),
                kept=frozenset(),
                named=named,
                checkpointed=False,
                inside=(),
            )
        )
    steps = _finished(drafts, set(program.output_values))
    return [_grouped(program, step, twice, named, again) for step in steps] if twice else steps


def _with_pieces(step: Step, joins: Mapping[int, Join]) -> Step:
    """A step whose products read the pieces of concatenations that are not kept."""
    there = set(step.equations) - step.named
    joined = {
        index: joins[index]
        for index in step.equations
        if index in joins and joins[index].equation in there
    }
    absorbed = {join.equation for join in joined.values()}
    return dataclasses.replace(
        step,
        equations=tuple(index for index in step.equations if index not in absorbed),
        joined=joined,
        inside=tuple(_with_pieces(one, joins) for one in step.inside),
    )


def _grouped(
    program: Program,
    step: Step,
    twice: Mapping[int, tuple[int, ...]],
    named: frozenset[int],
    again: bool,
) -> Step:
    """A step whose equations that are computed twice follow one another, if it runs again."""
    again = again or step.checkpointed
    if step.inside:
        inside = tuple(_grouped(program, one, twice, named, again) for one in step.inside)
        return dataclasses.replace(step, inside=inside)
    there, wanted = set(step.equations), set(step.outputs)
    in_stacks = {value for one in named for value in program.equations[one].outputs}
    found = {}
    for last in there & twice.keys() if again else ():
        group = twice[last]
        on_the_way = {value for one in group[:-1] for value in program.equations[one].outputs}
        if (
            there.issuperset(group)
            and not there.issubset(group)
            and step.named.isdisjoint(group)
            and wanted.isdisjoint(on_the_way)
            and in_stacks.isdisjoint(inputs_of(program, group))
        ):
            found[last] = group
    moved = {index for group in found.values() for index in group}
    equations: list[int] = []
    for index in step.equations:
        equations += found.get(index, () if index in moved else (index,))
    groups = tuple(found[index] for index in step.equations if index in found)
    return dataclasses.replace(step, equations=tuple(equations), twice=groups)


def _drafts(
    program: Program,
    stages: Sequence[Stage],
    named: frozenset[int],
    maker: Mapping[int, int],
    available: set[int],
) -> list[Step]:
    """Stages one after the other, with everything that they provide as outputs.

    What they provide is added to ``available``.
    """
    drafts = []
    for stage in stages:
        own = frozenset(stage.kept) if stage.checkpointed else frozenset()
        provided = tuple(v for root in stage.roots for v in program.equations[root].outputs)
        if stage.inside:
            equations: tuple[int, ...] = ()
            inside = tuple(_drafts(program, stage.inside, named | own, maker, set(available)))
            made: set[int] = set()
            read = []
            for one in inside:
                read += [value for value in one.inputs if value not in made]
                made.update(one.outputs)
            inputs = _distinct(read)
        else:
            equations = tuple(_emitted(program, stage.roots, maker, available))
            inside = ()
            inputs = inputs_of(program, equations)
        drafts.append(
            Step(
                equations=equations,
                inputs=inputs,
                outputs=provided,
                kept=own,
                named=named | own,
                checkpointed=stage.checkpointed,
                inside=inside,
            )
        )
        available.update(provided)
    return drafts


def _finished(drafts: Sequence[Step], wanted: set[int]) -> list[Step]:
    """The drafts, with only those outputs that are ``wanted`` at the end or by a later one."""
    wanted = set(wanted)
    steps = []
    for draft in reversed(drafts):
        outputs = tuple(value for value in draft.outputs if value in wanted)
        inside = tuple(_finished(draft.inside, set(outputs)))
        steps.append(dataclasses.replace(draft, outputs=outputs, inside=inside))
        wanted.difference_update(draft.outputs)
        wanted.update(draft.inputs)
    return steps[::-1]


def inputs_of(program: Program, equations: Sequence[int]) -> tuple[int, ...]:
    """What the equations read and do not make themselves."""
    made = {value for index in equations for value in program.equations[index].outputs}
    return _distinct(
        value
        for index in equations
        for value in program.equations[index].value_inputs
        if value not in made
    )


def _emitted(
    program: Program,
    roots: Iterable[int],
    maker: Mapping[int, int],
    available: Set[int],
) -> list[int]:
    """The roots and the fused equations behind them, in program order."""
    found: set[int] = set()
    pending = list(roots)
    while pending:
        index = pending.pop()
        if index in found:
            continue
        found.add(index)
        for value in program.equations[index].value_inputs:
            if value not in available and value in maker:
                pending.append(maker[value])
    return sorted(found)


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
