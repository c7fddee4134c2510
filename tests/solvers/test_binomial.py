"""Revolve and the program under a budget, against every nest of small chains."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import evaluate, simulate
from remat_opt.solvers import binomial
from remat_opt.solvers.base import Infeasible, Overhead, Refused, Solution, Status, pareto
from tests.graphs import FAMILIES, chain_edges, depth, graphs, layered
from tests.solvers import kept_oracle


def unit_chain(count: int) -> Graph:
    return Graph.from_edges([1] * count, chain_edges(count))


# ------------------------------------------------------------------------------------- Revolve


@cache
def pure_nests(steps: int) -> tuple[tuple, ...]:
    """All ways to reverse a chain that store states only: tuples of (length, inside), in order.

    The last part is one step, whose backward step follows at once.
    """
    found = [((1, ()),)] if steps == 1 else []
    for first in range(1, steps):
        for inside in pure_nests(first):
            found += [((first, inside), *rest) for rest in pure_nests(steps - first)]
    return tuple(found)


def snapshots_and_steps(parts: tuple) -> tuple[int, int]:
    """How many states are in memory at a time, and how many steps run besides the first pass.

    A plain count: while part p runs backward, the states that the parts before it start from are in
    memory, and its own if it is more than one step: a step in its turn may use it up. A part that
    runs again does so as a separate first pass.
    """
    most, again = 1, 0
    for stored, (length, inside) in enumerate(parts):
        deeper, more = snapshots_and_steps(inside) if length > 1 else (0, 0)
        most = max(most, stored + deeper)
        again += length + more if inside else 0
    return most, again


@pytest.mark.parametrize("steps", range(1, 11))
def test_closed_form_table_and_all_nests(steps):
    tried = [snapshots_and_steps(parts) for parts in pure_nests(steps)]
    table = binomial.recomputed_steps_table(steps, 12)
    for snapshots in range(1, 13):
        least = min(again for most, again in tried if most <= snapshots)
        assert least == table[snapshots][steps] == binomial.recomputed_steps(steps, snapshots)


def test_closed_form_is_the_table():
    table = binomial.recomputed_steps_table(150, 12)
    for snapshots in range(1, 13):
        for steps in range(1, 151):
            assert binomial.recomputed_steps(steps, snapshots) == table[snapshots][steps]
            if steps > 1 and snapshots > 1:
                ways = [
                    m + table[snapshots][m] + table[snapshots - 1][steps - m]
                    for m in range(1, steps)
                ]
                assert binomial.split(steps, snapshots) == 1 + ways.index(min(ways))


def test_the_readings_of_the_paper():
    assert binomial.recomputed_steps(1, 5) == 0
    for steps in range(1, 40):
        assert binomial.recomputed_steps(steps, 1) == steps * (steps - 1) // 2
        # As many snapshots as steps: the forward pass, and each turn but the last.
        assert binomial.recomputed_steps(steps, steps) == steps - 1


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 40])
def test_repetitions(snapshots):
    for steps in range(1, 60):
        repetitions = binomial.repetition_number(steps, snapshots)
        assert binomial.beta(snapshots, repetitions) >= steps
        assert repetitions == 0 or binomial.beta(snapshots, repetitions - 1) < steps


def parts_of(regions: tuple[Region, ...]) -> tuple:
    alone = ((1, ()),)
    if not regions:
        return ()
    return (*((len(one.vertices), parts_of(one.inside) or alone) for one in regions[:-1]), *alone)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 11, 30, 33])
@pytest.mark.parametrize("snapshots", [1, 2, 3, 4, 8, 60])
def test_the_executed_form_repeats_what_the_paper_counts(steps, snapshots):
    graph = unit_chain(steps)
    answer = binomial.solve(graph, snapshots)
    assert answer.status is Status.OPTIMAL
    replayed = simulate(graph, answer.schedule)
    paper = binomial.recomputed_steps_table(steps, snapshots)[snapshots][steps]
    assert len(replayed.recomputed) == paper == answer.objective == answer.bound
    assert answer.figures.recomputed_steps == paper
    repeated = Counter(replayed.recomputed)
    assert max(repeated.values(), default=0) <= answer.figures.repetitions
    assert answer.schedule.regions[-1].checkpointed is False
    most, again = snapshots_and_steps(parts_of(answer.schedule.regions))
    assert most <= snapshots
    assert again == paper
    # All snapshots except the initial one, and the two values of the running step.
    values = dataclasses.replace(graph, cotangent_bytes=(0,) * steps)
    assert simulate(values, answer.schedule).peak_bytes <= min(snapshots, steps) + 1


@pytest.mark.parametrize(("steps", "snapshots"), [(1, 1), (2, 1), (9, 2), (30, 3), (30, 30)])
def test_turns_are_dead_code_where_backward_steps_read_inputs_alone(steps, snapshots):
    graph = unit_chain(steps)
    graph = dataclasses.replace(graph, needs=graph.predecessors)
    answer = binomial.solve(graph, snapshots)
    replayed = simulate(graph, answer.schedule)
    assert len(replayed.recomputed) == binomial.recomputed_steps(steps, snapshots) - (steps - 1)


def test_a_large_chain():
    answer = binomial.solve(unit_chain(1000), 10)
    assert answer.figures == binomial.Reversal(
        steps=1000, snapshots=10, repetitions=4, recomputed_steps=3636
    )
    assert len(simulate(unit_chain(1000), answer.schedule).recomputed) == 3636


def cuts(graph: Graph) -> list[int]:
    """The last vertex and all those that no edge leads past, by trying every pair."""
    reads = [{*graph.predecessors[v], *graph.needs[v]} for v in range(len(graph))]
    return [
        cut
        for cut in range(len(graph))
        if not any(
            earlier in reads[v] for v in range(cut + 1, len(graph)) for earlier in range(cut)
        )
    ]


def check_links(graph: Graph) -> None:
    found = cuts(graph)
    answer = binomial.solve(graph, 2)
    if len(graph) > 2 and not {*found} - {0, len(graph) - 1}:
        assert isinstance(answer, Refused)
        return
    assert [part[-1] for part in binomial.links(graph)] == found
    assert [v for part in binomial.links(graph) for v in part] == list(range(len(graph)))
    for snapshots in (1, 2, 4):
        answer = binomial.solve(graph, snapshots)
        assert answer.objective == binomial.recomputed_steps(len(found), snapshots)
        answer.schedule.check(graph)
        repeated = Counter(simulate(graph, answer.schedule).recomputed)
        # If links do not read one another, some of it is dead code.
        read = all(
            any(cut in graph.predecessors[v] for v in range(len(graph))) for cut in found[:-1]
        )
        runs = sum(repeated[cut] for cut in found)
        assert runs == answer.objective if read else runs <= answer.objective


@given(kept_oracle.any_graphs())
@settings(max_examples=50)
def test_links(graph):
    check_links(graph)


@pytest.mark.slow
@given(kept_oracle.any_graphs())
@settings(max_examples=300)
def test_links_of_many(graph):
    check_links(graph)


# ------------------------------------------------------------------------------ under a budget


def nests(start: int, stop: int) -> Iterator[tuple[Region, ...]]:
    """All nests of the vertices of a chain: each is saved, or starts a checkpointed region."""
    saved = Region(vertices=(start,), checkpointed=False)
    if stop - start == 1:
        yield (saved,)
        return
    for rest in nests(start + 1, stop):
        yield (saved, *rest)
    for middle in range(start + 1, stop):
        for inside in nests(start, middle):
            first = Region(vertices=tuple(range(start, middle)), inside=inside)
            for rest in nests(middle, stop):
                yield (first, *rest)


def count_nests(count: int) -> int:
    return sum(1 for _ in nests(0, count))


def test_how_many_nests_there_are():
    # The large Schroeder numbers.
    assert [count_nests(count) for count in range(1, 7)] == [1, 2, 6, 22, 90, 394]


def check_by_the_referee(graph: Graph) -> None:
    """Every nest as a schedule, judged by the referee."""
    tried = [evaluate(graph, Schedule(regions=found)) for found in nests(0, len(graph))]
    peaks = sorted({one.peak_bytes for one in tried})
    assert binomial.least_budget(graph) == peaks[0]
    for budget in {peaks[0], peaks[len(peaks) // 2], peaks[-1] - 1, peaks[-1] + 1}:
        least = [one.overhead_seconds for one in tried if one.peak_bytes <= budget]
        check_answer(graph, budget, min(least, default=None), peaks[0])


def check_answer(graph: Graph, budget: int, expected: float | None, least_bytes: int) -> None:
    answer = binomial.least_overhead(graph, budget)
    if expected is None:
        assert answer == Infeasible(budget_bytes=budget, least_bytes=least_bytes)
        return
    assert isinstance(answer, Solution)
    assert answer.status is Status.OPTIMAL
    assert answer.objective == answer.bound == expected
    answer.schedule.check(graph)
    replayed = simulate(graph, answer.schedule)
    assert replayed.overhead_seconds == answer.figures.overhead_seconds == expected
    assert replayed.peak_bytes == answer.figures.peak_bytes <= budget


def least_by_hand(graph: Graph, budget: int) -> float:
    """The recursion for a chain whose backward steps read both ends, exact to the byte."""
    sizes, seconds, last = graph.bytes, graph.seconds, len(graph) - 1

    @cache
    def reverse(i: int, j: int, room: int) -> float:
        """Time to run i to j and back, not counting the first pass."""
        waiting = sizes[j] if j < last else 0
        before = sizes[i - 1] if i else 0
        # Forward and saved; backward with both cotangents beside the value.
        fits = max(waiting + sizes[i], 2 * sizes[i] + before) <= room
        own = seconds[i] if j < last else 0.0
        best = math.inf
        if fits:
            best = own + (reverse(i + 1, j, room - sizes[i]) if i < j else 0.0)
        for k in range(i, j):
            # The state of k is stored, i to k run again later.
            pairs = [sizes[i], *(a + b for a, b in itertools.pairwise(sizes[i : k + 1]))]
            if waiting + max(pairs) <= room:
                first = sum(seconds[i : k + 1]) if j < last else 0.0
                then = reverse(k + 1, j, room - sizes[k])
                best = min(best, first + then + reverse(i, k, room))
        return best

    return reverse(0, last, budget)


def check_by_hand(graph: Graph, share: float) -> None:
    least = binomial.least_budget(graph)
    most = evaluate(graph, plain(graph)).peak_bytes
    assert least_by_hand(graph, least - 1) == math.inf
    check_answer(graph, least - 1, None, least)
    for budget in {least, round(least + share * (most - least))}:
        check_answer(graph, budget, least_by_hand(graph, budget), least)


@st.composite
def chains(draw: st.DrawFn, *, max_vertices: int) -> Graph:
    graph = draw(kept_oracle.chains(max_vertices=max_vertices))
    quarters = draw(st.lists(st.integers(0, 16), min_size=len(graph), max_size=len(graph)))
    return dataclasses.replace(graph, seconds=tuple(number / 4 for number in quarters))


SHARES = st.sampled_from([0.1, 0.25, 0.5, 0.75])


@given(chains(max_vertices=5))
@settings(max_examples=20)
def test_optimal_among_all_nests(graph):
    check_by_the_referee(graph)


@pytest.mark.slow
@given(chains(max_vertices=6))
@settings(max_examples=200)
def test_optimal_among_all_nests_of_many(graph):
    check_by_the_referee(graph)


@given(chains(max_vertices=10), SHARES)
@settings(max_examples=25)
def test_optimal(graph, share):
    check_by_hand(graph, share)


@pytest.mark.slow
@given(chains(max_vertices=10), SHARES)
@settings(max_examples=300)
def test_optimal_on_many(graph, share):
    check_by_hand(graph, share)


def check_safe(graph: Graph) -> None:
    """On any graph the model is never below the referee."""
    least = binomial.least_budget(graph)
    if isinstance(least, Refused):
        return
    most = evaluate(graph, plain(graph)).peak_bytes
    for budget in {least, (least + most) // 2, least + most}:
        if budget < least:  # the model's least can be above the referee's plain peak
            continue
        answer = binomial.least_overhead(graph, budget)
        assert answer.status is Status.OPTIMAL
        answer.schedule.check(graph)
        replayed = simulate(graph, answer.schedule)
        assert replayed.peak_bytes <= answer.figures.peak_bytes <= budget
        assert replayed.overhead_seconds <= answer.objective
    assert isinstance(binomial.least_overhead(graph, least - 1), Infeasible)


@given(graphs())
@settings(max_examples=25)
def test_safe_on_any_graph(graph):
    check_safe(graph)


@pytest.mark.slow
@given(graphs())
@settings(max_examples=300)
def test_safe_on_many(graph):
    check_safe(graph)


def uneven_chain(count: int) -> Graph:
    return Graph.from_edges(
        [1 + 7919 * v * v % 1009 for v in range(count)],
        chain_edges(count),
        seconds=[1.0 + v % 5 for v in range(count)],
    )


@pytest.mark.parametrize(
    "slots", [20, *(pytest.param(slots, marks=pytest.mark.slow) for slots in (50, 200))]
)
def test_slots_bound_the_optimum_on_both_sides(slots):
    graph = uneven_chain(14)
    least = binomial.least_budget(graph)
    for budget in range(least, 2 * least, 97 if slots > 20 else 389):
        exact = binomial.least_overhead(graph, budget, slots=10**6)
        assert exact.status is Status.OPTIMAL
        assert exact.figures.slot_bytes == 1
        rounded = binomial.least_overhead(graph, budget, slots=slots)
        assert rounded.figures.slot_bytes > 1
        assert rounded.figures.peak_bytes <= budget
        assert rounded.bound <= exact.objective <= rounded.objective
        assert (rounded.status is Status.OPTIMAL) is (rounded.bound == rounded.objective)


def test_the_least_nest_where_rounding_leaves_none():
    graph = uneven_chain(14)
    least = binomial.least_budget(graph)
    answer = binomial.least_overhead(graph, least, slots=10)
    assert answer.status is Status.FEASIBLE
    assert answer.figures.peak_bytes == least


def test_monotone_in_the_budget():
    graph = uneven_chain(12)
    least = binomial.least_budget(graph)
    found = [binomial.least_overhead(graph, least + 640 * n, slots=10**6) for n in range(10)]
    overheads = [answer.objective for answer in found]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0


def test_frontier():
    graph = layered("chain", 12)
    found = binomial.frontier(graph)
    assert pareto(found, Overhead.SECONDS) == found
    assert found[0].peak_bytes == binomial.least_budget(graph)
    assert found[-1].overhead_seconds == 0
    for one in found:
        assert binomial.least_overhead(graph, one.peak_bytes).objective == one.overhead_seconds


def test_a_link_with_side_effects_is_saved():
    graph = dataclasses.replace(
        layered("chain", 6), pinned=(False, False, True, False, False, False)
    )
    answer = binomial.least_overhead(graph, binomial.least_budget(graph))
    answer.schedule.check(graph)
    assert 2 not in simulate(graph, answer.schedule).recomputed
    assert answer.objective > 0
    refused = binomial.solve(graph, 2)
    assert refused.message == (
        "Vertex '2' has side effects and must not run again, and Revolve runs all but the last "
        "link again. Use binomial.least_overhead, which saves its link."
    )


def test_multiple_recomputation_reaches_budgets_that_one_does_not():
    graph = unit_chain(30)
    answer = binomial.least_overhead(graph, binomial.least_budget(graph))
    assert answer.figures.depth > 1
    flat = [
        evaluate(
            graph,
            Schedule(
                regions=tuple(
                    Region(vertices=tuple(range(a, b)), checkpointed=b < 30)
                    for a, b in itertools.pairwise([*range(0, 30, step), 30])
                )
            ),
        ).peak_bytes
        for step in range(1, 31)
    ]
    assert answer.figures.peak_bytes < min(flat)


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_answered_or_refused(family):
    graph = layered(family, 9)
    answer = binomial.solve(graph, 3)
    if family in ("dense", "skip_to_end"):
        assert isinstance(answer, Refused)
        assert isinstance(binomial.least_budget(graph), Refused)
        assert isinstance(binomial.least_overhead(graph, 100), Refused)
        assert isinstance(binomial.frontier(graph), Refused)
    else:
        answer.schedule.check(graph)


def test_refusal_of_a_graph_without_a_cut():
    answer = binomial.solve(Graph.from_edges([1] * 4, [(0, 3), (1, 3), (2, 3)]), 2)
    assert answer.status is Status.REFUSED
    assert answer.message == (
        "The graph of 4 vertices has no cut between the first and the last: after each of them "
        "something before it is still read, so there is no chain of links to reverse. Use "
        "arbitrary_graph.solve or dynamic_program.approximate."
    )


def test_refusal_of_no_snapshots():
    assert binomial.solve(unit_chain(4), 0).message == (
        "0 snapshots reverse nothing: the initial state is one of them. Give 1 or more."
    )


def test_refusal_of_nests_that_are_too_deep():
    assert binomial.solve(unit_chain(300), 1).message == (
        "With 1 snapshots, 300 links take 299 checkpoints inside one another; the limit is 32. "
        "Give 2 snapshots or more."
    )
    assert isinstance(binomial.solve(unit_chain(300), 2), Solution)


def test_the_least_memory_of_a_long_chain_is_not_nested_too_deep():
    graph = unit_chain(120)
    least = binomial.least_budget(graph)
    assert binomial.least_overhead(graph, least).message == (
        f"The nest for {least} bytes has more than 32 checkpoints inside one another. Give a "
        "larger budget."
    )

    found = [depth(schedule.regions) for schedule in binomial.schedules(graph)]
    assert 2 < max(found) <= 32


def test_refusal_of_a_table_that_is_too_large():
    assert binomial.least_overhead(uneven_chain(300), 20_000, slots=400).message == (
        "300 links and 400 slots take a table of 36180000 entries; the limit is 30000000. Give "
        "fewer slots, or use dynamic_program.approximate."
    )
