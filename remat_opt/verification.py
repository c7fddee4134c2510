"""Choosing by compiling: the promise as a fact, or an error.

A prediction is a model's. Here the compiler is asked: of the plans that the objective allows, the
most promising ones are compiled, and the one that is best as compiled is kept. Where a budget is
given and a plan turns out too large, the next one is chosen as if the budget were smaller by what
the prediction was wrong.

What is compiled is the gradient of the traced program, not the function that it was traced from: so
this can be done in the middle of somebody else's trace, where arguments, and what the function
closes over, have shapes and no numbers. Of those, closed-over arrays become arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_opt import _jax_internals as internals
from remat_opt import measurement, planning, transform
from remat_opt.device import Device
from remat_opt.errors import BudgetError, RematError
from remat_opt.measurement import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.planning import Problem
from remat_opt.program import Program
from remat_opt.solvers.base import Candidate, pareto
from remat_opt.tracing import is_inexact
from remat_opt.units import format_bytes

#: Plans that are compiled for a budget before giving up.
MOST_FOR_BUDGET = 6
#: Plans that are compiled where the least memory is asked for, and how far above the least
#: predicted peak they may lie.
MOST_FOR_LEAST = 3
_NEAR = 1.15


def measure_plan(
    plan: Plan, program: Program, arguments: Sequence[Any], device: Device
) -> Measurement:
    """Compiles the gradient of a program under a plan.

    Args:
      plan: made for the program.
      program: a traced function.
      arguments: its flat arguments: arrays, shapes or tracers, of which only shapes matter.
      device: the machine to compile for.

    Raises:
      CompileError: the compiler refuses it, as for want of memory.
      RematError: the program is tied to axes of a ``vmap`` or ``shard_map`` round it.
    """
    axes = internals.surrounding_axes(one.jax_equation for one in program.equations)
    if axes:
        raise RematError(
            f"{program.name!r} cannot be compiled on its own, as verify= asks: it is tied to the "
            f"axes {', '.join(axes)} of a vmap or shard_map round it. Leave verify= out, or "
            "decorate a function that has the vmap or shard_map inside."
        )
    run = transform.rewrite(program, plan.stages)
    traced = [isinstance(value, jax.core.Tracer) for value in program.constant_values]
    places = [program.arguments.index(value) for value in program.differentiated]

    def gradient(given: Sequence[Any], cotangents: Sequence[Any], flat: Sequence[Any]) -> Any:
        left = iter(given)
        constants = [
            next(left) if is_traced else value
            for is_traced, value in zip(traced, program.constant_values, strict=True)
        ]

        def loss(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            inputs = list(flat)
            for place, value in zip(places, differentiated, strict=True):
                inputs[place] = value
            outputs = run(constants, inputs)
            return outputs[: program.loss_outputs], outputs[program.loss_outputs :]

        outputs, pullback, auxiliary = jax.vjp(loss, *(flat[p] for p in places), has_aux=True)
        others = iter(cotangents)
        return outputs, auxiliary, pullback([_cotangent(output, others) for output in outputs])

    # Those of arrays come from outside, as for jax.vjp.
    cotangents = [
        jax.ShapeDtypeStruct(program.types[atom].shape, program.types[atom].dtype)
        for atom in program.outputs[: program.loss_outputs]
        if isinstance(atom, int) and program.types[atom].shape and is_inexact(program.types[atom])
    ]
    closed_over = [_shape(v) for v, t in zip(program.constant_values, traced, strict=True) if t]
    return measurement.measure(
        gradient, closed_over, cotangents, list(map(_shape, arguments)), device=device
    )


def _cotangent(output: Any, others: Iterator[Any]) -> Any:
    """1 for a scalar, as for ``jax.grad``; the next of the others for an array."""
    dtype = jnp.result_type(output)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.zeros(jnp.shape(output), jax.dtypes.float0)
    return next(others) if jnp.ndim(output) else jnp.ones((), dtype)


def _shape(value: Any) -> Any:
    """A tracer as its shape and dtype; what has numbers, or is a shape, as it is."""
    if not isinstance(value, jax.core.Tracer):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)


def choose(problem: Problem, objective: Objective, compiled: Callable[[Plan], Measurement]) -> Plan:
    """The plan that is best as compiled.

    Args:
      problem: what is to be decided.
      objective: what is wanted.
      compiled: compiles a plan's gradient for the device.

    Returns:
      The plan, measured. For a budget: the first one within it, of those with ever more
      recomputation. Else: of a few with the least predicted peaks, the one with the least memory.

    Raises:
      BudgetError: no plan that was compiled is within the budget, or none is predicted to be.
    """
    budget_bytes = planning.budget_bytes_of(problem, objective)
    if budget_bytes is None:
        return _least(problem, objective, compiled)
    return _within(problem, objective, budget_bytes, compiled)


def _within(
    problem: Problem,
    objective: Objective,
    budget_bytes: int,
    compiled: Callable[[Plan], Measurement],
) -> Plan:
    # By falling peak, so with rising overhead.
    left = pareto(list(problem.candidates), objective.overhead)[::-1]
    first = planning.solve(problem, objective)
    left = [one for one in left if one.peak_bytes <= first.peak_bytes]
    tried: list[Plan] = []
    allowed = float(budget_bytes)
    while left and len(tried) < MOST_FOR_BUDGET:
        fitting = [one for one in left if one.peak_bytes <= allowed] or left[-1:]
        chosen = fitting[0]
        left = [one for one in left if one.peak_bytes < chosen.peak_bytes]
        tried.append(_measured(problem, chosen, objective, compiled))
        found = _temporary_bytes(tried[-1])
        if found <= budget_bytes:
            return _noted(tried[-1], tried, f"a budget of {format_bytes(budget_bytes)}")
        # The model is off by this much here; what it says of smaller plans is read accordingly.
        allowed = min(allowed, chosen.peak_bytes * budget_bytes / found)
    least = min(map(_temporary_bytes, tried))
    raise BudgetError(
        f"No plan has compiled to temporaries within {format_bytes(budget_bytes)}: of "
        f"{len(tried)} that were tried, the smallest took {format_bytes(least)} "
        f"(predicted: {', '.join(format_bytes(one.predicted.temporary_bytes) for one in tried)}). "
        "Give a larger budget or a smaller batch.",
        budget_bytes=budget_bytes,
        least_peak_bytes=least,
        pinning=tuple((f"{p.label} {p.module}".strip(), p.bytes) for p in tried[-1].predicted.pins),
    )


def _least(problem: Problem, objective: Objective, compiled: Callable[[Plan], Measurement]) -> Plan:
    first = planning.solve(problem, objective)
    most_overhead = planning.overhead_limit(problem, objective)
    near = [
        one
        for one in pareto(list(problem.candidates), objective.overhead)
        if one.overhead(objective.overhead) <= most_overhead
        and first.peak_bytes <= one.peak_bytes <= first.peak_bytes * _NEAR
    ]
    tried = [
        _measured(problem, one, objective, compiled)
        for one in _spread([first, *(one for one in near if one != first)])
    ]
    best = min(tried, key=lambda plan: (_temporary_bytes(plan), plan.predicted.overhead_seconds))
    return _noted(best, tried, "the least memory")


def _spread(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first, the last, and what lies evenly between."""
    count = min(MOST_FOR_LEAST, len(candidates))
    places = [round(n * (len(candidates) - 1) / max(1, count - 1)) for n in range(count)]
    return [candidates[place] for place in dict.fromkeys(places)]


def _measured(
    problem: Problem,
    candidate: Candidate,
    objective: Objective,
    compiled: Callable[[Plan], Measurement],
) -> Plan:
    plan = planning.describe(problem, problem.program, candidate, objective)
    return dataclasses.replace(plan, measured=compiled(plan))


def _temporary_bytes(plan: Plan) -> int:
    assert plan.measured is not None, "it was compiled"
    return plan.measured.temporary_bytes


def _noted(best: Plan, tried: Sequence[Plan], what: str) -> Plan:
    said = ", ".join(
        f"{format_bytes(_temporary_bytes(one))} "
        f"(predicted {format_bytes(one.predicted.temporary_bytes)})"
        for one in tried
    )
    return dataclasses.replace(
        best, notes=(*best.notes, f"Chosen by compiling, for {what}. Compiled to: {said}.")
    )
