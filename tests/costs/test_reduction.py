"""A reduction takes as many steps as elements disappear, and writes its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

FLOAT = jax.ShapeDtypeStruct((8, 12, 10), jnp.float32)
INTEGER = jax.ShapeDtypeStruct((8, 12, 10), jnp.int32)
BOOLEAN = jax.ShapeDtypeStruct((8, 12, 10), jnp.bool_)


def _two_sums(a: Any, b: Any) -> Any:
    zero = np.float32(0)
    return lax.reduce((a, b), (zero, zero), lambda x, y: (x[0] + y[0], x[1] * y[1]), (1,))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sum": (lambda x: lax.reduce_sum(x, (0, 2)), (FLOAT,)),
    "sum of all": (lambda x: lax.reduce_sum(x, (0, 1, 2)), (FLOAT,)),
    "sum of integers": (lambda x: lax.reduce_sum(x, (1,)), (INTEGER,)),
    "max": (lambda x: lax.reduce_max(x, (2,)), (FLOAT,)),
    "min": (lambda x: lax.reduce_min(x, (0,)), (FLOAT,)),
    "prod": (lambda x: lax.reduce_prod(x, (0, 1)), (FLOAT,)),
    "and": (lambda x: lax.reduce_and(x, (0,)), (BOOLEAN,)),
    "or": (lambda x: lax.reduce_or(x, (0, 1)), (BOOLEAN,)),
    "xor": (lambda x: lax.reduce_xor(x, (1,)), (INTEGER,)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (FLOAT,)),
    "argmin": (lambda x: lax.argmin(x, 2, jnp.int32), (FLOAT,)),
    "argmax of integers": (lambda x: lax.argmax(x, 0, jnp.int32), (INTEGER,)),
    "own step": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * a, (0,)), (FLOAT,)),
    "two arrays": (_two_sums, (FLOAT, FLOAT)),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_are_the_compilers(name: str, only: Any, ours: Any, compiled: Any) -> None:
    fn, args = CASES[name]
    assert cost(only(fn, *args)).fusion is Fusion.REDUCTION
    assert ours(fn, *args) == compiled(fn, *args)


def test_bytes_are_those_of_inputs_and_outputs(only: Any) -> None:
    answer = cost(only(lambda x: lax.reduce_sum(x, (0, 2)), FLOAT))
    assert (answer.bytes_read, answer.bytes_written) == (960 * 4, 12 * 4)
