"""Which values the compiler really stores: FACTS of XLA's fusion, as the graph shows them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
from jax import lax

from remat_opt.compilers.held import Cause
from remat_opt.compilers.materialization import Materialization, computes_nothing, materialize
from remat_opt.compilers.tpu_fusion import copies_bytes
from remat_opt.device import get_device
from remat_opt.graph import Graph
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import simulate

X = jnp.ones((16, 8))
W = jnp.ones((8, 8))


def graph_of(
    fn: Callable[..., Any], *args: Any, device: str = "h200", **options: Any
) -> tuple[Program, Materialization, Graph]:
    program = tracing.trace(fn, *args, signature=Signature(**options))
    found = materialize(program, linearize(program), get_device(device))
    return program, found, found.graph


def whole(graph: Graph) -> Schedule:
    """All under one checkpoint that keeps nothing."""
    return Schedule(regions=(Region(vertices=tuple(range(len(graph)))),))


def names(graph: Graph) -> list[str]:
    """The primitives of the vertices, in order."""
    return [name.split(":")[1] for name in graph.names]


def test_elementwise_results_live_inside_what_reads_them() -> None:
    def loss(w, x):
        return jnp.sum(jnp.exp(jnp.sin(x * w) + 1.0))

    _, _, graph = graph_of(loss, X, X)
    assert names(graph) == ["reduce_sum"]
    # The sum alone is computed, and it is an output: nothing lies in temporary memory.
    assert graph.bytes == (0,)


def test_what_an_opaque_equation_makes_or_reads_is_stored() -> None:
    def loss(w, x):
        return jnp.sum(jnp.cos(jnp.sin(x) @ w))

    program, found, graph = graph_of(loss, W, X)
    assert names(graph) == ["sin", "dot_general", "reduce_sum"]
    assert graph.bytes == (X.nbytes, X.nbytes, 0)
    assert graph.predecessors == ((), (0,), (1,))
    # The product's derivative reads the sine; the cosine's, inside the sum, the product, and writes
    # the product's cotangent over it.
    assert graph.needs == ((), (0, 1), (1,))
    assert graph.cotangent_bytes == (0, 0, 4)  # x is not differentiated
    assert [program.equations[root].operation.primitive for root in found.roots] == names(graph)
    assert found.labels[1] == "dot_general f32[16,8]"
    assert graph.flops[1] == 2 * 16 * 8 * 8


def test_reductions_write_their_result() -> None:
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(y - jnp.mean(y, axis=0)))

    _, _, graph = graph_of(loss, W, X)
    assert names(graph) == ["dot_general", "reduce_sum", "reduce_sum"]
    assert graph.bytes == (X.nbytes, 8 * 4, 0)


def test_a_cotangent_is_handed_on_where_nothing_else_reads_it() -> None:
    def residual(weights, x):
        for w in weights:
            x = jax.nn.relu(x + x @ w)
        return jnp.sum(jnp.sin(x @ weights[0]))

    _, _, graph = graph_of(residual, [W] * 2, X @ W)
    # The second sum's cotangent is, masked, that of the first one, too.
    assert names(graph)[:4] == ["dot_general", "custom_jvp_call", "dot_general", "custom_jvp_call"]
    assert graph.in_place[:4] == (False, True, False, True)

    def normalised(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(jax.nn.relu(y - jnp.mean(y, axis=0)) @ w))

    # The mean's cotangent is a sum of what arrives; only then comes the product's, beside it.
    _, _, graph = graph_of(normalised, W, X)
    assert names(graph)[:3] == ["dot_general", "reduce_sum", "custom_jvp_call"]
    assert not graph.in_place[2]

    def narrowed(w, x):
        return jnp.sum(jnp.sin(jax.nn.relu(x @ w).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))

    # Two bytes a number have no room for four.
    _, _, graph = graph_of(narrowed, W, X)
    rounded = names(graph).index("convert_element_type", 1)
    assert graph.predecessors[rounded] == (rounded - 1,)
    assert not graph.in_place[rounded]


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
IMAGES, KERNEL = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 4))


def test_zeros_are_shared_with_a_pooling_of_overlapping_windows() -> None:
    def maximum(y):
        return lax.max(y, 0.0)

    zeros = 2 * IMAGES.nbytes
    # What the transform can keep apart only the unchanged function pays for.
    for activation, strides, device, held, unchanged in (
        (jax.nn.relu, OVERLAPPING, "h200", 0, zeros),
        (maximum, OVERLAPPING, "h200", zeros, zeros),
        (jax.nn.relu, APART, "h200", 0, 0),
        (jnp.tanh, OVERLAPPING, "h200", 0, 0),
        (jax.nn.relu, OVERLAPPING, "v5e", 0, 0),
    ):
        loss = pooling_loss(activation, strides)
        _, found, graph = graph_of(loss, KERNEL, IMAGES, device=device)
        for schedule in (plain(graph), whole(graph)):
            assert found.held_bytes(schedule, Cause.POOLING) == held
            assert found.unchanged_held_bytes(Cause.POOLING) == unchanged


def pooled_on_a_cpu(loss, kernels) -> tuple[Materialization, Graph, list[int]]:
    """The graph, and the vertices that are max poolings."""
    _, found, graph = graph_of(loss, kernels, IMAGES, device="cpu")
    return found, graph, [v for v, one in enumerate(names(graph)) if one == "reduce_window_max"]


def test_a_cpu_searches_coordinates_where_a_pooling_runs() -> None:
    size, pooled = IMAGES.size, 2 * 4 * 4 * 4
    found, graph, (vertex,) = pooled_on_a_cpu(pooling_loss(jax.nn.relu, APART), KERNEL)
    # The gradient reads the place of each maximum, and not what was searched for it.
    assert graph.internal_bytes[vertex] == 4 * 4 * pooled
    assert graph.forward_workspace_bytes[vertex] == 4 * 4 * size
    assert graph.needs[vertex] == ()
    # To search once more would take these arrays from one pass to the other.
    assert graph.pinned[vertex]
    assert found.held_bytes(plain(graph)) == found.unchanged_held_bytes() == 0
    # Overlapping windows scatter into zeros; padding makes both larger.
    window = {"strides": OVERLAPPING, "padding": ((0, 0), (0, 1), (0, 1), (0, 0))}
    found, graph, (vertex,) = pooled_on_a_cpu(pooling_loss(jax.nn.relu, **window), KERNEL)
    padded = 2 * 9 * 9 * 4
    assert graph.forward_workspace_bytes[vertex] == 4 * 4 * padded
    assert found.held_bytes(plain(graph)) == found.unchanged_held_bytes() == 4 * padded


def test_coordinates_are_there_from_the_start() -> None:
    def two(kernels, x):
        larger = jnp.tanh(x * kernels[1])
        pooled = lax.reduce_window(larger, -jnp.inf, lax.max, (1, 2, 2, 1), APART, "VALID")
        return pooling_loss(jnp.tanh, APART)(kernels[0], jnp.sin(pooled))

    _, graph, (first, second) = pooled_on_a_cpu(two, [KERNEL, jnp.ones((8, 8, 4))])
    assert graph.forward_workspace_bytes[second] == 4 * 4 * IMAGES.size // 4
    assert graph.forward_workspace_bytes[first] == 4 * 4 * IMAGES.size * 5 // 4


def test_constants_of_average_poolings_of_products_wait_on_a_cpu() -> None:
    most = pooling_loss(jax.nn.relu, APART)

    def average(x):
        sums = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), APART, "VALID")
        return jnp.sum(jnp.sin(sums / 4))

    def product(activation, kernels, x):
        return jnp.einsum("bhwc,cd->bhwd", activation(x * kernels[1]), kernels[2])

    def behind(kernels, x):
        return most(kernels[0], x) + average(product(jax.nn.relu, kernels, x))

    def of_no_maximum(kernels, x):
        return most(kernels[0], x) + average(product(jnp.tanh, kernels, x))

    def of_no_product(kernels, x):
        return most(kernels[0], x) + average(jax.nn.relu(x * kernels[1]))

    def before(kernels, x):
        return average(product(jax.nn.relu, kernels, x)) + most(kernels[0], x)

    kernels = [KERNEL, jnp.ones((8, 8, 4)), jnp.ones((4, 6))]
    searched, divisor, zeros = 4 * 4 * IMAGES.size, 4 * 2 * 4 * 4 * 6, 4 * IMAGES.size
    for loss, static, waiting in (
        (behind, divisor, zeros),
        (of_no_maximum, divisor, 0),
        (of_no_product, 0, 0),
        (before, 0, 0),
    ):
        found, graph, (vertex,) = pooled_on_a_cpu(loss, kernels)
        assert graph.forward_workspace_bytes[vertex] == searched + static
        as_one = found.graph_of(plain(graph))
        assert as_one.forward_workspace_bytes[vertex] == searched + static + waiting


def test_no_zeros_wait_where_the_product_is_handed_on() -> None:
    def loss(kernels, x):
        most = pooling_loss(jax.nn.relu, APART)(kernels[0], x)
        y = jnp.einsum("bhwc,cd->bhwd", jax.nn.relu(x * kernels[1]), kernels[2])
        sums = lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), APART, "VALID")
        return most + jnp.sum(jnp.sin(sums / 4))

    kernels = [KERNEL, jnp.ones((8, 8, 4)), jnp.ones((4, 6))]
    found, graph, (vertex,) = pooled_on_a_cpu(loss, kernels)
    ((activation, pooled),) = found.waiting_zeros
    assert vertex < activation < pooled
    everything = tuple(range(len(graph)))
    cut = Schedule(
        regions=(
            Region(vertices=everything[:pooled], checkpointed=False),
            Region(vertices=everything[pooled:], checkpointed=False),
        )
    )
    assert found.graph_of(cut).forward_workspace_bytes == graph.forward_workspace_bytes


def test_poolings_of_one_shape_share_their_coordinates() -> None:
    def twice(kernels, x):
        first, second = pooling_loss(jax.nn.relu, APART), pooling_loss(jnp.tanh, APART)
        return first(kernels[0], x) + second(kernels[1], x)

    _, graph, vertices = pooled_on_a_cpu(twice, [KERNEL, KERNEL])
    for vertex in vertices:
        assert graph.forward_workspace_bytes[vertex] == 4 * 4 * IMAGES.size


def test_a_poolings_gradient_takes_a_workspace_on_nvidia() -> None:
    for strides, device, expected, beside in (
        # Four coordinates for a quarter as many numbers take the operand's place.
        (APART, "h200", 0, 0),
        # The zeros that it scatters to stay for the relu's gradient, which is not in place.
        (OVERLAPPING, "h200", 4 * 4 * 2 * 7 * 7 * 4, IMAGES.nbytes),
        (APART, "v5e", 0, 0),
    ):
        _, _, graph = graph_of(pooling_loss(jax.nn.relu, strides), KERNEL, IMAGES, device=device)
        relu, pooling = map(names(graph).index, ("custom_jvp_call", "reduce_window_max"))
        assert graph.workspace_bytes[pooling] == expected
        assert graph.workspace_bytes[relu] == beside
        assert graph.in_place[relu] == (not beside)
        assert sum(graph.workspace_bytes) == expected + beside


def test_a_bias_gradient_is_summed_beside_the_cotangent_on_nvidia() -> None:
    def biased(parameters, x):
        w, b = parameters
        return jnp.sum(jnp.sin(jnp.tanh(x @ w + b) @ w))

    for device, expected in (("h200", False), ("cpu", True)):
        _, _, graph = graph_of(biased, (W, jnp.ones(W.shape[1])), X, device=device)
        assert graph.in_place[names(graph).index("tanh")] is expected


def test_copies_to_vector_memory_take_room_for_each_product_that_is_computed() -> None:
    for device in ("h200", "cpu"):
        _, found, graph = graph_of(two_layers, [W, W], X, device=device)
        assert found.held_bytes(plain(graph)) == found.unchanged_held_bytes() == 0
    _, found, graph = graph_of(two_layers, [W, W], X, device="v5e")
    assert found.held_bytes(plain(graph)) == 0, "all of it stays in vector memory"
    big = jnp.ones((512, 512))
    _, found, graph = graph_of(two_layers, [big, big], big, device="v5e")
    one = copies_bytes(1)
    assert one > 0
    # Two products forward, two gradients of each, and the first once more under a checkpoint.
    assert found.held_bytes(plain(graph)) == found.unchanged_held_bytes() == 6 * one
    kept = Region(vertices=tuple(range(len(graph))), kept=(1,))
    assert found.held_bytes(Schedule(regions=(kept,))) == 7 * one


def cross_entropy(w: jax.Array, x: jax.Array) -> jax.Array:
    logits = x @ w
    picked = jnp.take_along_axis(logits, jnp.arange(x.shape[0])[:, None] % 4, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked[:, 0])


def test_a_cotangent_computed_by_products_is_an_array_where_it_enters_a_checkpoint() -> None:
    _, found, graph = graph_of(cross_entropy, W, X, device="v5e")
    logits = names(graph).index("dot_general")
    before, after = tuple(range(logits + 1)), tuple(range(logits + 1, len(graph)))
    product, rest = Region(vertices=before, kept=(logits,)), Region(vertices=after)
    for regions, enters in (
        ([product, dataclasses.replace(rest, checkpointed=False)], True),
        ([product, rest], True),
        ([Region(vertices=before + after, inside=(product, rest))], True),
        ([Region(vertices=before + after)], False),
        ([Region(vertices=before, checkpointed=False), rest], False),
    ):
        planned = found.graph_of(Schedule(regions=tuple(regions)))
        assert (planned.cotangent_bytes[logits] > 0) is enters
        assert planned.cotangent_bytes[logits] <= graph.bytes[logits]


def test_logits_are_overwritten_by_their_cotangent_on_nvidia() -> None:
    size = X.shape[0] * W.shape[1] * 4
    for device, overwritten in (("h200", True), ("cpu", False), ("v5e", False)):
        _, found, graph = graph_of(cross_entropy, W, X, device=device)
        logits = names(graph).index("dot_general")
        # On a TPU the product's gradients compute the cotangent as they read the logits.
        assert (logits in graph.needs[logits]) is (device != "cpu")
        # The function as it is has a scatter, and both arrays.
        assert found.unchanged_held_bytes(Cause.ROWS) == size * overwritten
        assert found.held_bytes(plain(graph), Cause.ROWS) == 0
        if overwritten:
            assert graph.cotangent_bytes[logits] == 0

    # What is read elementwise, too, stays what it is.
    def squared(w, x):
        y = x @ w
        return jnp.sum(jnp.sin((y - jnp.max(y, axis=-1, keepdims=True)) @ w))

    _, _, graph = graph_of(squared, W, X)
    assert graph.cotangent_bytes[0] == size

    # Nothing of the product is read again: its cotangent has a place of its own.
    _, _, graph = graph_of(lambda w, x: jnp.sum(x @ w), W, X)
    assert graph.cotangent_bytes[0] == size
    assert graph.needs[0] == ()


def test_on_a_cpu_the_cotangent_of_logits_takes_the_place_of_exponentials() -> None:
    logits_bytes = X.shape[0] * W.shape[1] * 4
    _, _, graph = graph_of(cross_entropy, W, X, device="cpu")
    logits, exponentials = (names(graph).index(one) for one in ("dot_general", "exp"))
    assert graph.cotangent_bytes[logits] == graph.cotangent_bytes[exponentials] == 0
    assert graph.needs[exponentials] == (exponentials,)
    # In the product's own step there is the cotangent.
    assert graph.workspace_bytes[logits] == logits_bytes

    # What is read elementwise, too, has a cotangent of its own.
    def weighted(w, x):
        exponentials = jnp.exp(x @ w)
        return jnp.sum(jnp.sin(exponentials / jnp.sum(exponentials, axis=-1, keepdims=True) @ w))

    _, _, graph = graph_of(weighted, W, X, device="cpu")
    assert graph.cotangent_bytes[names(graph).index("exp")] == logits_bytes


def test_a_cpu_transposes_cotangents_for_the_gradients_of_weights() -> None:
    def loss(weights, x):
        hidden = jnp.sin(x @ weights[0])
        scores = jnp.einsum("...ij,...kj->...ik", hidden, hidden)
        return jnp.sum(jnp.sin(scores))

    for device, shape, transposed in (
        # Where it sums over examples and tokens.
        ("cpu", (2, 16, 8), 2 * 16 * 4 * 4),
        ("cpu", (16, 8), 0),
        ("h200", (2, 16, 8), 0),
        ("v5e", (2, 16, 8), 0),
    ):
        _, _, graph = graph_of(loss, [jnp.ones((8, 4))], jnp.ones(shape), device=device)
        products = [v for v, name in enumerate(names(graph)) if name == "dot_general"]
        # The second has no weight.
        assert [graph.workspace_bytes[v] for v in products] == [transposed, 0]


def test_a_cpu_widens_what_a_checkpoint_keeps_when_its_turn_comes() -> None:
    def loss(weights, x):
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x).astype(jnp.float32)

    weights, x = [jnp.ones((8, 8), jnp.bfloat16)] * 4, jnp.ones((16, 8), jnp.bfloat16)
    for device, more in (("cpu", 2 * 16 * 8), ("h200", 0)):
        _, found, graph = graph_of(loss, weights, x, device=device)
        none = found.held_bytes(whole(graph))
        every = tuple(range(len(graph)))
        products = [v for v in every if names(graph)[v] == "dot_general"]
        read = tuple(v for v in every if any(v in graph.needs[w] and v != w for w in products))
        half = [every[: products[2]], every[products[2] :]]
        one = [Region(vertices=every, kept=read)]
        two = [Region(vertices=part, kept=tuple(set(part) & set(read))) for part in half]
        assert len(read) == 3
        assert found.held_bytes(Schedule(regions=tuple(one))) - none == 3 * more
        # Of two checkpoints, one after the other.
        assert found.held_bytes(Schedule(regions=tuple(two))) - none == 2 * more


def test_searches_for_a_cpu_see_bfloat16_as_it_is_kept_too() -> None:
    def loss(weights, x):
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x).astype(jnp.float32)

    weights, x = [jnp.ones((8, 8), jnp.bfloat16)] * 4, jnp.ones((16, 8), jnp.bfloat16)
    _, found, graph = graph_of(loss, weights, x, device="h200")
    assert found.searched_graphs == (graph,)
    _, found, graph = graph_of(loss, weights, x, device="cpu")
    otherwise, kept = found.searched_graphs
    assert otherwise == graph
    every = tuple(range(len(graph)))
    all_kept = Schedule(regions=(Region(vertices=every, kept=every),))
    assert kept.bytes == found.graph_of(all_kept).bytes
    assert max(graph.bytes) == 4 * 16 * 8
    assert max(kept.bytes) == 2 * 16 * 8


def test_a_cpu_widens_weights_that_are_bfloat16() -> None:
    def loss(weights, tokens):
        rows = weights["rows"][tokens]
        return jnp.sum(jnp.sin(rows @ weights["product"])).astype(jnp.float32)

    for dtype, device, widened in (
        (jnp.bfloat16, "cpu", 4),
        (jnp.float32, "cpu", 0),
        (jnp.bfloat16, "h200", 0),
    ):
        weights = {"rows": jnp.ones((32, 8), dtype), "product": jnp.ones((8, 4), dtype)}
        _, found, graph = graph_of(loss, weights, jnp.arange(16), device=device)
        rows, product = widened * 32 * 8, widened * 8 * 4
        assert found.unchanged_held_bytes(Cause.WIDENED) == rows + product
        assert found.held_bytes(plain(graph), Cause.WIDENED) == rows + product
        # A checkpoint widens again what it reads; the zeros that rows are added to are there.
        assert found.held_bytes(whole(graph), Cause.WIDENED) == rows
        # Its gradient comes out as float32, while the product's step runs.
        assert graph.workspace_bytes[names(graph).index("dot_general")] == product


def test_a_cpu_widens_a_weight_once_for_all_that_read_it() -> None:
    def loss(weights, tokens):
        x = weights["rows"][tokens][0]
        for _ in range(5):
            x = jnp.sin(x @ weights["product"])
        return jnp.sum(x).astype(jnp.float32)

    weights = {"rows": jnp.ones((32, 8), jnp.bfloat16), "product": jnp.ones((8, 8), jnp.bfloat16)}
    _, found, graph = graph_of(loss, weights, jnp.arange(16)[None], device="cpu")
    assert found.held_bytes(plain(graph), Cause.WIDENED) == 4 * 32 * 8 + 4 * 8 * 8
    assert found.held_bytes(whole(graph), Cause.WIDENED) == 4 * 32 * 8


def test_parts_of_a_weights_gradient_wait_for_the_last() -> None:
    def recurrent(weights, x):
        state = x
        for _ in range(5):
            state = jnp.tanh(state @ weights[0])
        return jnp.sum(jnp.sin(state @ weights[1]))

    size = W.nbytes
    for device, summed, of_plan, unchanged in (
        # In a checkpointed region the sum, and beside it the part that is computed; without a
        # checkpoint the sum is where the gradient is put out.
        ("h200", 2 * size, size, 5 * size),
        ("cpu", 2 * size, 2 * size, 5 * size),
        ("v5e", 0, 0, 0),
    ):
        _, found, graph = graph_of(recurrent, [W, W], X, device=device)
        products = [v for v, one in enumerate(names(graph)) if one == "dot_general"]
        before = (v for v in range(len(graph)) if v < products[0])
        after = range(products[4] + 1, len(graph))
        assert {graph.workspace_bytes[v] for v in products[:5]} == {summed}
        planned = found.graph_of(plain(graph)).workspace_bytes
        assert {planned[v] for v in products[:5]} == {of_plan}
        assert not any(graph.workspace_bytes[v] for v in (*before, *after))
        # As it is, one part after the other comes, and none goes.
        parts = found.unchanged_graph.workspace_bytes
        assert not any(parts[v] for v in after)
        for number, vertex in enumerate(products[:5]):
            assert parts[vertex] == (5 - number) * unchanged // 5


def stored(graph: Graph) -> list[str]:
    """The primitives of what the backward pass of the unchanged function reads."""
    return [names(graph)[vertex] for vertex in simulate(graph, plain(graph)).stored]


def test_a_cpu_stores_what_its_sums_multiply() -> None:
    def normalised(w, x):
        y = x @ w
        centred = y - jnp.mean(y, 0)
        y = centred * lax.rsqrt(jnp.mean(centred**2, 0)) * 3.0
        return jnp.sum(jnp.sin(y @ w))

    # The gradient of the reciprocal deviation sums cotangents times what it scales.
    for device, extra in (("h200", False), ("cpu", True)):
        _, _, graph = graph_of(normalised, W, X, device=device)
        held = [v for v in simulate(graph, plain(graph)).stored if graph.bytes[v] == X.nbytes]
        assert ("sub" in [names(graph)[v] for v in held]) == extra


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


def test_a_cpu_stores_the_divisors_of_attention() -> None:
    def attention(w, x, batched):
        scores = jnp.exp(x @ w)
        shares = scores / jnp.sum(scores, -1, keepdims=True)
        return jnp.sum(jnp.sin(jnp.einsum("bij,bjk->bik", shares, x) if batched else shares @ w))

    images, square = jnp.ones((4, 8, 8)), jnp.ones((8, 8))
    for batched, copies in ((True, 2), (False, 1)):
        _, _, graph = graph_of(
            lambda w, x, batched=batched: attention(w, x, batched), square, images, device="cpu"
        )
        exponential = names(graph).index("exp")
        assert graph.bytes[exponential] == copies * images.nbytes


def test_a_cpu_stores_bfloat16_as_float32() -> None:
    narrow = [array.astype(jnp.bfloat16) for array in (W, X)]
    sizes = {}
    for device in ("h200", "cpu"):
        _, _, graph = graph_of(lambda w, x: jnp.sum(jnp.sin(x @ w) @ w), *narrow, device=device)
        sizes[device] = graph.bytes[0], graph.cotangent_bytes[0]
    assert sizes["cpu"] == tuple(2 * size for size in sizes["h200"])


def test_the_sum_of_a_residual_stream_is_stored() -> None:
    def loss(weights, x):
        for w in weights:
            x = x + x @ w
        return jnp.sum(jnp.sin(x))

    _, _, graph = graph_of(loss, [W] * 3, X)
    # Each sum feeds a product. The last feeds the loss alone and so lives inside it.
    assert names(graph) == ["dot_general", "add", "dot_general", "add", "dot_general", "reduce_sum"]


def test_a_cheap_shared_value_is_not_stored() -> None:
    def loss(w, x):
        y = x @ w
        activated = jax.nn.relu(y)
        return jnp.sum(activated**2) + jnp.sum(jnp.sin(activated))

    _, _, graph = graph_of(loss, W, X)
    # Either reader reads the product itself, of the same size.
    assert names(graph)[0] == "dot_general"
    assert sum(size == X.nbytes for size in graph.bytes) == 1


def test_a_tpu_stores_a_concatenation_that_is_read_twice() -> None:
    """As DenseNet's, of which a normalisation takes the mean, and then reads it once more."""

    def loss(w, x, normalised):
        joined = jnp.concatenate([x, x @ w], axis=1)
        joined = joined - jnp.mean(joined) if normalised else joined
        return jnp.sum(jnp.tanh(joined @ jnp.concatenate([w, w])))

    w, x = jnp.ones((1024, 1024)), jnp.ones((256, 1024))
    for device, normalised, stored in (
        ("v5e", True, True),
        ("v5e", False, False),
        ("h200", True, True),
        ("cpu", True, True),
    ):
        of_both = functools.partial(loss, normalised=normalised)
        _, _, graph = graph_of(of_both, w, x, device=device)
        assert ("concatenate" in names(graph)) is stored, (device, normalised)


