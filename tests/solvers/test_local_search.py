"""Local improvement: legal, never worse, deterministic, and how near the best it comes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import hypothesis
import pytest

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.solvers import integer_program, local_search
from remat_opt.solvers.base import Overhead, Solution, fastest_within, judge, pareto
from remat_opt.solvers.chain_figures import ChainFigures, chains_of, schedule_of
from remat_opt.solvers.coarsening import as_it_is
from tests.graphs import INSTANCES, chain_edges, graphs, layered, network


def starts(graph: Graph) -> list[Schedule]:
    """The unchanged function, and every vertex a region."""
    regions = tuple(
        Region(vertices=(v,), checkpointed=not graph.pinned[v]) for v in range(len(graph))
    )
    return [plain(graph), Schedule(regions=regions)]


def check_improved(graph: Graph) -> None:
    given = [judge(graph, one) for one in starts(graph)]
    found = local_search.front(as_it_is(graph), starts(graph))
    for one in found:
        one.schedule.check(graph)
        assert one == judge(graph, one.schedule)
    for other in given:
        assert any(
            one.peak_bytes <= other.peak_bytes
            and one.overhead_seconds <= other.overhead_seconds * (1 + 1e-12)
            for one in found
        )
    # What is passed over is returned unchanged: checkpoints that only put off residuals.
    if not any(graph.internal_bytes):
        assert pareto(found, Overhead.SECONDS) == found


def activations(sizes: Sequence[int]) -> Graph:
    """Products and activations in turn, whose backward steps read the activations alone."""
    given = Graph.from_edges(sizes, itertools.pairwise(range(len(sizes))))
    needs = tuple((v,) if v % 2 else (v - 1,) for v in range(1, len(sizes)))
    return dataclasses.replace(given, needs=((), *needs))


def test_what_a_region_keeps_at_its_end_is_done_with_before_it_runs_again() -> None:
    graph = activations([4, 4, 4, 4, 1, 1])
    kept = Region(vertices=(0, 1, 2, 3), kept=(3,))
    last = Region(vertices=(4, 5), checkpointed=False)
    known = ChainFigures(graph)
    chains = chains_of(graph, [Schedule(regions=(kept, last)), plain(graph)])
    found = local_search._with_open_ends(known, known.settled(chains))
    opened, unchanged = (schedule_of(found, number).regions for number in range(2))
    # It is in no checkpoint, as what follows.
    assert opened == (Region(vertices=(0, 1, 2)), Region(vertices=(3, 4, 5), checkpointed=False))
    assert unchanged == plain(graph).regions
    before, after = (judge(graph, Schedule(regions=one)) for one in ((kept, last), opened))
    assert after.overhead_seconds == before.overhead_seconds
    # While it runs again, one array is there in the place of two.
    assert after.peak_bytes == before.peak_bytes - 4


@hypothesis.given(graphs(max_vertices=7))
@hypothesis.settings(max_examples=6)
def test_what_is_found_is_legal_and_no_worse(graph: Graph) -> None:
    check_improved(graph)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=10))
@hypothesis.settings(max_examples=30)
def test_what_is_found_is_legal_and_no_worse_on_many_graphs(graph: Graph) -> None:
    check_improved(graph)


@pytest.mark.parametrize("graph", [INSTANCES["one"], INSTANCES["chain_5"], network(6)])
def test_second_call_finds_the_same(graph: Graph) -> None:
    found = local_search.front(as_it_is(graph), starts(graph))
    assert local_search.front(as_it_is(graph), starts(graph)) == found


@pytest.mark.parametrize("family", ["chain", "residual", "dense", "inception"])
@pytest.mark.parametrize("count", [5, pytest.param(7, marks=pytest.mark.slow)])
def test_small_graphs_from_nothing_to_the_best(family: str, count: int) -> None:
    graph = layered(family, count)
    found = local_search.front(as_it_is(graph), [plain(graph)])
    least = integer_program.least_peak(graph)
    assert isinstance(least, Solution)
    assert found[0].peak_bytes == least.figures.peak_bytes
    for one in found:
        best = integer_program.least_overhead(graph, one.peak_bytes)
        assert isinstance(best, Solution)
        assert one.overhead_seconds == best.objective


def test_larger_graphs_are_improved_by_a_bounded_number_of_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = network(8)
    edges = [0, 9, 18, len(graph)]
    regions = [Region(vertices=tuple(range(a, b))) for a, b in itertools.pairwise(edges)]
    given = [plain(graph), Schedule(regions=tuple(regions))]
    judged = 0
    figures = ChainFigures.figures

    def counted(self, chains):
        nonlocal judged
        judged += len(chains)
        return figures(self, chains)

    monkeypatch.setattr(ChainFigures, "figures", counted)
    monkeypatch.setattr(local_search, "WORK", 300 * len(graph))
    found = local_search.front(as_it_is(graph), given)
    assert 0 < judged <= len(given) + 300
    before = judge(graph, given[1])
    assert found[0].peak_bytes < before.peak_bytes
    within = fastest_within(found, before.peak_bytes, Overhead.SECONDS)
    assert within is not None
    assert within.overhead_seconds < before.overhead_seconds
    monkeypatch.setattr(local_search, "WORK", 0)
    found = local_search.front(as_it_is(graph), given)
    assert [one.schedule for one in found] == given[::-1]


def test_schedules_that_cannot_be_written_as_chains_are_given_back() -> None:
    graph = Graph.from_edges([4] * 3, [(0, 2), (1, 2)])
    swapped = Schedule(regions=(Region(vertices=(1,)), Region(vertices=(0, 2), checkpointed=False)))
    assert local_search.front(as_it_is(graph), [swapped]) == [judge(graph, swapped)]
    assert local_search.front(as_it_is(Graph.from_edges([4] * 3, chain_edges(3))), []) == []
