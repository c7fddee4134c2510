"""The equations of Sec. 5.2: idle time of an ordered schedule, stage by stage.

Problem. ``offload_simulator`` builds a schedule event by event. A solver that walks through
millions of partial schedules needs less: how does offloading x_i, or not, change the idle
time from here on?

Method. A no-wait ordered schedule with fractional transfers is built from both ends towards the
middle, the backward phase in reversed time. At stage i, only four numbers from all earlier
decisions matter (``Position``): memory, what is still to be sent, what must be fetched before, and
the idle time so far. ``step`` is equations (1)-(8), ``middle_gap`` (9) and (10).

Why not a ready-made tool: there is none; these are the paper's own.

Complexity: O(1) for a step, O(1) for the middle after O(L) preparation.

Guarantee: equal to the simulation of the same schedule, to the last grain, also for parts of
activations (the paper states them for whole ones). This needs reading 13, which is cited at each
line it changes.

What is left out: integral transfers; their memory moves in jumps, for which the paper has no
equations. ``offload_simulator.simulate`` plays them.

Reference: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep
Neural Network Training* (Euro-Par 2020), Sec. 5.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.offload.chain import Chain, LinkChain, in_grains


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The state of a schedule with fractional transfers before F_i and, mirrored, after B_i.

    Attributes:
      memory: M_{F_i}, held on the device at the end of F_{i-1}.
      to_send: Delta_{F_i}, how much of x_0..x_{i-1} is offloaded after that; if none, minus the
        time for which the link has been idle.
      to_fetch: Delta_{B_i}, how much of x_0..x_{i-1} is prefetched before B_{i-1} starts (reading
        13: not of x_L..x_i, as printed); if none, minus the time until the link starts to.
      idle: the sum of the gaps so far, of both phases.
    """

    memory: int
    to_send: int
    to_fetch: int
    idle: int


def origin(chain: LinkChain) -> Position:
    """Before F_0 and after B_0: IDLE(0, |x_0|, 0, 0) = 0."""
    return Position(memory=chain.activations[0], to_send=0, to_fetch=0, idle=0)


def step(chain: LinkChain, i: int, position: Position, amount: int) -> Position | None:
    """Equations (1)-(8): past F_i and B_i, when ``amount`` of x_i is offloaded.

    Returns:
      The position at i + 1, or None if F_i or B_i can never run.
    """
    x, y, limit = chain.activations, chain.gradients, chain.device
    waiting = max(0, position.to_send)
    backward_waiting = max(0, position.to_fetch)
    backward_memory = y[i] + backward_waiting + position.memory - waiting  # the identity in 5.2.1
    forward_needed = position.memory + chain.forward_extra[i] + x[i + 1] - limit
    # Reading 13: Eq. 6 needs ex^B, not ex^F.
    backward_needed = backward_memory + chain.backward_extra[i] + x[i + 1] + y[i + 1] - limit
    # Reading 13: Algorithm 1 tests with Delta where Delta-plus is meant.
    if forward_needed > waiting or backward_needed > backward_waiting:
        return None
    forward_gap = max(0, forward_needed)  # Eq. 1
    backward_gap = max(0, backward_needed)  # Eq. 6
    moved = forward_gap + chain.forward[i]
    moved_back = backward_gap + chain.backward[i]
    if amount:
        memory = position.memory + x[i + 1] - min(waiting + amount, moved)  # Eq. 3
        to_send = waiting + amount - moved  # Eq. 2
        to_fetch = amount + max(0, position.to_fetch - moved_back)  # Eq. 7
    else:
        memory = position.memory + x[i + 1] - min(waiting, moved)  # Eq. 5
        to_send = position.to_send - moved  # Eq. 4
        to_fetch = position.to_fetch - moved_back  # Eq. 8
    return Position(
        memory=memory,
        to_send=to_send,
        to_fetch=to_fetch,
        idle=position.idle + forward_gap + backward_gap,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """What ``middle_gap`` reads of a chain, computed once.

    The paper takes the maxima only over the operations with U_j < Av. Taking them over all is the
    same: every operation fits once everything has left, so R_j + M - M_GPU is at most what is still
    to be moved, and if U_j >= Av the term is at most that less Av, the term before it.

    Attributes:
      forward: the largest R^F_j - U^F_j.
      backward: the largest R^B_j - U^B_j.
    """

    forward: int
    backward: int


def middle(chain: LinkChain) -> Middle:
    """The terms U^F, R^F, U^B and R^B of equations (9) and (10), from the middle outwards."""
    x, y = chain.activations, chain.gradients
    forward: list[int] = []
    backward: list[int] = []
    forward_time = backward_time = later = 0
    for j in reversed(range(len(chain))):
        # Reading 13: R^F_j lacks -|y_{L+1}|, which is not there before B_L.
        forward.append(chain.forward_extra[j] - later - y[-1] - forward_time)
        # Reading 13: R^B_j needs |y_{j+1}|, where |y_{j-1}| is printed.
        backward.append(chain.backward_extra[j] + y[j] + y[j + 1] - later - backward_time)
        forward_time += chain.forward[j]
        backward_time += chain.backward[j]
        later += x[j + 1]
    return Middle(forward=max(forward), backward=max(backward))


def middle_gap(chain: LinkChain, terms: Middle, position: Position) -> int:
    """Equations (9) and (10): the idle time between F_L and B_L, at position L + 1."""
    to_send, to_fetch = position.to_send, position.to_fetch
    if to_send <= 0 and to_fetch <= 0:
        return 0
    if to_send > 0 and to_fetch > 0:
        return to_send + to_fetch
    # Reading 13: the paper calls the terms below upper bounds; they are lower bounds.
    if to_send > 0:  # Eq. 9; Av_B = -to_fetch
        worst = terms.backward + position.memory - chain.device
    else:  # Eq. 10; Av_F = -to_send
        backward_memory = chain.gradients[-1] + to_fetch + position.memory
        worst = terms.forward + backward_memory - chain.device
    return max(0, to_send + to_fetch, worst)


def idle_by_equations(chain: LinkChain, amounts: Sequence[int]) -> int | None:
    """Idle time of the no-wait ordered schedule with fractional transfers, in grains.

    Args:
      chain: what to run.
      amounts: grains of each of x_0..x_L that leave; parts are allowed.

    Returns:
      The sum of all gaps, or None if there is no schedule.
    """
    position: Position | None = origin(chain)
    for i, amount in enumerate(amounts):
        assert position is not None
        position = step(chain, i, position, amount)
        if position is None:
            return None
    assert position is not None
    return position.idle + middle_gap(chain, middle(chain), position)


def seconds_by_equations(chain: Chain, amounts_bytes: Sequence[int]) -> float | None:
    """Makespan of the no-wait ordered schedule with fractional transfers, by the equations."""
    exact = in_grains(chain)
    idle = idle_by_equations(
        exact, [int(amount * exact.grains_per_byte) for amount in amounts_bytes]
    )
    if idle is None:
        return None
    return exact.seconds(idle + sum(exact.forward) + sum(exact.backward))
