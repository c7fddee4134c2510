"""Kept sets against exhaustive search over all of them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.solvers.min_cut import Cut, breakpoints, minimum_cut, mixtures
from tests.graphs import INSTANCES, chain_edges, graphs, network, subsets

Point = tuple[int, float]


def demanded(graph: Graph, kept: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """Which of the kept values are read, and what must run again."""
    run = {vertex for vertex in range(len(graph)) if graph.internal_bytes[vertex]}
    read = {needed for needs in graph.needs for needed in needs}
    while True:
        run |= read - set(kept)
        more = read | {p for vertex in run for p in graph.predecessors[vertex]}
        if more == read:
            return read & set(kept), run
        read = more


def figures(graph: Graph, kept: tuple[int, ...]) -> Point:
    read, run = demanded(graph, kept)
    return sum(graph.bytes[v] for v in read), math.fsum(graph.seconds[v] for v in run)


def all_points(graph: Graph) -> set[Point]:
    return {figures(graph, kept) for kept in subsets(list(range(len(graph))))}


def lower_hull(points: set[Point]) -> list[Point]:
    """The corners of the lower left convex hull, by ascending bytes."""
    hull: list[Point] = []
    least = math.inf
    for point in sorted(points):
        if point[1] >= least:
            continue
        least = point[1]
        while len(hull) >= 2:
            (b0, s0), (b1, s1), (b2, s2) = *hull[-2:], point
            if (b1 - b0) * (s2 - s0) - (s1 - s0) * (b2 - b0) > 0:
                break
            hull.pop()
        hull.append(point)
    return hull


def rounding(graph: Graph, multiplier: float) -> float:
    """What integer capacities may cost: each of 2 n edges is off by at most two units."""
    total = sum(graph.seconds) + multiplier * sum(graph.bytes)
    return 4 * len(graph) * total / 2**29


def check_minimum(graph: Graph, multiplier: float) -> None:
    cut = minimum_cut(graph, multiplier)
    best = min(seconds + multiplier * size for size, seconds in all_points(graph))
    assert cut.seconds + multiplier * cut.bytes <= best + rounding(graph, multiplier)


def check_consistent(graph: Graph, cut: Cut) -> None:
    """A cut's figures are what its kept set demands."""
    read, run = demanded(graph, cut.kept)
    assert cut.kept == tuple(sorted(read)), "nothing is kept without use"
    assert cut.recomputed == tuple(sorted(run)), "nothing runs again without use"
    assert (cut.bytes, cut.seconds) == figures(graph, cut.kept)


def check_hull(graph: Graph) -> None:
    found = breakpoints(graph)
    for cut in found:
        check_consistent(graph, cut)
    points = [(cut.bytes, cut.seconds) for cut in found]
    corners = lower_hull(all_points(graph))
    assert set(corners) <= set(points)
    assert points == sorted(points, key=lambda point: (-point[0], point[1]))
    assert [seconds for _, seconds in points] == sorted(seconds for _, seconds in points)
    assert points[0][1] == corners[-1][1], "the first recomputes the least"
    assert points[-1][0] == corners[0][0], "the last keeps the least"


def check_mixtures(graph: Graph) -> int:
    number = 0
    for left, right in itertools.pairwise(breakpoints(graph)):
        for mixed in mixtures(graph, left, right):
            number += 1
            read, run = demanded(graph, mixed.kept)
            assert read <= set(mixed.kept)
            assert run <= set(mixed.recomputed), "all that must run is charged"
            assert not set(mixed.kept) & set(mixed.recomputed)
            assert mixed.bytes == sum(graph.bytes[vertex] for vertex in mixed.kept)
            assert right.bytes <= mixed.bytes <= left.bytes
            assert left.seconds <= mixed.seconds <= right.seconds
    return number


MULTIPLIERS = st.sampled_from([0.0, 0.01, 0.1, 0.3, 1 / 3, 0.5, 1.0, 2.0, 10.0])


@hypothesis.given(graphs(max_vertices=7), MULTIPLIERS)
@hypothesis.settings(max_examples=20)
def test_minimum_cut_is_the_best_kept_set(graph: Graph, multiplier: float) -> None:
    check_minimum(graph, multiplier)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=9), MULTIPLIERS)
@hypothesis.settings(max_examples=300)
def test_minimum_cut_is_the_best_kept_set_on_many_graphs(graph: Graph, multiplier: float) -> None:
    check_minimum(graph, multiplier)


@hypothesis.given(graphs(), MULTIPLIERS)
def test_minimum_cut_charges_what_its_kept_set_demands(graph: Graph, multiplier: float) -> None:
    check_consistent(graph, minimum_cut(graph, multiplier))


@hypothesis.given(graphs(max_vertices=7))
@hypothesis.settings(max_examples=20)
def test_breakpoints_are_all_corners_of_the_hull(graph: Graph) -> None:
    check_hull(graph)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=9))
@hypothesis.settings(max_examples=300)
def test_breakpoints_are_all_corners_of_the_hull_on_many_graphs(graph: Graph) -> None:
    check_hull(graph)


@pytest.mark.parametrize("graph", INSTANCES.values(), ids=INSTANCES)
def test_breakpoints_of_the_instances(graph: Graph) -> None:
    check_hull(graph)


