"""The referee of offloading: plays a training step with transfers, event by event.

Problem. Given how many bytes of each activation of a chain leave for the host, when does
each operation and each transfer happen, how long does the step take, and does it fit?

Method. Two parts here and a third elsewhere; each checks the others.

1. ``simulate`` builds the no-wait ordered schedule: activations leave in increasing order
   and come back in decreasing order, and everything happens as early as possible, except
   that prefetches happen as *late* as possible: the backward phase is built in reversed
   time, where it is a forward phase, and then pushed against the forward phase until memory
   or the link forbids. (Reading 12: Prop. 1 as printed fails. Prefetches that start as early
   as possible fill the memory that an earlier backward step needs, and deadlock.)
2. ``replay`` takes any timeline, even one that ``simulate`` did not build, and follows the
   bytes from event to event: what it takes, and every rule it breaks.
3. ``offload_equations`` has the paper's equations (1)-(10) for the same schedule with
   fractional transfers; solvers use them where building timelines would be too slow. They
   share no line with this file, and the tests hold both to the same figures, exactly.

The rules are those of Sec. 3.1. One transfer at a time. F_i needs x_i and x_{i+1}; B_i needs x_i,
x_{i+1}, y_i and y_{i+1}. Reading 14: x_j is freed only after B_{j-1}, and x_i stays, whole, until
F_i ends, even if its transfer was faster. y_{L+1} exists from the start of B_L. Transfers are
*integral* (assumption E: memory is freed when the whole activation has left, and reserved when it
begins to come back) or *fractional* (Secs. 4 and 5: memory follows the transfer byte by byte). In a
no-wait schedule a fractional transfer need not be interrupted: each is one piece, shorter than the
activation if only a part leaves.

Why not a ready-made tool: event simulators (simpy) wait for resources greedily, which deadlocks
here; and times here are whole numbers (``LinkChain``), so that two ways to the same figure must
agree exactly.

Complexity: ``simulate`` takes time O(L^2) in the worst case and O(L) where few transfers
are pending at a time; ``replay`` O(L * events).

Guarantee: with fractional transfers, the best schedule for the given amounts; with integral
ones the best *ordered* one (reading 15: giving up the order gains a little, rarely).

What is left out: transfers that share the link with others, different bandwidths for the
two directions, offloading of gradients (assumption A).

Reference: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep
Neural Network Training* (Euro-Par 2020), Secs. 3 and 5.2.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence

from remat_opt.errors import GraphError
from remat_opt.offload.chain import Chain, LinkChain, in_grains


class Transfers(enum.Enum):
    """How a transfer frees and reserves memory."""

    FRACTIONAL = "fractional"
    INTEGRAL = "integral"


class Kind(enum.Enum):
    """What a piece of a timeline does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One operation or one transfer.

    Attributes:
      kind: which kind it is.
      index: number of the stage, or of the activation.
      start_grains: when it starts (see ``LinkChain`` for grains).
      end_grains: when it ends. A transfer moves ``end_grains - start_grains``.
    """

    kind: Kind
    index: int
    start_grains: int
    end_grains: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Who does what when.

    Attributes:
      operations: F_0..F_L, B_L..B_0, in order of execution.
      transfers: all transfers, in order of time.
    """

    operations: tuple[Piece, ...]
    transfers: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The memory held from one event to the next.

    Attributes:
      seconds: when the span begins.
      until_seconds: when it ends.
      start_bytes: held right after its beginning.
      end_bytes: held right before its end; other than ``start_bytes`` only if a fractional
        transfer is under way. Between the two, memory is a straight line.
    """

    seconds: float
    until_seconds: float
    start_bytes: int
    end_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSimulation:
    """What a timeline takes.

    Attributes:
      makespan_seconds: from the start of F_0 to the end of B_0.
      idle_seconds: the part of it in which no operation runs.
      transferred_bytes: moved to the host; as many come back.
      peak_bytes: the most memory held on the device.
      memory: memory over time.
      violations: every rule the timeline breaks, in words; none if it is legal.
      timeline: what was played.
    """

    makespan_seconds: float
    idle_seconds: float
    transferred_bytes: int
    peak_bytes: int
    memory: tuple[Sample, ...]
    violations: tuple[str, ...]
    timeline: Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadlock:
    """Why there is no schedule for the given amounts.

    Attributes:
      operation: ``forward`` or ``backward``.
      stage: of the first operation found that never fits.
      missing_bytes: by how much it exceeds the memory once all transfers before it are done.
    """

    operation: Kind
    stage: int
    missing_bytes: int


class Status(enum.Enum):
    """What a solver knows about its answer."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadAnswer:
    """What an offloading solver found.

    Attributes:
      solver: its name.
      status: ``optimal`` for the kind of transfers it is exact for, else ``feasible``.
      transfers: the kind of transfers that the figures hold for.
      amounts_bytes: bytes of x_0..x_L that leave.
      makespan_seconds: the solver's own figure.
      lower_bound_seconds: no schedule is shorter.
      simulation: the referee's figures.
      parameters: what the solver chose on the way, name by name.
    """

    solver: str
    status: Status
    transfers: Transfers
    amounts_bytes: tuple[int, ...]
    makespan_seconds: float
    lower_bound_seconds: float
    simulation: OffloadSimulation
    parameters: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoSchedule:
    """An offloading solver's answer if it finds no schedule.

    Attributes:
      solver: its name.
      least_device_bytes: below this much memory no solver finds one.
      proven: whether there is none at all; otherwise only the solver's own rules forbid it.
      reason: in words.
    """

    solver: str
    least_device_bytes: int
    proven: bool
    reason: str


