"""Products of a value with itself: how many cotangents there are at once."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt import apply_plan, make_plan
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import rewrites
from remat_opt.compilers.squares import apart, once, squares
from remat_opt.program import tracing
from remat_opt.schedule import Region, Schedule, plain, unchanged
from tests.compiler_graphs import InStep, changed, graph_of, model_of, names
from tests.devices import needs_cuda_plugin
from tests.programs import ones

W, X = ones(64, 64), ones(256, 64)


def similar(w: jax.Array, x: jax.Array) -> jax.Array:
    features = jnp.tanh(x @ w)
    return jnp.sum(jnp.sin(features.T @ features))


def different(w: jax.Array, x: jax.Array) -> jax.Array:
    features = jnp.tanh(x @ w)
    return jnp.sum(jnp.sin(features.T @ jnp.tanh(features)))


def gram(w: jax.Array, x: jax.Array) -> jax.Array:
    """Products of features within groups, each operand reshaped by itself."""
    features = jnp.tanh(x @ w)
    groups = (features.reshape(4, -1, w.shape[1]) for _ in range(2))
    return jnp.sum(jnp.sin(jnp.einsum("nbd,nbe->nde", *groups)))


def similarities(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """How alike the rows are that some layers make."""
    for first, second in weights:
        x = x + jax.nn.silu(x @ first) @ second
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.mean(jax.nn.logsumexp(10 * (x @ x.T), axis=-1))


def test_operands_may_have_other_shapes_but_not_other_values() -> None:
    for fn, count in ((similar, 1), (gram, 1), (different, 0)):
        assert len(list(squares(tracing.trace(fn, W, X)))) == count


def second_cotangent(fn, *args, device: str) -> int:
    """Bytes of the second one, held in the backward step of a function's last product."""
    program = tracing.trace(fn, *args)
    found = [model_of(program, device, [off]).graph for off in ("squares_once", "squares")]
    product = max(v for v, name in enumerate(names(found[0])) if name == "dot_general")
    of_all, without = (graph.workspace_bytes[product] for graph in found)
    return of_all - without


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("h200", 0)])
def test_a_gpu_adds_the_second_cotangent_where_the_first_is(device: str, times: int) -> None:
    for fn, expected in ((similar, X.nbytes), (different, 0)):
        assert second_cotangent(fn, W, X, device=device) == times * expected


def test_a_tpu_adds_the_second_cotangent_as_it_writes_it() -> None:
    """So there are two arrays only if the sum is rounded, for the product that reads it."""

    def similar(w: jax.Array, x: jax.Array, narrow: bool) -> jax.Array:
        features = x @ w if narrow else jnp.tanh(x @ w)
        products = jnp.einsum("ab,cb->ac", features, features)
        return jnp.sum(jnp.sin(products)) + (0 if narrow else jnp.sum(features))

    w, x = jnp.ones((128, 128)), jnp.ones((256, 128))
    for narrow, expected in ((True, x.nbytes), (False, 0)):
        fn = functools.partial(similar, narrow=narrow)
        assert second_cotangent(fn, w, x, device="v5e") == expected


def test_a_tpu_writes_both_cotangents_of_batched_products() -> None:
    def interactions(w: jax.Array, x: jax.Array) -> jax.Array:
        features = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin(jnp.einsum("bif,bjf->bij", features, features)))

    x = jnp.ones((64, 8, 128))
    assert second_cotangent(interactions, jnp.ones((128, 128)), x, device="v5e") == x.nbytes


def pairs(w: jax.Array, x: jax.Array, picks: bool = False) -> jax.Array:
    """Nine features of each example, put together, multiplied with one another."""
    features = jnp.stack([jnp.sin(x @ w) * number for number in range(9)], axis=1)
    products = jnp.einsum("bif,bjf->bij", features, features)
    return jnp.sum(jnp.sin(products[:, *jnp.triu_indices(9)] if picks else products))


