"""The doors: options, messages, and when planning happens."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt import planning, solvers
from remat_opt.device import Device, get_device
from remat_opt.errors import BudgetError, RematError, TraceError
from remat_opt.options import objective_of
from remat_opt.plan import Objective
from remat_opt.program import linearization
from tests.programs import ones

pytestmark = pytest.mark.usefixtures("quick_search")


def layers(weights: Any, x: jax.Array) -> jax.Array:
    """Sums the squares of a residual stream."""
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


WEIGHTS, X = [ones(8, 8) * 0.1] * 5, ones(64, 8)


def of_shape(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


# --- Options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget": 0.5, "max_overhead": 0.1},
            "budget=0.5 and max_overhead=0.1 are both given. budget asks for the least "
            "overhead, max_overhead for the least memory: give only one of them.",
        ),
        ({"overhead": "days"}, "overhead='days': give 'seconds' or 'flops'."),
        (
            {"max_overhead": -0.1},
            "max_overhead=-0.1: give a share of a forward pass, such as 0.05.",
        ),
        (
            {"max_overhead": float("nan")},
            "max_overhead=nan: give a share of a forward pass, such as 0.05.",
        ),
        (
            {"max_overhead": True},
            "max_overhead=True: give a share of a forward pass, such as 0.05.",
        ),
        (
            {"max_overhead": "5%"},
            "max_overhead='5%': give a share of a forward pass, such as 0.05.",
        ),
        (
            {"budget": 0.0},
            "budget=0.0: a float is a share of what the unchanged function needs, such as 0.4. For "
            "bytes, give an int or a text such as '6GiB'.",
        ),
        (
            {"budget": 6e9},
            "budget=6000000000.0: a float is a share of what the unchanged function needs, "
            "and 6e+09 times that is probably not what you mean. For bytes, give an int or "
            "'6GiB'.",
        ),
        (
            {"budget": 0.5, "reserve": "1GiB"},
            "reserve='1GiB' is what budget=\"fit\" leaves free of the device's memory; with "
            'budget=0.5 it has no effect. Leave it out, or use budget="fit".',
        ),
        (
            {"solver": "simplex"},
            "solver='simplex': give one of 'portfolio', 'approximate_dp', 'exact_dp', "
            "'exhaustive', 'integer_program', 'linear_chain', 'arbitrary_graph', 'random_choice', "
            "'sublinear', 'revolve', 'heterogeneous_chain', or a record of remat_opt.solvers, such "
            "as ApproximateDP(objective='memory').",
        ),
        (
            {"solver": "min_cut"},
            "solver='min_cut': give one of 'portfolio', 'approximate_dp', 'exact_dp', "
            "'exhaustive', 'integer_program', 'linear_chain', 'arbitrary_graph', 'random_choice', "
            "'sublinear', 'revolve', 'heterogeneous_chain', or a record of remat_opt.solvers, such "
            "as ApproximateDP(objective='memory').",
        ),
        (
            {"plan": remat_opt.make_plan(lambda x: x, 1.0, device="cpu"), "budget": 0.5},
            "plan= cannot be combined with budget= or max_overhead=: a plan is already "
            "decided. Leave the others out.",
        ),
    ],
)
def test_options_out_of_range(options: Any, message: str) -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.optimal_remat(layers, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("budget", ["6", "6 GB of it", "-1GiB", -5, True, [6]])
def test_budgets_that_are_no_bytes(budget: Any) -> None:
    if budget == "6":
        assert objective_of(budget=budget) == Objective(budget_bytes=6)
        return
    with pytest.raises(RematError):
        remat_opt.optimal_remat(layers, budget=budget)


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(row.name, marks=[pytest.mark.slow] * (row.name == "integer_program"))
        for row in solvers.available()
        if row.plans_programs
    ],
)
def test_any_solver_plans_a_chain(solver: str) -> None:
    def chain(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    weights, x = [jnp.full((16, 16), 0.1)] * 5, jnp.ones((64, 16))
    plan = remat_opt.make_plan(chain, weights, x, solver=solver, budget=0.9, device="cpu")
    assert plan.solver == solver
    assert plan.predicted.temporary_bytes < plan.predicted.plain_temporary_bytes
    planned = jax.grad(remat_opt.apply_plan(plan, chain))(weights, x)
    for found, expected in zip(planned, jax.grad(chain)(weights, x), strict=True):
        assert jnp.allclose(found, expected)


def test_solvers_do_not_share_a_plan() -> None:
    weights, x = [jnp.ones((16, 16))] * 8, jnp.ones((64, 16))
    plans = [
        remat_opt.make_plan(layers, weights, x, solver=solver, device="cpu")
        for solver in ("portfolio", solvers.ApproximateDP(objective="memory"), "portfolio")
    ]
    assert [plan.solver for plan in plans] == [
        *("portfolio", "approximate_dp(objective='memory')", "portfolio")
    ]
    assert plans[0].stages == plans[2].stages != plans[1].stages


def test_a_solver_that_does_not_take_the_program() -> None:
    def two_inputs(w: jax.Array, x: jax.Array) -> jax.Array:
        left, right = jnp.sin(x @ w), jnp.cos(x @ w)
        return jnp.sum((left @ w) * (right @ w))

    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(RematError) as caught:
        remat_opt.make_plan(two_inputs, shape, shape, solver="linear_chain", device="cpu")
    message = str(caught.value)
    assert message.startswith("The solver 'linear_chain' does not take 'two_inputs': The graph is")
    assert message.endswith("The default, 'portfolio', takes any program.")


def test_only_functions_are_decorated() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.optimal_remat(3)
    assert str(caught.value) == "optimal_remat decorates a function, not a int."


def test_objectives() -> None:
    assert objective_of() == Objective()
    assert objective_of(budget="2MiB") == Objective(budget_bytes=2 * 1024**2)
    assert objective_of(budget=2**40) == Objective(budget_bytes=2**40)
    assert objective_of(budget=0.5) == Objective(budget_share=0.5)
    assert objective_of(max_overhead=0) == Objective(max_overhead=0.0)


def test_nothing_to_differentiate() -> None:
    fn = remat_opt.optimal_remat(lambda n, x: jnp.sum(jnp.sin(x)) * n)
    with pytest.raises(RematError) as caught:
        fn.plan(3, X)
    assert str(caught.value) == (
        "Nothing is differentiated: none of the arguments in argnums holds a floating-point array. "
        "Point argnums at the parameters."
    )
    # A call without a derivative needs no plan; and JAX itself refuses the derivative.
    assert fn(3, X) == jnp.sum(jnp.sin(X)) * 3
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(fn)(3, X)


def test_wrong_arguments_are_told_when_called() -> None:
    with pytest.raises(TraceError, match="argnums names argument 2"):
        remat_opt.optimal_remat(lambda w: w, argnums=2)(1.0)


def with_a_switch(w: jax.Array, x: jax.Array, train: bool, depth: int = 2) -> jax.Array:
    for _ in range(depth):
        x = jnp.tanh(x @ w) if train else x @ w
    return jnp.sum(x)


def test_python_values_that_are_not_declared() -> None:
    w = jnp.ones((8, 8))
    fn = remat_opt.optimal_remat(with_a_switch, device="cpu")
    with pytest.raises(TraceError) as caught:
        jax.grad(fn)(w, X, True)
    assert str(caught.value) == (
        "'with_a_switch' needs the value of 'train' (True), but arguments are traced, as under "
        "jax.jit. Decorate it with static_argnames='train'."
    )
    with pytest.raises(
        TraceError, match=r"'depth' \(3\), .* static_argnames=\('train', 'depth'\)\."
    ):
        jax.grad(fn)(w, X, True, depth=3)
    told = remat_opt.optimal_remat(with_a_switch, static_argnames=("train", "depth"), device="cpu")
    expected = jax.grad(with_a_switch)(w, X, True, 3)
    np.testing.assert_allclose(jax.grad(told)(w, X, True, depth=3), expected, rtol=1e-5)
    # Where names are unknown, numbers are.
    unnamed = remat_opt.optimal_remat(lambda *args: with_a_switch(*args), device="cpu")
    with pytest.raises(TraceError, match=r"of 2 \(True\), .* with static_argnums=2\."):
        jax.grad(unnamed)(w, X, True)
    # Numbers that may be traced are; for others, JAX says what is wrong.
    scaled = remat_opt.optimal_remat(lambda w, scale: jnp.sum(w) * scale, device="cpu")
    np.testing.assert_allclose(jax.grad(scaled)(w, 3), 3 * w)
    wrong = remat_opt.optimal_remat(lambda w, n: w if jnp.sum(w) > 0 else n, device="cpu")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        wrong(w, 3)


# --- Budgets ------------------------------------------------------------------------------


def test_an_unreachable_budget_names_the_least_peak_and_what_pins_it() -> None:
    with pytest.raises(BudgetError) as caught:
        remat_opt.make_plan(layers, WEIGHTS, X, budget=100, device="cpu")
    least = remat_opt.make_plan(layers, WEIGHTS, X, device="cpu")
    error = caught.value
    assert error.budget_bytes == 100
    # Less than by default, since that stops at one pass of recomputation.
    assert error.least_peak_bytes < least.predicted.temporary_bytes
    assert ("sum in layers, 64x8 float32", 64 * 8 * 4) in error.pinning
    message = str(error)
    assert message.startswith("No plan has temporaries within 100 B: the lowest peak that ")
    assert "cotangent: sum in layers, 64x8 float32, at test_api.py:" in message
    assert message.endswith("(layers). Give a larger budget or a smaller batch.")
    # The least peak itself is reachable.
    assert (
        remat_opt.make_plan(
            layers, WEIGHTS, X, budget=error.least_peak_bytes, device="cpu"
        ).predicted.temporary_bytes
        == error.least_peak_bytes
    )


def small(memory_bytes: int) -> Device:
    """A CPU with this much memory."""
    return dataclasses.replace(get_device("cpu"), name="small", memory_bytes=memory_bytes)


def test_fit_is_the_memory_less_arguments_outputs_and_reserve() -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 8
    x = jax.ShapeDtypeStruct((1024, 64), "float32")
    # Arguments, a gradient for each weight, and the loss.
    fixed = 8 * 64 * 64 * 4 + 1024 * 64 * 4 + 8 * 64 * 64 * 4 + 4
    options: Any = {"budget": "fit", "device": small(2**23), "gradients": "results"}
    # In a step the gradients are temporaries.
    in_step = remat_opt.make_plan(layers, weights, x, **{**options, "gradients": "consumed"})
    assert in_step.budget_bytes == 2**23 - fixed + 8 * 64 * 64 * 4
    plan = remat_opt.make_plan(layers, weights, x, **options)
    assert plan.budget_bytes == 2**23 - fixed
    assert plan.predicted.recomputed_share == 0, "the unchanged function fits"
    tight = remat_opt.make_plan(layers, weights, x, reserve="6MiB", **options)
    assert tight.budget_bytes == 2**21 - fixed
    assert 0 < tight.predicted.temporary_bytes <= tight.budget_bytes
    assert tight.predicted.recomputed_share > 0
    assert "reserve of 6.00 MiB" in repr(tight)


def test_fit_where_nothing_is_left() -> None:
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 8
    x = jax.ShapeDtypeStruct((1024, 64), "float32")
    with pytest.raises(BudgetError) as caught:
        remat_opt.make_plan(
            layers, weights, x, budget="fit", device=small(2**19), gradients="results"
        )
    assert str(caught.value) == (
        "Nothing is left for temporaries on small: of its 512 KiB, arguments take 384 KiB, "
        "outputs 128 KiB, and 0 B are reserved. Use a device with more "
        "memory, shard the parameters, or reserve less."
    )


@pytest.mark.parametrize("overhead", ["seconds", "flops"])
def test_a_larger_budget_never_costs_more(overhead: str) -> None:
    before = None
    for percent in range(100, 20, -4):
        try:
            plan = remat_opt.make_plan(
                layers, WEIGHTS, X, budget=percent / 100, overhead=overhead, device="cpu"
            )
        except BudgetError:
            break
        predicted = plan.predicted
        assert predicted.temporary_bytes <= plan.budget_bytes
        cost = predicted.overhead_seconds if overhead == "seconds" else predicted.recomputed_flops
        if before is not None:
            assert cost >= before
        before = cost
    assert percent < 60  # it did go down


def test_a_larger_overhead_never_takes_more_memory() -> None:
    peaks = []
    for percent in range(0, 101, 10):
        plan = remat_opt.make_plan(layers, WEIGHTS, X, max_overhead=percent / 100, device="cpu")
        assert plan.predicted.overhead_share <= percent / 100 + 1e-12
        peaks.append(plan.predicted.temporary_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] <= plan.predicted.plain_temporary_bytes
    assert peaks[-1] < peaks[0]


# --- Planning happens once ----------------------------------------------------------------


def test_planned_once_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"make": 0, "linearize": 0}
    make, linearize = planning.make, linearization.linearize

    def counted_make(*args: Any) -> Any:
        counts["make"] += 1
        return make(*args)

    def counted_linearize(*args: Any) -> Any:
        counts["linearize"] += 1
        return linearize(*args)

    monkeypatch.setattr(planning, "make", counted_make)
    monkeypatch.setattr(planning, "linearize", counted_linearize)
    fn = remat_opt.optimal_remat(layers, device="cpu")
    x = jnp.ones((48, 8))
    for _ in range(3):
        jax.grad(fn)(WEIGHTS, x)
    step = jax.jit(jax.value_and_grad(fn))
    for _ in range(3):
        step(WEIGHTS, x)
    fn.plan(WEIGHTS, x)
    assert counts == {"make": 1, "linearize": 1}
    jax.grad(fn)(WEIGHTS, x[:24])
    assert counts == {"make": 2, "linearize": 2}
    # Another objective for the same program takes its plan from the same sweep.
    remat_opt.make_plan(layers, WEIGHTS, x, max_overhead=0.1, device="cpu")
    assert counts == {"make": 3, "linearize": 2}


def test_the_plan_of_shapes_is_the_plan_that_the_gradient_uses() -> None:
    seen = []
    fn = remat_opt.optimal_remat(layers, device="cpu", budget=0.8)
    original = fn.plan_of

    def noted(program: Any, call: Any) -> Any:
        seen.append(original(program, call))
        return seen[-1]

    fn.plan_of = noted
    jax.jit(jax.grad(fn))(WEIGHTS, X)
    (used,) = seen
    assert fn.plan(of_shape(WEIGHTS), of_shape(X)) is used
    assert (
        remat_opt.make_plan(layers, of_shape(WEIGHTS), of_shape(X), budget=0.8, device="cpu")
        == used
    )


# It clears what all tests of this process have compiled.
@pytest.mark.slow
@pytest.mark.versions
def test_nothing_of_the_trace_outlives_it() -> None:
    class Big(np.ndarray):
        """An array that allows weak references."""

    closed = np.ones((8, 8), np.float32).view(Big)
    alive = weakref.ref(closed)
    device_array = jnp.asarray(np.ones((8, 8), np.float32))
    device_alive = weakref.ref(device_array)

    def make(table: Any, other: Any) -> Callable[..., Any]:
        def loss(w):
            for _ in range(4):
                w = jnp.tanh(table @ w) + other @ w
            return jnp.sum(w)

        return loss

    jax.grad(remat_opt.optimal_remat(make(closed, device_array), device="cpu"))(jnp.ones(8))
    del closed, device_array
    jax.clear_caches()
    gc.collect()
    assert alive() is None
    assert device_alive() is None


def test_like_programs_keep_their_own_names() -> None:
    def make(scope: str) -> Callable[..., Any]:
        def loss(weights, x):
            with jax.named_scope(scope):
                return layers(weights, x)

        return loss

    for scope in ("first", "second"):
        plan = remat_opt.make_plan(make(scope), WEIGHTS, X, device="cpu")
        assert {decision.module for decision in plan.decisions} == {scope}
        assert {pin.module for pin in plan.predicted.pins} == {scope}


# --- Functions of every kind --------------------------------------------------------------


def test_the_decorated_looks_like_the_function() -> None:
    fn = remat_opt.optimal_remat(layers)
    assert fn.__name__ == "layers"
    assert fn.__qualname__ == "layers"
    assert fn.__doc__ == "Sums the squares of a residual stream."
    assert fn.__module__ == __name__
    assert fn.__wrapped__ is layers
    assert inspect.signature(fn) == inspect.signature(layers)


def test_with_and_without_parentheses() -> None:
    expected = jax.grad(layers)(WEIGHTS, X)
    for decorate in (
        remat_opt.optimal_remat,
        remat_opt.optimal_remat(),
        remat_opt.optimal_remat(budget=0.9),
        functools.partial(remat_opt.optimal_remat, max_overhead=0.5),
    ):
        for one, other in zip(jax.grad(decorate(layers))(WEIGHTS, X), expected, strict=True):
            # Saturated: what is left of one minus a square is as exact as that.
            np.testing.assert_allclose(one, other, rtol=2e-3)


def test_methods() -> None:
    class Model:
        depth = 6

        @remat_opt.optimal_remat(device="cpu")
        def loss(self, w, x):
            for _ in range(self.depth):
                x = jnp.tanh(x @ w)
            return jnp.sum(x)

        @staticmethod
        @remat_opt.optimal_remat
        def static(w):
            return jnp.sum(jnp.sin(w))

    model, w = Model(), jnp.ones((8, 8))

    def expected(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    np.testing.assert_allclose(jax.grad(model.loss)(w, X), jax.grad(expected)(w, X), rtol=1e-6)
    assert model.loss.plan(w, X) is model.loss.plan(w, X)
    assert model.loss.plan(w, X).function == "loss"
    np.testing.assert_allclose(jax.grad(Model.static)(w), jnp.cos(w), rtol=1e-6)


def test_callables_that_are_no_plain_functions() -> None:
    class Loss:
        def __call__(self, w):
            return jnp.sum(jnp.sin(w))

    for fn in (
        Loss(),
        functools.partial(lambda a, w: a * jnp.sum(jnp.sin(w)), 1.0),
        jax.jit(lambda w: jnp.sum(jnp.sin(w))),
    ):
        np.testing.assert_allclose(
            jax.grad(remat_opt.optimal_remat(fn))(jnp.ones(3)), jnp.cos(jnp.ones(3)), rtol=1e-6
        )


def test_arguments_by_name() -> None:
    fn = remat_opt.optimal_remat(layers, device="cpu")
    assert fn(weights=WEIGHTS, x=X) == fn(WEIGHTS, X)
    gradient = jax.grad(lambda weights: fn(x=X, weights=weights))(WEIGHTS)
    assert len(gradient) == len(WEIGHTS)
    by_name = fn.plan(weights=WEIGHTS, x=X)
    assert by_name.stages == fn.plan(WEIGHTS, X).stages


def test_static_arguments_have_their_own_plans() -> None:
    @remat_opt.optimal_remat(static_argnames="depth", device="cpu")
    def loss(w, x, depth):
        for _ in range(depth):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    w = jnp.ones((8, 8))
    few, many = loss.plan(w, X, depth=2), loss.plan(w, X, 9)
    assert len(few.decisions) < len(many.decisions)
    assert few.fingerprint != many.fingerprint


@pytest.mark.parametrize("static", [{"static_argnums": 0}, {"static_argnames": "depth"}])
def test_the_first_argument_that_is_not_static_is_differentiated(static: Any) -> None:
    def loss(depth: int, w: jax.Array, x: jax.Array) -> jax.Array:
        return with_a_switch(w, x, True, depth)

    fn, w = remat_opt.optimal_remat(loss, device="cpu", **static), jnp.ones((8, 8))
    expected = jax.grad(loss, argnums=1)(4, w, X)
    np.testing.assert_allclose(jax.grad(fn, argnums=1)(4, w, X), expected, rtol=1e-5)
    assert fn.plan(4, w, X) == remat_opt.make_plan(loss, 4, w, X, argnums=1, device="cpu", **static)


@pytest.mark.parametrize("static", [{"static_argnums": 0}, {"static_argnames": "depth"}])
def test_compare_differentiates_the_first_argument_that_is_not_static(static: Any) -> None:
    def loss(depth: int, w: jax.Array, x: jax.Array) -> jax.Array:
        return with_a_switch(w, x, True, depth)

    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    found = remat_opt.compare(
        loss, 4, shape, shape, budgets=[0.9], policies=(), device="cpu", **static
    )
    assert [row["label"] for row in found.rows] == ["plain", "budget 90.0 %"]


def test_the_plan_is_for_what_is_differentiated() -> None:
    seen = []
    fn = remat_opt.optimal_remat(layers, device="cpu", errors="raise")
    original = fn.plan_of

    def noted(program: Any, call: Any) -> Any:
        seen.append(original(program, call))
        return seen[-1]

    fn.plan_of = noted
    found = jax.jit(jax.grad(fn, argnums=1))(WEIGHTS, X)
    np.testing.assert_allclose(found, jax.grad(layers, argnums=1)(WEIGHTS, X), rtol=1e-5)
    jax.vmap(jax.grad(lambda x, weights: fn(weights, x)), (0, None))(X[None], WEIGHTS)
    of_x = remat_opt.make_plan(layers, WEIGHTS, X, argnums=1, device="cpu")
    assert seen[0] == of_x
    assert seen[1].fingerprint != fn.plan(WEIGHTS, X).fingerprint
    # A derivative outside a jax.jit is not visible inside it: there argnums counts.
    jax.grad(jax.jit(fn), argnums=1)(WEIGHTS, X)
    assert seen[-1] is fn.plan(WEIGHTS, X)
    # Given plans are followed for either.
    for plan in (of_x, fn.plan(WEIGHTS, X)):
        given = jax.grad(remat_opt.optimal_remat(layers, plan=plan), argnums=1)(WEIGHTS, X)
        np.testing.assert_allclose(given, found, rtol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda weights, x, decorate: decorate(lambda: layers(weights, x))(),
        lambda weights, x, decorate: decorate(lambda x: layers(weights, x))(x),
        lambda weights, x, decorate: decorate(lambda w, x: layers([w, *weights[1:]], x))(
            weights[0], x
        ),
    ],
    ids=["no arguments", "data as argument", "some of them"],
)
def test_the_plan_is_for_what_is_closed_over_and_differentiated(loss: Any) -> None:
    seen = []

    def decorate(fn: Callable[..., Any]) -> Any:
        decorated = remat_opt.optimal_remat(fn, device="cpu", errors="raise")
        original = decorated.plan_of

        def noted(program: Any, call: Any) -> Any:
            seen.append(original(program, call))
            return seen[-1]

        decorated.plan_of = noted
        return decorated

    expected = jax.grad(layers)(WEIGHTS, X)
    found = jax.jit(jax.grad(lambda weights: loss(weights, X, decorate)))(WEIGHTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3)
    of_weights = remat_opt.make_plan(layers, WEIGHTS, X, device="cpu")
    assert [plan.predicted.temporary_bytes for plan in seen] == [
        of_weights.predicted.temporary_bytes
    ]
    assert any(stage.checkpointed for stage in seen[0].stages)


def test_a_step_whose_loss_closes_over_its_parameters() -> None:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return remat_opt.optimal_remat(lambda: layers(weights, x), device="cpu")()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    plan = remat_opt.make_plan(
        step, of_shape(WEIGHTS), of_shape(X), donate_argnums=0, device="cpu", verify=True
    )
    assert plan.measured is not None
    direct = remat_opt.make_plan(layers, WEIGHTS, X, device="cpu")
    assert plan.predicted.temporary_bytes == direct.predicted.temporary_bytes


def test_arguments_that_are_no_arrays_are_static() -> None:
    def loss(w: jax.Array, x: jax.Array, activation: Any, mode: str) -> jax.Array:
        assert mode in ("mean", "sum")
        return getattr(jnp, mode)(activation(x @ w))

    fn, w = remat_opt.optimal_remat(loss, device="cpu", errors="raise"), jnp.ones((8, 8)) / 8
    for options in ((jnp.tanh, "mean"), (jnp.sin, "sum")):
        np.testing.assert_allclose(
            jax.grad(fn)(w, X, *options), jax.grad(loss)(w, X, *options), rtol=1e-5
        )


def test_what_holds_a_decorated_function_can_be_copied() -> None:
    class Agent:
        def __init__(self) -> None:
            self.loss = remat_opt.optimal_remat(lambda w: jnp.sum(jnp.sin(w)))

    agent = Agent()
    twin = copy.deepcopy(agent)
    assert twin.loss is agent.loss
    assert jax.grad(twin.loss)(1.0) == jax.grad(jnp.sin)(1.0)