def no_schedule(solver: str, chain: Chain, reason: str) -> NoSchedule:
    """The answer of a solver that found nothing; says whether there is anything to find."""
    least = chain.least_device_bytes
    proven = chain.device_bytes < least
    if proven:
        reason = (
            f"One operation alone needs {least} bytes for its inputs and outputs, but the device "
            f"has {chain.device_bytes}: offloading cannot help."
        )
    return NoSchedule(solver=solver, least_device_bytes=least, proven=proven, reason=reason)


# ------------------------------------------------------------------- the no-wait ordered schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """One phase from its outer end, in its own direction of time.

    ``starts`` and ``ends`` are per stage; ``moves`` are (activation, start, end).
    """

    starts: list[int]
    ends: list[int]
    moves: list[tuple[int, int, int]]

    @property
    def end(self) -> int:
        return self.ends[-1]

    @property
    def link_end(self) -> int:
        return self.moves[-1][2] if self.moves else 0


def simulate(
    chain: Chain, amounts_bytes: Sequence[int], transfers: Transfers
) -> OffloadSimulation | Deadlock:
    """Builds the no-wait ordered schedule that offloads the given amounts, and replays it.

    Args:
      chain: what to run, and where.
      amounts_bytes: bytes of x_0..x_L that leave and come back. With integral transfers
        each is nothing or all.
      transfers: how they free and reserve memory.

    Raises:
      GraphError: amounts that do not match the chain.
    """
    _check_amounts(chain, amounts_bytes, transfers)
    exact = in_grains(chain)
    timeline = schedule(exact, _grains(exact, amounts_bytes), transfers)
    if isinstance(timeline, Deadlock):
        return timeline
    return replay(chain, timeline, transfers)


def schedule(chain: LinkChain, amounts: Sequence[int], transfers: Transfers) -> Timeline | Deadlock:
    """The no-wait ordered schedule; amounts are in grains and not checked."""
    x, y = chain.activations, chain.gradients
    forward_own = [x[i + 1] + chain.forward_extra[i] for i in range(len(chain))]
    backward_own = [x[i + 1] + y[i] + y[i + 1] + chain.backward_extra[i] for i in range(len(chain))]
    # x_i may leave as soon as F_{i-1} has ended; in reversed time, only once B_i has.
    there = _phase(chain, chain.forward, forward_own, amounts, transfers, before=True)
    if isinstance(there, tuple):
        return _deadlock(chain, Kind.FORWARD, there)
    back = _phase(chain, chain.backward, backward_own, amounts, transfers, before=False)
    if isinstance(back, tuple):
        return _deadlock(chain, Kind.BACKWARD, back)
    gap = _join(chain, there, back, forward_own, backward_own, transfers)

    makespan = there.end + gap + back.end
    operations = [
        Piece(kind=Kind.FORWARD, index=i, start_grains=start, end_grains=end)
        for i, (start, end) in enumerate(zip(there.starts, there.ends, strict=True))
    ]
    operations += [
        Piece(
            kind=Kind.BACKWARD,
            index=i,
            start_grains=makespan - back.ends[i],
            end_grains=makespan - back.starts[i],
        )
        for i in reversed(range(len(chain)))
    ]
    moves = [
        Piece(kind=Kind.OFFLOAD, index=i, start_grains=start, end_grains=end)
        for i, start, end in there.moves
    ]
    moves += [
        Piece(
            kind=Kind.PREFETCH,
            index=i,
            start_grains=makespan - end,
            end_grains=makespan - start,
        )
        for i, start, end in reversed(back.moves)
    ]
    return Timeline(operations=tuple(operations), transfers=tuple(moves))


def _phase(
    chain: LinkChain,
    durations: Sequence[int],
    own: Sequence[int],
    amounts: Sequence[int],
    transfers: Transfers,
    *,
    before: bool,
) -> _Phase | tuple[int, int]:
    """One phase as early as possible; or the stage that never fits, and by how much.

    Operation i holds x_0..x_i, less what has left of x_0..x_{i-1}, and ``own[i]``.
    """
    phase = _Phase(starts=[], ends=[], moves=[])
    clock = link = held = 0
    for i, duration in enumerate(durations):
        held += chain.activations[i]
        if before and amounts[i]:
            link = max(link, clock) + amounts[i]
            phase.moves.append((i, link - amounts[i], link))
        needed = held + own[i] - chain.device
        when = _freed(phase.moves, needed, transfers, below=i)
        if when is None:
            return i, needed - sum(end - start for j, start, end in phase.moves if j < i)
        phase.starts.append(max(clock, when))
        clock = phase.starts[-1] + duration
        phase.ends.append(clock)
        if not before and amounts[i]:
            link = max(link, clock) + amounts[i]
            phase.moves.append((i, link - amounts[i], link))
    return phase


def _freed(
    moves: Sequence[tuple[int, int, int]], needed: int, transfers: Transfers, *, below: int
) -> int | None:
    """When the transfers of activations before ``below`` have freed what is needed.

    0 if nothing is needed, None if they never free that much.
    """
    if needed <= 0:
        return 0
    for activation, start, end in moves:
        if activation >= below:
            break
        if end - start >= needed:
            return start + needed if transfers is Transfers.FRACTIONAL else end
        needed -= end - start
    return None


def _join(
    chain: LinkChain,
    there: _Phase,
    back: _Phase,
    forward_own: Sequence[int],
    backward_own: Sequence[int],
    transfers: Transfers,
) -> int:
    """The least time between the end of F_L and the start of B_L."""
    # In ordered schedules the link sends everything before it fetches anything.
    gap = max(0, there.link_end + back.link_end - there.end - back.end) if there.moves else 0
    held = 0
    for j in range(len(chain)):
        held += chain.activations[j]
        # B_j may run before the first prefetch, while the last offloads still free memory ...
        if back.ends[j] > back.link_end:
            when = _freed(there.moves, held + backward_own[j] - chain.device, transfers, below=j)
            assert when is not None, "alone, B_j fits once all has left"
            gap = max(gap, when - there.end - (back.end - back.ends[j]))
        # ... and F_j after the last offload, while the first prefetches already take some.
        if there.ends[j] > there.link_end:
            when = _freed(back.moves, held + forward_own[j] - chain.device, transfers, below=j)
            assert when is not None, "alone, F_j fits before anything is back"
            gap = max(gap, when - back.end - (there.end - there.ends[j]))
    return gap


def _deadlock(chain: LinkChain, kind: Kind, found: tuple[int, int]) -> Deadlock:
    return Deadlock(operation=kind, stage=found[0], missing_bytes=chain.bytes(found[1]))


def _grains(chain: LinkChain, amounts_bytes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(amount * chain.grains_per_byte) for amount in amounts_bytes)


def _check_amounts(chain: Chain, amounts_bytes: Sequence[int], transfers: Transfers) -> None:
    if len(amounts_bytes) != len(chain):
        raise GraphError(
            f"{len(amounts_bytes)} amounts are given for {len(chain)} stages; give one for each "
            "of x_0 to x_L."
        )
    for i, amount in enumerate(amounts_bytes):
        size = chain.activation_bytes[i]
        if not 0 <= amount <= size or (transfers is Transfers.INTEGRAL and amount not in (0, size)):
            allowed = "0 or all" if transfers is Transfers.INTEGRAL else "between 0 and all"
            raise GraphError(
                f"{amount} bytes of x_{i} are to be offloaded; it must be {allowed} of its {size}."
            )


# --------------------------------------------------------------------------------- the referee


def replay(chain: Chain, timeline: Timeline, transfers: Transfers) -> OffloadSimulation:
    """Plays a timeline and says what it takes and which rules it breaks.

    Times in the timeline are in the grains of ``in_grains(chain)``.
    """
    exact = in_grains(chain)
    violations = _order_violations(exact, timeline, transfers)
    samples: list[Sample] = []
    peak = 0
    clock = 0
    for number, operation in enumerate(timeline.operations):
        spans = [(operation.start_grains, operation.end_grains, True)]
        if operation.start_grains > clock:
            spans.insert(0, (clock, operation.start_grains, False))
        for start, end, running in spans:
            most = 0
            for left, right in _spans(timeline, start, end):
                first = _held(exact, timeline, transfers, number, left, right, running, at=left)
                last = _held(exact, timeline, transfers, number, left, right, running, at=right)
                most = max(most, first, last)
                samples.append(
                    Sample(
                        seconds=exact.seconds(left),
                        until_seconds=exact.seconds(right),
                        start_bytes=exact.bytes(first),
                        end_bytes=exact.bytes(last),
                    )
                )
            peak = max(peak, most)
            if most > exact.device:
                when = f"{'during' if running else 'before'} {_name(operation)}"
                violations.append(
                    f"{exact.bytes(most)} bytes are held {when}, but the device has "
                    f"{chain.device_bytes}."
                )
        clock = operation.end_grains
    busy = sum(one.end_grains - one.start_grains for one in timeline.operations)
    return OffloadSimulation(
        makespan_seconds=exact.seconds(clock),
        idle_seconds=exact.seconds(clock - busy),
        transferred_bytes=exact.bytes(
            sum(
                one.end_grains - one.start_grains
                for one in timeline.transfers
                if one.kind is Kind.OFFLOAD
            )
        ),
        peak_bytes=exact.bytes(peak),
        memory=tuple(samples),
        violations=tuple(violations),
        timeline=timeline,
    )


def _name(piece: Piece) -> str:
    letter = {"forward": "F_", "backward": "B_", "offload": "offload of x_"}
    return f"{letter.get(piece.kind.value, 'prefetch of x_')}{piece.index}"


def _spans(timeline: Timeline, start: int, end: int) -> list[tuple[int, int]]:
    """Splits a span at the link's events; a span of no length stays whole."""
    events = {start, end}
    for move in timeline.transfers:
        events.update(at for at in (move.start_grains, move.end_grains) if start < at < end)
    ordered = sorted(events)
    return list(itertools.pairwise(ordered)) or [(start, end)]


