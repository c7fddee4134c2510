"""DynProg: the best set of whole activations to offload.

Problem. Each activation of a chain leaves entirely or not at all. Which should, so that the
step fits the device and takes the least time? The problem is NP-complete in the weak sense
even if transfers may be interrupted (Theorem 3).

Method. With transfers that free memory byte by byte, what is still to come depends on the decisions
so far only through three numbers (``offload_equations.Position``), besides the idle time so far:
Algorithm 1 walks through the stages with a table from those numbers to the least idle time. Two
kinds of states are left out, neither of which can lead to a better end:

- a state from which, by the bytes that must still leave and the time that is left, no end
  is as good as one already known (offloading the first k activations, for the best k);
- a state that another *dominates*: one that keeps no more bytes, and whose idle time is no
  larger even after waiting until its link has caught up. Waiting is always allowed, so the other
  state can do all that this one can.

``dynamic_program`` is the paper's: memory in ``slots`` (500), sizes rounded so that what is
found is feasible (Sec. 5.3.2), except that activations are first rounded optimistically, by
partial sums. As long as the set found does not fit the true chain, the activation whose
rounded size is below the true one, and closest to it, goes up by one slot.

Why not a ready-made tool: an integer program would need a variable for every event; the
state space is the paper's contribution.

Complexity: O(L M^2 (sum |x_i| + u_{F_i} beta)) with everything in slots, times the number of rounds
(at most the number of activations); 2^L at worst if nothing is rounded. Tables above
``most_states`` states are refused.

Guarantee: ``exact_dynamic_program`` is optimal for whole activations with fractional transfers.
With integral transfers, which free memory only at their end, the same set in the same order is a
schedule (DynProg as a heuristic); it need not be the best ordered one, and the best ordered one
need not be the best (reading 15). ``dynamic_program`` finds a set that fits; if rounding leaves
none in the table, it returns the best first-k set and says so.

What is left out: nothing of the paper's.

Reference: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep
Neural Network Training* (Euro-Par 2020), Sec. 5.3, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from remat_opt.offload.chain import Chain, LinkChain, in_grains
from remat_opt.offload.equations import (
    Position,
    idle_by_equations,
    middle,
    middle_gap,
    origin,
    step,
)
from remat_opt.offload.simulator import (
    Deadlock,
    NoSchedule,
    OffloadAnswer,
    Status,
    Transfers,
    no_schedule,
    schedule,
    simulate,
)

#: The paper's number of slots.
SLOTS = 500
#: States per stage beyond which the table is refused.
MOST_STATES = 200_000
#: A state is compared with at most this many others to see whether one dominates it.
_MOST_COMPARED = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What Algorithm 1 found.

    Attributes:
      chosen: for each of x_0..x_L, whether it leaves.
      idle: idle time, in the grains of the chain that was solved.
      states: entries of the largest table.
    """

    chosen: tuple[bool, ...]
    idle: int
    states: int


class _TooManyStatesError(Exception):
    """The table grew beyond the limit."""


def exact_dynamic_program(
    chain: Chain,
    *,
    transfers: Transfers = Transfers.FRACTIONAL,
    most_states: int = MOST_STATES,
) -> OffloadAnswer | NoSchedule:
    """Algorithm 1 on the chain as it is.

    Args:
      chain: what to run, and where.
      transfers: which kind the schedule and the referee's figures are for; the set is
        always the best one for fractional transfers.
      most_states: the largest table that is tried.
    """
    name = "offload_exact_dynamic_program"
    try:
        found = algorithm_1(in_grains(chain), most_states)
    except _TooManyStatesError as error:
        return no_schedule(
            name,
            chain,
            f"Its table has more than {most_states} states at stage {error}. Use "
            "dynamic_program, which rounds memory to slots.",
        )
    if found is None:
        return no_schedule(name, chain, "Nothing that may leave makes it fit.")
    return _answer(name, chain, transfers, found, exact=True)


