"""The joint search: the model against every chain there is, and against the referee."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import evaluate, simulate
from remat_opt.solvers import joint_chain
from remat_opt.solvers.joint_chain import schedules
from tests.graphs import INSTANCES, chain_edges, depth, graphs, kept_sets, network
from tests.solvers.joint_oracle import Model, all_ways, least_cost


@st.composite
def planned(
    draw: st.DrawFn, *, max_vertices: int = 10, most_sets: int = 3
) -> tuple[Graph, list[tuple[int, ...]]]:
    """A graph, some of them with pinned vertices and internal bytes, and any kept sets."""
    graph = draw(graphs(max_vertices=max_vertices))
    return graph, draw(st.lists(kept_sets(graph), max_size=most_sets))


def chain(count: int, *, size: int = 1) -> Graph:
    return Graph.from_edges([size] * count, chain_edges(count))


def exact_table(graph: Graph, kept: Sequence[Sequence[int]]) -> joint_chain._Table:
    """The table in which a slot is a byte, up to the plain peak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_chain, "SLOTS", evaluate(graph, plain(graph)).peak_bytes)
        regions = joint_chain._Regions(graph, kept)
        return joint_chain._Table(regions, 1.0, regions.nested[-1])


def told(graph: Graph, kept: Sequence[Sequence[int]]) -> list[tuple[int, float, Schedule]]:
    """Bytes, cost and schedule at every fall of the cost, with a slot for every byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_chain, "SLOTS", evaluate(graph, plain(graph)).peak_bytes)
        patch.setattr(joint_chain, "_RESOLUTION", 0.0)
        regions = joint_chain._Regions(graph, kept)
        table = joint_chain._Table(regions, 1.0, regions.nested[-1])
        found = [table.schedule(level) for level in table.levels()]
    costs = table._rest[0]
    falls = [level for level, cost in enumerate(costs) if cost < min([math.inf, *costs[:level]])]
    return [(level, costs[level], one) for level, one in zip(falls, found, strict=True)]


def all_regions(regions: Sequence[Region]) -> list[Region]:
    return [one for region in regions for one in (region, *all_regions(region.inside))]


# -------------------------------------------------------------------------------- legality


def check_schedules(graph: Graph, kept: Sequence[Sequence[int]]) -> None:
    found = schedules(graph, kept)
    assert found
    assert len(set(found)) == len(found)
    for schedule in found:
        schedule.check(graph)
        figures = simulate(graph, schedule)
        assert figures.overhead_seconds >= 0
        last = schedule.regions[-1]
        assert not last.checkpointed, "the last backward pass follows at once"
        for region in all_regions(schedule.regions):
            assert region.vertices == tuple(range(region.vertices[0], region.vertices[-1] + 1))
            assert len(region.inside) != 1
            if region.checkpointed:
                assert not any(graph.pinned[vertex] for vertex in region.vertices)
        for level in (schedule.regions, *(r.inside for r in all_regions(schedule.regions))):
            free = [not region.checkpointed for region in level]
            assert not any(a and b for a, b in itertools.pairwise(free))


@hypothesis.given(planned())
@hypothesis.settings(max_examples=20)
def test_schedules_are_legal(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    check_schedules(*drawn)


@pytest.mark.slow
@hypothesis.given(planned(max_vertices=14))
@hypothesis.settings(max_examples=300)
def test_schedules_of_many_graphs_are_legal(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    check_schedules(*drawn)


@pytest.mark.parametrize("graph", INSTANCES.values(), ids=INSTANCES)
def test_schedules_of_the_instances_are_legal(graph: Graph) -> None:
    check_schedules(graph, [tuple(range(0, len(graph), 2))])


@pytest.mark.parametrize("graph", INSTANCES.values(), ids=INSTANCES)
def test_unchanged_function_is_among_them(graph: Graph) -> None:
    costless = [s for s in schedules(graph, []) if not evaluate(graph, s).overhead_seconds]
    assert min(evaluate(graph, s).peak_bytes for s in costless) <= (
        evaluate(graph, plain(graph)).peak_bytes
    )


@hypothesis.given(graphs(max_vertices=2), st.data())
def test_tiny_graphs(graph: Graph, data: st.DataObject) -> None:
    check_schedules(graph, data.draw(st.lists(kept_sets(graph), max_size=2)))


def test_one_vertex_stays_as_it_is() -> None:
    graph = chain(1)
    assert schedules(graph, [(0,)]) == [plain(graph)]


def test_two_vertices() -> None:
    # The first value need not wait for the second: only its unnamed residuals shrink.
    graph = dataclasses.replace(
        Graph.from_edges([1, 1], chain_edges(2)), internal_bytes=(8, 0), needs=((0,), (1,))
    )
    first, *_ = schedules(graph, [])
    assert [region.checkpointed for region in first.regions] == [True, False]


@hypothesis.given(planned(max_vertices=8))
@hypothesis.settings(max_examples=12)
def test_without_cotangents_and_without_needs(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    graph, kept = drawn
    count = len(graph)
    check_schedules(dataclasses.replace(graph, cotangent_bytes=(0,) * count), kept)
    check_schedules(dataclasses.replace(graph, needs=((),) * count), kept)


@hypothesis.given(planned(max_vertices=8))
@hypothesis.settings(max_examples=12)
def test_zero_bytes_leave_nothing_to_plan(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    graph, kept = drawn
    none = (0,) * len(graph)
    graph = dataclasses.replace(graph, bytes=none, cotangent_bytes=none, internal_bytes=none)
    assert schedules(graph, kept) == [plain(graph)]


@hypothesis.given(planned(max_vertices=8))
@hypothesis.settings(max_examples=12)
def test_zero_seconds_make_recomputation_free(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    graph, kept = drawn
    graph = dataclasses.replace(graph, seconds=(0.0,) * len(graph))
    check_schedules(graph, kept)


def test_side_effects_are_under_no_checkpoint_at_any_depth() -> None:
    pinned = tuple(vertex in (5, 21) for vertex in range(32))
    graph = dataclasses.replace(chain(32), pinned=pinned)
    found = schedules(graph, [tuple(range(0, 32, 3))])
    assert max(depth(schedule.regions) for schedule in found) >= 2
    for schedule in found:
        for region in all_regions(schedule.regions):
            assert not (region.checkpointed and {5, 21} & set(region.vertices))


# ------------------------------------------------------------------------ within the model


@hypothesis.given(planned(max_vertices=8, most_sets=2))
@hypothesis.settings(max_examples=20)
def test_figures_of_regions_are_those_of_their_replay(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    graph, kept = drawn
    regions, model = joint_chain._Regions(graph, kept), Model(graph)
    for start, stop in itertools.combinations(range(len(graph) + 1), 2):
        fates = [model.kept(start, stop, set(one)) for one in [(), *kept]]
        expected = [(*model.saved(start, stop), 0.0), *fates]
        for fate, (needs, held, cost) in enumerate(expected):
            assert regions.held[fate, start, stop] == held
            assert regions.cost[fate, start, stop] == cost
            # None if it may not run again, or if another fate is as good.
            assert regions.needs[fate, start, stop] in (needs, math.inf)
        assert regions.needs[0, start, stop] < math.inf
        if not any(graph.pinned[start:stop]):
            assert regions.needs[1, start, stop] < math.inf
        else:
            assert np.all(regions.needs[1:, start, stop] == math.inf)


def check_model(graph: Graph, kept: Sequence[Sequence[int]]) -> None:
    table = exact_table(graph, kept)
    everywhere = range(len(graph) + 1)
    points = all_ways(graph, kept, everywhere, everywhere)
    expected = [least_cost(points, level) for level in range(len(table._rest[0]))]
    assert table._rest[0].tolist() == expected


@hypothesis.given(planned(max_vertices=6, most_sets=2))
@hypothesis.settings(max_examples=20)
def test_least_cost_is_that_of_the_best_of_all_chains(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    hypothesis.assume(evaluate(drawn[0], plain(drawn[0])).peak_bytes)
    check_model(*drawn)


@pytest.mark.slow
@hypothesis.given(planned(max_vertices=7, most_sets=2))
@hypothesis.settings(max_examples=300)
def test_least_cost_is_that_of_the_best_of_all_chains_on_many_graphs(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    hypothesis.assume(evaluate(drawn[0], plain(drawn[0])).peak_bytes)
    check_model(*drawn)


@pytest.mark.parametrize("count", [6, 7])
def test_least_cost_on_chains_is_that_of_the_best_of_all(count: int) -> None:
    check_model(chain(count, size=3), [(1, 4), (0, 2, 3)])


@hypothesis.given(planned(max_vertices=8, most_sets=2))
@hypothesis.settings(max_examples=12)
def test_least_cost_where_positions_are_few(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    graph, kept = drawn
    hypothesis.assume(evaluate(graph, plain(graph)).peak_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_chain, "MOST_POSITIONS", 5)
        patch.setattr(joint_chain, "MOST_NESTED", (1, 2, 3))
        table = exact_table(graph, kept)
    regions = table._of
    cuts = regions.positions.tolist()
    assert len(cuts) <= 5 + 2
    assert [len(nested) <= most + 2 for nested, most in zip(regions.nested, (1, 2, 3), strict=True)]
    points = all_ways(graph, kept, cuts, [cuts[row] for row in regions.nested[-1]])
    levels = range(len(table._rest[0]))
    assert table._rest[0].tolist() == [least_cost(points, level) for level in levels]


@hypothesis.given(planned())
@hypothesis.settings(max_examples=20)
def test_slots_are_bytes_to_the_nearest(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    graph, kept = drawn
    regions = joint_chain._Regions(graph, kept)
    for slot in (2.0, 3.5):
        table = joint_chain._Table(regions, slot, regions.nested[-1])
        there = table._needs < 4 * joint_chain.SLOTS
        assert np.all(np.abs(table._needs * slot - regions.needs)[there] <= slot / 2)
        assert np.all(np.abs(table._held * slot - regions.held) <= slot / 2)
        # For each of the others, one is as good in everything.
        for fate, i, k in np.argwhere(~there & np.isfinite(regions.needs)):
            assert any(
                there[other, i, k]
                and table._needs[other, i, k] * slot <= regions.needs[fate, i, k] + slot / 2
                and table._held[other, i, k] <= table._held[fate, i, k]
                and regions.cost[other, i, k] <= regions.cost[fate, i, k]
                for other in range(len(there))
            )


# ------------------------------------------------------------------------- by the referee


@hypothesis.given(planned())
@hypothesis.settings(max_examples=20)
def test_cost_told_is_never_below_the_referees(
    drawn: tuple[Graph, list[tuple[int, ...]]],
) -> None:
    graph, kept = drawn
    hypothesis.assume(evaluate(graph, plain(graph)).peak_bytes)
    steps = told(graph, kept)
    assert steps[-1][1] == 0.0
    for _, cost, schedule in steps:
        assert evaluate(graph, schedule).overhead_seconds <= cost


@st.composite
def planned_chains(draw: st.DrawFn) -> tuple[Graph, list[tuple[int, ...]]]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=14))
    quarters = draw(st.lists(st.integers(0, 8), min_size=len(sizes), max_size=len(sizes)))
    seconds = [quarter / 4 for quarter in quarters]
    graph = Graph.from_edges(sizes, chain_edges(len(sizes)), seconds=seconds)
    return graph, draw(st.lists(kept_sets(graph), max_size=2))


@hypothesis.given(planned_chains())
@hypothesis.settings(max_examples=20)
def test_cost_told_is_the_referees_on_chains(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    """All of a chain's values are needed, so whatever may run again does."""
    for _, cost, schedule in told(*drawn):
        assert evaluate(drawn[0], schedule).overhead_seconds == cost


