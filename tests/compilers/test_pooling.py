"""What compilers hold for the gradients of max poolings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from remat_opt.compilers.model import Model
from remat_opt.compilers.pooling import EarlyZeros, SharedZeros
from remat_opt.graph import Graph
from remat_opt.schedule import plain, unchanged
from tests.compiler_graphs import (
    graph_of,
    held_bytes,
    names,
    whole,
)
from tests.programs import ones


def pooling_loss(activation, strides, padding="VALID"):
    def loss(kernel, x):
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        window = {"window_dimensions": (1, 2, 2, 1), "window_strides": strides}
        y = lax.reduce_window(activation(y), -jnp.inf, lax.max, padding=padding, **window)
        return jnp.sum(jnp.sin(y))

    return loss


APART, OVERLAPPING = (1, 2, 2, 1), (1, 1, 1, 1)


IMAGES, KERNEL = ones(2, 8, 8, 4), ones(3, 3, 4, 4)


def test_zeros_are_shared_with_a_pooling_of_overlapping_windows() -> None:
    def maximum(y):
        return lax.max(y, 0.0)

    zeros = 2 * IMAGES.nbytes
    # What the transform can keep apart costs only the unchanged function.
    for activation, strides, device, held, as_it_is in (
        (jax.nn.relu, OVERLAPPING, "h200", 0, zeros),
        (maximum, OVERLAPPING, "h200", zeros, zeros),
        (jax.nn.relu, APART, "h200", 0, 0),
        (jnp.tanh, OVERLAPPING, "h200", 0, 0),
        (jax.nn.relu, OVERLAPPING, "v5e", 0, 0),
    ):
        loss = pooling_loss(activation, strides)
        _, found, graph = graph_of(loss, KERNEL, IMAGES, device=device)
        for schedule in (plain(graph), whole(graph)):
            assert held_bytes(found, schedule, SharedZeros) == held
        assert held_bytes(found, unchanged(graph), SharedZeros) == as_it_is


def pooled_on_a_cpu(loss, kernels) -> tuple[Model, Graph, list[int]]:
    """The graph, and the vertices that are max poolings."""
    _, found, graph = graph_of(loss, kernels, IMAGES, device="cpu")
    return found, graph, [v for v, one in enumerate(names(graph)) if one == "reduce_window_max"]


def test_a_cpu_searches_coordinates_where_a_pooling_runs() -> None:
    size, pooled = IMAGES.size, 2 * 4 * 4 * 4
    found, graph, (vertex,) = pooled_on_a_cpu(pooling_loss(jax.nn.relu, APART), KERNEL)
    # The gradient reads the place of each maximum, not the array searched for it.
    assert graph.internal_bytes[vertex] == 4 * 4 * pooled
    assert graph.forward_workspace_bytes[vertex] == 4 * 4 * size
    assert graph.needs[vertex] == ()
    # Searching again would hold these arrays from one pass to the other.
    assert graph.pinned[vertex]
    assert held_bytes(found, plain(graph)) == held_bytes(found, unchanged(graph)) == 0
    # Overlapping windows scatter into zeros; padding makes both larger.
    window = {"strides": OVERLAPPING, "padding": ((0, 0), (0, 1), (0, 1), (0, 0))}
    found, graph, (vertex,) = pooled_on_a_cpu(pooling_loss(jax.nn.relu, **window), KERNEL)
    padded = 2 * 9 * 9 * 4
    assert graph.forward_workspace_bytes[vertex] == 4 * 4 * padded
    for schedule in (plain(graph), unchanged(graph)):
        assert held_bytes(found, schedule, EarlyZeros) == 4 * padded


def test_coordinates_are_there_from_the_start() -> None:
    def two(kernels, x):
        larger = jnp.tanh(x * kernels[1])
        pooled = lax.reduce_window(larger, -jnp.inf, lax.max, (1, 2, 2, 1), APART, "VALID")
        return pooling_loss(jnp.tanh, APART)(kernels[0], jnp.sin(pooled))

    _, graph, (first, second) = pooled_on_a_cpu(two, [KERNEL, jnp.ones((8, 8, 4))])
    assert graph.forward_workspace_bytes[second] == 4 * 4 * IMAGES.size // 4
    assert graph.forward_workspace_bytes[first] == 4 * 4 * IMAGES.size * 5 // 4


def test_poolings_of_one_shape_share_their_coordinates() -> None:
    def twice(kernels, x):
        first, second = pooling_loss(jax.nn.relu, APART), pooling_loss(jnp.tanh, APART)
        return first(kernels[0], x) + second(kernels[1], x)

    _, graph, vertices = pooled_on_a_cpu(twice, [KERNEL, KERNEL])
    for vertex in vertices:
        assert graph.forward_workspace_bytes[vertex] == 4 * 4 * IMAGES.size
