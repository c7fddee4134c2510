"""Which ways to open the loops of a program go together.

Problem. Each loop, choice or map can be opened in some hundreds of ways, by memory and
recomputation. One has to be chosen for each, so that together they are good for some budget: what
they stack is there at the same time, and only one at a time has its workspace.

Method. Two kinds of choices. For common exchange rates, each loop has the way that is best at that
rate; between two such choices the last loops change first, since what they keep is free again
first. And, as for a knapsack, one loop after the other: every choice for those before is joined
with every way of the next, and those that no other beats in recomputation and either the memory at
most or what is stacked are left, spread evenly by the logarithm of memory and by recomputation. The
first find what is on the convex hull for many loops, the second what lies between for few.

Complexity: for each loop the product of the choices that are left and its ways, in numpy.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from remat_opt.compilers.opened import Opening
from remat_opt.solvers.base import Overhead, thinned

#: Choices at exchange rates, and by each memory of those that are joined.
_MOST_AT_RATES, _MOST_JOINED = 64, 64

_T = TypeVar("_T")


def choices(ways: Sequence[Sequence[Opening]], measure: Overhead) -> list[tuple[Opening, ...]]:
    """Choices of one way for each loop, by ascending memory.

    Args:
      ways: for each loop, in the order of the program, the ways to open it.
      measure: what recomputation is counted in.
    """
    if len(ways) == 1:
        return [(way,) for way in ways[0]]
    found = dict.fromkeys((*_at_rates(ways, measure), *_joined(ways, measure)))
    return sorted(found, key=memory_together)


def memory(way: Opening) -> int:
    """What a loop stacks, and its workspace."""
    return way.stacked_bytes + way.workspace_bytes


def memory_together(choice: Sequence[Opening]) -> int:
    """What some loops stack, and the largest workspace."""
    return sum(way.stacked_bytes for way in choice) + max(way.workspace_bytes for way in choice)


def hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of points that fall from left to right."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if found and (x == found[-1][0] or y >= found[-1][1]):
            continue
        while len(found) > 1 and (found[-1][1] - found[-2][1]) * (x - found[-2][0]) >= (
            y - found[-2][1]
        ) * (found[-1][0] - found[-2][0]):
            found.pop()
        found.append((x, y))
    return found


def spread(
    items: Sequence[_T], size: Callable[[_T], float], cost: Callable[[_T], float], most: int
) -> list[_T]:
    """Some of the items, evenly by the logarithm of their size and by cost; both ends as well.

    Args:
      items: by ascending size and descending cost.
      size: of one.
      cost: of one.
      most: how many.
    """
    if len(items) <= most:
        return list(items)
    sizes = np.log(np.maximum(1.0, [size(item) for item in items]))
    costs = np.array([cost(item) for item in items])
    way = (sizes - sizes[0]) / (sizes[-1] - sizes[0] or 1.0)
    way += (costs[0] - costs) / (costs[0] - costs[-1] or 1.0)
    places = np.floor((most - 1) * way / (way[-1] or 1.0)).tolist()
    return list(dict(zip(reversed(places), reversed(items), strict=True)).values())[::-1]


def _at_rates(ways: Sequence[Sequence[Opening]], measure: Overhead) -> list[tuple[Opening, ...]]:
    """Those that are best at some exchange rate, and between two of them."""
    found: dict[tuple[Opening, ...], None] = {}
    for share in (1.0, 1 / len(ways)):

        def size(way: Opening, share: float = share) -> float:
            return way.stacked_bytes + share * way.workspace_bytes

        rates: set[float] = set()
        for of_loop in ways:
            points = hull([(size(way), way.cost(measure)) for way in of_loop])
            for (small, more_cost), (large, less_cost) in itertools.pairwise(points):
                rates.add((more_cost - less_cost) / (large - small))
        middles = [math.sqrt(a * b) for a, b in itertools.pairwise(sorted(rates)) if a > 0]
        tried = sorted({0.0, *rates, *middles, 2 * max(rates, default=1.0)})
        for rate in reversed(thinned(tried, _MOST_AT_RATES // 2)):
            chosen = (
                min(of_loop, key=lambda way: way.cost(measure) + rate * size(way))
                for of_loop in ways
            )
            found[tuple(chosen)] = None
    by_memory = sorted(found, key=memory_together)
    most = (_MOST_AT_RATES - len(by_memory)) // max(1, len(by_memory) - 1)
    for less, more in itertools.pairwise(by_memory):
        different = [n for n in range(len(ways)) if less[n] != more[n]]
        for place in thinned(different[1:], max(0, most)):
            found[(*less[:place], *more[place:])] = None
    return list(found)


def _joined(ways: Sequence[Sequence[Opening]], measure: Overhead) -> list[tuple[Opening, ...]]:
    """Those that no other beats, joined one loop after the other."""
    found: list[tuple[Opening, ...]] = [()]
    stacked, most, cost = np.zeros((3, 1))
    for of_loop in ways:
        own = np.array(
            [(way.stacked_bytes, way.workspace_bytes, way.cost(measure)) for way in of_loop]
        ).T
        # What loops further back stack is free again when this one's turn comes.
        stacked = np.add.outer(stacked, own[0])
        most = np.maximum(most[:, None], stacked + own[1]).ravel()
        stacked, cost = stacked.ravel(), np.add.outer(cost, own[2]).ravel()
        left = sorted({*_unbeaten(most, cost), *_unbeaten(stacked, cost)})
        found = [(*found[n // len(of_loop)], of_loop[n % len(of_loop)]) for n in left]
        stacked, most, cost = stacked[left], most[left], cost[left]
    return found


def _unbeaten(sizes: np.ndarray, costs: np.ndarray) -> list[int]:
    """Positions of those that no other beats in both, some of them, by ascending size."""
    order = np.lexsort((costs, sizes))
    in_order = costs[order]
    better = np.append(True, in_order[1:] < np.minimum.accumulate(in_order)[:-1])
    front: list[int] = order[better].tolist()
    return spread(
        front, lambda place: float(sizes[place]), lambda place: float(costs[place]), _MOST_JOINED
    )