def dynamic_program(
    chain: Chain,
    *,
    transfers: Transfers = Transfers.INTEGRAL,
    slots: int = SLOTS,
    most_states: int = MOST_STATES,
) -> OffloadAnswer | NoSchedule:
    """DynProg: Algorithm 1 with memory in slots, and the iterative rounding of Sec. 5.3.2.

    Args:
      chain: what to run, and where.
      transfers: which kind the schedule and the referee's figures are for.
      slots: into how many parts the device's memory is divided.
      most_states: the largest table that is tried.
    """
    name = "offload_dynamic_program"
    if chain.device_bytes < chain.least_device_bytes:
        return no_schedule(name, chain, "")
    exact = in_grains(chain)
    if chain.peak_bytes <= chain.device_bytes:
        nothing = Choice(chosen=(False,) * len(chain), idle=0, states=1)
        return _answer(name, chain, transfers, nothing)
    share = Fraction(slots, chain.device_bytes)
    true_sizes = [size * share for size in chain.activation_bytes]
    sizes = _partial_sums(true_sizes, math.ceil)
    for rounds in itertools.count(1):
        try:
            found = algorithm_1(_in_slots(chain, slots, sizes), most_states)
        except _TooManyStatesError as error:
            return no_schedule(
                name,
                chain,
                f"Its table has more than {most_states} states at stage {error}. Use fewer slots "
                f"than {slots}.",
            )
        if found is None:
            break
        if not isinstance(schedule(exact, _amounts(exact, found.chosen), transfers), Deadlock):
            return _answer(name, chain, transfers, found, rounds=rounds)
        below = [i for i, size in enumerate(true_sizes) if sizes[i] < size]
        if not below:
            break
        sizes[min(below, key=lambda i: true_sizes[i] - sizes[i])] += 1
    fallback = _best_first_k(exact)
    assert fallback is not None, "with the least memory, sending everything is a schedule"
    return _answer(name, chain, transfers, fallback)


def algorithm_1(chain: LinkChain, most_states: int = MOST_STATES) -> Choice | None:
    """The set of whole activations with the least idle time; None if none fits.

    Raises:
      _TooManyStatesError: a table with more than ``most_states`` entries.
    """
    known = _best_first_k(chain)
    to_beat = None if known is None else known.idle
    needs, times = _outlook(chain)
    # States as (M_F, Delta_F, Delta_B), each with the least idle time and how it came about:
    # a number whose bit i says whether x_i leaves.
    table: dict[tuple[int, int, int], tuple[Position, int]] = {(0, 0, 0): (origin(chain), 0)}
    largest = 1
    for i in range(len(chain)):
        following: dict[tuple[int, int, int], tuple[Position, int]] = {}
        for position, chosen in table.values():
            for amount in (0, chain.activations[i])[: 1 + (chain.activations[i] > 0)]:
                after = step(chain, i, position, amount)
                if after is None:
                    continue
                kept = after.memory - max(0, after.to_send)
                bound = (
                    after.idle
                    + after.to_send
                    + after.to_fetch
                    + 2 * max(0, needs[i + 1] + kept - chain.device)
                    - times[i + 1]
                )
                if to_beat is not None and max(bound, after.idle) > to_beat:
                    continue
                key = (after.memory, after.to_send, after.to_fetch)
                old = following.get(key)
                if old is None or after.idle < old[0].idle:
                    following[key] = (after, chosen | (1 << i) if amount else chosen)
        if len(following) > most_states:
            raise _TooManyStatesError(i)
        table = {
            (one.memory, one.to_send, one.to_fetch): (one, chosen)
            for one, chosen in _undominated(following.values())
        }
        largest = max(largest, len(table))
    terms = middle(chain)
    best = min(
        (
            (position.idle + middle_gap(chain, terms, position), chosen)
            for position, chosen in table.values()
        ),
        default=None,
    )
    if best is None:
        return None
    return Choice(
        chosen=tuple(bool(best[1] >> i & 1) for i in range(len(chain))),
        idle=best[0],
        states=largest,
    )


def _undominated(
    states: Iterable[tuple[Position, int]],
) -> list[tuple[Position, int]]:
    """The states that none of those before them dominates, by kept bytes and idle time."""
    ordered = sorted(
        states,
        key=lambda pair: (
            pair[0].memory - max(0, pair[0].to_send),
            pair[0].idle,
            pair[0].to_send + pair[0].to_fetch,
            pair[1],
        ),
    )
    found: list[tuple[Position, int]] = []
    for state in ordered:
        one = state[0]
        for other, _ in itertools.islice(reversed(found), _MOST_COMPARED):
            wait = max(0, other.to_send - one.to_send) + max(0, other.to_fetch - one.to_fetch)
            if other.idle + wait <= one.idle:
                break
        else:
            found.append(state)
    return found


