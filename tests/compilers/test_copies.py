"""Copies that a TPU makes, and their signals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.copies import HandedOn
from remat_opt.schedule import Region, Schedule, plain, unchanged
from tests.compiler_graphs import (
    InStep,
    W,
    X,
    graph_of,
    held_bytes,
    names,
    two_layers,
    whole,
)
from tests.devices import needs_libtpu


def test_copies_to_vector_memory_take_room_for_each_product_that_is_computed() -> None:
    for device in ("h200", "cpu"):
        _, found, graph = graph_of(two_layers, [W, W], X, device=device)
        assert found.held_bytes(plain(graph)) == held_bytes(found, unchanged(graph)) == 0
    # Products compute it again, as they do not do with a sine.
    layers = functools.partial(two_layers, act=jnp.tanh)
    _, found, graph = graph_of(layers, [W, W], X, device="v5e")
    assert found.held_bytes(plain(graph)) == 0, "all of it stays in vector memory"
    big = jnp.ones((512, 512))
    _, found, graph = graph_of(layers, [big, big], big, device="v5e")
    one = 4 * 16 * 1024
    # Two products forward, two gradients of each, and the first again under a checkpoint.
    assert found.held_bytes(plain(graph)) == held_bytes(found, unchanged(graph)) == 6 * one
    kept = Region(vertices=tuple(range(len(graph))), kept=(1,))
    assert found.held_bytes(Schedule(regions=(kept,))) == 7 * one


def attention(w: jax.Array, x: jax.Array, heads: int = 2) -> jax.Array:
    """Self-attention with one weight for all."""
    y = (x @ w).reshape(*x.shape[:-1], heads, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", y, y)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), y).reshape(x.shape)


@pytest.mark.parametrize(("device", "size"), [("v5e", 2 * 2 * 2 * 128 * 128), ("h200", 0)])
def test_scores_that_a_region_hands_on_are_copied_to_another_order(device: str, size: int) -> None:
    arguments = jnp.ones((256, 256), "bfloat16"), jnp.ones((2, 128, 256), "bfloat16")
    _, found, graph = graph_of(lambda w, x: jnp.sum(attention(w, x)), *arguments, device=device)
    products = [v for v, name in enumerate(names(graph)) if name == "dot_general"]

    def held(end: int) -> int:
        cut = Schedule(
            regions=(
                Region(vertices=tuple(range(end))),
                Region(vertices=tuple(range(end, len(graph))), checkpointed=False),
            )
        )
        return held_bytes(found, cut, HandedOn)

    assert held(products[1] + 1) == size
    assert held(products[1]) == held_bytes(found, whole(graph), HandedOn) == 0
    assert held_bytes(found, unchanged(graph), HandedOn) == 0


@pytest.mark.slow
@pytest.mark.tpu
@needs_libtpu
def test_least_memory_hands_on_no_scores() -> None:
    def layers(weights, x):
        for w in weights:
            x = x + attention(w, x, heads=8)
        return jnp.mean(x.astype("float32") ** 2)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    step = InStep(layers, [shape((512, 512))] * 3, shape((8, 1024, 512)), device="v5e")
    plan = step.plan()
    assert plan.predicted.temporary_bytes == pytest.approx(step.compiled_bytes(plan), rel=0.1)
