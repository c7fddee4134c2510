"""The random baseline: valid, repeatable, never better than the optimum."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.solvers import random_choice
from remat_opt.solvers.base import Status
from tests.graphs import layered
from tests.solvers import kept_oracle as oracle


def check(graph, seed):
    totals = oracle.kept_totals(graph)
    answer = random_choice.solve(graph, seed=seed)
    found = answer.figures.checkpoints
    assert answer.status is Status.FEASIBLE
    assert answer.bound <= min(totals.values()) <= answer.objective
    assert answer.objective == found.total_bytes == totals[frozenset(found.kept)]
    assert len(set(found.kept) - oracle.always_kept(graph)) <= random_choice.MOST
    assert answer.figures.valid <= min(random_choice.TRIALS, answer.figures.drawn)
    answer.schedule.check(graph)
    assert random_choice.solve(graph, seed=seed) == answer


@given(oracle.any_graphs(max_vertices=9), st.integers(0, 5))
@settings(max_examples=10)
def test_valid_and_repeatable(graph, seed):
    check(graph, seed)


@pytest.mark.slow
@given(oracle.any_graphs(max_vertices=9), st.integers(0, 5))
@settings(max_examples=300)
def test_valid_and_repeatable_on_many(graph, seed):
    check(graph, seed)


def test_ten_valid_draws_of_one_to_five():
    answer = random_choice.solve(layered("chain", 100), seed=1)
    assert (answer.figures.valid, answer.figures.drawn) == (10, 10)
    sizes = set()
    for seed in range(40):
        kept = random_choice.solve(layered("chain", 100), seed=seed).figures.checkpoints.kept
        sizes.add(len(kept) - 2)
    assert sizes <= {1, 2, 3, 4, 5}
    assert len(sizes) > 1


def test_seeds_differ():
    kept = {
        random_choice.solve(layered("chain", 50), seed=seed).figures.checkpoints.kept
        for seed in range(5)
    }
    assert len(kept) > 1


def test_draws_that_run_out_leave_nothing_kept_but_the_ends(monkeypatch):
    monkeypatch.setattr(random_choice, "MOST_DRAWS", 0)
    answer = random_choice.solve(layered("dense", 9))
    assert answer.figures.checkpoints.kept == (0, 8)
    assert answer.figures.valid == 0


def test_nothing_to_choose():
    answer = random_choice.solve(Graph.from_edges([1, 2], [(0, 1)]))
    assert answer.figures.drawn == 0
    assert answer.objective == 3
