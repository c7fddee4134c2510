"""Many chains of regions at once, against the referee's replay of each."""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import evaluate, simulate
from remat_opt.solvers.base import candidate, judge
from remat_opt.solvers.chain_figures import (
    LEVELS,
    ChainFigures,
    Chains,
    chains_of,
    is_chain,
    joined,
    schedule_of,
)
from tests.graphs import chain_edges, graphs, nested_graphs

MANY = 12


def drawn_chains(graph: Graph, seed: int) -> Chains:
    draw = np.random.default_rng(seed)
    shape = (LEVELS, len(graph), MANY)
    return Chains(starts=draw.random(shape) < 0.3, drops=draw.random(shape) < draw.random(MANY))


def check_figures(graph: Graph, seed: int) -> None:
    known = ChainFigures(graph)
    chains = known.settled(drawn_chains(graph, seed))
    figures = known.figures(chains)
    for number in range(MANY):
        schedule = schedule_of(chains, number)
        schedule.check(graph)
        told = simulate(graph, schedule)
        assert figures.peak_bytes[number] == told.peak_bytes
        assert figures.seconds[number] == told.overhead_seconds
        assert set(np.flatnonzero(figures.again[:, number])) == set(told.recomputed)
        alive = {live.vertex for live in told.alive if live.role == "kept"}
        if told.stored and told.moments[told.peak].phase != "forward":
            held = {v for v in np.flatnonzero(figures.held[:, number]) if graph.bytes[v]}
            assert held == alive
        assert figures.peak_bytes[number] <= figures.strain_bytes[number] + 1e-9
        again = known.settled(chains_of(graph, [schedule]))
        assert known.figures(again).peak_bytes[0] == told.peak_bytes
        runs, from_memory = known.demands(chains[[number]])
        assert sorted(np.nonzero(runs[:, :, 0])[1].tolist()) == list(told.recomputed)
        judged = judge(graph, schedule)
        assert candidate(schedule, evaluate(graph, schedule), from_memory[:, :, 0]) == judged


@hypothesis.given(graphs(), st.integers(0, 10**6))
@hypothesis.settings(max_examples=20)
def test_figures_are_the_referees(graph: Graph, seed: int) -> None:
    check_figures(graph, seed)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=16), st.integers(0, 10**6))
@hypothesis.settings(max_examples=200)
def test_figures_are_the_referees_on_many_graphs(graph: Graph, seed: int) -> None:
    check_figures(graph, seed)


@hypothesis.given(nested_graphs())
@hypothesis.settings(max_examples=50)
def test_schedules_keep_their_figures_unless_they_are_passed_over(drawn) -> None:
    graph, schedule = drawn
    graph = dataclasses.replace(graph, internal_bytes=(0,) * len(graph))
    if is_chain(graph, schedule):
        known = ChainFigures(graph)
        found = known.figures(known.settled(chains_of(graph, [schedule])))
        expected = evaluate(graph, schedule)
        # A value that is useless to drop is kept: it takes no memory, and need not run again.
        assert found.peak_bytes[0] <= expected.peak_bytes
        assert found.seconds[0] <= expected.overhead_seconds


def test_what_is_passed_over() -> None:
    graph = Graph.from_edges([4] * 3, [(0, 2), (1, 2)])
    swapped = Schedule(regions=(Region(vertices=(1,)), Region(vertices=(0, 2))))
    inner = Region(vertices=(0, 1), inside=(Region(vertices=(0,)), Region(vertices=(1,))))
    deep = Schedule(
        regions=(
            Region(vertices=(0, 1), inside=(inner,)),
            Region(vertices=(2,), checkpointed=False),
        )
    )
    assert not is_chain(graph, swapped)
    assert not is_chain(graph, deep)
    assert is_chain(graph, plain(graph))
    put_off = Schedule(regions=(Region(vertices=(0, 1, 2), kept=(0, 1, 2)),))
    assert is_chain(graph, put_off)
    assert not is_chain(dataclasses.replace(graph, internal_bytes=(0, 4, 0)), put_off)


def test_settled_chains_put_nothing_with_side_effects_under_a_checkpoint() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([4] * 4, chain_edges(4)), pinned=(False, True, False, False)
    )
    chains = Chains(
        starts=np.zeros((LEVELS, 4, 2), dtype=bool), drops=np.ones((LEVELS, 4, 2), dtype=bool)
    )
    chains.starts[0, 2, 1] = True
    settled = ChainFigures(graph).settled(chains)
    assert schedule_of(settled, 0) == plain(graph)
    assert [one.checkpointed for one in schedule_of(settled, 1).regions] == [False, True]


def test_joined_and_keys() -> None:
    graph = Graph.from_edges([4] * 4, chain_edges(4))
    known = ChainFigures(graph)
    one = known.settled(drawn_chains(graph, 1))
    two = known.settled(drawn_chains(graph, 2))
    both = joined([one, two])
    assert len(both) == 2 * MANY
    assert both.keys() == [*one.keys(), *two.keys()]
    assert both[[MANY]].keys() == two[[0]].keys()
    assert known.figures(both).peak_bytes.tolist() == [
        *known.figures(one).peak_bytes,
        *known.figures(two).peak_bytes,
    ]
