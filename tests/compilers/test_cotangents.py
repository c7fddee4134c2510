"""What cotangents take: which are arrays, and which take the place of another."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from remat_opt.schedule import Region, Schedule
from tests.compiler_graphs import (
    W,
    X,
    cross_entropy,
    graph_of,
    names,
)


def test_a_cotangent_is_handed_on_where_nothing_else_reads_it() -> None:
    def residual(weights, x):
        for w in weights:
            x = jax.nn.relu(x + x @ w)
        return jnp.sum(jnp.sin(x @ weights[0]))

    _, _, graph = graph_of(residual, [W] * 2, X @ W, device="cpu")
    # The second sum's cotangent, masked, is also that of the first.
    assert names(graph)[:4] == ["dot_general", "custom_jvp_call", "dot_general", "custom_jvp_call"]
    assert graph.in_place[:4] == (False, True, False, True)

    def normalised(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(jax.nn.relu(y - jnp.mean(y, axis=0)) @ w))

    # The mean's cotangent is a sum of what arrives; only then comes the product's, beside it.
    _, _, graph = graph_of(normalised, W, X, device="cpu")
    assert names(graph)[:3] == ["dot_general", "reduce_sum", "custom_jvp_call"]
    assert not graph.in_place[2]

    def narrowed(w, x):
        return jnp.sum(jnp.sin(jax.nn.relu(x @ w).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))

    # Two bytes per number have no room for four.
    _, _, graph = graph_of(narrowed, W, X)
    rounded = names(graph).index("convert_element_type", 1)
    assert graph.predecessors[rounded] == (rounded - 1,)
    assert not graph.in_place[rounded]


def test_a_bias_gradient_is_summed_beside_the_cotangent_on_nvidia() -> None:
    def biased(parameters, x):
        w, b = parameters
        return jnp.sum(jnp.sin(jnp.tanh(x @ w + b) @ w))

    for device, expected in (("h200", False), ("cpu", True)):
        _, _, graph = graph_of(biased, (W, jnp.ones(W.shape[1])), X, device=device)
        assert graph.in_place[names(graph).index("tanh")] is expected


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
        assert (planned.cotangent_bytes[logits] > 1) is enters
        assert planned.cotangent_bytes[logits] <= graph.bytes[logits]


def test_logits_and_their_cotangent_are_two_arrays_on_nvidia() -> None:
    size = X.shape[0] * W.shape[1] * 4
    _, _, graph = graph_of(cross_entropy, W, X)
    logits = names(graph).index("dot_general")
    assert graph.cotangent_bytes[logits] == size
    assert logits not in graph.needs[logits]
    # On a TPU the product's gradients compute the cotangent as they read the logits.
    _, _, graph = graph_of(cross_entropy, W, X, device="v5e")
    logits = names(graph).index("dot_general")
    assert logits in graph.needs[logits]


def test_on_a_cpu_the_cotangent_of_logits_takes_the_place_of_exponentials() -> None:
    logits_bytes = X.shape[0] * W.shape[1] * 4
    _, _, graph = graph_of(cross_entropy, W, X, device="cpu")
    logits, exponentials = (names(graph).index(one) for one in ("dot_general", "exp"))
    assert graph.cotangent_bytes[logits] == graph.cotangent_bytes[exponentials] == 1
    assert graph.needs[exponentials] == (exponentials,)
    # The cotangent exists in the product's own step.
    assert graph.workspace_bytes[logits] == logits_bytes

    # A value that is also read elementwise has a separate cotangent.
    def weighted(w, x):
        exponentials = jnp.exp(x @ w)
        return jnp.sum(jnp.sin(exponentials / jnp.sum(exponentials, axis=-1, keepdims=True) @ w))

    _, _, graph = graph_of(weighted, W, X, device="cpu")
    assert graph.cotangent_bytes[names(graph).index("exp")] == logits_bytes


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


def test_a_tpu_never_stores_the_cotangent_of_logits() -> None:
    def loss(w, x, labels):
        logits = x @ w
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    args = jnp.ones((128, 1024)), jnp.ones((256, 128)), jnp.zeros(256, int)
    _, _, graph = graph_of(loss, *args, device="v5e")
    assert graph.cotangent_bytes[names(graph).index("dot_general")] == 1
    assert not any(graph.workspace_bytes)


def test_both_factors_of_a_gate_have_their_cotangents_at_once() -> None:
    """That of ``v`` in ``u * tanh(v)`` is written with that of ``u``, in the gate's own step."""

    def gated(weights, x, gate):
        return jnp.sum(((x @ weights[0]) * gate(x @ weights[1])) @ weights[2])

    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
    x = jax.ShapeDtypeStruct((1024, 64), "float32")
    size = 1024 * 64 * 4

    def beside(gate):
        _, _, graph = graph_of(gated, weights, x, gate, device="h200", static_argnums=(2,))
        told = names(graph)
        return graph.workspace_bytes[max(v for v, name in enumerate(told) if name == "mul")]

    # A tanh is an array, and its cotangent is none; a logistic is computed where it is read.
    assert beside(jnp.tanh) - beside(jax.nn.sigmoid) == size
