"""Flax networks, judged by training: with or without the decorator, everything is the same."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import remat_opt
from remat_opt.errors import RematError, TraceError
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

STEPS = 20
X = array("x", 32, 4, scale=1)
Y = jnp.asarray(np.sin(2 * np.asarray(X)[:, :1]) + np.asarray(X)[:, 1:2])

#: Turns a loss into a training step that returns the loss.
Place = Callable[[Callable[..., Any]], Callable[..., jax.Array]]


class Network(nnx.Module):
    """Has all three kinds of state: parameters, statistics and the counts of a random stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def with_aux(model: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = model(x)
    return jnp.mean((found - y) ** 2), jnp.mean(found)


def descend(model: nnx.Module, gradients: Any) -> None:
    parameters = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients))


def assert_same_state(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    leaves, tree = jax.tree.flatten(nnx.state(one))
    found, found_tree = jax.tree.flatten(nnx.state(other))
    assert found_tree == tree
    for expected, leaf in zip(leaves, found, strict=True):
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            expected, leaf = jax.random.key_data(expected), jax.random.key_data(leaf)
        np.testing.assert_allclose(leaf, expected, rtol=tolerance, atol=tolerance)


def trained(step: Callable[..., jax.Array], steps: int = STEPS) -> tuple[Network, list[float]]:
    model = Network(nnx.Rngs(0))
    return model, [float(step(model, X, Y)) for _ in range(steps)]


# --- The places where a loss is decorated -------------------------------------------------


def in_grad(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    loss = decorate(loss_fn)

    def step(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        before = nnx.clone(model)
        descend(model, nnx.grad(loss)(model, x, y))
        return loss_fn(before, x, y)

    return nnx.jit(step)


def in_value_and_grad(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    loss = decorate(loss_fn)

    def step(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, x, y)
        descend(model, gradients)
        return value

    return step


def in_jit(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    return nnx.jit(in_value_and_grad(decorate))


def under_jit(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    return in_value_and_grad(lambda loss: nnx.jit(decorate(loss)))


def with_auxiliary_output(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    loss = decorate(with_aux, has_aux=True)

    def step(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        (value, mean), gradients = nnx.value_and_grad(loss, has_aux=True)(model, x, y)
        descend(model, gradients)
        return value + 0 * mean

    return nnx.jit(step)


def by_name(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    loss = decorate(lambda x, y, model: loss_fn(model, x, y), argnums=2)

    def step(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(lambda model: loss(y=y, x=x, model=model))(model)
        descend(model, gradients)
        return value

    return nnx.jit(step)


def with_an_optimizer(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    loss, optimizers = decorate(loss_fn), {}

    @nnx.jit
    def jitted(model: Network, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    def step(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        if not optimizers:
            optimizers[0] = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
        return jitted(model, optimizers[0], x, y)

    return step


def split_by_hand(decorate: Callable[..., Any]) -> Callable[..., jax.Array]:
    def functional(parameters: Any, others: Any, graphdef: Any, x: jax.Array, y: jax.Array) -> Any:
        model = nnx.merge(graphdef, parameters, others, copy=True)
        return loss_fn(model, x, y), nnx.state(model, nnx.Not(nnx.Param))

    loss = decorate(functional, has_aux=True)

    @jax.jit
    def jitted(parameters: Any, others: Any, graphdef: Any, x: jax.Array, y: jax.Array) -> Any:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, others), gradients = gradient(parameters, others, graphdef, x, y)
        return value, jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients), others

    def step(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
        graphdef, parameters, others = nnx.split(model, nnx.Param, ...)
        value, parameters, others = jitted(parameters, others, graphdef, x, y)
        nnx.update(model, parameters, others)
        return value

    return step


PLACES: dict[str, Place] = {
    place.__name__: place
    for place in (
        in_grad,
        in_value_and_grad,
        in_jit,
        under_jit,
        with_auxiliary_output,
        by_name,
        with_an_optimizer,
        split_by_hand,
    )
}


@functools.cache
def undecorated() -> tuple[Network, list[float], float]:
    """The result of training without the decorator, wherever the gradient is taken."""
    model, losses = trained(in_jit(lambda loss, **_: loss))
    model.eval()
    return model, losses, float(loss_fn(model, X, Y))


decorate = functools.partial(remat_opt.optimal_remat, device="cpu", errors="raise")


FAST = {"in_jit", "with_an_optimizer"}


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=[pytest.mark.slow, pytest.mark.versions])
        for name in PLACES
    ],
)
def test_training_at_every_place(name: str) -> None:
    expected_model, expected, expected_eval = undecorated()
    model, losses = trained(PLACES[name](decorate))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert int(model.dropout.rngs.count[...]) == STEPS
    model.eval()
    assert_same_state(expected_model, model, 1e-4)
    assert float(loss_fn(model, X, Y)) == pytest.approx(expected_eval, rel=1e-4)
    assert expected_eval < 0.7 * expected[0], "it did learn something"


def test_a_plan_is_followed() -> None:
    loss, model = decorate(loss_fn), Network(nnx.Rngs(0))
    plan = loss.plan(model, X, Y)
    assert any(stage.checkpointed for stage in plan.stages)
    assert int(model.dropout.rngs.count[...]) == 0, "a plan runs nothing"
    assert plan.stages == remat_opt.make_plan(loss, model, X, Y, device="cpu").stages


# --- Calls of other kinds -----------------------------------------------------------------


def test_a_call_without_a_gradient() -> None:
    plain, planned = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    loss = decorate(loss_fn)
    kernel = planned.first.kernel
    for _ in range(3):
        assert float(loss(planned, X, Y)) == pytest.approx(float(loss_fn(plain, X, Y)), rel=1e-5)
    assert_same_state(plain, planned)
    assert planned.first.kernel is kernel
    jitted = nnx.jit(loss)
    assert float(jitted(planned, X, Y)) == pytest.approx(float(loss_fn(plain, X, Y)), rel=1e-5)
    assert_same_state(plain, planned)


def same_either_way(loss: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> None:
    """The same gradients and state after three steps, decorated or not."""
    plain, planned = make(), make()
    expected, found = nnx.jit(nnx.grad(loss)), nnx.jit(nnx.grad(decorate(loss)))
    for _ in range(3):
        for one, other in zip(
            jax.tree.leaves(expected(*plain)), jax.tree.leaves(found(*planned)), strict=True
        ):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    assert_same_state(plain, planned)


def test_a_decorated_method_of_a_module() -> None:
    class WithLoss(Network):
        @remat_opt.optimal_remat(device="cpu", errors="raise", static_argnums=2)
        def loss(self, x: jax.Array, y: jax.Array, scale: int) -> jax.Array:
            return loss_fn(self, x, y) * scale

    @nnx.jit
    def step(model: WithLoss, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(lambda model: model.loss(x, y, 1))(model)
        descend(model, gradients)
        return value

    expected_model, expected, _ = undecorated()
    model = WithLoss(nnx.Rngs(0))
    losses = [float(step(model, X, Y)) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(model.norm.mean[...], expected_model.norm.mean[...], rtol=1e-4)
    assert int(model.dropout.rngs.count[...]) == STEPS
    assert len(model.loss.program(X, Y, 1).differentiated) == 6
    assert model.loss.plan(X, Y, 1) is WithLoss.loss.__get__(model).plan(X, Y, 1)


def test_one_module_given_twice() -> None:
    def loss(first: Network, second: Network) -> jax.Array:
        return loss_fn(first, X, Y) + loss_fn(second, 2 * X, Y)

    def make() -> tuple[Network, Network]:
        model = Network(nnx.Rngs(0))
        return model, model

    plain, planned = make(), make()
    assert float(decorate(loss)(*planned)) == pytest.approx(float(loss(*plain)), rel=1e-5)
    assert_same_state(plain[0], planned[0])
    assert int(planned[0].dropout.rngs.count[...]) == 2


def test_tied_weights_and_random_streams_of_their_own() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.second = nnx.Linear(4, 4, rngs=rngs)
            self.second.kernel = self.first.kernel
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            return self.second(self.dropout(jnp.tanh(self.first(x)), rngs=rngs))

    def loss(model: Tied, rngs: nnx.Rngs) -> jax.Array:
        return jnp.sum(model(X, rngs) ** 2)

    same_either_way(loss, lambda: (Tied(nnx.Rngs(0)), nnx.Rngs(dropout=1)))


def test_changes_of_structure() -> None:
    class Noting(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.calls = 0

        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen = nnx.Intermediate(jnp.tanh(self.inner(x)))
            self.calls += 1
            return self.seen[...]

    def loss(model: Noting) -> jax.Array:
        return jnp.sum(model(X) ** 2)

    plain, planned = Noting(), Noting()
    for _ in range(2):
        nnx.grad(loss)(plain)
        nnx.grad(decorate(loss))(planned)
    assert planned.calls == plain.calls == 2
    np.testing.assert_allclose(planned.seen[...], plain.seen[...], rtol=1e-6)


def test_a_module_from_outside_the_gradient_that_does_not_change() -> None:
    frozen = Network(nnx.Rngs(1))
    frozen.eval()

    def loss(head: nnx.Linear, body: Network) -> jax.Array:
        return jnp.sum(head(body(X)) ** 2)

    head = nnx.Linear(1, 1, rngs=nnx.Rngs(2))
    expected = nnx.grad(lambda head: loss(head, frozen))(head)
    found = nnx.grad(lambda head: decorate(loss)(head, frozen))(head)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


def test_modules_in_results_are_those_of_the_caller() -> None:
    def loss(model: Network) -> tuple[jax.Array, Any]:
        return loss_fn(model, X, Y), {"model": model, "norm": model.norm}

    model = Network(nnx.Rngs(0))
    _, found = decorate(loss, has_aux=True)(model)
    assert found["model"] is model
    assert found["norm"] is model.norm
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0


def test_a_decorated_block_in_a_decorated_loss() -> None:
    @decorate
    def block(norm: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return jnp.tanh(norm(x))

    def loss(norm: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return jnp.sum(block(norm, block(norm, x)) ** 2)

    same_either_way(loss, lambda: (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), X))


def test_modules_as_plain_trees() -> None:
    if not hasattr(nnx, "set_graph_updates"):
        pytest.skip("this Flax knows graphs only")

    def loss(norm: nnx.BatchNorm) -> jax.Array:
        return jnp.sum(jnp.tanh(norm(X)) ** 2)

    plain, planned = (nnx.BatchNorm(4, rngs=nnx.Rngs(0)) for _ in range(2))
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        for _ in range(3):
            nnx.grad(loss)(plain)
            nnx.grad(decorate(loss))(planned)
    assert_same_state(plain, planned)
    assert float(jnp.abs(planned.mean[...]).max()) > 0


def test_shapes_in_the_place_of_a_module() -> None:
    model = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    loss = decorate(loss_fn)
    plan = loss.plan(model, X, Y)
    assert plan is loss.plan(Network(nnx.Rngs(0)), X, Y)
    # The parameters that nnx.grad differentiates, without the statistics.
    assert len(loss.program(model, X, Y).differentiated) == 6
    assert remat_opt.make_plan(loss_fn, model, X, Y, device="cpu") == plan


def test_a_training_step_with_modules() -> None:
    loss = decorate(loss_fn)

    def step(model: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    plan = remat_opt.make_plan(
        nnx.jit(step), model, optimizer, X, Y, device="cpu", verify=True, donate_argnums=(0, 1)
    )
    assert plan.function == "loss_fn"
    assert plan.stages == loss.plan(model, X, Y).stages
    # Parameters, two moments of each, and statistics: what the step changes is among its outputs.
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert plan.measured.output_bytes > plan.measured.alias_bytes > 3 * parameters
    given = nnx.jit(nnx.grad(decorate(loss_fn, plan=plan)))(model, X, Y)
    assert len(jax.tree.leaves(given)) == 6


# --- Refused ------------------------------------------------------------------------------


def test_a_module_that_is_closed_over() -> None:
    model = Network(nnx.Rngs(0))
    loss = remat_opt.optimal_remat(lambda x, y: loss_fn(model, x, y), device="cpu")
    with pytest.raises(TraceError) as caught:
        loss(X, Y)
    assert str(caught.value) == (
        "'<lambda>' changes a module that it closes over (Cannot mutate BatchStat from a "
        "different trace level), and the change would be lost. Pass the module as an "
        "argument."
    )
    assert int(model.dropout.rngs.count[...]) == 0
    # In evaluation nothing changes.
    model.eval()
    assert float(loss(X, Y)) == pytest.approx(float(loss_fn(model, X, Y)), rel=1e-5)


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_variables_of_experimental_kinds(kind: str) -> None:
    try:
        variable = nnx.BatchStat(jnp.zeros(3), **{kind: True})
    except (NotImplementedError, ValueError):
        pytest.skip(f"this Flax has no {kind}")
    module = nnx.Dict(inner=variable)
    with pytest.raises(RematError) as caught:
        decorate(lambda module, x: jnp.sum(x))(module, X)
    assert str(caught.value) == (
        f"Among the arguments of '<lambda>' is a Variable of flax.nnx with {kind}=True. Its "
        f"changes would be lost. Create it without {kind}, or leave the decorator out."
    )


def test_modules_in_a_comparison() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.compare(loss_fn, Network(nnx.Rngs(0)), X, Y, device="cpu")
    assert str(caught.value) == (
        "compare compiles functions of arrays, but some of the arguments are flax.nnx "
        "modules. Split them with nnx.split, and give compare a function that calls "
        "nnx.merge. make_plan and frontier take modules."
    )


def test_a_loss_without_its_auxiliary_output() -> None:
    with pytest.raises(TraceError, match=r"a pair .* but it returns a ShapeDtypeStruct"):
        decorate(loss_fn, has_aux=True)(Network(nnx.Rngs(0)), X, Y)


# --- Flax linen ---------------------------------------------------------------------------


def test_training_in_linen() -> None:
    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = linen.Dense(16)(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.8)(x))
            return linen.Dense(1)(linen.Dropout(0.2, deterministic=not train)(x))

    network = Linen()

    def loss(parameters: Any, statistics: Any, key: jax.Array) -> Any:
        variables = {"params": parameters, "batch_stats": statistics}
        found, changed = network.apply(
            variables, X, train=True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return jnp.mean((found - Y) ** 2), changed["batch_stats"]

    def train(loss: Callable[..., Any]) -> tuple[Any, list[float]]:
        @jax.jit
        def step(parameters: Any, statistics: Any, key: jax.Array) -> Any:
            gradient = jax.value_and_grad(loss, has_aux=True)
            (value, statistics), gradients = gradient(parameters, statistics, key)
            return (
                value,
                jax.tree.map(lambda p, g: p - 0.05 * g, parameters, gradients),
                statistics,
            )

        variables = network.init(jax.random.key(0), X, train=False)
        state, losses = (variables["params"], variables["batch_stats"]), []
        for number in range(STEPS):
            value, *state = step(*state, jax.random.fold_in(jax.random.key(1), number))
            losses.append(float(value))
        return state, losses

    expected_state, expected = train(loss)
    state, losses = train(decorate(loss, has_aux=True))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for one, other in zip(jax.tree.leaves(expected_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    assert expected[-1] < 0.7 * expected[0]


# --- Flax is not needed -------------------------------------------------------------------


@pytest.mark.slow
def test_without_flax() -> None:
    code = """
        import sys
        sys.modules.update({"flax": None, "optax": None})  # as where they are not installed
        import jax, jax.numpy as jnp
        from remat_opt import optimal_remat
        assert jax.grad(optimal_remat(lambda x: jnp.sum(x**2), device="cpu"))(jnp.ones(2))[0] == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
