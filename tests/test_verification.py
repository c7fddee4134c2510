"""Choosing by compiling, with a compiler that says what the test wants, and with the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt import planning, verification
from remat_opt.device import get_device
from remat_opt.errors import BudgetError, CompileError, PlanFileError, RematError
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.program.tracing import Signature
from tests.devices import needs_cuda_plugin

pytestmark = pytest.mark.usefixtures("quick_search")

SHAPES = (
    [jax.ShapeDtypeStruct((64, 64), "float32")] * 12,
    jax.ShapeDtypeStruct((1024, 64), "float32"),
)
#: For the real compiler.
SMALL = [jax.ShapeDtypeStruct((64, 64), "float32")] * 6, SHAPES[1]


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
        predicted = plan.predicted.model_bytes
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
    # So much that no policy of jax.checkpoint recomputes less.
    objective = Objective(budget_bytes=round(0.7 * problem.unchanged.peak_bytes))
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


def test_where_the_compiler_needs_less_less_is_recomputed(problem: planning.Problem) -> None:
    objective = Objective(budget_bytes=half(problem))
    careful = verification.choose(problem, objective, Compiler(lambda predicted: predicted))
    compiler = Compiler(lambda predicted: 0.7 * predicted)
    plan = verification.choose(problem, objective, compiler)
    assert plan.measured is not None
    assert plan.measured.temporary_bytes <= half(problem) < plan.predicted.model_bytes
    assert plan.predicted.overhead_seconds < 0.95 * careful.predicted.overhead_seconds
    assert 1 < len(compiler.given) <= verification.MOST_COMPILES


def test_what_fits_is_kept_where_more_does_not(problem: planning.Problem) -> None:
    # Less than predicted up to the budget, and far more beyond it.
    budget = half(problem)
    compiler = Compiler(lambda predicted: predicted * (0.8 if predicted <= budget else 2.0))
    plan = verification.choose(problem, Objective(budget_bytes=budget), compiler)
    assert plan.predicted.model_bytes == max(p for p in compiler.given if p <= budget)
    assert len(compiler.given) == len(set(compiler.given)) > 1


def test_what_the_compiler_refuses_is_passed_over(problem: planning.Problem) -> None:
    def refuses(largest: int) -> Compiler:
        def law(predicted: int) -> float:
            if predicted > largest:
                raise CompileError("no such program", device="cpu")
            return predicted

        return Compiler(law)

    budget = half(problem)
    objective = Objective(budget_bytes=budget)
    plan = verification.choose(problem, objective, refuses(round(0.85 * budget)))
    assert 0.6 * budget < plan.predicted.model_bytes <= 0.85 * budget
    assert plan.measured is not None
    for asked in (objective, Objective()):
        with pytest.raises(CompileError, match="no such program"):
            verification.choose(problem, asked, refuses(0))


def test_where_the_smallest_predicted_does_not_fit_others_are_tried(
    problem: planning.Problem,
) -> None:
    budget = half(problem)
    sizes = sorted(one.peak_bytes for one in problem.candidates if one.peak_bytes <= budget)
    # The plans predicted smallest and largest are too large; those between fit.
    compiler = Compiler(lambda predicted: 3.0 if sizes[0] < predicted < sizes[-1] else 3e9)
    plan = verification.choose(problem, Objective(budget_bytes=budget), compiler)
    assert plan.measured is not None
    assert plan.measured.temporary_bytes == 3
    assert sizes[0] < plan.predicted.model_bytes < sizes[-1]
    assert len(set(compiler.given)) == len(compiler.given) <= verification.MOST_COMPILES


def test_the_last_compile_is_for_one_that_fits_for_sure(problem: planning.Problem) -> None:
    # Whatever is expected to be near the budget is a little above it.
    budget = half(problem)
    compiler = Compiler(lambda p: max(p, 1.05 * budget) if p > 0.7 * budget else p)
    plan = verification.choose(problem, Objective(budget_bytes=budget), compiler)
    assert plan.measured is not None
    assert plan.measured.temporary_bytes <= budget
    assert len(compiler.given) == verification.MOST_COMPILES
    assert compiler.given[-1] < 0.7 * budget < min(compiler.given[:-1])


def test_what_never_fits_is_an_error(problem: planning.Problem) -> None:
    compiler = Compiler(lambda predicted: problem.unchanged.peak_bytes)
    with pytest.raises(BudgetError) as caught:
        verification.choose(problem, Objective(budget_bytes=half(problem)), compiler)
    assert len(compiler.given) == len(set(compiler.given)) <= verification.MOST_COMPILES
    assert str(caught.value).startswith("No plan has compiled to temporaries within ")
    assert caught.value.least_peak_bytes == problem.unchanged.peak_bytes


def test_the_least_memory_is_that_of_the_compiler(problem: planning.Problem) -> None:
    first = Compiler(lambda predicted: predicted)
    best = verification.choose(problem, Objective(), first)
    assert best.predicted.model_bytes == min(first.given)
    # A compiler that spoils the most promising plan.
    second = Compiler(lambda p: 2 * p if p == min(first.given) else p)
    other = verification.choose(problem, Objective(), second)
    assert other.predicted.model_bytes == sorted(set(first.given))[1]


def test_a_limit_on_the_overhead_holds(problem: planning.Problem) -> None:
    compiler = Compiler(lambda predicted: predicted)
    plan = verification.choose(problem, Objective(max_overhead=0.3), compiler)
    assert plan.predicted.overhead_share <= 0.3
    assert len(compiler.given) > 1


@pytest.fixture(scope="module")
def chosen() -> Plan:
    """Chosen by compiling, with the real compiler."""
    return remat_opt.make_plan(layers, *SMALL, budget=0.5, device="cpu", verify="compile")


def test_with_the_real_compiler(chosen: Plan) -> None:
    plan = chosen
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


# --- In the decorator ---------------------------------------------------------------------

WEIGHTS = [jnp.full((64, 64), 0.01)] * 5
X = jnp.linspace(-1.0, 1.0, 256 * 64).reshape(256, 64)
VERIFIED: Any = {"budget": 0.6, "device": "cpu", "verify": "compile"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Everything measured during a test."""
    found = []
    measure = compilation.measure

    def noted(*args: Any, **options: Any) -> Measurement:
        found.append(measure(*args, **options))
        return found[-1]

    monkeypatch.setattr(compilation, "measure", noted)
    return found


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.max(np.abs(other)))


