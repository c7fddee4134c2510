"""Which values a compiler stores: facts about XLA's fusion, as the graph shows them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compiler_graphs import (
    InStep,
    W,
    X,
    graph_of,
    names,
    storage_of,
    two_layers,
)
from tests.devices import needs_cuda_plugin


def test_elementwise_results_live_inside_what_reads_them() -> None:
    def loss(w, x):
        return jnp.sum(jnp.exp(jnp.sin(x * w) + 1.0))

    _, _, graph = graph_of(loss, X, X)
    assert names(graph) == ["reduce_sum"]
    # Only the sum is computed, and it is an output: nothing is in temporary memory.
    assert graph.bytes == (0,)


def test_what_an_opaque_equation_makes_or_reads_is_stored() -> None:
    def loss(w, x):
        return jnp.sum(jnp.cos(jnp.sin(x) @ w))

    program, found, graph = graph_of(loss, W, X)
    assert names(graph) == ["sin", "dot_general", "reduce_sum"]
    assert graph.bytes == (X.nbytes, X.nbytes, 0)
    assert graph.predecessors == ((), (0,), (1,))
    # The product's derivative reads the sine; the cosine's, inside the sum, reads the product.
    assert graph.needs == ((), (0,), (1,))
    assert graph.cotangent_bytes == (0, X.nbytes, 4)  # x is not differentiated
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


def test_the_sum_of_a_residual_stream_is_stored() -> None:
    def loss(weights, x):
        for w in weights:
            x = x + x @ w
        return jnp.sum(jnp.sin(x))

    _, _, graph = graph_of(loss, [W] * 3, X)
    # Each sum feeds a product. The last feeds only the loss, and so lives inside it.
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


def test_what_is_read_in_two_places_is_read_twice() -> None:
    """One kernel computes an entry again wherever it reads it."""

    def loss(w, x, moved):
        y = x @ w
        z = jnp.sin(y) * (x @ w.T)
        # Both halves are read in the place of the first, or each in its own.
        pairs = z[:8] * z[8:] if moved else z * (1 - z)
        return jnp.sum(pairs @ w)

    for moved, expected in ((False, 0), (True, 1)):
        _, _, graph = graph_of(functools.partial(loss, moved=moved), W, X, device="h200")
        # What the product reads is stored anyway.
        assert names(graph).count("mul") == 1 + expected


def test_levels_of_an_associative_scan_are_stored() -> None:
    def loss(w, x):
        def combined(one, other):
            return one[0] * other[0], one[1] * other[0] + other[1]

        y = jax.nn.sigmoid(x @ w)
        _, states = jax.lax.associative_scan(combined, (y, 1 - y))
        return jnp.sum(states @ w)

    _, _, graph = graph_of(loss, W, jnp.ones((256, 8)), device="h200")
    # Not all is computed from the first product in one kernel.
    between = len(graph) - names(graph).count("dot_general") - names(graph).count("reduce_sum")
    assert between > 8


def messages(w, x, sources, targets):
    """Rows are looked up, scaled by what the ends have in common, and summed where they go."""
    x = x @ w
    near = jax.nn.sigmoid((x[sources] * x[targets]).sum(-1, keepdims=True))
    return jax.ops.segment_sum(near * x[sources], targets, num_segments=len(x))


def test_nvidia_computes_rows_where_they_are_read_and_added_up() -> None:
    """Five times as many edges as nodes: no array is as long."""
    ends = jnp.arange(5 * len(X)) % len(X)

    def loss(w, x):
        return jnp.sum(jnp.sin(messages(w, x, ends, ends)))

    _, _, graph = graph_of(loss, W, X)
    assert names(graph) == ["dot_general", "reduce_sum", "scatter-add", "reduce_sum"]
    assert max(graph.bytes) == max(graph.cotangent_bytes) == X.nbytes
    assert graph.predecessors == ((), (0,), (0, 1), (2,))
    assert graph.needs[2] == (0, 1)
    _, _, elsewhere = graph_of(loss, W, X, device="v5e")
    assert names(elsewhere).count("gather") == 3


def test_rows_that_a_product_reads_are_stored() -> None:
    places = jnp.arange(2 * len(X)) % len(X)

    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.sin(x @ w)[places] @ w.T))

    _, _, graph = graph_of(loss, W, X)
    assert names(graph) == ["dot_general", "gather", "dot_general", "reduce_sum"]
    assert graph.bytes == (X.nbytes, 2 * X.nbytes, 2 * X.nbytes, 0)


@pytest.mark.parametrize("rows", [16, 4096])
def test_rows_are_computed_again_unless_that_reads_more_than_they_take(rows: int) -> None:
    """Rows of a small table are read from cache, those of two tables as large as the result not."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    places = jax.ShapeDtypeStruct((4096,), "int32")

    def loss(w, first, second, one, other):
        both = (first @ w)[one] + (second @ w)[other]
        return jnp.sum(jnp.sin(both.sum(-1, keepdims=True) * both).sum(-1))

    table = shape((rows, 64))
    _, _, graph = graph_of(loss, shape((64, 64)), table, table, places, places)
    stored = [size for size in graph.bytes if size == 4 * 4096 * 64]
    assert len(stored) == (0 if rows == 16 else 3)