def revolve(steps: int, snapshots: int) -> int:
    """Recomputed steps of the best reversal of a chain, beyond the first pass.

    Griewank & Walther (2000), Revolve: r steps - beta(snapshots + 1, r - 1), the first pass
    included, for the least number of repetitions r with beta(snapshots, r) >= steps.
    """

    def beta(s: int, t: int) -> int:
        return math.comb(s + t, s)

    r = next(t for t in range(steps + 1) if beta(snapshots, t) >= steps)
    return r * steps - beta(snapshots + 1, r - 1) - (steps - 1)


@pytest.mark.parametrize("count", [2, 7, 16, 28])
def test_equal_layers_are_reversed_as_revolve_does(count: int) -> None:
    """Two values and two cotangents are alive at each step: one of four bytes is a snapshot."""
    steps = told(chain(count), [])
    least = min(count + 2, 4)
    assert [level for level, *_ in steps] == list(range(least, count + 3))
    for level, cost, schedule in steps:
        assert cost == revolve(count, level - 3) if count > 2 else cost == 0
        figures = evaluate(chain(count), schedule)
        assert (figures.peak_bytes, figures.overhead_seconds) == (level, cost)


def least_overheads(graph: Graph, kept: Sequence[Sequence[int]], peaks: range) -> list[float]:
    figures = [evaluate(graph, schedule) for schedule in schedules(graph, kept)]
    return [
        min((one.overhead_seconds for one in figures if one.peak_bytes <= peak), default=math.inf)
        for peak in peaks
    ]


