"""What products compute as they read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compiler_graphs import graph_of, names

W, X, B = jnp.ones((64, 64)), jnp.ones((256, 64)), jnp.ones(64)


def two_products(between: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def loss(parameters: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        w, b = parameters
        return jnp.sum(jnp.sin(between(x @ w + b) @ w))

    return loss


@pytest.mark.parametrize(
    ("between", "stored"),
    [
        # Computed from the product, with its bias.
        (jax.nn.relu, []),
        (lambda y: jax.nn.relu(-y), []),
        # Expensive, or made from two arrays.
        (jnp.tanh, ["tanh"]),
        (lambda y: y * jax.nn.sigmoid(y), ["mul"]),
        # For the result of a normalisation, not for what is below it.
        (lambda y: jax.nn.relu(y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True))), ["mul"]),
    ],
)
def test_what_is_stored_between_two_products(between: Any, stored: list[str]) -> None:
    _, _, graph = graph_of(two_products(between), (W, B), X, device="h200")
    found = names(graph)
    first, second = (v for v, name in enumerate(found) if name == "dot_general")
    assert [name for name in found[first + 1 : second] if name != "reduce_sum"] == stored


def test_an_argument_as_large_as_the_operand_is_an_array() -> None:
    def scaled(w: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin((x * jnp.sum(x, -1, keepdims=True) * scale) @ w))

    # Of the argument and of its sums, which are the only ones that are small.
    _, _, graph = graph_of(scaled, W, X, B, device="h200")
    found = names(graph)
    assert found[: found.index("dot_general")] == ["reduce_sum", "mul"]


def test_other_compilers_and_convolutions_are_given_whole_arrays() -> None:
    _, _, graph = graph_of(two_products(jax.nn.relu), (W, B), X, device="cpu")
    assert "custom_jvp_call" in names(graph)

    def convolved(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.conv(jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME")), w, (1, 1), "SAME")
        return jnp.sum(jnp.sin(y))

    _, _, graph = graph_of(convolved, jnp.ones((4, 4, 3, 3)), jnp.ones((2, 4, 8, 8)), device="h200")
    assert "custom_jvp_call" in names(graph)


def test_heads_are_repeated_inside_a_product() -> None:
    def grouped(w: jax.Array, x: jax.Array) -> jax.Array:
        keys = jnp.tanh(x @ w).reshape(4, 64, 2, 32)
        queries = jnp.sin(x.reshape(4, 64, 2, 32).repeat(4, axis=2))
        return jnp.sum(jnp.sin(jnp.einsum("bqhd,bkhd->bhqk", queries, keys.repeat(4, axis=2))))

    _, _, graph = graph_of(grouped, W, X, device="h200")
    assert graph.bytes[names(graph).index("tanh")] == X.nbytes
    assert not [v for v, name in enumerate(names(graph)) if name == "broadcast_in_dim" and v > 2]
