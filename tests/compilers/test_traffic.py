"""What it takes to compute a value again, by who reads it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from remat_opt.device import get_device
from tests.compiler_graphs import graph_of, names

W = jax.ShapeDtypeStruct((64, 64), "float32")
X = jax.ShapeDtypeStruct((4096, 64), "float32")
#: Seconds to move as many bytes as ``X`` has.
ARRAY = 4096 * 64 * 4 / get_device("h200").memory_bandwidth


def arrays(loss, primitive):
    """What computing a vertex again takes, in arrays read or written."""
    _, _, graph = graph_of(loss, W, X, device="h200")
    return graph.seconds[names(graph).index(primitive)] / ARRAY


def test_what_only_elementwise_operations_read_is_computed_on_the_way():
    def loss(w, x):
        h = x @ w
        return jnp.sum((h * jnp.tanh(h)) @ w)

    assert arrays(loss, "tanh") < 0.1
    # The product's operand is written, and read from what the tanh is of.
    assert arrays(loss, "mul") == pytest.approx(2)


def test_what_a_product_reads_is_written():
    assert arrays(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), "tanh") == pytest.approx(2)


def test_what_a_sum_reads_is_written():
    def loss(w, x):
        t = jnp.tanh(x @ w)
        return jnp.sum((t / t.sum(-1, keepdims=True)) @ w)

    assert arrays(loss, "tanh") == pytest.approx(2)


def test_what_is_made_of_more_is_written():
    def loss(w, x):
        h = jnp.tanh(x @ w + x @ (2 * w) * (x @ (3 * w)))
        return jnp.sum(jnp.sin(h) * h)

    assert arrays(loss, "tanh") > 2
