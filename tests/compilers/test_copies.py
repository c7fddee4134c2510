"""The signals of copies to a TPU's vector memory."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from remat_opt.schedule import Region, Schedule, plain, unchanged
from tests.compiler_graphs import (
    W,
    X,
    graph_of,
    held_bytes,
    two_layers,
)


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
