"""Sorting costs what the compiler says; the compiler says nothing about top_k."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost


@pytest.mark.parametrize("shape", [(100,), (8, 12, 10), (1,), (64,)])
def test_sort(shape: tuple[int, ...], only: Any, ours: Any, compiled: Any) -> None:
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert ours(lax.sort, array) == compiled(lax.sort, array)
    assert cost(only(lax.sort, array)).fusion is Fusion.OPAQUE


def test_sort_with_an_array_carried_along(ours: Any, compiled: Any) -> None:
    array = jax.ShapeDtypeStruct((8, 12), jnp.float32)

    def sort(keys: jax.Array, values: jax.Array) -> Any:
        return lax.sort((keys, values), num_keys=1)

    assert ours(sort, array, array) == compiled(sort, array, array)


def test_top_k_is_estimated(only: Any) -> None:
    array = jax.ShapeDtypeStruct((8, 100), jnp.float32)
    answer = cost(only(lambda x: lax.top_k(x, 4), array))
    assert answer.flops == 800 * 3
    assert answer.fusion is Fusion.OPAQUE
    assert answer.estimated
