"""All solvers in one table, including those that can plan programs.

Each paper's solver has its own kind of budget, model and answer. The records below, which plan
programs, all answer alike: with schedules for many budgets, judged by a single referee. A solver
that takes a budget is called for a fixed series of them, so that the candidates do not depend on
what the user asks for, and a larger budget never gives a worse plan. If a paper's model of memory
differs from the referee's, the referee's counts.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule, plain
from remat_opt.solvers import (
    arbitrary_graph,
    binomial,
    dynamic_program,
    exhaustive,
    integer_program,
    linear_chain,
    portfolio,
    random_choice,
    sublinear,
    trunk,
)
from remat_opt.solvers.base import Candidate, Overhead, Refused, Solution, judge, judged, priced
from remat_opt.solvers.dynamic_program import Centric
from remat_opt.view import report

#: How many budgets a solver is called for, in equal ratios from the least one up.
BUDGETS = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solver(abc.ABC):
    """What ``optimal_remat(solver=...)`` takes: a name, options, and the schedules they give.

    Your own solvers derive from this class, as frozen dataclasses whose fields are their options.
    Equal solvers must give equal candidates.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Its name in plans; a class variable will do."""

    @abc.abstractmethod
    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """Schedules for all budgets, in any order.

        Args:
          graph: what to plan; its ``seconds`` are what recomputation is counted in.
        """

    def candidates(
        self, graph: Graph, measure: Overhead = Overhead.SECONDS
    ) -> list[Candidate] | Refused:
        """The schedules with the referee's figures, each once, the unchanged function first.

        Args:
          graph: what to plan.
          measure: what recomputation is counted in.
        """
        found = self.schedules(priced(graph, measure))
        if isinstance(found, Refused):
            return found
        return judged(graph, [plain(graph), *found])

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Portfolio(Solver):
    """The default: minimum cuts, chains of regions, and local improvement."""

    name: ClassVar[str] = "portfolio"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        return [one.schedule for one in portfolio.frontier(graph)]

    def candidates(
        self, graph: Graph, measure: Overhead = Overhead.SECONDS
    ) -> list[Candidate] | Refused:
        """See ``Solver``; its figures are those by which it chose."""
        return portfolio.frontier(graph, measure)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApproximateDP(Solver):
    """Kusumoto's dynamic program over the pruned family of lower sets.

    Attributes:
      objective: ``"time"`` for the least recomputation within each budget, ``"memory"`` for the
        most, on which liveness analysis works best.
    """

    objective: str = "time"

    name: ClassVar[str] = "approximate_dp"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        centric = Centric(self.objective)
        least = dynamic_program.least_approximate_budget(graph)
        return _swept(
            graph,
            least,
            lambda budget: dynamic_program.approximate(
                graph, budget, centric=centric, last_block_free=centric is Centric.TIME
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExactDP(Solver):
    """Kusumoto's dynamic program over all lower sets.

    Attributes:
      objective: see ``ApproximateDP``.
    """

    objective: str = "time"

    name: ClassVar[str] = "exact_dp"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        centric = Centric(self.objective)
        least = dynamic_program.least_budget(graph)
        if isinstance(least, Refused):
            return least
        return _swept(
            graph,
            least,
            lambda budget: dynamic_program.exact(
                graph, budget, centric=centric, last_block_free=centric is Centric.TIME
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive(Solver):
    """All canonical strategies of a small graph, one after the other."""

    name: ClassVar[str] = "exhaustive"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        least = exhaustive.least_budget(graph)
        if isinstance(least, Refused):
            return least
        return _swept(
            graph,
            least,
            lambda budget: exhaustive.least_overhead(graph, budget, last_block_free=True),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IntegerProgram(Solver):
    """The best chains of regions of a small graph, by branch and bound.

    Attributes:
      depth: how deep regions may nest; 1 for none inside another.
    """

    depth: int = 1

    name: ClassVar[str] = "integer_program"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        least = integer_program.least_peak(graph, depth=self.depth)
        if isinstance(least, Refused):
            return least
        found = [least.schedule]
        room_bytes = judge(graph, plain(graph)).peak_bytes - least.figures.peak_bytes
        for step in range(BUDGETS):
            budget = least.figures.peak_bytes + room_bytes * step / BUDGETS
            answer = integer_program.least_overhead(graph, budget, depth=self.depth)
            if isinstance(answer, Solution):
                found.append(answer.schedule)
                if not answer.objective:
                    break
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearChain(Solver):
    """Re-forwarding's solver for linear graphs: one kept set, for the least memory."""

    name: ClassVar[str] = "linear_chain"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        return _on_trunk(graph, linear_chain.solve)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArbitraryGraph(Solver):
    """Re-forwarding's solver for any graph: one kept set, for the least memory."""

    name: ClassVar[str] = "arbitrary_graph"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        return _on_trunk(graph, arbitrary_graph.solve)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomChoice(Solver):
    """OGC's random baseline: the best of ten draws of one to five kept vertices.

    Attributes:
      seed: decides all draws.
    """

    seed: int = 0

    name: ClassVar[str] = "random_choice"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        return _on_trunk(graph, lambda given: random_choice.solve(given, seed=self.seed))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Revolve(Solver):
    """Griewank & Walther's binomial reversal of the chain of links.

    Attributes:
      snapshots: states in memory at a time; None for every number that makes a difference.
    """

    snapshots: int | None = None

    name: ClassVar[str] = "revolve"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        snapshots = self.snapshots
        if snapshots is not None:
            return _on_trunk(graph, lambda given: binomial.solve(given, snapshots))
        seen = trunk.trunk(graph)
        found: list[Schedule] = []
        refused = None
        # Powers of two, and n - 1: then every step but the last runs again once.
        steps = len(binomial.links(seen.graph))
        for number in sorted({*(2**power for power in range(steps.bit_length())), steps - 1}):
            answer = binomial.solve(seen.graph, number)
            if isinstance(answer, Solution):
                found.append(seen.spread(answer.schedule))
            else:
                refused = answer
        return refused if refused and not found else found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeterogeneousChain(Solver):
    """The dynamic program for chains of unequal links, with multiple recomputation.

    Attributes:
      slots: into how many parts memory is divided.
    """

    slots: int = binomial.SLOTS

    name: ClassVar[str] = "heterogeneous_chain"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        seen = trunk.trunk(graph)
        found = binomial.schedules(seen.graph, slots=self.slots)
        if isinstance(found, Refused):
            return found
        return [seen.spread(one) for one in found]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sublinear(Solver):
    """Chen's plans: Algorithm 3 over its grid, cheap operations dropped, recursion.

    Attributes:
      nested: whether recursion, which computes results more than once, is among them.
    """

    nested: bool = True

    name: ClassVar[str] = "sublinear"

    def schedules(self, graph: Graph) -> Sequence[Schedule] | Refused:
        """See ``Solver``."""
        seen = trunk.trunk(graph)
        found = sublinear.schedules(seen.graph, nested=self.nested)
        if isinstance(found, Refused):
            return found
        return [seen.spread(one) for one in found]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What to know about a solver before using it.

    Attributes:
      name: the name of the file, or of the record for programs.
      plans_programs: whether ``optimal_remat(solver=name)`` takes it.
      takes: what graphs it takes.
      guarantee: exact or not, and in what sense.
      complexity: for n vertices (stages, links), unless said otherwise.
      paper: where it comes from.
    """

    name: str
    plans_programs: bool
    takes: str
    guarantee: str
    complexity: str
    paper: str


_ANY = "any graph"
_TRUNK = "any graph; side results hung onto the trunk"
_CHAIN = "chain of stages with a link to host memory"
_KUSUMOTO = "Kusumoto et al. 2019"
_FENG = "Feng & Huang 2018, 2021"
_BEAUMONT = "Beaumont et al. 2020"

_TABLE = (
    Row(
        name="portfolio",
        plans_programs=True,
        takes=_ANY,
        guarantee="none; best of many, judged by the simulator",
        complexity="(cuts + mixtures) x (n m), m <= 160 boundaries, and joint_chain",
        paper="this project",
    ),
    Row(
        name="approximate_dp",
        plans_programs=True,
        takes=_ANY,
        guarantee="exact over pruned lower sets, times rounded to 2,000 steps",
        complexity="O(T n^2), T times that occur",
        paper=f"{_KUSUMOTO}, 4.3",
    ),
    Row(
        name="exact_dp",
        plans_programs=True,
        takes=f"graphs of at most {dynamic_program.MOST_LOWER_SETS:,} lower sets",
        guarantee="exact over canonical strategies, Eq. 2",
        complexity="O(T L^2), L lower sets",
        paper=f"{_KUSUMOTO}, 4.2",
    ),
    Row(
        name="exhaustive",
        plans_programs=True,
        takes=f"graphs of at most {exhaustive.MOST_STRATEGIES:,} canonical strategies",
        guarantee="exact over canonical strategies, Eq. 2",
        complexity="O(n x strategies)",
        paper=f"{_KUSUMOTO}, 4.1",
    ),
    Row(
        name="integer_program",
        plans_programs=True,
        takes=f"graphs that take at most {integer_program.MOST_BINARIES} binaries",
        guarantee="exact over chains of regions, nested to a depth: the yardstick",
        complexity="exponential; 2 n binaries for each depth",
        paper="this project, after Jain et al. 2020",
    ),
    Row(
        name="linear_chain",
        plans_programs=True,
        takes="chains, once side results are hung onto the trunk",
        guarantee="exact: least kept + largest segment",
        complexity="O(n) per trial term",
        paper=f"{_FENG}, linear graphs",
    ),
    Row(
        name="arbitrary_graph",
        plans_programs=True,
        takes=_TRUNK,
        guarantee="exact: least kept + largest independent segment",
        complexity="the division tree, then O(n) per trial term",
        paper=f"{_FENG}, arbitrary graphs",
    ),
    Row(
        name="random_choice",
        plans_programs=True,
        takes=_TRUNK,
        guarantee="none; a baseline, the best of ten draws",
        complexity="O(n + e) per draw",
        paper="Feng & Huang 2021",
    ),
    Row(
        name="sublinear",
        plans_programs=True,
        takes="graphs with articulation points, likewise",
        guarantee="none; O(sqrt n) memory, O(log n) with recursion, on even chains",
        complexity="O(n + e) per plan",
        paper="Chen et al. 2016",
    ),
    Row(
        name="revolve",
        plans_programs=True,
        takes="chains of links, likewise",
        guarantee="exact: least recomputation with s states, links alike",
        complexity="O(n) per number of states",
        paper="Griewank & Walther 2000",
    ),
    Row(
        name="heterogeneous_chain",
        plans_programs=True,
        takes="chains of links, likewise",
        guarantee="exact over nests of saved and checkpointed links, but for slots",
        complexity="O(n^3 slots), n links",
        paper="Gruslys et al. 2016",
    ),
    Row(
        name="min_cut",
        plans_programs=False,
        takes=_ANY,
        guarantee="exact on the convex hull of kept bytes and cost; part of portfolio",
        complexity="a maximum flow per breakpoint",
        paper="Picard 1976",
    ),
    Row(
        name="region_chain",
        plans_programs=False,
        takes="any graph with a kept set",
        guarantee="exact in its model of the workspace; part of portfolio",
        complexity="O(n m) + O(m^2) per bound",
        paper=f"{_FENG}, linear graphs",
    ),
    Row(
        name="joint_chain",
        plans_programs=False,
        takes="any graph with several kept sets",
        guarantee="exact in its model of memory, but for slots; part of portfolio",
        complexity="O(p^2 f s + q^3 s), positions p and q, fates f, slots s",
        paper="this project",
    ),
    Row(
        name="local_search",
        plans_programs=False,
        takes="any graph with schedules to start from",
        guarantee="none; on small graphs often the best of all; part of portfolio",
        complexity="a fixed number of chains judged, O(n + e) each",
        paper="Paquete et al. 2004, for another problem",
    ),
    Row(
        name="staged_program",
        plans_programs=False,
        takes="small graphs",
        guarantee="exact over all schedules, executable or not, with bound and gap",
        complexity="exponential; O(n^2) binaries",
        paper="Jain et al. 2020",
    ),
    Row(
        name="offload_greedy",
        plans_programs=False,
        takes=_CHAIN,
        guarantee="exact for the fractional relaxation",
        complexity="O(L)",
        paper=f"{_BEAUMONT}, Greedy",
    ),
    Row(
        name="offload_dynamic_program",
        plans_programs=False,
        takes=_CHAIN,
        guarantee="exact over ordered schedules, or within its 500 slots",
        complexity="O(L slots^2)",
        paper=f"{_BEAUMONT}, DynProg",
    ),
    Row(
        name="offload_baselines",
        plans_programs=False,
        takes=_CHAIN,
        guarantee="none; VDNN, AutoSwap, TFLMS",
        complexity="a simulation per threshold or weight",
        paper=f"{_BEAUMONT}, section 5",
    ),
)

_RECORDS: tuple[type[Solver], ...] = (
    Portfolio,
    ApproximateDP,
    ExactDP,
    Exhaustive,
    IntegerProgram,
    LinearChain,
    ArbitraryGraph,
    RandomChoice,
    Sublinear,
    Revolve,
    HeterogeneousChain,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The table of solvers; it shows itself in a terminal and in a notebook.

    Attributes:
      rows: one for each solver.
    """

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return self._table().text(report.columns())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> report.Table:
        return report.Table(
            title='Solvers (those that plan programs go into optimal_remat(solver="..."))',
            headings=("name", "programs", "takes", "guarantee", "complexity", "from"),
            rows=tuple(
                (
                    row.name,
                    "yes" if row.plans_programs else "",
                    row.takes,
                    row.guarantee,
                    row.complexity,
                    row.paper,
                )
                for row in self.rows
            ),
            align="llllll",
        )


