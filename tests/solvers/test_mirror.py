"""Mirror counts: Algorithm 2 against the paper's loops, and the referee against Algorithm 2."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import simulate
from remat_opt.solvers import mirror
from remat_opt.solvers.allocator import allocate
from remat_opt.solvers.mirror import Kind
from tests.graphs import FAMILIES, graphs, layered, schedules
from tests.solvers import mirror_oracle as oracle


def check_gradient_graph(graph, counts):
    found = mirror.gradient_graph(graph, counts)
    order, reads = oracle.gradient_graph(graph, counts)
    kinds = {Kind.FORWARD: "f", Kind.MIRROR: "f", Kind.GRADIENT: "g"}
    nodes = [(kinds[node.kind], node.vertex, node.round) for node in found.nodes]
    assert nodes == order
    assert [{nodes[read] for read in one} for one in found.execution.reads] == [
        set(reads[node]) for node in order
    ]
    assert found.recomputed == oracle.copies_run(graph, counts)
    assert all(ran <= count for ran, count in zip(found.recomputed, counts, strict=True))
    assert found.execution.bytes == tuple(oracle.size(graph, node) for node in order)
    assert allocate(found.execution).live_bytes == oracle.live_bytes(graph, counts)


def check_schedule(graph, counts):
    """The regions recompute what the copies do, equally often."""
    possible = mirror.executable(graph, counts)
    schedule = mirror.schedule_of(graph, counts)
    schedule.check(graph)
    assert mirror.mirror_counts(graph, schedule) == oracle.copies_run(graph, possible)
    replayed = simulate(graph, schedule)
    ran = oracle.copies_run(graph, possible)
    assert replayed.overhead_seconds == sum(
        second * times for second, times in zip(graph.seconds, ran, strict=True)
    )
    assert all(low <= high for low, high in zip(possible, counts, strict=True))
    assert not any(possible[v] for v in range(len(graph)) if graph.pinned[v])
    assert mirror.executable(graph, possible) == possible
    assert mirror.schedule_of(graph, possible) == schedule


@given(oracle.with_counts())
@settings(max_examples=50)
def test_gradient_graph(drawn):
    check_gradient_graph(*drawn)


@pytest.mark.slow
@given(oracle.with_counts())
@settings(max_examples=300)
def test_gradient_graph_on_many(drawn):
    check_gradient_graph(*drawn)


@given(oracle.with_counts())
@settings(max_examples=50)
def test_schedule(drawn):
    check_schedule(*drawn)


@pytest.mark.slow
@given(oracle.with_counts())
@settings(max_examples=300)
def test_schedule_on_many(drawn):
    check_schedule(*drawn)


@given(oracle.with_counts())
@settings(max_examples=50)
def test_closed(drawn):
    graph, counts = drawn
    found = mirror.closed(graph, counts)
    readers = [
        {t for t in range(len(graph)) if v in (*graph.predecessors[t], *graph.needs[t])}
        for v in range(len(graph))
    ]
    for v, count in enumerate(found):
        assert count <= counts[v]
        past = {c for t in readers[v] for c in range(v, t)}
        assert all(found[c] >= count for c in past)
        # No lower than necessary.
        assert count == counts[v] or count in {found[c] for c in past}


@given(graphs(internal=False))
def test_all_zeros_are_the_normal_gradient_graph(graph):
    zeros = (0,) * len(graph)
    assert mirror.schedule_of(graph, zeros) == plain(graph)
    found = mirror.gradient_graph(graph, zeros)
    assert len(found.nodes) == 2 * len(graph)
    assert found.recomputed == zeros


@given(graphs(), st.integers(1, 4))
def test_with_nothing_kept_the_one_stage_is_spared(graph, count):
    assert mirror.schedule_of(graph, (count,) * len(graph)) == plain(graph)


@given(graphs().flatmap(lambda graph: st.tuples(st.just(graph), schedules(graph))))
def test_mirror_counts_of_any_schedule(drawn):
    graph, schedule = drawn
    counts = mirror.mirror_counts(graph, schedule)
    replayed = simulate(graph, schedule)
    assert sum(counts) == len(replayed.recomputed)
    assert {v for v, count in enumerate(counts) if count} == set(replayed.recomputed)


def test_figure_3():
    """conv, bn, relu, twice: bn and relu are mirrored; conv is not."""
    graph = Graph.from_edges([4] * 6, FAMILIES["chain"](6), names="c1 b1 r1 c2 b2 r2".split())
    found = mirror.gradient_graph(graph, (0, 1, 1, 0, 1, 1))
    steps = [(node.kind, graph.names[node.vertex]) for node in found.nodes[6:]]
    forward, again, back = Kind.FORWARD, Kind.MIRROR, Kind.GRADIENT
    assert {node.kind for node in found.nodes[:6]} == {forward}
    assert steps == [
        *[(again, "b2"), (again, "r2")],
        *[(back, "r2"), (back, "b2")],
        *[(again, "b1"), (again, "r1")],
        *[(back, "c2"), (back, "r1"), (back, "b1"), (back, "c1")],
    ]
    assert found.execution.names[:1] == ("forward 0 of c1",)
    assert found.execution.names[6:9:2] == ("mirror 1 of b2", "gradient 0 of r2")


def test_counts_above_one_nest():
    chain = layered("chain", 8)
    counts = (2, 1, 2, 0, 2, 1, 2, 3)
    assert mirror.executable(chain, counts) == (2, 1, 2, 0, 1, 0, 0, 0)
    assert mirror.schedule_of(chain, counts) == Schedule(
        regions=(
            Region(
                vertices=(0, 1, 2, 3),
                kept=(3,),
                inside=(
                    Region(vertices=(0, 1), kept=(1,)),
                    Region(vertices=(2, 3), checkpointed=False),
                ),
            ),
            Region(vertices=(4, 5), kept=(5,)),
            Region(vertices=(6, 7), checkpointed=False),
        )
    )
    # 2 is in the last part of its stage: one of its two copies never runs.
    spared = mirror.executable(chain, counts)
    assert mirror.gradient_graph(chain, spared).recomputed == (2, 1, 1, 0, 1, 0, 0, 0)


def test_rounds_that_cut_nothing_are_passed_over():
    chain = layered("chain", 4)
    once = mirror.schedule_of(chain, (1, 1, 0, 0))
    assert mirror.schedule_of(chain, (900, 900, 0, 0)) == once
    assert mirror.mirror_counts(chain, once) == (1, 1, 0, 0)


def test_a_stage_with_side_effects_is_not_recomputed():
    chain = dataclasses.replace(layered("chain", 6), pinned=(False, True, *(False,) * 4))
    assert mirror.executable(chain, (1, 1, 0, 1, 0, 0)) == (0, 0, 0, 1, 0, 0)
    # Only those nested stages that hold the vertex are spared.
    assert mirror.executable(chain, (2, 1, 3, 2, 3, 0)) == (0, 0, 1, 0, 0, 0)


def test_a_result_that_crosses_is_kept():
    graph = Graph.from_edges([4] * 5, FAMILIES["skip_to_end"](5))
    # 0 and 1 are read by the last vertex, past 2.
    assert mirror.closed(graph, (1, 1, 0, 1, 1)) == (0, 0, 0, 1, 1)
    assert mirror.closed(graph, (3, 3, 2, 3, 1)) == (2, 2, 2, 3, 1)


@pytest.mark.parametrize(
    ("counts", "between", "stage"),
    [
        ((1, 1, 1, 1, 1, 1), 0, 21),
        ((0, 0, 0, 0, 0, 0), 21, 6),
        ((1, 0, 1, 0, 1, 1), 2 + 4, 11),
        ((1, 1, 0, 1, 1, 0), 3 + 6, 15),
        # Within the last stage, 5 is kept: one level deeper.
        ((1, 1, 0, 2, 1, 2), 3 + 5, 9),
    ],
)
def test_approximate(counts, between, stage):
    graph = Graph.from_edges([1, 2, 3, 4, 5, 6], FAMILIES["chain"](6))
    found = mirror.approximate(graph, counts)
    assert (found.between_bytes, found.stage_bytes) == (between, stage)
    assert found.total_bytes == between + stage


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0,), "There are 1 mirror counts for 2 vertices."),
        ((0, -1), "The mirror count of '1' is -1; it must be 0 or more."),
    ],
)
@pytest.mark.parametrize(
    "function",
    [mirror.gradient_graph, mirror.closed, mirror.executable, mirror.approximate],
)
def test_wrong_counts(function, counts, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        function(layered("chain", 2), counts)
