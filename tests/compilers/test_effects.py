"""What depends on the schedule: arrays to write to, and bytes held in addition."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest

from remat_opt.compilers.effects import Effect, Figures, Held, checkpoints, kept_by_name
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain, unchanged
from tests.compiler_graphs import whole
from tests.graphs import depth, graphs, nested_graphs

#: Only a pinned vertex may take memory just while it runs forward.
CHAIN = dataclasses.replace(
    Graph.from_edges([4] * 5, [(vertex, vertex + 1) for vertex in range(4)]),
    pinned=(False, False, True, False, False),
)


@hypothesis.given(graphs())
def test_figures_that_nothing_writes_to_are_those_of_the_graph(graph: Graph) -> None:
    assert Figures.of(graph).put_into(graph) == graph


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Figures)])
def test_what_is_written_is_put_into_the_graph_and_nothing_else(name: str) -> None:
    figures = Figures.of(CHAIN)
    getattr(figures, name)[2] += 7
    found = figures.put_into(CHAIN)
    before, after = getattr(CHAIN, name), getattr(found, name)
    assert after == (*before[:2], before[2] + 7, *before[3:])
    assert all(type(one) is int for one in after)
    assert dataclasses.replace(found, **{name: before}) == CHAIN
    # The graph itself is unchanged.
    assert Figures.of(CHAIN).put_into(CHAIN) == CHAIN


def test_an_effect_that_says_nothing_changes_nothing() -> None:
    figures = Figures.of(CHAIN)
    for schedule in (plain(CHAIN), whole(CHAIN), unchanged(CHAIN)):
        Effect().change(figures, schedule)
        assert Effect().held_bytes(CHAIN, schedule) == 0
    assert list(Effect().notes(plain(CHAIN))) == []
    assert figures.put_into(CHAIN) == CHAIN


def test_held_bytes_depend_on_checkpoints_round_what_they_are_for() -> None:
    held = Held(vertices=(1, 2), bytes=10, checkpointed_bytes=3, unchanged_bytes=20)
    first, second = Region(vertices=(0, 1)), Region(vertices=(2, 3, 4))
    free = Region(vertices=(0, 1, 2), checkpointed=False)
    for regions, expected in (
        (plain(CHAIN).regions, 10),
        (whole(CHAIN).regions, 3),
        # One of them suffices.
        ((first, dataclasses.replace(second, checkpointed=False)), 3),
        ((dataclasses.replace(first, checkpointed=False), second), 3),
        ((free, Region(vertices=(3, 4))), 10),
    ):
        assert held.held_bytes(CHAIN, Schedule(regions=regions)) == expected
    assert held.held_bytes(CHAIN, unchanged(CHAIN)) == 20
    for_none = dataclasses.replace(held, vertices=())
    assert for_none.held_bytes(CHAIN, whole(CHAIN)) == 10


NESTED = (
    Region(
        vertices=(0, 1, 2),
        kept=(1,),
        inside=(
            Region(vertices=(0,), kept=(0,)),
            Region(vertices=(1, 2), kept=(2,), checkpointed=False),
        ),
    ),
    Region(vertices=(3,), kept=(3,), checkpointed=False),
    Region(vertices=(4,)),
)


def test_what_checkpoints_keep_at_any_depth() -> None:
    assert sorted(kept_by_name(NESTED)) == [0, 1]


def test_checkpoints_are_named_by_their_place_in_the_nest() -> None:
    assert dict(checkpoints(NESTED)) == {
        0: {(0,), (0, 0)},
        1: {(0,)},
        2: {(0,)},
        3: set(),
        4: {(2,)},
    }


@hypothesis.given(nested_graphs())
def test_every_vertex_has_its_checkpoints(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    found = list(checkpoints(schedule.regions))
    assert sorted(vertex for vertex, _ in found) == list(range(len(graph)))
    assert max(len(around) for _, around in found) == depth(schedule.regions)