def test_reshapes_are_other_names_of_the_same_bytes() -> None:
    def loss(w, x):
        y = (x @ w).reshape(4, 32).T.reshape(-1, 8)
        return jnp.sum(jnp.sin(y @ w))

    program, found, graph = graph_of(loss, W, X)
    assert names(graph) == ["dot_general", "dot_general", "reduce_sum"]
    assert graph.predecessors[1] == (0,)
    assert 0 in graph.needs[1]
    assert found.vertex_of[program.equations[0].outputs[0]] == 0


def test_outputs_cost_no_temporary_memory() -> None:
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(y)), (y.reshape(-1), jnp.exp(y))

    _, _, graph = graph_of(loss, W, X, has_aux=True)
    by_name = dict(zip(names(graph), graph.bytes, strict=True))
    assert by_name == {"dot_general": 0, "exp": 0, "reduce_sum": 0}


def test_what_has_side_effects_is_pinned_and_reads_stored_values() -> None:
    def loss(w, x):
        y = jnp.sin(x @ w)
        jax.debug.callback(lambda v: None, y)
        return jnp.sum(y * y)

    program, found, graph = graph_of(loss, W, X)
    (pinned,) = [vertex for vertex, is_pinned in enumerate(graph.pinned) if is_pinned]
    assert program.equations[found.roots[pinned]].effects
    assert names(graph)[graph.predecessors[pinned][0]] == "sin"


