"""Spans against the simulator, which counts readers down instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest

from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import Demand, demand, simulate
from remat_opt.solvers.base import judge, judged
from remat_opt.spans import Library, Stacks, read_from_memory, spans
from tests.graphs import INSTANCES, chain_edges, graphs, nested_graphs, scheduled_graphs


def agree(graph: Graph, schedule: Schedule) -> None:
    found, told = spans(graph, schedule), simulate(graph, schedule)
    assert found.peak_bytes == told.peak_bytes
    assert sorted(found.again.tolist()) == list(told.recomputed)
    assert math.fsum(graph.seconds[one] for one in found.again) == told.overhead_seconds
    assert (found.first <= found.last).all()
    # At the peak, the arrays are those that the simulation lists.
    for step in range(int(found.last.max()) + 1):
        alive = found.bytes[(found.first <= step) & (step <= found.last)]
        if alive.sum() == told.peak_bytes:
            assert sorted(alive[alive > 0].tolist()) == sorted(one.bytes for one in told.alive)
            break
    else:
        pytest.fail("no step reaches the peak")
    agree_on_reads(read_from_memory(graph, schedule), 0, schedule.regions, demand(graph, schedule))


def agree_on_reads(
    found: Sequence[np.ndarray], depth: int, regions: Sequence[Region], wanted: Demand
) -> None:
    """In a nest, what it keeps; what is around it is given at the outer depth."""
    for region, inside in zip(regions, wanted.inside, strict=True):
        for vertex in region.vertices:
            assert found[depth][vertex] == (vertex in wanted.stored), (depth, vertex)
        if inside is not None:
            agree_on_reads(found, depth + 1, region.inside, inside)


@pytest.mark.parametrize("name", INSTANCES)
def test_agrees_on_the_unchanged_function(name: str) -> None:
    agree(INSTANCES[name], plain(INSTANCES[name]))


@hypothesis.given(scheduled_graphs())
@hypothesis.settings(max_examples=40)
def test_agrees_on_chains_of_regions(drawn: tuple[Graph, Schedule]) -> None:
    agree(*drawn)


@hypothesis.given(nested_graphs(max_vertices=14))
@hypothesis.settings(max_examples=50)
def test_agrees_where_regions_nest(drawn: tuple[Graph, Schedule]) -> None:
    agree(*drawn)


@pytest.mark.parametrize(
    ("cotangent", "count", "arrays"), [(3, 1, [3]), (7, 3, [2, 2, 3]), (12, 4, [3, 3, 3, 3])]
)
def test_a_cotangent_of_several_arrays_is_in_pieces(
    cotangent: int, count: int, arrays: list[int]
) -> None:
    graph = Graph.from_edges([3, 3, 3], chain_edges(3))
    graph = dataclasses.replace(graph, cotangent_bytes=(3, cotangent, 3))
    found = spans(graph, plain(graph), pieces={1: count})
    told = simulate(graph, plain(graph))
    assert found.peak_bytes == told.peak_bytes
    born = found.turn[2]
    there = (found.first == born) & (found.last == found.turn[1])
    assert sorted(found.bytes[there].tolist()) == arrays


def test_a_workspace_is_there_for_one_step() -> None:
    graph = Graph.from_edges([3, 3, 3], chain_edges(3))
    without = simulate(graph, plain(graph))
    for vertex in range(3):
        sizes = tuple(100 if v == vertex else 0 for v in range(3))
        busy = dataclasses.replace(graph, workspace_bytes=sizes)
        found = simulate(busy, plain(graph))
        more = [
            (one.phase, one.vertex, one.live_bytes - other.live_bytes)
            for one, other in zip(found.moments, without.moments, strict=True)
            if one != other
        ]
        assert more == [("backward", vertex, 100)]
        assert ("workspace", vertex, 100) in [(a.role, a.vertex, a.bytes) for a in found.alive]


def test_arrays_that_are_there_in_the_forward_pass() -> None:
    graph = Graph.from_edges([3, 3, 3], chain_edges(3))
    found = spans(graph, plain(graph))
    steps = int(found.last.max()) + 1
    more = found.with_forward([100, 20]).live_bytes(steps) - found.live_bytes(steps)
    assert more.tolist() == [120] * 3 + [0] * (steps - 3)
    early = found.with_forward([20], [(0, 1, 100), (1, 1, 7)]).live_bytes(steps)
    assert (early - found.live_bytes(steps)).tolist() == [120, 127, 20] + [0] * (steps - 3)
    assert found.with_forward([]) is found


def test_a_forward_workspace_is_there_while_its_vertex_runs() -> None:
    graph = Graph.from_edges([3, 3, 3], chain_edges(3))
    without = simulate(graph, plain(graph))
    busy = dataclasses.replace(
        graph, pinned=(False, True, False), forward_workspace_bytes=(0, 100, 0)
    )
    found = simulate(busy, plain(graph))
    assert [
        (one.phase, one.vertex, one.live_bytes - other.live_bytes)
        for one, other in zip(found.moments, without.moments, strict=True)
        if one != other
    ] == [("forward", 1, 100)]
    with pytest.raises(GraphError, match="not pinned"):
        dataclasses.replace(graph, forward_workspace_bytes=(0, 100, 0))


@hypothesis.given(graphs(pinned=False))
def test_agrees_where_regions_are_out_of_order(graph: Graph) -> None:
    """All vertices that read nothing come first, whatever their numbers."""
    first = tuple(vertex for vertex, found in enumerate(graph.predecessors) if not found)
    then = tuple(vertex for vertex, found in enumerate(graph.predecessors) if found)
    regions = [Region(vertices=vertices) for vertices in (first, then) if vertices]
    agree(graph, Schedule(regions=tuple(regions)))


def test_by_hand() -> None:
    """Two values under a checkpoint, then the loss; each step reads its input and its output."""
    graph = Graph.from_edges([4, 5, 6], chain_edges(3))
    graph = dataclasses.replace(graph, cotangent_bytes=(0, 0, 0))
    schedule = Schedule(
        regions=(Region(vertices=(0, 1)), Region(vertices=(2,), checkpointed=False))
    )
    found = spans(graph, schedule)
    # Forward 0, 1, 2; backward 2; again 0; backward 1, 0. The loss reads what is stored of 1.
    arrays = zip(found.first, found.last, found.bytes, strict=True)
    assert [tuple(map(int, one)) for one in arrays] == [
        (0, 1, 4),
        (1, 3, 5),
        (2, 3, 6),
        (4, 7, 4),
        (5, 6, 5),
    ]
    assert sorted(found.again.tolist()) == [0, 1]


def test_an_iteration_by_hand() -> None:
    """Three values under a checkpoint that keeps the first; the last two read and write arrays."""
    graph = Graph.from_edges([4, 5, 6], chain_edges(3))
    graph = dataclasses.replace(graph, cotangent_bytes=(0, 0, 7))
    schedule = Schedule(regions=(Region(vertices=(0, 1, 2), kept=(0,)),))
    stacks = Stacks(
        slicing=np.array([False, True, True]),
        inputs=[(8, (1,), False), (9, (2,), False)],
        carried_bytes=10,
        handed_out=np.array([False, False, True]),
    )

    def arrays(stacks: Stacks) -> list[tuple[int, ...]]:
        found = spans(graph, schedule, stacks)
        return sorted(
            tuple(map(int, one)) for one in zip(found.first, found.last, found.bytes, strict=True)
        )

    # Forward 0, 1, 2; again 1, 2; backward 2, 1, 0.
    forward = [(0, 2, 4), (0, 2, 10), (1, 1, 8), (1, 2, 5), (2, 2, 6), (2, 2, 9)]
    # Of the first there are copies where vertex 1 runs, and where its backward step does; where
    # that of vertex 0 does, it is read in its place.
    copies = [(3, 3, 4), (6, 6, 4)]
    again = [(3, 6, 5), (4, 5, 6)]
    assert arrays(stacks) == sorted([*forward, *copies, *again, (3, 6, 8), (4, 5, 9), (3, 5, 7)])
    at_once = dataclasses.replace(stacks, inputs=[(8, (1,), True), (9, (2,), True)])
    assert arrays(at_once) == sorted([*forward, *copies, *again, (3, 6, 8), (3, 5, 9), (3, 5, 7)])
    # In no stack, what waits is an array.
    alone = dataclasses.replace(stacks, slicing=None, carried_bytes=0)
    assert (0, 7, 4) in arrays(alone)


def test_an_iteration_that_a_library_takes_from_stacks_by_hand() -> None:
    """As above; the last is a product, which reads what waits and an input in their places."""
    graph = Graph.from_edges([4, 5, 6], chain_edges(3))
    graph = dataclasses.replace(graph, cotangent_bytes=(0, 0, 7))
    stacks = Stacks(
        slicing=np.array([False, True, True]),
        inputs=[],
        carried_bytes=10,
        handed_out=np.array([False, False, True]),
        library=Library(
            vertices=np.array([False, False, True]),
            inputs=[(9, (2,))],
            forward=[2],
            workspace_bytes=3,
        ),
        gradients=[(8, 2), (1, 1)],
    )

    def arrays(kept: tuple[int, ...], *, late: bool = False) -> list[tuple[int, ...]]:
        schedule = Schedule(regions=(Region(vertices=(0, 1, 2), kept=kept),))
        found = spans(graph, schedule, dataclasses.replace(stacks, late=late))
        return sorted(
            tuple(map(int, one)) for one in zip(found.first, found.last, found.bytes, strict=True)
        )

    # Forward 0, 1, 2; again 1, 2; backward 2, 1, 0. What runs again reads a copy of the input; a
    # gradient waits for the last.
    forward = [(0, 2, 4), (0, 2, 10), (1, 2, 5), (2, 2, 6), (2, 2, 3)]
    rest = [(3, 4, 9), (5, 5, 3), (3, 5, 7), (6, 6, 8), (3, 3, 4), (6, 6, 4)]
    assert arrays((0,)) == sorted([*forward, *rest, (3, 6, 5), (4, 5, 6)])
    # If it is first read by the backward step, it runs then.
    late = [(3, 5, 9), (5, 5, 3), (3, 5, 7), (6, 6, 8), (5, 5, 4), (6, 6, 4)]
    assert arrays((0,), late=True) == sorted([*forward, *late, (5, 6, 5), (5, 5, 6)])
    # Kept, it is read in its place, and only what is no product reads a copy.
    found = arrays((0, 1, 2))
    assert (3, 3, 3) in found
    assert not {(3, 3, 5), (3, 3, 6)} & set(found)
    assert {(4, 4, 4), (4, 4, 5)} <= set(found)


def test_what_cannot_be_executed_is_refused() -> None:
    graph = Graph.from_edges([1, 1, 1], chain_edges(3))
    ahead = (Region(vertices=(0, 2)), Region(vertices=(1,)))
    for regions in (
        ahead,
        (Region(vertices=(0, 1, 2), inside=ahead),),
        (Region(vertices=(0, 1)),),
        (Region(vertices=(0, 1)), Region(vertices=(1, 2))),
        (Region(vertices=(0, 1)), Region(vertices=(0,))),
    ):
        schedule = Schedule(regions=regions)
        with pytest.raises(GraphError):
            schedule.check(graph)
        with pytest.raises(GraphError):
            spans(graph, schedule)
        with pytest.raises(GraphError):
            judge(graph, schedule)
        assert judged(graph, [schedule, plain(graph)]) == [judge(graph, plain(graph))]
