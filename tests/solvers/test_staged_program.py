"""The integer program, against a search over all states of memory, and as a bound on schedules."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import evaluate
from remat_opt.solvers import staged_program
from remat_opt.solvers.base import Infeasible, Overhead, Refused, Status
from remat_opt.solvers.staged_program import Staged
from tests.graphs import (
    INSTANCES,
    all_boundaries,
    chain_edges,
    graphs,
    layered,
    nested_graphs,
    network,
    subsets,
)

# ------------------------------------------------------------------- the search over all states


def backward_steps(graph: Graph) -> list[int]:
    return [
        v
        for v in reversed(range(len(graph)))
        if graph.needs[v] or graph.cotangent_bytes[v] or graph.internal_bytes[v]
    ]


def gradients(graph: Graph) -> dict[int, tuple[int, int]]:
    """Bytes of cotangents before and during each backward step: those made and not yet used.

    During the step, its workspace counts too.
    """
    sizes = graph.cotangent_bytes
    made: set[int] = set()
    found = {}
    for v in reversed(range(len(graph))):
        before = sum(sizes[u] for u in made)
        if sizes[v]:
            smaller = [p for p in graph.predecessors[v] if 0 < sizes[p] <= sizes[v]]
            made -= {v} if graph.in_place[v] and smaller else set()
            made |= set() if graph.in_place[v] and smaller else {v}
            made |= set(graph.predecessors[v])
        found[v] = before, sum(sizes[u] for u in made) + (sizes[v] and graph.workspace_bytes[v])
        made.discard(v)
    return found


class Search:
    """Dijkstra over (stage, next vertex in it, values in memory, residuals in memory).

    Sets are bit masks. Anything may be dropped at any time. With ``any_order`` the vertices of a
    stage may run in any order and as often as they like.
    """

    def __init__(self, graph: Graph, costs: tuple, *, any_order: bool = False) -> None:
        self.graph, self.costs, self.any_order = graph, costs, any_order
        self.around = gradients(graph)
        self.steps = [("forward", v) for v in range(len(graph))]
        self.steps += [("backward", v) for v in backward_steps(graph)]

    def size(self, values: int, residuals: int) -> int:
        graph = self.graph
        return sum(graph.bytes[v] for v in range(len(graph)) if values >> v & 1) + sum(
            graph.internal_bytes[v] for v in range(len(graph)) if residuals >> v & 1
        )

    def reads(self, vertices: tuple[int, ...]) -> int:
        return sum(1 << v for v in vertices)

    def runs(self, values: int, residuals: int, v: int) -> Iterator[tuple[int, int, int]]:
        """What running v leads to, with and without its residuals, and the bytes it takes."""
        graph = self.graph
        if self.reads(graph.predecessors[v]) & ~values:
            return
        for made in {residuals, residuals | 1 << v} if graph.internal_bytes[v] else {residuals}:
            yield values | 1 << v, made, self.size(values, made) + graph.bytes[v]

    def moves(self, state: tuple) -> Iterator[tuple[tuple, float, int]]:
        """Next state, cost, and bytes of the step between."""
        stage, place, values, residuals = state
        graph = self.graph
        phase, vertex = self.steps[stage]
        for v in range(len(graph)):
            if values >> v & 1:
                yield (stage, place, values ^ 1 << v, residuals), 0, 0
            if residuals >> v & 1:
                yield (stage, place, values, residuals ^ 1 << v), 0, 0
        waiting, turning = self.around[vertex] if phase == "backward" else (0, 0)
        top = vertex if phase == "forward" else vertex + 1
        for v in range(top) if self.any_order else range(place, top):
            if not graph.pinned[v]:
                for after, made, size in self.runs(values, residuals, v):
                    then = 0 if self.any_order else v + 1
                    yield (stage, then, after, made), self.costs[v], size + waiting
        if phase == "forward":
            for after, made, size in self.runs(values, residuals, vertex):
                size += graph.forward_workspace_bytes[vertex]
                yield (stage + 1, 0, after, made), 0, size
        else:
            own = 1 << vertex if graph.internal_bytes[vertex] else 0
            if not self.reads(graph.needs[vertex]) & ~values and not own & ~residuals:
                size = self.size(values, residuals) + turning
                shown = size if graph.cotangent_bytes[vertex] else 0
                yield (stage + 1, 0, values, residuals & ~own), 0, shown

    def best(self, step: Callable[[float, float, int], float | None]) -> float:
        queue = [(0.0, (0, 0, 0, 0))]
        seen = set()
        while queue:
            reached, state = heapq.heappop(queue)
            if state in seen:
                continue
            seen.add(state)
            if state[0] == len(self.steps):
                return reached
            for after, cost, size in self.moves(state):
                if after not in seen and (then := step(reached, cost, size)) is not None:
                    heapq.heappush(queue, (then, after))
        return math.inf

    def least_overhead(self, budget: float) -> float:
        return self.best(lambda reached, cost, size: reached + cost if size <= budget else None)

    def least_peak(self) -> float:
        return self.best(lambda reached, _, size: max(reached, size))


# ----------------------------------------------------------------------- a referee for the stages


def moments(graph: Graph, stages: tuple[staged_program.Stage, ...]) -> list[int]:
    """Checks that every step finds what it reads, and gives the bytes alive at each.

    Every array of a stage is given the span from the first step that has it to the last one.
    """
    around = gradients(graph)
    assert [(stage.phase, stage.vertex) for stage in stages] == [
        *(("forward", v) for v in range(len(graph))),
        *(("backward", v) for v in backward_steps(graph)),
    ]
    assert not stages[0].held
    assert not stages[0].held_internal
    found = []
    left: set[int] = set()
    left_internal: set[int] = set()
    for stage, later in itertools.zip_longest(stages, stages[1:]):
        keeps = set(later.held) if later else set()
        keeps_internal = set(later.held_internal) if later else set()
        assert set(stage.held) <= left
        assert set(stage.held_internal) <= left_internal
        assert list(stage.again) == sorted(set(stage.again))
        assert all(v <= stage.vertex for v in stage.again)
        assert not any(graph.pinned[v] for v in stage.again)
        backward = stage.phase == "backward"
        steps = [*stage.again, stage.vertex]
        end = len(steps) - 1
        waiting, turning = around[stage.vertex] if backward else (0, 0)
        runs = steps[:-1] if backward else steps
        reads = [graph.predecessors[v] for v in runs]
        reads += [graph.needs[stage.vertex]] if backward else []
        born = {v: at for at, v in reversed(list(enumerate(runs)))} | dict.fromkeys(stage.held, -1)
        spans = []
        for v, start in born.items():
            uses = [at for at, read in enumerate(reads) if v in read]
            assert all(start < at for at in uses)
            spans.append((start, end if v in keeps else max([start, *uses]), graph.bytes[v]))
        assert {v for read in reads for v in read} <= set(born)
        # A held vertex that still runs does so for its residuals; that copy lives once.
        copies = [(at, at, graph.bytes[v]) for at, v in enumerate(runs) if v in stage.held]
        for v in range(len(graph)):
            wanted = v in keeps_internal or (backward and v == stage.vertex)
            if graph.internal_bytes[v] and (v in stage.held_internal or (wanted and v in runs)):
                start = -1 if v in stage.held_internal else runs.index(v)
                spans.append((start, end, graph.internal_bytes[v]))
        if backward and graph.internal_bytes[stage.vertex]:
            assert stage.vertex in {*stage.held_internal, *runs}
        for at in range(len(steps)):
            if at < end or not backward or graph.cotangent_bytes[stage.vertex]:
                extra = turning if backward and at == end else waiting
                extra += 0 if backward else graph.forward_workspace_bytes[steps[at]]
                alive = sum(size for a, b, size in [*spans, *copies] if a <= at <= b)
                found.append(alive + extra)
        left = set(born)
        left_internal = set(stage.held_internal) | {v for v in runs if graph.internal_bytes[v]}
    return found


def check_legal(graph: Graph, answer: Staged) -> None:
    found = moments(graph, answer.stages)
    assert found == list(staged_program.replay(graph, answer.stages))
    assert max(found) == answer.peak_bytes
    again = [v for stage in answer.stages for v in stage.again]
    assert answer.overhead_seconds == math.fsum(graph.seconds[v] for v in again)
    assert answer.recomputed_flops == sum(graph.flops[v] for v in again)
    assert 0 <= answer.bound <= answer.objective
    assert (answer.status is Status.OPTIMAL) is (answer.bound == answer.objective)
    assert (answer.gap == 0) is (answer.status is Status.OPTIMAL)


def check_optimal(graph: Graph, share: float) -> None:
    search = Search(graph, graph.seconds)
    least = staged_program.least_peak(graph)
    check_legal(graph, least)
    assert least.status is Status.OPTIMAL
    assert least.objective == least.peak_bytes == search.least_peak()
    most = evaluate(graph, plain(graph)).peak_bytes
    budget = least.peak_bytes + math.floor(share * (most - least.peak_bytes))
    answer = staged_program.least_overhead(graph, budget)
    check_legal(graph, answer)
    assert answer.status is Status.OPTIMAL
    assert answer.peak_bytes <= budget
    assert answer.objective == answer.overhead_seconds == search.least_overhead(budget)


SHARES = st.sampled_from([0.0, 0.0, 0.25, 0.5])


@given(graphs(max_vertices=5), SHARES)
@settings(max_examples=20)
def test_optimal(graph, share):
    check_optimal(graph, share)


@pytest.mark.slow
@given(graphs(max_vertices=5), SHARES)
@settings(max_examples=300)
def test_optimal_on_many(graph, share):
    check_optimal(graph, share)


@given(graphs(max_vertices=5))
@settings(max_examples=15)
def test_infeasible_below_the_least_peak(graph):
    least = staged_program.least_peak(graph).peak_bytes
    assert staged_program.least_overhead(graph, least - 1) == Infeasible(
        budget_bytes=least - 1, least_bytes=least
    )


def check_bound(graph: Graph, schedule: Schedule) -> None:
    """No executable schedule recomputes less within the same peak."""
    figures = evaluate(graph, schedule)
    for measure, overhead in (
        (Overhead.SECONDS, figures.overhead_seconds),
        (Overhead.FLOPS, figures.recomputed_flops),
    ):
        answer = staged_program.least_overhead(graph, figures.peak_bytes, measure=measure)
        check_legal(graph, answer)
        assert answer.bound <= answer.objective <= overhead


@given(nested_graphs(max_vertices=7))
@settings(max_examples=20)
def test_bound_on_executable_schedules(drawn):
    check_bound(*drawn)


@pytest.mark.slow
@given(nested_graphs(max_vertices=7))
@settings(max_examples=300)
def test_bound_on_many_executable_schedules(drawn):
    check_bound(*drawn)


def flat_schedules(graph: Graph) -> Iterator[Schedule]:
    """All chains of regions without regions inside; the last one free or not."""
    count = len(graph)
    for starts in all_boundaries(graph):
        ranges = [range(a, b) for a, b in itertools.pairwise([*starts, count])]
        for kept in subsets(list(range(count))):
            for free in range(2):
                regions = [
                    Region(vertices=tuple(part), kept=tuple(v for v in kept if v in part))
                    for part in ranges
                ]
                regions[-1] = dataclasses.replace(regions[-1], checkpointed=not free)
                yield Schedule(regions=tuple(regions))


@pytest.mark.parametrize(
    "graph",
    [
        layered("chain", 6),
        *(
            pytest.param(layered(kind, 6), marks=pytest.mark.slow)
            for kind in ("residual", "inception")
        ),
    ],
)
def test_how_far_the_best_chain_of_regions_is_from_it(graph):
    """Brute force in place of a program restricted to chains of regions."""
    tried = [evaluate(graph, schedule) for schedule in flat_schedules(graph)]
    least = staged_program.least_peak(graph).peak_bytes
    reached = min(one.peak_bytes for one in tried)
    assert least <= reached
    most = max(one.peak_bytes for one in tried)
    for budget in (*range(reached, most, 8), most):
        best = min(one.overhead_seconds for one in tried if one.peak_bytes <= budget)
        free = staged_program.least_overhead(graph, budget)
        assert free.status is Status.OPTIMAL
        assert free.objective <= best
    assert best == free.objective == 0


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_instances(name):
    graph = INSTANCES[name]
    most = evaluate(graph, plain(graph)).peak_bytes
    unchanged = staged_program.least_overhead(graph, most)
    check_legal(graph, unchanged)
    assert (unchanged.objective, unchanged.bound) == (0, 0)
    least = staged_program.least_peak(graph)
    check_legal(graph, least)
    assert least.status is Status.OPTIMAL


def test_monotone_in_the_budget():
    graph = layered("chain", 8)
    least = staged_program.least_peak(graph).peak_bytes
    found = [
        staged_program.least_overhead(graph, budget).objective for budget in range(least, 44, 4)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


def reading_both_ends() -> Graph:
    """A backward step reads 0 and 2: best to rerun 0 after 1 and 2, although it ran for them."""
    return dataclasses.replace(
        Graph.from_edges([1, 4, 2, 1, 4], chain_edges(5)),
        needs=((), (0, 1), (), (0, 2), ()),
        cotangent_bytes=(1, 0, 2, 0, 0),
    )


def reading_out_of_order() -> Graph:
    """A backward step reads 1 and 2: best to run 1 after 2, which is not the graph's order."""
    return dataclasses.replace(
        Graph.from_edges([1, 3, 3, 2], [(0, 2), (1, 3)]),
        needs=((), (), (), (1, 2)),
        cotangent_bytes=(0, 0, 3, 0),
    )


