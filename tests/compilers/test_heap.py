"""Placing arrays on a heap: by hand, and against what every placement must satisfy."""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
from hypothesis import strategies as st

from remat_opt.compilers import heap
from remat_opt.compilers.heap import heap_bytes
from remat_opt.graph import Graph
from remat_opt.schedule import Schedule
from remat_opt.spans import Spans, spans
from tests.graphs import scheduled_graphs

MIB = 2**20


def arrays(*lives: tuple[int, int, int], unit: int = 1) -> Spans:
    """Spans from (first step, last step, bytes in units)."""
    first, last, sizes = np.array(lives, dtype=np.int64).T
    none = np.zeros(0, dtype=np.int64)
    return Spans(
        first=first,
        last=last,
        bytes=sizes * unit,
        backward=1000,
        forward=none,
        turn=none,
        again=none,
        again_at=none,
        from_memory=(),
    )


def in_vector_memory(*lives: tuple[int, int, int]) -> int:
    """MiB on the heap if 96 have room in vector memory, of arrays with so many."""
    return heap_bytes(arrays(*lives, unit=MIB), vector_bytes=96 * MIB) // MIB


def test_arrays_that_never_meet_share_their_place() -> None:
    assert heap_bytes(arrays((0, 1, 5), (2, 3, 7), (4, 5, 6))) == 7


def test_arrays_that_meet_lie_beside_one_another() -> None:
    assert heap_bytes(arrays((0, 2, 5), (1, 3, 7), (2, 4, 6))) == 18


def test_an_array_takes_the_tightest_hole() -> None:
    # 4 at 0, 1 at 4, 3 at 5, 1 at 8. When 4 and 3 are gone, another 3 goes between the ones, so
    # that the 4 after it also has a place.
    found = arrays((0, 4, 4), (1, 9, 1), (2, 4, 3), (3, 9, 1), (5, 9, 3), (6, 9, 4))
    assert heap_bytes(found) == 9


def test_an_array_that_outlives_its_neighbours_leaves_a_hole() -> None:
    # They are placed as they come: the 3 above the 4, where it stays, and then no 5 fits.
    found = arrays((0, 1, 4), (1, 5, 3), (2, 5, 5))
    assert found.peak_bytes == 8
    assert heap_bytes(found) == 12


def test_a_small_array_keeps_two_holes_apart() -> None:
    # The 1 is written above the first 512, and is there when the second comes.
    found = arrays((0, 1, 512), (1, 9, 1), (2, 3, 40), (3, 9, 40), (4, 5, 512))
    assert found.peak_bytes == 553
    assert heap_bytes(found) == 513 + 512


def test_of_arrays_that_come_together_the_one_that_goes_first_is_placed_first() -> None:
    # So the 2 is above the 5, and the 6 above both.
    assert heap_bytes(arrays((0, 9, 2), (0, 1, 5), (2, 9, 6))) == 5 + 2 + 6


def test_many_small_arrays_count_by_what_is_alive() -> None:
    small = [(step, step + 9, 1) for step in range(50)]
    assert heap_bytes(arrays((0, 60, 1000), *small)) == 1010
    # They are freed when the larger array comes.
    early = [(0, 9, 1)] * 10
    assert heap_bytes(arrays((0, 9, 1000), (10, 20, 1005), *early)) == 1010


def test_what_is_small_and_soon_read_stays_in_vector_memory() -> None:
    large = 0, 60, 2000
    assert in_vector_memory(large, (1, 40, 48)) == 2000
    assert in_vector_memory(large, (1, 40, 49)) == 2049
    # Soon: before twelve times as much is written.
    between = (2, 2, 46), (3, 3, 50)
    assert in_vector_memory(large, (1, 9, 8), *between) == 2050
    assert in_vector_memory(large, (1, 9, 8), *between, (4, 4, 1)) == 2050 + 8
    # What needs nothing else takes nothing.
    assert in_vector_memory((0, 5, 32), (1, 4, 32), (2, 3, 32)) == 0


def test_vector_memory_holds_what_is_read_soonest() -> None:
    # Five are written one after the other, and read in reverse order. Three find room.
    waiting = [(10 + number, 40 - number, 32) for number in range(5)]
    assert in_vector_memory((0, 50, 1000), *waiting) == 1000 + 2 * 32
    # Two more find room when those are gone.
    assert in_vector_memory((0, 50, 1000), *waiting, (41, 50, 32), (42, 49, 32)) == 1064


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(5, 9), st.integers(1, 9)), min_size=1)
)
def test_a_heap_holds_what_is_alive_and_no_more_than_all(
    drawn: list[tuple[int, int, int]],
) -> None:
    found = arrays(*[(first, first + length, size) for first, length, size in drawn])
    assert found.peak_bytes <= heap_bytes(found) <= int(found.bytes.sum())


@hypothesis.given(scheduled_graphs())
def test_heaps_of_schedules(drawn: tuple[Graph, Schedule]) -> None:
    found = spans(*drawn)
    # An array that is not a small share of what is alive is never left out.
    large = found.bytes > found.peak_bytes / 8
    chosen = {name: getattr(found, name)[large] for name in ("first", "last", "bytes")}
    least = dataclasses.replace(found, **chosen).peak_bytes
    assert least <= heap_bytes(found) <= int(found.bytes.sum())


def test_the_largest_is_placed_first_whenever_it_comes() -> None:
    # The 4s are at 0 and 4 although they come last, so the 2s that meet one of them are above both.
    found = arrays((0, 5, 2), (1, 5, 2), (2, 3, 4), (3, 4, 4), (6, 7, 4))
    assert found.peak_bytes == 12
    assert heap.decreasing_size_heap_bytes(found) == 12
    # While the 2s live, two 4s are never alive with the third: the third's place is never free.
    found = arrays((0, 9, 2), (0, 9, 2), (0, 1, 4), (1, 2, 4), (1, 1, 4), (8, 9, 3), (7, 8, 3))
    assert found.peak_bytes == 16
    assert heap.decreasing_size_heap_bytes(found) == 16


def test_what_lives_longest_may_be_placed_first_instead() -> None:
    # Largest first, the 5 is at the bottom with the 2 that meets it on top: 9 with all others.
    found = arrays((4, 6, 4), (5, 5, 2), (1, 3, 5), (2, 6, 2))
    assert found.peak_bytes == 8
    assert heap.decreasing_size_heap_bytes(found) == 8


@hypothesis.given(scheduled_graphs())
def test_a_heap_holds_what_is_alive(case: tuple[Graph, Schedule]) -> None:
    lives = spans(*case)
    assert lives.peak_bytes <= heap.decreasing_size_heap_bytes(lives) <= int(lives.bytes.sum())


def test_arrays_lie_in_the_smallest_result_that_is_written_after_them() -> None:
    found = arrays((0, 3, 4), (1, 5, 3), (4, 6, 4), (2, 9, 3), (0, 9, 1))
    # The first 4 is gone when the second comes; the 3 that ends at 5 fits the smaller result; the
    # other, and the 1, are there when results are written.
    left = heap.outside_results(found, [(8, 4), (7, 3)])
    assert left.bytes.tolist() == [3, 1]
    # What is written at the step in which an array is last read cannot lie in its place.
    assert heap.outside_results(arrays((0, 3, 4)), [(3, 4)]).bytes.tolist() == [4]
    assert heap.outside_results(arrays((0, 3, 4)), [(4, 3)]).bytes.tolist() == [4]
    assert heap.outside_results(arrays((0, 3, 4)), []).bytes.tolist() == [4]
