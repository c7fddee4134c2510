"""A ``while_loop`` has no derivative: it is planned where nothing is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_opt
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

WEIGHTS = [array(f"w{n}", 16, 16, scale=0.25) for n in range(4)]
X = array("x", 64, 16, scale=1)


def layers(weights: Any, x: jax.Array) -> jax.Array:
    for weight in weights:
        x = x + jnp.tanh(x @ weight)
    return x


def solved(x: jax.Array) -> jax.Array:
    """Like a solver: repeats until it is done."""

    def step(state: Any) -> Any:
        count, y = state
        return count + 1, jnp.cos(y @ WEIGHTS[0])

    return lax.while_loop(lambda state: state[0] < 5, step, (0, x))[1]


def behind_stop(weights: Any, x: jax.Array) -> jax.Array:
    x = layers(weights[:2], x)
    x = jnp.sin(x) * solved(lax.stop_gradient(x))
    return jnp.mean(layers(weights[2:], x) ** 2)


def of_the_batch(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((layers(weights, x) * solved(x)) ** 2)


def beside_the_loss(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = layers(weights, x)
    return jnp.mean(x**2), jnp.sum(solved(lax.stop_gradient(x)))


@pytest.mark.parametrize("share", [0.9, 0.7])
@pytest.mark.parametrize("loss", [behind_stop, of_the_batch, beside_the_loss])
def test_the_same_gradients_and_no_more_runs_than_planned(
    loss: Callable[..., Any], share: float
) -> None:
    has_aux = loss is beside_the_loss
    plan = remat_opt.make_plan(
        loss, WEIGHTS, X, device="h200", has_aux=has_aux, gradients="results", budget=share
    )
    planned = remat_opt.apply_plan(plan, loss, has_aux=has_aux)
    expected = jax.value_and_grad(loss, has_aux=has_aux)(WEIGHTS, X)
    found = jax.jit(jax.value_and_grad(planned, has_aux=has_aux))(WEIGHTS, X)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-6)
    (fate,) = [one for one in plan.decisions if "while" in one.name.title]
    gradient = jax.make_jaxpr(jax.grad(planned, has_aux=has_aux))(WEIGHTS, X)
    assert str(gradient).count("= while[") == 1 + fate.times
    if has_aux:
        # Nothing reads it backward.
        assert fate.fate == "not needed"


def test_a_loop_that_counts_is_no_guess() -> None:
    plan = remat_opt.make_plan(behind_stop, WEIGHTS, X, device="h200", budget=0.9)
    assert not any("while" in note or "estimated" in note for note in plan.notes)
    (turns,) = [one.flops for one in plan.decisions if "while" in one.name.title]
    assert 5 * 2 * 64 * 16 * 16 <= turns <= 1.2 * 5 * 2 * 64 * 16 * 16


@pytest.mark.parametrize("scanned", [False, True])
def test_of_a_loop_that_does_not_a_plan_says_so(scanned: bool) -> None:
    def until_small(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda y: jnp.max(y) > 0.5, lambda y: jnp.cos(y @ WEIGHTS[0]) / 2, x)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(x @ weight) * until_small(lax.stop_gradient(x)), None

        if scanned:
            return jnp.mean(lax.scan(layer, x, jnp.stack(weights))[0] ** 2)
        for weight in weights:
            x, _ = layer(x, weight)
        return jnp.mean(x**2)

    plan = remat_opt.make_plan(loss, WEIGHTS, X, device="h200")
    (note,) = [note for note in plan.notes if "how often a while_loop runs" in note]
    kind = "scan" if scanned else "while"
    start = "The program does not say how often a while_loop runs:"
    assert note.startswith(f"{start} {kind} at test_while_loops.py:")
    assert "It counts as 10 turns." in note
    assert any("estimated cost rules" in note for note in plan.notes)
