"""The least recomputation of any executable schedule within a budget: an integer program.

Problem. Cut the order of execution into a chain of regions, which may nest to a given depth d, say
for every vertex whether each region that holds it keeps it, and recompute the least within M bytes,
as the simulator counts them. ``staged_program`` bounds schedules of any kind, most of which JAX
cannot execute; those found here can be.

Method. Forward, everything runs: call that level 0. When a region of level l = 1 .. d has its turn
in the backward pass, it runs again what it must: level l. Then come its regions of level l + 1, in
reverse, or, at level d, the backward steps of its vertices, in reverse: level d + 1. What a step of
level k reads of vertex u is a copy that some level l <= k has made, or the stored one, level 0. The
binaries are

    same[l,v]   v - 1 and v are in one region of level l
    drop[l,v]   the region of level l that holds v does not keep it

and from these follow, as continuous variables that are whole if the binaries are,

    same[l,u,v] = 1    all of u .. v are in one region of level l                     (1)
    here[l,u,v] = 1    so they are, and it does not keep u                            (2)
    again[l,v] >= 1    v runs again at level l: a step (k,w) that runs, k >= l, reads v,
                       here[l,v,w], and not here[q,v,w] for l < q <= k                (3)
    alive[l,u,m,v] >= 1   level l's copy of u is there while step (m,v) runs: some
                       such reader (k,w) of it is not before (m,v)                    (4)

Two steps (k,w) and (m,v) run in this order: let j be the deepest level of which w and v share a
region. If k <= j or m <= j, the lower level runs first, and of one level the lower vertex; else the
higher vertex. Each of these cases is a sum of ``same``, so (4) is a row for each reader. Least sum
of cost[v] again[l,v] with, for every step (m,v), run or not,

    sum over l, u of b[u] alive[l,u,m,v] + b[v] again[m,v] + C[m,v] <= M              (5)

where C are the cotangents, which depend on where v's region of level m ends. If a step does not
run, (5) is what is alive between others, which is no more than at one of them. Unnamed residuals
and vertices with side effects require a binary for whether each region is checkpointed. HiGHS
solves it through scipy, by branch and bound.

Why not a ready-made tool: HiGHS is one.

Complexity: exponential. 2 n d binaries, and O(n^2 d^2) rows for each reader of a vertex.

Guarantee. Status OPTIMAL: no schedule of that kind recomputes less. The kind is all chains of
regions, nested to depth d, whose vertices are intervals of the graph's order. Every figure is the
simulator's. FEASIBLE: ``bound`` is proven; this is all we get if sizes have to be rounded.

Left out: regions that change the order of execution, and deeper nesting than asked for.

Reference: the formulation is ours; the staged one is that of Jain et al. (MLSys 2020).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, merged
from remat_opt.solvers.base import (
    Candidate,
    Infeasible,
    Overhead,
    Refused,
    Solution,
    Status,
    judge,
)
from remat_opt.solvers.lifetimes import cotangents

#: How deep regions nest by default: 1 for none inside another.
DEPTH = 2
#: Programs with more binary variables are refused.
MOST_BINARIES = 80
#: The search stops after this many nodes of its tree.
NODE_LIMIT = 2_000
#: See ``staged_program``.
GRAINS = 10_000


def least_overhead(
    graph: Graph,
    budget_bytes: float,
    *,
    depth: int = DEPTH,
    measure: Overhead = Overhead.SECONDS,
    node_limit: int = NODE_LIMIT,
    most_binaries: int = MOST_BINARIES,
) -> Solution[Candidate] | Infeasible | Refused:
    """The least recomputation of a chain of regions within a budget.

    Args:
      graph: what to plan.
      budget_bytes: bound on the peak of temporaries, as the simulator counts it.
      depth: how deep regions may nest; 1 for none inside another.
      measure: what recomputation is counted in.
      node_limit: nodes of the search tree after which the search stops.
      most_binaries: refuse programs with more binary variables.

    Returns:
      A schedule, its objective in seconds or FLOPs; or that none is within the budget, with the
      least one; or a refusal.
    """
    by_measure = graph.seconds if measure is Overhead.SECONDS else graph.flops
    unit = max(by_measure) or 1
    costs = [cost / unit for cost in by_measure]
    found = _search(graph, depth, costs, budget_bytes, node_limit, most_binaries)
    if isinstance(found, Refused):
        return found
    schedule = found.schedule
    if schedule is None:
        least = least_peak(graph, depth=depth, node_limit=node_limit, most_binaries=most_binaries)
        if not found.infeasible or isinstance(least, Refused):
            return Refused(
                message=f"No chain of regions within {budget_bytes} bytes was found in "
                f"{node_limit} nodes. Raise node_limit, or use portfolio."
            )
        if least.figures.peak_bytes > budget_bytes:
            return Infeasible(budget_bytes=budget_bytes, least_bytes=least.figures.peak_bytes)
        # Rounding had left this without an answer.
        schedule = least.schedule
    figures = judge(graph, schedule)
    assert figures.peak_bytes <= budget_bytes, "the program's memory is the simulator's"
    objective = figures.overhead(measure)
    proven = found.proven * unit
    # The solver adds its figures in another order.
    bound = objective if objective - proven <= _TOLERANCE * unit else max(0.0, proven)
    return _solution(figures, objective, bound)


def least_peak(
    graph: Graph,
    *,
    depth: int = DEPTH,
    node_limit: int = NODE_LIMIT,
    most_binaries: int = MOST_BINARIES,
) -> Solution[Candidate] | Refused:
    """The least peak of any chain of regions: the objective is in bytes."""
    found = _search(graph, depth, None, math.inf, node_limit, most_binaries)
    if isinstance(found, Refused):
        return found
    if found.schedule is None:
        return Refused(
            message=f"No chain of regions was found in {node_limit} nodes. Raise node_limit, or "
            "use portfolio."
        )
    figures = judge(graph, found.schedule)
    bound = min(figures.peak_bytes, math.ceil(found.proven - _TOLERANCE) * found.unit_bytes)
    return _solution(figures, float(figures.peak_bytes), float(bound))


def _solution(figures: Candidate, objective: float, bound: float) -> Solution[Candidate]:
    return Solution(
        schedule=figures.schedule,
        figures=figures,
        status=Status.OPTIMAL if bound == objective else Status.FEASIBLE,
        objective=objective,
        bound=bound,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """How a search ended.

    Attributes:
      schedule: the best one found within the budget; None if there is none.
      proven: a lower limit on the objective, in its unit.
      infeasible: whether the search has shown that there is no schedule.
      unit_bytes: the unit in which bytes were counted.
    """

    schedule: Schedule | None
    proven: float
    infeasible: bool
    unit_bytes: int


def _search(
    graph: Graph,
    depth: int,
    costs: Sequence[float] | None,
    budget_bytes: float,
    node_limit: int,
    most_binaries: int,
) -> _Found | Refused:
    """Solves the program; if bytes must be rounded, once with all up and once with all down."""
    sizes = (
        *graph.bytes,
        *graph.internal_bytes,
        *graph.cotangent_bytes,
        *graph.workspace_bytes,
        *graph.forward_workspace_bytes,
    )
    ceiling = (depth + 1) * sum(sizes)
    most = min(budget_bytes, ceiling)
    measure = math.gcd(*sizes) or 1
    unit = measure if most <= measure * GRAINS else math.ceil(most / GRAINS)
    limit = math.inf if budget_bytes >= ceiling else math.floor(budget_bytes / unit)
    program = _Program(graph, depth, unit, up=True)
    if program.binaries > most_binaries:
        return Refused(
            message=f"The graph of {len(graph)} vertices takes {program.binaries} binary "
            f"variables; the limit is {most_binaries}. Use portfolio, or raise most_binaries."
        )
    above = below = program.solve(costs, limit, node_limit)
    if unit != measure:
        below = _Program(graph, depth, unit, up=False).solve(costs, limit, node_limit)
    return _Found(
        schedule=None if above.x is None else program.schedule(above.x),
        # Without binaries it gives no bound.
        proven=float(below.fun if below.status == _DONE else below.mip_dual_bound or 0.0),
        infeasible=above.status == _INFEASIBLE,
        unit_bytes=unit,
    )


_DONE, _INFEASIBLE = 0, 2
#: What the solver considers equal, in the units of the objective.
_TOLERANCE = 1e-6


class _Sum:
    """A constant and variables with factors: one side of a row."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: float = 0.0) -> None:
        self.constant = constant
        self.terms: dict[int, float] = {}

    def add(self, other: _Sum, factor: float = 1.0) -> _Sum:
        self.constant += factor * other.constant
        for number, by in other.terms.items():
            self.terms[number] = self.terms.get(number, 0.0) + factor * by
        return self

    def plus(self, other: _Sum, factor: float = 1.0) -> _Sum:
        return _Sum().add(self).add(other, factor)

    @property
    def most(self) -> float:
        """An upper limit on it: the variables are between 0 and 1."""
        return self.constant + sum(max(0.0, by) for by in self.terms.values())


