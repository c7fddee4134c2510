"""Plans that were compiled, and what they teach about the others: the loop's memory.

Each compiled plan shows what was alive when. Its differences from the replay are learnt
(``compilers.learnt``), and the solver searches again with them. What was learnt is kept for the
next call that compiles the same program for the same device and step, with the same compiler, and
in a file if one is named. Calls that compile nothing use only files: their answer must not depend
on what this process did before.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from remat_opt import planning
from remat_opt.compilers import learnt as lessons
from remat_opt.compilers.learnt import Key, Learnt
from remat_opt.device import Device
from remat_opt.errors import CompileError
from remat_opt.measurement import compilation
from remat_opt.measurement.alignment import align
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.planning import Problem
from remat_opt.program.record import Program
from remat_opt.progress import doing
from remat_opt.recent import Recent
from remat_opt.schedule import Schedule
from remat_opt.simulator import Moment
from remat_opt.solvers.base import Candidate, least_memory, pareto
from remat_opt.units import format_bytes

#: The most plans compiled for one request.
MOST_COMPILES = 4
#: What a refused plan counts as, as a multiple of its prediction.
_RATIO_IF_REFUSED = 1.25
#: How far above a budget a plan's expected need may be for it to be compiled.
HOPELESS = 1.25
#: How far off an expectation may be after learning: plans this close to one another, or to a
#: budget, are worth a compile. If the compiler gives only sizes, the second applies.
_TOLERANCE, _TOLERANCE_UNTOLD = 1.02, 1.15
#: How many points of a timeline a plan writes down.
_MOST_POINTS = 200
#: For how many programs this process keeps what was learnt.
_MOST_LEARNT = 64
_learnt: Recent[Key, Learnt] = Recent(_MOST_LEARNT)


class Memory:
    """Keeps what is learnt about a program: in this process, and in a file if one is named.

    Args:
      program: the program.
      device: the machine compiled for.
      step: what is compiled around the program.
      path: a file, written when something is learnt; it need not exist yet.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        step: str,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if program.communicates_again:
            step += ", communicates again"
        self._key = Key(
            fingerprint=program.fingerprint(),
            device=device.name,
            compiler=compilation.compiler_version(device),
            step=step if program.placement is None else f"{step} on {program.placement.text}",
        )
        self._path = path

    def recall(self) -> Learnt | None:
        """What was learnt before; the file takes precedence over this process.

        Raises:
          PlanFileError: the file exists but cannot be used.
        """
        found = self._in_file() if self._path is not None and Path(self._path).exists() else None
        return found or _learnt.get(self._key)

    def read(self) -> Learnt | None:
        """What the file says about the program; None if it is about others.

        Raises:
          PlanFileError: there is no file, or it cannot be used.
        """
        return self._in_file()

    def _in_file(self) -> Learnt | None:
        assert self._path is not None, "it was asked for"
        found = (one for one in lessons.read(self._path) if one.key == self._key)
        return next(found, None)

    def begin(self, labels: Sequence[str]) -> Learnt:
        """An empty record for this program."""
        return Learnt(key=self._key, labels=tuple(labels))

    def keep(self, learnt: Learnt) -> None:
        """Keeps what was learnt."""
        _learnt.renew(self._key, learnt)
        if self._path is not None:
            lessons.write(self._path, learnt)


