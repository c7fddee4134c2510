"""What waits in the stacks of gradients has a place of its own there."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from remat_opt.gradient_places import Piece, Place, lines_of, places


def kind(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def whole(lines: int, **place: int) -> list[Piece]:
    return [Piece(first=0, lines=lines, place=Place(**place) if place else None)]


def test_the_largest_comes_first_and_rows_as_long_as_its_own_are_preferred() -> None:
    assert places([kind(2, 8), kind(6, 8)], [kind(8, 16), kind(8, 8)]) == [
        whole(2, entry=1, row=6, rows=2, together=1),
        whole(6, entry=1, row=0, rows=6, together=1),
    ]


def test_what_is_larger_than_an_entry_waits_in_pieces_and_the_rest_in_a_stack() -> None:
    assert places([kind(2, 10, 8)], [kind(4, 16), kind(6, 8), kind(1, 8)]) == [
        [
            Piece(first=0, lines=6, place=Place(entry=1, row=0, rows=6, together=1)),
            Piece(first=6, lines=8, place=Place(entry=0, row=0, rows=4, together=1)),
            Piece(first=14, lines=6, place=None),
        ]
    ]


def test_what_fits_nowhere_has_no_place() -> None:
    assert places([kind(9, 8)], [kind(1, 8), kind()]) == [whole(9)]
    assert places([kind(2, 8), kind(0, 8), kind()], []) == [whole(2), whole(0), whole(1)]
    assert places([kind(0, 8), kind(8, 0)], [kind(8, 8)]) == [whole(0), whole(8)]
    assert places([kind(8)], [kind(0)]) == [whole(8)]


def test_smaller_elements_lie_together_in_larger_ones_and_not_the_other_way_round() -> None:
    values = [kind(4, 8, dtype="bfloat16"), kind(16, 8, dtype="bool")]
    assert places(values, [kind(6, 8)]) == [
        whole(4, entry=0, row=4, rows=2, together=2),
        whole(16, entry=0, row=0, rows=4, together=4),
    ]
    assert places([kind(4, 8)], [kind(8, 8, dtype="bfloat16")]) == [whole(4)]


def test_on_a_mesh_entries_are_split_at_least_like_what_waits_there() -> None:
    values, entries = [kind(4, 8), kind(3, 8), kind(2, 8)], [kind(8, 8), kind(8, 8)]
    rows, both = {"rows"}, {"rows", "columns"}
    assert places(values, entries, [both, rows, set()], [rows, {"columns"}]) == [
        whole(4),
        whole(3, entry=0, row=0, rows=3, together=1),
        whole(2, entry=0, row=3, rows=2, together=1),
    ]


def test_values_whose_bits_mean_something_else_stay_apart() -> None:
    key = jax.eval_shape(jax.random.key, 0)
    assert places([kind(2, dtype="complex64"), key], [kind(8, 8)]) == [whole(2), whole(1)]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_overlap(seed: int) -> None:
    keys = iter(jax.random.split(jax.random.key(seed), 64))

    def drawn(most: int) -> int:
        return int(jax.random.randint(next(keys), (), 1, most))

    dtypes = ("float32", "bfloat16", "bool", "int32")
    values = [kind(drawn(40), drawn(9), dtype=dtypes[drawn(5) - 1]) for _ in range(8)]
    entries = [kind(drawn(60), drawn(9)) for _ in range(3)]
    taken: set[tuple[int, int]] = set()
    for value, pieces in zip(values, places(values, entries), strict=True):
        line = 0
        for piece in pieces:
            assert piece.first == line
            line += piece.lines
            if (found := piece.place) is None:
                continue
            own = {(found.entry, found.row + n) for n in range(found.rows)}
            assert taken.isdisjoint(own)
            assert found.row + found.rows <= entries[found.entry].shape[0]
            in_row = math.prod(entries[found.entry].shape[1:]) * found.together
            elements = piece.lines * value.shape[-1]
            assert (found.rows - 1) * in_row < elements <= found.rows * in_row
            assert found.together == 4 // jnp.dtype(value.dtype).itemsize
            taken |= own
        assert line == lines_of(value)
    assert taken
