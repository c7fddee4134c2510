"""The terms of a sum have one cotangent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.model import model
from remat_opt.gradients import Gradients
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.schedule import plain
from remat_opt.simulator import simulate
from tests.compiler_graphs import compiler_of, graph_of, model_of, names
from tests.programs import ones

W, X = ones(64, 64), ones(256, 64)


def skips(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Each layer's product is summed at the end."""
    found = []
    for w in weights:
        x = jnp.tanh(x @ w)
        found.append(x @ w)
    return jnp.sum(jnp.sin(jnp.tanh(sum(found)) @ weights[0]))


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Each layer's result is summed at the end, and read by the next layer."""
    found = []
    for w in weights:
        x = jnp.tanh(x @ w)
        found.append(x)
    return jnp.sum(jnp.sin(jnp.tanh(sum(found)) @ weights[0]))


@pytest.mark.parametrize("device", ["h200", "v5e", "cpu"])
def test_products_that_are_summed_up_have_one_cotangent(device: str) -> None:
    _, _, graph = graph_of(skips, [W] * 4, X, device=device)
    # Each activation is read by two products, one of which is summed.
    readers = graph.successors()
    summed = [min(readers[v]) for v, name in enumerate(names(graph)) if name == "tanh"]
    whole = [v for v in summed[:-1] if graph.cotangent_bytes[v] == X.nbytes]
    # The first layer's has the array: its step is the last.
    assert whole == summed[:1]


def test_they_are_not_counted_at_once() -> None:
    program, _, graph = graph_of(skips, [W] * 6, X, device="h200")
    apart = model_of(program, "h200", ["sums_share"]).graph

    def most(of) -> int:
        replay = simulate(of, plain(of))
        cotangents = [one for one in replay.lives if one.role == "cotangent"]
        return max(
            sum(one.bytes for one in cotangents if one.first <= moment <= one.last)
            for moment in range(len(replay.moments))
        )

    assert most(apart) > 5 * X.nbytes
    assert most(graph) < 4 * X.nbytes


@pytest.mark.parametrize("device", ["h200", "v5e", "cpu"])
def test_a_bias_shares_no_cotangent(device: str) -> None:
    def biased(weights, x):
        bias, w = weights
        # Stored in another type, and broadcast as the sum is computed.
        bias = jnp.reshape(bias.astype(x.dtype), (1, 64))
        y = x @ w + bias
        return jnp.sum(jnp.sin(jax.nn.gelu(y) @ w)).astype("float32")

    w, x = W.astype("bfloat16"), X.astype("bfloat16")
    _, _, graph = graph_of(biased, (jnp.ones(64), w), x, device=device)
    product = names(graph).index("dot_general")
    assert graph.cotangent_bytes[product] >= x.nbytes


def test_what_others_read_has_its_own_from_then_on() -> None:
    _, _, graph = graph_of(layers, [W] * 4, X, device="h200")
    tanhs = [vertex for vertex, name in enumerate(names(graph)) if name == "tanh"]
    first, second, *_ = tanhs
    assert graph.cotangent_bytes[first] == X.nbytes
    assert graph.cotangent_bytes[second] == 1
    # From the product that reads it, the next vertex, to its own step.
    assert names(graph)[second + 1] == "dot_general"
    assert graph.workspace_bytes[second] >= X.nbytes
    assert graph.workspace_bytes[second + 1] >= X.nbytes


def test_a_residual_stream_has_the_cotangent_of_its_branches() -> None:
    def residual(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = x + jnp.tanh(x @ w) @ w
        return jnp.sum(jnp.sin(x @ weights[0]))

    _, _, graph = graph_of(residual, [W] * 3, X @ W, device="h200")
    branches = [
        vertex
        for vertex, name in enumerate(names(graph))
        if name == "add" and graph.cotangent_bytes[vertex - 1] == 1
    ]
    # The argument has no cotangent, so the first branch has that of the first sum.
    assert len(branches) == 2


def test_an_argument_has_the_cotangent_of_the_sum_until_its_own_begins() -> None:
    def residual(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin((x + jnp.tanh(x @ w) @ w) @ w))

    program = tracing.trace(residual, X, W)
    given = Gradients.CONSUMED
    shared, apart = (
        model(program, linearize(program), compiler_of("h200", off), given).graph
        for off in ((), ("sums_share",))
    )
    told = names(shared)
    _, branch, last = (v for v, name in enumerate(told) if name == "dot_general")
    less = [a - b for a, b in zip(apart.workspace_bytes, shared.workspace_bytes, strict=True)]
    # From the sum's step to the branch's own.
    assert [v for v, size in enumerate(less) if size] == list(range(branch, last))
    assert set(less) == {0, X.nbytes}


@pytest.mark.parametrize(
    ("axes", "side", "written"),
    [
        ((1, 2), 33, True),
        ((1, 2), 32, False),
        # All but the last axis, or the last one alone.
        ((0, 1, 2), 33, False),
        ((3,), 33, False),
    ],
)
def test_what_a_long_sum_between_two_axes_reads_is_written(
    axes: tuple[int, ...], side: int, written: bool
) -> None:
    def gated(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.abs(x @ w)
        return jnp.sum((h * jnp.sin(h.mean(axes, keepdims=True))) @ w)

    x = jax.ShapeDtypeStruct((2, side, side, 64), "float32")
    _, _, graph = graph_of(gated, W, x)
    assert ("abs" in names(graph)) is written
    _, _, other = graph_of(gated, W, x, device="v5e")
    assert "abs" not in names(other)


def test_what_only_a_long_sum_reads_is_not() -> None:
    def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.abs(x @ w).mean((1, 2)) @ w))

    _, _, graph = graph_of(pooled, W, jax.ShapeDtypeStruct((2, 33, 33, 64), "float32"))
    assert "abs" not in names(graph)