def _outlook(chain: LinkChain) -> tuple[list[int], list[int]]:
    """What the operations from stage i on need and take, for i = 0..L + 1.

    Returns:
      The most that any of them holds of what is made from stage i on (x_i is counted with the bytes
      kept before); and their time.
    """
    x, y = chain.activations, chain.gradients
    needs, times = [0], [0]
    for i in reversed(range(len(chain))):
        extra = max(chain.forward_extra[i], chain.backward_extra[i] + y[i] + y[i + 1])
        needs.append(x[i + 1] + max(extra, needs[-1]))
        times.append(times[-1] + chain.forward[i] + chain.backward[i])
    return needs[::-1], times[::-1]


def _best_first_k(chain: LinkChain) -> Choice | None:
    """The best set of the form x_0..x_{k-1}."""
    best: Choice | None = None
    for k in range(len(chain) + 1):
        chosen = tuple(i < k for i in range(len(chain)))
        idle = idle_by_equations(chain, _amounts(chain, chosen))
        if idle is not None and (best is None or idle < best.idle):
            best = Choice(chosen=chosen, idle=idle, states=0)
    return best


def _amounts(chain: LinkChain, chosen: Sequence[bool]) -> tuple[int, ...]:
    return tuple(
        size if leaves else 0 for size, leaves in zip(chain.activations, chosen, strict=False)
    )


def _partial_sums(
    numbers: Sequence[Fraction], round_to_int: Callable[[Fraction], int]
) -> list[int]:
    """Whole numbers whose partial sums are those of ``numbers``, rounded."""
    sums = [round_to_int(total) for total in itertools.accumulate(numbers)]
    return [after - before for before, after in itertools.pairwise([0, *sums])]


def _in_slots(chain: Chain, slots: int, sizes: Sequence[int]) -> LinkChain:
    """The chain in slots (Sec. 5.3.2): what is held rounded up, what the link moves down."""
    share = Fraction(slots, chain.device_bytes)
    bandwidth = Fraction(chain.bandwidth_bytes_per_second)

    def up(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(math.ceil(number * share) for number in numbers)

    def down(seconds: Sequence[float]) -> tuple[int, ...]:
        moved = [Fraction(time) * bandwidth * share for time in seconds]
        return tuple(_partial_sums(moved, math.floor))

    return LinkChain(
        forward=down(chain.forward_seconds),
        backward=down(chain.backward_seconds),
        activations=tuple(sizes),
        gradients=up(chain.gradient_bytes),
        forward_extra=up(chain.forward_extra_bytes),
        backward_extra=up(chain.backward_extra_bytes),
        device=slots,
        grains_per_byte=share,
        grains_per_second=share * bandwidth,
    )


def _answer(
    name: str,
    chain: Chain,
    transfers: Transfers,
    found: Choice,
    *,
    rounds: int = 0,
    exact: bool = False,
) -> OffloadAnswer:
    amounts = tuple(
        size if leaves else 0
        for size, leaves in zip(chain.activation_bytes, found.chosen, strict=False)
    )
    simulation = simulate(chain, amounts, transfers)
    assert not isinstance(simulation, Deadlock), "the equations found it feasible"
    exact = exact and transfers is Transfers.FRACTIONAL
    makespan = simulation.makespan_seconds
    if exact:
        grains = in_grains(chain)
        makespan = grains.seconds(found.idle + sum(grains.forward) + sum(grains.backward))
    return OffloadAnswer(
        solver=name,
        status=Status.OPTIMAL if exact or not simulation.idle_seconds else Status.FEASIBLE,
        transfers=transfers,
        amounts_bytes=amounts,
        makespan_seconds=makespan,
        lower_bound_seconds=chain.lower_bound_seconds,
        simulation=simulation,
        parameters=(("rounds", rounds), ("states", found.states)),
    )
