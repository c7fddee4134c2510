"""Batched products: in how many orders, and in which type, their cotangents are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.compilers.storage import Storage
from remat_opt.measurement import compilation
from remat_opt.program import tracing
from remat_opt.schedule import Region, Schedule
from tests.compiler_graphs import changed, graph_of, model_of, names, storage_of
from tests.devices import needs_cuda_plugin
from tests.programs import ones

SLOW = [pytest.mark.slow, pytest.mark.versions]

BATCH, TOKENS, GROUPS, HEADS, DEPTH = 2, 16, 3, 4, 8
QUERIES = ones(BATCH, TOKENS, GROUPS, HEADS, DEPTH)
KEYS = ones(BATCH, TOKENS, GROUPS, DEPTH)
SCORES = 4 * BATCH * TOKENS * TOKENS * GROUPS * HEADS


def loss(both: Any, *, form: str) -> jax.Array:
    first, second = both
    return jnp.sum(jnp.sin(jnp.einsum(form, first, second)))


def workspace_bytes(form: str, *arrays: Any, device: str = "h200") -> int:
    """What the backward step of the one product holds beside its cotangent."""
    _, _, graph = graph_of(lambda both: loss(both, form=form), arrays, device=device)
    return graph.workspace_bytes[names(graph).index("dot_general")]


def test_merged_axes_that_both_operands_end_or_begin_with_take_a_second_array() -> None:
    assert workspace_bytes("bqghd,bkgd->bgqhk", QUERIES, KEYS) == SCORES
    first = jnp.ones((BATCH, GROUPS, DEPTH, TOKENS, HEADS))
    second = jnp.ones((BATCH, GROUPS, DEPTH, TOKENS))
    assert workspace_bytes("bgdqh,bgdk->bgqhk", first, second) == SCORES


def test_one_array_is_read_if_just_one_operand_begins_with_what_is_contracted() -> None:
    keys = jnp.ones((BATCH, GROUPS, DEPTH, TOKENS))
    assert workspace_bytes("bqghd,bgdk->bgqhk", QUERIES, keys) == 0


def test_one_array_is_read_of_single_axes_or_without_a_batch_or_by_other_compilers() -> None:
    assert workspace_bytes("bqgd,bkgd->bgqk", KEYS, KEYS) == 0
    assert workspace_bytes("bqd,kd->bqk", jnp.ones((2, 16, 8)), jnp.ones((16, 8))) == 0
    for one in (QUERIES[:1, :, :1], QUERIES[:1], QUERIES[:, :, :1]):
        assert workspace_bytes("bqghd,bkgd->bgqhk", one, one[:, :, :, 0]) == 0
    assert workspace_bytes("bqghd,bkgd->bgqhk", QUERIES, KEYS, device="cpu") == 0


def test_one_array_is_read_of_a_product_with_a_constant() -> None:
    _, _, graph = graph_of(lambda queries: loss((queries, KEYS), form="bqghd,bkgd->bgqhk"), QUERIES)
    assert graph.workspace_bytes[names(graph).index("dot_general")] == 0


@pytest.mark.parametrize(
    ("algorithm", "width"), [("BF16_BF16_F32", 2), ("F32_F32_F32", 4), (None, 4)]
)
def test_a_products_algorithm_says_in_which_type_it_reads(
    algorithm: str | None, width: int
) -> None:
    def fn(both: Any) -> jax.Array:
        precision = getattr(jax.lax.DotAlgorithmPreset, algorithm) if algorithm else None
        return jnp.sum(jnp.sin(jnp.einsum("bqd,bkd->bqk", *both, precision=precision)))

    arrays = jnp.ones((2, 16, 8)), jnp.ones((2, 32, 8))
    _, found, graph = graph_of(fn, arrays)
    product = names(graph).index("dot_general")
    assert graph.bytes[product] == 4 * 2 * 16 * 32
    assert graph.cotangent_bytes[product] == width * 2 * 16 * 32
    # Between two checkpoints it is an array of the value's own type.
    every = tuple(range(len(graph)))
    regions = Region(vertices=every[: product + 1]), Region(vertices=every[product + 1 :])
    cotangent_bytes = changed(found, Schedule(regions=regions)).cotangent_bytes[product]
    assert cotangent_bytes == 4 * 2 * 16 * 32


def weighted(form: str, soften: Any, dtype: str = "bfloat16") -> Storage:
    """What is stored of grouped attention whose scores have this form."""
    queries, keys = QUERIES.astype(dtype), KEYS.astype(dtype)

    def fn(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        weights = soften(jnp.einsum(f"bqghd,bkgd->{form}", queries, keys)).astype(dtype)
        return jnp.sum(jnp.sin(jnp.einsum(f"{form},bkgd->bqghd", weights, values)))

    return storage_of(tracing.trace(fn, queries, keys, keys))


def widened(scores: jax.Array) -> jax.Array:
    return jax.nn.softmax(scores.astype(jnp.float32))


@pytest.mark.parametrize(
    ("form", "soften", "again"),
    [
        # One kernel computes rows that lie together; not if it has to leave exponentials.
        ("bgqhk", jax.nn.softmax, False),
        ("bgqhk", widened, True),
        ("bgqhk", jnp.square, False),
        ("bghqk", jnp.square, True),
        ("bghqk", jax.nn.softmax, True),
        ("bghqk", widened, True),
    ],
)
def test_weights_that_are_read_in_two_orders_are_no_arrays(
    form: str, soften: Any, again: bool
) -> None:
    found = weighted(form, soften)
    (read,) = found.batched_reads
    assert read.again is again
    assert (read.operand in found.stored) is not again
    assert read.scores in found.stored
    # Two bytes for each, or as wide as what is copied to another order.
    assert read.workspace_bytes == (SCORES // 2 if again else 0)
    assert read.comes_last is (form == "bgqhk" and soften is widened)
    assert read.copies_late is (form == "bgqhk" and soften is jax.nn.softmax)


def test_a_cotangent_is_copied_to_the_order_of_exponentials_in_their_type() -> None:
    for form, width in (("bgqhk", 2), ("bghqk", 4)):
        found = weighted(form, widened)
        (exponentials,) = found.weights_of
        assert found.cotangent_bytes([exponentials]) == width * SCORES // 4


def test_wide_weights_with_a_short_innermost_axis_are_kept() -> None:
    (read,) = weighted("bghqk", jax.nn.softmax, "float32").batched_reads
    assert not read.again


def test_operands_that_are_no_merged_axes_or_products_themselves_are_not_found() -> None:
    assert not weighted("bgqhk", lambda scores: scores).batched_reads
    keys = jnp.sin(KEYS)

    def fn(both: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.einsum("bqgd,bkgd->bgqk", jnp.sin(both), jnp.cos(both))))

    assert not storage_of(tracing.trace(fn, keys)).batched_reads


def attention(form: str, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    batch, tokens, groups, heads, depth = queries.shape
    if form == "library":
        flat = queries.reshape(batch, tokens, groups * heads, depth)
        return jax.nn.dot_product_attention(flat, keys, values, is_causal=True)
    order = "bghqk" if form.startswith("apart") else "bgqhk"
    scores = jnp.einsum(f"bqghd,bkgd->{order}", queries, keys) / depth**0.5
    if not form.endswith("narrow"):
        scores = scores.astype(jnp.float32)
    if form.endswith("capped"):
        scores = 50 * jnp.tanh(scores / 50)
    weights = jax.nn.softmax(scores).astype(queries.dtype)
    return jnp.einsum(f"{order},bkgd->bqghd", weights, values)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.versions
@needs_cuda_plugin
@pytest.mark.parametrize("form", ["library", "products", "apart, narrow"])
def test_a_plan_of_grouped_attention_takes_what_it_says(form: str) -> None:
    loss, *args = grouped_layers(form, 2)
    plan = remat_opt.make_plan(loss, *args, device="h200", gradients="results")
    found = compilation.measure(
        jax.value_and_grad(remat_opt.apply_plan(plan, loss)), *args, device="h200"
    )
    assert plan.predicted.temporary_bytes == pytest.approx(found.temporary_bytes, rel=0.06)


@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize(
    "form",
    [
        "apart, narrow",
        *(pytest.param(one, marks=SLOW) for one in ("products, narrow", "products, capped")),
    ],
)
def test_grouped_attention_as_it_is_takes_what_is_expected(form: str) -> None:
    loss, *args = grouped_layers(form, 1)
    expected = model_of(tracing.trace(loss, *args)).unchanged_peak_bytes()
    found = compilation.measure(jax.value_and_grad(loss), *args, device="h200")
    assert expected == pytest.approx(found.temporary_bytes, rel=0.06)


def grouped_layers(form: str, layers: int) -> tuple[Any, ...]:
    """Layers of grouped attention as a loss, and its arguments."""
    batch, tokens, groups, heads, depth = 2, 1024, 4, 2, 64
    width = groups * heads * depth

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16)
        for layer in layers:
            q, k, v, out = (one.astype(jnp.bfloat16) for one in layer)
            shape = batch, tokens, groups, depth
            queries = (x @ q).reshape(batch, tokens, groups, heads, depth)
            mixed = attention(form, queries, (x @ k).reshape(shape), (x @ v).reshape(shape))
            x = x + mixed.reshape(x.shape) @ out
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    few = width // heads
    layer = array(width, width), array(width, few), array(width, few), array(width, width)
    return loss, [layer] * layers, array(batch, tokens, width)