def test_cotangents_of_what_was_put_together_are_copied_without_padding() -> None:
    w, x = jnp.ones((128, 128)), jnp.ones((64, 128))
    assert second_cotangent(pairs, w, x, device="v5e") == 64 * 9 * 128 * 4


def test_the_cotangent_of_what_is_looked_up_is_rounded_for_the_products() -> None:
    fn = functools.partial(pairs, picks=True)
    program = tracing.trace(fn, jnp.ones((128, 128)), jnp.ones((64, 128)))
    for off, word in (((), 2), (["cotangents_rounded"], 4)):
        graph = model_of(program, "v5e", off).graph
        product = max(v for v, name in enumerate(names(graph)) if name == "dot_general")
        assert graph.cotangent_bytes[product] == 64 * 16 * 128 * word


def flat(features: jax.Array) -> jax.Array:
    return features.reshape(4, -1, 4)


@pytest.mark.parametrize(
    ("product", "is_symmetric"),
    [
        (lambda x: x.T @ x, True),
        (lambda x: jnp.einsum("ab,ac->bc", x, x), True),
        (lambda x: jnp.einsum("nbd,nbe->nde", flat(x), flat(x)), True),
        # Rows of one with columns of the other.
        (lambda x: x[:64] @ x[:64], False),
        (lambda x: jnp.einsum("nbd,nce->nbdce", flat(x), flat(x)), False),
        (lambda x: jnp.einsum("nbd,neb->nde", flat(x)[:, :4], flat(x)[:, :4]), False),
        # The result is larger than the value.
        (lambda x: x @ x.T, False),
    ],
)
def test_one_product_is_enough_where_rows_and_columns_can_be_exchanged(
    product, is_symmetric: bool
) -> None:
    program = tracing.trace(lambda x: jnp.sum(product(jnp.sin(x))), X)
    for platform in ("cpu", "tpu"):
        assert len(once(program, Rules(platform=platform))) == is_symmetric
    assert not once(program, Rules(platform="cuda"))


def test_on_a_mesh_only_batched_products_are_symmetric() -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    x = jax.ShapeDtypeStruct((256, 8, 8), "float32", sharding=split)
    for product, count in (("bij,bkj->bik", 1), ("bij,bik->jk", 0)):
        program = tracing.trace(lambda x, to=product: jnp.sum(jnp.einsum(to, x, x)), x)
        assert len(list(squares(program))) == 1
        assert len(once(program, Rules(platform="tpu"))) == count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_single_product_gives_the_same_derivatives(dtype: str) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        features = jnp.sin(x @ w).reshape(8, -1, 16)
        products = jnp.einsum("bif,bjf->bij", features, features)
        gram = jnp.tanh(x @ w).T @ jnp.sin(x)
        weighted = jnp.sin(products) * jnp.arange(products.shape[-1])
        return jnp.sum(jnp.abs(weighted)) + jnp.sum(jnp.abs(gram.T @ gram))

    drawn = [jax.random.normal(jax.random.key(seed), (16, 16)) for seed in range(2)]
    w, x = (one.astype(dtype) for one in drawn)
    # So small, it may gain nothing.
    least = dataclasses.replace(make_plan(loss, w, x, device="v5e"), unchanged=False)
    planned = apply_plan(least, loss)
    ways = rewrites(tracing.trace(loss, w, x), Rules(platform="tpu"), recomputes=True)
    assert len(ways.symmetric) == 2

    def close(one: jax.Array, other: jax.Array) -> None:
        most = float(jnp.abs(other).max()) * (0.02 if dtype == "bfloat16" else 1e-5)
        np.testing.assert_allclose(one, other, atol=most, rtol=0)

    for derivative in (
        lambda fn: jax.grad(fn, argnums=(0, 1))(w, x),
        lambda fn: jax.jvp(fn, (w, x), (x, w)),
        lambda fn: jax.jvp(jax.grad(fn), (w, x), (x, w)),
        lambda fn: jax.vmap(jax.grad(fn), (None, 0))(w, jnp.stack([x, w])),
    ):
        jax.tree.map(close, derivative(planned), derivative(loss))


