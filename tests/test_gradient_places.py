"""What waits in the stacks of gradients has a place of its own there."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from remat_opt.gradient_places import Place, places


def kind(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_largest_comes_first_and_rows_as_long_as_its_own_are_preferred() -> None:
    found = places([kind(2, 8), kind(6, 8)], [kind(8, 16), kind(8, 8)])
    assert found == [
        Place(entry=1, row=6, rows=2, together=1),
        Place(entry=1, row=0, rows=6, together=1),
    ]


def test_what_fits_nowhere_has_no_place() -> None:
    assert places([kind(9, 8)], [kind(8, 8), kind()]) == [None]
    assert places([kind(2, 8), kind(0, 8)], []) == [None, None]
    assert places([kind(0, 8)], [kind(8, 8)]) == [None]
    assert places([kind(8)], [kind(0)]) == [None]


def test_smaller_elements_lie_together_in_larger_ones_and_not_the_other_way_round() -> None:
    values = [kind(4, 8, dtype="bfloat16"), kind(16, 8, dtype="bool")]
    assert places(values, [kind(6, 8)]) == [
        Place(entry=0, row=4, rows=2, together=2),
        Place(entry=0, row=0, rows=4, together=4),
    ]
    assert places([kind(4, 8)], [kind(8, 8, dtype="bfloat16")]) == [None]


def test_values_whose_bits_mean_something_else_stay_apart() -> None:
    key = jax.eval_shape(jax.random.key, 0)
    assert places([kind(2, dtype="complex64"), key], [kind(8, 8)]) == [None, None]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_overlap(seed: int) -> None:
    keys = iter(jax.random.split(jax.random.key(seed), 64))

    def drawn(most: int) -> int:
        return int(jax.random.randint(next(keys), (), 1, most))

    dtypes = ("float32", "bfloat16", "bool", "int32")
    values = [kind(drawn(40), drawn(9), dtype=dtypes[drawn(5) - 1]) for _ in range(8)]
    entries = [kind(drawn(60), drawn(9)) for _ in range(3)]
    taken = set()
    for value, found in zip(values, places(values, entries), strict=True):
        if found is None:
            continue
        own = {(found.entry, found.row + n) for n in range(found.rows)}
        assert taken.isdisjoint(own)
        assert found.row + found.rows <= entries[found.entry].shape[0]
        in_row = math.prod(entries[found.entry].shape[1:]) * found.together
        assert (found.rows - 1) * in_row < math.prod(value.shape) <= found.rows * in_row
        assert found.together == 4 // jnp.dtype(value.dtype).itemsize
        taken |= own
    assert taken
