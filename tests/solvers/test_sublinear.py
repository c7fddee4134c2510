"""Chen's plans: against the paper's loops, every set of splits, and the referee."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import plain
from remat_opt.simulator import simulate
from remat_opt.solvers import mirror, sublinear
from remat_opt.solvers.allocator import allocate
from remat_opt.solvers.base import Infeasible, Overhead, Refused, Solution, Status
from remat_opt.solvers.sublinear import Variant
from tests.graphs import FAMILIES, INSTANCES, layered, network
from tests.solvers import mirror_oracle as oracle
from tests.solvers.kept_oracle import chains


def unit_chain(count):
    return layered("chain", count, size=1)


def check(graph, answer):
    """The figures are those of the paper's loops and of the referee."""
    assert isinstance(answer, Solution)
    found = answer.figures
    possible = mirror.executable(graph, found.mirror)
    assert found.mirror == mirror.closed(graph, found.mirror)
    assert found.executed == oracle.copies_run(graph, possible)
    assert found.live_bytes == oracle.live_bytes(graph, possible)
    assert (
        found.allocated_bytes
        == allocate(mirror.gradient_graph(graph, possible).execution).total_bytes
        >= found.live_bytes
        >= sublinear.step_bytes(graph)
    )
    assert found.approximate == mirror.approximate(graph, found.mirror)
    answer.schedule.check(graph)
    replayed = simulate(graph, answer.schedule)
    assert replayed.overhead_seconds == found.overhead_seconds
    assert mirror.mirror_counts(graph, answer.schedule) == found.executed
    return found


def check_memory(graph, answer):
    found = check(graph, answer)
    assert answer.objective == found.allocated_bytes
    assert answer.bound == sublinear.step_bytes(graph)
    best = answer.objective == answer.bound
    assert answer.status is (Status.OPTIMAL if best else Status.FEASIBLE)
    return found


# ------------------------------------------------------------------------------- Algorithm 3


def check_plan(graph, budget, splits):
    for given_splits in (None, splits):
        allowed = oracle.splitting(graph) if given_splits is None else given_splits
        x, printed, with_last, counts = oracle.budget_plan(graph, budget, allowed)
        for variant, y in ((Variant.PRINTED, printed), (Variant.MEMORY, with_last)):
            found = sublinear.plan(graph, budget, splits=given_splits, variant=variant)
            assert found.mirror == counts
            assert (found.approximate.between_bytes, found.approximate.stage_bytes) == (x, y)
        # x and y with the last stage are those of the counts.
        assert found.approximate == mirror.approximate(graph, found.mirror)


PLANS = st.tuples(
    oracle.nothing_internal(), st.integers(0, 60), st.lists(st.integers(0, 9), max_size=10)
)


@given(PLANS)
@settings(max_examples=50)
def test_plan(drawn):
    graph, budget, splits = drawn
    check_plan(graph, budget, {split for split in splits if split < len(graph)})


@pytest.mark.slow
@given(PLANS)
@settings(max_examples=300)
def test_plan_on_many(drawn):
    graph, budget, splits = drawn
    check_plan(graph, budget, {split for split in splits if split < len(graph)})


def test_printed_y_misses_the_last_stage():
    # Correction 11.
    graph = Graph.from_edges([1, 1, 1, 9, 9], FAMILIES["chain"](5))
    printed = sublinear.plan(graph, 1, splits=(1,), variant=Variant.PRINTED).approximate
    memory = sublinear.plan(graph, 1, splits=(1,)).approximate
    assert (printed.between_bytes, printed.stage_bytes) == (1, 2)
    assert (memory.between_bytes, memory.stage_bytes) == (1, 19)


def test_a_stage_ends_only_when_it_exceeds_the_budget():
    # Correction 11: temp > B, so with B = 4 a stage of 4 goes on.
    assert sublinear.plan(unit_chain(11), 4).mirror == (1, 1, 1, 1, 0) * 2 + (1,)
    assert sublinear.plan(unit_chain(4), 0).mirror == (0, 0, 0, 1)