def test_only_small_operands_are_multiplied_side_by_side() -> None:
    rules = Rules(platform="cuda")
    for rows, merged in ((5504, True), (5632, False)):
        x = jax.ShapeDtypeStruct((rows, 512), "bfloat16")
        program = tracing.trace(lambda x: jnp.sum(jnp.sin(x @ x.T)), x)
        assert bool(apart(program, rules)) is merged
        assert not apart(program, Rules(platform="cpu"))


def test_both_cotangents_are_side_by_side_only_in_the_unchanged_function() -> None:
    program, found, graph = graph_of(similar, W, X, device="h200")
    product = max(v for v, name in enumerate(names(graph)) if name == "dot_general")
    multiplied = program.equations[found.roots[product]]
    both = 2 * program.types[multiplied.outputs[0]].bytes
    # Their product is twice as large as the value's cotangent.
    both += program.types[multiplied.value_inputs[0]].bytes
    every = tuple(range(len(graph)))
    for schedule, expected in (
        (unchanged(graph), both),
        (plain(graph), 0),
        (Schedule(regions=(Region(vertices=every),)), 0),
    ):
        size = changed(found, schedule).workspace_bytes[product] - graph.workspace_bytes[product]
        assert size == expected


@pytest.mark.cuda
@needs_cuda_plugin
def test_cotangents_of_a_value_times_itself_where_nothing_is_recomputed() -> None:
    """Side by side in the unchanged function; apart in a plan."""

    def interactions(w: jax.Array, x: jax.Array) -> jax.Array:
        features = (x @ w).reshape(len(x), 8, 64)
        return jnp.sum(jnp.sin(jnp.einsum("bif,bjf->bij", features, features)) ** 2)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    step = InStep(interactions, shape((256, 512)), shape((16_384, 256)), device="h200")
    expected = step.problem.unchanged.peak_bytes
    assert step.unplanned_bytes() == pytest.approx(expected, rel=0.02)
    plan = step.plan()
    assert not any(stage.checkpointed for stage in plan.stages)
    assert plan.predicted.temporary_bytes < 0.7 * expected
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.07)


@pytest.mark.cuda
@pytest.mark.slow
@needs_cuda_plugin
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_similarities_take_what_is_predicted_and_less_than_merged(dtype: str) -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    weights = [(shape((512, 2048)), shape((2048, 512))) for _ in range(2)]
    step = InStep(similarities, weights, shape((4096, 512)), device="h200")
    plan = step.plan()
    compiled = step.compiled_bytes(plan)
    assert plan.predicted.temporary_bytes == pytest.approx(compiled, rel=0.05)
    # The cotangents take 64 MiB each in float32, which is too large to merge.
    merged = step.compiled_bytes(plan, ["squares_apart"])
    assert (merged > 1.8 * compiled) is (dtype == "bfloat16")


@pytest.mark.cuda
@pytest.mark.slow
@needs_cuda_plugin
def test_nothing_keeps_the_cotangents_from_their_sum() -> None:
    def interactions(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        first, *others = weights
        features = jnp.tanh(jnp.einsum("bd,dif->bif", x, first))
        x = jnp.einsum("bif,bjf->bij", features, features).reshape(len(x), -1)
        for w in others:
            x = jnp.sin(x @ w)
        return jnp.mean(x)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    layers = [shape((a, b)) for a, b in itertools.pairwise([81, 2048, 2048, 2048, 64])]
    step = InStep(interactions, [shape((64, 9, 512)), *layers], shape((8192, 64)), device="h200")
    plan = step.plan()
    assert any(stage.checkpointed for stage in plan.stages)
    assert plan.predicted.temporary_bytes == pytest.approx(step.compiled_bytes(plan), rel=0.05)