def _held(
    chain: LinkChain,
    timeline: Timeline,
    transfers: Transfers,
    number: int,
    left: int,
    right: int,
    running: bool,
    *,
    at: int,
) -> int:
    """Grains held at one end of a span in which no transfer begins or ends.

    ``number`` operations are over; the next runs, or is about to. At its instant, an operation of
    no length sees all offloads that have ended, and no prefetch that begins.
    """
    stages = len(chain)
    # F_j is operation j, B_j operation 2 L + 1 - j.
    resident = {
        j: size
        for j, size in enumerate(chain.activations)
        if j - 1 < number + running and (j == 0 or 2 * stages - j >= number)
    }
    for move in timeline.transfers:
        moved = min(max(at - move.start_grains, 0), move.end_grains - move.start_grains)
        if transfers is Transfers.INTEGRAL:
            size = move.end_grains - move.start_grains
            over, begun = move.end_grains <= left, move.start_grains < right
            moved = size * (over if move.kind is Kind.OFFLOAD else begun)
        # Reading 14: x_i stays until F_i ends.
        if move.index in resident and number > move.index:
            resident[move.index] += -moved if move.kind is Kind.OFFLOAD else moved
    total = sum(resident.values())
    operation = timeline.operations[number]
    if operation.kind is Kind.FORWARD:
        return total + running * chain.forward_extra[operation.index]
    if running:
        total += chain.gradients[operation.index] + chain.backward_extra[operation.index]
    # B_{i+1} leaves y_{i+1}; y_{L+1} appears with B_L.
    if running or operation.index + 1 < stages:
        total += chain.gradients[operation.index + 1]
    return total