@pytest.mark.parametrize("graph", [reading_both_ends(), reading_out_of_order()])
def test_what_the_stages_leave_out(graph):
    least = staged_program.least_peak(graph).peak_bytes
    assert least == Search(graph, graph.seconds).least_peak() == 7
    assert Search(graph, graph.seconds, any_order=True).least_peak() == 6


@given(graphs(max_vertices=4), SHARES)
@settings(max_examples=20)
def test_any_order_within_a_stage_is_at_least_as_good(graph, share):
    staged = Search(graph, graph.seconds)
    free = Search(graph, graph.seconds, any_order=True)
    least = int(staged.least_peak())
    assert free.least_peak() <= least
    budget = least + share * (evaluate(graph, plain(graph)).peak_bytes - least)
    assert free.least_overhead(budget) <= staged.least_overhead(budget)


@pytest.mark.parametrize("spread", [1, 1000, 10**6])
def test_sizes_that_must_be_rounded(spread):
    count = 6
    graph = Graph.from_edges(
        [10**9 + 7919 * v * v % 1009 * spread for v in range(count)],
        chain_edges(count),
        seconds=[1e-6 * (1 + v % 3) for v in range(count)],
    )
    search = Search(graph, graph.seconds)
    least = staged_program.least_peak(graph)
    check_legal(graph, least)
    share = count / staged_program.GRAINS
    assert least.bound <= search.least_peak() <= least.peak_bytes
    assert least.gap <= share
    peak = least.peak_bytes
    assert staged_program.least_overhead(graph, 0.99 * peak).least_bytes == peak
    for budget in (peak, peak + 10**8, peak + 5 * 10**8, peak + 10**9, 2 * peak):
        answer = staged_program.least_overhead(graph, budget)
        check_legal(graph, answer)
        assert answer.peak_bytes <= budget
        exact = search.least_overhead(budget)
        assert answer.bound <= exact * (1 + 1e-12)
        assert exact <= answer.objective * (1 + 1e-12)
        least_within = search.least_overhead(budget * (1 - share))
        assert least_within == math.inf or answer.objective <= least_within * (1 + 1e-12)


