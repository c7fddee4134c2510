"""Lower sets and the figures of canonical strategies, against plain sets."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.simulator import simulate
from remat_opt.solvers import lower_sets
from tests.graphs import graphs
from tests.solvers import canonical_oracle as oracle

DIAMOND = Graph.from_edges([1, 2, 4, 8], [(0, 1), (0, 2), (1, 3), (2, 3)], seconds=[1, 2, 4, 8])


def masks(sequence: tuple[frozenset[int], ...]) -> list[int]:
    return [lower_sets.mask_of(lower) for lower in sequence]


@st.composite
def sequences(draw: st.DrawFn, graph: Graph) -> tuple[frozenset[int], ...]:
    everything = frozenset(range(len(graph)))
    family = [one for one in oracle.lower_sets(graph) if one and one != everything]
    reached: frozenset[int] = frozenset()
    sequence = []
    while options := [one for one in family if reached < one]:
        if draw(st.integers(0, 2)) == 0:
            break
        reached = draw(st.sampled_from(options))
        sequence.append(reached)
    return (*sequence, everything)


def check_family(graph: Graph) -> None:
    found = list(lower_sets.all_lower_sets(graph))
    assert [len(lower_sets.members(mask)) for mask in found] == sorted(
        mask.bit_count() for mask in found
    )
    assert len(set(found)) == len(found)
    assert {frozenset(lower_sets.members(mask)) for mask in found} == set(oracle.lower_sets(graph))
    pruned = lower_sets.pruned_lower_sets(graph)
    assert [set(lower_sets.members(mask)) for mask in pruned] == sorted(
        map(set, oracle.pruned(graph)),
        key=lambda one: (len(one), lower_sets.mask_of(one)),
    )
    assert len(pruned) <= len(graph) + 2


def check_figures(graph: Graph, sequence: tuple[frozenset[int], ...]) -> None:
    found = lower_sets.evaluate(graph, masks(sequence))
    expected = oracle.terms(graph, sequence)
    assert [dataclasses.astuple(block) for block in found.blocks] == expected
    assert found.peak_bytes == max(map(sum, expected))
    forgotten = oracle.forgotten(graph, sequence)
    assert found.paper_overhead_seconds == sum(forgotten)
    assert found.overhead_seconds == sum(forgotten[:-1])
    assert found.live_peak_bytes == oracle.live_peak(graph, sequence)
    assert found.live_peak_bytes <= found.peak_bytes
    assert found.lower_sets == tuple(tuple(sorted(lower)) for lower in sequence)
    schedule = lower_sets.schedule_of(graph, masks(sequence))
    schedule.check(graph)
    kept = frozenset().union(*(oracle.boundary(graph, lower) for lower in sequence))
    assert {v for region in schedule.regions for v in region.kept} == kept
    # The paper's graphs: every backward step reads the value and its inputs.
    assert simulate(graph, schedule).overhead_seconds == found.overhead_seconds


@given(oracle.paper_graphs())
@settings(max_examples=40)
def test_families(graph):
    check_family(graph)


@given(st.data())
@settings(max_examples=50)
def test_figures(data):
    graph = data.draw(oracle.paper_graphs())
    check_figures(graph, data.draw(sequences(graph)))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300)
def test_families_and_figures_on_many(data):
    graph = data.draw(oracle.paper_graphs())
    check_family(graph)
    check_figures(graph, data.draw(sequences(graph)))


@given(st.data())
@settings(max_examples=40)
def test_schedules_are_legal_on_any_graph(data):
    graph = data.draw(graphs(max_vertices=8))
    sequence = masks(data.draw(sequences(graph)))
    lower_sets.schedule_of(graph, sequence).check(graph)
    found = lower_sets.evaluate(graph, sequence)
    assert found.live_peak_bytes <= found.peak_bytes


@given(oracle.paper_graphs(most=200))
@settings(max_examples=20)
def test_terms_of_all_steps(graph):
    found = tuple(lower_sets.all_lower_sets(graph))
    units = lower_sets.time_units(graph, 1 << 40)
    family = lower_sets.Family(graph, found, units)
    unit = sum(graph.seconds) / sum(units) if sum(units) else 0.0
    for number in range(1, len(found)):
        steps = family.steps_to(number)
        for before in range(number):
            small, large = found[before], found[number]
            assert steps.inside[before] == (not small & ~large)
            if not steps.inside[before]:
                continue
            sets = [frozenset(lower_sets.members(mask)) for mask in (small, large)]
            sequence = tuple(sets) if sets[0] else (sets[1],)
            assert steps.block_bytes[before] == sum(oracle.terms(graph, sequence)[-1][1:])
            assert steps.forgotten[before] * unit == oracle.forgotten(graph, sequence)[-1]
            assert steps.boundary_bytes[before] == sum(
                graph.bytes[v] for v in oracle.boundary(graph, sets[1]) - sets[0]
            )


def test_diamond_by_hand():
    # 0 and 1 first, then 2 and 3: the boundary is {0, 1}, as 2 reads 0 and 3 reads 1.
    found = lower_sets.evaluate(DIAMOND, [0b0011, 0b1111])
    first, second = found.blocks
    assert dataclasses.astuple(first) == (0, 2 * (1 + 2), 4 + 8, 4)
    assert dataclasses.astuple(second) == (1 + 2, 2 * (4 + 8), 0, 0)
    assert found.peak_bytes == 27
    assert (found.paper_overhead_seconds, found.overhead_seconds) == (12.0, 0.0)


def test_several_sinks_need_everything_in_the_pruned_family():
    graph = Graph.from_edges([1, 1, 1], [(0, 1), (0, 2)])
    assert lower_sets.pruned_lower_sets(graph) == (0, 0b001, 0b011, 0b101, 0b111)


def test_vertices_with_side_effects_run_free():
    graph = dataclasses.replace(DIAMOND, pinned=(False, True, False, False))
    schedule = lower_sets.schedule_of(graph, [0b0001, 0b0011, 0b1111])
    assert [region.checkpointed for region in schedule.regions] == [True, False, False]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([0b0001, 0b0001, 0b1111], r"\(0,\) does not strictly contain \(0,\)"),
        ([0b1001, 0b1111], r"\(0, 3\) is not a lower set: it lacks vertex 1"),
        ([0b0111], "must hold every vertex"),
        ([], "must hold every vertex"),
    ],
)
def test_what_is_no_sequence(sequence, message):
    with pytest.raises(ValueError, match=message):
        lower_sets.evaluate(DIAMOND, sequence)


def test_time_units_are_exact_where_they_can_be():
    graph = Graph.from_edges([1] * 3, [], seconds=[0.5, 1.25, 3.0])
    assert lower_sets.time_units(graph, 100) == (2, 5, 12)
    assert lower_sets.time_units(graph, 10) == (1, 3, 6)
    assert lower_sets.time_units(Graph.from_edges([1], [], seconds=[0.0]), 10) == (0,)
    third = Graph.from_edges([1] * 2, [], seconds=[1 / 3, 2 / 3])
    assert lower_sets.time_units(third, 3000) == (1, 2)
    assert sum(
        lower_sets.time_units(Graph.from_edges([1] * 2, [], seconds=[0.1, 0.7]), 1000)
    ) == pytest.approx(1000, abs=1)


def test_enumeration_is_lazy():
    graph = Graph.from_edges([1] * 60, [])
    assert len(list(itertools.islice(lower_sets.all_lower_sets(graph), 61))) == 61