def _order_violations(chain: LinkChain, timeline: Timeline, transfers: Transfers) -> list[str]:
    """Every rule broken, apart from that on memory."""
    found: list[str] = []
    stages = len(chain)
    expected = [(Kind.FORWARD, i, chain.forward[i]) for i in range(stages)]
    expected += [(Kind.BACKWARD, i, chain.backward[i]) for i in reversed(range(stages))]
    given = [
        (one.kind, one.index, one.end_grains - one.start_grains) for one in timeline.operations
    ]
    if given != expected:
        found.append("The operations are not F_0..F_L, B_L..B_0 with the times of the chain.")
        return found
    for pieces in (timeline.operations, timeline.transfers):
        if pieces and pieces[0].start_grains < 0:
            found.append(f"{_name(pieces[0])} starts before the beginning.")
        for first, second in itertools.pairwise(pieces):
            if second.start_grains < first.end_grains:
                found.append(f"{_name(second)} starts before the end of {_name(first)}.")
    ops = {(one.kind, one.index): one for one in timeline.operations}
    sent: dict[int, Piece] = {}
    fetched: dict[int, Piece] = {}
    for move in timeline.transfers:
        seen = sent if move.kind is Kind.OFFLOAD else fetched
        if move.index in seen or not 0 <= move.index < stages:
            found.append(f"{_name(move)} is given twice, or x_{move.index} may not leave.")
        seen[move.index] = move
    for i, move in sent.items():
        size = move.end_grains - move.start_grains
        whole = chain.activations[i] if i < stages else 0
        if not (size == whole if transfers is Transfers.INTEGRAL else 0 < size <= whole):
            found.append(f"{_name(move)} moves {chain.bytes(size)} of {chain.bytes(whole)} bytes.")
        if i and move.start_grains < ops[Kind.FORWARD, i - 1].end_grains:
            found.append(f"{_name(move)} starts before F_{i - 1} has made it.")
    if sent.keys() != fetched.keys():
        found.append("What is offloaded is not what is prefetched.")
        return found
    for i, move in fetched.items():
        away = sent[i]
        if move.end_grains - move.start_grains != away.end_grains - away.start_grains:
            found.append(f"{_name(move)} does not move what the offload moved.")
        if move.start_grains < away.end_grains:
            found.append(f"{_name(move)} starts before the offload has ended.")
        if move.end_grains > ops[Kind.BACKWARD, i].start_grains:
            found.append(f"{_name(move)} ends after the start of B_{i}, which reads it.")
    return found