def test_once_for_a_program_under_some_traces(compiled: list[Measurement]) -> None:
    fn = remat_opt.optimal_remat(layers, **VERIFIED)
    gradient = jax.grad(fn)
    agree(jax.jit(gradient)(WEIGHTS, X), jax.jit(jax.grad(layers))(WEIGHTS, X))
    count = len(compiled)
    assert count > 0
    jax.eval_shape(gradient, WEIGHTS, X)
    jax.eval_shape(jax.vmap(gradient, in_axes=(None, 0)), WEIGHTS, jnp.stack([X, X]))
    plan = fn.plan(WEIGHTS, X)
    assert len(compiled) == count
    assert plan.measured in compiled
    assert plan.measured.temporary_bytes <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.versions
def test_once_for_a_program_under_any_trace(compiled: list[Measurement]) -> None:
    fn = remat_opt.optimal_remat(layers, **VERIFIED)
    gradient = jax.grad(fn)
    expected = jax.grad(layers)(WEIGHTS, X)
    agree(jax.jit(gradient)(WEIGHTS, X), expected)
    count = len(compiled)
    assert count > 0
    agree(gradient(WEIGHTS, X), expected)
    batch = jax.vmap(gradient, in_axes=(None, 0))(WEIGHTS, jnp.stack([X, X]))
    agree(jax.tree.map(lambda leaf: leaf[1], batch), expected)

    def step(weights: Any, _: None) -> tuple[Any, Any]:
        return weights, gradient(weights, X)

    agree(jax.lax.scan(step, WEIGHTS, length=1)[1], jax.tree.map(lambda g: g[None], expected))
    plan = fn.plan(WEIGHTS, X)
    assert len(compiled) == count
    assert plan.measured in compiled
    assert plan.budget_bytes is not None
    assert plan.measured is not None
    assert plan.measured.temporary_bytes <= plan.budget_bytes
    # The other entry point knows what was learnt here, and does no worse.
    again = remat_opt.make_plan(layers, WEIGHTS, X, **VERIFIED)
    assert again.measured is not None
    assert again.measured.temporary_bytes <= plan.budget_bytes
    assert again.predicted.overhead_seconds <= plan.predicted.overhead_seconds
    # Other shapes are another program.
    jax.jit(gradient)(WEIGHTS, X[:128])
    assert len(compiled) > 2 * count


def test_the_figures_are_those_of_the_users_own_gradient() -> None:
    plan = remat_opt.make_plan(
        layers, WEIGHTS, X, budget=0.6, device="cpu", verify=True, gradients="results"
    )
    gradient = jax.value_and_grad(remat_opt.apply_plan(plan, layers))
    assert plan.measured == compilation.measure(gradient, WEIGHTS, X, device="cpu")


