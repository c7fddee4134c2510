"""The table of solvers, and all those that plan programs under one referee."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hypothesis
import pytest

from remat_opt import solvers
from remat_opt.graph import Graph
from remat_opt.schedule import plain
from remat_opt.simulator import simulate
from remat_opt.solvers import catalogue
from remat_opt.solvers.base import Refused, judge
from tests.graphs import INSTANCES, chain_edges, graphs

FIT = [row.name for row in solvers.available() if row.plans_programs]
#: Those that try (nearly) everything, and the default, whose own tests also draw graphs.
DEAR = {"exhaustive", "integer_program", "portfolio"}
#: Files that are not solvers, but shared by several of them, or combining them.
NOT_SOLVERS = {
    *("__init__", "base", "catalogue"),
    *(
        "allocator",
        "chain_figures",
        "coarsening",
        "division_tree",
        "lifetimes",
        "link_figures",
        "loop_nests",
        "lower_sets",
        "mirror",
        "recombination",
        "trunk",
    ),
}
#: Records that share a file.
FILE_OF = {
    "approximate_dp": "dynamic_program",
    "exact_dp": "dynamic_program",
    "revolve": "binomial",
    "heterogeneous_chain": "binomial",
}


def solver(name: str) -> solvers.Solver:
    found = solvers.named(name)
    assert found is not None
    return found


def test_every_solver_has_its_row() -> None:
    files = {path.stem for path in Path(catalogue.__file__).parent.glob("*.py")} - NOT_SOLVERS
    assert {FILE_OF.get(row.name, row.name) for row in solvers.available()} == files


def test_every_row_says_all_there_is_to_know() -> None:
    for row in solvers.available():
        assert all(getattr(row, field.name) != "" for field in dataclasses.fields(row))


def test_the_table_shows_itself() -> None:
    table = solvers.available()
    assert len(table) == len(list(table))
    assert repr(table).splitlines()[3].startswith("portfolio ")
    assert "<td" in table._repr_html_()


def test_records_and_rows_agree() -> None:
    assert [solver(name).name for name in FIT] == FIT
    assert solvers.named("min_cut") is None


def test_a_solver_says_which_options_differ() -> None:
    assert str(solvers.ApproximateDP()) == "approximate_dp"
    assert str(solvers.ApproximateDP(objective="memory")) == "approximate_dp(objective='memory')"


@pytest.mark.parametrize(
    ("name", "instance"),
    [
        pytest.param(name, instance, marks=[pytest.mark.slow] * (name in DEAR and len(graph) > 5))
        for name in FIT
        for instance, graph in INSTANCES.items()
    ],
)
def test_candidates_are_judged_by_the_referee(name: str, instance: str) -> None:
    graph = INSTANCES[instance]
    found = solver(name).candidates(graph)
    if isinstance(found, Refused):
        # A solver that does not take such a graph says so, and what to do.
        assert "Use" in found.message or "use" in found.message
        return
    assert found[0] == judge(graph, plain(graph))
    assert len({one.schedule for one in found}) == len(found)
    for one in found:
        replayed = simulate(graph, one.schedule)
        assert (replayed.peak_bytes, replayed.recomputed_flops) == (
            one.peak_bytes,
            one.recomputed_flops,
        )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in FIT]
)
@hypothesis.given(graph=graphs(max_vertices=8))
@hypothesis.settings(max_examples=12)
def test_any_graph_is_taken_or_refused(name: str, graph: Graph) -> None:
    found = solver(name).candidates(graph)
    if not isinstance(found, Refused):
        for one in found:
            one.schedule.check(graph)


@pytest.mark.parametrize("name", FIT)
def test_a_chain_is_taken_by_all(name: str) -> None:
    graph = Graph.from_edges([4] * 9, chain_edges(9), flops=[10] * 9)
    found = solver(name).candidates(graph)
    assert not isinstance(found, Refused)
    assert min(one.peak_bytes for one in found) < found[0].peak_bytes
