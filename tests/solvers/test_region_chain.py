"""Region boundaries: the model against exhaustive search, and against the referee."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule, plain
from remat_opt.simulator import demand, evaluate, simulate
from remat_opt.solvers import region_chain
from remat_opt.solvers.region_chain import Segments, schedule_of, segments
from tests.graphs import all_boundaries, chain_edges, graphs, kept_sets, network, sampled

#: What bisection leaves, as a share of where it starts (five rounds of four trials).
RESOLUTION = 4**-5


@st.composite
def planned(
    draw: st.DrawFn, *, max_vertices: int = 10, pinned: bool = False
) -> tuple[Graph, tuple[int, ...]]:
    graph = draw(graphs(max_vertices=max_vertices, pinned=pinned))
    return graph, draw(kept_sets(graph))


def bound_of(figures: Segments, boundaries: list[int]) -> float:
    """The peak of a chain in the model, from its definition."""
    at = {int(position): row for row, position in enumerate(figures.positions)}
    held = peak = 0.0
    for start, stop in itertools.pairwise(boundaries):
        peak = max(peak, held + figures.workspace_bytes[at[start], at[stop]])
        held += figures.exports_bytes[at[start], at[stop]]
    return max(peak, held + figures.free_bytes[at[boundaries[-1]]])


def chains(
    figures: Segments, bounds: list[float], strains_bytes: list[float] | None = None
) -> list[list[int] | None]:
    limits = None if strains_bytes is None else [strains_bytes]
    (found,) = region_chain.chains([figures], [bounds], strains_bytes=limits)
    return found


def relaxed_chains(figures: Segments, bounds: list[float]) -> list[list[int] | None]:
    (found,) = region_chain.relaxed_chains([figures], [bounds])
    return found


def least_bound(figures: Segments) -> float:
    (found,) = region_chain.least_bounds([figures])
    return found


def bounds_over(figures: Segments) -> list[float]:
    return list(np.linspace(0.5, 1.0, 9) * figures.free_bytes[0])


def backward_peak(graph: Graph, schedule: Schedule) -> int:
    moments = simulate(graph, schedule).moments
    return max((m.live_bytes for m in moments if m.phase == "backward"), default=0)


# -------------------------------------------------------------------------- within the model


def check_least_bound(graph: Graph, kept: tuple[int, ...]) -> None:
    figures = segments(graph, kept)
    best = min(bound_of(figures, boundaries) for boundaries in all_boundaries(graph))
    found = least_bound(figures)
    slack = RESOLUTION * figures.free_bytes[0] + 1e-6
    assert best - 1e-6 <= found <= best + slack


@hypothesis.given(planned(max_vertices=7, pinned=True))
@hypothesis.settings(max_examples=20)
def test_least_bound_is_that_of_the_best_of_all_chains(
    drawn: tuple[Graph, tuple[int, ...]],
) -> None:
    check_least_bound(*drawn)


@pytest.mark.slow
@hypothesis.given(planned(max_vertices=10, pinned=True))
@hypothesis.settings(max_examples=300)
def test_least_bound_is_that_of_the_best_of_all_chains_on_many_graphs(
    drawn: tuple[Graph, tuple[int, ...]],
) -> None:
    check_least_bound(*drawn)


@hypothesis.given(planned(max_vertices=7))
@hypothesis.settings(max_examples=20)
def test_chains_have_the_largest_free_region_within_their_bound(
    drawn: tuple[Graph, tuple[int, ...]],
) -> None:
    figures = segments(*drawn)
    wanted = bounds_over(figures)
    everything = [(bound_of(figures, one), one[-1]) for one in all_boundaries(drawn[0])]
    for bound, found in zip(wanted, chains(figures, wanted), strict=True):
        within = [start for cost, start in everything if cost <= bound]
        if found is None:
            assert not within
        else:
            assert bound_of(figures, found) <= bound
            assert found[-1] == min(within)
            assert found[0] == 0
            assert found == sorted(set(found))


@hypothesis.given(planned())
def test_larger_bound_never_shrinks_the_free_region(drawn: tuple[Graph, tuple[int, ...]]) -> None:
    figures = segments(*drawn)
    starts = [
        len(drawn[0]) if found is None else found[-1]
        for found in chains(figures, bounds_over(figures))
    ]
    assert starts == sorted(starts, reverse=True)
    assert starts[-1] == 0, "the plain bound is enough for the unchanged function"


@hypothesis.given(planned())
def test_bounds_solved_together_are_those_solved_alone(
    drawn: tuple[Graph, tuple[int, ...]],
) -> None:
    figures = segments(*drawn)
    wanted = bounds_over(figures)
    assert chains(figures, wanted) == [chains(figures, [bound])[0] for bound in wanted]


@hypothesis.given(graphs(pinned=False), st.data())
@hypothesis.settings(max_examples=12)
def test_kept_sets_solved_together_are_those_solved_alone(
    graph: Graph, data: st.DataObject
) -> None:
    """More kept sets than are solved together, with different numbers of bounds."""
    count = region_chain._TOGETHER + 2
    figures = [segments(graph, data.draw(kept_sets(graph))) for _ in range(count)]
    bounds = [bounds_over(one)[number % 3 :] for number, one in enumerate(figures)]
    together = region_chain.relaxed_chains(figures, bounds)
    assert together == list(map(relaxed_chains, figures, bounds))
    assert region_chain.least_bounds(figures) == list(map(least_bound, figures))


@hypothesis.given(planned())
def test_relaxing_keeps_the_bound_and_the_free_region(
    drawn: tuple[Graph, tuple[int, ...]],
) -> None:
    figures = segments(*drawn)
    at = {int(position): row for row, position in enumerate(figures.positions)}

    def strain(boundaries: list[int]) -> float:
        return max(
            (
                figures.strain_bytes[at[start], at[stop]]
                for start, stop in itertools.pairwise(boundaries)
            ),
            default=0.0,
        )

    wanted = bounds_over(figures)
    for bound, first, relaxed in zip(
        wanted, chains(figures, wanted), relaxed_chains(figures, wanted), strict=True
    ):
        assert (first is None) == (relaxed is None)
        if first is not None and relaxed is not None:
            assert bound_of(figures, relaxed) <= bound
            assert relaxed[-1] <= first[-1]
            assert strain(relaxed) <= strain(first)


def test_limit_on_the_strain_holds_for_every_region() -> None:
    graph = network(4)
    figures = segments(graph, ())
    at = {int(position): row for row, position in enumerate(figures.positions)}
    bound = float(figures.free_bytes[0]) * 0.8
    (loose,), (tight,) = chains(figures, [bound]), chains(figures, [bound], strains_bytes=[64.0])
    assert loose is not None
    assert tight is not None
    pairs = list(itertools.pairwise(tight))
    assert pairs
    assert max(figures.strain_bytes[at[start], at[stop]] for start, stop in pairs) <= 64
    assert chains(figures, [bound], strains_bytes=[1.0]) != [tight]


def test_unreachable_bound_has_no_chain() -> None:
    assert chains(segments(network(2), ()), [0.0, 1.0]) == [None, None]


def test_candidate_positions_are_limited_and_spread() -> None:
    graph = Graph.from_edges([4] * 40, chain_edges(40))
    figures = segments(graph, (), most_positions=10)
    inner = figures.positions[1:-1]
    assert (figures.positions[0], figures.positions[-1], len(inner)) == (0, 40, 10)
    assert np.diff(figures.positions).max() <= 8
    bound = least_bound(figures)
    assert bound < figures.free_bytes[0] / 2
    assert least_bound(segments(graph, ())) <= bound * (1 + 1e-9)


# ------------------------------------------------------------------------ against the referee


def check_bound_holds_backward(graph: Graph, kept: tuple[int, ...]) -> None:
    """Values are held no longer, and no more is exported, than the model says.

    The model looks at backward steps only. The referee's peak can be higher: while a region
    recomputes values that only recomputation reads, or during the forward pass.
    """
    figures = segments(graph, kept)
    tried = [least_bound(figures), *bounds_over(figures)]
    for bound, boundaries in zip(tried, relaxed_chains(figures, tried), strict=True):
        if boundaries is not None:
            schedule = schedule_of(graph, kept, boundaries)
            assert backward_peak(graph, schedule) <= bound + 1e-6


@hypothesis.given(planned())
def test_backward_steps_stay_within_the_bound(drawn: tuple[Graph, tuple[int, ...]]) -> None:
    check_bound_holds_backward(*drawn)


@pytest.mark.slow
@hypothesis.given(planned(max_vertices=14))
@hypothesis.settings(max_examples=300)
def test_backward_steps_stay_within_the_bound_on_many_graphs(
    drawn: tuple[Graph, tuple[int, ...]],
) -> None:
    check_bound_holds_backward(*drawn)


def test_bound_of_the_unchanged_function_is_its_peak() -> None:
    graph = dataclasses.replace(network(3), in_place=(False,) * 10)
    assert segments(graph, ()).free_bytes[0] == simulate(graph, plain(graph)).peak_bytes


def test_residuals_without_a_name_add_up_within_a_region() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([1, 1, 1], chain_edges(3)),
        needs=((), (), ()),
        internal_bytes=(10, 10, 10),
    )
    figures = segments(graph, ())
    assert figures.free_bytes.tolist()[:3] == [32.0, 22.0, 12.0]
    assert figures.workspace_bytes[0, 1:].tolist() == [11.0, 22.0, 32.0]


def test_bound_by_hand() -> None:
    # Four values of 4 bytes; each backward step reads its input and output.
    figures = segments(Graph.from_edges([4] * 4, chain_edges(4)), ())
    # The last step but one: three values, two cotangents.
    assert figures.free_bytes[:4].tolist() == [24.0, 20.0, 16.0, 12.0]
    assert figures.workspace_bytes[0, 1:].tolist() == [8.0, 16.0, 20.0, 24.0]
    assert figures.exports_bytes[0, 1:].tolist() == [4.0, 4.0, 4.0, 0.0]
    assert least_bound(figures) == pytest.approx(20.0, rel=1e-3)


def test_kept_values_are_not_exported_again() -> None:
    figures = segments(Graph.from_edges([4] * 4, chain_edges(4)), (1,))
    assert figures.exports_bytes[0, 1:].tolist() == [4.0, 0.0, 4.0, 0.0]


def gap(seed: int) -> float:
    """The referee's peak of the chain found, over that of the best possible boundaries."""
    graph = sampled(seed, max_vertices=7)
    draw = random.Random(seed)
    kept = tuple(vertex for vertex in range(len(graph)) if seed % 2 and draw.random() < 0.5)
    figures = segments(graph, kept)
    (found,) = chains(figures, [least_bound(figures)])
    assert found is not None
    best = min(
        evaluate(graph, schedule_of(graph, kept, boundaries)).peak_bytes
        for boundaries in all_boundaries(graph)
    )
    peak = evaluate(graph, schedule_of(graph, kept, found)).peak_bytes
    return peak / best if best else 1.0