@pytest.mark.cuda
@needs_cuda_plugin
def test_a_graph_network_takes_what_is_expected() -> None:
    def loss(weights, x, sources, targets):
        for w in weights:
            x = jnp.tanh(messages(w, x, sources, targets))
        return jnp.sum(x**2)

    shape = jax.ShapeDtypeStruct
    edges = shape((262_144,), "int32")
    weights = [shape((256, 256), "float32")] * 3
    step = InStep(loss, weights, shape((32_768, 256), "float32"), edges, edges)
    nodes = 4 * 32_768 * 256
    assert step.problem.unchanged.peak_bytes == pytest.approx(step.unplanned_bytes(), rel=0.15)
    plan = step.plan()
    assert plan.predicted.temporary_bytes < 6 * nodes  # an array of all edges takes 8
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.15)


def test_a_tpu_stores_a_concatenation_that_is_read_twice() -> None:
    """Like DenseNet's, of which a normalisation takes the mean before reading it again."""

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


@pytest.mark.parametrize("together", [jnp.stack, jnp.concatenate])
def test_a_tpu_stores_what_is_put_together_and_multiplied_by_itself(together: Any) -> None:
    """Like the features of a recommender, all of them with one another."""

    def loss(w, x, other):
        side = together([x, x @ w]).reshape(2, *x.shape)
        products = jnp.einsum("iab,jab->ija", side, side if other is None else other)
        return jnp.sum(jnp.tanh(products))

    w, x = jnp.ones((128, 128)), jnp.ones((256, 128))
    for device, other, stored in (("v5e", None, True), ("v5e", jnp.ones((2, 256, 128)), False)):
        _, _, graph = graph_of(functools.partial(loss, other=other), w, x, device=device)
        assert any(name in ("stack", "concatenate") for name in names(graph)) is stored


def test_reshapes_are_other_names_of_the_same_bytes() -> None:
    def loss(w, x):
        y = (x @ w).reshape(4, 32).T.reshape(-1, 8)
        return jnp.sum(jnp.sin(y @ w))

    program, _, graph = graph_of(loss, W, X)
    assert names(graph) == ["dot_general", "dot_general", "reduce_sum"]
    assert graph.predecessors[1] == (0,)
    assert 0 in graph.needs[1]
    assert storage_of(program).vertex_of[program.equations[0].outputs[0]] == 0


def test_outputs_cost_no_temporary_memory() -> None:
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(y)), (y.reshape(-1), jnp.exp(y))

    _, _, graph = graph_of(loss, W, X, has_aux=True)
    by_name = dict(zip(names(graph), graph.bytes, strict=True))
    assert by_name == {"dot_general": 0, "exp": 0, "reduce_sum": 0}


def test_a_tpu_computes_operands_of_products_as_it_reads_them() -> None:
    big = [jnp.ones((128, 128))] * 2, jnp.ones((256, 128))
    for device in ("cpu", "h200"):
        _, _, graph = graph_of(two_layers, *big, device=device)
        assert names(graph) == ["dot_general", "sin", "dot_general", "reduce_sum"]
    layers = functools.partial(two_layers, act=jnp.tanh)
    _, _, graph = graph_of(layers, *big, device="v5e")
    assert names(graph) == ["dot_general", "dot_general", "reduce_sum"]
    # The second product's derivative reads the tanh, which is computed from the first, and its own
    # result, of which its cotangent is computed.
    assert graph.needs == ((), (0, 1), (1,))
    # Only the cotangent that the second product's backward step writes is stored: its own is a
    # derivative times a scalar.
    assert graph.cotangent_bytes == (256 * 128 * 2, 1, 4)
    # A sine would be too expensive to compute again. Its cotangent is in the same kernel as the
    # product's.
    _, _, graph = graph_of(two_layers, *big, device="v5e")
    assert names(graph) == ["dot_general", "sin", "dot_general", "reduce_sum"]
    assert graph.cotangent_bytes[1] == 1


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
    # Products, the sum of the first two, expensive results, the new state, what the third reads.
    each = ["dot_general", "dot_general", "add", "tanh", "add", "tanh", "dot_general"]
    assert names(graph)[:14] == each * 2
