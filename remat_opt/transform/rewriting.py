"""Rewrites a program as a chain of ``jax.checkpoint`` regions.

One checkpoint around a whole function changes nothing: its recomputation may start as soon as the
forward pass ends. In a chain, however, each checkpoint ties its recomputation to the arrival of its
own cotangents, so it cannot start early. So each region of a schedule becomes one
``jax.checkpoint`` whose policy keeps the region's kept values by name; every reader inside the
region reads the named value. A region with regions inside is a checkpoint around theirs. Equations
that are fused into several vertices are emitted again in each region that needs them.

Cotangents of a value with many readers are summed as they arrive: barriers keep XLA from leaving
that to the end, see ``turns``. ``compilers.rewrites`` says what else must be written
differently so that a compiler does as planned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import Place
from remat_opt.device import Platform
from remat_opt.errors import PlanFileError, RewriteError
from remat_opt.operation import Operation
from remat_opt.program import bodies
from remat_opt.program.record import Equation, Program
from remat_opt.program.tracing import array_type
from remat_opt.schedule import Branch, Choice, Inside, Loop, Mapped, Part, Stage
from remat_opt.scopes import equation_scope, region_scope
from remat_opt.transform.barriers import (
    behind_barrier,
    cotangents_together,
    stored,
    with_cotangents,
)
from remat_opt.transform.choices import check_choice, run_choice
from remat_opt.transform.equations import name_of, run_one
from remat_opt.transform.loops import check_loop, run_loop
from remat_opt.transform.maps import check_map, run_map
from remat_opt.transform.steps import Rewriting, Step, inputs_of, prepared
from remat_opt.transform.turns import Ties, in_turn, ties, with_partner

#: Functions with a gradient rule of their own.
_OWN_GRADIENT = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})


def rewrite(
    program: Program,
    stages: Sequence[Stage],
    platform: Platform,
    off: Set[str] = frozenset(),
    *,
    loops: Sequence[Inside] = (),
    named: Set[int] = frozenset(),
    within: str = "",
    place: Place = Place.TOP,
    mesh: Any = None,
    unchanged: bool = False,
) -> Callable[..., list[Any]]:
    """The program as a function of its constants and flat arguments, run stage by stage.

    Args:
      program: a traced function.
      stages: hold every root equation once, in an order of execution. What no stage
        computes and the result still needs is computed at the end, as it is.
      platform: whose compiler is expected. On another one the results are the same, but the memory
        may not be.
      off: names of compiler rules to switch off.
      loops: the program's opened loops, choices and maps; the others run as they are.
      named: equations whose outputs carry a name for a policy around all of it.
      within: what to put into names, so that they are not those of the program around this one.
      place: where the program runs.
      mesh: the mesh that its arrays are split over, if it is an inner program: else it knows.
      unchanged: whether it runs as it is: the stages are only checked.

    Returns:
      A function ``run(constants, arguments) -> flat outputs``.

    Raises:
      PlanFileError: the stages do not fit the program.
    """
    _check_stages(program, stages)
    _check_loops(program, loops, named)
    mesh = mesh or program.mesh
    rules = Rules.none(platform) if unchanged else Rules(platform=platform, off=frozenset(off))
    stages = () if unchanged else stages
    rewriting, steps = prepared(program, stages, rules, named=frozenset(named), place=place)

    def running(loop: Inside) -> Callable[[Sequence[Any]], list[Any]]:
        given = (
            program.equations[loop.root],
            rewriting.summed,
            functools.partial(rewrite, platform=platform, off=off, mesh=mesh),
            f"{within}{loop.root}_in_",
        )
        if isinstance(loop, Choice):
            return functools.partial(_run_choice, loop, *given)
        if isinstance(loop, Mapped):
            own = Place.LOOP if place is Place.LOOP else Place.TOP
            return functools.partial(_run_map, loop, own, *given)
        return functools.partial(_run_loop, loop, platform, mesh, *given)

    opened = {loop.root: running(loop) for loop in loops}
    whole = dataclasses.replace(rewriting, loops=opened, within=within)

    def run(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        environment: dict[int, Any] = dict(zip(program.constants, constants, strict=True))
        environment.update(zip(program.arguments, arguments, strict=True))
        _run(whole, steps, environment)
        return [
            environment[atom] if isinstance(atom, int) else atom.value for atom in program.outputs
        ]

    return run


def _run_loop(
    loop: Loop,
    platform: Platform,
    mesh: Any,
    equation: Equation,
    summed: Set[int],
    rewritten: Callable[..., Callable[..., list[Any]]],
    inside: str,
    inputs: Sequence[Any],
) -> list[Any]:
    """Runs a loop in its parts, each iteration by the plan of its part.

    Args:
      loop: how it is opened.
      platform: whose compiler is expected.
      mesh: the mesh that arrays are split over; None without one.
      equation: the loop.
      summed: differentiated values of the surrounding program.
      rewritten: ``rewrite`` for the same compiler.
      inside: what to put into names in it.
      inputs: the equation's inputs.
    """
    program = bodies.body_of(equation, summed)

    def body(part: Part) -> tuple[Callable[..., list[Any]], Callable[..., Any]]:
        run = rewritten(
            program,
            part.stages,
            loops=part.loops,
            named=frozenset(part.kept),
            within=inside,
            place=Place.ITERATION if part.checkpointed else Place.LOOP,
        )
        return functools.partial(run, program.constant_values), _policy(program, part.kept, inside)

    return run_loop(equation, loop, inputs, body, platform, mesh)


def _run_choice(
    choice: Choice,
    equation: Equation,
    summed: Set[int],
    rewritten: Callable[..., Callable[..., list[Any]]],
    inside: str,
    inputs: Sequence[Any],
) -> list[Any]:
    """Runs a choice, each branch by its own plan; see ``_run_loop``."""

    def runner(number: int, program: Program, branch: Branch) -> Callable[..., list[Any]]:
        run = rewritten(
            program,
            branch.stages,
            loops=branch.loops,
            within=f"{inside}{number}_",
            place=Place.BRANCH,
        )
        return lambda *given: run(program.constant_values, given)

    programs = bodies.branches_of(equation, summed)
    runs = map(runner, itertools.count(), programs, choice.branches)
    return run_choice(equation, inputs, list(runs))


def _run_map(
    mapped: Mapped,
    place: Place,
    equation: Equation,
    summed: Set[int],
    rewritten: Callable[..., Callable[..., list[Any]]],
    inside: str,
    inputs: Sequence[Any],
) -> list[Any]:
    """Runs a map, its body by its own plan; see ``_run_loop``.

    It counts as a part of the program around it, which runs at ``place``.
    """
    body = mapped.body
    program = bodies.mapped_of(equation, summed)
    run = rewritten(program, body.stages, loops=body.loops, within=inside, place=place)
    return run_map(equation, inputs, lambda *given: run(program.constant_values, given))


def _policy(program: Program, kept: Iterable[int], within: str) -> Callable[..., Any]:
    """The policy that keeps the outputs of these equations."""
    names = [
        name_of(index, position, within)
        for index in sorted(kept)
        for position in range(len(program.equations[index].outputs))
    ]
    policy: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(*names)
    return policy


def _check_loops(program: Program, loops: Sequence[Inside], named: Set[int]) -> None:
    """Raises PlanFileError unless the loops are some of the program's, each once."""
    roots = [loop.root for loop in loops]
    strange = [root for root in (*roots, *named) if not 0 <= root < len(program.equations)]
    if strange or len(set(roots)) < len(roots):
        raise PlanFileError(
            f"The plan opens loops at the equations {sorted(roots)} and keeps {sorted(named)} of a "
            f"program with {len(program.equations)}. Make the plan again."
        )
    for loop in loops:
        if isinstance(loop, Choice):
            check_choice(program.equations[loop.root], loop)
        elif isinstance(loop, Mapped):
            check_map(program.equations[loop.root], loop)
        else:
            check_loop(program.equations[loop.root], loop)


