"""Gathers that pick one element of each row, and what their gradients hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.effects import Held
from remat_opt.compilers.row_gathers import is_row_gather, picking
from remat_opt.program import tracing
from remat_opt.schedule import plain
from tests.compiler_graphs import W, X, cross_entropy, graph_of, held_bytes, whole

ROWS = jnp.zeros(X.shape[0], int)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.take_along_axis(x, ROWS[:, None], axis=1), True),
        (lambda x: jnp.take_along_axis(x, ROWS[:, None], axis=1, mode="clip"), True),
        # Two from each row, whole rows, and one from each column.
        (lambda x: jnp.take_along_axis(x, jnp.stack([ROWS, ROWS], axis=1), axis=1), False),
        (lambda x: x[ROWS], False),
        (lambda x: jnp.take_along_axis(x, jnp.zeros((1, X.shape[1]), int), axis=0), False),
    ],
)
def test_what_picks_one_element_of_each_row(
    fn: Callable[[jax.Array], jax.Array], expected: bool
) -> None:
    program = tracing.trace(lambda x: jnp.sum(fn(x)), X)
    gathers = [one.operation for one in program.equations if one.operation.primitive == "gather"]
    assert [is_row_gather(one) for one in gathers] == [expected]
    assert not any(
        is_row_gather(one.operation)
        for one in program.equations
        if one.operation.primitive != "gather"
    )


def test_the_function_as_it_is_has_a_scatter_and_both_arrays_on_nvidia() -> None:
    size = X.shape[0] * W.shape[1] * 4
    for device, unchanged in (("h200", size), ("cpu", 0), ("v5e", 0)):
        _, found, graph = graph_of(cross_entropy, W, X, device=device)
        assert held_bytes(found, None, Held) == unchanged
        for schedule in (plain(graph), whole(graph)):
            assert held_bytes(found, schedule, Held) == 0


def test_only_what_products_write_is_overwritten() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return cross_entropy(w, x) + jnp.sum(jnp.take_along_axis(jnp.sin(w), ROWS[:8, None], 1))

    _, found, _ = graph_of(loss, W, X)
    assert held_bytes(found, None, Held) == X.shape[0] * W.shape[1] * 4


def test_what_is_picked_from_is_what_was_widened() -> None:
    def loss(w: jax.Array, x: jax.Array, between: Any) -> jax.Array:
        logits = between(x @ w)
        return jnp.mean(jnp.take_along_axis(logits, ROWS[:, None], axis=-1))

    for dtype, between, narrow in (
        ("bfloat16", lambda y: y.astype(jnp.float32), "bfloat16"),
        ("bfloat16", lambda y: y.astype(jnp.float32).reshape(y.shape), "bfloat16"),
        ("bfloat16", lambda y: y, None),
        ("bfloat16", lambda y: y.astype(jnp.float32) * 2, None),
        ("float32", lambda y: y.astype(jnp.bfloat16), None),
        ("float16", lambda y: y.astype(jnp.bfloat16), None),
    ):
        fn = functools.partial(loss, between=between)
        program = tracing.trace(fn, W.astype(dtype), X.astype(dtype))
        found = picking(program, Rules(platform="tpu"))
        assert list(found.values()) == ([narrow] if narrow else [])
        # Elsewhere a gather reads what it read before.
        read = [
            e.operation.inputs[0].dtype for e in program.equations if is_row_gather(e.operation)
        ]
        assert list(picking(program, Rules(platform="cuda")).values()) == read
        assert not picking(program, Rules(platform="cpu"))


def test_a_bias_is_added_by_the_product() -> None:
    size = X.shape[0] * W.shape[1] * 4

    def biased(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        logits = x @ weights[0] + weights[1]
        picked = jnp.take_along_axis(logits, ROWS[:, None], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)) - jnp.mean(picked)

    def filled(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        logits = x @ weights[0] + jnp.full(weights[1].shape, 0.5)
        picked = jnp.take_along_axis(logits, ROWS[:, None], axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)) - jnp.mean(picked)

    def moved(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        logits = x @ weights[0] + jnp.sin(x @ weights[0]) * weights[1]
        return jnp.mean(jnp.take_along_axis(logits, ROWS[:, None], axis=-1))

    for loss, unchanged in ((biased, size), (filled, size), (moved, 0)):
        _, found, _ = graph_of(loss, (W, W[0]), X)
        assert held_bytes(found, None, Held) == unchanged