def test_a_scan_brings_residuals_that_no_name_can_keep() -> None:
    def loss(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=5)[0])

    _, _, graph = graph_of(loss, W, X)
    scan = names(graph).index("scan")
    assert graph.internal_bytes[scan] >= 5 * X.nbytes
    assert sum(graph.internal_bytes) == graph.internal_bytes[scan]
    assert set(graph.predecessors[scan]) <= set(graph.needs[scan])


def test_labels_say_primitive_dtype_and_shape() -> None:
    def loss(w, x):
        return jnp.sum((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) * 2)

    _, found, _ = graph_of(loss, W, X)
    assert "dot_general bf16[16,8]" in found.labels


def test_vertices_partition_the_work_and_edges_lead_forward() -> None:
    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh((x - jnp.mean(x)) @ w)
        return jnp.sum(x**2)

    program, found, graph = graph_of(loss, [W] * 4, X)
    assert list(found.roots) == sorted(set(found.roots))
    assert set(found.vertex_of.values()) == set(range(len(graph)))
    assert networkx.is_directed_acyclic_graph(graph.to_networkx())
    dots = [e for e in program.equations if e.operation.primitive == "dot_general"]
    assert graph.forward_flops >= len(dots) * 2 * 16 * 8 * 8
    assert all(seconds > 0 for seconds in graph.seconds)


