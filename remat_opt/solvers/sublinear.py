"""Which results to drop and how often: training with sublinear memory, by Chen et al.

Problem. Give each vertex a mirror count m(v), the number of times its result may be recomputed, so
that the gradient graph with these copies, laid out by the static allocator, takes little memory.

Method. Several ways to choose m; ``mirror`` turns any m into a gradient graph and a schedule.

``segments``       a chain in sqrt(n) segments; only the last result of each is kept (section 4.1,
                   Algorithm 1).
``drop_cheap``     results that are expensive to compute are kept, the others dropped (section 4.2).
``plan``           one walk: the run since the last split grows until it exceeds the budget B; then
                   the vertex is a split, and kept (Algorithm 3).
``least_memory``   Algorithm 3 for B = 0 gives x and y, hence B = sqrt(x y) and a grid around it;
                   the allocator says which plan is the best (supplement A).
``recursion``      k results are kept, and each of the k + 1 parts is treated likewise when its turn
                   comes (section 4.4): g(n) = k + g(n / (k + 1)).
``within``         of all these, the one with the least recomputation that fits a budget.

Splits are chosen among the graph's articulation points that no edge leads past in order of
execution: nothing else crosses from one stage to the next there. A graph's only source is one of
them, since its input hangs on it. On a chain these are all vertices but the last.

Why not a ready-made tool: networkx finds the articulation points, and is used for that. For the
rest there is no library; ``jax.checkpoint`` executes regions but does not choose them.

Complexity: O(n + e) for a plan, and O(n log n) for the allocator to judge it; for recursion times
its depth, log n to the base k + 1.

Guarantee: ``segments`` takes the number of equal segments that is best for equal bytes by Eq. 1: no
set of splits has a smaller x + y. Otherwise only what the figures say; the status is ``OPTIMAL`` if
the objective equals the bound, the memory that some single step needs in any plan.

Readings. The comparison missing from Algorithm 3 is temp > B. As printed, y never sees the run
after the last split; ``Variant.PRINTED`` is that, ``Variant.MEMORY`` sees it. The roots are B =
sqrt(x y) and the grid [B / sqrt(2), sqrt(2) B]; its six points are evenly spaced. g(1) is 0, and
n / (k + 1) is rounded up (correction 11). Algorithm 1 stores the input of the first segment, which
is an argument and no vertex here. Regions form a chain, and what crosses from one to another is
stored: a result that is read past a kept one is always kept.

Left out: internal bytes (the referee knows them), the generalisation of Algorithm 3 that weighs
seconds, splits other than the given candidates.

Reference: Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost* (2016).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule
from remat_opt.solvers.allocator import allocate
from remat_opt.solvers.base import Infeasible, Overhead, Refused, Solution, Status, thinned
from remat_opt.solvers.mirror import (
    Approximate,
    approximate,
    closed,
    executable,
    gradient_graph,
    schedule_of,
)

#: Points of the grid over B (supplement A).
GRID_POINTS = 6
#: How many thresholds of cheapness ``within`` tries.
MOST_THRESHOLDS = 16


class Variant(enum.Enum):
    """Which y Algorithm 3 gives (correction 11).

    PRINTED: of the stages that end in a split; the pseudo-code.
    MEMORY: of all stages, including the one after the last split.
    """

    PRINTED = "printed"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What Algorithm 3 returns.

    Attributes:
      approximate: x and y.
      mirror: m, for Algorithm 2.
    """

    approximate: Approximate
    mirror: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MirrorPlan:
    """Mirror counts and what they take.

    Attributes:
      mirror: m(v), closed under what crosses from stage to stage.
      executed: how often each vertex runs again: less if the last stage is spared.
      approximate: x and y of ``mirror``, including the last stage.
      allocated_bytes: what the static allocator needs for the gradient graph: the exact memory.
      live_bytes: the most bytes alive in it, below which no allocator goes.
      overhead_seconds: time of the recomputation.
      tried: how many plans were compared.
    """

    mirror: tuple[int, ...]
    executed: tuple[int, ...]
    approximate: Approximate
    allocated_bytes: int
    live_bytes: int
    overhead_seconds: float
    tried: int


Answer = Solution[MirrorPlan] | Refused