class Trials:
    """Plans that were compiled, and what they teach about the others.

    Attributes:
      problem: what to decide, with what was learnt so far.
      objective: what is wanted.
      measure: what recomputation is counted in.
      learnt: what was learnt so far.
      plans: those that compiled, measured.
    """

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        compiled: Callable[[Plan], Measurement],
        memory: Memory | None,
    ) -> None:
        self.objective, self.measure = objective, objective.overhead
        labels = problem.model.labels
        nothing = Key(fingerprint="", device="", compiler="", step="")
        recalled = memory.recall() if memory is not None else None
        self.learnt = recalled or (
            memory.begin(labels) if memory is not None else Learnt(key=nothing, labels=labels)
        )
        self.problem = problem
        self._as_modelled = problem.candidates
        if recalled is not None:
            self.problem = planning.informed(problem, recalled, self.measure)
        self._defaults = planning.defaults(self.problem)
        self.plans: list[Plan] = []
        self._compiled = compiled
        self._refusals: list[CompileError] = []
        self._limit_bytes: float = sys.maxsize
        # In order: what was tried, and its plan unless the compiler refused it.
        self._tried: dict[Schedule, tuple[Candidate, Plan | None]] = {}

    @property
    def count(self) -> int:
        """How many plans were tried."""
        return len(self._tried)

    @property
    def left(self) -> int:
        """How many more may be tried."""
        return MOST_COMPILES - self.count

    @property
    def told(self) -> bool:
        """Whether the compiler has shown what is alive when."""
        return self.learnt.told

    @property
    def tolerance(self) -> float:
        """How far off expectations may be, as a ratio."""
        return _TOLERANCE if self.told else _TOLERANCE_UNTOLD

    def tried(self, one: Candidate) -> bool:
        """Whether the candidate was compiled, or refused."""
        return one.schedule in self._tried

    def is_default(self, one: Candidate) -> bool:
        """Whether it is the schedule of a ``jax.checkpoint`` policy."""
        return any(one.schedule == other.schedule for other in self._defaults)

    def compile(self, one: Candidate) -> None:
        """Compiles the candidate's plan, and learns from it."""
        plan = planning.describe(self.problem, self.problem.program, one, self.objective)
        try:
            with doing(f"plan {self.count + 1} of at most {MOST_COMPILES}"):
                measured = self._compiled(plan)
        except CompileError as error:
            self._refusals.append(error)
            self._tried[one.schedule] = one, None
            # Anything as large or larger will be refused too.
            self._limit_bytes = min(self._limit_bytes, one.peak_bytes / _RATIO_IF_REFUSED)
            return
        moments = planning.replay(self.problem, one.schedule)
        alive = alive_at(measured, moments, self.problem, one.schedule)
        plan = with_measurement(plan, measured, alive)
        self.plans.append(plan)
        self._tried[one.schedule] = one, plan
        self.learnt = self.learnt.with_plan(
            self.problem.model.graph,
            one.schedule,
            moments,
            # The function as it is says nothing about what is written differently.
            None if one.schedule.unchanged else alive,
            model_bytes=plan.predicted.model_bytes,
            compiled_bytes=measured.temporary_bytes,
        )
        if self.left:
            self.problem = planning.informed(self.problem, self.learnt, self.measure)
            self._defaults = planning.defaults(self.problem)

    def _as_known(self, one: Candidate) -> Candidate:
        """The candidate with its compiled size, if it was compiled."""
        if not self.tried(one):
            return one
        plan = self._tried[one.schedule][1]
        actual = sys.maxsize if plan is None else temporary_bytes(plan)
        return dataclasses.replace(one, peak_bytes=actual)

    def expected(self, most_overhead: float = float("inf")) -> list[Candidate]:
        """Those that may compile within a limit, with their known or expected need."""
        front = list(self.problem.candidates)
        if self.told:
            front = pareto(front, self.measure)
        tried = [one for one, _ in self._tried.values()]
        found = {one.schedule: one for one in (*tried, *self._defaults, *front)}
        known = [self._as_known(one) for one in found.values()]
        return [
            one
            for one in known
            if one.overhead(self.measure) <= most_overhead
            and (one.peak_bytes <= self._limit_bytes or self._has_compiled(one))
        ]

    def _has_compiled(self, one: Candidate) -> bool:
        return self.tried(one) and self._tried[one.schedule][1] is not None

    def fastest(self, budget_bytes: int) -> Candidate | None:
        """The one with the least recomputation that is expected to fit, tried or not."""
        return self._fastest(self.expected(), budget_bytes)

    def first(self, budget_bytes: int) -> Candidate | None:
        """The one to start with: the fastest expected to fit, unless it is a last resort.

        A plan that recomputes more than a forward pass is one, and says little about others. The
        model may be off before anything is compiled, and then less recomputation will do. So the
        smallest of those that recompute less goes first, if it is near the budget.
        """
        found = self.fastest(budget_bytes)
        limit = planning.overhead_limit(
            self.problem, dataclasses.replace(self.objective, max_overhead=planning.MOST_PASSES)
        )
        if found is not None and found.overhead(self.measure) <= limit:
            return found
        usual = least_memory(self.expected(limit), self.measure)
        return usual if usual.peak_bytes <= HOPELESS * budget_bytes else found

    def by_ratio(self, budget_bytes: int) -> Candidate | None:
        """An untried one with the least recomputation that fits by the model, corrected by a ratio.

        The ratio is the square of the worst of those compiled: it is better to recompute too much
        than to find nothing. What was learnt may be true of them alone, and make everything look
        too large.
        """
        worst = max(
            (
                temporary_bytes(one) / max(1, one.predicted.model_bytes)
                for one in self.plans
                if not one.unchanged
            ),
            default=1.0,
        )
        untried = [one for one in self._as_modelled if not self.tried(one)]
        return self._fastest(untried, budget_bytes / max(1.0, worst) ** 2)

    def _fastest(self, among: Sequence[Candidate], limit_bytes: float) -> Candidate | None:
        fitting = [one for one in among if one.peak_bytes <= limit_bytes]
        return min(
            fitting,
            key=lambda one: (
                one.overhead(self.measure),
                not one.schedule.unchanged,
                one.peak_bytes,
            ),
            default=None,
        )

    def challenger(self, best: Candidate, budget_bytes: int) -> Candidate | None:
        """A policy of ``jax.checkpoint`` that may fit, and recomputes less than the best that does.

        It is the one that recomputes least, if it was not tried.
        """
        return self._fastest(self._faster_defaults(best), budget_bytes * self.tolerance)

    def nearest_default(self, best: Candidate, limit_bytes: int) -> Candidate | None:
        """The policy of ``jax.checkpoint`` nearest to what is wanted, if none was tried.

        Of those that recompute less than the best so far, it is the one expected to need least,
        unless that is hopeless.
        """
        if any(self.is_default(one) for one in self.as_compiled()):
            return None
        faster = self._faster_defaults(best)
        return self._smallest([one for one in faster if one.peak_bytes <= HOPELESS * limit_bytes])

    def _faster_defaults(self, best: Candidate) -> list[Candidate]:
        """The policies of ``jax.checkpoint`` that were not tried and recompute less."""
        return [
            one
            for one in self.expected()
            if self.is_default(one)
            and not self.tried(one)
            and one.overhead(self.measure) < best.overhead(self.measure)
        ]

    def smallest(self) -> Candidate | None:
        """The untried candidate that is expected to need least."""
        return self._smallest([one for one in self.expected() if not self.tried(one)])

    def _smallest(self, among: Sequence[Candidate]) -> Candidate | None:
        return min(
            among, key=lambda one: (one.peak_bytes, one.overhead(self.measure)), default=None
        )

    def as_compiled(self) -> list[Candidate]:
        """The plans that compiled, with the bytes they took."""
        return [self._as_known(one) for one, plan in self._tried.values() if plan is not None]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """Of those that compiled to at most this many bytes, the one that recomputes least."""
        return self._fastest(self.as_compiled(), budget_bytes)

    def plan_of(self, one: Candidate, what: str) -> Plan:
        """The plan of a compiled candidate, with a note on all that were compiled."""
        _, plan = self._tried[one.schedule]
        assert plan is not None, "it compiled"
        return _noted(plan, self.plans, what)

    def raise_if_all_refused(self) -> None:
        """Raises the compiler's last error if nothing has compiled."""
        if not self.plans:
            raise self._refusals[-1]