@pytest.mark.parametrize("in_step", [False, True])
def test_what_was_alive_is_shown_beside_the_prediction(in_step: bool) -> None:
    decorated = remat_opt.optimal_remat(layers)

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(decorated)(weights, x))

    planned = step if in_step else layers
    plan = remat_opt.make_plan(planned, WEIGHTS, X, budget=0.7, device="cpu", verify=True)
    assert plan.measured is not None
    assert plan.measured.memory is None, "it would take much memory to keep"
    assert 0 < max(plan.as_compiled) <= plan.measured.temporary_bytes
    assert "as compiled" in repr(plan)
    assert "as compiled" in plan._repr_html_()


def test_closed_over_arrays_that_are_traced(compiled: list[Measurement]) -> None:
    @jax.jit
    def step(weights: Any, x: jax.Array) -> Any:
        @remat_opt.optimal_remat(device="cpu", verify=True, gradients="results")
        def loss(weights: Any) -> jax.Array:
            return layers(weights, x)

        return jax.grad(loss)(weights)

    agree(step(WEIGHTS, X), jax.grad(layers)(WEIGHTS, X))
    (found,) = compiled
    # The weights are one array here, but several arguments.
    assert found.argument_bytes == len(WEIGHTS) * 64 * 64 * 4 + X.nbytes


def test_static_keyword_and_auxiliary(compiled: list[Measurement]) -> None:
    @remat_opt.optimal_remat(
        device="cpu", verify=True, argnums=1, has_aux=True, static_argnames=("power",)
    )
    def loss(x: jax.Array, weights: Any, *, power: int, scale: float) -> tuple[jax.Array, Any]:
        value = layers(weights, x)
        return value**power * scale, {"value": value, "count": 3}

    def gradient(weights: Any, scale: float) -> Any:
        return jax.grad(lambda weights: loss(X, weights, power=2, scale=scale), has_aux=True)(
            weights
        )

    found, auxiliary = jax.jit(gradient)(WEIGHTS, 0.5)
    expected = jax.grad(lambda weights: layers(weights, X) ** 2 * 0.5)(WEIGHTS)
    agree(found, expected)
    assert auxiliary["count"] == 3
    assert len(compiled) == 1
    loss.plan(X, WEIGHTS, power=3, scale=0.5)
    assert len(compiled) == 2


def test_a_method_and_outputs_that_are_no_scalar(compiled: list[Measurement]) -> None:
    class Model:
        @remat_opt.optimal_remat(device="cpu", verify=True)
        def __call__(self, weights: Any) -> tuple[jax.Array, jax.Array]:
            x = X
            for w in weights:
                x = jnp.tanh(x @ w) + x
            return x, jnp.argmax(x, axis=1)

    def through(model: Callable[[Any], Any]) -> Any:
        return jax.grad(lambda weights: jnp.sum(model(weights)[0] ** 2))(WEIGHTS)

    agree(through(Model()), jax.grad(layers)(WEIGHTS, X))
    (found,) = compiled
    assert found.recomputation is not None


def test_axes_round_the_function_are_told() -> None:
    fn = remat_opt.optimal_remat(
        lambda weights, x: jax.lax.pmean(layers(weights, x), "i"), device="cpu", verify=True
    )
    with pytest.raises(RematError) as caught:
        jax.vmap(jax.grad(fn), in_axes=(None, 0), axis_name="i")(WEIGHTS, jnp.stack([X, X]))
    assert str(caught.value) == (
        "'<lambda>' cannot be compiled on its own, as verify= asks: it is tied to the axes i "
        "of a vmap or shard_map around it. Leave verify= out, or decorate a function that "
        "has the vmap or shard_map inside."
    )


def test_a_plan_that_is_given_is_not_verified() -> None:
    plan = remat_opt.make_plan(layers, WEIGHTS, X, device="cpu")
    with pytest.raises(RematError) as caught:
        remat_opt.optimal_remat(layers, plan=plan, verify="compile")
    assert str(caught.value) == (
        "plan= is given together with verify='compile', which is about making one. Leave it out, "
        "or make the plan again with make_plan(verify=...)."
    )


# --- What is learnt -------------------------------------------------------------------------

#: Large enough that most of the memory is for values of the program.
LARGE = (
    [jax.ShapeDtypeStruct((128, 128), "float32")] * 12,
    jax.ShapeDtypeStruct((4096, 128), "float32"),
)


