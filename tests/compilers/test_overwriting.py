"""Cotangents that take the place of values no longer needed."""

from __future__ import annotations

import jax.numpy as jnp

from remat_opt.compilers.overwriting import overwritten_bytes
from tests.compiler_graphs import W, X, graph_of, names


def test_a_cotangent_takes_the_place_of_a_factor_that_goes() -> None:
    def loss(w, x):
        return jnp.sum(jnp.sin((x @ w[0]) * (x @ w[1]) @ w[2]))

    _, _, graph = graph_of(loss, [W] * 3, X)
    product = names(graph).index("mul")
    assert graph.workspace_bytes[product] == -X.nbytes
    _, _, graph = graph_of(loss, [W] * 3, X, device="v5e")
    assert min(graph.workspace_bytes) >= 0


def test_a_factor_that_is_read_later_keeps_its_place() -> None:
    def loss(w, x):
        y, z = x @ w[0], x @ w[1]
        return jnp.sum(jnp.sin(y * z @ w[2])) + jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z))

    _, _, graph = graph_of(loss, [W] * 3, X)
    assert graph.workspace_bytes[names(graph).index("mul")] == 0
    assert overwritten_bytes(graph) == {}
