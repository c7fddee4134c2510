"""Which ways to open several loops go together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from remat_opt import loop_choices
from remat_opt.compilers.opened import Opening
from remat_opt.schedule import Loop, Part
from remat_opt.solvers.base import Overhead


def opening(vertex: int, stacked: int, workspace: int, seconds: float) -> Opening:
    return Opening(
        vertex=vertex,
        loop=Loop(root=vertex, parts=(Part(length=stacked + 1, kept_bytes=workspace),)),
        stacked_bytes=stacked,
        workspace_bytes=workspace,
        closed_bytes=0,
        seconds=seconds,
        flops=round(1000 * seconds),
    )


def drawn(seed: int, loops: int, count: int) -> list[list[Opening]]:
    """Ways that recompute less the more they stack, with any workspace."""
    rng = random.Random(seed)
    found = []
    for vertex in range(loops):
        sizes = sorted(rng.sample(range(300, 10_000), count))
        costs = sorted((rng.random() for _ in sizes), reverse=True)
        found.append(
            [
                opening(vertex, size, rng.randrange(2000), cost)
                for size, cost in zip(sizes, costs, strict=True)
            ]
        )
    return found


def peak(choice: Sequence[Opening]) -> int:
    """With what loops further back stack free again."""
    stacked = itertools.accumulate(way.stacked_bytes for way in choice)
    return max(at + way.workspace_bytes for at, way in zip(stacked, choice, strict=True))


def cost(choice: Sequence[Opening]) -> float:
    return sum(way.seconds for way in choice)


def test_one_loop_has_all_its_ways() -> None:
    (ways,) = drawn(0, 1, 300)
    assert loop_choices.choices([ways], Overhead.SECONDS) == [(way,) for way in ways]


@pytest.mark.parametrize(("loops", "count"), [(2, 100), (3, 20)])
def test_little_is_lost_beside_all_choices(loops: int, count: int) -> None:
    lost = []
    for seed in range(3):
        ways = drawn(seed, loops, count)
        found = [(peak(one), cost(one)) for one in loop_choices.choices(ways, Overhead.SECONDS)]
        every = [(peak(one), cost(one)) for one in itertools.product(*ways)]
        least, most = min(every)[0], max(every)[0]
        for budget in (least * (most / least) ** (n / 8) for n in range(1, 8)):
            best, ours = (
                min(seconds for size, seconds in points if size <= budget)
                for points in (every, found)
            )
            lost.append(ours - best)
    assert max(lost) < 0.12
    assert sum(lost) / len(lost) < 0.02


def test_choices_are_few_and_by_memory() -> None:
    found = loop_choices.choices(drawn(1, 12, 200), Overhead.FLOPS)
    sizes = [loop_choices.memory_together(one) for one in found]
    assert len(found) <= 3 * 64
    assert sizes == sorted(sizes)
    assert {tuple(way.vertex for way in one) for one in found} == {tuple(range(12))}


def test_the_least_and_the_fastest_are_among_them() -> None:
    ways = drawn(2, 4, 80)
    found = loop_choices.choices(ways, Overhead.SECONDS)
    assert tuple(of_loop[-1] for of_loop in ways) in found
    assert min(map(peak, found)) <= peak([min(one, key=loop_choices.memory) for one in ways])


def test_spread_keeps_both_ends_and_evenly_in_between() -> None:
    items = range(1, 1001)
    found = loop_choices.spread(items, float, lambda item: -float(item), 10)
    assert found[0] == 1
    assert found[-1] == 1000
    assert len(found) <= 10
    assert loop_choices.spread([5, 5, 5], float, float, 2)[0] == 5
    assert loop_choices.spread([7, 8], float, float, 5) == [7, 8]
