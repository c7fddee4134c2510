"""Memory over time as data: the referee's figures to the byte, at fewer moments."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import simulate
from remat_opt.timeline import KINDS, Timeline, timeline
from tests.graphs import chain_edges, scheduled_graphs


def of(graph: Graph, schedule: Schedule, more: int = 0, gradients: int = 0) -> Timeline:
    found = simulate(graph, schedule)
    return timeline(
        graph,
        schedule,
        found,
        live_bytes=[moment.live_bytes + more for moment in found.moments],
        gradient_bytes=[gradients] * len(graph),
        roots=[10 * vertex for vertex in range(len(graph))],
    )


def totals(told: Timeline) -> list[int]:
    return [sum(amounts) for amounts in zip(*(getattr(told, k) for k in KINDS), strict=True)]


@hypothesis.given(scheduled_graphs(), st.integers(0, 7), st.integers(0, 9))
def test_kinds_add_up_to_what_is_alive(
    drawn: tuple[Graph, Schedule], more: int, gradients: int
) -> None:
    moments = simulate(*drawn).moments
    told = of(*drawn, more, gradients)
    assert told.steps == len(moments)
    assert totals(told) == [moments[step].live_bytes + more for step in told.at]
    assert told.phases == tuple(moments[step].phase for step in told.at)
    assert told.roots == tuple(10 * moments[step].vertex for step in told.at)


def test_what_was_learnt_may_be_less() -> None:
    graph = Graph.from_edges([4, 4, 4], chain_edges(3))
    found = simulate(graph, plain(graph))
    told = timeline(
        graph,
        plain(graph),
        found,
        live_bytes=[1] * len(found.moments),
        gradient_bytes=[0] * 3,
        roots=range(3),
    )
    assert totals(told) == [1] * len(found.moments)
    assert min(min(getattr(told, kind)) for kind in KINDS) == 0


def chain(*regions: Region) -> Timeline:
    graph = Graph.from_edges([1, 2, 4, 8], chain_edges(4))
    return of(graph, Schedule(regions=regions))


def test_what_is_kept_by_name_and_what_later_regions_read() -> None:
    told = chain(
        Region(vertices=(0, 1), kept=(0,)),
        Region(vertices=(2, 3), checkpointed=False),
    )
    turn = told.phases.index("backward")
    # In the first region one is kept by name, and the other is read by the second region.
    assert (told.kept[turn], told.boundaries[turn]) == (1 + 4 + 8, 2)
    assert told.passing[turn] == 0


def test_what_is_recomputed_and_what_is_passing() -> None:
    told = chain(Region(vertices=(0, 1)), Region(vertices=(2, 3), checkpointed=False))
    # Each needs its own value backward.
    assert max(told.recomputed) == 1 + 2
    assert told.passing[0] == 1


def test_gradients_of_parameters_are_gradients() -> None:
    graph = Graph.from_edges([1, 1], chain_edges(2))
    busy = Graph(
        **{
            **{name: getattr(graph, name) for name in graph.__slots__},
            "workspace_bytes": (0, 64),
        }
    )
    assert max(of(busy, plain(busy)).workspace) == 64
    told = of(busy, plain(busy), gradients=64)
    assert max(told.workspace) == 0
    assert max(told.gradients) >= 64


def test_a_long_replay_is_told_at_the_fullest_moment_of_each_stretch() -> None:
    graph = Graph.from_edges([1] * 499 + [1000] + [1] * 500, chain_edges(1000))
    found, told = simulate(graph, plain(graph)), of(graph, plain(graph))
    assert len(told.at) == 240
    assert found.peak_bytes == max(totals(told))
    assert found.moments[told.at[totals(told).index(found.peak_bytes)]].live_bytes == (
        found.peak_bytes
    )


@hypothesis.given(scheduled_graphs())
def test_the_largest_arrays_are_named_at_every_moment(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    found, told = simulate(graph, schedule), of(graph, schedule)
    for number, step in enumerate(told.at):
        alive = [life.bytes for life in found.lives if life.first <= step <= life.last]
        named = [one.bytes for one in told.arrays if one.first <= number <= one.last]
        largest = sorted((size for size in alive if size > 0), reverse=True)[:6]
        assert sorted(named, reverse=True)[:6] == largest