@given(oracle.nothing_internal())
@settings(max_examples=50)
def test_candidates(graph):
    assert sublinear.candidates(graph) == oracle.splitting(graph)


@pytest.mark.slow
@given(oracle.nothing_internal(max_vertices=14))
@settings(max_examples=300)
def test_candidates_on_many(graph):
    assert sublinear.candidates(graph) == oracle.splitting(graph)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("chain", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("residual", (0, 2, 4, 6)),
        ("inception", (0, 4)),
        ("sinks", (0, 2, 4, 6)),
        ("dense", (0,)),
        ("skip_to_end", (0,)),
    ],
)
def test_candidates_of_the_families(family, expected):
    assert sublinear.candidates(layered(family, 9)) == expected


# ------------------------------------------------------------------------------- grid search


def check_least_memory(graph, variant):
    answer = sublinear.least_memory(graph, variant=variant)
    splits = oracle.splitting(graph)
    if not splits and len(graph) > 1:
        assert isinstance(answer, Refused)
        return
    x, printed, with_last, first = oracle.budget_plan(graph, 0, splits)
    product = x * (printed if variant is Variant.PRINTED else with_last)
    root = math.sqrt(product)
    # Evenly from B / sqrt(2) to sqrt(2) B, in whole bytes.
    low, high = math.floor(math.sqrt(product / 2)), math.floor(math.sqrt(2 * product))
    budgets = [math.floor(root), *(low + (high - low) * i // 5 for i in range(6))]
    plans = {first, *(oracle.budget_plan(graph, budget, splits)[-1] for budget in budgets)}
    found = check_memory(graph, answer)
    totals = [
        allocate(mirror.gradient_graph(graph, mirror.executable(graph, one)).execution).total_bytes
        for one in plans
    ]
    assert answer.objective == min(totals)
    assert found.tried == len(plans)


@given(oracle.nothing_internal(), st.sampled_from(Variant))
@settings(max_examples=50)
def test_least_memory(graph, variant):
    check_least_memory(graph, variant)


@pytest.mark.slow
@given(oracle.nothing_internal(), st.sampled_from(Variant))
@settings(max_examples=300)
def test_least_memory_on_many(graph, variant):
    check_least_memory(graph, variant)


def check_bound(graph):
    """No possible plan needs less than the bound."""
    bound = sublinear.step_bytes(graph)
    for counts in itertools.product((0, 1), repeat=len(graph)):
        assert bound <= oracle.live_bytes(graph, counts)


@given(oracle.nothing_internal(max_vertices=6))
@settings(max_examples=20)
def test_bound(graph):
    check_bound(graph)


@pytest.mark.slow
@given(oracle.nothing_internal(max_vertices=6))
@settings(max_examples=300)
def test_bound_on_many(graph):
    check_bound(graph)


def test_grid_goes_from_b_by_root_2_to_b_times_root_2():
    first = mirror.Approximate(between_bytes=400, stage_bytes=100)
    assert sublinear.grid(first) == (200, 141, 169, 197, 225, 253, 282)


def test_grid_search_on_a_thousand_layers():
    graph = unit_chain(1024)
    answer = sublinear.least_memory(graph)
    found = answer.figures
    # 2 sqrt(n), and one extra forward pass at most.
    assert found.allocated_bytes == found.live_bytes == 64
    replayed = simulate(graph, answer.schedule)
    assert (replayed.peak_bytes, replayed.overhead_seconds) == (65, found.overhead_seconds)
    assert found.approximate == mirror.Approximate(between_bytes=31, stage_bytes=32)
    assert found.overhead_seconds == 31 * 31


# ---------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("count", range(1, 11))
def test_segments_are_optimal_for_equal_bytes(count):
    graph = unit_chain(count)
    answer = sublinear.segments(graph)
    found = check_memory(graph, answer)
    assert found.approximate.total_bytes == oracle.least_total(graph)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12, 13, 99, 100, 101, 1024, 2000])
def test_segment_count_minimises_eq_1(count):
    costs = {k: math.ceil(count / k) + k for k in range(1, count + 1)}
    k = sublinear.segment_count(count)
    assert costs[k] == min(costs.values()) == math.ceil(2 * math.sqrt(count))


