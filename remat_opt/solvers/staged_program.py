"""The least recomputation that any staged schedule takes within a budget: an integer program.

Problem. Within M bytes, run the forward and the backward steps of a graph with the least
recomputation, where every value may be dropped at any time and recomputed at any later time, as
often as it pays. The answer need not be a chain of checkpointed regions, and seldom is one: it is
the yardstick for those that are.

Method. The steps that must run, n forward and up to n backward, run in the order of the graph and
back. Each opens a stage, t = 1 .. T, and ends it; before it, within the stage, values that are not
in memory may be computed again, in the order of the graph. For stage t and vertex i, among those
that have run by then and have a backward step to come:

    R[t,i] = 1   i runs in stage t (for the forward step of stage t itself: a constant)
    S[t,i] = 1   i's value is in memory when stage t begins
    F[t,i,k]     i's value is freed after k, which reads it, has run in stage t

Least sum of cost[i] R[t,i], with, p ranging over the predecessors of i,

    R[t,i] <= R[t,p] + S[t,p]                      what a run reads is in memory        (1)
    1 = R[t,p] + S[t,p]                            likewise what the stage's step reads (2)
    R[t,i] + S[t,i] <= 1                           what is in memory is not run         (3)
    S[t+1,i] + sum over k of F[t,i,k] <= R[t,i] + S[t,i]     held or freed, once        (4)
    F[t,i,k] <= R[t,k]                             freed after a step that runs,        (5)
    F[t,i,k] + R[t,l] <= R[t,i] + S[t,i]           and that no other reader l follows   (6)
    U[t,k] = C[t] + sum over i of b[i] S[t,i] + sum over i <= k of b[i] R[t,i]
             - sum over l < k, i of b[i] F[t,i,l] <= M                                  (7)

where b are bytes and C[t] the cotangents alive, which are constants: backward steps run once, in a
fixed order. R and S are binary. F need not be: nothing forces a value to be freed, and with whole R
and S, whatever allows it allows it entirely. Residuals that only a run provides
(``internal_bytes``) have separate binaries for being made and held, and a vertex whose value is in
memory may run for them. HiGHS solves it through scipy, by branch and bound.

Memory is the simulator's, to the byte: what is allowed differs, not what is counted. Values may
also be dropped and recomputed in the forward pass, and part of a region at one time and part at
another.

Why not a ready-made tool: HiGHS is one. The published program is for another framework's graphs.

Complexity: exponential. About 2 n^2 binaries and 2 e n continuous variables for n vertices and e
edges: milliseconds for 8 vertices, up to minutes for 25 if the budget is tight. Beyond
``MOST_BINARIES`` it refuses; it stops at ``NODE_LIMIT`` nodes of the search tree, never by a clock.

Guarantee. Status OPTIMAL: no schedule of that kind recomputes less, to a millionth of the most
expensive vertex. FEASIBLE: ``bound`` is proven, and so is ``gap``. The result is within the budget
to the byte, by replay. If sizes are rounded, a budget less than a share n / ``GRAINS`` above the
least one may be called infeasible. This kind includes everything that chains of regions can do,
nested ones included, as long as their vertices are intervals of the graph's order and no chain
inside a region ends in a checkpoint (which only adds to it). So none of these recomputes less
within the same peak of the simulator.

Left out: computing a value twice within one stage, or out of the graph's order, either of which can
save memory if a backward step reads values far apart; other orders of the steps; recomputing
cotangents. ``integer_program`` is restricted to what chains of regions can do.

Reference: Jain et al., *Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization*
(MLSys 2020), section 4. Readings: there, gradients are values that may be dropped and recomputed
like any other, each from all of its readers' gradients at once; here they add up in place, as in
JAX. There, F is bounded on both sides; here only from above, which is enough. The right sides of
(4) and (6) could be 1; these make the relaxation tighter.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from remat_opt.graph import Graph
from remat_opt.solvers.base import Infeasible, Overhead, Refused, Status
from remat_opt.solvers.lifetimes import cotangents

#: Programs with more binary variables are refused.
MOST_BINARIES = 1_500
#: The search stops after this many nodes of its tree.
NODE_LIMIT = 1_000
#: Bytes are counted in units of which the budget holds at most this many. If a common measure of
#: all sizes is finer, they are rounded: up for the answer, and down for the bound.
GRAINS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step that must run, and what runs again before it.

    Attributes:
      phase: ``forward`` or ``backward``.
      vertex: whose step it is.
      held: the vertices whose values are in memory when the stage begins, ascending.
      held_internal: those whose unnamed residuals are.
      again: the vertices that run again before the step, ascending.
    """

    phase: str
    vertex: int
    held: tuple[int, ...]
    held_internal: tuple[int, ...]
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A schedule in stages, rather than in regions.

    Attributes:
      stages: one for each forward step and each backward step, in order.
      status: ``OPTIMAL`` or ``FEASIBLE``.
      objective: the minimised figure: the overhead in seconds or FLOPs, or the peak.
      bound: a proven lower limit on it.
      gap: how far apart these are, as a share of the objective.
      nodes: nodes of the search tree.
      binaries: binary variables of the program.
      peak_bytes: most bytes in memory.
      overhead_seconds: time of what runs again.
      recomputed_flops: operations of what runs again.
    """

    stages: tuple[Stage, ...]
    status: Status
    objective: float
    bound: float
    gap: float
    nodes: int
    binaries: int
    peak_bytes: int
    overhead_seconds: float
    recomputed_flops: int


def least_overhead(
    graph: Graph,
    budget_bytes: float,
    *,
    measure: Overhead = Overhead.SECONDS,
    node_limit: int = NODE_LIMIT,
    most_binaries: int = MOST_BINARIES,
) -> Staged | Infeasible | Refused:
    """The least recomputation within a budget.

    Args:
      graph: what to plan.
      budget_bytes: bound on the peak of temporaries, as the simulator counts it.
      measure: what recomputation is counted in.
      node_limit: nodes of the search tree after which the search stops.
      most_binaries: refuse programs with more binary variables.

    Returns:
      A schedule in stages; or that none is within the budget, with the least one; or a refusal.
    """
    by_measure = graph.seconds if measure is Overhead.SECONDS else graph.flops
    unit = max(by_measure) or 1
    costs = [cost / unit for cost in by_measure]

    def objective(stages: tuple[Stage, ...]) -> float:
        return math.fsum(by_measure[vertex] for stage in stages for vertex in stage.again)

    found = _search(graph, costs, budget_bytes, node_limit, most_binaries)
    if isinstance(found, Refused):
        return found
    bound = objective(found.lowest) if found.lowest else found.proven * unit
    if found.stages:
        return _staged(graph, found, found.stages, objective(found.stages), bound)
    if not found.infeasible:
        return Refused(
            message=f"No schedule within {budget_bytes} bytes was found in {node_limit} nodes; "
            f"any takes {bound:g} {measure.value} of recomputation or more. Raise node_limit, or "
            "use dynamic_program.approximate."
        )
    least = _search(graph, None, math.inf, node_limit, most_binaries)
    assert not isinstance(least, Refused), "it has as many binary variables as the first"
    if not (least.stages and least.lowest):
        return Refused(
            message=f"There is no schedule within {budget_bytes} bytes, and the least budget for "
            f"which there is one was not settled in {node_limit} nodes. Raise node_limit."
        )
    least_bytes = max(replay(graph, least.stages))
    if least_bytes <= budget_bytes:
        # Rounding had left this without an answer.
        return _staged(graph, found, least.stages, objective(least.stages), bound)
    return Infeasible(budget_bytes=budget_bytes, least_bytes=least_bytes)


def least_peak(
    graph: Graph, *, node_limit: int = NODE_LIMIT, most_binaries: int = MOST_BINARIES
) -> Staged | Refused:
    """The least peak of any staged schedule: the objective is in bytes."""
    found = _search(graph, None, math.inf, node_limit, most_binaries)
    if isinstance(found, Refused):
        return found
    if not found.stages:
        return Refused(
            message=f"No schedule was found in {node_limit} nodes. Raise node_limit, or use "
            "dynamic_program.least_approximate_budget."
        )
    peak_bytes = max(replay(graph, found.stages))
    # If bytes were rounded down, the limit is that schedule's rounded peak, not its true one.
    finished = found.exact and found.lowest
    bound = peak_bytes if finished else math.ceil(found.proven) * found.unit_bytes
    return _staged(graph, found, found.stages, float(peak_bytes), float(bound))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """How a search ended.

    Attributes:
      stages: the best schedule found within the budget; empty if there is none.
      lowest: a schedule that proves the limit, which may exceed the budget by what was rounded
        down; empty if the search for it was not finished.
      proven: the limit that was proven otherwise, in the unit of the objective.
      infeasible: whether the search for ``stages`` has shown that there are none.
      exact: whether no bytes were rounded.
      unit_bytes: the unit in which bytes were counted.
      nodes: nodes of the search trees.
      binaries: binary variables of the program.
    """

    stages: tuple[Stage, ...]
    lowest: tuple[Stage, ...]
    proven: float
    infeasible: bool
    exact: bool
    unit_bytes: int
    nodes: int
    binaries: int


def _search(
    graph: Graph,
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
    most = min(budget_bytes, sum(sizes))
    measure = math.gcd(*sizes) or 1
    unit = measure if most <= measure * GRAINS else math.ceil(most / GRAINS)
    limit = math.inf if budget_bytes >= sum(sizes) else math.floor(budget_bytes / unit)
    program = _Program(graph, unit, up=True)
    if program.binaries > most_binaries:
        return Refused(
            message=f"The graph of {len(graph)} vertices takes {program.binaries} binary "
            f"variables; the limit of the integer program is {most_binaries}. Use "
            "dynamic_program.approximate or binomial.least_overhead, or raise most_binaries."
        )
    above = below = program.solve(costs, limit, node_limit)
    searches = [above]
    if unit != measure:
        below = _Program(graph, unit, up=False).solve(costs, limit, node_limit)
        searches.append(below)
    return _Found(
        stages=() if above.x is None else program.stages(above.x),
        lowest=program.stages(below.x) if below.status == _DONE else (),
        proven=max(0.0, float(below.mip_dual_bound or 0.0) - _TOLERANCE),
        infeasible=above.status == _INFEASIBLE,
        exact=unit == measure,
        unit_bytes=unit,
        nodes=sum(int(one.mip_node_count or 0) for one in searches),
        binaries=program.binaries,
    )


def _staged(
    graph: Graph, found: _Found, stages: tuple[Stage, ...], objective: float, bound: float
) -> Staged:
    again = [vertex for stage in stages for vertex in stage.again]
    bound = min(objective, bound)
    return Staged(
        stages=stages,
        status=Status.OPTIMAL if bound == objective else Status.FEASIBLE,
        objective=objective,
        bound=bound,
        gap=(objective - bound) / objective if objective else 0.0,
        nodes=found.nodes,
        binaries=found.binaries,
        peak_bytes=max(replay(graph, stages)),
        overhead_seconds=math.fsum(graph.seconds[vertex] for vertex in again),
        recomputed_flops=sum(graph.flops[vertex] for vertex in again),
    )


# ------------------------------------------------------------------------------------- replay


def steps(graph: Graph) -> list[tuple[str, int]]:
    """The steps that open stages: phase and vertex, in order."""
    count = len(graph)
    return [
        *(("forward", vertex) for vertex in range(count)),
        *(
            ("backward", vertex)
            for vertex in reversed(range(count))
            if graph.needs[vertex] or graph.cotangent_bytes[vertex] or graph.internal_bytes[vertex]
        ),
    ]


def replay(graph: Graph, stages: Sequence[Stage]) -> Iterator[int]:
    """The bytes alive during each step of a schedule in stages, which must be a legal one.

    A value is freed after its last reader in a stage, unless the next one begins with it.
    """
    around = cotangents(graph)
    for number, stage in enumerate(stages):
        later = stages[number + 1] if number + 1 < len(stages) else None
        held = set(later.held) if later else set()
        internal = set(later.held_internal) if later else set()
        forward = stage.phase == "forward"
        running = (*stage.again, stage.vertex) if forward else stage.again
        last_reads = Counter(p for vertex in running for p in graph.predecessors[vertex])
        own = graph.needs[stage.vertex] if not forward else ()
        last_reads.update(own)
        alive = set(stage.held)
        residuals = set(stage.held_internal)
        waiting, turning = (0, 0) if forward else around[stage.vertex]

        def total(extra: int = 0, alive: set[int] = alive, residuals: set[int] = residuals) -> int:
            values = sum(graph.bytes[vertex] for vertex in alive)
            return values + sum(graph.internal_bytes[vertex] for vertex in residuals) + extra

        for vertex in running:
            # A vertex whose value exists runs for its residuals; the copy is thrown away.
            copy = graph.bytes[vertex] if vertex in alive else 0
            alive.add(vertex)
            if vertex in internal or (not forward and vertex == stage.vertex):
                residuals.update([vertex] if graph.internal_bytes[vertex] else [])
            # A vertex with a workspace runs exactly once.
            yield total(waiting + copy + graph.forward_workspace_bytes[vertex])
            for read in graph.predecessors[vertex]:
                last_reads[read] -= 1
            for read in (*graph.predecessors[vertex], vertex):
                if not last_reads[read] and read not in held:
                    alive.discard(read)
        if not forward and graph.cotangent_bytes[stage.vertex]:
            yield total(turning)


# ------------------------------------------------------------------------------------ program

_DONE, _INFEASIBLE = 0, 2
#: What the solver considers equal, in the units of the objective.
_TOLERANCE = 1e-6
Terms = list[tuple[int, float]]
#: The numbers of variables, by stage and vertex.
Table = dict[tuple[int, int], int]


class _Program:
    """The variables and rows for one graph; bytes are counted in whole units.

    If they are whole and not too large, the solver's tolerance stays below one unit.
    """

    def __init__(self, graph: Graph, unit: int, *, up: bool) -> None:
        self.graph = graph
        self._unit, self._up = unit, up
        self._steps = steps(graph)
        self._kinds: list[int] = []
        self._rows: list[Terms] = []
        self._limits: list[tuple[float, float]] = []
        #: Rows of (7), whose upper limit is the budget less a constant.
        self._memory: list[tuple[Terms, float]] = []
        self._run: Table = {}
        self._stay: Table = {}
        self._free: dict[tuple[int, int, int], int] = {}
        # For unnamed residuals: run although the value exists, make, hold.
        self._rerun: Table = {}
        self._make: Table = {}
        self._hold: Table = {}
        self._successors = graph.successors()
        self._add_variables()

    @property
    def binaries(self) -> int:
        return sum(self._kinds)

    def _in_units(self, bytes_: int) -> int:
        return -(-bytes_ // self._unit) if self._up else bytes_ // self._unit

    def _variable(self, kind: int) -> int:
        self._kinds.append(kind)
        return len(self._kinds) - 1

    def _candidates(self, stage: int) -> range:
        """The vertices that may be in memory when the stage begins, or run again in it."""
        phase, vertex = self._steps[stage]
        return range(vertex) if phase == "forward" else range(vertex + 1)

    def _add_variables(self) -> None:
        graph = self.graph
        for stage, (phase, vertex) in enumerate(self._steps):
            for i in self._candidates(stage):
                self._stay[stage, i] = self._variable(1)
                if not graph.pinned[i]:
                    self._run[stage, i] = self._variable(1)
            for i in self._candidates(stage):
                for k in self._last_readers(stage, i):
                    self._free[stage, i, k] = self._variable(0)
            own = (vertex,) if phase == "forward" else ()
            for i in (*self._candidates(stage), *own):
                if graph.internal_bytes[i]:
                    self._make[stage, i] = self._variable(1)
                    if i not in own:
                        self._hold[stage, i] = self._variable(1)
                        if not graph.pinned[i]:
                            self._rerun[stage, i] = self._variable(1)

    def _read(self, stage: int) -> tuple[int, ...]:
        """What the stage's own step reads."""
        phase, vertex = self._steps[stage]
        return (self.graph.predecessors if phase == "forward" else self.graph.needs)[vertex]

    def _last_readers(self, stage: int, i: int) -> list[int]:
        """The vertices after whose run in the stage the value of i may be freed."""
        own = [i] if self.graph.internal_bytes[i] else []
        found = [k for k in (*own, *self._successors[i]) if (stage, k) in self._run]
        return [] if i in self._read(stage) else found

    def _runs(self, stage: int, i: int) -> Terms:
        """R[t,i], and the run for residuals alone."""
        return [*_one(self._run, stage, i), *_one(self._rerun, stage, i)]

    def _there(self, stage: int, i: int) -> Terms:
        """R[t,i] + S[t,i]."""
        return [*_one(self._run, stage, i), *_one(self._stay, stage, i)]

    def _add(self, terms: Terms, low: float, high: float) -> None:
        self._rows.append(terms)
        self._limits.append((low, high))

    def _add_rows(self) -> None:
        graph = self.graph
        around = cotangents(graph)
        for stage, (phase, vertex) in enumerate(self._steps):
            for i in self._read(stage):
                self._add(self._there(stage, i), 1, 1)  # (2)
            for i in self._candidates(stage):
                there = self._there(stage, i)
                self._add(there, 0, 1)  # (3)
                for p in graph.predecessors[i]:
                    if (stage, i) in self._run:
                        before = self._there(stage, p)
                        self._add([*self._runs(stage, i), *_less(before)], -math.inf, 0)  # (1)
                self._add_frees(stage, i, there)
                self._add_internal(stage, i)
            if phase == "forward":
                self._carry(stage, vertex, [], 1)
                self._add_internal(stage, vertex)
            self._add_memory(stage, around)

    def _carry(self, stage: int, i: int, there: Terms, constant: float) -> None:
        frees = [(self._free[stage, i, k], 1.0) for k in self._last_readers(stage, i)]
        held = _one(self._stay, stage + 1, i)
        self._add([*held, *frees, *_less(there)], -math.inf, constant)  # (4)

    def _add_frees(self, stage: int, i: int, there: Terms) -> None:
        self._carry(stage, i, there, 0)
        readers = self._last_readers(stage, i)
        for place, k in enumerate(readers):
            freed = [(self._free[stage, i, k], 1.0)]
            self._add([*freed, *_less(self._runs(stage, k))], -math.inf, 0)  # (5)
            for other in readers[place + 1 :]:
                self._add([*freed, *self._runs(stage, other), *_less(there)], -math.inf, 0)  # (6)

    def _add_internal(self, stage: int, i: int) -> None:
        """Residuals are made by a run, and held from there to the backward step."""
        if not self.graph.internal_bytes[i]:
            return
        phase, vertex = self._steps[stage]
        made, held = _one(self._make, stage, i), _one(self._hold, stage, i)
        if not (phase == "forward" and i == vertex):
            self._add([*made, *_less(self._runs(stage, i))], -math.inf, 0)
            there = _less(_one(self._stay, stage, i))
            self._add([*_one(self._rerun, stage, i), *there], -math.inf, 0)
        self._add([*_one(self._hold, stage + 1, i), *_less([*made, *held])], -math.inf, 0)
        if phase == "backward" and i == vertex:
            self._add([*made, *held], 1, 1)

    def _add_memory(self, stage: int, around: dict[int, tuple[int, int]]) -> None:
        """Rows of (7), one for each step that may run in the stage."""
        graph = self.graph
        phase, vertex = self._steps[stage]
        waiting, turning = (0, 0) if phase == "forward" else around[vertex]
        live: Terms = []
        for i in self._candidates(stage):
            live += self._sized(self._stay, stage, i, graph.bytes[i])
            live += self._sized(self._hold, stage, i, graph.internal_bytes[i])
        for k in self._candidates(stage):
            live += self._sized(self._run, stage, k, graph.bytes[k])
            live += self._sized(self._make, stage, k, graph.internal_bytes[k])
            if (stage, k) in self._run:
                copy = self._sized(self._rerun, stage, k, graph.bytes[k])
                self._memory.append(([*live, *copy], self._in_units(waiting)))
                for i in (*graph.predecessors[k], k):
                    if (stage, i, k) in self._free:
                        live.append((self._free[stage, i, k], -self._in_units(graph.bytes[i])))
        if phase == "forward":
            live += self._sized(self._make, stage, vertex, graph.internal_bytes[vertex])
            made = graph.bytes[vertex] + graph.forward_workspace_bytes[vertex]
            self._memory.append((live, self._in_units(made)))
        elif graph.cotangent_bytes[vertex]:
            self._memory.append((live, self._in_units(turning)))

    def _sized(self, table: Table, stage: int, i: int, size: int) -> Terms:
        return _one(table, stage, i, self._in_units(size))

    def solve(self, costs: Sequence[float] | None, limit: float, node_limit: int) -> OptimizeResult:
        """The least cost within a limit in units; without costs, the least limit."""
        if not self._rows:
            self._add_rows()
        count = len(self._kinds)
        weights = np.zeros(count + 1)
        if costs is None:
            weights[count] = 1.0
        else:
            for table in (self._run, self._rerun):
                for (_, i), number in table.items():
                    weights[number] = costs[i]
        # The last variable is the peak.
        rows = [*self._rows, *([*terms, (count, -1.0)] for terms, _ in self._memory)]
        limits = [*self._limits, *((-math.inf, -constant) for _, constant in self._memory)]
        entries = [(row, *term) for row, terms in enumerate(rows) for term in terms]
        at, of, by = zip(*entries, strict=True)
        matrix = sparse.csr_array((by, (at, of)), shape=(len(rows), count + 1))
        low, high = zip(*limits, strict=True)
        return milp(
            weights,
            integrality=[*self._kinds, 0],
            bounds=Bounds(0, [*([1] * count), limit]),
            constraints=LinearConstraint(matrix, low, high),
            options={"node_limit": node_limit, "mip_rel_gap": 0},
        )

    def stages(self, values: np.ndarray) -> tuple[Stage, ...]:
        """The schedule that a solution represents, without what is held or run needlessly."""
        graph = self.graph
        found: list[Stage] = []
        later, later_internal = frozenset[int](), frozenset[int]()
        for stage in reversed(range(len(self._steps))):
            phase, vertex = self._steps[stage]

            def chosen(table: Table, stage: int = stage) -> set[int]:
                numbers = ((i, table.get((stage, i))) for i in range(len(graph)))
                return {i for i, number in numbers if number is not None and values[number] > 0.5}

            wanted = {*later, *self._read(stage)}
            internal = set(later_internal)
            if phase == "backward" and graph.internal_bytes[vertex]:
                internal.add(vertex)
            held_internal = chosen(self._hold) & internal
            held, run = chosen(self._stay), chosen(self._run)
            again = []
            for i in sorted(run | chosen(self._rerun), reverse=True):
                if (i in run and i in wanted) or i in internal - held_internal:
                    again.append(i)
                    wanted.update(graph.predecessors[i])
            later, later_internal = frozenset(held & wanted), frozenset(held_internal)
            found.append(
                Stage(
                    phase=phase,
                    vertex=vertex,
                    held=tuple(sorted(later)),
                    held_internal=tuple(sorted(later_internal)),
                    again=tuple(reversed(again)),
                )
            )
        return tuple(reversed(found))


def _one(table: Table, stage: int, i: int, factor: float = 1.0) -> Terms:
    """The variable with a factor; a missing variable is 0."""
    return [(table[stage, i], factor)] if (stage, i) in table else []


def _less(terms: Terms) -> Terms:
    return [(number, -factor) for number, factor in terms]
