"""The arbitrary-graph solver, against every subset of small graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from remat_opt.graph import Graph
from remat_opt.simulator import simulate
from remat_opt.solvers import arbitrary_graph, linear_chain
from remat_opt.solvers.base import Status
from remat_opt.solvers.division_tree import Kind
from tests.graphs import INSTANCES
from tests.solvers import kept_oracle as oracle


def check(graph):
    totals = oracle.kept_totals(graph)
    answer = arbitrary_graph.solve(graph)
    assert answer.status is Status.OPTIMAL
    assert answer.objective == answer.bound == min(totals.values())
    found = answer.figures.checkpoints
    assert found.total_bytes == totals[frozenset(found.kept)]
    answer.schedule.check(graph)
    last = set(answer.schedule.regions[-1].vertices)
    again = set(simulate(graph, answer.schedule).recomputed)
    assert again == set(range(len(graph))) - set(found.kept) - last
    return answer


@given(oracle.any_graphs())
@settings(max_examples=50)
def test_optimal(graph):
    check(graph)


@pytest.mark.slow
@given(oracle.any_graphs())
@settings(max_examples=300)
def test_optimal_on_many(graph):
    check(graph)


@pytest.mark.slow
def test_complicate_segments_are_among_the_many():
    seen = []

    @given(oracle.any_graphs())
    @settings(max_examples=600)
    def collect(graph):
        tree = arbitrary_graph.solve(graph).figures.tree
        seen.append(any(node.kind is Kind.COMPLICATE for node in tree.walk()))

    collect()
    assert sum(seen) >= 100


@given(oracle.chains(max_vertices=40))
@settings(max_examples=20)
def test_agrees_with_the_chain_solver(graph):
    assert arbitrary_graph.solve(graph).objective == linear_chain.solve(graph).objective


@pytest.mark.parametrize("name", INSTANCES)
def test_instances(name):
    check(INSTANCES[name])


def test_parallel_branches_are_separate_segments():
    # Correction 3: the maximum runs over the branches, not their sum.
    graph = Graph.from_edges(
        [1, 5, 5, 5, 1], [(0, v) for v in (1, 2, 3)] + [(1, 4), (2, 4), (3, 4)]
    )
    answer = check(graph)
    assert answer.objective == 2 + 5
    assert answer.figures.checkpoints.kept == (0, 4)


def test_complicate_root_of_bare_edges():
    # Correction 4: with only bare edges, the terms are 0 and the whole graph.
    edges = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    answer = check(Graph.from_edges([1, 2, 3, 1], edges))
    assert answer.figures.tree.kind is Kind.COMPLICATE
    assert answer.objective == 7


def test_the_largest_independent_part_is_used():
    # Correction 5: 3 lies between 1 and 6 and is independent, though 4 beside it is not.
    edges = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 7), (3, 6), (4, 5), (5, 6), (6, 7)]
    answer = check(Graph.from_edges([1, 1, 1, 10, 10, 1, 1, 1], edges))
    assert answer.figures.checkpoints.kept == (0, 1, 2, 5, 6, 7)
    assert answer.objective == 16


def test_ends_change_the_objective_by_a_constant():
    graph = INSTANCES["residual_9"]
    found = arbitrary_graph.solve(graph).figures.checkpoints
    assert found.total_bytes - found.total_without_ends_bytes == graph.bytes[0] + graph.bytes[-1]
