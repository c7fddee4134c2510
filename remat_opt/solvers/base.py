"""What every solver returns: a schedule with the referee's figures, and how good it is."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import Figures, figures_of
from remat_opt.spans import spans

_T = TypeVar("_T")


class Overhead(enum.Enum):
    """What recomputation is counted in."""

    SECONDS = "seconds"
    FLOPS = "flops"

    def of(self, seconds: float, flops: int) -> float:
        """What recomputation counts that takes so long and is so many FLOPs."""
        return seconds if self is Overhead.SECONDS else float(flops)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule and what the referee says about it.

    Attributes:
      schedule: regions and fates.
      peak_bytes: predicted peak of the temporaries.
      overhead_seconds: time of the recomputation.
      recomputed_flops: operations of the recomputation.
    """

    schedule: Schedule
    peak_bytes: int
    overhead_seconds: float
    recomputed_flops: int

    def overhead(self, measure: Overhead) -> float:
        """The recomputation, in seconds or in FLOPs."""
        return measure.of(self.overhead_seconds, self.recomputed_flops)


def priced(graph: Graph, measure: Overhead) -> Graph:
    """The graph with what recomputation is counted in in place of seconds, for such solvers.

    FLOPs are scaled so that a forward pass takes as long as before. A small share of the time
    breaks ties between vertices that take none.
    """
    if measure is Overhead.SECONDS:
        return graph
    flop_seconds = (graph.forward_seconds or 1.0) / (graph.forward_flops or 1)
    return dataclasses.replace(
        graph,
        seconds=tuple(
            flops * flop_seconds + 1e-3 * seconds
            for flops, seconds in zip(graph.flops, graph.seconds, strict=True)
        ),
    )


def thinned(items: Sequence[_T], most: int) -> list[_T]:
    """At most this many of the items: the first, the last, and some evenly spaced between."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / max(1, most - 1))] for n in range(most)]


def judge(graph: Graph, schedule: Schedule) -> Candidate:
    """Asks the referee for the figures of a schedule.

    Names of values that are never read are left out: they take nothing.

    Raises:
      GraphError: the schedule cannot be executed.
    """
    lives = spans(graph, schedule)
    figures = figures_of(graph, lives.peak_bytes, lives.again.tolist())
    return candidate(schedule, figures, lives.from_memory)


def candidate(schedule: Schedule, figures: Figures, from_memory: Sequence[np.ndarray]) -> Candidate:
    """A schedule with known figures, without the names of values that are never read.

    Args:
      schedule: the schedule, from which names may be left out.
      figures: the referee's.
      from_memory: for each depth of nesting, whether each vertex is read there; see
        ``spans.read_from_memory``.
    """
    wanted = [depth.tolist() for depth in from_memory]
    return Candidate(
        schedule=dataclasses.replace(schedule, regions=_read_again(schedule.regions, 0, wanted)),
        peak_bytes=figures.peak_bytes,
        overhead_seconds=figures.overhead_seconds,
        recomputed_flops=figures.recomputed_flops,
    )


def judged(graph: Graph, schedules: Iterable[Schedule]) -> list[Candidate]:
    """The schedules with the referee's figures, in order, equal ones only once.

    Schedules that cannot be executed are left out, whatever their figures.
    """
    found: dict[Candidate, None] = {}
    for one in dict.fromkeys(schedules):
        with contextlib.suppress(GraphError):
            found[judge(graph, one)] = None
    return list(found)


def _read_again(
    chain: Sequence[Region], depth: int, wanted: Sequence[Sequence[bool]]
) -> tuple[Region, ...]:
    """A chain of regions that keep only the wanted values at their depth."""
    found = []
    for region in chain:
        kept = tuple(v for v in region.kept if wanted[depth][v])
        inside = _read_again(region.inside, depth + 1, wanted)
        if kept != region.kept or inside != region.inside:
            region = Region(
                vertices=region.vertices,
                kept=kept,
                checkpointed=region.checkpointed,
                inside=inside,
            )
        found.append(region)
    return tuple(found)


def pareto(candidates: list[Candidate], measure: Overhead) -> list[Candidate]:
    """The candidates that no other beats in both peak and overhead, by ascending peak.

    Of candidates equal in both, the one with the fewest regions stays. The ones without any
    checkpoint always stay, and come last: if they fit, nothing has to be cut. Of them, there is the
    one that needs least, and then the function as it is, which nothing slows down.
    """
    ordered = sorted(
        candidates,
        key=lambda one: (
            one.peak_bytes,
            one.overhead(measure),
            not one.schedule.unchanged,
            len(one.schedule.regions),
        ),
    )
    front: list[Candidate] = []
    for candidate in ordered:
        if not front or candidate.overhead(measure) < front[-1].overhead(measure):
            front.append(candidate)
    uncut = [one for one in ordered if not one.schedule.has_checkpoints]
    last = uncut[:1] + [one for one in uncut[1:] if one.schedule.unchanged]
    return front + [one for one in last if one not in front]


def fastest_within(
    candidates: list[Candidate], budget_bytes: float, measure: Overhead
) -> Candidate | None:
    """The candidate with the least overhead whose peak is within the budget."""
    fitting = [one for one in pareto(candidates, measure) if one.peak_bytes <= budget_bytes]
    return fitting[-1] if fitting else None


#: Peaks that differ by less than this share count as equal if the least is asked for: the
#: compiler's order of execution moves a peak by more, and the last percent is expensive.
PEAK_RESOLUTION = 0.02


def least_memory(candidates: list[Candidate], measure: Overhead) -> Candidate:
    """The candidate with the least peak; of those equal to the resolution, the fastest."""
    least = min(one.peak_bytes for one in candidates)
    found = fastest_within(candidates, least * (1 + PEAK_RESOLUTION), measure)
    assert found is not None, "the least candidate is within its own peak"
    return found


def smallest_within(
    candidates: list[Candidate], most_overhead: float, measure: Overhead
) -> Candidate:
    """The candidate with the least peak whose overhead is within the limit.

    There is always one: the unchanged function recomputes nothing.
    """
    return next(
        one for one in pareto(candidates, measure) if one.overhead(measure) <= most_overhead
    )


class Status(enum.Enum):
    """How a solver's search ended.

    OPTIMAL: no answer of the kind the solver looks for is better.
    FEASIBLE: an answer, without proof that it is the best one.
    INFEASIBLE: there is no answer of that kind.
    REFUSED: the problem is too large for this solver; nothing is known.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    REFUSED = "refused"


FiguresT = TypeVar("FiguresT")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution(Generic[FiguresT]):
    """What a solver found, in the terms of its own paper.

    Attributes:
      schedule: the decision, ready for the referee.
      figures: the solver's own figures, each with its unit in its name.
      status: ``OPTIMAL`` or ``FEASIBLE``.
      objective: the figure that was optimised.
      bound: a proven limit on the objective, from below if it is minimised and from above if it is
        maximised; equal to the objective if the status is ``OPTIMAL``.
    """

    schedule: Schedule
    figures: FiguresT
    status: Status
    objective: float
    bound: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """There is no answer within the budget.

    Attributes:
      budget_bytes: the budget asked for.
      least_bytes: the least budget for which the same search has an answer.
    """

    budget_bytes: float
    least_bytes: int

    @property
    def status(self) -> Status:
        """Always ``INFEASIBLE``."""
        return Status.INFEASIBLE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The problem is too large for the solver, or not of the kind that it takes.

    Attributes:
      message: what is too large, by how much, and which solver to use instead.
    """

    message: str

    @property
    def status(self) -> Status:
        """Always ``REFUSED``."""
        return Status.REFUSED