def alive_at(
    measured: Measurement, moments: Sequence[Moment], problem: Problem, schedule: Schedule
) -> tuple[int | None, ...] | None:
    """The bytes of temporaries alive at moments of a replay, as compiled; None if unknown."""
    if measured.memory is None:
        return None
    expected, _ = problem.model.under(schedule)
    return align(measured.memory, moments, expected.roots).compiled_bytes


def with_measurement(
    plan: Plan, measured: Measurement, alive: Sequence[int | None] | None = None
) -> Plan:
    """The plan with what the compiler said.

    Everything that was alive would take much memory to keep; the plan has the points.
    """
    return dataclasses.replace(
        plan,
        measured=dataclasses.replace(measured, memory=None),
        as_compiled=_points(alive or ()),
    )


def _points(alive: Sequence[int | None]) -> tuple[int, ...]:
    """At most ``_MOST_POINTS`` figures: each stretch's largest, or the last known figure."""
    figures: list[int] = []
    for one in alive:
        figures.append(one if one is not None else (figures[-1] if figures else 0))
    count = min(len(figures), _MOST_POINTS)
    bounds = [round(number * len(figures) / count) for number in range(count + 1)] if count else []
    return tuple(max(figures[a:b]) for a, b in itertools.pairwise(bounds))


def temporary_bytes(plan: Plan) -> int:
    """What a compiled plan needs."""
    assert plan.measured is not None, "it was compiled"
    return plan.measured.temporary_bytes


def _noted(best: Plan, tried: Sequence[Plan], what: str) -> Plan:
    said = ", ".join(
        f"{format_bytes(temporary_bytes(one))} "
        f"(predicted {format_bytes(one.predicted.temporary_bytes)})"
        for one in tried
    )
    return dataclasses.replace(
        best, notes=(*best.notes, f"Chosen by compiling, for {what}. Compiled to: {said}.")
    )