@given(chains(), st.integers(1, 10))
@settings(max_examples=50)
def test_segments(graph, count):
    check_memory(graph, sublinear.segments(graph))
    if count <= len(graph):
        found = check_memory(graph, sublinear.segments(graph, count))
        assert found.mirror.count(0) == count - 1
        kept = [v for v, times in enumerate(found.mirror) if not times]
        stops = [0, *(v + 1 for v in kept), len(graph)]
        lengths = {b - a for a, b in itertools.pairwise(stops)}
        assert max(lengths) - min(lengths) <= 1
        assert found.approximate.between_bytes == sum(graph.bytes[v] for v in kept)


@pytest.mark.slow
@given(chains(max_vertices=14))
@settings(max_examples=300)
def test_segments_on_many(graph):
    check_memory(graph, sublinear.segments(graph))


def test_one_segment_is_the_unchanged_function():
    graph = unit_chain(5)
    assert sublinear.segments(graph, 1).schedule == plain(graph)


@pytest.mark.parametrize("count", [0, -1, 6])
def test_impossible_numbers_of_segments(count):
    message = f"5 vertices cannot be cut into {count} segments."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sublinear.segments(unit_chain(5), count)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"chain"}))
def test_segments_of_what_is_no_chain_are_refused(family):
    answer = sublinear.segments(layered(family, 9))
    assert isinstance(answer, Refused)
    assert answer.status is Status.REFUSED
    assert re.fullmatch(
        r"The graph is not a chain: vertex '\d' does not read just the one before it\. Use "
        r"sublinear\.least_memory, which splits any graph at its articulation points\.",
        answer.message,
    )


# -------------------------------------------------------------------------------- drop cheap


def test_dropping_what_is_cheap_keeps_convolutions():
    graph = network(12)
    answer = sublinear.drop_cheap(graph, at_most=1.0)
    found = check_memory(graph, answer)
    kept = {v for v, times in enumerate(found.mirror) if not times}
    assert kept == {v for v in range(len(graph)) if graph.seconds[v] == 8.0}
    # All but those after the last convolution run again: 11 of 12 times 1.0 and 0.5 seconds.
    assert found.overhead_seconds == 11 * 1.5
    assert simulate(graph, answer.schedule).peak_bytes < simulate(graph, plain(graph)).peak_bytes


def test_cheap_in_flops():
    graph = network(3)
    by_flops = sublinear.drop_cheap(graph, at_most=4, measure=Overhead.FLOPS)
    assert by_flops.figures.mirror == sublinear.drop_cheap(graph, at_most=1.0).figures.mirror


def test_a_cheap_result_that_crosses_a_dear_one_is_kept():
    # 0 is cheap, and added to what comes after the expensive 1.
    graph = Graph.from_edges([4] * 4, [(0, 1), (0, 2), (1, 2), (2, 3)], seconds=[1, 8, 1, 1])
    found = check_memory(graph, sublinear.drop_cheap(graph, at_most=1))
    assert found.mirror == (0, 0, 1, 1)


def test_with_nothing_cheap_and_with_everything_cheap_nothing_is_recomputed():
    graph = network(3)
    for limit in (-1.0, 100.0):
        assert sublinear.drop_cheap(graph, at_most=limit).schedule == plain(graph)


def check_drop_cheap(graph, limit):
    found = check_memory(graph, sublinear.drop_cheap(graph, at_most=limit))
    again = {v for v, times in enumerate(found.executed) if times}
    assert all(graph.seconds[v] <= limit for v in again)
    assert set(found.executed) <= {0, 1}


@given(oracle.nothing_internal(), st.integers(0, 4))
@settings(max_examples=50)
def test_drop_cheap(graph, limit):
    check_drop_cheap(graph, limit)


@pytest.mark.slow
@given(oracle.nothing_internal(), st.integers(0, 4))
@settings(max_examples=300)
def test_drop_cheap_on_many(graph, limit):
    check_drop_cheap(graph, limit)


# --------------------------------------------------------------------------------- recursion