def available() -> Catalogue:
    """One row for each solver: what graphs it takes, exact or not, complexity, paper."""
    return Catalogue(rows=_TABLE)


def named(name: str) -> Solver | None:
    """The solver for programs of that name, with default options."""
    for record in _RECORDS:
        solver = record()
        if solver.name == name:
            return solver
    return None


def _swept(
    graph: Graph, least_bytes: float, solve: Callable[[float], Any]
) -> list[Schedule] | Refused:
    """The solver's schedules for budgets from the least feasible one up, in equal ratios.

    Above the largest budget the unchanged function fits: Eq. 2 of one block is twice all bytes.
    """
    most = max(2.0 * sum(graph.bytes), least_bytes, 1.0)
    ratio = (most / max(least_bytes, 1.0)) ** (1 / (BUDGETS - 1))
    found = []
    for step in range(BUDGETS):
        answer = solve(least_bytes * ratio**step if least_bytes else most * step / BUDGETS)
        if isinstance(answer, Refused):
            return answer
        if isinstance(answer, Solution):
            found.append(answer.schedule)
    return found


def _on_trunk(
    graph: Graph, solve: Callable[[Graph], Solution[Any] | Refused]
) -> list[Schedule] | Refused:
    """The one answer of a solver with a single target."""
    seen = trunk.trunk(graph)
    answer = solve(seen.graph)
    if isinstance(answer, Refused):
        return answer
    return [seen.spread(answer.schedule)]
