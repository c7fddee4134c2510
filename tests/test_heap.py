"""Placing arrays on a heap: by hand, and against what every placement must satisfy."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.heap import heap_bytes
from remat_opt.schedule import Schedule
from remat_opt.spans import Spans, spans
from tests.graphs import scheduled_graphs


def arrays(*lives: tuple[int, int, int]) -> Spans:
    """Spans from (first step, last step, bytes)."""
    first, last, sizes = np.array(lives, dtype=np.int64).T
    return Spans(first=first, last=last, bytes=sizes, again=np.zeros(0, dtype=np.int64))


def test_arrays_that_never_meet_share_their_place() -> None:
    assert heap_bytes(arrays((0, 1, 5), (2, 3, 7), (4, 5, 6))) == 7


def test_arrays_that_meet_lie_beside_one_another() -> None:
    assert heap_bytes(arrays((0, 2, 5), (1, 3, 7), (2, 4, 6))) == 18


def test_an_array_takes_the_tightest_hole() -> None:
    # By size: 8 at 0, 6 at 8, then 5 in the first one's place, which is free again, not on top.
    assert heap_bytes(arrays((0, 1, 8), (0, 3, 6), (2, 3, 5))) == 14


def test_a_hole_that_fits_nothing_is_paid_for() -> None:
    # 5 and then 4 lie lowest. The 2 in the middle must lie above the 5, and leaves a hole of 1
    # below it when the 4 and another 2 come: that one goes on top, though 8 are alive at most.
    found = arrays((0, 2, 5), (4, 6, 4), (2, 4, 2), (4, 6, 2))
    assert found.peak_bytes == 8
    assert heap_bytes(found) == 9


def test_the_smaller_heap_of_both_orders_counts() -> None:
    # By size it takes 8, by length of life 9.
    assert heap_bytes(arrays((3, 4, 5), (4, 4, 3), (0, 3, 1))) == 8
    # By size it takes 10, by length of life 7.
    assert heap_bytes(arrays((4, 5, 4), (1, 3, 3), (0, 2, 4), (3, 6, 3))) == 7


def test_many_small_arrays_count_by_what_is_alive() -> None:
    small = [(step, step + 1, 1) for step in range(50)]
    assert heap_bytes(arrays((0, 60, 1000), *small)) == 1002


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(1, 9)), min_size=1)
)
def test_a_heap_holds_what_is_alive_and_no_more_than_all(
    drawn: list[tuple[int, int, int]],
) -> None:
    found = arrays(*[(first, first + length, size) for first, length, size in drawn])
    assert found.peak_bytes <= heap_bytes(found) <= int(found.bytes.sum())


@hypothesis.given(scheduled_graphs())
def test_heaps_of_schedules(drawn: tuple[Graph, Schedule]) -> None:
    found = spans(*drawn)
    assert found.peak_bytes <= heap_bytes(found) <= int(found.bytes.sum())
