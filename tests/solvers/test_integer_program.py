"""The integer program of executable schedules, against all of them on small graphs."""

from __future__ import annotations

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import plain
from remat_opt.simulator import evaluate
from remat_opt.solvers import integer_program, staged_program
from remat_opt.solvers.base import Candidate, Infeasible, Overhead, Refused, Solution, Status, judge
from tests.graphs import INSTANCES, chain_edges, graphs, layered, nested_graphs, network
from tests.solvers.region_oracle import every_figure

SHARES = (0.0, 0.25, 0.5, 0.75)


def check_legal(graph: Graph, answer: object) -> Solution[Candidate]:
    assert isinstance(answer, Solution)
    answer.schedule.check(graph)
    assert answer.figures == judge(graph, answer.schedule)
    assert 0 <= answer.bound <= answer.objective
    assert (answer.status is Status.OPTIMAL) is (answer.bound == answer.objective)
    return answer


def check_optimal(graph: Graph, depth: int) -> None:
    every = every_figure(graph, depth)
    least = check_legal(graph, integer_program.least_peak(graph, depth=depth))
    assert least.status is Status.OPTIMAL
    assert least.objective == min(one.peak_bytes for one in every)
    room = evaluate(graph, plain(graph)).peak_bytes - least.objective
    for share in SHARES:
        budget = least.objective + math.floor(share * room)
        within = [one for one in every if one.peak_bytes <= budget]
        seconds = check_legal(graph, integer_program.least_overhead(graph, budget, depth=depth))
        assert seconds.status is Status.OPTIMAL
        assert seconds.figures.peak_bytes <= budget
        assert seconds.objective == min(one.overhead_seconds for one in within)
    flops = integer_program.least_overhead(graph, budget, depth=depth, measure=Overhead.FLOPS)
    assert check_legal(graph, flops).objective == min(one.recomputed_flops for one in within)
    if least.objective:
        found = integer_program.least_overhead(graph, least.objective - 1, depth=depth)
        assert found == Infeasible(
            budget_bytes=least.objective - 1, least_bytes=least.figures.peak_bytes
        )


@hypothesis.given(graphs(max_vertices=4))
@hypothesis.settings(max_examples=6)
def test_best_of_all_chains(graph: Graph) -> None:
    check_optimal(graph, 1)


@hypothesis.given(graphs(max_vertices=3))
@hypothesis.settings(max_examples=3)
def test_best_of_all_chains_that_nest(graph: Graph) -> None:
    check_optimal(graph, 2)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=6))
@hypothesis.settings(max_examples=60)
def test_best_of_all_chains_on_many_graphs(graph: Graph) -> None:
    check_optimal(graph, 1)


@pytest.mark.slow
@hypothesis.given(graphs(max_vertices=4))
@hypothesis.settings(max_examples=20)
def test_best_of_all_chains_that_nest_on_many_graphs(graph: Graph) -> None:
    check_optimal(graph, 2)


@hypothesis.given(graphs(max_vertices=2))
@hypothesis.settings(max_examples=5)
def test_best_of_all_chains_that_nest_twice(graph: Graph) -> None:
    check_optimal(graph, 3)


@hypothesis.given(nested_graphs(max_vertices=6), st.integers(1, 2))
@hypothesis.settings(max_examples=8)
def test_between_any_schedule_and_those_of_less_depth(drawn, depth) -> None:
    """Deeper is never worse, and schedules that need not be executable are never worse still."""
    graph, schedule = drawn
    budget = evaluate(graph, schedule).peak_bytes
    deep = integer_program.least_overhead(graph, budget, depth=depth + 1, most_binaries=100)
    flat = integer_program.least_overhead(graph, budget, depth=depth)
    staged = staged_program.least_overhead(graph, budget)
    assert isinstance(staged, staged_program.Staged)
    if isinstance(deep, Infeasible):
        assert isinstance(flat, Infeasible)
        assert deep.least_bytes <= flat.least_bytes
        return
    assert staged.bound <= check_legal(graph, deep).objective
    if isinstance(flat, Infeasible):
        assert deep.figures.peak_bytes < flat.least_bytes
    else:
        assert deep.objective <= check_legal(graph, flat).objective


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_instances(name: str) -> None:
    graph = INSTANCES[name]
    most = evaluate(graph, plain(graph)).peak_bytes
    unchanged = check_legal(graph, integer_program.least_overhead(graph, most))
    assert unchanged.objective == 0
    least = check_legal(graph, integer_program.least_peak(graph, depth=1))
    assert least.status is Status.OPTIMAL


def test_monotone_in_the_budget() -> None:
    graph = layered("residual", 6)
    least = check_legal(graph, integer_program.least_peak(graph))
    most = evaluate(graph, plain(graph)).peak_bytes
    found = [
        check_legal(graph, integer_program.least_overhead(graph, budget)).objective
        for budget in (*range(least.figures.peak_bytes, most, 4), most)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


@pytest.mark.parametrize("spread", [1, pytest.param(10**6, marks=pytest.mark.slow)])
def test_sizes_that_must_be_rounded(spread: int) -> None:
    count = 5
    graph = Graph.from_edges(
        [10**9 + 7919 * v * v % 1009 * spread for v in range(count)], chain_edges(count)
    )
    every = every_figure(graph, 1)
    exact = min(one.peak_bytes for one in every)
    least = check_legal(graph, integer_program.least_peak(graph, depth=1))
    assert least.bound <= exact <= least.objective <= exact * (1 + count / 10_000)
    for budget in (least.objective, 1.2 * least.objective, 2 * least.objective):
        best = min(one.overhead_seconds for one in every if one.peak_bytes <= budget)
        answer = check_legal(graph, integer_program.least_overhead(graph, budget, depth=1))
        assert answer.figures.peak_bytes <= budget
        assert answer.bound <= best <= answer.objective


def test_refusals() -> None:
    answer = integer_program.least_overhead(layered("chain", 40), 100)
    assert answer == Refused(
        message="The graph of 40 vertices takes 158 binary variables; the limit is 80. Use "
        "portfolio, or raise most_binaries."
    )
    assert integer_program.least_peak(layered("chain", 40)) == answer
    stopped = integer_program.least_overhead(network(3), 70, node_limit=0)
    assert stopped == Refused(
        message="No chain of regions within 70 bytes was found in 0 nodes. Raise node_limit, or "
        "use portfolio."
    )
    assert integer_program.least_peak(network(3), node_limit=0) == Refused(
        message="No chain of regions was found in 0 nodes. Raise node_limit, or use portfolio."
    )