def test_logarithmic_memory_at_n_log_n_cost():
    """Section 4.4 under the referee: 1,024 layers in 13 units of memory for 5 forward passes."""
    for doublings in range(2, 11):
        count = 2**doublings
        graph = unit_chain(count)
        answer = sublinear.recursion(graph)
        replayed = simulate(graph, answer.schedule)
        # g(n) = log n, and at most 2 gradients and 1 result that a backward step reads.
        assert sublinear.recursive_cost(count, 1) == doublings
        assert replayed.peak_bytes == doublings + 3
        assert replayed.overhead_seconds == count / 2 * (doublings - 2) + 1
        assert replayed.overhead_seconds <= count * doublings
    assert (replayed.peak_bytes, replayed.overhead_seconds) == (13, 4097.0)
    assert simulate(graph, plain(graph)).peak_bytes == 1026
    assert max(answer.figures.executed) == 9


@pytest.mark.parametrize("kept", [1, 2, 3, 7, 31])
@pytest.mark.parametrize(
    "count",
    [
        *(1, 2, 3, 10, 64, 65, 81, 100),
        pytest.param(243, marks=pytest.mark.slow),
    ],
)
def test_recursion_stores_no_more_than_the_formula(count, kept):
    graph = unit_chain(count)
    found = check_memory(graph, sublinear.recursion(graph, kept=kept))
    # A stage holds the vertex that ends it, which is stored further out.
    stored = found.approximate.total_bytes - 1
    g = sublinear.recursive_cost(count, kept)
    assert stored <= g
    power = round(math.log(count, kept + 1))
    if count == (kept + 1) ** power:
        assert stored == g == kept * power  # Eq. 3
    assert simulate(graph, sublinear.recursion(graph, kept=kept).schedule).peak_bytes <= g + 3


@pytest.mark.parametrize("kept", range(1, 6))
def test_recursive_cost_follows_eq_2(kept):
    assert sublinear.recursive_cost(1, kept) == 0
    for count in range(2, 300):
        smaller = math.ceil(count / (kept + 1))
        expected = kept + sublinear.recursive_cost(smaller, kept)
        assert sublinear.recursive_cost(count, kept) == expected


def regions_of(schedule):
    pending = list(schedule.regions)
    while pending:
        region = pending.pop()
        yield region
        pending += region.inside


def check_recursion(graph, kept):
    answer = sublinear.recursion(graph, kept=kept)
    splits = oracle.splitting(graph)
    if not splits and len(graph) > 1:
        assert isinstance(answer, Refused)
        return
    found = check_memory(graph, answer)
    # Deep enough for every split to be kept once, and no deeper.
    depth, layers = 0, len(splits) + 1
    while layers > 1:
        layers = math.ceil(layers / (kept + 1))
        depth += 1
    assert max(found.mirror) <= max(depth, 1)
    assert all(found.mirror[v] < depth for v in splits)


@given(oracle.nothing_internal(), st.integers(1, 4))
@settings(max_examples=50)
def test_recursion(graph, kept):
    check_recursion(graph, kept)


@pytest.mark.slow
@given(oracle.nothing_internal(max_vertices=14), st.integers(1, 4))
@settings(max_examples=300)
def test_recursion_on_many(graph, kept):
    check_recursion(graph, kept)


def test_recursion_on_a_graph_that_is_no_chain():
    graph = layered("residual", 129, size=1)
    answer = sublinear.recursion(graph)
    check_memory(graph, answer)
    assert any(region.inside for region in regions_of(answer.schedule))
    assert simulate(graph, answer.schedule).peak_bytes < 20
    assert simulate(graph, plain(graph)).peak_bytes > 129


def test_recursion_that_keeps_nothing():
    message = "Keeping 0 results per level splits nothing; keep 1 or more."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sublinear.recursion(unit_chain(4), kept=0)


# -------------------------------------------------------------------------------- all of them


