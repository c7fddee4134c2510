"""Chains of known regions: where they fit, and the best of them for every budget."""

from __future__ import annotations

import itertools

import pytest

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import simulate
from remat_opt.solvers.recombination import (
    Alike,
    Part,
    is_stretch,
    schedules,
    shifted,
    trimmed,
)

#: Layers of a large and a small value; the last one has no small value.
SIZES = [100, 10] * 3 + [100]
CHAIN = Graph.from_edges(SIZES, list(itertools.pairwise(range(7))))


def region(first: int, stop: int, *kept: int, checkpointed: bool = True) -> Region:
    return Region(vertices=tuple(range(first, stop)), kept=kept, checkpointed=checkpointed)


def part(one: Region, needs: int, held: int, cost: float) -> Part:
    return Part(region=one, needs_bytes=needs, held_bytes=held, cost=cost)


def test_where_the_graph_is_the_same() -> None:
    alike = Alike(CHAIN)
    # The first vertex reads nothing, so the first layer differs from the others.
    assert list(alike.shifts(region(2, 4))) == [0, 2]
    assert list(alike.shifts(region(4, 6))) == [-2, 0]
    assert list(alike.shifts(region(1, 2))) == [0, 2, 4]
    assert list(alike.shifts(region(0, 2))) == [0]
    assert list(alike.shifts(region(2, 3))) == [0, 2, 4]
    nest = Region(vertices=(2, 3), inside=(region(2, 3, 2), region(3, 4, checkpointed=False)))
    assert shifted(nest, 2) == Region(
        vertices=(4, 5), inside=(region(4, 5, 4), region(5, 6, checkpointed=False))
    )


def test_trimmed() -> None:
    whole = Region(vertices=(2, 3, 4), kept=(2, 4), inside=(region(2, 3), region(3, 5, 4)))
    found = list(trimmed(whole))
    assert found[0] is whole
    assert Region(vertices=(3, 4), kept=(4,)) in found
    assert Region(vertices=(2, 3), kept=(2,), inside=(region(2, 3), region(3, 4))) in found
    assert all(one.vertices for one in found)
    assert list(trimmed(region(2, 3))) == [region(2, 3)]
    assert not is_stretch(Region(vertices=(2, 4)))


def test_the_cheapest_chain_for_every_amount_of_memory() -> None:
    parts = []
    for first, stop in ((0, 2), (2, 4), (4, 6)):
        parts.append(part(region(first, stop, stop - 1), needs=120, held=10, cost=1.0))
        parts.append(part(region(first, stop, checkpointed=False), needs=130, held=110, cost=0.0))
    parts.append(part(region(6, 7, checkpointed=False), needs=110, held=0, cost=0.0))
    # Worse than the first in everything.
    parts.append(part(region(0, 2, 0, 1), needs=150, held=110, cost=1.5))
    found = schedules(CHAIN, parts, 512)
    kinds = {tuple(one.checkpointed for one in schedule.regions) for schedule in found}
    # Consecutive regions without a checkpoint are one.
    assert (True, True, True, False) in kinds
    assert (False,) in kinds
    for schedule in found:
        simulate(CHAIN, schedule)
        assert sorted(v for one in schedule.regions for v in one.vertices) == list(range(7))
    assert len(schedules(CHAIN, parts, 512, most=1)) <= len(found)


def test_what_crosses_is_kept_by_name() -> None:
    parts = [
        part(region(0, 3), needs=100, held=10, cost=1.0),
        part(region(3, 6), needs=100, held=10, cost=1.0),
        part(region(6, 7, checkpointed=False), needs=100, held=0, cost=0.0),
    ]
    found = schedules(CHAIN, parts, 512)
    assert found
    for schedule in found:
        assert schedule == Schedule(
            regions=(region(0, 3, 2), region(3, 6, 5), region(6, 7, checkpointed=False))
        )


@pytest.mark.parametrize("gap", [0, 3, 6])
def test_no_chain_leaves_a_vertex_out(gap: int) -> None:
    parts = [
        part(region(v, v + 1, checkpointed=False), needs=1, held=0, cost=0.0)
        for v in range(7)
        if v != gap
    ]
    assert schedules(CHAIN, parts, 100) == []