@hypothesis.given(graphs())
@hypothesis.settings(max_examples=40)
def test_mixtures_are_consistent_and_between_their_neighbours(graph: Graph) -> None:
    check_mixtures(graph)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=14))
@hypothesis.settings(max_examples=300)
def test_mixtures_are_consistent_and_between_their_neighbours_on_many_graphs(graph: Graph) -> None:
    check_mixtures(graph)


def test_identical_layers_change_one_after_the_other() -> None:
    graph = network(4)
    left, right = max(
        itertools.pairwise(breakpoints(graph)), key=lambda pair: pair[0].bytes - pair[1].bytes
    )
    mixed = list(mixtures(graph, left, right))
    half = len(mixed) // 2
    assert half == 3, "four layers, three ways to stop between them"
    front, back = mixed[:half], mixed[half:]
    for walk in (front, back):
        sizes = [left.bytes, *(cut.bytes for cut in walk), right.bytes]
        assert len({one - other for one, other in itertools.pairwise(sizes)}) == 1
    assert set(right.kept) <= set(front[0].kept)
    assert min(set(left.kept) - set(front[0].kept)) < min(set(left.kept) - set(back[0].kept))


def test_hand_computed_hull() -> None:
    # 1 is expensive to hold and cheap to run, 2 the reverse; both are read backward.
    graph = dataclasses.replace(
        Graph.from_edges([0, 8, 2], chain_edges(3), seconds=[0.0, 1.0, 4.0]),
        needs=((), (1,), (2,)),
    )
    found = {(cut.bytes, cut.seconds): cut.kept for cut in breakpoints(graph)}
    assert {(10, 0.0), (2, 1.0), (0, 5.0)} <= set(found)
    assert set(found[2, 1.0]) - {0} == {2}


def test_nothing_is_kept_where_nothing_is_needed() -> None:
    graph = dataclasses.replace(Graph.from_edges([4, 4], [(0, 1)]), needs=((), ()))
    nothing = Cut(kept=(), recomputed=(), bytes=0, seconds=0.0)
    assert minimum_cut(graph, 1.0) == nothing
    assert set(breakpoints(graph)) == {nothing}


def test_ancestors_of_what_is_kept_are_left_alone() -> None:
    graph = dataclasses.replace(Graph.from_edges([10, 2], [(0, 1)]), needs=((), (1,)))
    for multiplier in (0.0, 1e-30, 0.1):
        assert minimum_cut(graph, multiplier).kept == (1,)


def test_residuals_without_a_name_make_a_vertex_run_again() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([4, 4], [(0, 1)]), needs=((), ()), internal_bytes=(0, 1)
    )
    assert minimum_cut(graph, 0.01) == Cut(kept=(0,), recomputed=(1,), bytes=4, seconds=1.0)
    assert minimum_cut(graph, 1.0) == Cut(kept=(), recomputed=(0, 1), bytes=0, seconds=2.0)


def test_other_costs_take_the_place_of_seconds() -> None:
    graph = Graph.from_edges([4, 4], [(0, 1)], seconds=[1.0, 1.0])
    cut = minimum_cut(graph, 1.0, seconds=[100.0, 1.0])
    assert cut == Cut(kept=(0,), recomputed=(1,), bytes=4, seconds=1.0)
    assert breakpoints(graph, seconds=[100.0, 1.0])[-1].seconds == 101.0


@pytest.mark.parametrize("byte", [1, 10**3, 10**12])
@pytest.mark.parametrize("second", [1e-12, 1.0, 1e6])
def test_scale_of_bytes_and_seconds_does_not_matter(byte: int, second: float) -> None:
    """Capacities are 32-bit integers, so this guards against overflow and underflow."""
    small = network(3)
    large = dataclasses.replace(
        small,
        bytes=tuple(size * byte for size in small.bytes),
        seconds=tuple(cost * second for cost in small.seconds),
    )
    expected = [
        (cut.bytes * byte, pytest.approx(cut.seconds * second)) for cut in breakpoints(small)
    ]
    found = [(cut.bytes, cut.seconds) for cut in breakpoints(large)]
    assert len(expected) > 2
    assert found == expected


def test_a_thousand_equal_vertices_do_not_overflow() -> None:
    count = 1000
    graph = Graph.from_edges([10**12] * count, chain_edges(count), seconds=[1e-9] * count)
    most, least = breakpoints(graph)[0], breakpoints(graph)[-1]
    assert (len(most.kept), len(least.recomputed)) == (count, count)
    assert most.bytes == count * 10**12


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_number_of_cuts_is_limited(limit: int) -> None:
    assert len(breakpoints(INSTANCES["network_3"], most_cuts=limit)) <= limit


def test_without_time_or_bytes_there_is_still_an_answer() -> None:
    free = Graph.from_edges([0, 0], [(0, 1)], seconds=[0.0, 0.0])
    for cut in breakpoints(free):
        assert (cut.bytes, cut.seconds) == (0, 0.0)


def test_mixtures_can_be_thinned_evenly() -> None:
    graph = network(6)
    for left, right in itertools.pairwise(breakpoints(graph)):
        everything = list(mixtures(graph, left, right))
        for most in (1, 3, len(everything) + 1):
            stride = max(1, -(-len(everything) // most))
            assert (
                list(mixtures(graph, left, right, most=most)) == everything[stride // 2 :: stride]
            )
