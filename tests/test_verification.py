"""Choosing by compiling, with a compiler that says what the test wants, and with the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt import planning, tracing, verification
from remat_opt.device import get_device
from remat_opt.errors import BudgetError, RematError
from remat_opt.measurement import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.tracing import Signature

SHAPES = (
    [jax.ShapeDtypeStruct((64, 64), "float32")] * 12,
    jax.ShapeDtypeStruct((1024, 64), "float32"),
)


def layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


@pytest.fixture(scope="module")
def problem() -> planning.Problem:
    return planning.problem(
        tracing.trace(layers, *SHAPES, signature=Signature()), get_device("cpu")
    )


class Compiler:
    """Says what ``law`` makes of the prediction, and remembers which plans it was given."""

    def __init__(self, law: Callable[[int], float]) -> None:
        self.law = law
        self.given: list[int] = []

    def __call__(self, plan: Plan) -> Measurement:
        predicted = plan.predicted.temporary_bytes
        self.given.append(predicted)
        return Measurement(
            device="cpu",
            argument_bytes=0,
            output_bytes=0,
            temporary_bytes=round(self.law(predicted)),
            alias_bytes=0,
            host_bytes=0,
            flops=None,
            recomputation=None,
            compile_seconds=0.0,
            jax_version="",
            compiler_version="",
            notes=(),
        )


def half(problem: planning.Problem) -> int:
    return problem.unchanged.peak_bytes // 2


def test_a_true_prediction_is_compiled_once(problem: planning.Problem) -> None:
    compiler = Compiler(lambda predicted: predicted)
    objective = Objective(budget_bytes=half(problem))
    plan = verification.choose(problem, objective, compiler)
    assert len(compiler.given) == 1
    unverified = planning.describe(
        problem, problem.program, planning.solve(problem, objective), objective
    )
    assert plan.stages == unverified.stages
    assert plan.measured is not None
    assert plan.notes[-1].startswith("Chosen by compiling, for a budget of ")


def test_where_the_compiler_needs_more_the_budget_is_met_all_the_same(
    problem: planning.Problem,
) -> None:
    compiler = Compiler(lambda predicted: 1.3 * predicted)
    plan = verification.choose(problem, Objective(budget_bytes=half(problem)), compiler)
    assert plan.measured is not None
    assert plan.measured.temporary_bytes <= half(problem)
    assert len(compiler.given) == 2, "the second try knows what the first was wrong by"


def test_what_never_fits_is_an_error(problem: planning.Problem) -> None:
    compiler = Compiler(lambda predicted: problem.unchanged.peak_bytes)
    with pytest.raises(BudgetError) as caught:
        verification.choose(problem, Objective(budget_bytes=half(problem)), compiler)
    assert len(compiler.given) == len(set(compiler.given)) <= verification.MOST_FOR_BUDGET
    assert str(caught.value).startswith("No plan has compiled to temporaries within ")
    assert caught.value.least_peak_bytes == problem.unchanged.peak_bytes


def test_the_least_memory_is_that_of_the_compiler(problem: planning.Problem) -> None:
    first = Compiler(lambda predicted: predicted)
    best = verification.choose(problem, Objective(), first)
    assert best.predicted.temporary_bytes == min(first.given)
    # A compiler that spoils the most promising plan.
    second = Compiler(lambda p: 2 * p if p == min(first.given) else p)
    other = verification.choose(problem, Objective(), second)
    assert other.predicted.temporary_bytes == sorted(set(first.given))[1]


def test_a_limit_on_the_overhead_holds(problem: planning.Problem) -> None:
    compiler = Compiler(lambda predicted: predicted)
    plan = verification.choose(problem, Objective(max_overhead=0.3), compiler)
    assert plan.predicted.overhead_share <= 0.3
    assert len(compiler.given) > 1


def test_with_the_real_compiler() -> None:
    plan = remat_opt.make_plan(layers, *SHAPES, budget=0.5, device="cpu", verify="compile")
    assert plan.measured is not None
    assert plan.budget_bytes is not None
    assert plan.measured.temporary_bytes <= plan.budget_bytes
    assert dataclasses.replace(plan, measured=None) == Plan.from_json(
        dataclasses.replace(plan, measured=None).to_json()
    )


def test_other_ways_to_verify_are_refused() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.make_plan(layers, *SHAPES, device="cpu", verify="run")
    assert str(caught.value) == (
        "verify='run': give True to compile the plan, or \"compile\" to choose by compiling."
    )


def test_nothing_differentiated_is_an_error_here_too() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.make_plan(lambda n: jnp.sum(n * n), 3, device="cpu", verify="compile")
    assert str(caught.value).startswith("Nothing is differentiated: ")
