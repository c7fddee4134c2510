"""What is stored of random draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.compiler_graphs import InStep, W, X, graph_of, names


def dropout(w: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ w
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, y.shape)
    return jnp.sum(jnp.sin(jnp.where(kept, y / 0.9, 0) @ w))


def noise(w: jax.Array, x: jax.Array) -> jax.Array:
    """What is drawn is added, which no derivative reads."""
    y = x @ w
    return jnp.sum(jnp.sin((y + jax.random.normal(jax.random.key(0), y.shape)) @ w))


@pytest.mark.parametrize(
    ("device", "drawn", "size"),
    [
        # A byte an element; two words; nothing.
        ("h200", "lt", X.size),
        ("cpu", "random_bits", 8 * X.size),
        ("v5e", "", 0),
    ],
)
def test_a_mask_that_the_backward_pass_reads(device: str, drawn: str, size: int) -> None:
    _, _, graph = graph_of(dropout, W, X, device=device)
    found = {name: graph.bytes[vertex] for vertex, name in enumerate(names(graph))}
    assert [name for name in ("lt", "random_bits") if name in found] == ([drawn] if drawn else [])
    assert found.get(drawn, 0) == size


def test_what_is_read_once_is_drawn_where_it_is_read() -> None:
    _, _, graph = graph_of(noise, W, X)
    assert names(graph)[:2] == ["dot_general", "add"]


def test_on_a_cpu_each_mask_is_drawn_in_its_turn() -> None:
    """All would be drawn at once, and held from there on: a draw reads a key and nothing else."""

    def layers(weights, x, key):
        for w, own in zip(weights, jax.random.split(key, len(weights)), strict=True):
            y = jnp.tanh(x @ w)
            x = x + jnp.where(jax.random.bernoulli(own, 0.9, y.shape), y / 0.9, 0)
        return jnp.mean(x**2)

    rows, width = 2048, 64
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * 8
    x = jax.ShapeDtypeStruct((rows, width), "float32")
    step = InStep(layers, weights, x, jax.eval_shape(jax.random.key, 0), device="cpu")
    plan = step.plan()
    words = 8 * rows * width
    spared = step.compiled_bytes(plan, ["draws_in_turn"]) - step.compiled_bytes(plan)
    assert spared >= 2 * words
