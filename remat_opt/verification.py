"""Choosing by compiling: the promise as a fact, or an error.

A prediction is a model's. Here the compiler is asked: the plan that is predicted to be best is
compiled, the predictions of all others are corrected by what it took, and the one that is best now
is next, at most four times in all. Where one of ``jax.checkpoint``'s own policies is expected to do
better, and where the least memory is asked for, one of them is compiled as well, as a plan. A plan
that the compiler refuses is taken for too large.

What is compiled is a step with the traced program, not the function that it was traced from: so
this can be done in the middle of somebody else's trace, where arguments, and what the function
closes over, have shapes and no numbers. Of those, closed-over arrays become arguments.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_opt import _jax_internals as internals
from remat_opt import planning
from remat_opt.device import Device
from remat_opt.errors import BudgetError, CompileError, RematError
from remat_opt.gradients import Gradients
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.planning import Problem
from remat_opt.program.record import Program
from remat_opt.program.tracing import is_inexact
from remat_opt.schedule import Schedule
from remat_opt.solvers.base import Candidate, least_memory, pareto
from remat_opt.transform import rewriting
from remat_opt.units import format_bytes

#: Plans that are compiled for one request.
MOST_COMPILES = 4
#: Where a plan fits, another is compiled only if it saves this share of the recomputation.
_LEAST_GAIN = 0.05
#: What a refused plan counts as, as a multiple of its prediction.
_RATIO_IF_REFUSED = 1.25
#: Where the least memory is asked for, how far above the least predicted peak a plan may lie, and
#: how many are compiled if the first is as predicted.
_NEAR = 1.15
MOST_FOR_LEAST = 3


def measure_plan(
    plan: Plan,
    program: Program,
    arguments: Sequence[Any],
    device: Device,
    *,
    off: frozenset[str] = frozenset(),
) -> Measurement:
    """Compiles a program under a plan in the step that it is for.

    What becomes of the gradients is what the plan's objective says: they are put out, or Adam
    consumes them, with parameters and state donated, as they are or scaled by their norm.

    Args:
      plan: made for the program.
      program: a traced function.
      arguments: its flat arguments: arrays, shapes or tracers, of which only shapes matter.
      device: the machine to compile for.
      off: names of rules about compilers that are switched off.

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
    run = rewriting.rewrite(program, plan.stages, plan.platform, off, loops=plan.loops)
    traced = [isinstance(value, jax.core.Tracer) for value in program.constant_values]
    places = [program.arguments.index(value) for value in program.differentiated]
    others = [p for p in range(len(program.arguments)) if p not in places]
    fate = plan.objective.gradients

    def step(given: Sequence[Any], cotangents: Sequence[Any], flat: Sequence[Any], own: Any) -> Any:
        parameters, state = own
        left = iter(given)
        constants = [
            next(left) if is_traced else value
            for is_traced, value in zip(traced, program.constant_values, strict=True)
        ]

        def loss(*differentiated: Any) -> tuple[list[Any], list[Any]]:
            placed = dict(zip((*others, *places), (*flat, *differentiated), strict=True))
            outputs = run(constants, [placed[place] for place in range(len(placed))])
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

    # Those of arrays come from outside, as for jax.vjp.
    cotangents = [
        jax.ShapeDtypeStruct(program.types[atom].shape, program.types[atom].dtype)
        for atom in program.outputs[: program.loss_outputs]
        if isinstance(atom, int) and program.types[atom].shape and is_inexact(program.types[atom])
    ]
    closed_over = [_shape(v) for v, t in zip(program.constant_values, traced, strict=True) if t]
    shapes = list(map(_shape, arguments))
    parameters = [shapes[place] for place in places]
    state = [] if fate is Gradients.RESULTS else [_moments(one) for one in parameters]
    return compilation.measure(
        step,
        closed_over,
        cotangents,
        [shapes[place] for place in others],
        (parameters, state),
        device=device,
        donate_argnums=() if fate is Gradients.RESULTS else 3,
    )


def _moments(parameter: Any) -> tuple[Any, Any]:
    """Adam's state for a parameter."""
    kind = jax.ShapeDtypeStruct(jnp.shape(parameter), jnp.result_type(parameter))
    return kind, jax.eval_shape(jnp.abs, kind)