def _run(
    rewriting: Rewriting,
    steps: Sequence[Step],
    environment: dict[int, Any],
    *,
    around: tuple[int, ...] = (),
) -> None:
    """Runs steps one after the other and adds their outputs to the environment.

    Args:
      rewriting: what holds for all steps.
      steps: in an order of execution.
      environment: the values known before.
      around: the number of the region that contains the steps.
    """
    barrier = cotangents_together if rewriting.ways.stacked and not around else behind_barrier
    for number, turn in enumerate(in_turn(rewriting, steps)):
        step = turn.step
        _pass_on(stored, turn.delayed, environment)
        _pass_on(barrier, turn.before, environment)
        given = [environment[value] for value in step.inputs]
        # A sum where regions meet has only the region's name.
        with jax.named_scope(region_scope((*around, number))):
            results = _runner(rewriting, step, (*around, number))(*given)
        _check_types(rewriting.program, step, results)
        environment.update(zip(step.outputs, results, strict=True))
        for values in turn.after:
            _pass_on(barrier, values, environment)


def _pass_on(
    barrier: Callable[..., tuple[Any, ...]], values: Sequence[int], environment: dict[int, Any]
) -> None:
    """Puts what a barrier makes of some values, if any, in their place."""
    if not values:
        return
    passed = barrier(*(environment[value] for value in values))
    environment.update(zip(values, passed, strict=True))


