"""Which sums of products are stored as one array."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.product_sums import biases, stored_sums, sums_in_products
from remat_opt.operation import PRODUCTS
from remat_opt.program import tracing
from tests.compiler_graphs import InStep, model_of, names
from tests.devices import needs_libtpu
from tests.programs import ones

X, W, B = ones(4, 8), ones(8, 8), ones(8)


def two(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w + jnp.sin(x) @ w


def with_a_bias(w: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    return x @ w + (jnp.sin(x) @ w + b)


def in_gates(w: jax.Array, x: jax.Array) -> jax.Array:
    gates = zip(jnp.split(x @ w, 2, axis=1), jnp.split(jnp.sin(x) @ w, 2, axis=1), strict=True)
    return jnp.concatenate([one + other for one, other in gates])


def narrowed(w: jax.Array, x: jax.Array) -> jax.Array:
    return (x @ w).astype(jnp.bfloat16) - (jnp.sin(x) @ w).astype(jnp.bfloat16)


def read_elsewhere(w: jax.Array, x: jax.Array) -> jax.Array:
    first = x @ w
    return first + jnp.sin(x) @ w + jnp.cos(first)


def residual(w: jax.Array, x: jax.Array) -> jax.Array:
    x = x + jnp.sin(x) @ w
    return x + jnp.sin(x) @ w


def of_three(w: jax.Array, x: jax.Array) -> jax.Array:
    """A product goes into two sums, one of them with a product that is read elsewhere."""
    first, second, third = x @ w, jnp.sin(x) @ w, jnp.cos(x) @ w
    return (first + second) * (second + third) + jnp.tanh(third)


@pytest.mark.parametrize(
    ("fn", "sums"),
    [
        (two, 1),
        (with_a_bias, 1),
        (in_gates, 2),
        (narrowed, 1),
        (read_elsewhere, 0),
        (residual, 0),
        (of_three, 0),
    ],
)
def test_sums_of_two_products_that_nothing_else_reads(fn: Callable[..., Any], sums: int) -> None:
    args = (W, X, B) if fn is with_a_bias else (W, X)
    program = tracing.trace(lambda *given: jnp.sum(jnp.tanh(fn(*given)) ** 2), *args)
    found = list(stored_sums(program, Rules(platform="cuda")))
    assert len(found) == sums
    for index, pair in found:
        assert program.equations[index].operation.primitive in ("add", "sub")
        assert {program.equations[one].operation.primitive for one in pair} <= PRODUCTS
        assert pair[0] < pair[1] < index
    for platform in ("tpu", "cpu"):
        assert not list(stored_sums(program, Rules(platform=platform)))


def all_in_one(w: jax.Array, x: jax.Array, b: jax.Array) -> jax.Array:
    return (x @ w + b) + jnp.sin(x) @ w - (jnp.cos(x) @ w).astype(jnp.float32)


@pytest.mark.parametrize(
    ("fn", "products"),
    [
        (two, 2),
        (with_a_bias, 2),
        (in_gates, 0),
        (narrowed, 2),
        (read_elsewhere, 0),
        (of_three, 0),
        (all_in_one, 3),
    ],
)
def test_products_that_others_are_added_to(fn: Callable[..., Any], products: int) -> None:
    args = (W, X, B) if fn in (with_a_bias, all_in_one) else (W, X)
    program = tracing.trace(lambda *given: jnp.sum(jnp.tanh(fn(*given)) ** 2), *args)
    found = sums_in_products(program)
    maker = program.makers()
    assert len(found) == products
    assert {program.equations[maker[one]].operation.primitive for one in found} <= PRODUCTS
    # Each sum but the last is added to another; that one is what the tanh reads.
    reading = {
        made: [e.operation.primitive for e in program.equations if made in e.value_inputs]
        for made in sorted(set(found.values()))
    }
    assert list(reading.values()) == [["sub"]] * (fn is all_in_one) + [["tanh"]] * bool(products)


def test_a_sum_of_many_products_is_written_by_one_after_the_other() -> None:
    """Skips that are summed at the end: no product waits for the others."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        skips = jnp.zeros(())
        for w in weights:
            x = jnp.tanh(x @ w)
            skips = skips + x @ w
        return jnp.sum(jnp.tanh(skips))

    weights = [W] * 4
    program = tracing.trace(loss, weights, X)
    found = sums_in_products(program)
    assert len(found) == 4
    # The first two products write one sum, each of the others one of its own.
    assert len(set(found.values())) == 3
    graph = model_of(program, "v5e").graph
    sums = [vertex for vertex, name in enumerate(names(graph)) if name == "add"]
    # Each reads the one before it, and what its own product multiplies.
    assert [len(graph.predecessors[vertex]) for vertex in sums] == [2, 2, 2]
    assert all(one in graph.predecessors[two] for one, two in itertools.pairwise(sums))


def test_what_is_put_out_is_no_part_of_a_sum() -> None:
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = x @ w
        return jnp.sum(jnp.tanh(first + jnp.sin(x) @ w)), first

    program = tracing.trace(loss, W, X, signature=tracing.Signature(has_aux=True))
    assert not list(stored_sums(program, Rules(platform="cuda")))


def test_what_is_added_to_a_product_is_its_bias() -> None:
    def loss(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        first = x @ w + b
        second = (first @ w).reshape(-1, 2, 4) + b.reshape(2, 4)
        # Neither a residual nor anything computed from it is a bias.
        return jnp.sum(jnp.tanh(x + second.reshape(x.shape) @ w) @ w + jnp.sin(b))

    program = tracing.trace(loss, W, B, X)
    order = [equation.operation.primitive for equation in program.equations]
    products = [index for index, primitive in enumerate(order) if primitive in PRODUCTS]
    assert biases(program) == dict.fromkeys(products[:2], program.arguments[1])


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.tpu
@needs_libtpu
def test_skips_are_added_in_turn_on_a_tpu() -> None:
    """XLA would add them all at the end, and hold what they are computed from until then."""

    def loss(weights: list[Any], x: jax.Array) -> jax.Array:
        skips = jnp.zeros(())
        for gated, skip, out in weights:
            inside, gate = jnp.split(x @ gated, 2, axis=-1)
            y = jnp.tanh(inside) * jax.nn.sigmoid(gate)
            skips = skips + y @ skip
            x = x + y @ out
        return jnp.mean(jax.nn.relu(skips) ** 2)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    weights = [(shape((128, 256)), shape((128, 512)), shape((128, 128)))] * 8
    step = InStep(loss, weights, shape((131_072, 128)), device="v5e")
    plan = step.plan()
    said = plan.predicted.temporary_bytes
    assert said < 0.5 * step.problem.unchanged.peak_bytes
    assert 0.8 * said < step.compiled_bytes(plan) <= said
