"""What XLA for TPU stores of its products' operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.measurement.compilation import compiled_memory
from tests.compiler_graphs import graph_of, names
from tests.devices import needs_libtpu

TABLE, PLACES = jnp.ones((640, 128)), jnp.zeros(640, int)


def added_up(weight: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """A product of sums of rows."""
    sums = jnp.zeros((256, 128)).at[places].add(jnp.tanh(rows @ weight))
    return jnp.sum(jnp.sin(sums @ weight))


def added_up_and_joined(weight: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """A product of such sums beside something else."""
    sums = jnp.zeros((256, 128)).at[places].add(jnp.tanh(rows @ weight))
    joined = jnp.concatenate([sums, rows[:256]], axis=1)
    return jnp.sum(jnp.sin(joined @ jnp.concatenate([weight, weight])))


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
    # The sums are read only there, what is summed elsewhere too.
    assert sizes["cumsum"] == full // 2
    assert sizes["reduce_window_max"] == full
    assert "concatenate" not in sizes
    _, _, graph = graph_of(functools.partial(loss, twice=True), *args, device="v5e")
    sizes = dict(zip(names(graph), graph.bytes, strict=True))
    # One array of half the width for both.
    assert sizes["concatenate"] == full
    assert sizes["cumsum"] == full


def test_a_tpu_stores_what_products_read_with_its_bias_and_scale() -> None:
    """Like the queries of attention: one kernel multiplies, adds, scales and rounds."""

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
    # The backward step is a product: the cotangent that it reads is not overwritten.
    assert graph.cotangent_bytes[0] == full
    assert not graph.in_place[0]
    _, _, unscaled = graph_of(scaled, *args, device="v5e")
    assert names(unscaled)[:2] == ["dot_general", "dot_general"]
    assert unscaled.bytes[:2] == (full, full // 2)
    _, _, shared = graph_of(read_twice, *args, device="v5e")
    assert names(shared)[0] == "dot_general"
    assert shared.bytes[0] == full


def test_a_tpu_computes_in_each_of_several_products_what_they_read() -> None:
    def loss(weights, x):
        first = x @ weights[0]
        shared = jax.nn.relu(first + x)
        return jnp.sum(jnp.sin(shared @ weights[1]) + jnp.cos(shared @ weights[2]))

    weights, x = [jnp.ones((128, 128))] * 3, jnp.ones((256, 128))
    _, _, graph = graph_of(loss, weights, x, device="v5e")
    assert names(graph)[:2] == ["dot_general", "add"]
    assert graph.bytes[:2] == (256 * 128 * 4, 256 * 128 * 4)


@pytest.mark.parametrize(("gate", "arrays"), [(jax.nn.silu, 1), (jax.nn.gelu, 2)])
def test_the_halves_of_a_gated_layer_share_a_cotangent(gate, arrays) -> None:
    """Unless the gate's derivative is too much to be computed in several products."""

    def loss(weights, x):
        hidden = gate(x @ weights[0]) * (x @ weights[1])
        return jnp.sum(jnp.sin(hidden @ weights[2]))

    weights, x = [jnp.ones((128, 128), jnp.bfloat16)] * 3, jnp.ones((256, 128), jnp.bfloat16)
    _, _, graph = graph_of(loss, weights, x, device="v5e")
    assert names(graph)[:3] == ["dot_general"] * 3
    full = 256 * 128 * 2
    assert sum(size == full for size in graph.cotangent_bytes[:2]) == arrays
    assert all(graph.cotangent_bytes[:2])
    if arrays == 1:
        assert graph.cotangent_bytes[0] == full
        assert 0 in graph.needs[0]
        assert 1 in graph.needs[1]


def test_sums_of_rows_are_rounded_only_in_a_concatenation() -> None:
    given, full = (jnp.ones((128, 128)), TABLE, PLACES), 256 * 128 * 4
    _, _, graph = graph_of(added_up, *given, device="v5e")
    assert graph.bytes[names(graph).index("scatter-add")] == full
    _, _, graph = graph_of(added_up_and_joined, *given, device="v5e")
    assert graph.bytes[names(graph).index("scatter-add")] == full // 2


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_only_a_concatenation_of_such_sums_is_rounded_on_a_tpu(joined: bool) -> None:
    def loss(weights: list[jax.Array], rows: jax.Array, places: jax.Array) -> jax.Array:
        sums = jnp.zeros(rows.shape).at[places].add(jnp.tanh(rows @ weights[0]))
        read = jnp.concatenate([sums, rows], axis=1) if joined else sums
        return jnp.mean((jax.nn.gelu(read @ weights[1]) @ weights[2]) ** 2)

    def shape(*extents: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, dtype)

    # Large enough that nothing stays in vector memory.
    width = 2048 if joined else 1024
    weights = [shape(1024, 1024), shape(width, 2048), shape(2048, 1024)]
    given = weights, shape(32768, 1024), shape(32768, dtype="int32")
    memory = compiled_memory(jax.grad(loss), *given, device="v5e")
    large = [one for one in memory.buffers if one.size_bytes > 2**20]
    made = {place: one for one in large for place in one.made_by}
    sums = made["jit(loss)/jvp()/scatter-add"]
    # Read by the gradient of the weights, which comes after that of the GELU.
    late = made["jit(loss)/transpose(jvp())/add_any"].first_step
    assert sums.type == "f32[32768,1024]"
    assert (sums.last_step > late) is not joined
    if joined:
        read = made["jit(loss)/jvp()/concatenate"]
        assert read.type == "bf16[32768,2048]"
        assert read.last_step > late
