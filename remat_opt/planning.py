"""From a program to a plan: the stages between tracing and the public API, in order.

``problem`` builds the graph, ``solve`` picks the candidate that the objective asks for,
``describe`` writes the plan down. The candidates for all budgets come from one sweep, which is kept
as long as the program's fingerprint and the device stay the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import jax

from remat_opt import __version__, inner, loops, policies
from remat_opt import _jax_internals as internals
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.learnt import Corrections, Learnt
from remat_opt.compilers.model import Model, computes_nothing
from remat_opt.compilers.parts import Parts
from remat_opt.compilers.rules import not_yet
from remat_opt.device import Device
from remat_opt.errors import BudgetError, RematError
from remat_opt.gradients import Gradients
from remat_opt.graph import Graph
from remat_opt.loop_values import loop_values
from remat_opt.operation import GUESSED_TURNS, ArrayType, Operation
from remat_opt.plan import Decision, Objective, Pin, Plan, Prediction
from remat_opt.program import blocks
from remat_opt.program.linearization import linearize
from remat_opt.program.names import Names
from remat_opt.program.propagation import is_split, per_device
from remat_opt.program.record import Program
from remat_opt.progress import doing
from remat_opt.recent import Recent
from remat_opt.schedule import Schedule, unchanged
from remat_opt.simulator import Moment, Simulation, simulate
from remat_opt.solvers import recombination
from remat_opt.solvers.base import (
    Candidate,
    Overhead,
    Refused,
    fastest_within,
    judge,
    judged,
    least_memory,
    pareto,
    priced,
    smallest_within,
    thinned,
)
from remat_opt.solvers.catalogue import Portfolio, Solver
from remat_opt.timeline import NOTHING, Timeline, timeline
from remat_opt.units import format_bytes

#: The solver used by default.
DEFAULT_SOLVER: Solver = Portfolio()

#: If the least memory is asked for, at most this many forward passes are recomputed.
MOST_PASSES = 1.0
#: Frontier neighbours whose peaks differ by the first ratio each get a heap layout, and of others
#: those whose overheads differ by the second.
_APART, _CHEAPER = 1.015, 0.95
#: How many sweeps are kept.
_MOST_SWEEPS = 16
#: Once something was learnt, candidates are replayed: for each origin, at most this many vertices
#: in all, or this many candidates if that is more. Their regions are recombined, and this share of
#: that number is judged from each resulting table.
_REPLAYED, _FEWEST_REPLAYED, _RECOMBINED_SHARE = 40_000, 60, 1 / 8
#: How many of the arrays alive at the peak a plan writes down.
_MOST_PINS = 12
#: Of what is alive at the peak, only what takes at least this part of it.
_LEAST_PIN = 1e-3
#: How many of the equations with side effects a note names.
_MOST_EFFECTS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What depends only on the fingerprint, the mesh and the device: it outlives the trace.

    It holds no JAX objects: what a function closes over may be large, or a tracer.

    Attributes:
      model: what the compiler is expected to make of the program.
      candidates: schedules for all budgets, with the temporaries that the compiler is expected to
        need. By live bytes, none of the solver's other solutions needs less for less overhead.
        The unchanged function is among them.
      unchanged: the unchanged function.
      replays: the moments of the schedules replayed so far.
    """

    model: Model
    candidates: tuple[Candidate, ...]
    unchanged: Candidate
    replays: dict[Schedule, tuple[Moment, ...]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything to decide about one program on one device.

    Attributes:
      program: the traced function; on a mesh, one device's part.
      fingerprint: that of the program as traced.
      device: the seconds are at its rates.
      solver: finds the schedules to choose from.
      sweep: the graph and the schedules to choose from.
      corrections: what was learnt about the compiler, used to judge the candidates; None if the
        model alone says what they need.
    """

    program: Program
    fingerprint: str
    device: Device
    solver: Solver
    sweep: Sweep
    corrections: Corrections | None = None

    @property
    def model(self) -> Model:
        """What the compiler is expected to make of the program."""
        return self.sweep.model

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Schedules for all budgets, with the temporaries that they are expected to need."""
        return self.sweep.candidates

    @property
    def unchanged(self) -> Candidate:
        """The unchanged function."""
        return self.sweep.unchanged


_sweeps: Recent[tuple[str, tuple[ArrayType, ...], Compiler, Overhead, Solver, Gradients], Sweep] = (
    Recent(_MOST_SWEEPS)
)


def problem(
    program: Program,
    device: Device,
    *,
    measure: Overhead = Overhead.SECONDS,
    solver: Solver = DEFAULT_SOLVER,
    gradients: Gradients = Gradients.CONSUMED,
    off: frozenset[str] = frozenset(),
) -> Problem:
    """Builds the graph and sweeps all budgets, or takes both from an earlier call.

    Args:
      program: a traced function.
      device: the device to plan for, with its compiler.
      measure: what recomputation is counted in.
      solver: finds the schedules to choose from.
      gradients: what happens to them.
      off: names of compiler rules to switch off (``compilers.rules``).

    Raises:
      RematError: the solver does not take this program.
    """
    compiler = Compiler(device=device, off=off | not_yet(jax.__version_info__))
    fingerprint, made_for = program.fingerprint(), program.placed_fingerprint()
    # On a mesh, everything is counted for one device.
    program = per_device(program)
    key = (made_for, program.types, compiler, measure, solver, gradients)
    found = _sweeps.get(key)
    if found is None:
        with doing(f"planning {program.name} for {device.name}"), _no_collection():
            found = _sweeps.put(key, _sweep(program, compiler, measure, solver, gradients))
    return Problem(
        program=program, fingerprint=fingerprint, device=device, solver=solver, sweep=found
    )


def _sweep(
    program: Program, compiler: Compiler, measure: Overhead, solver: Solver, gradients: Gradients
) -> Sweep:
    linearization = linearize(program)
    expected = inner.model(program, linearization, compiler, gradients)
    graph = expected.graph
    # Do not start the search from jax.checkpoint's own policies: they crowd out better starts.
    default = isinstance(solver, Portfolio)
    alone = policies.alone(program, expected.roots, graph) if default else ()
    front = pareto(_candidates(program, graph, measure, solver) + judged(graph, alone), measure)
    ways = loops.ways(program, linearization, expected, measure)
    if ways:
        expected = loops.opened(expected, ways)
        search = functools.partial(_candidates, program, measure=measure, solver=solver)
        front = pareto(
            [*front, *loops.together(expected.graph, ways, front, search, measure)], measure
        )
    # What beats a policy in what is alive at once need not beat it in the heap.
    kept = {one.schedule: one for one in (*_spaced(front), *judged(graph, alone))}
    as_it_is = _modelled(expected, judge(graph, unchanged(graph)))
    return Sweep(
        model=expected,
        candidates=(*(_modelled(expected, one) for one in kept.values()), as_it_is),
        unchanged=as_it_is,
    )


def expected(of: Problem, schedules: Sequence[Schedule]) -> tuple[Candidate, ...]:
    """Schedules as candidates, with the temporaries that the model expects of each."""
    return tuple(_modelled(of.model, _judged(of.model, one)) for one in schedules)


def defaults(of: Problem) -> tuple[Candidate, ...]:
    """What each policy of ``jax.checkpoint`` does by itself, as candidates, good or bad."""
    alone = policies.alone(of.program, of.model.roots, of.model.graph)
    found = judged(of.model.graph, alone)
    if of.corrections is not None:
        return tuple(_expected(of, _admitted(of.model, one)) for one in found)
    return tuple(_modelled(of.model, one) for one in found)


def named_defaults(of: Problem) -> dict[str, Candidate]:
    """The unchanged function and what each policy does by itself, by label.

    Of those with the same figures, only the one with the shortest label. A policy that keeps
    everything is the unchanged function, and is left out.
    """
    model, program = of.model, of.program
    found = {"plain": of.unchanged}
    ways = {
        "": policies.schedules(program, model.roots, model.graph),
        ", per block": policies.schedules_per_block(
            program, model.roots, model.graph, blocks.blocks(program)
        ),
    }
    for suffix, schedules in ways.items():
        for (name, policy), schedule in zip(
            policies.default_policies().items(), schedules, strict=False
        ):
            if policy is jax.checkpoint_policies.everything_saveable:
                continue
            for one in judged(model.graph, [schedule]):
                found[name + suffix] = _modelled(model, one)
    shortest: dict[tuple[int, float], str] = {}
    for label, one in found.items():
        figures = (one.peak_bytes, one.overhead_seconds)
        shortest[figures] = min(shortest.get(figures, label), label, key=len)
    return {label: found[label] for label in shortest.values()}


def informed(of: Problem, learnt: Learnt, measure: Overhead) -> Problem:
    """The problem with what was learnt about the compiler: searched and judged again by it.

    Args:
      of: the problem; what was learnt about it before is forgotten.
      learnt: what was learnt about its program.
      measure: what recomputation is counted in.
    """
    expected = of.model
    corrections = Corrections(learnt, expected.graph)
    # Other solvers follow their papers, in which no step takes negative memory.
    signed = isinstance(of.solver, Portfolio)
    found: list[Candidate] = []
    with _no_collection():
        # Sizes alone leave the graph unchanged.
        graphs = corrections.graphs(expected.graph, signed=signed) if corrections.told else ()
        for graph in graphs:
            front = pareto(_candidates(of.program, graph, measure, of.solver), measure)
            found += [_admitted(expected, one) for one in _spaced(front)]
    known = [_judged(expected, one.schedule) for one in learnt.compiled]
    most = max(_FEWEST_REPLAYED, _REPLAYED // len(expected.graph))
    before = list(of.candidates)
    if corrections.told and len(before) > most:
        before = thinned(pareto(before, measure), most)
    found = [*before, *thinned(found, most), *known]
    by_schedule = {one.schedule: one for one in found}
    replays = of.sweep.replays if of.corrections is not None else {}
    sweep = dataclasses.replace(of.sweep, replays=replays)
    problem = dataclasses.replace(of, corrections=corrections, sweep=sweep)
    if corrections.told and signed:
        # Figures of a region with an opened loop do not carry over to others.
        whole = [one for one in by_schedule if not (one.loops or one.unchanged)]
        again = _recombined(problem, whole, measure, round(_RECOMBINED_SHARE * most))
        by_schedule |= {one.schedule: one for one in judged(expected.graph, again)}
    candidates = tuple(_expected(problem, one) for one in by_schedule.values())
    return dataclasses.replace(problem, sweep=dataclasses.replace(sweep, candidates=candidates))


def _recombined(
    of: Problem, known: Sequence[Schedule], measure: Overhead, most: int
) -> list[Schedule]:
    """Schedules made of regions of known ones, wherever the program repeats."""
    assert of.corrections is not None, "something was learnt"
    graph = of.model.graph
    parts = Parts(graph, of.corrections, priced(graph, measure).seconds)
    # Compiled ones first: nothing in them is a guess.
    for schedule in thinned(known[::-1], _FEWEST_REPLAYED):
        parts.add(schedule, replay(of, schedule))
    found = recombination.schedules(graph, parts.found, of.unchanged.peak_bytes, most=most)
    return [of.model.admitted(one) for one in found]


def _expected(of: Problem, one: Candidate) -> Candidate:
    """The candidate with the temporaries expected by what was learnt."""
    assert of.corrections is not None, "something was learnt"
    known_bytes = of.corrections.compiled_bytes(one.schedule)
    if known_bytes is None and one.schedule.unchanged:
        # What was learnt is about what is written differently.
        known_bytes = of.model.peak_bytes(one.schedule)
    if known_bytes is None:
        if of.corrections.told:
            model_bytes = of.corrections.peak_bytes(one.schedule, replay(of, one.schedule))
        else:
            model_bytes = of.model.peak_bytes(one.schedule)
        known_bytes = of.corrections.heap_bytes(model_bytes)
    return dataclasses.replace(one, peak_bytes=known_bytes)


def replay(of: Problem, schedule: Schedule) -> tuple[Moment, ...]:
    """The moments of a schedule by the model; they are cached with the sweep."""
    found = of.sweep.replays.get(schedule)
    if found is None:
        found = of.sweep.replays[schedule] = _simulate(*of.model.under(schedule)).moments
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Puts off the collection of reference cycles.

    The collector would go through everything that JAX has traced, a tenth of the time for a deep
    network, and a search makes almost no cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _candidates(
    program: Program, graph: Graph, measure: Overhead, solver: Solver
) -> list[Candidate]:
    found = solver.candidates(graph, measure)
    if isinstance(found, Refused):
        raise RematError(
            f"The solver {solver.name!r} does not take {program.name!r}: {found.message} The "
            "default, 'portfolio', takes any program."
        )
    return found


def _spaced(front: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose temporaries are worth asking the model for.

    Heaps take time to lay out and are harder to predict, so of candidates whose peaks hardly differ
    only the smallest is taken, and the one that recomputes least where that is worth it. Opened
    loops come in larger steps: with them, all that differ in overhead are taken.

    Args:
      front: candidates by ascending peak, and so by falling overhead.
    """
    spaced: list[Candidate] = []
    apart_bytes = 0.0
    for one, after in itertools.zip_longest(front, front[1:]):
        if not spaced or one.peak_bytes > apart_bytes:
            apart_bytes = one.peak_bytes * _APART
        elif after is not None:
            # The last one of all stays.
            is_last = after.peak_bytes > apart_bytes or bool(one.schedule.loops)
            is_cheaper = one.overhead_seconds < spaced[-1].overhead_seconds * _CHEAPER
            if not (is_last and is_cheaper):
                continue
        spaced.append(one)
    return spaced


def _admitted(expected: Model, one: Candidate) -> Candidate:
    """The candidate as the model admits it."""
    schedule = expected.admitted(one.schedule)
    return one if schedule == one.schedule else _judged(expected, schedule)


def _judged(expected: Model, schedule: Schedule) -> Candidate:
    """A schedule with its figures, including what runs again inside loops."""
    one = judge(expected.graph, schedule)
    seconds, flops = expected.recomputation(schedule)
    return dataclasses.replace(
        one,
        overhead_seconds=one.overhead_seconds + seconds,
        recomputed_flops=one.recomputed_flops + flops,
    )


def _modelled(expected: Model, one: Candidate) -> Candidate:
    """The candidate as the model admits it, with the temporaries it is expected to need."""
    one = _admitted(expected, one)
    return dataclasses.replace(one, peak_bytes=expected.peak_bytes(one.schedule))


def _simulate(expected: Model, schedule: Schedule) -> Simulation:
    """The referee's replay, plus what the compiler holds all along."""
    found = simulate(expected.graph_of(schedule), schedule)
    more = expected.held_bytes(schedule)
    seconds, flops = expected.recomputation(schedule)
    if not (more or seconds or flops):
        return found
    return dataclasses.replace(
        found,
        overhead_seconds=found.overhead_seconds + seconds,
        recomputed_flops=found.recomputed_flops + flops,
        peak_bytes=found.peak_bytes + more,
        moments=tuple(
            dataclasses.replace(moment, live_bytes=moment.live_bytes + more)
            for moment in found.moments
        ),
    )


def solve(of: Problem, objective: Objective) -> Candidate:
    """The candidate that the objective asks for.

    Raises:
      BudgetError: no candidate is within the budget.
    """
    candidates = list(of.candidates)
    measure = objective.overhead
    most = overhead_limit(of, objective)
    if objective.max_overhead is not None:
        return smallest_within(candidates, most, measure)
    budget_bytes = budget_bytes_of(of, objective)
    if budget_bytes is None:
        return least_memory([one for one in candidates if one.overhead(measure) <= most], measure)
    found = fastest_within(candidates, budget_bytes, measure)
    if found is None:
        least = smallest_within(candidates, float("inf"), measure)
        model, schedule = of.model.under(least.schedule)
        pins = _pins(model, _simulate(model, schedule), Names(of.program))[:5]
        raise BudgetError(
            f"No plan has temporaries within {format_bytes(budget_bytes)}: the lowest peak "
            f"that remat_opt reaches is {format_bytes(least.peak_bytes)} (the unchanged "
            f"function needs {format_bytes(of.unchanged.peak_bytes)}). Alive at that peak are "
            + "; ".join(
                f"{format_bytes(p.bytes)} {p.role}: "
                + ", at ".join(filter(None, (p.name.title, p.source)))
                for p in pins
            )
            + ". "
            + of.model.what_to_do(),
            budget_bytes=budget_bytes,
            least_peak_bytes=least.peak_bytes,
            pinning=tuple((p.name.title, p.bytes) for p in pins),
        )
    return found


def overhead_limit(of: Problem, objective: Objective) -> float:
    """The most recomputation where memory is minimised, in seconds or FLOPs.

    Nested regions go lower still, but at a price that the user must accept with a budget.
    """
    graph = of.model.graph
    seconds = objective.overhead is Overhead.SECONDS
    forward = graph.forward_seconds if seconds else float(graph.forward_flops)
    return (MOST_PASSES if objective.max_overhead is None else objective.max_overhead) * forward


def budget_bytes_of(of: Problem, objective: Objective) -> int | None:
    """The budget in bytes; a share refers to what the unchanged function needs.

    Raises:
      BudgetError: arguments, outputs and reserve alone fill the device's memory.
    """
    if objective.budget_share is not None:
        return round(objective.budget_share * of.unchanged.peak_bytes)
    if not objective.fit:
        return objective.budget_bytes
    arguments, outputs = step_bytes(of.program, of.device, objective.gradients)
    room = of.device.memory_bytes - arguments - outputs - objective.reserve_bytes
    if room <= 0:
        raise BudgetError(
            f"Nothing is left for temporaries on {of.device.name}: of its "
            f"{format_bytes(of.device.memory_bytes)}, arguments take {format_bytes(arguments)}, "
            f"outputs {format_bytes(outputs)}, and "
            f"{format_bytes(objective.reserve_bytes)} are reserved. Use a device with more "
            "memory, shard the parameters, or reserve less.",
            budget_bytes=max(room, 0),
            least_peak_bytes=0,
            pinning=(),
        )
    return room


def step_bytes(program: Program, device: Device, gradients: Gradients) -> tuple[int, int]:
    """Bytes of arguments (closed-over arrays among them) and of outputs of a step, on one device.

    Outputs are those of the function and, if gradients are returned, one gradient for each
    differentiated argument. Otherwise gradients are temporaries, which the prediction counts.
    """
    compiler, program = Compiler(device=device), per_device(program)

    def total(values: Sequence[int]) -> int:
        return sum(compiler.buffer_bytes(program.types[value]) for value in values)

    arguments = total((*program.constants, *program.arguments))
    outputs = total(program.output_values)
    if gradients is Gradients.RESULTS:
        outputs += total(program.differentiated)
    return arguments, outputs


def make(
    program: Program,
    device: Device,
    objective: Objective,
    solver: Solver = DEFAULT_SOLVER,
    learnt: Learnt | None = None,
) -> Plan:
    """Plans a program.

    Args:
      program: a traced function.
      device: the device whose rates weigh recomputation.
      objective: what is wanted.
      solver: the solver that decides.
      learnt: what was learnt about it by compiling, if anything.

    Raises:
      BudgetError: the budget cannot be reached.
      RematError: nothing is differentiated, or the solver does not take this program.
    """
    check_differentiated(program)
    if computes_nothing(program):
        return _nothing_to_plan(program, device, objective)
    of = problem(
        program,
        device,
        measure=objective.overhead,
        solver=solver,
        gradients=objective.gradients,
    )
    if learnt is not None:
        of = informed(of, learnt, objective.overhead)
    return describe(of, program, solve(of, objective), objective)


def check_differentiated(program: Program) -> None:
    """Raises RematError unless some argument is differentiated."""
    if not program.differentiated:
        raise RematError(
            "Nothing is differentiated: none of the arguments in argnums holds a floating-point "
            "array. Point argnums at the parameters."
        )


def _nothing_to_plan(program: Program, device: Device, objective: Objective) -> Plan:
    return Plan(
        function=program.name,
        fingerprint=program.fingerprint(),
        device=device.name,
        platform=device.platform,
        objective=objective,
        budget_bytes=objective.budget_bytes,
        solver="none",
        communicates_again=program.communicates_again,
        unchanged=True,
        stages=(),
        loops=(),
        decisions=(),
        loop_values=(),
        predicted=Prediction(
            temporary_bytes=0,
            model_bytes=0,
            plain_temporary_bytes=0,
            kept_bytes=0,
            overhead_seconds=0.0,
            forward_seconds=0.0,
            recomputed_flops=0,
            forward_flops=0,
            timeline=NOTHING,
            plain_timeline=NOTHING,
            pins=(),
        ),
        measured=None,
        resident=None,
        as_compiled=(),
        notes=("The function only returns its arguments or constants: there is nothing to plan.",),
        remat_opt_version=__version__,
        jax_version=jax.__version__,
    )


def describe(of: Problem, program: Program, chosen: Candidate, objective: Objective) -> Plan:
    """Writes a candidate down as a plan."""
    expected, schedule = of.model.under(chosen.schedule)
    graph = expected.graph
    simulation = _simulate(expected, schedule)
    moments, model_bytes = simulation.moments, chosen.peak_bytes
    if of.corrections is not None:
        model_bytes = expected.peak_bytes(schedule)
        if not schedule.unchanged:
            moments = of.corrections.moments(schedule, moments)
    region_of = schedule.region_of()
    stored, times = set(simulation.stored), Counter(simulation.recomputed)
    names = Names(program)
    decisions = []
    for vertex, root in enumerate(expected.roots):
        if vertex in stored:
            fate = "kept"
        elif times[vertex]:
            fate = "recomputed"
        else:
            fate = "not needed"
        decisions.append(
            Decision(
                root=root,
                name=names.of(root),
                region=region_of[vertex],
                fate=fate,
                times=times[vertex],
                bytes=graph.bytes[vertex],
                seconds=graph.seconds[vertex],
                flops=graph.flops[vertex],
            )
        )
    return Plan(
        function=program.name,
        fingerprint=of.fingerprint,
        device=of.device.name,
        platform=of.device.platform,
        objective=objective,
        budget_bytes=budget_bytes_of(of, objective),
        solver=str(of.solver),
        communicates_again=of.program.communicates_again,
        unchanged=schedule.unchanged,
        stages=expected.stages(schedule),
        loops=schedule.loops,
        decisions=tuple(decisions),
        loop_values=loop_values(of.program, expected, schedule),
        predicted=Prediction(
            temporary_bytes=chosen.peak_bytes,
            model_bytes=model_bytes,
            plain_temporary_bytes=of.unchanged.peak_bytes,
            kept_bytes=simulation.stored_bytes + simulation.stored_inside_bytes,
            overhead_seconds=simulation.overhead_seconds,
            forward_seconds=graph.forward_seconds,
            recomputed_flops=simulation.recomputed_flops,
            forward_flops=graph.forward_flops,
            timeline=_timeline(expected, schedule, simulation, moments),
            plain_timeline=_plain_timeline(of.model),
            pins=_pins(expected, simulation, names),
        ),
        measured=None,
        resident=None,
        as_compiled=(),
        notes=_notes(of, chosen.schedule),
        remat_opt_version=__version__,
        jax_version=jax.__version__,
    )


def _timeline(
    expected: Model, schedule: Schedule, found: Simulation, moments: Sequence[Moment]
) -> Timeline:
    """What is alive when under a schedule.

    Args:
      expected: the model that was replayed.
      schedule: likewise.
      found: the replay.
      moments: its moments, with what is expected to be alive.
    """
    return timeline(
        expected.graph,
        schedule,
        found,
        live_bytes=[moment.live_bytes for moment in moments],
        gradient_bytes=expected.gradient_bytes,
        roots=expected.roots,
    )


def _plain_timeline(expected: Model) -> Timeline:
    own, schedule = expected.under(unchanged(expected.graph))
    found = _simulate(own, schedule)
    return _timeline(own, schedule, found, found.moments)


def _pins(expected: Model, simulation: Simulation, names: Names) -> tuple[Pin, ...]:
    """The largest arrays alive at the peak."""
    return tuple(
        Pin(name=names.of(expected.roots[item.vertex]), role=item.role, bytes=item.bytes)
        for item in simulation.alive[:_MOST_PINS]
        if item.bytes >= _LEAST_PIN * simulation.peak_bytes
    )


def _mesh_notes(program: Program) -> Iterator[str]:
    where = program.placement
    if where is None:
        return
    axes = ", ".join(f"{name} {size}" for name, size in where.axes)
    if is_split(program):
        yield f"All figures are for one of the {where.devices} devices of the mesh ({axes})."
    else:
        yield unsplit_note(program)


def unsplit_note(program: Program) -> str:
    """What to do if it is unknown how a program on a mesh is split."""
    assert program.placement is not None, "it is on a mesh"
    return (
        f"{program.name!r} runs on a mesh of {program.placement.devices} devices, and nothing "
        "shows how its arguments are split over it, as is usual under jax.jit. Bytes are "
        f"counted as if each device held all of them. Call {program.name}.plan(...) with the "
        "sharded arguments first, or with jax.ShapeDtypeStructs that have the same "
        "shardings; or constrain values inside with jax.lax.with_sharding_constraint."
    )


def _side_effects(of: Problem) -> Iterator[str]:
    """What must run only once, and so is under no checkpoint."""
    found = Counter(
        f"{equation.operation.primitive} at {internals.source_line(equation.jax_equation) or '?'}"
        for equation in of.program.equations
        if equation.once
    )
    if not found:
        return
    collectives = any(
        one.once and internals.at_most_communicates(one.jax_equation)
        for one in of.program.equations
    )
    told = [
        place if times == 1 else f"{place}, {times} times"
        for place, times in list(found.items())[:_MOST_EFFECTS]
    ]
    more = [f"and {len(found) - _MOST_EFFECTS} more"] if len(found) > _MOST_EFFECTS else []
    yield (
        "These run once, in the order of the function, and under no checkpoint, because they "
        "have side effects, call back to Python or communicate with other devices: "
        f"{'; '.join([*told, *more])}. What their derivatives read is kept. No iterations of a "
        "loop with one inside share a checkpoint."
        + (' collectives="recompute" lets collectives run again.' if collectives else "")
    )


def _guessed_loops(of: Problem) -> Iterator[str]:
    """Which loops do not say how often they run."""

    def is_guessed(operation: Operation) -> bool:
        return any(
            body.guessed or any(map(is_guessed, body.operations)) for body in operation.bodies
        )

    found = dict.fromkeys(
        f"{equation.operation.primitive} at {internals.source_line(equation.jax_equation) or '?'}"
        for equation in of.program.equations
        if is_guessed(equation.operation)
    )
    if found:
        places = [*list(found)[:_MOST_EFFECTS], *(["..."] if len(found) > _MOST_EFFECTS else [])]
        yield (
            f"The program does not say how often a while_loop runs: {'; '.join(places)}. It "
            f"counts as {GUESSED_TURNS} turns. fori_loop and scan do say."
        )


def _notes(of: Problem, schedule: Schedule) -> tuple[str, ...]:
    expected = of.model
    notes = [*_mesh_notes(of.program), *expected.notes(schedule)]
    if expected.estimated_flops_share > 0.005:
        notes.append(
            f"{expected.estimated_flops_share:.1%} of the forward FLOPs come from estimated "
            "cost rules; remat_opt.costs.register adds exact ones."
        )
    notes += _side_effects(of)
    notes += _guessed_loops(of)
    if expected.assumed:
        notes.append(
            "JAX gave no derivative for "
            + ", ".join(expected.assumed)
            + "; all inputs and outputs of these equations are assumed to be needed."
        )
    return tuple(notes)