_NEVER, _ALWAYS = _Sum(), _Sum(1.0)


class _Program:
    """The variables and rows for one graph; bytes are counted in whole units."""

    def __init__(self, graph: Graph, depth: int, unit: int, *, up: bool) -> None:
        self.graph, self.depth = graph, depth
        self._unit, self._up = unit, up
        self._kinds: list[int] = []
        #: Sums that must not exceed 0, and those that are the memory of a step.
        self._rows: list[_Sum] = []
        self._memory: list[_Sum] = []
        self._successors = graph.successors()
        self._needed_by: list[list[int]] = [[] for _ in graph.names]
        for vertex, needs in enumerate(graph.needs):
            for read in needs:
                self._needed_by[read].append(vertex)
        self._levels = range(1, depth + 1)
        #: Whether checkpointed regions differ from others in more than what they keep.
        self._marked = any(graph.internal_bytes) or any(graph.pinned)
        self._same: dict[tuple[int, int, int], _Sum] = {}
        self._drop: dict[tuple[int, int], _Sum] = {}
        self._here: dict[tuple[int, int, int], _Sum] = {}
        self._again: dict[tuple[int, int], _Sum] = {}
        self._under: dict[tuple[int, int], _Sum] = {}
        for level in self._levels:
            self._add_regions(level)
        self._around = cotangents(graph)

    @property
    def binaries(self) -> int:
        """How many variables must be whole."""
        return sum(self._kinds)

    def _in_units(self, bytes_: int) -> int:
        return -(-bytes_ // self._unit) if self._up else bytes_ // self._unit

    def _variable(self, kind: int) -> _Sum:
        self._kinds.append(kind)
        found = _Sum()
        found.terms[len(self._kinds) - 1] = 1.0
        return found

    def _at_most(self, left: _Sum, right: _Sum) -> None:
        row = left.plus(right, -1.0)
        if row.most > 0:
            self._rows.append(row)

    def _at_least_each(self, expressions: Sequence[_Sum]) -> _Sum:
        """The largest of sums whose values are whole and at most 1, or 0."""
        useful = [one for one in expressions if one.most > 0]
        if not useful:
            return _NEVER
        if any(one.constant == 1 and not one.terms for one in useful):
            return _ALWAYS
        found = self._variable(0)
        for one in useful:
            self._at_most(one, found)
        return found

    # --------------------------------------------------------------------------- the decision

    def _add_regions(self, level: int) -> None:
        graph, count = self.graph, len(self.graph)
        for v in range(1, count):
            self._same[level, v - 1, v] = self._variable(1)
            if level > 1:
                self._at_most(self._same[level, v - 1, v], self._same[level - 1, v - 1, v])
        for v in range(count):
            self._same[level, v, v] = _ALWAYS
        for length in range(2, count):
            for u in range(count - length):
                v = u + length
                left, right = self._same[level, u, v - 1], self._same[level, u + 1, v]
                both = self._same[level, u, v] = self._variable(0)  # (1)
                self._at_most(both, left)
                self._at_most(both, right)
                self._at_most(left.plus(right).add(self._same[level, u + 1, v - 1], -1.0), both)
        for v in range(count):
            # What takes no memory is kept if it can be.
            read = self._needed_by[v] or self._successors[v]
            dropped = bool(read and graph.bytes[v] and not graph.pinned[v])
            self._drop[level, v] = self._variable(1) if dropped else _NEVER
            if self._marked:
                self._under[level, v] = _NEVER if graph.pinned[v] else self._variable(1)
                self._at_most(self._drop[level, v], self._under[level, v])
        for v in range(1, count) if self._marked else ():
            left, right = self._under[level, v - 1], self._under[level, v]
            apart = _ALWAYS.plus(self._same[level, v - 1, v], -1.0)
            self._at_most(left.plus(right, -1.0), apart)
            self._at_most(right.plus(left, -1.0), apart)
        for u in range(count):
            drop = self._drop[level, u]
            self._here[level, u, u] = drop
            for v in range(u + 1, count):
                if not drop.terms:
                    self._here[level, u, v] = _NEVER
                    continue
                here = self._here[level, u, v] = self._variable(0)  # (2)
                self._at_most(here, self._here[level, u, v - 1])
                self._at_most(here, self._same[level, u, v])
                self._at_most(drop.plus(self._same[level, u, v]), here.plus(_ALWAYS))
        for v in range(count):
            able = self._drop[level, v].terms or (self._marked and graph.internal_bytes[v])
            self._again[level, v] = self._variable(0) if able else _NEVER

    def _together(self, level: int, u: int, v: int) -> _Sum:
        """Whether one region of the level holds both; level 0 is all, and the last is one each."""
        if level == 0 or u == v:
            return _ALWAYS
        if level > self.depth:
            return _NEVER
        return self._same[level, min(u, v), max(u, v)]

    # ------------------------------------------------------------------------------ the reads

    def _readers(self, u: int, level: int) -> Iterator[tuple[int, int, _Sum]]:
        """Steps (k, w) of level ``level`` or deeper, and whether they read that level's copy."""
        for k in range(max(1, level), self.depth + 2):
            backward = k > self.depth
            for w in self._needed_by[u] if backward else self._successors[u]:
                reads = _Sum()
                reads.add(_ALWAYS if backward else self._again[k, w])
                for deeper in range(level + 1, min(k, self.depth) + 1):
                    reads.add(self._here[deeper, u, w], -1.0)
                yield k, w, reads

    def _held(self, level: int, u: int, w: int) -> _Sum:
        """Whether the level has a copy of u in the region that also holds w, less 1."""
        return _Sum() if level == 0 else self._here[level, u, w].plus(_ALWAYS, -1.0)

    def _not_before(self, k: int, w: int, m: int, v: int) -> _Sum | None:
        """Whether the step (k, w) is not before (m, v), less 1; None for never."""
        if k > m:
            return _Sum() if w <= v else self._together(m, v, w).plus(_ALWAYS, -1.0)
        if k < m:
            return _Sum().add(self._together(k, v, w), -1.0) if w < v and k else None
        if w >= v:
            return self._together(m, v, w).plus(_ALWAYS, -1.0)
        return _Sum().add(self._together(m, v, w), -1.0)

    def _alive(self, level: int, u: int, m: int, v: int) -> _Sum:
        """Whether the level's copy of u, made earlier, exists while step (m, v) runs."""
        if level == m and u >= v:
            return _NEVER
        found = []
        for k, w, reads in self._readers(u, level):  # (4)
            later = self._not_before(k, w, m, v)
            if later is not None:
                farthest = max(v, w) if u <= v else w
                found.append(reads.plus(self._held(level, u, farthest)).add(later))
        return self._at_least_each(found)

    def _add_rows(self) -> None:
        graph, count = self.graph, len(self.graph)
        for u in range(count):
            for level in self._levels:
                for _, w, reads in self._readers(u, level):  # (3)
                    wanted = reads.plus(self._held(level, u, w))
                    self._at_most(wanted, self._again[level, u])
                if self._marked and graph.internal_bytes[u]:
                    self._at_most(self._deepest(level, u), self._again[level, u])
        self._add_forward()
        for m in range(1, self.depth + 2):
            for v in range(count):
                self._add_step(m, v)

    def _deepest(self, level: int, u: int) -> _Sum:
        """Whether the level's region is the innermost checkpoint that u is under; 0 for none."""
        found = _Sum().add(self._under[level, u] if level else _ALWAYS)
        for deeper in range(level + 1, self.depth + 1):
            found.add(self._under[deeper, u], -1.0)
        return found

    def _internal(self, m: int, v: int) -> _Sum:
        """Bytes of unnamed residuals while step (m, v) runs."""
        total = _Sum()
        for u in range(v + 1) if any(self.graph.internal_bytes) else ():
            size = self._in_units(self.graph.internal_bytes[u])
            for level in range(min(m, self.depth) + 1) if size else ():
                made = self._deepest(level, u).add(self._together(level, u, v)).add(_ALWAYS, -1.0)
                total.add(self._at_least_each([made]), size)
        return total

    def _add_forward(self) -> None:
        graph = self.graph
        stored = [
            self._at_least_each([reads for _, _, reads in self._readers(u, 0)])
            for u in range(len(graph))
        ]
        for v in range(len(graph)):
            total = self._internal(0, v)
            total.constant += self._in_units(graph.forward_workspace_bytes[v])
            for u in range(v + 1):
                waits = u == v or any(reader >= v for reader in self._successors[u])
                total.add(_ALWAYS if waits else stored[u], self._in_units(graph.bytes[u]))
            self._memory.append(total)

    def _add_step(self, m: int, v: int) -> None:
        """One row of (5)."""
        graph = self.graph
        total = self._internal(m, v)
        for u in range(len(graph)):
            size = self._in_units(graph.bytes[u])
            for level in range(min(m, self.depth) + 1) if size else ():
                total.add(self._alive(level, u, m, v), size)
        if m > self.depth:
            if not graph.cotangent_bytes[v]:
                return
            total.constant += self._in_units(self._around[v][1])
        else:
            if not self._again[m, v].terms:
                return
            total.add(self._again[m, v], self._in_units(graph.bytes[v]))
            # What waits before the backward step of the region's last vertex.
            for end in range(v, len(graph)):
                size = self._in_units(self._around[end][0])
                total.add(self._together(m, v, end), size)
                if end + 1 < len(graph):
                    total.add(self._together(m, v, end + 1), -size)
        self._memory.append(total)

    # ------------------------------------------------------------------------------- solving

    def solve(self, costs: Sequence[float] | None, limit: float, node_limit: int) -> OptimizeResult:
        """The least cost within a limit in units; without costs, the least limit."""
        if not self._memory:
            self._add_rows()
        count = len(self._kinds)
        weights = np.zeros(count + 1)
        if costs is None:
            weights[count] = 1.0
        else:
            for (_, v), again in self._again.items():
                for number in again.terms:
                    weights[number] = costs[v]
        # The last variable is the peak.
        rows = [*(row.terms for row in self._rows)]
        rows += [{**row.terms, count: -1.0} for row in self._memory]
        high = [-row.constant for row in (*self._rows, *self._memory)]
        entries = [(row, *term) for row, terms in enumerate(rows) for term in terms.items()]
        at, of, by = zip(*entries, strict=True)
        matrix = sparse.csr_array((by, (at, of)), shape=(len(rows), count + 1))
        return milp(
            weights,
            integrality=[*self._kinds, 0],
            bounds=Bounds(0, [*([1] * count), limit]),
            constraints=LinearConstraint(matrix, -math.inf, high),
            options={"node_limit": node_limit, "mip_rel_gap": 0},
        )

    def schedule(self, values: np.ndarray) -> Schedule:
        """The schedule that a solution represents."""
        return Schedule(regions=tuple(self._chain(1, 0, len(self.graph), values)))

    def _chain(self, level: int, start: int, stop: int, values: np.ndarray) -> list[Region]:
        def chosen(of: _Sum) -> bool:
            return any(values[number] > 0.5 for number in of.terms)

        if level > self.depth:
            return [Region(vertices=tuple(range(start, stop)), checkpointed=False)]
        regions: list[Region] = []
        first = start
        for last in range(start, stop):
            if last + 1 < stop and chosen(self._same[level, last, last + 1]):
                continue
            vertices = tuple(range(first, last + 1))
            kept = tuple(v for v in vertices if not chosen(self._drop[level, v]))
            inside = self._chain(level + 1, first, last + 1, values)
            under = chosen(self._under[level, first]) if self._marked else len(kept) < len(vertices)
            if not under:
                regions += inside
            else:
                single = len(inside) == 1 and not inside[0].checkpointed
                regions.append(
                    Region(vertices=vertices, kept=kept, inside=() if single else tuple(inside))
                )
            first = last + 1
        return merged(regions)
