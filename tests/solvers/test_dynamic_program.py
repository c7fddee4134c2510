"""The dynamic programs and the package's exhaustive search, against one written for the tests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from remat_opt.graph import Graph
from remat_opt.simulator import simulate
from remat_opt.solvers import dynamic_program, exhaustive, lower_sets
from remat_opt.solvers.base import Infeasible, Refused, Solution, Status
from remat_opt.solvers.dynamic_program import Centric
from tests.graphs import FAMILIES, layered
from tests.solvers import canonical_oracle as oracle


def best(tried, budget, centric, free):
    costs = [one.overhead if free else one.paper_overhead for one in tried if one.peak <= budget]
    return (min(costs) if centric is Centric.TIME else max(costs)) if costs else None


def check_answer(graph, answer, expected, budget, least, free):
    if expected is None:
        assert isinstance(answer, Infeasible)
        assert answer.status is Status.INFEASIBLE
        assert (answer.budget_bytes, answer.least_bytes) == (budget, least)
        assert least > budget
        return
    assert isinstance(answer, Solution)
    assert answer.objective == expected
    strategy = answer.figures.strategy
    assert strategy.peak_bytes <= budget
    assert answer.objective == (
        strategy.overhead_seconds if free else strategy.paper_overhead_seconds
    )
    sequence = tuple(map(frozenset, strategy.lower_sets))
    assert strategy.peak_bytes == max(map(sum, oracle.terms(graph, sequence)))
    forgotten = oracle.forgotten(graph, sequence)
    assert strategy.paper_overhead_seconds == sum(forgotten)
    assert strategy.overhead_seconds == sum(forgotten[:-1])
    assert strategy.live_peak_bytes == oracle.live_peak(graph, sequence)
    answer.schedule.check(graph)
    assert simulate(graph, answer.schedule).overhead_seconds == strategy.overhead_seconds


def budgets(tried):
    """The least budget, one below it, one in the middle, and one that is never missed."""
    peaks = sorted({one.peak for one in tried})
    return {peaks[0] - 1, peaks[0], peaks[len(peaks) // 2], peaks[-1]}


def check_exact(graph, centrics=tuple(Centric)):
    tried = oracle.strategies(graph, oracle.lower_sets(graph))
    least = min(one.peak for one in tried)
    assert dynamic_program.least_budget(graph) == least
    for budget in budgets(tried):
        for centric in centrics:
            for free in (False, True):
                answer = dynamic_program.exact(graph, budget, centric=centric, last_block_free=free)
                check_answer(graph, answer, best(tried, budget, centric, free), budget, least, free)
                if isinstance(answer, Solution):
                    assert answer.status is Status.OPTIMAL
                    assert answer.bound == answer.objective


def check_approximate(graph):
    tried = oracle.strategies(graph, oracle.pruned(graph))
    least = min(one.peak for one in tried)
    assert dynamic_program.least_approximate_budget(graph) == least
    for budget in budgets(tried):
        for centric in Centric:
            for free in (False, True):
                answer = dynamic_program.approximate(
                    graph, budget, centric=centric, last_block_free=free
                )
                # Times are coarse enough here to be exact, so it is the best of its family.
                check_answer(graph, answer, best(tried, budget, centric, free), budget, least, free)
                if isinstance(answer, Solution):
                    assert answer.status is Status.FEASIBLE
                    if centric is Centric.TIME:
                        assert answer.bound <= answer.objective
                    else:
                        assert answer.bound >= answer.objective


def check_exhaustive(graph):
    tried = oracle.strategies(graph, oracle.lower_sets(graph))
    least = min(one.peak for one in tried)
    assert exhaustive.count_strategies(graph) == len(tried)
    assert exhaustive.least_budget(graph) == least
    budget = sorted(one.peak for one in tried)[len(tried) // 3]
    for free in (False, True):
        for centric, solve in (
            (Centric.TIME, exhaustive.least_overhead),
            (Centric.MEMORY, exhaustive.most_overhead),
        ):
            answer = solve(graph, budget, last_block_free=free)
            check_answer(graph, answer, best(tried, budget, centric, free), budget, least, free)
            assert answer.status is Status.OPTIMAL
            assert answer.figures.strategies == len(tried)
    check_answer(graph, exhaustive.least_overhead(graph, least - 1), None, least - 1, least, False)


@given(oracle.paper_graphs())
@settings(max_examples=10)
def test_exact(graph):
    check_exact(graph)


@given(oracle.paper_graphs())
@settings(max_examples=10)
def test_approximate(graph):
    check_approximate(graph)


@given(oracle.paper_graphs(most=150))
@settings(max_examples=15)
def test_exhaustive(graph):
    check_exhaustive(graph)


@pytest.mark.slow
@given(oracle.paper_graphs(most=520))
@settings(max_examples=300)
def test_exact_time_centric_on_many(graph):
    check_exact(graph, (Centric.TIME,))


@pytest.mark.slow
@given(oracle.paper_graphs(most=520))
@settings(max_examples=300)
def test_exact_memory_centric_on_many(graph):
    check_exact(graph, (Centric.MEMORY,))


@pytest.mark.slow
@given(oracle.paper_graphs(most=520))
@settings(max_examples=300)
def test_approximate_on_many(graph):
    check_approximate(graph)


@pytest.mark.slow
@given(oracle.paper_graphs(most=150))
@settings(max_examples=300)
def test_exhaustive_on_many(graph):
    check_exhaustive(graph)


@pytest.mark.parametrize("family", FAMILIES)
def test_monotone_in_the_budget(family):
    graph = layered(family, 9)
    least = dynamic_program.least_budget(graph)
    answers = [dynamic_program.exact(graph, least + extra) for extra in range(0, 60, 4)]
    overheads = [answer.objective for answer in answers]
    assert overheads == sorted(overheads, reverse=True)


def test_the_skip_rule_is_wrong_for_memory_centric():
    # Correction 9: dropping the entries with more time and more bytes loses the maximum.
    found = []
    for sizes in ([1, 2, 3, 1, 2], [3, 1, 1, 2, 1], [1, 5, 1, 1, 4], [2, 1, 4, 1, 1]):
        graph = Graph.from_edges(
            sizes, FAMILIES["skip_to_end"](5), seconds=[1.0, 5.0, 2.0, 3.0, 1.0]
        )
        tried = oracle.strategies(graph, oracle.lower_sets(graph))
        for budget in sorted({one.peak for one in tried}):
            most = best(tried, budget, Centric.MEMORY, False)
            assert dynamic_program.exact(graph, budget, centric=Centric.MEMORY).objective == most
            skipped = with_skip_rule(graph, budget)
            assert skipped is None or skipped <= most
            found.append(skipped != most)
    assert any(found)


def with_skip_rule(graph, budget):
    """Memory-centric, with the rule that only time-centric may use."""
    masks = tuple(lower_sets.all_lower_sets(graph))
    family = lower_sets.Family(graph, masks, lower_sets.time_units(graph, 1 << 20))
    table = [{0.0: 0.0}]
    for target in range(1, len(masks)):
        steps, entries = family.steps_to(target), {}
        for before in range(target):
            for time, cached in table[before].items():
                if steps.inside[before] and cached + steps.block_bytes[before] <= budget:
                    key = time + steps.forgotten[before]
                    bytes_ = cached + steps.boundary_bytes[before]
                    entries[key] = min(entries.get(key, bytes_), bytes_)
        table.append(
            {
                time: cached
                for time, cached in entries.items()
                if not any(t < time and m < cached for t, m in entries.items())
            }
        )
    return max(table[-1], default=None)


def test_refusal_names_the_approximate_program():
    answer = dynamic_program.exact(Graph.from_edges([1] * 20, []), 100)
    assert isinstance(answer, Refused)
    assert answer.status is Status.REFUSED
    assert answer.message == (
        "The graph of 20 vertices has more than 4000 lower sets, the limit of the exact dynamic "
        "program. Use dynamic_program.approximate, which needs no more than 22, or raise "
        "most_lower_sets."
    )
    assert isinstance(dynamic_program.least_budget(Graph.from_edges([1] * 20, [])), Refused)


def test_refusal_of_tables_that_outgrow_the_limit(monkeypatch):
    monkeypatch.setattr(dynamic_program, "MOST_ENTRIES", 20)
    answer = dynamic_program.exact(layered("chain", 9), 100, centric=Centric.MEMORY)
    assert isinstance(answer, Refused)
    assert "outgrew 20 entries" in answer.message


def test_refusals_of_exhaustive_search():
    answer = exhaustive.least_overhead(Graph.from_edges([1] * 8, []), 100)
    assert isinstance(answer, Refused)
    assert "has 545835 canonical strategies; the limit of exhaustive search is 200000" in (
        answer.message
    )
    answer = exhaustive.least_overhead(Graph.from_edges([1] * 12, []), 100)
    assert isinstance(answer, Refused)
    assert "more than 2048 lower sets. Use dynamic_program.exact" in answer.message
    assert isinstance(exhaustive.least_budget(Graph.from_edges([1] * 12, [])), Refused)


def test_the_number_of_lower_sets_is_reported():
    answer = dynamic_program.exact(layered("inception", 9), 1000)
    assert answer.figures.lower_sets == len(oracle.lower_sets(layered("inception", 9)))
    assert answer.figures.entries >= answer.figures.lower_sets


def test_times_that_are_no_multiples_are_rounded_to_steps():
    graph = Graph.from_edges(
        [1] * 9, FAMILIES["residual"](9), seconds=[0.1 * (v + 1) ** 0.5 for v in range(9)]
    )
    budget = 1.2 * dynamic_program.least_budget(graph)
    best_found = dynamic_program.exact(graph, budget).objective
    assert best_found == pytest.approx(
        exhaustive.least_overhead(graph, budget).objective, rel=1e-11
    )
    coarse = dynamic_program.approximate(graph, budget, time_steps=50)
    assert coarse.objective >= best_found * (1 - 1e-11)
