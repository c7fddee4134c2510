"""Ready-made training steps: the numbers are those of the plain update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from remat_opt.errors import RematError
from remat_opt.training import training_step

pytestmark = pytest.mark.usefixtures("quick_search")

OPTIMIZER = optax.adam(1e-2)
W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
X = jnp.linspace(0.0, 1.0, 32).reshape(8, 4)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.sin(x @ w)))


def updated(optimizer: optax.GradientTransformation) -> Any:
    value, gradient = jax.value_and_grad(loss)(W, X)
    updates, state = optimizer.update(gradient, optimizer.init(W), W)
    return optax.apply_updates(W, updates), state, value


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"microbatches": 4, "loop": "scan"}],
    ids=["whole", "python", "scan"],
)
def test_an_update(options: dict[str, Any]) -> None:
    step = training_step(loss, OPTIMIZER, **options)
    assert_same(jax.jit(step)(W, OPTIMIZER.init(W), X), updated(OPTIMIZER))


@pytest.mark.parametrize("norm", [1e-3, 1e3])
def test_clipping_by_the_norm_of_all(norm: float) -> None:
    expected = updated(optax.chain(optax.clip_by_global_norm(norm), OPTIMIZER))
    step = training_step(loss, OPTIMIZER, clip_norm=norm)
    found = step(W, OPTIMIZER.init(W), X)
    assert_same((found[0], found[2]), (expected[0], expected[2]))


def test_the_auxiliary_is_left_out() -> None:
    step = training_step(lambda w, x: (loss(w, x), x), OPTIMIZER, has_aux=True, microbatches=2)
    assert_same(step(W, OPTIMIZER.init(W), X), updated(OPTIMIZER))


def test_parameters_keep_their_type() -> None:
    w = W.astype(jnp.bfloat16)
    found, _, _ = training_step(loss, OPTIMIZER)(w, OPTIMIZER.init(w), X)
    assert found.dtype == jnp.bfloat16


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(RematError) as caught:
        training_step(loss, OPTIMIZER, microbatches=3)(W, OPTIMIZER.init(W), X)
    assert str(caught.value) == (
        "A batch of 8 does not divide into 3 parts: give a number of microbatches that "
        "divides the batch."
    )
