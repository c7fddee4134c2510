"""Rewrites a program as a chain of ``jax.checkpoint`` regions.

One checkpoint round a whole function changes nothing: its recomputation may start as soon
as the forward pass ends. Each checkpoint of a chain, however, ties its recomputation to the
arrival of its own cotangents, so it cannot start before its turn. So each region of a
schedule becomes one ``jax.checkpoint`` whose policy keeps the region's kept values by
name; every reader inside the region reads the named value. A region with regions inside is a
checkpoint round theirs. Equations that are fused into several vertices are emitted again in
each region that needs them.

Cotangents of what is read often are summed up as they come: barriers keep XLA from leaving that to
the end, see ``_run`` and ``_multiplied_again``. What else is written in another way than the
function has it, so that a compiler does as planned, is said by ``compilers.rewrites``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from remat_opt import _jax_internals as internals
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import Rewrites, rewrites
from remat_opt.device import Platform
from remat_opt.errors import PlanFileError, RewriteError
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Equation, Program
from remat_opt.program.tracing import array_type, is_inexact
from remat_opt.schedule import Stage
from remat_opt.scopes import equation_scope, region_scope

#: Equations whose derivative is zero.
_CONSTANT = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})


def name_of(root: int, position: int) -> str:
    """The checkpoint name of one output of an equation."""
    return f"remat_opt_{root}_{position}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A stage made ready to run: which equations, what goes in and what comes out.

    Attributes:
      equations: those to emit, in order; none where there are steps inside.
      inputs: values that it reads.
      outputs: values that later steps or the result read.
      kept: equations whose outputs are saved by the step's own policy.
      named: those whose outputs carry a name, for its policy or that of a step round it.
      checkpointed: whether it runs under ``jax.checkpoint``.
      inside: steps to run in the place of ``equations``.
    """

    equations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: frozenset[int]
    named: frozenset[int]
    checkpointed: bool
    inside: tuple[_Step, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rewriting:
    """What holds for all steps.

    Attributes:
      program: what to run.
      summed: the values that derivatives are taken for, or of.
      ways: what is to be written in another way.
    """

    program: Program
    summed: frozenset[int]
    ways: Rewrites


def rewrite(
    program: Program, stages: Sequence[Stage], platform: Platform, off: Set[str] = frozenset()
) -> Callable[..., list[Any]]:
    """The program as a function of its constants and flat arguments, run stage by stage.

    Args:
      program: a traced function.
      stages: hold every root equation once, in an order of execution. What no stage
        computes and the result still needs is computed at the end, as it is.
      platform: whose compiler is expected. On another the results are the same, and the memory may
        not be.
      off: names of rules about compilers that are switched off.

    Returns:
      A function ``run(constants, arguments) -> flat outputs``.

    Raises:
      PlanFileError: the stages do not fit the program.
    """
    _check_stages(program, stages)
    steps = _steps(program, stages)
    ways = rewrites(
        program,
        Rules(platform=platform, off=frozenset(off)),
        recomputes=any(stage.checkpointed for stage in stages),
    )
    rewriting = _Rewriting(program=program, summed=_active(program), ways=ways)

    def run(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        environment: dict[int, Any] = dict(zip(program.constants, constants, strict=True))
        environment.update(zip(program.arguments, arguments, strict=True))
        _run(rewriting, steps, environment)
        return [
            environment[atom] if isinstance(atom, int) else atom.value for atom in program.outputs
        ]

    return run


def _active(program: Program) -> frozenset[int]:
    """The numbers that depend on a differentiated argument.

    Not those whose derivative is zero whatever they depend on: a barrier makes an array of such a
    zero, and what has no derivative, such as a callback, may read them.
    """
    active = set(program.differentiated)
    for equation in program.equations:
        if equation.operation.primitive in _CONSTANT:
            continue
        if not active.isdisjoint(equation.value_inputs):
            active.update(v for v in equation.outputs if is_inexact(program.types[v]))
    return frozenset(active)


def _run(
    rewriting: _Rewriting,
    steps: Sequence[_Step],
    environment: dict[int, Any],
    *,
    around: tuple[int, ...] = (),
) -> None:
    """Runs steps one after the other and adds what they provide.

    Of what a step reads and later ones read too, those that have a cotangent (``summed``) reach
    them behind a barrier. So the cotangent is summed up step by step; XLA would hold what each
    reader contributes, or all that the parts are slices of, until the last has come, and then add
    them at once. Arguments pass the barrier together with what the step hands on: their parts,
    which nothing else waits for, are added before the step's own turn comes.

    Args:
      rewriting: what holds for all steps.
      steps: in an order of execution.
      environment: the values known before.
      around: the number of the region that the steps are inside of.
    """
    program, summed = rewriting.program, rewriting.summed
    arguments = set(program.arguments)
    last_reader = {value: number for number, step in enumerate(steps) for value in step.inputs}
    for number, step in enumerate(steps):
        given = [environment[value] for value in step.inputs]
        # What is added up where regions meet has the name of the region alone.
        with jax.named_scope(region_scope((*around, number))):
            results = _runner(rewriting, step, (*around, number))(*given)
        _check_types(program, step, results)
        environment.update(zip(step.outputs, results, strict=True))
        if rewriting.ways.stored and step.checkpointed:
            for value in step.outputs:
                if last_reader.get(value, 0) > number:
                    (environment[value],) = _behind_barrier(environment[value])
        shared = [v for v in step.inputs if v in summed and last_reader[v] > number]
        weights = [v for v in shared if v in arguments]
        together = [[v] for v in shared if v not in arguments]
        if weights:
            handed_on = [v for v in step.outputs if v in summed and last_reader.get(v, 0) > number]
            together.append([*weights, *handed_on])
        for values in together:
            behind = _behind_barrier(*(environment[value] for value in values))
            environment.update(zip(values, behind, strict=True))


def _check_stages(program: Program, stages: Sequence[Stage]) -> None:
    """Raises PlanFileError unless the stages can be run: a plan may come from a file."""
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
            if stage.checkpointed and program.equations[root].effects:
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


def _check_types(program: Program, step: _Step, results: Sequence[Any]) -> None:
    """The result of a rewrite has the types of what was rewritten, or it is a mistake of ours.

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


def _runner(
    rewriting: _Rewriting, step: _Step, region_number: tuple[int, ...]
) -> Callable[..., list[Any]]:
    """A step as a function of its inputs."""
    program = rewriting.program
    before, behind = _multiplied_again(rewriting, step)
    behind = _with_biases(rewriting, step, behind)
    tied = _tied_inputs(rewriting, step)

    def run_equation(index: int, environment: dict[int, Any]) -> None:
        equation = program.equations[index]
        inputs = [
            environment[atom] if isinstance(atom, int) else atom.value for atom in equation.inputs
        ]
        if index in before:
            inputs = list(_behind_barrier(*inputs))
            environment.update(
                (atom, value)
                for atom, value in zip(equation.inputs, inputs, strict=True)
                if atom in before[index]
            )
        elif index in tied and index not in rewriting.ways.weight_place:
            places = tied[index]
            same = _cotangents_together(inputs[place] for place in places)
            for place, value in zip(places, same, strict=True):
                inputs[place] = value
        if index in rewriting.ways.partner and not step.checkpointed:
            partner = rewriting.ways.partner[index]
            inputs = list(_with_partner(program, partner, inputs, environment))
        weight = rewriting.ways.weight_place.get(index) if index in tied else None
        results = _run_one(rewriting, index, inputs, named=index in step.named, weight=weight)
        environment.update(zip(equation.outputs, results, strict=True))
        if index in behind:
            read = (*equation.outputs, *behind[index])
            same = _cotangents_together(environment[value] for value in read)
            environment.update(zip(read, same, strict=True))

    def region(*given: Any) -> list[Any]:
        environment = dict(zip(step.inputs, given, strict=True))
        _run(rewriting, step.inside, environment, around=region_number)
        for index in step.equations:
            with jax.named_scope(equation_scope(index)):
                run_equation(index, environment)
        return [environment[value] for value in step.outputs]

    if not step.checkpointed:
        return region
    names = [
        name_of(index, position)
        for index in sorted(step.kept)
        for position in range(len(program.equations[index].outputs))
    ]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(region, policy=policy)


def _run_one(
    rewriting: _Rewriting,
    index: int,
    inputs: Sequence[Any],
    *,
    named: bool,
    weight: int | None = None,
) -> list[Any]:
    """Runs an equation, its outputs named or not.

    Args:
      rewriting: what holds for all steps.
      index: of the equation.
      inputs: its inputs.
      named: whether a policy asks for its outputs.
      weight: for a product the place of the input whose gradient comes first, if any.
    """
    equation = rewriting.program.equations[index]
    named_as = functools.partial(_all_named, index)
    if named and equation.derivative_reads_kept and index not in rewriting.ways.waiting:
        return _run_kept(equation, inputs, named_as)

    def run(*given: Any) -> list[Any]:
        return internals.bind(equation.jax_equation, equation.name_stack, given)

    if index in rewriting.ways.apart:
        results = internals.bind_apart(equation.jax_equation, equation.name_stack, inputs)
    elif index in rewriting.ways.picking:
        results = _run_picking(equation, inputs)
    elif index in rewriting.ways.waiting:
        # A checkpoint's derivative waits for its cotangent; nothing has to be computed again.
        results = jax.checkpoint(run)(*inputs)
    elif weight is not None:
        results = _run_weight_first(run, inputs, weight)
    else:
        results = run(*inputs)
    if index in rewriting.ways.whole and not named:
        results = list(_stored(*results))
    return named_as(results) if named else results


def _with_partner(
    program: Program, partner: int, inputs: Sequence[Any], environment: Mapping[int, Any]
) -> Sequence[Any]:
    """A product's inputs, which are not there before those of the product it is summed up with.

    XLA for NVIDIA would compute it for all steps of a recurrent layer as soon as the layer below
    is done, and hold the results, or what it has split them into, until their partners come.
    """
    waited_for = set(program.equations[partner].value_inputs).difference(program.arguments)
    if not waited_for <= environment.keys():
        return inputs
    return _stored(*inputs, *(environment[value] for value in sorted(waited_for)))[: len(inputs)]


@jax.custom_jvp
def _stored(*given: Any) -> tuple[Any, ...]:
    """The values as arrays of their own; their cotangents are as they were."""
    return tuple(jax.lax.optimization_barrier(given))


def _stored_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return _stored(*primals), tangents


_stored.defjvp(_stored_rule, symbolic_zeros=True)


@jax.custom_jvp
def _behind_barrier(*given: Any) -> tuple[Any, ...]:
    """The values, none before all are computed; and their cotangents likewise.

    What has no tangent gets none here, unlike from JAX's own barrier: frozen arguments are known
    only when a derivative is taken, and what has no derivative may read what is behind.
    """
    return tuple(jax.lax.optimization_barrier(given))


def _behind_barrier_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return _behind_barrier(*primals), internals.tie_cotangents(tangents)


_behind_barrier.defjvp(_behind_barrier_rule, symbolic_zeros=True)


def _run_picking(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Runs a gather from rows so that its gradient is elementwise (``row_gathers``)."""

    @jax.custom_jvp
    def pick(operand: Any, indices: Any) -> Any:
        (result,) = internals.bind(equation.jax_equation, equation.name_stack, (operand, indices))
        return result

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        operand, indices = primals
        result = pick(operand, indices)
        if isinstance(tangents[0], SymbolicZero):
            return result, internals.zero_tangent(result)
        axis = operand.ndim - 1
        chosen = indices.reshape(*operand.shape[:-1], 1)
        if equation.jax_equation.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            chosen = jnp.clip(chosen, 0, operand.shape[axis] - 1)
        here = jax.lax.broadcasted_iota(chosen.dtype, operand.shape, axis) == chosen
        picked = jnp.sum(jnp.where(here, tangents[0], 0), axis=axis)
        return result, picked.reshape(result.shape).astype(result.dtype)

    pick.defjvp(rule, symbolic_zeros=True)
    return [pick(*inputs)]


def _run_weight_first(
    run: Callable[..., list[Any]], inputs: Sequence[Any], weight: int
) -> list[Any]:
    """Runs a product so that backward, its weight's gradient is computed before the other one.

    What the gradient of the weight reads may have been recomputed for it alone, as the result of an
    activation is. It is free then before the cotangent of the other operand, which is as large,
    takes its room; XLA for NVIDIA would hold what it is made of to the end of the backward pass.
    """
    (other,) = [p for p in range(len(inputs)) if p != weight]

    @jax.custom_jvp
    def product(of_weight: Any, of_other: Any) -> Any:
        given = [of_weight, of_other] if weight < other else [of_other, of_weight]
        (result,) = run(*given)
        return result

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        result = product(*primals)
        to_weight, to_other = tangents
        if isinstance(to_weight, SymbolicZero):
            if isinstance(to_other, SymbolicZero):
                return result, internals.zero_tangent(result)
            return result, product.fun(primals[0], to_other)
        if isinstance(to_other, SymbolicZero):
            return result, product.fun(to_weight, primals[1])
        moved, to_weight = internals.tie_cotangents((product.fun(primals[0], to_other), to_weight))
        return result, moved + product.fun(to_weight, primals[1])

    product.defjvp(rule, symbolic_zeros=True)
    return [product(inputs[weight], inputs[other])]


def _tied_inputs(rewriting: _Rewriting, step: _Step) -> dict[int, tuple[int, ...]]:
    """For each product whose gradients must not be put off the places of what they are for."""
    if not rewriting.ways.ordered:
        return {}
    found = {}
    for index in step.equations:
        equation = rewriting.program.equations[index]
        if equation.operation.primitive in PRODUCTS:
            places = [p for p, atom in enumerate(equation.inputs) if atom in rewriting.summed]
            if len(places) > 1:
                found[index] = tuple(places)
    return found


def _with_biases(
    rewriting: _Rewriting, step: _Step, behind: Mapping[int, frozenset[int]]
) -> dict[int, frozenset[int]]:
    """What to tie to products' outputs, with those biases whose gradients must not be put off.

    Their sums are small, and are read at the end; XLA for NVIDIA would hold a whole cotangent till
    then, where it is no part of a kernel that something waits for.
    """
    found = dict(behind)
    if rewriting.ways.ordered:
        for index in step.equations:
            bias = rewriting.ways.biases.get(index)
            outputs = rewriting.program.equations[index].outputs
            if bias in step.inputs and rewriting.summed.issuperset((bias, *outputs)):
                found[index] = found.get(index, frozenset()) | {bias}
    return found


def _cotangents_together(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values; of their cotangents none goes on before all are computed.

    So the gradient for a weight is taken in its turn. What it is multiplied by may have been
    recomputed for it alone, as a concatenation is: XLA for NVIDIA would rather hold the cotangent
    and what the operand is made of, to the end of the backward pass. Forward nothing changes: a
    barrier there would keep elementwise operations out of the product.
    """
    results: tuple[Any, ...] = _same(*values)
    return results


@jax.custom_jvp
def _same(*given: Any) -> tuple[Any, ...]:
    return given


def _same_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return primals, internals.tie_cotangents(tangents)


_same.defjvp(_same_rule, symbolic_zeros=True)


def _multiplied_again(
    rewriting: _Rewriting, step: _Step
) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
    """For products of a step the arguments that other products of it read too.

    These pass a barrier together with what they are multiplied by. Backward, that has the product
    add its part to their cotangent before it hands on the other one; XLA would compute the parts of
    all products, such as the steps of a recurrent network, before it adds the first two. What has
    no cotangent, such as the batch, would get one there: then the barrier is one behind the
    product, which has its cotangent only when the later parts are added. XLA for CPU needs both: it
    would compute the parts of a layer whose input nothing waits for, and add them later.

    Returns:
      What to tie to a product's inputs, where an earlier product reads it, and what to tie to its
      outputs, where a later one does.
    """
    program, summed = rewriting.program, rewriting.summed
    arguments = summed.intersection(program.arguments)
    order = [i for i in step.equations if program.equations[i].operation.primitive in PRODUCTS]
    to_inputs: dict[int, frozenset[int]] = {}
    to_outputs: dict[int, frozenset[int]] = {}
    # A product is tied by its inputs if all of them have a cotangent, else by its outputs.
    by_inputs = {i for i in order if summed.issuperset(program.equations[i].value_inputs)}
    by_outputs = set(order) if rewriting.ways.in_turn else set(order) - by_inputs
    for indices, tied, found in (
        (order, by_inputs, to_inputs),
        (order[::-1], by_outputs, to_outputs),
    ):
        seen: set[int] = set()
        for index in indices:
            read = arguments.intersection(program.equations[index].value_inputs)
            if not seen.isdisjoint(read) and index in tied:
                found[index] = read & seen
            seen |= read
    return to_inputs, to_outputs


def _all_named(index: int, results: Sequence[Any]) -> list[Any]:
    return [_named(result, name_of(index, position)) for position, result in enumerate(results)]


def _run_kept(
    equation: Equation, inputs: Sequence[Any], named_as: Callable[[Sequence[Any]], list[Any]]
) -> list[Any]:
    """Runs an equation so that its own derivative, too, reads the named outputs.

    The derivative rule of ``tanh`` computes the output and reads that, not the named copy:
    the policy would keep the copy, and the equation would run again, with all before it. So
    the equation gets a derivative in which it is not run: the named outputs stand in for it.
    """
    places = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
    # Without the inputs themselves: the rule outlives the trace that they belong to.
    literals = {
        p: atom.value for p, atom in enumerate(equation.inputs) if not isinstance(atom, int)
    }

    def fill(*given: Any) -> list[Any]:
        filled = literals | dict(zip(places, given, strict=True))
        return [filled[place] for place in range(len(filled))]

    @jax.custom_jvp
    def kept(*given: Any) -> tuple[Any, ...]:
        results = internals.bind(equation.jax_equation, equation.name_stack, fill(*given))
        return tuple(named_as(results))

    def tangent_rule(
        primals: tuple[Any, ...], tangents: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = kept.fun(*primals)
        varying = [n for n, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def directional(given: Sequence[Any], directions: Sequence[Any]) -> Any:
            def of_varying(*moved: Any) -> tuple[Any, ...]:
                all_given = list(given)
                for number, value in zip(varying, moved, strict=True):
                    all_given[number] = value
                return tuple(
                    internals.bind(equation.jax_equation, equation.name_stack, fill(*all_given))
                )

            return jax.jvp(of_varying, [given[number] for number in varying], directions)

        directions = [tangents[number] for number in varying]
        closed, _ = internals.make_jaxpr(directional, list(primals), directions)
        results = internals.run_with_known(
            closed, [*primals, *directions], equation.jax_equation, literals, outputs
        )
        moved = internals.depends_on(closed, len(primals))
        # What depends on no direction is zero, and what has no derivative may read that output.
        return outputs, tuple(
            tangent if moves else internals.zero_tangent(output)
            for output, tangent, moves in zip(
                outputs, results[len(outputs) :], moved[len(outputs) :], strict=True
            )
        )

    kept.defjvp(tangent_rule, symbolic_zeros=True)
    return list(kept(*(inputs[place] for place in places)))


def _named(value: Any, name: str) -> Any:
    # JAX rounds what a policy keeps to its own precision, and cannot do so for complex
    # numbers; so their parts are kept.
    if jnp.iscomplexobj(value):
        return jax.lax.complex(
            checkpoint_name(jnp.real(value), name), checkpoint_name(jnp.imag(value), name)
        )
    return checkpoint_name(value, name)


def _steps(program: Program, stages: Sequence[Stage]) -> list[_Step]:
    maker = program.makers()
    all_roots = {root for stage in stages for root in stage.roots}
    available = set(program.constants) | set(program.arguments)
    drafts = _drafts(program, stages, frozenset(), maker, available)
    # Outputs that are only another shape of a root are emitted without a checkpoint at the end.
    # So is, where no stage has it, what has side effects.
    left = {maker[value] for value in program.output_values if value in maker} | {
        index for index, equation in enumerate(program.equations) if equation.effects
    }
    trailing = _emitted(program, sorted(left - all_roots), maker, available)
    if trailing:
        drafts.append(
            _Step(
                outputs=tuple(v for index in trailing for v in program.equations[index].outputs),
                equations=tuple(trailing),
                inputs=_inputs(program, trailing),
                kept=frozenset(),
                named=frozenset(),
                checkpointed=False,
                inside=(),
            )
        )
    return _finished(drafts, set(program.output_values))


def _drafts(
    program: Program,
    stages: Sequence[Stage],
    named: frozenset[int],
    maker: Mapping[int, int],
    available: set[int],
) -> list[_Step]:
    """Stages one after the other, with all that they provide as outputs.

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
            inputs = _inputs(program, equations)
        drafts.append(
            _Step(
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


def _finished(drafts: Sequence[_Step], wanted: set[int]) -> list[_Step]:
    """The drafts with those outputs alone that are ``wanted`` in the end or by a later one."""
    wanted = set(wanted)
    steps = []
    for draft in reversed(drafts):
        outputs = tuple(value for value in draft.outputs if value in wanted)
        inside = tuple(_finished(draft.inside, set(outputs)))
        steps.append(dataclasses.replace(draft, outputs=outputs, inside=inside))
        wanted.difference_update(draft.outputs)
        wanted.update(draft.inputs)
    return steps[::-1]


def _inputs(program: Program, equations: Sequence[int]) -> tuple[int, ...]:
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
