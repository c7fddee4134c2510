"""The trunk: what is merged, and that schedules of it spread to schedules of the whole graph."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import simulate
from remat_opt.solvers.trunk import trunk
from tests.graphs import graphs, schedules


def test_side_results_are_merged_into_what_they_hang_on() -> None:
    # a -> b -> e is the trunk; c hangs on b, and d on c.
    graph = Graph.from_edges(
        [1, 2, 4, 8, 16],
        [(0, 1), (1, 2), (2, 3), (0, 3), (1, 4)],
        seconds=[1, 1, 1, 1, 5],
        names="abcde",
    )
    found = trunk(graph)
    assert found.groups == ((0,), (1, 2, 3), (4,))
    assert found.graph.names == ("a", "b", "e")
    assert found.graph.bytes == (1, 14, 16)
    assert found.graph.seconds == (1.0, 3.0, 5.0)
    assert found.graph.predecessors == ((), (0,), (1,))
    assert found.graph.needs == ((0,), (0, 1), (1, 2))


def test_a_result_that_reads_nothing_runs_first() -> None:
    graph = Graph.from_edges([1, 1, 1], [(1, 2)])
    assert trunk(graph).groups == ((1, 0), (2,))


def test_of_equal_sinks_the_last_is_the_loss() -> None:
    graph = Graph.from_edges([1, 1, 1], [(0, 1), (0, 2)])
    assert trunk(graph).groups == ((0, 1), (2,))


def test_a_schedule_is_spread_with_the_regions_inside() -> None:
    graph = Graph.from_edges([1] * 5, [(0, 1), (0, 2), (2, 3), (3, 4)], seconds=[1, 1, 9, 9, 9])
    found = trunk(graph)
    inside = (Region(vertices=(0,)), Region(vertices=(1,), checkpointed=False))
    narrow = Schedule(
        regions=(
            Region(vertices=(0, 1), kept=(0,), inside=inside),
            Region(vertices=(2, 3), checkpointed=False),
        )
    )
    narrow.check(found.graph)
    wide = found.spread(narrow)
    wide.check(graph)
    assert wide.regions[0].vertices == (0, 1, 2)
    assert wide.regions[0].kept == (0,)
    assert [one.vertices for one in wide.regions[0].inside] == [(0, 1), (2,)]


@hypothesis.given(graphs(), st.data())
@hypothesis.settings(max_examples=50)
def test_schedules_of_the_trunk_are_schedules_of_the_graph(
    graph: Graph, data: st.DataObject
) -> None:
    found = trunk(graph)
    assert sorted(one for group in found.groups for one in group) == list(range(len(graph)))
    assert sum(found.graph.bytes) == sum(graph.bytes)
    schedule = data.draw(schedules(found.graph))
    spread = found.spread(schedule)
    spread.check(graph)
    simulate(graph, spread)


@hypothesis.given(graphs())
def test_a_trunk_is_its_own_trunk(graph: Graph) -> None:
    once = trunk(graph).graph
    twice = trunk(once)
    assert twice.groups == tuple((vertex,) for vertex in range(len(once)))
    assert dataclasses.replace(twice.graph) == once
