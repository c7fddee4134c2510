"""Regions with what they take, from the schedules that have them."""

from __future__ import annotations

import itertools

from remat_opt.compilers.learnt import Corrections, Key, Learnt
from remat_opt.compilers.parts import Parts
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import simulate
from remat_opt.solvers import recombination

COUNT = 12
CHAIN = Graph.from_edges([100] * COUNT, list(itertools.pairwise(range(COUNT))))
KEY = Key(fingerprint="f", device="cpu", compiler="c", step="s")
NOTHING = Corrections(Learnt(key=KEY, labels=("same",) * COUNT), CHAIN)


def cut(*edges: int) -> Schedule:
    regions = [
        Region(vertices=tuple(range(a, b)), kept=(b - 1,)) for a, b in itertools.pairwise(edges)
    ]
    rest = Region(vertices=tuple(range(edges[-1], COUNT)), checkpointed=False)
    return Schedule(regions=(*regions, rest))


def test_a_region_is_there_wherever_the_graph_is_the_same() -> None:
    parts = Parts(CHAIN, NOTHING, CHAIN.seconds)
    schedule = cut(0, 3, 6)
    parts.add(schedule, simulate(CHAIN, schedule).moments)
    by_region = {one.region: one for one in parts.found}
    for region in schedule.regions:
        assert region in by_region
    three = Region(vertices=(7, 8, 9), kept=(9,))
    assert by_region[three].held_bytes == 100
    assert by_region[three].needs_bytes == by_region[schedule.regions[1]].needs_bytes
    assert by_region[three].cost == by_region[schedule.regions[1]].cost > 0
    # The same schedule is not looked at twice.
    count = len(parts.found)
    parts.add(schedule, simulate(CHAIN, schedule).moments)
    assert len(parts.found) == count


def test_the_parts_of_a_schedule_add_up_to_it() -> None:
    schedule = cut(0, 3, 6)
    parts = Parts(CHAIN, NOTHING, CHAIN.seconds)
    parts.add(schedule, simulate(CHAIN, schedule).moments)
    by_region = {one.region: one for one in parts.found}
    before = most = 0
    for region in schedule.regions:
        most = max(most, before + by_region[region].needs_bytes)
        before += by_region[region].held_bytes
    assert most == simulate(CHAIN, schedule).peak_bytes


def test_what_one_region_does_well_all_others_do() -> None:
    """One schedule with one short region gives schedules with many."""
    schedule = cut(0, 9, 11)
    parts = Parts(CHAIN, NOTHING, CHAIN.seconds)
    parts.add(schedule, simulate(CHAIN, schedule).moments)
    least = min(
        simulate(CHAIN, one).peak_bytes for one in recombination.schedules(CHAIN, parts.found, 2000)
    )
    assert least < simulate(CHAIN, schedule).peak_bytes


def test_what_was_learnt_counts() -> None:
    schedule = cut(0, 3, 6)
    story = simulate(CHAIN, schedule).moments
    learnt = Learnt(key=KEY, labels=("same",) * COUNT).with_plan(
        CHAIN,
        schedule,
        story,
        [one.live_bytes + 50 for one in story],
        model_bytes=0,
        compiled_bytes=0,
    )
    plain, more = (
        Parts(CHAIN, one, CHAIN.seconds) for one in (NOTHING, Corrections(learnt, CHAIN))
    )
    for parts in (plain, more):
        parts.add(schedule, story)
    known = {one.region: one.needs_bytes for one in plain.found}
    assert {one.needs_bytes - known[one.region] for one in more.found} == {50}
