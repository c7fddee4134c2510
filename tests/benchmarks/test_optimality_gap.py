"""The default solver against the best executable schedules, and the record of these."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest

from benchmarks import optimality_gap
from benchmarks.optimality_gap import GRAPHS, SHARES, Task, gaps, recorded, sample, solved
from remat_opt import solvers
from remat_opt.solvers.base import Overhead, Refused, fastest_within


def by_graph() -> list[list[Task]]:
    return [list(tasks) for _, tasks in itertools.groupby(recorded(), key=lambda task: task.seed)]


def test_the_record_is_of_these_graphs() -> None:
    found = by_graph()
    assert [tasks[0].seed for tasks in found] == list(range(GRAPHS))
    for tasks in found:
        assert len(tasks) == len(SHARES)
        assert {task.vertices for task in tasks} == {len(sample(tasks[0].seed))}
        assert all(task.any_seconds <= task.best_seconds for task in tasks)
        overheads = [task.best_seconds for task in tasks]
        assert overheads == sorted(overheads, reverse=True)


def test_the_record_is_what_the_programs_say() -> None:
    (tasks,) = [tasks for tasks in by_graph() if tasks[0].seed == 2]
    assert list(solved(2)) == tasks


@pytest.mark.slow
def test_the_record_is_what_the_programs_say_on_more_graphs() -> None:
    for tasks in by_graph()[:40:4]:
        if tasks[0].vertices <= 8:
            assert list(solved(tasks[0].seed)) == tasks


@pytest.fixture(scope="module")
def portfolio() -> SimpleNamespace:
    """The default solver, with what it found before."""
    return SimpleNamespace(candidates=functools.cache(solvers.Portfolio().candidates))


@pytest.mark.slow
def test_the_portfolio_is_near_the_best_executable_schedules(portfolio: SimpleNamespace) -> None:
    """A ratchet: all 800 budgets cost no more than the best."""
    told = []
    for tasks in by_graph():
        found = gaps(portfolio, tasks)
        assert found is not None
        assert None not in found, "every budget that some chain of regions meets is met"
        told += [one[0] for one in found if one is not None]
    assert len(told) == GRAPHS * len(SHARES)
    assert min(told) >= 0
    assert max(told) < 1e-9


@pytest.mark.slow
def test_the_portfolio_is_monotone_in_the_budget(portfolio: SimpleNamespace) -> None:
    for seed in range(GRAPHS):
        candidates = portfolio.candidates(sample(seed))
        assert not isinstance(candidates, Refused)
        least = min(one.peak_bytes for one in candidates)
        overheads = []
        for budget in range(least, candidates[0].peak_bytes + 2):
            chosen = fastest_within(candidates, budget, Overhead.SECONDS)
            assert chosen is not None
            assert chosen.peak_bytes <= budget
            overheads.append(chosen.overhead_seconds)
        assert overheads == sorted(overheads, reverse=True)
        assert overheads[-1] == 0


def test_rows_of_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimality_gap, "SOLVERS", (solvers.LinearChain(),))
    monkeypatch.setattr(optimality_gap, "recorded", lambda: recorded()[:8])
    (row,) = optimality_gap.rows()
    assert row["solver"] == "linear_chain"
    assert row["tasks"] == 8
    assert row["solved"] + row["refused"] <= 8