@pytest.mark.slow
def test_boundaries_are_near_the_best_by_the_referee() -> None:
    """A ratchet on what the model costs; a better model moves the figures down."""
    gaps = sorted(gap(seed) for seed in range(400))
    assert statistics.median(gaps) == 1.0
    assert sum(one == 1.0 for one in gaps) / len(gaps) >= 0.9
    assert gaps[int(0.95 * len(gaps))] <= 1.12
    assert gaps[-1] <= 1.5


# ------------------------------------------------------------------------------- schedules


@hypothesis.given(planned(pinned=True), st.data())
def test_schedules_are_legal_and_end_free(
    drawn: tuple[Graph, tuple[int, ...]], data: st.DataObject
) -> None:
    graph, kept = drawn
    inner = data.draw(st.sets(st.integers(1, len(graph) - 1))) if len(graph) > 1 else set()
    boundaries = [0, *sorted(inner)]
    schedule = schedule_of(graph, kept, boundaries)
    schedule.check(graph)
    last = schedule.regions[-1]
    assert not last.checkpointed
    assert last.vertices == tuple(range(boundaries[-1], len(graph)))
    for region in schedule.regions[:-1]:
        if not region.checkpointed:
            (vertex,) = region.vertices
            assert graph.pinned[vertex], "only side effects keep a region from a checkpoint"
    cuts = {region.vertices[0] for region in schedule.regions}
    assert set(boundaries) <= cuts


@hypothesis.given(planned(pinned=True), st.data())
def test_all_that_later_regions_read_is_kept_by_name(
    drawn: tuple[Graph, tuple[int, ...]], data: st.DataObject
) -> None:
    graph, kept = drawn
    inner = data.draw(st.sets(st.integers(1, len(graph) - 1))) if len(graph) > 1 else set()
    schedule = schedule_of(graph, kept, [0, *sorted(inner)])
    named = {vertex for region in schedule.regions for vertex in region.kept}
    for region in schedule.regions[:-1]:
        if region.checkpointed:
            assert demand(graph, schedule).stored & set(region.vertices) <= named


def test_side_effects_get_a_region_of_their_own() -> None:
    graph = dataclasses.replace(
        Graph.from_edges([4] * 6, chain_edges(6)),
        pinned=(False, True, False, False, True, False),
    )
    schedule = schedule_of(graph, (), [0, 3])
    assert [(region.vertices, region.checkpointed) for region in schedule.regions] == [
        ((0,), True),
        ((1,), False),
        ((2,), True),
        ((3, 4, 5), False),
    ]


def test_no_boundary_is_the_unchanged_function() -> None:
    graph = network(2)
    assert schedule_of(graph, (0, 3), [0]) == plain(graph)
