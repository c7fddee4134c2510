"""Coarsening: what is merged, and that what holds for the smaller graph holds for the whole."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import simulate
from remat_opt.solvers import local_search, portfolio
from remat_opt.solvers.base import judge, judged
from remat_opt.solvers.chain_figures import LEVELS, ChainFigures, Chains, schedule_of, spread
from remat_opt.solvers.coarsening import Coarse, as_it_is, without_small
from tests.graphs import chain_edges, graphs, schedules


@st.composite
def coarsened(draw: st.DrawFn) -> Coarse:
    """Graphs with about half of their values merged."""
    graph = draw(graphs(max_vertices=12))
    sizes = np.maximum(graph.bytes, graph.cotangent_bytes)
    return without_small(graph, int(np.sort(sizes)[: len(graph) // 2].sum()))


def normalised(layers: int) -> Graph:
    """Layers of a large value and its mean, which the next large one also reads."""
    count = 2 * layers
    return Graph.from_edges(
        [1000, 1] * layers,
        [*chain_edges(count), *((v, v + 2) for v in range(0, count - 2, 2))],
        seconds=[4.0, 1.0] * layers,
    )


def test_small_values_join_the_next_large_one_and_are_always_kept() -> None:
    seen = without_small(normalised(3), 5)
    assert seen.groups == ((0,), (2, 1), (4, 3, 5))
    assert seen.always_kept == {1, 3, 5}
    assert seen.graph.names == ("0", "2", "4")
    assert seen.graph.predecessors == ((), (0,), (1,))
    assert seen.graph.needs == ((0,), (0, 1), (1, 2))
    assert seen.graph.seconds == (4.0, 4.0, 4.0)
    inside = (Region(vertices=(0,)), Region(vertices=(1,), checkpointed=False))
    wide = seen.spread(
        Schedule(
            regions=(
                Region(vertices=(0, 1), kept=(1,), inside=inside),
                Region(vertices=(2,), checkpointed=False),
            )
        )
    )
    assert [one.vertices for one in wide.regions] == [(0, 1, 2), (3, 4, 5)]
    assert [one.kept for one in wide.regions] == [(1, 2), ()]
    assert [one.vertices for one in wide.regions[0].inside] == [(0,), (1, 2)]
    assert [one.kept for one in wide.regions[0].inside] == [(), ()]


def test_of_values_that_are_all_small_the_largest_stays() -> None:
    seen = without_small(Graph.from_edges([1, 3, 2], chain_edges(3)), 100)
    assert seen.groups == ((1, 0, 2),)
    assert seen.graph.needs == ((0,),)


def test_what_a_region_may_have_to_avoid_stays() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([1, 1, 1, 9], chain_edges(4)),
        pinned=(True, False, False, False),
        internal_bytes=(0, 5, 0, 0),
    )
    assert without_small(graph, 3).groups == ((0,), (1,), (3, 2))


def test_a_large_cotangent_is_not_small() -> None:
    """A result lives in a separate buffer, but its cotangent does not."""
    graph = dataclasses.replace(
        Graph.from_edges([0, 9], chain_edges(2)), cotangent_bytes=(9, 9), in_place=(False, True)
    )
    assert without_small(graph, 5).groups == ((0,), (1,))


def test_the_larger_workspace_of_a_group_counts() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([9, 1, 1, 9], chain_edges(4)),
        workspace_bytes=(1, 7, 8, 2),
        cotangent_bytes=(9, 1, 0, 9),
    )
    seen = without_small(graph, 2)
    assert seen.groups == ((0,), (3, 1, 2))
    assert seen.graph.workspace_bytes == (1, 7), "without a cotangent no backward step runs"


@hypothesis.given(coarsened(), st.data())
@hypothesis.settings(max_examples=40)
def test_a_schedule_spread_out_recomputes_what_it_says(seen: Coarse, data: st.DataObject) -> None:
    whole = seen.whole
    assert list(itertools.chain.from_iterable(map(sorted, seen.groups))) == list(range(len(whole)))
    merged = seen.always_kept
    assert merged == {one for group in seen.groups for one in group[1:]}
    assert not any(whole.pinned[one] or whole.internal_bytes[one] for one in merged)
    schedule = data.draw(schedules(seen.graph))
    wide = seen.spread(schedule)
    wide.check(whole)
    told, found = simulate(seen.graph, schedule), simulate(whole, wide)
    assert found.recomputed_flops == told.recomputed_flops
    assert found.overhead_seconds == pytest.approx(told.overhead_seconds)


@hypothesis.given(graphs(max_vertices=14))
@hypothesis.settings(max_examples=15)
def test_of_what_the_papers_solvers_find_only_what_can_be_executed_is_judged(graph: Graph) -> None:
    sizes = np.maximum(graph.bytes, graph.cotangent_bytes)
    seen = without_small(graph, int(np.sort(sizes)[: len(graph) // 2].sum()))
    for one in judged(graph, map(seen.spread, portfolio._papers(seen.graph))):
        one.schedule.check(graph)


def test_regions_that_are_no_stretches_may_come_before_what_small_values_read() -> None:
    """A large side result whose mean reaches the loss through the next large value."""
    graph = Graph.from_edges([1000, 1000, 1, 1000], [(0, 1), (1, 2), (2, 3), (0, 3)])
    seen = without_small(graph, 5)
    assert seen.groups == ((0,), (1,), (3, 2))
    assert seen.graph.predecessors == ((), (0,), (0,))
    regions = Region(vertices=(0, 2)), Region(vertices=(1,))
    schedule = Schedule(regions=regions)
    schedule.check(seen.graph)
    with pytest.raises(GraphError, match="'2' reads '1', which a later region computes"):
        judge(graph, seen.spread(schedule))
    assert judged(graph, [seen.spread(schedule)]) == []


@hypothesis.given(coarsened(), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=40)
def test_chains_are_spread_out_as_schedules_are(seen: Coarse, seed: int) -> None:
    draw = np.random.default_rng(seed)
    shape = (LEVELS, len(seen.graph), 4)
    known = ChainFigures(seen.graph)
    chains = known.settled(Chains(starts=draw.random(shape) < 0.4, drops=draw.random(shape) < 0.5))
    whole = ChainFigures(seen.whole)
    wide = whole.settled(spread(chains, seen))
    for number in range(len(chains)):
        narrow = schedule_of(chains, number)
        assert judge(seen.whole, schedule_of(wide, number)) == judge(
            seen.whole, seen.spread(narrow)
        )


def test_a_search_finds_the_same_with_small_values_and_without() -> None:
    layers = 16
    graph = normalised(layers)
    large = Graph.from_edges([1000] * layers, chain_edges(layers), seconds=[4.0] * layers)
    found = portfolio.frontier(graph)
    for one in found:
        assert judge(graph, one.schedule) == one
    expected = {one.overhead_seconds: one.peak_bytes for one in portfolio.frontier(large)}
    assert {one.overhead_seconds for one in found} == set(expected)
    for one in found:
        assert 0 <= one.peak_bytes - expected[one.overhead_seconds] <= 3 * layers


def test_what_cannot_be_written_as_a_chain_is_spread_out_too() -> None:
    seen = without_small(normalised(3), 5)
    innermost = (Region(vertices=(0,)), Region(vertices=(1,), checkpointed=False))
    inside = (
        Region(vertices=(0, 1), inside=innermost),
        Region(vertices=(2,), checkpointed=False),
    )
    deep = Schedule(regions=(Region(vertices=(0, 1, 2), inside=inside),))
    deep.check(seen.graph)
    assert local_search.front(seen, [deep]) == [judge(seen.whole, seen.spread(deep))]


def test_a_graph_stands_for_itself() -> None:
    graph = normalised(2)
    assert as_it_is(graph).is_whole
    assert as_it_is(graph).groups == ((0,), (1,), (2,), (3,))
    assert not without_small(graph, 5).is_whole
