"""A function that fits runs as it is: nothing is written differently for the compiler."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt import planning, verification
from remat_opt.compilers import learnt
from remat_opt.device import get_device
from remat_opt.plan import Objective, Plan
from remat_opt.planning import Problem
from remat_opt.program import tracing
from remat_opt.program.tracing import Signature
from tests.programs import ones

pytestmark = pytest.mark.usefixtures("quick_search")

WEIGHTS = [0.01 * ones(64, 64)] * 2
X = ones(16, 64)
STEPS = 7


def loss(weights: Any, x: jax.Array) -> jax.Array:
    """A recurrent network, whose gradients plans put in order with barriers."""
    inner, outer = weights
    for _ in range(STEPS):
        x = jnp.tanh(x @ inner) @ outer
    return jnp.sum(x**2)


def problem_of(device: str) -> Problem:
    program = tracing.trace(loss, WEIGHTS, X, signature=Signature())
    return planning.problem(program, get_device(device))


def primitives(decorated: Any) -> list[str]:
    """The names in the jaxpr of a gradient, sorted."""
    closed = jax.make_jaxpr(jax.grad(decorated))(WEIGHTS, X)
    return sorted(re.findall(r"= (\w+)", str(closed)))


@pytest.mark.parametrize(
    ("budget", "device"),
    [
        *itertools.product((1.0, "64GiB"), ("h200", "v5e", "cpu")),
        # A CPU's memory is the machine's own affair.
        *itertools.product(("fit",), ("h200", "v5e")),
    ],
)
def test_what_fits_runs_as_it_is(budget: Any, device: str) -> None:
    decorated = remat_opt.optimal_remat(loss, budget=budget, device=device)
    plan = decorated.plan(WEIGHTS, X)
    assert plan.unchanged
    assert plan.predicted.temporary_bytes == plan.predicted.plain_temporary_bytes
    assert plan.predicted.timeline == plan.predicted.plain_timeline
    assert primitives(decorated) == primitives(loss)


def test_without_recomputation_it_may_still_take_less() -> None:
    problem = problem_of("h200")
    budget_bytes = problem.unchanged.peak_bytes - 1
    plan = remat_opt.make_plan(loss, WEIGHTS, X, budget=budget_bytes, device="h200")
    assert not plan.unchanged
    assert plan.predicted.overhead_seconds == 0
    assert plan.predicted.temporary_bytes <= budget_bytes
    decorated = remat_opt.optimal_remat(loss, budget=budget_bytes, device="h200")
    assert "optimization_barrier" in primitives(decorated)
    assert "optimization_barrier" not in primitives(loss)


def test_the_least_memory_is_not_that_of_the_function_as_it_is() -> None:
    assert not remat_opt.make_plan(loss, WEIGHTS, X, device="h200").unchanged


def test_one_that_gains_nothing_runs_as_it_is() -> None:
    def linear(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w)

    plan = remat_opt.make_plan(linear, WEIGHTS[0], X, device="cpu")
    assert plan.unchanged
    assert "none: the function runs as it is" in repr(plan)
    assert "the function runs as it is" in plan._repr_html_()


def test_of_the_frontier_it_is_the_last() -> None:
    found = remat_opt.frontier(loss, WEIGHTS, X, device="h200")
    *others, last = found.rows
    assert last["unchanged"]
    assert not any(row["unchanged"] for row in others)
    assert last["temporary_bytes"] == found.defaults[0]["temporary_bytes"]
    for row in found.rows:
        plan = remat_opt.make_plan(loss, WEIGHTS, X, budget=row["temporary_bytes"], device="h200")
        assert plan.unchanged is row["unchanged"]
        assert plan.predicted.temporary_bytes == row["temporary_bytes"]


@pytest.mark.parametrize("verify", [True, "compile"])
def test_it_compiles_to_what_the_function_itself_does(verify: Any) -> None:
    plan = remat_opt.make_plan(loss, WEIGHTS, X, budget="1GiB", device="cpu", verify=verify)
    assert plan.unchanged
    itself = remat_opt.measure(jax.value_and_grad(loss), WEIGHTS, X, device="cpu")
    in_step = remat_opt.make_plan(
        loss, WEIGHTS, X, budget="1GiB", device="cpu", verify=verify, gradients="results"
    )
    assert in_step.measured is not None
    assert in_step.measured.temporary_bytes == itself.temporary_bytes


@pytest.mark.slow
@pytest.mark.versions
def test_a_budget_that_it_misses_as_compiled_is_met_by_another(tmp_path: Path) -> None:
    # A model that says too little of the function as it is: the compiler knows better.
    problem = problem_of("cpu")
    actual = remat_opt.make_plan(
        loss, WEIGHTS, X, budget="1GiB", device="cpu", verify="compile"
    ).measured
    assert actual is not None
    budget_bytes = actual.temporary_bytes - 1
    too_small = dataclasses.replace(problem.unchanged, peak_bytes=budget_bytes)
    candidates = (*problem.candidates[:-1], too_small)
    assert problem.candidates[-1] == problem.unchanged
    sweep = dataclasses.replace(problem.sweep, candidates=candidates, unchanged=too_small)
    problem = dataclasses.replace(problem, sweep=sweep)
    compiled: list[Plan] = []

    def compiles(plan: Plan) -> Any:
        compiled.append(plan)
        return verification.measure_plan(
            plan, problem.program, [*WEIGHTS, X], problem.device, with_buffers=True
        )

    file = tmp_path / "learnt.json"
    memory = verification.Memory(problem.program, problem.device, "test", file)
    objective = Objective(budget_bytes=budget_bytes)
    plan = verification.choose(problem, objective, compiles, memory)
    assert compiled[0].unchanged
    assert not plan.unchanged
    assert plan.measured is not None
    assert plan.measured.temporary_bytes <= budget_bytes
    # The next call knows it from the file.
    (known,) = [one for one in learnt.read(file)[0].compiled if one.schedule.unchanged]
    assert known.compiled_bytes == actual.temporary_bytes
    first = len(compiled)
    assert not verification.choose(problem, objective, compiles, memory).unchanged
    assert not any(one.unchanged for one in compiled[first:])


def test_its_source_is_that_of_the_function() -> None:
    decorated = remat_opt.optimal_remat(loss, budget=1.0, device="h200")
    source = decorated.to_source(WEIGHTS, X)
    assert "checkpoint" not in str(source).split("def loss")[-1]
    assert "barrier" not in str(source)
    exported = jax.grad(source.load())(WEIGHTS, X)
    for found, expected in zip(exported, jax.grad(loss)(WEIGHTS, X), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_plans_that_differ_in_it_alone_differ() -> None:
    whole = remat_opt.make_plan(loss, WEIGHTS, X, budget=1.0, device="h200")
    again = Plan.from_json(whole.to_json())
    assert again == whole
    written = remat_opt.make_plan(loss, WEIGHTS, X, max_overhead=0.0, device="h200")
    assert written.predicted.overhead_seconds == 0
    told = written.diff(whole)
    assert told.regions == (len(written.stages), 0)
    assert not told.is_empty
