"""Windows step over every position they cover, padding included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

IMAGE = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
LOW = -np.inf


def max_pool(x: jax.Array) -> Any:
    return lax.reduce_window(x, LOW, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


POOLS: dict[str, Callable[[jax.Array], Any]] = {
    "max": max_pool,
    "min": lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    "dilated": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 3, 2, 1), (1, 2, 2, 1), "SAME", (1, 2, 1, 1), (1, 2, 2, 1)
    ),
    "own step": lambda x: lax.reduce_window(
        (x, x),
        (np.float32(0), np.float32(1)),
        lambda a, b: (a[0] + b[0], a[1] * b[1]),
        (1, 3, 3, 1),
        (1, 2, 2, 1),
        "SAME",
    ),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_the_compilers(name: str, only: Any, ours: Any, compiled: Any) -> None:
    fn = POOLS[name]
    assert ours(fn, IMAGE) == compiled(fn, IMAGE)
    assert cost(only(fn, IMAGE)).fusion is Fusion.OPAQUE


@pytest.mark.parametrize("window", [2, 3])
def test_gradient_of_max_pooling_is_the_compilers_before_expansion(
    window: int, operations: Any, unexpanded: Any
) -> None:
    def pool(x: jax.Array) -> Any:
        return lax.reduce_window(x, LOW, lax.max, (1, window, window, 1), (1, 2, 2, 1), "SAME")

    def gradient(x: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(pool, x)[1](cotangent)

    output = jax.eval_shape(pool, IMAGE)
    (answer,) = [
        cost(operation)
        for operation in operations(gradient, IMAGE, output)
        if operation.primitive == "select_and_scatter_add"
    ]
    # The forward pooling, which nothing needs, is gone.
    assert answer.flops == unexpanded(gradient, IMAGE, output).flops
    assert answer.fusion is Fusion.OPAQUE


@pytest.mark.parametrize("window", [2, 3])
def test_tangent_of_max_pooling_is_the_compilers(
    window: int, operations: Any, compiled: Any
) -> None:
    def tangent(x: jax.Array, t: jax.Array) -> Any:
        def pool(x: jax.Array) -> Any:
            return lax.reduce_window(x, LOW, lax.max, (1, window, window, 1), (1, 2, 2, 1), "SAME")

        return jax.jvp(pool, (x,), (t,))[1]

    (answer,) = [
        cost(operation)
        for operation in operations(tangent, IMAGE, IMAGE)
        if operation.primitive == "select_and_gather_add"
    ]
    assert answer.flops == compiled(tangent, IMAGE, IMAGE).flops


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((8, 12, 10), 1), ((16,), 0), ((17,), 0), ((100,), 0), ((3, 257), 1), ((7, 40, 3), 1)],
)
def test_cumulations_are_the_cpu_compilers(
    name: str, shape: tuple[int, ...], axis: int, only: Any, ours: Any, compiled: Any
) -> None:
    array = jax.ShapeDtypeStruct(shape, jnp.float32)

    def cumulate(x: jax.Array) -> Any:
        return getattr(lax, name)(x, axis=axis, reverse=shape == (17,))

    assert ours(cumulate, array) == compiled(cumulate, array)
    assert cost(only(cumulate, array)).fusion is Fusion.OPAQUE


def test_long_cumulative_sums_are_the_cpu_compilers(ours: Any, compiled: Any) -> None:
    array = jax.ShapeDtypeStruct((5000,), jnp.float32)
    assert ours(lax.cumsum, array) == compiled(lax.cumsum, array)


def test_an_empty_cumulative_sum_costs_nothing(only: Any) -> None:
    assert cost(only(lax.cumsum, jax.ShapeDtypeStruct((0, 3), jnp.float32))).flops == 0
