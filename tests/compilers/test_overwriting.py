"""What no cotangent is written over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.schedule import plain
from tests.compiler_graphs import InStep, W, X, changed, graph_of, names, whole
from tests.devices import needs_cuda_plugin


def two_products(w: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.tanh(x @ w[0]) @ w[1]))


def also_added(w: list[jax.Array], x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ w[0])
    return jnp.sum(jnp.sin(y @ w[1] + y))


@pytest.mark.parametrize(
    ("loss", "device", "in_place"),
    [
        # The product's gradient alone is what the activation's cotangent is.
        (two_products, "h200", False),
        (two_products, "cpu", True),
        # It is added to another: the sum may be written over.
        (also_added, "h200", True),
    ],
)
def test_an_activations_cotangent_is_not_written_over_what_a_product_writes(
    loss: Callable[..., Any], device: str, in_place: bool
) -> None:
    _, _, graph = graph_of(loss, [W] * 2, X, device=device)
    assert graph.in_place[names(graph).index("tanh")] is in_place


@pytest.mark.parametrize(
    ("function", "checkpointed", "arrays"),
    [
        # The result is written over; an expensive one only if it is not computed again.
        (jax.nn.sigmoid, False, -1),
        (jax.nn.sigmoid, True, -1),
        (jnp.tanh, False, -1),
        (jnp.tanh, True, 0),
        # The derivative reads what the product wrote.
        (jnp.sin, False, 0),
    ],
)
def test_a_cotangent_is_written_over_the_result_that_its_derivative_reads(
    function: Callable[[jax.Array], jax.Array], checkpointed: bool, arrays: int
) -> None:
    def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum((function(x @ w[0]) @ w[1]) ** 2)

    _, found, graph = graph_of(loss, [W] * 2, X)
    schedule = whole(graph) if checkpointed else plain(graph)
    assert changed(found, schedule).workspace_bytes[1] == arrays * X.nbytes


@pytest.mark.cuda
@needs_cuda_plugin
def test_an_activation_takes_two_arrays() -> None:
    def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    step = InStep(loss, [shape((256, 4096)), shape((4096, 256))], shape((4096, 256)))
    predicted = step.problem.unchanged.peak_bytes
    assert predicted == pytest.approx(step.unplanned_bytes(), rel=0.05)
    assert predicted < 2.5 * 4 * 4096 * 4096
