"""Reads and writes at computed places cost the combiner's FLOPs, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

TABLE = jax.ShapeDtypeStruct((50, 12), jnp.float32)
ROWS = jax.ShapeDtypeStruct((5, 1), jnp.int32)
UPDATES = jax.ShapeDtypeStruct((5, 12), jnp.float32)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)

WRITE = lax.ScatterDimensionNumbers((1,), (0,), (0,))
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _scatter(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda table, rows, updates: kind(table, rows, updates, WRITE, mode=IN_BOUNDS)


SCATTERS = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(name: str, only: Any, ours: Any, compiled: Any) -> None:
    fn = _scatter(SCATTERS[name])
    assert ours(fn, TABLE, ROWS, UPDATES) == compiled(fn, TABLE, ROWS, UPDATES)
    answer = cost(only(fn, TABLE, ROWS, UPDATES))
    assert answer.flops == (0 if name == "set" else 60)
    assert answer.fusion is Fusion.OPAQUE
    assert (answer.bytes_read, answer.bytes_written) == (4 * (600 + 5 + 60), 4 * 600)


def _gather(slice_sizes: tuple[int, int]) -> Callable[..., Any]:
    offsets, collapsed = ((), (0, 1)) if slice_sizes[1] == 1 else ((1,), (0,))
    starts = (0, 1) if slice_sizes[1] == 1 else (0,)
    numbers = lax.GatherDimensionNumbers(offsets, collapsed, starts)
    return lambda table, rows: lax.gather(table, rows, numbers, slice_sizes, mode=IN_BOUNDS)


def test_gather_of_rows(only: Any, ours: Any, compiled: Any) -> None:
    fn = _gather((1, 12))
    assert ours(fn, TABLE, ROWS) == compiled(fn, TABLE, ROWS)
    answer = cost(only(fn, TABLE, ROWS))
    assert answer.flops == 0
    assert answer.fusion is Fusion.OPAQUE
    assert (answer.bytes_read, answer.bytes_written) == (4 * (60 + 5), 4 * 60)


def test_gather_of_single_elements_fuses(only: Any, ours: Any, compiled: Any) -> None:
    places = jax.ShapeDtypeStruct((5, 2), jnp.int32)
    fn = _gather((1, 1))
    assert ours(fn, TABLE, places) == compiled(fn, TABLE, places)
    assert cost(only(fn, TABLE, places)).fusion is Fusion.FUSIBLE


def test_dynamic_slice(operations: Any, ours: Any, compiled: Any) -> None:
    def read(table: jax.Array, row: jax.Array) -> Any:
        return lax.dynamic_slice(table, (row, 0), (4, 12))

    assert ours(read, TABLE, INDEX) == compiled(read, TABLE, INDEX)
    answer = cost(operations(read, TABLE, INDEX)[-1])
    assert answer.fusion is Fusion.FUSIBLE
    assert (answer.bytes_read, answer.bytes_written) == (4 * (48 + 2), 4 * 48)


def test_dynamic_update_slice(operations: Any, ours: Any, compiled: Any) -> None:
    def write(table: jax.Array, rows: jax.Array, row: jax.Array) -> Any:
        return lax.dynamic_update_slice(table, rows, (row, 0))

    assert ours(write, TABLE, UPDATES, INDEX) == compiled(write, TABLE, UPDATES, INDEX)
    answer = cost(operations(write, TABLE, UPDATES, INDEX)[-1])
    assert answer.fusion is Fusion.OPAQUE
    assert (answer.bytes_read, answer.bytes_written) == (4 * (60 + 2), 4 * 60)


def test_mutable_arrays_are_read_and_written_where_they_are(operations: Any) -> None:
    def through(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[0] = x[1]
        return ref[3]

    found = {one.primitive: cost(one) for one in operations(through, TABLE)}
    assert (found["get"].flops, found["get"].bytes_written) == (0, 48)
    assert (found["swap"].bytes_read, found["swap"].bytes_written) == (96, 48)
    assert not found["get"].estimated