def told(*shapes: Any, device: str) -> tuple[planning.Problem, Callable[[Plan], Measurement]]:
    """A problem with the real compiler, which says what is alive when."""
    program = tracing.trace(layers, *shapes, signature=Signature())
    problem = planning.problem(program, get_device(device))

    def compiled(plan: Plan) -> Measurement:
        arguments = jax.tree.leaves(shapes)
        return verification.measure_plan(
            plan, program, arguments, problem.device, with_buffers=True
        )

    return problem, compiled


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("h200", marks=[pytest.mark.cuda, needs_cuda_plugin])]
)
@pytest.mark.slow
def test_the_last_prediction_is_what_is_compiled(device: str) -> None:
    problem, compiled = told(*LARGE, device=device)
    for share in (0.4, 0.6, 0.8):
        count = 0

        def counted(plan: Plan) -> Measurement:
            nonlocal count
            count += 1
            return compiled(plan)

        objective = Objective(budget_share=share)
        plan = verification.choose(problem, objective, counted)
        assert plan.measured is not None
        assert plan.budget_bytes is not None
        assert count <= verification.MOST_COMPILES
        assert plan.measured.temporary_bytes <= plan.budget_bytes
        assert max(plan.as_compiled) <= plan.measured.temporary_bytes
        if count > 1:
            assert plan.predicted.temporary_bytes == pytest.approx(
                plan.measured.temporary_bytes, rel=0.05
            )


def test_what_was_learnt_is_known_to_the_next_call() -> None:
    problem, compiled = told(*SMALL, device="cpu")
    memory = verification.Memory(problem.program, problem.device, "a step of this test")
    assert memory.recall() is None
    objective = Objective(budget_bytes=half(problem))
    first = verification.choose(problem, objective, compiled, memory)
    known = memory.recall()
    assert known is not None
    assert known.compiled
    count = 0

    def counted(plan: Plan) -> Measurement:
        nonlocal count
        count += 1
        return compiled(plan)

    again = verification.choose(problem, objective, counted, memory)
    assert first.measured is not None
    assert again.measured is not None
    assert again.measured.temporary_bytes <= half(problem)
    assert again.predicted.overhead_seconds <= first.predicted.overhead_seconds
    # Nothing is known about another step.
    other = verification.Memory(problem.program, problem.device, "another step")
    assert other.recall() is None


def test_a_budget_known_to_be_hopeless_is_an_error() -> None:
    problem, compiled = told(*SMALL, device="cpu")
    memory = verification.Memory(problem.program, problem.device, "another step of this test")
    verification.choose(problem, Objective(budget_bytes=half(problem)), compiled, memory)
    with pytest.raises(BudgetError, match="No plan has compiled to temporaries within") as caught:
        verification.choose(problem, Objective(budget_bytes=1000), compiled, memory)
    assert caught.value.least_peak_bytes > 1000


@pytest.mark.slow
@pytest.mark.versions
def test_a_file_of_what_was_learnt(tmp_path: Path) -> None:
    path = tmp_path / "learnt.json"
    options: Any = {"budget": 0.5, "device": "cpu"}
    with pytest.raises(PlanFileError, match="There is no file"):
        remat_opt.make_plan(layers, *SHAPES, **options, learnt=path)
    compiled = remat_opt.make_plan(layers, *SHAPES, **options, verify="compile", learnt=path)
    assert compiled.measured is not None
    # Nothing is compiled here; what was compiled before is known to the byte.
    plan = remat_opt.make_plan(layers, *SHAPES, **options, learnt=path)
    assert plan.measured is None
    assert plan.budget_bytes is not None
    assert plan.predicted.temporary_bytes <= plan.budget_bytes
    assert plan.predicted.overhead_seconds <= compiled.predicted.overhead_seconds
    assert plan == remat_opt.make_plan(layers, *SHAPES, **options, learnt=path)
    # Without the file this process plans like any other, whatever it has learnt.
    bare = remat_opt.make_plan(layers, *SHAPES, **options)
    assert bare.predicted.temporary_bytes == bare.predicted.model_bytes
    # The file says nothing about other shapes, and the plan says so.
    weights, _ = SHAPES
    rows = jax.ShapeDtypeStruct((512, 64), "float32")
    other = remat_opt.make_plan(layers, weights, rows, **options, learnt=path)
    assert other.notes[-1].startswith(f"{str(path)!r} says nothing about this program on cpu")
    with pytest.raises(RematError, match="plan= is given together with learnt="):
        remat_opt.optimal_remat(layers, plan=plan, learnt=path)


def test_memory_over_time_as_compiled_is_shown(chosen: Plan) -> None:
    plan = chosen
    assert 0 < len(plan.as_compiled) <= 200
    assert Plan.from_json(plan.to_json()) == plan
    text = " ".join(repr(plan).split())
    assert "Memory over time, planned" in text
    assert "as compiled" in text
    page = plan._repr_html_()
    assert "Memory over time" in page
    assert "as compiled</li>" in page


def test_a_budget_below_every_prediction_is_asked_of_the_compiler(
    problem: planning.Problem,
) -> None:
    least = min(one.peak_bytes for one in problem.candidates)
    compiler = Compiler(lambda predicted: predicted / 2)
    plan = verification.choose(problem, Objective(budget_bytes=round(0.8 * least)), compiler)
    assert plan.measured is not None
    assert plan.measured.temporary_bytes <= 0.8 * least
