"""What no cotangent is written over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compiler_graphs import W, X, graph_of, names


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
