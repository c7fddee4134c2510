"""What the graph says about each vertex, besides what is stored."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import networkx
import pytest
from jax import lax

from tests.compiler_graphs import InStep, W, X, graph_of, names, storage_of
from tests.devices import needs_libtpu


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


def sorted_rows(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers that sort their rows, and put what is computed of them back."""
    for w in weights:
        order = jnp.argsort(x[:, 0])
        x = x + jnp.zeros_like(x).at[order].set(jnp.tanh(x[order] @ w))
    return jnp.mean(x**2)


def test_where_a_scatter_writes_is_found_out_in_its_backward_step() -> None:
    _, found, graph = graph_of(sorted_rows, [W, W], X)
    scatters = [v for v, name in enumerate(names(graph)) if name == "scatter"]
    assert len(scatters) == 2
    for vertex in scatters:
        assert graph.internal_bytes[vertex] == 0
        assert graph.workspace_bytes[vertex] > 0
        assert not {"tanh", "dot_general"} & {names(graph)[v] for v in graph.needs[vertex]}
        assert all("i32" in found.labels[v] for v in graph.needs[vertex])


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
def test_sorted_rows_take_what_was_predicted_on_a_tpu() -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    step = InStep(sorted_rows, [shape((512, 512))] * 4, shape((65536, 512)), device="v5e")
    assert step.unplanned_bytes() == pytest.approx(step.problem.unchanged.peak_bytes, rel=0.15)


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
    assert set(storage_of(program).vertex_of.values()) == set(range(len(graph)))
    assert networkx.is_directed_acyclic_graph(graph.to_networkx())
    dots = [e for e in program.equations if e.operation.primitive == "dot_general"]
    assert graph.forward_flops >= len(dots) * 2 * 16 * 8 * 8
    assert all(seconds > 0 for seconds in graph.seconds)


@pytest.mark.parametrize("device", ["h200", "v5e", "cpu"])
def test_the_derivative_of_a_softplus_reads_its_operand(device: str) -> None:
    """Its rule reads the result as it computes that itself, within the kernel."""

    def loss(w, x):
        return jnp.sum(jnp.square(jax.nn.softplus(x @ w) @ w))

    _, _, graph = graph_of(loss, W, X, device=device)
    product = names(graph).index("dot_general")
    assert not any(graph.internal_bytes)
    assert any(product in needs for needs in graph.needs)
