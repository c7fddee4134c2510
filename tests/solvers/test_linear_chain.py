"""The linear-chain solver, against every subset of small chains."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.simulator import simulate
from remat_opt.solvers import linear_chain
from remat_opt.solvers.base import Refused, Solution, Status
from tests.graphs import FAMILIES, layered
from tests.solvers import kept_oracle as oracle


def check(graph):
    totals = oracle.kept_totals(graph)
    answer = linear_chain.solve(graph)
    assert isinstance(answer, Solution)
    assert answer.status is Status.OPTIMAL
    assert answer.objective == answer.bound == min(totals.values())
    found = answer.figures.checkpoints
    assert found.total_bytes == totals[frozenset(found.kept)] == answer.objective
    ends = {0, len(graph) - 1}
    assert ends <= set(found.kept)
    assert found.total_without_ends_bytes == found.total_bytes - sum(graph.bytes[v] for v in ends)
    answer.schedule.check(graph)
    replayed = simulate(graph, answer.schedule)
    last = set(answer.schedule.regions[-1].vertices)
    assert set(replayed.recomputed) == set(range(len(graph))) - set(found.kept) - last


@given(oracle.chains())
@settings(max_examples=50)
def test_optimal(graph):
    check(graph)


@pytest.mark.slow
@given(oracle.chains())
@settings(max_examples=300)
def test_optimal_on_many(graph):
    check(graph)


@given(st.lists(st.integers(0, 12), min_size=2, max_size=60))
@settings(max_examples=40)
def test_skipping_loses_nothing(sizes):
    """Every trial term, none skipped: no better total."""

    def cost(kept):
        inside = [sum(sizes[a + 1 : b]) for a, b in itertools.pairwise(kept)]
        return sum(sizes[v] for v in kept) + max(inside)

    terms = {
        sum(sizes[start + 1 : stop])
        for start in range(len(sizes))
        for stop in range(start + 1, len(sizes))
    }
    assert {0, sum(sizes[1:-1])} <= terms
    all_trials = [cost(linear_chain.shortest_path(sizes, term)) for term in terms]
    kept, trials = linear_chain.least_total(sizes)
    assert cost(kept) == min(all_trials)
    assert trials <= len(terms)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=12), st.integers(0, 60))
def test_largest_term_below(sizes, limit):
    before = list(itertools.accumulate(sizes, initial=0))
    terms = [
        sum(sizes[start + 1 : stop])
        for start in range(len(sizes))
        for stop in range(start + 1, len(sizes))
    ]
    expected = max((term for term in terms if term < limit), default=None)
    assert linear_chain.largest_term_below(before, limit) == expected


@pytest.mark.parametrize("count", [*range(1, 60), 101, 256, 1025])
def test_closed_form_for_identical_costs(count):
    graph = layered("chain", count, size=1)
    assert linear_chain.solve(graph).objective == linear_chain.identical_cost_optimum(count)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"chain"}))
def test_what_is_no_chain_is_refused(family):
    answer = linear_chain.solve(layered(family, 9))
    assert isinstance(answer, Refused)
    assert answer.status is Status.REFUSED
    assert "does not read just the one before it. Use arbitrary_graph.solve." in answer.message


def test_keeping_all_and_keeping_nothing_inside():
    # Correction 4: both extremes are among the trial terms.
    edges = [(0, 1), (1, 2), (2, 3)]
    small_ends = linear_chain.solve(Graph.from_edges([1, 5, 5, 1], edges))
    assert small_ends.figures.checkpoints.kept in {(0, 3), (0, 1, 3), (0, 2, 3)}
    free = linear_chain.solve(Graph.from_edges([1, 0, 0, 1], edges))
    assert free.objective == 2


def test_two_thousand_vertices_take_few_trials():
    sizes = [1 + (7919 * v * v) % 1009 for v in range(2000)]
    kept, trials = linear_chain.least_total(sizes)
    assert trials < 500
    assert kept[0] == 0
    assert kept[-1] == 1999