@pytest.mark.slow
def test_the_search_stops_at_a_number_of_nodes():
    graph = layered("chain", 10)
    stopped = staged_program.least_overhead(graph, 20, node_limit=1)
    check_legal(graph, stopped)
    assert stopped.status is Status.FEASIBLE
    assert stopped.nodes == 1
    assert 0 < stopped.gap < 1
    done = staged_program.least_overhead(graph, 20)
    assert done.status is Status.OPTIMAL
    assert stopped.bound <= done.objective <= stopped.objective


def test_figures():
    answer = staged_program.least_overhead(network(3), 90)
    assert answer.status is Status.OPTIMAL
    assert answer.binaries == 200
    assert answer.nodes >= 0
    assert answer.gap == 0


def test_refusal_of_large_graphs():
    answer = staged_program.least_overhead(layered("chain", 40), 100)
    assert isinstance(answer, Refused)
    assert answer.message == (
        "The graph of 40 vertices takes 3200 binary variables; the limit of the integer program "
        "is 1500. Use dynamic_program.approximate or binomial.least_overhead, or raise "
        "most_binaries."
    )
    assert staged_program.least_peak(layered("chain", 40)) == answer


def test_refusals_of_searches_that_are_cut_short():
    graph = layered("chain", 10)
    assert staged_program.least_overhead(graph, 20, node_limit=0).message == (
        "No schedule within 20 bytes was found in 0 nodes; any takes 0 seconds of recomputation "
        "or more. Raise node_limit, or use dynamic_program.approximate."
    )
    assert staged_program.least_overhead(graph, 12, node_limit=0).message == (
        "There is no schedule within 12 bytes, and the least budget for which there is one was "
        "not settled in 0 nodes. Raise node_limit."
    )
    assert staged_program.least_peak(graph, node_limit=0).message == (
        "No schedule was found in 0 nodes. Raise node_limit, or use "
        "dynamic_program.least_approximate_budget."
    )