def check_within(graph):
    some = sublinear.within(graph, math.inf)
    if isinstance(some, Refused):
        assert not oracle.splitting(graph)
        return
    assert (some.status, some.objective, some.bound) == (Status.OPTIMAL, 0.0, 0.0)
    assert all(graph.seconds) <= (some.schedule == plain(graph))
    nothing = sublinear.within(graph, -1)
    assert isinstance(nothing, Infeasible)
    assert nothing.status is Status.INFEASIBLE
    others = [sublinear.least_memory(graph), *(sublinear.recursion(graph, kept=k) for k in (1, 2))]
    others += [sublinear.drop_cheap(graph, at_most=limit) for limit in set(graph.seconds)]
    if len(sublinear.candidates(graph)) < 2:
        del others[2]  # k = 2 is not among the plans
    assert nothing.least_bytes <= min((one.objective for one in others), default=math.inf)
    most = some.figures.allocated_bytes
    overheads = []
    for budget in sorted({nothing.least_bytes, (nothing.least_bytes + most) // 2, most}):
        answer = sublinear.within(graph, budget)
        found = check(graph, answer)
        assert found.allocated_bytes <= budget
        assert answer.objective == found.overhead_seconds
        fitting = [one for one in others if one.objective <= budget]
        assert all(answer.objective <= one.figures.overhead_seconds for one in fitting)
        overheads.append(answer.objective)
    assert overheads == sorted(overheads, reverse=True)
    below = sublinear.within(graph, nothing.least_bytes - 1)
    assert below == Infeasible(
        budget_bytes=nothing.least_bytes - 1, least_bytes=nothing.least_bytes
    )


@given(oracle.nothing_internal())
@settings(max_examples=40)
def test_within(graph):
    check_within(graph)


@pytest.mark.slow
@given(oracle.nothing_internal(max_vertices=7))
@settings(max_examples=300)
def test_within_on_many(graph):
    check_within(graph)


@pytest.mark.parametrize("name", INSTANCES)
def test_instances(name):
    graph = INSTANCES[name]
    check_memory(graph, sublinear.least_memory(graph))
    check_memory(graph, sublinear.recursion(graph))
    check_memory(graph, sublinear.drop_cheap(graph, at_most=1))


def test_thresholds_are_limited():
    count = 200
    graph = Graph.from_edges(
        [1] * count, FAMILIES["chain"](count), seconds=[float(1 + v) for v in range(count)]
    )
    answer = sublinear.within(graph, 60)
    assert check(graph, answer).tried <= 1 + 8 + sublinear.MOST_THRESHOLDS + 8


def test_side_effects_are_never_repeated():
    graph = dataclasses.replace(unit_chain(16), pinned=(False,) * 5 + (True,) + (False,) * 10)
    for answer in (
        sublinear.recursion(graph),
        sublinear.least_memory(graph),
        sublinear.segments(graph),
        sublinear.drop_cheap(graph, at_most=0.5),
    ):
        found = check_memory(graph, answer)
        assert not found.executed[5]


@pytest.mark.parametrize(
    "solve",
    [
        sublinear.least_memory,
        sublinear.recursion,
        lambda graph: sublinear.within(graph, 100),
    ],
)
def test_a_graph_that_nothing_splits_is_refused(solve):
    graph = Graph.from_edges([1, 1, 1, 1], [(0, 2), (1, 2), (0, 3), (1, 3)])
    answer = solve(graph)
    assert isinstance(answer, Refused)
    assert answer.message == (
        "Nothing splits the graph of 4 vertices: none is an articulation point that no edge leads "
        "past. Give the vertices that may be kept as splits, or use sublinear.drop_cheap or "
        "dynamic_program.approximate."
    )


def test_splits_of_ones_own_choice():
    graph = layered("dense", 12)
    found = check_memory(graph, sublinear.recursion(graph, splits=(3, 6, 9)))
    # What crosses is kept with the split that it crosses.
    assert found.mirror == mirror.closed(graph, found.mirror)
    assert found.mirror[4:7] == (0, 0, 0)


@pytest.mark.parametrize("split", [-1, 4])
def test_a_split_that_is_no_vertex(split):
    message = f"Vertex {split} cannot be a split: there are only 4 vertices, numbered from 0."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sublinear.plan(unit_chain(4), 1, splits=(split,))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sublinear.recursion(unit_chain(4), splits=(split,))
