"""Gathers that pick one element of each row, and what their gradients hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.row_gathers import is_row_gather, picking
from remat_opt.program import tracing
from tests.compiler_graphs import W, X

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