def _updated(
    parameters: Sequence[Any], gradients: Sequence[Any], state: Sequence[tuple[Any, Any]]
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Parameters and state after a step of Adam, in the order in which they are given.

    JAX pairs donated arguments with results of their type in order. In another order they would lie
    in one another's buffers, and XLA would copy weights that are still to be read.
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
    """The plan that is best as compiled, after at most ``MOST_COMPILES`` of them.

    Args:
      problem: what is to be decided.
      objective: what is wanted.
      compiled: compiles a plan in its step for the device.

    Returns:
      The plan, measured. For a budget: of those that are within it the one with the least
      recomputation. Else: of those whose memory is within 2 % of the least that was compiled the
      one with the least recomputation.

    Raises:
      BudgetError: no plan that was compiled is within the budget, or none is predicted to be.
      CompileError: the compiler has refused all that were tried.
    """
    budget_bytes = planning.budget_bytes_of(problem, objective)
    # Where nothing is predicted to fit, that is an error.
    first = planning.solve(problem, objective)
    trials = _Trials(problem, objective, compiled)
    if budget_bytes is None:
        return _least(first, trials)
    return _within(first, trials, budget_bytes)


def _within(first: Candidate, trials: _Trials, budget_bytes: int) -> Plan:
    """The least recomputation within a budget.

    After each compile the predictions of all plans are corrected, and the best of those that now
    fit is next, until it has been compiled already. One compile is left then: for the smallest if
    nothing has fitted so far, else for what a policy of ``jax.checkpoint`` comes to, where that is
    expected to fit and to recompute less.
    """
    measure = trials.measure
    one: Candidate | None = first
    while one is not None and trials.left > 1:
        trials.compile(one)
        best = trials.best_within(budget_bytes)
        one = trials.fastest(budget_bytes, trials.front)
        if one is not None and best is not None:
            gain = best.overhead(measure) - one.overhead(measure)
            if gain < _LEAST_GAIN * best.overhead(measure):
                break
        if one is None and best is None:
            one = trials.smallest()
        if one is not None and trials.tried(one):
            break
    best = trials.best_within(budget_bytes)
    if trials.left and best is None and (untried := trials.smallest()) is not None:
        trials.compile(untried)
    default = trials.fastest(budget_bytes, trials.defaults) if trials.left else None
    if default is not None and (
        best is None or default.overhead(measure) < best.overhead(measure) * (1 - _LEAST_GAIN)
    ):
        trials.compile(default)
    best = trials.best_within(budget_bytes)
    if best is not None:
        return trials.plan_of(best, f"a budget of {format_bytes(budget_bytes)}")
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


def _least(first: Candidate, trials: _Trials) -> Plan:
    """The least memory, of near-equals with the least recomputation.

    Compiled are the best that is predicted, the default policy that is predicted smallest, and what
    the corrected predictions then say is best.
    """
    most = planning.overhead_limit(trials.problem, trials.objective)
    trials.compile(first)
    allowed = [one for one in trials.defaults if one.overhead(trials.measure) <= most]
    if allowed:
        trials.compile(least_memory(allowed, trials.measure))
    near = [
        one
        for one in trials.front
        if one.overhead(trials.measure) <= most and one.peak_bytes <= first.peak_bytes * _NEAR
    ]
    while trials.left:
        corrected = [trials.corrected(one) for one in near if not trials.refused(one)]
        if not corrected:
            break
        best = least_memory(corrected, trials.measure)
        one = next(one for one in near if one.schedule == best.schedule)
        if trials.tried(one):
            untried = [other for other in near if not trials.tried(other)]
            if not untried or trials.count >= MOST_FOR_LEAST:
                break
            one = untried[0]
        trials.compile(one)
    trials.raise_if_all_refused()
    return trials.plan_of(least_memory(trials.as_compiled(), trials.measure), "the least memory")


class _Trials:
    """Plans that were compiled, and what that tells of the others.

    Attributes:
      problem: what is to be decided.
      objective: what is wanted.
      measure: what recomputation is counted in.
      front: the plans to choose from, by falling peak.
      defaults: what the policies of ``jax.checkpoint`` come to.
      plans: those that compiled, measured.
    """

    def __init__(
        self, problem: Problem, objective: Objective, compiled: Callable[[Plan], Measurement]
    ) -> None:
        self.problem, self.objective, self.measure = problem, objective, objective.overhead
        self.front = pareto(list(problem.candidates), self.measure)[::-1]
        self.defaults = planning.defaults(problem)
        self.plans: list[Plan] = []
        self._compiled = compiled
        self._refusals: list[CompileError] = []
        # In order: what was tried, and its plan unless the compiler refused it.
        self._tried: dict[Schedule, tuple[Candidate, Plan | None]] = {}

    @property
    def count(self) -> int:
        """How many plans were tried."""
        return len(self._tried)

    @property
    def left(self) -> int:
        """How many more may be."""
        return MOST_COMPILES - self.count

    def tried(self, one: Candidate) -> bool:
        """Whether the candidate was compiled, or refused."""
        return one.schedule in self._tried

    def refused(self, one: Candidate) -> bool:
        """Whether the compiler refused the candidate."""
        return self.tried(one) and self._tried[one.schedule][1] is None

    def compile(self, one: Candidate) -> None:
        """Compiles the candidate's plan, unless it was tried."""
        if self.tried(one):
            return
        plan = planning.describe(self.problem, self.problem.program, one, self.objective)
        try:
            measured = self._compiled(plan)
        except CompileError as error:
            self._refusals.append(error)
            self._tried[one.schedule] = one, None
            return
        plan = dataclasses.replace(plan, measured=measured)
        self.plans.append(plan)
        self._tried[one.schedule] = one, plan

    def corrected(self, one: Candidate) -> Candidate:
        """The candidate with what it was compiled to, or is expected to by what others were.

        The model is off by much the same near a plan that was compiled; between two, the ratio goes
        from that of the one to that of the other.
        """
        if self.tried(one):
            plan = self._tried[one.schedule][1]
            actual = sys.maxsize if plan is None else _temporary_bytes(plan)
            return dataclasses.replace(one, peak_bytes=actual)
        known: dict[int, float] = {}
        for of, plan in self._tried.values():
            ratio = _RATIO_IF_REFUSED if plan is None else _ratio(plan)
            known[of.peak_bytes] = max(ratio, known.get(of.peak_bytes, 0.0))
        if not known:
            return one
        predicted = sorted(known)
        ratio = np.interp(one.peak_bytes, predicted, [known[size] for size in predicted])
        return dataclasses.replace(one, peak_bytes=round(one.peak_bytes * float(ratio)))

    def fastest(self, budget_bytes: int, among: Sequence[Candidate]) -> Candidate | None:
        """The one with the least recomputation that is expected to fit, tried or not."""
        fitting = [one for one in among if self.corrected(one).peak_bytes <= budget_bytes]
        return min(
            fitting, key=lambda one: (one.overhead(self.measure), one.peak_bytes), default=None
        )

    def smallest(self) -> Candidate | None:
        """What is expected to need least of all that was not tried."""
        untried = [one for one in (*self.front, *self.defaults) if not self.tried(one)]
        return min(untried, key=lambda one: self.corrected(one).peak_bytes, default=None)

    def as_compiled(self) -> list[Candidate]:
        """What compiled, with the bytes that it took."""
        return [self.corrected(one) for one, plan in self._tried.values() if plan is not None]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """Of what has compiled to at most so many bytes the one with the least recomputation."""
        fitting = [one for one in self.as_compiled() if one.peak_bytes <= budget_bytes]
        return min(
            fitting, key=lambda one: (one.overhead(self.measure), one.peak_bytes), default=None
        )

    def plan_of(self, one: Candidate, what: str) -> Plan:
        """The plan of a candidate that compiled, with a note on all that were."""
        _, plan = self._tried[one.schedule]
        assert plan is not None, "it compiled"
        return _noted(plan, self.plans, what)

    def raise_if_all_refused(self) -> None:
        """Raises the compiler's last error where nothing has compiled."""
        if not self.plans:
            raise self._refusals[-1]


def _ratio(plan: Plan) -> float:
    return _temporary_bytes(plan) / max(1, plan.predicted.temporary_bytes)


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
