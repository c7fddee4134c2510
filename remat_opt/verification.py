"""The compiler in the loop: it confirms the promise, or there is an error.

A prediction comes from a model. Here the compiler is asked. The plan predicted to be best is
compiled, and what was alive when is compared with the replay, moment by moment
(``measurement.alignment``). The differences are learnt (``compilers.learnt``): with them the solver
searches again, all plans are judged again, and the one that is now best is next, at most four times
in all. If the compiler gives only a size, the predictions are corrected by the ratio. The policies
of ``jax.checkpoint`` are plans like the others; one that may do better than what was compiled is
compiled as well. A plan that the compiler refuses is taken to be too large.

What is compiled is a step with the traced program, not the function that it was traced from. So
this works in the middle of someone else's trace, where arguments, and what the function closes
over, have shapes but no numbers. Closed-over arrays of that kind become arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_opt import _jax_internals as internals
from remat_opt import planning
from remat_opt.device import Device
from remat_opt.errors import BudgetError, RematError
from remat_opt.gradients import Gradients
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.planning import Problem
from remat_opt.program.propagation import argument_shardings
from remat_opt.program.record import Program
from remat_opt.program.tracing import is_inexact
from remat_opt.solvers.base import Candidate, least_memory
from remat_opt.transform import rewriting
from remat_opt.trials import (
    HOPELESS,
    MOST_COMPILES,
    Memory,
    Trials,
    alive_at,
    temporary_bytes,
    with_measurement,
)
from remat_opt.units import format_bytes

__all__ = ["MOST_COMPILES", "MOST_FOR_LEAST", "Memory", "choose", "confirm", "measure_plan"]

#: Once a plan fits, another is compiled only if it saves this share of the recomputation.
_LEAST_GAIN = 0.05
#: How many near-equals are compiled if the least memory is asked for.
MOST_FOR_LEAST = 3


def measure_plan(
    plan: Plan,
    program: Program,
    arguments: Sequence[Any],
    device: Device,
    *,
    off: frozenset[str] = frozenset(),
    with_buffers: bool = False,
) -> Measurement:
    """Compiles a program under a plan, in the step that it is for.

    The plan's objective says what happens to the gradients: they are returned, or Adam consumes
    them, as they are or scaled by their norm, with parameters and state donated.

    Args:
      plan: a plan for the program.
      program: a traced function.
      arguments: its flat arguments, without what is closed over: arrays, shapes or tracers, of
        which only shapes matter.
      device: the machine to compile for.
      off: names of compiler rules to switch off.
      with_buffers: whether to read also what is alive when.

    Raises:
      CompileError: the compiler refuses it, as for lack of memory.
      RematError: the program is tied to axes of a ``vmap`` or ``shard_map`` around it.
    """
    axes = internals.surrounding_axes(one.jax_equation for one in program.equations)
    if axes:
        raise RematError(
            f"{program.name!r} cannot be compiled on its own, as verify= asks: it is tied to "
            f"the axes {', '.join(axes)} of a vmap or shard_map around it. Leave verify= out, "
            "or decorate a function that has the vmap or shard_map inside."
        )
    run = rewriting.rewrite(
        program, plan.stages, plan.platform, off, loops=plan.loops, unchanged=plan.unchanged
    )
    fate = plan.objective.gradients
    return measure_run(run, program, arguments, device, fate, with_buffers=with_buffers)


def measure_run(
    run: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    program: Program,
    arguments: Sequence[Any],
    device: Device,
    fate: Gradients,
    *,
    with_buffers: bool = False,
) -> Measurement:
    """Compiles a function that computes a program's outputs, in a step.

    Args:
      run: takes the program's constants and its flat arguments, and returns its flat outputs.
      program: a traced function.
      arguments: see ``measure_plan``, as are ``device`` and ``with_buffers``.
      device: likewise.
      fate: what happens to the gradients.
      with_buffers: likewise.

    Raises:
      CompileError: the compiler refuses it, as for lack of memory.
    """
    places = [program.arguments.index(value) for value in program.differentiated]
    others = [p for p in range(len(program.arguments)) if p not in places]

    def step(cotangents: Sequence[Any], flat: Sequence[Any], own: Any) -> Any:
        parameters, state = own

        def loss(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            placed = dict(zip((*others, *places), (*flat, *differentiated), strict=True))
            outputs = run(program.constant_values, [placed[place] for place in range(len(placed))])
            return outputs[: program.loss_outputs], outputs[program.loss_outputs :]

        outputs, pullback, auxiliary = jax.vjp(loss, *parameters, has_aux=True)
        arriving = iter(cotangents)
        gradients = pullback([_cotangent(output, arriving) for output in outputs])
        if fate is Gradients.RESULTS:
            return outputs, auxiliary, gradients
        if fate is Gradients.TOGETHER:
            squares = sum(jnp.sum(jnp.square(jnp.abs(one))) for one in gradients)
            scale = jnp.minimum(1, jax.lax.rsqrt(squares))
            gradients = [one * scale.astype(one.dtype) for one in gradients]
        return outputs, auxiliary, _updated(parameters, gradients, state)

    # Cotangents of arrays come from outside, as for jax.vjp.
    cotangents = [
        jax.ShapeDtypeStruct(program.types[atom].shape, program.types[atom].dtype)
        for atom in program.outputs[: program.loss_outputs]
        if isinstance(atom, int) and program.types[atom].shape and is_inexact(program.types[atom])
    ]
    values = (*arguments, *program.closed_over)
    shardings = argument_shardings(program)[len(program.constants) :]
    shapes = [_shape(*one) for one in zip(values, shardings, strict=True)]
    parameters = [shapes[place] for place in places]
    state = [] if fate is Gradients.RESULTS else [_moments(one) for one in parameters]
    return compilation.measure(
        step,
        cotangents,
        [shapes[place] for place in others],
        (parameters, state),
        device=device,
        with_buffers=with_buffers,
        donate_argnums=() if fate is Gradients.RESULTS else 2,
    )


def _moments(parameter: Any) -> tuple[Any, Any]:
    """Adam's state for a parameter."""
    sharding = getattr(parameter, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    shape, dtype = jnp.shape(parameter), jnp.result_type(parameter)
    size = jax.eval_shape(jnp.abs, jax.ShapeDtypeStruct((), dtype)).dtype
    return (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
        jax.ShapeDtypeStruct(shape, size, sharding=sharding),
    )


def _updated(
    parameters: Sequence[Any], gradients: Sequence[Any], state: Sequence[tuple[Any, Any]]
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Parameters and state after a step of Adam, in the given order.

    JAX pairs donated arguments with results of their type in order. In any other order they would
    share one another's buffers, and XLA would copy weights that are yet to be read.
    """
    moved, moments = [], []
    for parameter, gradient, (first, second) in zip(parameters, gradients, state, strict=True):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * jnp.square(jnp.abs(gradient))
        update = 1e-3 * first / (jnp.sqrt(second) + 1e-8)
        moved.append((parameter - update).astype(jnp.result_type(parameter)))
        moments.append((first, second))
    return moved, moments


def _cotangent(output: Any, others: Iterator[Any]) -> Any:
    """1 for a scalar, as in ``jax.grad``; the next of the given ones for an array."""
    dtype = jnp.result_type(output)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.zeros(jnp.shape(output), jax.dtypes.float0)
    return next(others) if jnp.ndim(output) else jnp.ones((), dtype)


def _shape(value: Any, sharding: Any) -> Any:
    """A tracer as its shape and dtype, laid out like this; arrays and shapes unchanged."""
    if not isinstance(value, jax.core.Tracer):
        return value
    return jax.ShapeDtypeStruct(
        value.shape, value.dtype, weak_type=value.weak_type, sharding=sharding
    )


def choose(
    problem: Problem,
    objective: Objective,
    compiled: Callable[[Plan], Measurement],
    memory: Memory | None = None,
) -> Plan:
    """The plan that is best as compiled, after at most ``MOST_COMPILES`` of them.

    Args:
      problem: what is to be decided.
      objective: what is wanted.
      compiled: compiles a plan in its step for the device.
      memory: holds what was learnt before, and receives what is learnt now.

    Returns:
      The plan, measured. For a budget: of those within it, the one with the least recomputation.
      Otherwise: the same, of those whose memory is within 2 % of the least that was compiled.

    Raises:
      BudgetError: no plan that was compiled is within the budget.
      CompileError: the compiler refused all that were tried.
    """
    budget_bytes = planning.budget_bytes_of(problem, objective)
    trials = Trials(problem, objective, compiled, memory)
    try:
        if budget_bytes is None:
            return _least(trials)
        return _within(trials, budget_bytes)
    finally:
        if memory is not None and trials.learnt.compiled:
            memory.keep(trials.learnt)


def confirm(
    problem: Problem, objective: Objective, compiled: Callable[[Plan], Measurement]
) -> Plan:
    """The plan predicted to be best, measured; it is the answer whatever the compiler says.

    Args:
      problem: what is to be decided.
      objective: what is wanted.
      compiled: compiles a plan in its step for the device.

    Raises:
      BudgetError: no plan is expected to be within the budget.
      CompileError: the compiler refuses it.
    """
    one = planning.solve(problem, objective)
    plan = planning.describe(problem, problem.program, one, objective)
    measured = compiled(plan)
    moments = planning.replay(problem, one.schedule)
    return with_measurement(plan, measured, alive_at(measured, moments, problem, one.schedule))


def _within(trials: Trials, budget_bytes: int) -> Plan:
    """The least recomputation within a budget.

    The best of those expected to fit is next, until it has been compiled, or recomputes hardly less
    than a compiled one that fits. If nothing is expected to fit, the smallest is next, as long as
    there is hope. If nothing has fitted, the last compile is for one that fits by the model, even
    if that is off by more than it was at worst. If something fits, the last compile is for a policy
    of ``jax.checkpoint``: one that may do better, or else the nearest if none was compiled.
    """
    measure = trials.measure
    while trials.left:
        best = trials.best_within(budget_bytes)
        default = trials.challenger(best, budget_bytes) if best is not None else None
        if trials.left == 1 and best is not None:
            last = default or trials.nearest_default(best, budget_bytes)
            if last is not None:
                trials.compile(last)
                break
        one = trials.fastest(budget_bytes) if trials.count else trials.first(budget_bytes)
        if trials.left == 1 and best is None:
            one = trials.by_ratio(budget_bytes) or one
        if one is None and best is None:
            one = trials.smallest()
            # A size alone says little about other plans, and what was learnt before about this one.
            known = trials.told and trials.count
            if one is not None and known and one.peak_bytes > HOPELESS * budget_bytes:
                break
        elif best is not None and (
            one is None
            or best.overhead(measure) - one.overhead(measure) < _LEAST_GAIN * best.overhead(measure)
        ):
            one = default
        if one is None or trials.tried(one):
            break
        trials.compile(one)
    best = trials.best_within(budget_bytes)
    if best is not None and trials.left:
        default = trials.nearest_default(best, budget_bytes)
        if default is not None:
            trials.compile(default)
            best = trials.best_within(budget_bytes)
    if best is not None:
        return trials.plan_of(best, f"a budget of {format_bytes(budget_bytes)}")
    trials.raise_if_all_refused()
    sizes = [one.predicted.temporary_bytes for one in trials.plans]
    least = min(map(temporary_bytes, trials.plans))
    raise BudgetError(
        f"No plan has compiled to temporaries within {format_bytes(budget_bytes)}: of "
        f"{trials.count} that were tried, the smallest took {format_bytes(least)} "
        f"(predicted: {', '.join(map(format_bytes, sizes))}). " + trials.problem.model.what_to_do(),
        budget_bytes=budget_bytes,
        least_peak_bytes=least,
        pinning=tuple((p.name.title, p.bytes) for p in trials.plans[-1].predicted.pins),
    )


def _least(trials: Trials) -> Plan:
    """The least memory; among near-equals, the least recomputation.

    The one expected to be best is next, until it has been compiled. Then come those that may turn
    out better than expected, policies of ``jax.checkpoint`` first, and last the nearest of these
    policies, if none was compiled.
    """
    most = planning.overhead_limit(trials.problem, trials.objective)
    while trials.left:
        pool = trials.expected(most)
        if not pool:
            break
        one: Candidate | None = least_memory(pool, trials.measure)
        assert one is not None, "there are some"
        if trials.tried(one):
            limit_bytes = one.peak_bytes * trials.tolerance
            near = [
                other
                for other in pool
                if other.peak_bytes <= limit_bytes and not trials.tried(other)
            ]
            defaults = [other for other in near if trials.is_default(other)]
            if not defaults and trials.count >= MOST_FOR_LEAST:
                break
            one = min(
                defaults or near,
                key=lambda other: (other.peak_bytes, other.overhead(trials.measure)),
                default=None,
            )
        if one is None:
            break
        trials.compile(one)
    trials.raise_if_all_refused()
    best = least_memory(trials.as_compiled(), trials.measure)
    if trials.left:
        default = trials.nearest_default(best, best.peak_bytes)
        if default is not None:
            trials.compile(default)
            best = least_memory(trials.as_compiled(), trials.measure)
    return trials.plan_of(best, "the least memory")
