"""Rows looked up in groups, compared with what was seen compiled for a TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.grouped_rows import Groups
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from tests.compiler_graphs import InStep, graph_of, storage_of
from tests.devices import needs_libtpu

TABLE, LONG = jnp.ones((30, 64)), jnp.ones((640, 64))

#: Bytes of 32 groups of ten rows of 64: one below the other, and group by group.
ROWS_BYTES, PADDED_BYTES = 320 * 128 * 4, 32 * 16 * 128 * 4


def summed(table: jax.Array, _: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.sum(table[rows], 1)))


def multiplied(table: jax.Array, weight: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jax.nn.relu(table[rows] + 1.0) @ weight[:64]))


def summed_and_multiplied(table: jax.Array, weight: jax.Array, rows: jax.Array) -> jax.Array:
    found = table[rows]
    return jnp.sum(jnp.sin(found @ weight[:64])) + jnp.sum(jnp.sin(jnp.sum(found, 1)))


def side_by_side(table: jax.Array, weight: jax.Array, rows: jax.Array) -> jax.Array:
    found = table[rows].reshape(len(rows), -1)
    return jnp.sum(jnp.sin(found @ weight[: found.shape[1]]))


def groups(fn: Any, rows: jax.Array) -> list[Groups]:
    program = tracing.trace(fn, TABLE, LONG, rows)
    return list(storage_of(program, "v5e").groups.values())


@pytest.mark.parametrize(
    ("fn", "padded", "beside_bytes"),
    [
        (summed, True, ROWS_BYTES),
        (multiplied, False, PADDED_BYTES),
        (summed_and_multiplied, True, ROWS_BYTES),
    ],
)
def test_groups_that_do_not_fill_tiles_are_written_once_more(
    fn: Any, padded: bool, beside_bytes: int
) -> None:
    kind = ArrayType(shape=(32, 10, 64), dtype="float32")
    expected = Groups(kind=kind, padded=padded, beside_bytes=beside_bytes)
    assert groups(fn, jnp.zeros((32, 10), int)) == [expected]


@pytest.mark.parametrize("fn", [summed, multiplied])
@pytest.mark.parametrize("shape", [(32, 16), (2, 16, 8), (320,), (32, 1)])
def test_others_are_the_same_rows(fn: Any, shape: tuple[int, ...]) -> None:
    assert not groups(fn, jnp.zeros(shape, int))


@pytest.mark.parametrize("size", [8, 10])
def test_what_is_read_as_one_long_row_is_always_written_once_more(size: int) -> None:
    (one,) = groups(side_by_side, jnp.zeros((32, size), int))
    assert one.kind.shape == (32, size * 64)
    assert (one.padded, one.beside_bytes) == (False, 32 * size * 128 * 4)


def test_beside_what_returns_nothing() -> None:
    def printed(table: jax.Array, weight: jax.Array, rows: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, table[0, 0])
        return summed(table, weight, rows)

    assert groups(printed, jnp.zeros((32, 10), int)) == groups(summed, jnp.zeros((32, 10), int))


def test_values_and_cotangents_are_padded() -> None:
    _, found, graph = graph_of(summed, TABLE, LONG, jnp.zeros((32, 10), int), device="v5e")
    (vertex,) = (v for v, label in enumerate(found.labels) if label.startswith("gather"))
    assert graph.bytes[vertex] == graph.cotangent_bytes[vertex] == PADDED_BYTES
    assert graph.workspace_bytes[vertex] >= ROWS_BYTES
    _, _, without = graph_of(summed, TABLE, LONG, jnp.zeros((32, 16), int), device="v5e")
    assert without.bytes[vertex] == 32 * 16 * 128 * 4
    assert without.workspace_bytes[vertex] < ROWS_BYTES


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
def test_bags_of_ten_take_what_was_predicted_on_a_tpu() -> None:
    """XLA was predicted to take less than half before."""

    def loss(weights: list[Any], rows: jax.Array) -> jax.Array:
        h = jnp.zeros(())
        for table, w in weights:
            h = jnp.tanh((jnp.mean(table[rows], 1) + h) @ w)
        return jnp.mean(h**2)

    def shape(*extents: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, dtype)

    weights = [(shape(20000, 128), shape(128, 128))] * 3
    step = InStep(loss, weights, shape(65536, 10, dtype="int32"), device="v5e")
    assert step.unplanned_bytes() == pytest.approx(step.problem.unchanged.peak_bytes, rel=0.12)
