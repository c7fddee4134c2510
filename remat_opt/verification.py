"""Choosing by compiling: the promise as a fact, or an error.

A prediction is a model's. Here the compiler is asked: of the plans that the objective allows, the
most promising ones are compiled, and the one that is best as compiled is kept. Where a budget is
given, the next one is chosen as if the budget were smaller, or larger, by what the prediction was
wrong, until nothing between a plan that is too large and one that fits is worth a try. A plan that
the compiler refuses is taken for too large.

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
from remat_opt.errors import BudgetError, CompileError, RematError
from remat_opt.measurement import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.planning import Problem
from remat_opt.program import Program
from remat_opt.solvers.base import Candidate, pareto, thinned
from remat_opt.tracing import is_inexact
from remat_opt.units import format_bytes

#: Plans that are compiled for a budget before giving up.
MOST_FOR_BUDGET = 6
#: Where a plan fits, another is compiled only if it saves this share of the recomputation.
_LEAST_GAIN = 0.05
#: How much smaller the prediction of the next plan is after one that the compiler refused.
_STEP_IF_REFUSED = 1.1
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
    run = transform.rewrite(program, plan.stages, plan.platform)
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


def choose(
    problem: Problem,
    objective: Objective,
    compiled: Callable[[Plan], Measurement],
    *,
    in_step: bool = False,
) -> Plan:
    """The plan that is best as compiled.

    Args:
      problem: what is to be decided.
      objective: what is wanted.
      compiled: compiles a plan's gradient, or the step that it is in, for the device.
      in_step: whether it is a step. There, gradients lie beside what is predicted: so a prediction
        is taken to be wrong by an amount, not by a factor.

    Returns:
      The plan, measured. For a budget: of those that are within it the one with the least
      recomputation. Else: of a few with the least predicted peaks, the one with the least memory.

    Raises:
      BudgetError: no plan that was compiled is within the budget, or none is predicted to be.
      CompileError: the compiler has refused all that were tried.
    """
    budget_bytes = planning.budget_bytes_of(problem, objective)
    if budget_bytes is None:
        return _least(problem, objective, compiled)
    return _within(problem, objective, budget_bytes, compiled, in_step=in_step)


def _within(
    problem: Problem,
    objective: Objective,
    budget_bytes: int,
    compiled: Callable[[Plan], Measurement],
    *,
    in_step: bool,
) -> Plan:
    """Searches between the last plan that was too large and the first that fits.

    What is compiled falls with what is predicted, mostly. Where the smallest that is predicted does
    not fit either, some that lie between it and the first are tried, as many as are left.
    """
    measure = objective.overhead
    # By falling peak, so with rising overhead.
    front = pareto(list(problem.candidates), measure)[::-1]
    trials = _Trials(problem, objective, compiled)
    best: Plan | None = None
    tried: set[int] = set()
    # Where nothing is predicted to fit, that is an error.
    first = planning.solve(problem, objective)
    too_large, number, fits = -1, _first_within(front, first.peak_bytes), len(front)
    while too_large < number < fits and trials.count < MOST_FOR_BUDGET:
        tried.add(number)
        predicted_bytes = front[number].peak_bytes
        plan = trials.plan(front[number])
        # The model is off by this much here; what it says of other plans is read accordingly.
        if plan is None:
            allowed = predicted_bytes / _STEP_IF_REFUSED
        elif in_step:
            allowed = predicted_bytes + budget_bytes - _temporary_bytes(plan)
        else:
            allowed = predicted_bytes * budget_bytes / max(1, _temporary_bytes(plan))
        if plan is not None and _temporary_bytes(plan) <= budget_bytes:
            best, fits = plan, number
        else:
            too_large = number
        number = max(_first_within(front, allowed), too_large + 1)
        if number < fits < len(front):
            least_gain = _LEAST_GAIN * front[fits].overhead(measure)
            if front[fits].overhead(measure) - front[number].overhead(measure) < least_gain:
                break
    if best is None:
        between = [n for n in range(min(tried), max(tried)) if n not in tried]
        for number in thinned(between, MOST_FOR_BUDGET - trials.count):
            plan = trials.plan(front[number])
            if plan is not None and _temporary_bytes(plan) <= budget_bytes:
                best = plan
                break
    if best is not None:
        return _noted(best, trials.plans, f"a budget of {format_bytes(budget_bytes)}")
    trials.raise_if_all_refused()
    sizes = [one.predicted.temporary_bytes for one in trials.plans]
    least = min(map(_temporary_bytes, trials.plans))
    raise BudgetError(
        f"No plan has compiled to temporaries within {format_bytes(budget_bytes)}: of "
        f"{trials.count} that were tried, the smallest took {format_bytes(least)} "
        f"(predicted: {', '.join(map(format_bytes, sizes))}). "
        "Give a larger budget or a smaller batch.",
        budget_bytes=budget_bytes,
        least_peak_bytes=least,
        pinning=tuple(
            (f"{p.label} {p.module}".strip(), p.bytes) for p in trials.plans[-1].predicted.pins
        ),
    )


def _first_within(front: Sequence[Candidate], bytes_: float) -> int:
    """The first candidate, by falling peak, of at most so many bytes; if none, the last."""
    return next((n for n, one in enumerate(front) if one.peak_bytes <= bytes_), len(front) - 1)


def _least(problem: Problem, objective: Objective, compiled: Callable[[Plan], Measurement]) -> Plan:
    first = planning.solve(problem, objective)
    most_overhead = planning.overhead_limit(problem, objective)
    near = [
        one
        for one in pareto(list(problem.candidates), objective.overhead)
        if one.overhead(objective.overhead) <= most_overhead
        and first.peak_bytes <= one.peak_bytes <= first.peak_bytes * _NEAR
    ]
    trials = _Trials(problem, objective, compiled)
    for one in thinned([first, *(one for one in near if one != first)], MOST_FOR_LEAST):
        trials.plan(one)
    trials.raise_if_all_refused()
    best = min(
        trials.plans, key=lambda plan: (_temporary_bytes(plan), plan.predicted.overhead_seconds)
    )
    return _noted(best, trials.plans, "the least memory")


class _Trials:
    """Plans that were compiled, and how often the compiler refused one.

    Attributes:
      plans: those that compiled, measured.
    """

    def __init__(
        self, problem: Problem, objective: Objective, compiled: Callable[[Plan], Measurement]
    ) -> None:
        self._problem, self._objective, self._compiled = problem, objective, compiled
        self._refused: list[CompileError] = []
        self.plans: list[Plan] = []

    @property
    def count(self) -> int:
        """How many plans were tried."""
        return len(self.plans) + len(self._refused)

    def plan(self, candidate: Candidate) -> Plan | None:
        """The candidate's plan, measured; None if the compiler refuses it."""
        plan = planning.describe(self._problem, self._problem.program, candidate, self._objective)
        try:
            measured = self._compiled(plan)
        except CompileError as error:
            self._refused.append(error)
            return None
        self.plans.append(dataclasses.replace(plan, measured=measured))
        return self.plans[-1]

    def raise_if_all_refused(self) -> None:
        """Raises the compiler's last error where nothing has compiled."""
        if not self.plans:
            raise self._refused[-1]


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
