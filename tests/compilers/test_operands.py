"""What XLA for TPU stores of its products' operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.compiler_graphs import (
    graph_of,
    names,
)


def test_a_tpu_stores_as_bfloat16_what_only_products_read() -> None:
    def loss(weights, x):
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")
        return jnp.sum(jnp.sin(pooled @ weights[0])) + jnp.sum(jnp.cos(pooled @ weights[1]))

    def precise(weights, x):
        with jax.default_matmul_precision("float32"):
            return loss(weights, x)

    def read_by_others_too(weights, x):
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")
        return jnp.sum(jnp.sin(pooled @ weights[0])) + jnp.sum(jnp.cos(pooled))

    weights, x = [jnp.ones((128, 128))] * 2, jnp.ones((256, 128))
    full = 128 * 128 * 4
    _, _, graph = graph_of(loss, weights, x, device="v5e")
    assert graph.bytes[0] == full // 2
    for other in (precise, read_by_others_too):
        _, _, graph = graph_of(other, weights, x, device="v5e")
        assert graph.bytes[0] == full
    _, _, graph = graph_of(loss, weights, x, device="h200")
    assert graph.bytes[0] == full


def test_a_tpu_stores_as_bfloat16_what_one_product_reads_with_others() -> None:
    def loss(weights, x, *, twice=False):
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID")
        joined = jnp.concatenate([pooled[:128], lax.cumsum(pooled)], axis=1)
        others = jnp.cos(joined @ weights[1]) if twice else 0.0
        return jnp.sum(jnp.sin(joined @ weights[0]) + others)

    args, full = ([jnp.ones((256, 128))] * 2, jnp.ones((256, 128))), 128 * 128 * 4
    _, _, graph = graph_of(loss, *args, device="v5e")
    sizes = dict(zip(names(graph), graph.bytes, strict=True))
    # The sums are read only there, what is summed elsewhere too.
    assert sizes["cumsum"] == full // 2
    assert sizes["reduce_window_max"] == full
    assert "concatenate" not in sizes
    _, _, graph = graph_of(functools.partial(loss, twice=True), *args, device="v5e")
    sizes = dict(zip(names(graph), graph.bytes, strict=True))
    # One array of half the width for both.
    assert sizes["concatenate"] == full
    assert sizes["cumsum"] == full


def test_a_tpu_stores_what_products_read_with_its_bias_and_scale() -> None:
    """Like the queries of attention: one kernel multiplies, adds, scales and rounds."""

    def attention(parameters, x):
        query = (x @ parameters["query"] + parameters["bias"]) / 8
        key = x @ parameters["key"]
        return jnp.sum(jnp.sin(query @ key.T))

    def scaled(parameters, x):
        """The scale's gradient reads what is scaled."""
        query = (x @ parameters["query"]) * parameters["bias"]
        return jnp.sum(jnp.sin(query @ (x @ parameters["key"]).T))

    def read_twice(parameters, x):
        query = x @ parameters["query"] + parameters["bias"]
        return jnp.sum(jnp.sin(query @ (x @ parameters["key"]).T)) + jnp.sum(query)

    weight = jnp.ones((128, 128))
    parameters = {"query": weight, "key": weight, "bias": jnp.ones(128)}
    args, full = (parameters, jnp.ones((256, 128))), 256 * 128 * 4
    _, _, graph = graph_of(attention, *args, device="v5e")
    assert names(graph)[:2] == ["div", "dot_general"]
    assert graph.bytes[:2] == (full // 2, full // 2)
    assert graph.flops[0] == graph.flops[1] + 2 * 256 * 128
    # The backward step is a product: the cotangent that it reads is not overwritten.
    assert graph.cotangent_bytes[0] == full
    assert not graph.in_place[0]
    _, _, unscaled = graph_of(scaled, *args, device="v5e")
    assert names(unscaled)[:2] == ["dot_general", "dot_general"]
    assert unscaled.bytes[:2] == (full, full // 2)
    _, _, shared = graph_of(read_twice, *args, device="v5e")
    assert names(shared)[0] == "dot_general"
    assert shared.bytes[0] == full


def test_a_tpu_computes_in_each_of_several_products_what_they_read() -> None:
    def loss(weights, x):
        first = x @ weights[0]
        shared = jax.nn.relu(first + x)
        return jnp.sum(jnp.sin(shared @ weights[1]) + jnp.cos(shared @ weights[2]))

    weights, x = [jnp.ones((128, 128))] * 3, jnp.ones((256, 128))
    _, _, graph = graph_of(loss, weights, x, device="v5e")
    assert names(graph)[:2] == ["dot_general", "add"]
    assert graph.bytes[:2] == (256 * 128 * 4, 256 * 128 * 4)


@pytest.mark.parametrize(("gate", "arrays"), [(jax.nn.silu, 1), (jax.nn.gelu, 2)])
def test_the_halves_of_a_gated_layer_share_a_cotangent(gate, arrays) -> None:
    """Unless the gate's derivative is too much to be computed in several products."""

    def loss(weights, x):
        hidden = gate(x @ weights[0]) * (x @ weights[1])
        return jnp.sum(jnp.sin(hidden @ weights[2]))

    weights, x = [jnp.ones((128, 128), jnp.bfloat16)] * 3, jnp.ones((256, 128), jnp.bfloat16)
    _, _, graph = graph_of(loss, weights, x, device="v5e")
    assert names(graph)[:3] == ["dot_general"] * 3
    full = 256 * 128 * 2
    assert sum(size == full for size in graph.cotangent_bytes[:2]) == arrays
    assert all(graph.cotangent_bytes[:2])
    if arrays == 1:
        assert graph.cotangent_bytes[0] == full
        assert 0 in graph.needs[0]
        assert 1 in graph.needs[1]
