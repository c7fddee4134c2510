"""Schedules: which ones can be executed, and how the others are refused."""

from __future__ import annotations

import dataclasses
import re

import hypothesis
import pytest

from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from tests.graphs import chain_edges, scheduled_graphs

CHAIN = Graph.from_edges([1] * 4, chain_edges(4), names="abcd")


def chain_of(*regions: Region) -> Schedule:
    return Schedule(regions=regions)


def refused(schedule: Schedule, message: str, graph: Graph = CHAIN) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        schedule.check(graph)


def test_region_of_numbers_the_regions() -> None:
    schedule = chain_of(Region(vertices=(0, 1)), Region(vertices=(2, 3)))
    assert schedule.region_of() == {0: 0, 1: 0, 2: 1, 3: 1}


def test_plain_is_one_region_without_a_checkpoint() -> None:
    schedule = plain(CHAIN)
    assert schedule == chain_of(Region(vertices=(0, 1, 2, 3), checkpointed=False))
    schedule.check(CHAIN)


@hypothesis.given(scheduled_graphs())
def test_chains_of_consecutive_regions_are_accepted(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    schedule.check(graph)


def test_regions_may_interleave_where_nothing_is_read_too_early() -> None:
    two_chains = Graph.from_edges([1] * 4, [(0, 2), (1, 3)])
    chain_of(Region(vertices=(1, 3)), Region(vertices=(0, 2))).check(two_chains)


def test_empty_region_is_refused() -> None:
    refused(
        chain_of(Region(vertices=(0, 1, 2, 3)), Region(vertices=())),
        "Region 1 of the schedule is empty.",
    )


def test_schedule_without_regions_is_refused() -> None:
    refused(chain_of(), "Vertex 'a' is in no region.")


def test_missing_vertex_is_refused() -> None:
    refused(chain_of(Region(vertices=(0, 1)), Region(vertices=(3,))), "Vertex 'c' is in no region.")


@pytest.mark.parametrize("vertex", [4, -1])
def test_unknown_vertex_is_refused(vertex: int) -> None:
    refused(
        chain_of(Region(vertices=tuple(sorted((0, 1, 2, 3, vertex))))),
        f"Region 0 of the schedule holds vertex {vertex}, but there are only 4 vertices, numbered "
        "from 0.",
    )


def test_vertex_in_two_regions_is_refused() -> None:
    refused(
        chain_of(Region(vertices=(0, 1, 2)), Region(vertices=(2, 3))),
        "Vertex 'c' is in two regions.",
    )


def test_unordered_region_is_refused() -> None:
    refused(
        chain_of(Region(vertices=(0, 2, 1, 3))),
        "The vertices of region 0 of the schedule are not ascending.",
    )


def test_keeping_what_another_region_computes_is_refused() -> None:
    refused(
        chain_of(Region(vertices=(0, 1), kept=(1, 2)), Region(vertices=(2, 3))),
        "Region 0 of the schedule keeps 'c', which another region computes.",
    )


def test_reading_from_a_later_region_is_refused() -> None:
    refused(
        chain_of(Region(vertices=(0, 2)), Region(vertices=(1, 3))),
        "Vertex 'c' reads 'b', which a later region computes.",
    )


def test_side_effects_under_a_checkpoint_are_refused() -> None:
    effects = dataclasses.replace(CHAIN, pinned=(False, True, False, False))
    refused(
        chain_of(Region(vertices=(0, 1)), Region(vertices=(2, 3), checkpointed=False)),
        "Vertex 'b' has side effects and must not run under a checkpoint, which would repeat them.",
        effects,
    )
    plain(effects).check(effects)


def inner(*vertices: int) -> Region:
    return Region(vertices=vertices, checkpointed=False)


def test_regions_may_nest() -> None:
    deep = Region(vertices=(0, 1), inside=(Region(vertices=(0,)), inner(1)))
    chain_of(Region(vertices=(0, 1, 2), inside=(deep, inner(2))), inner(3)).check(CHAIN)


def test_regions_inside_must_add_up_to_the_region() -> None:
    refused(
        chain_of(Region(vertices=(0, 1, 2), inside=(Region(vertices=(0,)), inner(2))), inner(3)),
        "The regions inside region 0 of the schedule do not hold the same vertices as that region.",
    )


def test_regions_inside_come_in_order() -> None:
    refused(
        chain_of(Region(vertices=(0, 1), inside=(Region(vertices=(1,)), inner(0))), inner(2, 3)),
        "Vertex 'b' reads 'a', which a later region computes.",
    )


def test_a_region_inside_is_checked_like_any_other() -> None:
    refused(
        chain_of(Region(vertices=(0, 1), inside=(Region(vertices=()), inner(0, 1))), inner(2, 3)),
        "Region 0 of the regions inside region 0 of the schedule is empty.",
    )


def test_only_a_checkpoint_has_regions_inside() -> None:
    refused(
        chain_of(
            Region(vertices=(0, 1), checkpointed=False, inside=(inner(0), inner(1))), inner(2, 3)
        ),
        "Region 0 of the schedule has regions inside but no checkpoint of its own: put them in its "
        "place.",
    )