def test_what_is_assumed_or_estimated_is_told() -> None:
    def loss(w, x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x * w[0])
        return jnp.sum(y)

    _, found, _ = graph_of(loss, W, X)
    assert found.assumed == ("pure_callback",)
    assert found.estimated_flops_share > 0


def test_programs_that_compute_nothing_are_recognised() -> None:
    def trace(fn: Callable[..., Any]) -> Program:
        return tracing.trace(fn, jnp.ones((1, 1)))

    assert computes_nothing(trace(lambda x: x))
    assert computes_nothing(trace(lambda x: x.reshape(()).T))
    assert not computes_nothing(trace(jnp.sin))


def two_layers(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.sin(x @ w)
    return jnp.sum(x)


def test_a_tpu_computes_operands_of_products_as_it_reads_them() -> None:
    big = [jnp.ones((128, 128))] * 2, jnp.ones((256, 128))
    for device in ("cpu", "h200"):
        _, _, graph = graph_of(two_layers, *big, device=device)
        assert names(graph) == ["dot_general", "sin", "dot_general", "reduce_sum"]
    _, _, graph = graph_of(two_layers, *big, device="v5e")
    assert names(graph) == ["dot_general", "dot_general", "reduce_sum"]
    # The second product's derivative reads the sine, which is computed from the first, and its own
    # result, of which its cotangent is computed.
    assert graph.needs == ((), (0, 1), (1,))
    # Of the cotangents only the one that the second product's backward step writes is stored:
    # the second one's own is a cosine times a scalar.
    assert graph.cotangent_bytes == (256 * 128 * 2, 0, 4)


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
    # The sums are read there alone, what is summed elsewhere too.
    assert sizes["cumsum"] == full // 2
    assert sizes["reduce_window_max"] == full
    assert "concatenate" not in sizes
    _, _, graph = graph_of(functools.partial(loss, twice=True), *args, device="v5e")
    sizes = dict(zip(names(graph), graph.bytes, strict=True))
    # One array of half the width for both.
    assert sizes["concatenate"] == full
    assert sizes["cumsum"] == full


def test_a_tpu_stores_as_bfloat16_the_cotangents_that_products_write_for_products() -> None:
    def loss(weights, x, *, read_twice=False):
        y = x @ weights[0]
        z = jnp.sum(jnp.cos(y)) if read_twice else 0.0
        return jnp.sum(jnp.sin(jax.nn.relu(y) @ weights[1])) + z

    def precise(weights, x):
        with jax.default_matmul_precision("float32"):
            return loss(weights, x)

    args, full = ([jnp.ones((128, 128))] * 2, jnp.ones((256, 128))), 256 * 128 * 4
    for fn, device, expected in (
        (loss, "v5e", full // 2),
        (precise, "v5e", full),
        (functools.partial(loss, read_twice=True), "v5e", full),
        (loss, "h200", full),
    ):
        _, _, graph = graph_of(fn, *args, device=device)
        assert names(graph)[0] == "dot_general"
        assert graph.cotangent_bytes[0] == expected, (fn, device)


def test_a_tpu_stores_what_products_read_with_its_bias_and_scale() -> None:
    """As the queries of attention: one kernel multiplies, adds, scales and rounds."""

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
    # The step backward is a product: the cotangent that it reads is not written over.
    assert graph.cotangent_bytes[0] == full
    assert not graph.in_place[0]
    _, _, unscaled = graph_of(scaled, *args, device="v5e")
    assert names(unscaled)[:2] == ["dot_general", "dot_general"]
    assert unscaled.bytes[:2] == (full, full // 2)
    _, _, shared = graph_of(read_twice, *args, device="v5e")
    assert names(shared)[0] == "dot_general"
    assert shared.bytes[0] == full


def test_a_tpu_stores_once_what_several_products_read() -> None:
    def loss(weights, x):
        first = x @ weights[0]
        shared = jax.nn.relu(first + x)
        return jnp.sum(jnp.sin(shared @ weights[1]) + jnp.cos(shared @ weights[2]))

    weights, x = [jnp.ones((128, 128))] * 3, jnp.ones((256, 128))
    _, _, graph = graph_of(loss, weights, x, device="v5e")
    assert names(graph)[:2] == ["dot_general", "custom_jvp_call"]
    assert graph.bytes[:2] == (256 * 128 * 4, 256 * 128 * 2)


def test_a_tpu_never_stores_the_cotangent_of_logits() -> None:
    def loss(w, x, labels):
        logits = x @ w
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    args = jnp.ones((128, 1024)), jnp.ones((256, 128)), jnp.zeros(256, int)
    _, _, graph = graph_of(loss, *args, device="v5e")
    assert graph.cotangent_bytes[names(graph).index("dot_general")] == 0
    assert not any(graph.workspace_bytes)


def test_parts_of_sums_are_no_arrays_of_their_own() -> None:
    """The gates of a recurrent cell are read from one array; so is what only goes into a sum."""

    def cell(weights, state):
        gates = state[0] @ weights[0] + state[1] @ weights[1]
        forget, new = jnp.split(gates, 2, axis=1)
        cell = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(new) * jnp.tanh(new)
        return jnp.tanh(cell) @ weights[2], cell

    def loss(weights, x):
        state = x, x
        for _ in range(3):
            state = cell(weights, state)
        return jnp.sum(jnp.sin(state[0] @ weights[2]))

    wide = jnp.ones((W.shape[0], 2 * W.shape[1]))
    _, _, graph = graph_of(loss, [wide, wide, W], X)
    # Products, the sum of the first two, what is dear, the cell's new state, what the third reads.
    each = ["dot_general", "dot_general", "add", "tanh", "add", "tanh", "dot_general"]
    assert names(graph)[:14] == each * 2
