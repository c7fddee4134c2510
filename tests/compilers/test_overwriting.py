"""What no cotangent is written over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.compilers.model import Model
from remat_opt.schedule import Schedule, plain, unchanged
from tests.compiler_graphs import InStep, W, X, changed, graph_of, names, whole
from tests.devices import needs_cuda_plugin


def two_products(w: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.tanh(x @ w[0]) @ w[1]))


def also_added(w: list[jax.Array], x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ w[0])
    return jnp.sum(jnp.sin(y @ w[1] + y))


def heads(w: list[jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ w[0])
    return sum((jnp.sum(jnp.sin(hidden @ one)) for one in w[1:]), jnp.zeros(()))


@pytest.mark.parametrize(
    ("loss", "device", "in_place"),
    [
        # The gradient of one product is added to that of the other, by its kernel.
        (heads, "h200", False),
        (heads, "cpu", True),
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
    _, _, graph = graph_of(loss, [W] * 3, X, device=device)
    assert graph.in_place[names(graph).index("tanh")] is in_place


@pytest.mark.parametrize(
    ("function", "checkpointed", "arrays"),
    [
        # The result is written over.
        (jax.nn.sigmoid, False, -1),
        (jax.nn.sigmoid, True, -1),
        (jnp.tanh, False, -1),
        (jnp.tanh, True, -1),
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


def test_the_gradients_of_many_products_are_not_all_added_by_a_product() -> None:
    _, two, graph = graph_of(heads, [W] * 3, X)
    _, three, larger = graph_of(heads, [W] * 4, X)
    tanh = names(graph).index("tanh")
    assert names(larger)[: tanh + 2] == names(graph)[: tanh + 2]

    def more(found: Model, schedule: Schedule) -> list[int]:
        change = np.subtract(changed(found, schedule).workspace_bytes, found.graph.workspace_bytes)
        return [int(one) for one in change[tanh : tanh + 2]]

    assert more(two, unchanged(graph)) == [0, 0]
    # A third one is there beside the sum of the others. Plans add them one by one.
    assert more(three, unchanged(larger)) == [X.nbytes, X.nbytes]
    assert more(three, plain(larger)) == more(three, whole(larger)) == [0, 0]


@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize("count", [2, 3])
def test_an_activation_that_several_products_read(count: int) -> None:
    def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ w[0])
        return sum((jnp.sum(jnp.sin(hidden @ one)) for one in w[1:]), jnp.zeros(()))

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    step = InStep(loss, [shape((256, 4096)), *[shape((4096, 256))] * count], shape((4096, 256)))
    assert step.problem.unchanged.peak_bytes == pytest.approx(step.unplanned_bytes(), rel=0.1)


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
