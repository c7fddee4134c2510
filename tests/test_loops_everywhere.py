"""Loops as people write them: each is opened, gains, and gives the same results."""

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

# So many rows that activations are larger than the weights.
LENGTH, WIDTH, ROWS = 11, 8, 256
W = array("w", LENGTH, WIDTH, 2 * WIDTH, scale=0.3)
V = array("v", LENGTH, 2 * WIDTH, WIDTH, scale=0.3)
X = array("x", ROWS, WIDTH, scale=1)
Loss = Callable[..., jax.Array]


def layer(h: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return h + jnp.tanh(jnp.sin(h @ w) * jnp.exp(-h @ w)) @ v


def unrolled(w: Any, x: jax.Array) -> jax.Array:
    """Several iterations unrolled, from the last entry to the first."""
    return jnp.mean(
        lax.scan(lambda h, w: (layer(h, *w), None), x, w, reverse=True, unroll=3)[0] ** 2
    )


def counted(w: Any, x: jax.Array) -> jax.Array:
    """``fori_loop``, which carries an integer and reads no stacked input."""
    return jnp.mean(lax.fori_loop(0, LENGTH, lambda n, h: layer(h, w[0][n], w[1][n]), x) ** 2)


def with_keys(w: Any, x: jax.Array) -> jax.Array:
    """A key is carried, and each iteration writes something."""

    def step(carry: Any, w: Any) -> Any:
        h, key = carry
        key, own = jax.random.split(key)
        h = layer(h, *w) * jax.random.bernoulli(own, 0.9, h.shape)
        return (h, key), jnp.sum(h, axis=0)

    (h, _), sums = lax.scan(step, (x, jax.random.key(3)), w)
    return jnp.mean(h**2) + jnp.mean(sums**2)


def mapped(w: Any, x: jax.Array) -> jax.Array:
    """``lax.map``, which carries nothing."""
    return jnp.mean(lax.map(lambda w: layer(x, *w), w) ** 2)


def in_batches(w: Any, x: jax.Array) -> jax.Array:
    """``lax.map`` over batches, one of which is smaller than the others."""
    rows = lax.map(lambda row: layer(row, w[0][0], w[1][0]), x, batch_size=6)
    return jnp.mean(rows**2)


def nested(w: Any, x: jax.Array) -> jax.Array:
    """A loop in a loop, with no length a multiple of another."""

    def outer(h: jax.Array, w: Any) -> Any:
        return lax.scan(lambda h, _: (layer(h, *w), None), h, None, length=5)[0], None

    return jnp.mean(lax.scan(outer, x, w)[0] ** 2)


def agree(loss: Loss, plan: Any, x: jax.Array = X) -> None:
    found = jax.jit(jax.value_and_grad(remat_opt.apply_plan(plan, loss)))((W, V), x)
    expected = jax.jit(jax.value_and_grad(loss))((W, V), x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(other))))


SLOW = pytest.mark.slow, pytest.mark.versions


@pytest.mark.parametrize(
    "loss",
    [
        mapped,
        *(
            pytest.param(one, marks=SLOW)
            for one in (counted, unrolled, with_keys, in_batches, nested)
        ),
    ],
)
def test_it_is_opened_and_gains(loss: Loss) -> None:
    plan = remat_opt.make_plan(loss, (W, V), X, device="cpu", overhead="flops", max_overhead=1.5)
    predicted = plan.predicted
    assert plan.loops
    assert predicted.temporary_bytes < 0.6 * predicted.plain_temporary_bytes
    agree(loss, plan)


def test_prefix_sums_are_no_loop() -> None:
    """``associative_scan`` is unrolled, and planned like any other program."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        sums = lax.associative_scan(lambda a, b: a * jnp.tanh(b), jnp.sin(x @ w[0][0]))
        return jnp.mean(sums**2)

    few = X[:32]
    plan = remat_opt.make_plan(loss, (W, V), few, device="h200", max_overhead=1.0)
    assert not plan.loops
    assert plan.predicted.temporary_bytes < plan.predicted.plain_temporary_bytes
    agree(loss, plan, few)


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_what_a_policy_on_the_body_does_is_predicted_to_be_matched(policy: str) -> None:
    """The same loop is among ours, so we recompute no more in no more memory."""
    # Of so many rows that the workspace of the library's products does not count.
    x = jax.ShapeDtypeStruct((1024 * ROWS, WIDTH), "float32")
    plain = remat_opt.make_plan(unrolled, (W, V), x, device="h200", overhead="flops", budget=1.0)
    unit = 1024 * ROWS * WIDTH * 4
    kept = {"nothing_saveable": 1, "dots_saveable": 1 + 2 + 2 + 1}[policy]
    budget = LENGTH * kept * unit + 24 * unit
    assert budget < plain.predicted.plain_temporary_bytes
    plan = remat_opt.make_plan(unrolled, (W, V), x, device="h200", overhead="flops", budget=budget)
    most = {"nothing_saveable": 1.01, "dots_saveable": 0.1}[policy]
    assert plan.predicted.recomputed_share <= most