def segments(graph: Graph, count: int | None = None) -> Answer:
    """A chain in equal segments, keeping only the last result of each (Algorithm 1).

    Args:
      graph: what to plan.
      count: number of segments, at most that of vertices; sqrt(n) when left out.

    Returns:
      A solution whose objective is the allocated bytes; or a refusal of a graph that is not a
      chain.

    Raises:
      ValueError: there are fewer vertices than ``count``, or it is not positive.
    """
    for vertex, found in enumerate(graph.predecessors):
        if found != ((vertex - 1,) if vertex else ()):
            return Refused(
                message=f"The graph is not a chain: vertex {graph.names[vertex]!r} does not read "
                "just the one before it. Use sublinear.least_memory, which splits any graph at its "
                "articulation points."
            )
    wanted = segment_count(len(graph)) if count is None else count
    if not 1 <= wanted <= len(graph):
        raise ValueError(f"{len(graph)} vertices cannot be cut into {wanted} segments.")
    ends = {stop - 1 for _, stop in _parts(len(graph), wanted)[:-1]}
    return _solution(graph, [_dropped(graph, ends)])


def segment_count(count: int) -> int:
    """The number k of equal segments of n vertices for which n / k + k is least (Eq. 1).

    That is sqrt(n), rounded up; then ceil(n / k) + k is ceil(2 sqrt(n)).

    >>> [segment_count(count) for count in (1, 2, 5, 9, 10, 1024)]
    [1, 2, 3, 3, 4, 32]
    """
    return math.isqrt(count - 1) + 1


def drop_cheap(
    graph: Graph, *, at_most: float, measure: Overhead = Overhead.SECONDS
) -> Solution[MirrorPlan]:
    """Keeps the results of expensive operations and drops those of cheap ones (section 4.2).

    Args:
      graph: what to plan.
      at_most: an operation that takes more than this is expensive: convolutions and matrix
        products. Others are cheap: normalisation, activation, pooling.
      measure: what an operation is measured in.

    Returns:
      A solution whose objective is the allocated bytes. If everything is cheap, nothing is kept,
      and the single stage needs no recomputation.
    """
    costs = graph.seconds if measure is Overhead.SECONDS else graph.flops
    dear = [vertex for vertex, cost in enumerate(costs) if cost > at_most]
    return _solution(graph, [_dropped(graph, dear)])


def candidates(graph: Graph) -> tuple[int, ...]:
    """The vertices at which the graph falls into stages, ascending.

    They are the articulation points, and the source if there is only one, except for those that
    an edge leads past in order of execution, and for the last vertex.
    """
    edges = [(read, vertex) for vertex, found in enumerate(graph.predecessors) for read in found]
    passing = [0] * (len(graph) + 1)
    for read, vertex in edges:
        passing[read + 1] += 1
        passing[vertex] -= 1
    over = itertools.accumulate(passing)
    alone = [v for v, number in zip(range(len(graph) - 1), over, strict=False) if not number]
    sources = [vertex for vertex, found in enumerate(graph.predecessors) if not found]
    readers = graph.successors()
    # No edge leads past them: what they read and what reads them meets nowhere else.
    splitting = {v for v in alone if graph.predecessors[v] and readers[v]}
    if len(sources) == 1:
        splitting.add(sources[0])
    if not splitting.issuperset(alone):
        import networkx

        undirected = networkx.Graph()
        undirected.add_nodes_from(range(len(graph)))
        undirected.add_edges_from(edges)
        splitting.update(networkx.articulation_points(undirected))
    return tuple(vertex for vertex in alone if vertex in splitting)


def plan(
    graph: Graph,
    budget_bytes: float,
    *,
    splits: Collection[int] | None = None,
    variant: Variant = Variant.MEMORY,
) -> Allotment:
    """Memory planning with a budget (Algorithm 3).

    Args:
      graph: what to plan.
      budget_bytes: B, which the run since the last split must exceed before the next one.
      splits: C, the vertices that may be splits; ``candidates`` when left out.
      variant: which y to give; it decides nothing else.

    Raises:
      ValueError: a split is not a vertex.
    """
    allowed = frozenset(_splits(graph, splits))
    temp = x = y = 0
    mirror = [1] * len(graph)
    for vertex, size in enumerate(graph.bytes):
        temp += size
        if vertex in allowed and temp > budget_bytes:
            x += size
            y = max(y, temp)
            mirror[vertex] = 0
            temp = 0
    if variant is Variant.MEMORY:
        y = max(y, temp)
    return Allotment(approximate=Approximate(between_bytes=x, stage_bytes=y), mirror=tuple(mirror))