def test_sixteen_equal_layers() -> None:
    """From recomputing every step from the start, over two thirds of a pass, to nothing."""
    found = least_overheads(chain(16), [], range(3, 19))
    assert found == [math.inf, 105, 30, 18, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_sixty_four_equal_layers() -> None:
    """Fewer positions for nesting than vertices, so not quite Revolve at the least memory."""
    found = least_overheads(chain(64), [], range(5, 67))
    for peak, overhead in enumerate(found, start=5):
        best = revolve(64, peak - 3)
        assert best <= overhead <= best * (1.45 if peak == 5 else 1.06 if peak < 9 else 1)
    # In one pass with the square root of twice the length, in nearly two with its logarithm.
    assert found[round(math.sqrt(2 * 64)) + 1 - 5] < 64
    assert found[round(math.log2(64)) + 2 - 5] < 2 * 64


def test_without_nesting_the_square_root() -> None:
    graph = chain(64)
    flat = [schedule for schedule in schedules(graph, []) if depth(schedule.regions) <= 1]
    least = min(evaluate(graph, schedule).peak_bytes for schedule in flat)
    assert least == round(math.sqrt(2 * 64)) + 2


def test_what_crosses_is_not_recomputed() -> None:
    graph = chain(9)
    for schedule in schedules(graph, []):
        for region in schedule.regions[:-1]:
            if region.checkpointed:
                assert region.vertices[-1] in region.kept


@hypothesis.given(planned())
@hypothesis.settings(max_examples=12)
def test_further_kept_sets_never_cost_more(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    graph, kept = drawn
    hypothesis.assume(evaluate(graph, plain(graph)).peak_bytes)
    assert np.all(exact_table(graph, kept)._rest <= exact_table(graph, kept[:1])._rest)


def test_dear_half_is_kept_where_it_runs_beside_the_cheap_one() -> None:
    """Two interleaved chains: boundaries hardly separate them, but a kept set does."""
    count = 16
    edges = [(vertex, vertex + 2) for vertex in range(count - 2)]
    seconds = [1.0 if vertex % 2 else 8.0 for vertex in range(count)]
    graph = Graph.from_edges([4] * count, edges, seconds=seconds)
    assert evaluate(graph, plain(graph)).peak_bytes == 72
    assert least_overheads(graph, [], range(56, 57)) == [8 + 3 * 1]
    assert least_overheads(graph, [range(0, count, 2)], range(56, 57)) == [4 * 1]


# ------------------------------------------------------------------------- always the same


@hypothesis.given(planned())
@hypothesis.settings(max_examples=20)
def test_second_call_finds_the_same(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    assert schedules(*drawn) == schedules(*drawn)


@hypothesis.given(planned())
@hypothesis.settings(max_examples=20)
def test_unit_of_bytes_decides_nothing(drawn: tuple[Graph, list[tuple[int, ...]]]) -> None:
    graph, kept = drawn
    sizes = {
        field: tuple(size << 20 for size in getattr(graph, field))
        for field in ("bytes", "cotangent_bytes", "internal_bytes", "workspace_bytes")
    }
    assert schedules(dataclasses.replace(graph, **sizes), kept) == schedules(graph, kept)


def test_schedules_can_be_thinned_evenly() -> None:
    graph = network(8)
    everything = schedules(graph, [tuple(range(0, len(graph), 3))])
    assert len(everything) > 5
    few = schedules(graph, [tuple(range(0, len(graph), 3))], most=5)
    assert len(few) <= 5
    assert few[0] == everything[0]
    assert set(few) <= set(everything)
