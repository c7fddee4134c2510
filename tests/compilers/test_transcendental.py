"""Which results of expensive functions are stored."""

from __future__ import annotations

import jax.numpy as jnp

from tests.compiler_graphs import (
    W,
    X,
    graph_of,
    stored,
)


def test_dear_functions_are_not_computed_twice() -> None:
    def loss(w, x, function):
        y = x @ w
        return jnp.sum(jnp.sin((y * function(y * y)) @ w))

    for device, of_tanh, of_exp in (("h200", 1, 0), ("cpu", 1, 1), ("v5e", 0, 0)):
        for function, extra in ((jnp.tanh, of_tanh), (jnp.exp, of_exp)):
            _, _, graph = graph_of(
                lambda w, x, function=function: loss(w, x, function), W, X, device=device
            )
            assert stored(graph).count(function.__name__) == extra
