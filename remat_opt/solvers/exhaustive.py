"""The best canonical strategy by trying all: for small graphs, and to judge other solvers.

Problem. As in the dynamic program: the canonical strategy with the least recomputation within a
budget, the one with the most, or the least budget for which there is any.

Method. A depth-first search over increasing sequences of lower sets (Sec. 4.1). Time, cached
bytes and peak of a prefix are carried along; a prefix over the budget is not continued. How many
sequences there are is counted beforehand, by a sum over pairs of lower sets, so that a graph
with too many is refused before the search and not after an hour.

Why not a ready-made tool: it is a page of code, and its simplicity is the point.

Complexity: O(number of sequences * n); between 2**(n-1), for a chain, and the ordered Bell
numbers, for n vertices without edges.

Guarantee: optimal over all canonical strategies, with exact times.

Left out: any cleverness.

Reference: Kusumoto et al. (2019), section 4.1.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from fractions import Fraction

from remat_opt.graph import Graph
from remat_opt.solvers.base import Infeasible, Refused, Solution, Status
from remat_opt.solvers.lower_sets import (
    Strategy,
    all_lower_sets,
    evaluate,
    members,
    neighbours,
    schedule_of,
)

#: Graphs with more canonical strategies are refused.
MOST_STRATEGIES = 200_000
_MOST_LOWER_SETS = 1 << 11


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A strategy and how many there are.

    Attributes:
      strategy: with all its figures.
      strategies: number of canonical strategies of the graph.
    """

    strategy: Strategy
    strategies: int


Answer = Solution[Tried] | Infeasible | Refused


def count_strategies(graph: Graph) -> int:
    """How many increasing sequences of lower sets end in V.

    Raises:
      ValueError: there are more than 2,048 lower sets.
    """
    masks = tuple(itertools.islice(all_lower_sets(graph), _MOST_LOWER_SETS + 1))
    if len(masks) > _MOST_LOWER_SETS:
        raise ValueError(f"The graph has more than {_MOST_LOWER_SETS} lower sets.")
    ways = {0: 1}
    for position, mask in enumerate(masks[1:], start=1):
        ways[mask] = sum(ways[part] for part in masks[:position] if not part & ~mask)
    return ways[masks[-1]]


def least_overhead(graph: Graph, budget_bytes: float, *, last_block_free: bool = False) -> Answer:
    """Time-centric: the strategy within the budget that recomputes least.

    Args:
      graph: what to plan.
      budget_bytes: bound on Eq. 2.
      last_block_free: whether the last block costs nothing, as executed, or is charged as in
        Eq. 1 (correction 6).
    """
    return _best(graph, budget_bytes, last_block_free, lambda time, _: (time,))


def most_overhead(graph: Graph, budget_bytes: float, *, last_block_free: bool = False) -> Answer:
    """Memory-centric: the strategy within the budget that recomputes most."""
    return _best(graph, budget_bytes, last_block_free, lambda time, _: (-time,))


def least_budget(graph: Graph) -> int | Refused:
    """The least peak (Eq. 2) of any canonical strategy, in bytes."""
    found = _best(graph, float("inf"), False, lambda _, peak: (peak,))
    return found.figures.strategy.peak_bytes if isinstance(found, Solution) else _refused(found)


def _refused(found: Infeasible | Refused) -> Refused:
    assert isinstance(found, Refused), "there is a strategy within an infinite budget"
    return found


def _best(
    graph: Graph,
    budget: float,
    last_block_free: bool,
    order: Callable[[Fraction, int], tuple[Fraction | int]],
) -> Answer:
    try:
        strategies = count_strategies(graph)
    except ValueError as error:
        return Refused(message=f"{error} {_ADVICE}")
    if strategies > MOST_STRATEGIES:
        return Refused(
            message=f"The graph has {strategies} canonical strategies; the limit of exhaustive "
            f"search is {MOST_STRATEGIES}. {_ADVICE}"
        )
    masks = tuple(all_lower_sets(graph))
    everything = masks[-1]
    edges = neighbours(graph)
    seconds = [Fraction(second) for second in graph.seconds]
    best: tuple[tuple[Fraction | int], tuple[int, ...]] | None = None

    def values(mask: int) -> int:
        return sum(graph.bytes[vertex] for vertex in members(mask))

    def gradients(mask: int) -> int:
        return sum(graph.cotangent_bytes[vertex] for vertex in members(mask))

    # What depends only on the last lower set: terms (iii) and (iv) of Eq. 2, and its boundary.
    after = {mask: edges.after(mask) for mask in masks}
    tail = {
        mask: gradients(after[mask] & ~mask) + values(edges.before(after[mask]) & ~mask)
        for mask in masks
    }
    boundaries = {mask: edges.boundary(mask) for mask in masks}

    def visit(sequence: tuple[int, ...], time: Fraction, cached: int, peak: int) -> None:
        nonlocal best
        reached = sequence[-1] if sequence else 0
        if reached == everything:
            key = order(time, peak)
            if best is None or key < best[0]:
                best = key, sequence
            return
        for mask in masks:
            if mask == reached or reached & ~mask:
                continue
            block = mask & ~reached
            needed = values(cached) + values(block) + gradients(block) + tail[mask]  # Eq. 2
            if needed > budget:
                continue
            charged = 0 if mask == everything and last_block_free else block & ~boundaries[mask]
            visit(
                (*sequence, mask),
                time + sum((seconds[v] for v in members(charged)), Fraction()),  # Eq. 1
                cached | boundaries[mask],
                max(peak, needed),
            )

    visit((), Fraction(), 0, 0)
    if best is None:
        least = least_budget(graph)
        assert isinstance(least, int), "the number of strategies was checked above"
        return Infeasible(budget_bytes=budget, least_bytes=least)
    strategy = evaluate(graph, best[1])
    objective = strategy.overhead_seconds if last_block_free else strategy.paper_overhead_seconds
    return Solution(
        schedule=schedule_of(graph, best[1]),
        figures=Tried(strategy=strategy, strategies=strategies),
        status=Status.OPTIMAL,
        objective=objective,
        bound=objective,
    )


_ADVICE = "Use dynamic_program.exact, or dynamic_program.approximate for large graphs."