def _check_stages(program: Program, stages: Sequence[Stage]) -> None:
    """Raises PlanFileError unless the stages can run: a plan may come from a file."""
    seen: set[int] = set()
    for number, stage in enumerate(stages):
        for root in stage.roots:
            if not 0 <= root < len(program.equations):
                raise PlanFileError(
                    f"Region {number} of the plan names equation {root}, but the program has "
                    f"{len(program.equations)}. Make the plan again."
                )
            if root in seen:
                raise PlanFileError(
                    f"The plan computes equation {root} in two regions. Make the plan again."
                )
            seen.add(root)
            if stage.checkpointed and internals.has_side_effects(
                program.equations[root].jax_equation
            ):
                raise PlanFileError(
                    f"Region {number} of the plan recomputes equation {root}, a "
                    f"{program.equations[root].operation.primitive} with side effects. Make the "
                    "plan again."
                )
        strange = sorted(set(stage.kept) - set(stage.roots))
        if strange:
            raise PlanFileError(
                f"Region {number} of the plan keeps equation {strange[0]}, which it does not "
                "compute. Make the plan again."
            )
        if not stage.inside:
            continue
        if not stage.checkpointed or sorted(
            root for one in stage.inside for root in one.roots
        ) != sorted(stage.roots):
            raise PlanFileError(
                f"Region {number} of the plan has regions inside that do not add up to it. Make "
                "the plan again."
            )
        _check_stages(program, stage.inside)


def _check_types(program: Program, step: Step, results: Sequence[Any]) -> None:
    """Checks that a rewrite kept the types; if not, it is a bug of ours.

    (That the rewritten program is well formed as a whole is checked in tests: JAX's own
    check would cost as much as tracing does, at every call.)
    """
    for value, result in zip(step.outputs, results, strict=True):
        expected = program.types[value]
        found = array_type(internals.type_of(result))
        if found != expected:
            raise RewriteError(
                f"Rewriting {program.name!r} turned a {expected.dtype}{list(expected.shape)} into "
                f"a {found.dtype}{list(found.shape)}. This is a fault of remat_opt: please report "
                "it with the function."
            )


def _tied_together(
    found: Ties, step: Step, program: Program, index: int, environment: Mapping[int, Any]
) -> tuple[int, ...]:
    """A product, and the one it is summed with, if all that one reads is there."""
    partner = found.partners.get(index)
    if partner is None or not environment.keys() >= {*step.values_read_by(program, partner)}:
        return (index,)
    return index, partner