def grid(first: Approximate) -> tuple[int, ...]:
    """The budgets to try after a first run with B = 0 (supplement A).

    Args:
      first: x and y of that run.

    Returns:
      B = sqrt(x y), and ``GRID_POINTS`` from B / sqrt(2) to sqrt(2) B. They are rounded down:
      whole bytes exceed them exactly if they exceed the roots, on every machine.

    >>> grid(Approximate(between_bytes=16, stage_bytes=4))
    (8, 5, 6, 7, 8, 9, 11)
    """
    product = first.between_bytes * first.stage_bytes
    low, high = math.isqrt(product // 2), math.isqrt(2 * product)
    steps = GRID_POINTS - 1
    return (
        math.isqrt(product),
        *(low + (high - low) * point // steps for point in range(GRID_POINTS)),
    )


def least_memory(
    graph: Graph,
    *,
    splits: Collection[int] | None = None,
    variant: Variant = Variant.MEMORY,
) -> Answer:
    """The best of the plans that Algorithm 3 gives over the grid of budgets.

    Args:
      graph: what to plan.
      splits: C, the vertices that may be splits; ``candidates`` when left out.
      variant: which y to lay the grid by.

    Returns:
      A solution whose objective is the allocated bytes; or a refusal of a graph that nothing
      splits.
    """
    allowed = _allowed(graph, splits)
    if isinstance(allowed, Refused):
        return allowed
    return _solution(graph, list(_searched(graph, allowed, variant)))


def _searched(graph: Graph, splits: Collection[int], variant: Variant) -> Iterator[tuple[int, ...]]:
    first = plan(graph, 0, splits=splits, variant=variant)
    yield first.mirror
    for budget in grid(first.approximate):
        yield plan(graph, budget, splits=splits).mirror


def recursion(graph: Graph, *, kept: int = 1, splits: Collection[int] | None = None) -> Answer:
    """Nested stages: each stores ``kept`` results when its turn comes (section 4.4).

    Args:
      graph: what to plan.
      kept: k, the results to keep per level.
      splits: the vertices that may be kept; ``candidates`` when left out.

    Returns:
      A solution whose objective is the allocated bytes; or a refusal of a graph that nothing
      splits.

    Raises:
      ValueError: ``kept`` is not positive.
    """
    if kept < 1:
        raise ValueError(f"Keeping {kept} results per level splits nothing; keep 1 or more.")
    allowed = _allowed(graph, splits)
    if isinstance(allowed, Refused):
        return allowed
    return _solution(graph, [_recursive(graph, kept, allowed)])


def recursive_cost(count: int, kept: int) -> int:
    """g(n) = k + g(n / (k + 1)) with g(1) = 0: the results stored at once (Eq. 2).

    >>> [recursive_cost(count, 1) for count in (1, 2, 3, 1024)], recursive_cost(1024, 31)
    ([0, 1, 2, 10], 62)
    """
    # Eq. 3, k log n to the base k + 1, with the logarithm rounded up (correction 11).
    total = 0
    while count > 1:
        total += kept
        count = -(-count // (kept + 1))
    return total


def _recursive(graph: Graph, kept: int, splits: Collection[int]) -> tuple[int, ...]:
    """m(v): the depth at which v is kept, or at which there is nothing left to split."""
    ends = [*sorted(set(splits) - {len(graph) - 1}), len(graph) - 1]
    starts = [0, *(end + 1 for end in ends)]
    mirror = [0] * len(graph)
    pending = [(0, len(ends), 0)]  # layers from, up to, depth
    while pending:
        first, last, depth = pending.pop()
        for start, stop in _parts(last - first, min(kept + 1, last - first)):
            low, high = first + start, first + stop
            if high < last:
                mirror[ends[high - 1]] = depth
            if high - low > 1:
                pending.append((low, high, depth + 1))
            else:
                # One layer. What ends it is kept already, here or further out.
                open_end = high == len(ends)
                for vertex in range(starts[low], ends[low] + open_end):
                    mirror[vertex] = depth + 1
    return tuple(mirror)


def within(
    graph: Graph, budget_bytes: float, *, splits: Collection[int] | None = None
) -> Answer | Infeasible:
    """Of all plans in this file, the one with the least recomputation within a budget.

    They are: nothing dropped, the grid of Algorithm 3, thresholds of what is cheap in seconds (all,
    or ``MOST_THRESHOLDS`` spread evenly), and recursion with k = 1, 2, 4, ...

    Args:
      graph: what to plan.
      budget_bytes: bound on the allocated bytes.
      splits: C, the vertices that may be splits; ``candidates`` when left out.

    Returns:
      A solution whose objective is the overhead in seconds; or that no plan is within the budget,
      with the least that one takes; or a refusal of a graph that nothing splits.
    """
    allowed = _allowed(graph, splits)
    if isinstance(allowed, Refused):
        return allowed
    plans = _judged(graph, [*_flat(graph, allowed), *_nested(graph, allowed)])
    fitting = [one for one in plans if one.allocated_bytes <= budget_bytes]
    if not fitting:
        least = min(one.allocated_bytes for one in plans)
        return Infeasible(budget_bytes=budget_bytes, least_bytes=least)
    best = min(fitting, key=lambda one: (one.overhead_seconds, one.allocated_bytes))
    return Solution(
        schedule=schedule_of(graph, best.mirror),
        figures=best,
        status=Status.FEASIBLE if best.overhead_seconds else Status.OPTIMAL,
        objective=best.overhead_seconds,
        bound=0.0,
    )


def schedules(
    graph: Graph, *, nested: bool = True, most: int | None = None
) -> list[Schedule] | Refused:
    """The schedules of the plans that ``within`` chooses from.

    Args:
      graph: what to plan.
      nested: whether recursion is among them.
      most: the most plans, spread over all; all if None.
    """
    allowed = _allowed(graph, None)
    if isinstance(allowed, Refused):
        return allowed
    mirrors = list(_flat(graph, allowed))
    if nested:
        mirrors += _nested(graph, allowed)
    distinct = list(dict.fromkeys(mirrors))
    return [schedule_of(graph, mirror) for mirror in thinned(distinct, most or len(distinct))]


def _flat(graph: Graph, splits: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Nothing dropped, the grid of Algorithm 3, and thresholds of what is cheap."""
    yield (0,) * len(graph)
    yield from _searched(graph, splits, Variant.MEMORY)
    limits = sorted(set(graph.seconds))
    for limit in limits[:: -(-len(limits) // MOST_THRESHOLDS)]:
        yield _dropped(graph, [v for v, second in enumerate(graph.seconds) if second > limit])


def _nested(graph: Graph, splits: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Recursion with k = 1, 2, 4, ..."""
    kept = 1
    while kept <= len(splits):
        yield _recursive(graph, kept, splits)
        kept *= 2


def step_bytes(graph: Graph) -> int:
    """The most that a single step reads and makes, whatever is recomputed."""
    execution = gradient_graph(graph, (0,) * len(graph)).execution
    return max(
        sum(execution.bytes[read] for read in reads)
        # In place, the result takes no extra room.
        + (0 if execution.in_place[step] else execution.bytes[step])
        for step, reads in enumerate(execution.reads)
    )


def _splits(graph: Graph, given: Collection[int] | None) -> tuple[int, ...]:
    """C, ascending."""
    if given is None:
        return candidates(graph)
    wrong = [vertex for vertex in given if not 0 <= vertex < len(graph)]
    if wrong:
        raise ValueError(
            f"Vertex {min(wrong)} cannot be a split: there are only {len(graph)} vertices, "
            "numbered from 0."
        )
    return tuple(sorted(set(given)))


def _allowed(graph: Graph, given: Collection[int] | None) -> tuple[int, ...] | Refused:
    found = _splits(graph, given)
    if not found and len(graph) > 1:
        return Refused(
            message=f"Nothing splits the graph of {len(graph)} vertices: none is an articulation "
            "point that no edge leads past. Give the vertices that may be kept as splits, or use "
            "sublinear.drop_cheap or dynamic_program.approximate."
        )
    return found


def _parts(count: int, number: int) -> list[tuple[int, int]]:
    """``number`` runs of ``count`` things, as equal as can be: (start, stop) each.

    >>> _parts(10, 4)
    [(0, 3), (3, 5), (5, 8), (8, 10)]
    """
    edges = [-(-place * count // number) for place in range(number + 1)]
    return list(itertools.pairwise(edges))


def _dropped(graph: Graph, kept: Collection[int]) -> tuple[int, ...]:
    inside = frozenset(kept)
    return tuple(0 if vertex in inside else 1 for vertex in range(len(graph)))


def _judged(graph: Graph, mirrors: Sequence[tuple[int, ...]]) -> list[MirrorPlan]:
    distinct = list(dict.fromkeys(mirrors))
    plans = []
    for mirror in distinct:
        found = gradient_graph(graph, executable(graph, mirror))
        allocation = allocate(found.execution)
        plans.append(
            MirrorPlan(
                mirror=closed(graph, mirror),
                executed=found.recomputed,
                approximate=approximate(graph, closed(graph, mirror)),
                allocated_bytes=allocation.total_bytes,
                live_bytes=allocation.live_bytes,
                overhead_seconds=math.fsum(
                    second * runs
                    for second, runs in zip(graph.seconds, found.recomputed, strict=True)
                ),
                tried=len(distinct),
            )
        )
    return plans


def _solution(graph: Graph, mirrors: Sequence[tuple[int, ...]]) -> Solution[MirrorPlan]:
    """The plan with the least allocated bytes; of equal ones, the fastest, then the first."""
    best = min(_judged(graph, mirrors), key=lambda one: (one.allocated_bytes, one.overhead_seconds))
    bound = step_bytes(graph)
    return Solution(
        schedule=schedule_of(graph, best.mirror),
        figures=best,
        status=Status.OPTIMAL if best.allocated_bytes == bound else Status.FEASIBLE,
        objective=float(best.allocated_bytes),
        bound=float(bound),
    )