def _runner(
    rewriting: Rewriting, step: Step, region_number: tuple[int, ...]
) -> Callable[..., list[Any]]:
    """A step as a function of its inputs."""
    program = rewriting.program
    found = ties(rewriting, step)
    before, behind, tied = found.before, found.behind, found.inputs
    # Inputs that have passed a barrier already, with those of an earlier product.
    ahead: dict[int, list[Any]] = {}

    def read(index: int, environment: Mapping[int, Any]) -> list[Any]:
        atoms = step.read_by(program, index)
        return [environment[atom] if isinstance(atom, int) else atom.value for atom in atoms]

    def run_equation(index: int, environment: dict[int, Any]) -> None:
        equation = program.equations[index]
        inputs = read(index, environment)
        if index in ahead:
            inputs = ahead.pop(index)
        elif index in before:
            indices = _tied_together(found, step, program, index, environment)
            passed = pass_together(indices, environment)
            inputs = passed.pop(index)
            ahead.update(passed)
        elif index in tied and index not in rewriting.ways.weight_place:
            places = tied[index]
            same = cotangents_together(*(inputs[place] for place in places))
            for place, value in zip(places, same, strict=True):
                inputs[place] = value
        if index in rewriting.ways.partner and not step.checkpointed:
            partner = rewriting.ways.partner[index]
            inputs = list(with_partner(program, partner, inputs, environment))
        if index in found.follows:
            value = found.follows[index]
            *inputs, environment[value] = stored(*inputs, environment[value])
        if index in rewriting.ways.unmerged:
            place = rewriting.ways.unmerged[index]
            (inputs[place],) = stored(inputs[place])
        weight = rewriting.ways.weight_place.get(index) if index in tied else None
        results = run_one(
            rewriting,
            index,
            inputs,
            named=index in step.named,
            weight=weight,
            join=step.joined.get(index),
        )
        environment.update(zip(equation.outputs, results, strict=True))
        if index in behind:
            _pass_on(cotangents_together, (*equation.outputs, *behind[index]), environment)
        if index in found.after:
            _pass_on(behind_barrier, (*equation.outputs, *sorted(found.after[index])), environment)

    def pass_together(indices: Sequence[int], environment: dict[int, Any]) -> dict[int, list[Any]]:
        """Passes the inputs of products through one barrier; gives them for each product."""
        atoms = [(index, atom) for index in indices for atom in step.read_by(program, index)]
        values = behind_barrier(*(value for index in indices for value in read(index, environment)))
        passed: dict[int, list[Any]] = {index: [] for index in indices}
        for (index, atom), value in zip(atoms, values, strict=True):
            passed[index].append(value)
            if atom in before[index]:
                environment[atom] = value
        return passed

    def run_named(index: int, environment: dict[int, Any]) -> None:
        with jax.named_scope(equation_scope(index)):
            run_equation(index, environment)

    def run_twice(group: Sequence[int], environment: dict[int, Any]) -> None:
        values = inputs_of(program, group)
        (result,) = program.equations[group[-1]].outputs

        @jax.checkpoint
        def run(*given: Any) -> Any:
            own = dict(zip(values, given, strict=True))
            for index in group:
                run_named(index, own)
            return own[result]

        environment[result] = run(*(environment[value] for value in values))

    def region(*given: Any) -> list[Any]:
        environment = dict(zip(step.inputs, given, strict=True))
        ahead.clear()  # of a trace that ended with an error
        _run(rewriting, step.inside, environment, around=region_number)
        groups = {group[0]: group for group in step.twice}
        later = {index for group in step.twice for index in group[1:]}
        for index in step.equations:
            if index in groups:
                run_twice(groups[index], environment)
            elif index not in later:
                run_named(index, environment)
        return [environment[value] for value in step.outputs]

    if not step.checkpointed:
        return region
    run = jax.checkpoint(region, policy=_policy(program, step.kept, rewriting.within))
    operations = (program.equations[index].operation for index in step.all_equations())
    if not any(map(_has_own_gradient, operations)):
        return run
    return lambda *given: list(with_cotangents(*run(*given)))


def _has_own_gradient(operation: Operation) -> bool:
    """Whether it is, or has inside, a function with a gradient rule of its own."""
    return operation.primitive in _OWN_GRADIENT or any(
        _has_own_gradient(inner) for body in operation.bodies for inner in body.operations
    )
