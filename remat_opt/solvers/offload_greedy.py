"""Greedy: offload the first activations, and no more than must leave.

Problem. Choose how much of each activation of a chain goes to the host and comes back, so
that the step fits the device and takes the least time.

Method. Whatever a schedule sends, it may as well send in order, from x_0 on (Lemma 1), and sending
less than another schedule never takes longer (Lemma 2). Any schedule must send Q = M_peak - M_GPU
(Prop. 2). So send exactly Q, from the first activations; the last of them may leave in part
(``fractional``). If only whole activations may leave, round up: the first k, where k is the least
that makes up Q (``greedy``). Reading 14: if the chain fits, Q is negative and nothing leaves.

Why not a ready-made tool: it is three lines; all the work is the simulation's.

Complexity: O(L) besides one simulation.

Guarantee: ``fractional`` is optimal among all schedules with fractional transfers (Theorem 2),
whatever their order; the tests compare it with a linear program that ignores order. ``greedy`` is
feasible whenever any schedule is, and with integral transfers the only bound on its distance to the
optimum is that to ``Chain.lower_bound_seconds`` (Prop. 3), which is in the answer.

What is left out: nothing of the paper's.

Reference: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep
Neural Network Training* (Euro-Par 2020), Sec. 4.
"""

from __future__ import annotations

from remat_opt.offload.chain import Chain
from remat_opt.offload.equations import seconds_by_equations
from remat_opt.offload.simulator import (
    Deadlock,
    NoSchedule,
    OffloadAnswer,
    Status,
    Transfers,
    no_schedule,
    simulate,
)


def fractional_amounts(chain: Chain) -> tuple[int, ...]:
    """Bytes of x_0..x_L that leave when exactly M_peak - M_GPU do (Theorem 2)."""
    missing = chain.excess_bytes
    amounts = []
    for size in chain.activation_bytes[:-1]:
        amounts.append(min(size, missing))
        missing -= amounts[-1]
    return tuple(amounts)


def whole_amounts(chain: Chain) -> tuple[int, ...]:
    """The same, with the last activation that leaves rounded up to all of it."""
    return tuple(
        size if amount else 0
        for size, amount in zip(chain.activation_bytes, fractional_amounts(chain), strict=False)
    )


def fractional(chain: Chain) -> OffloadAnswer | NoSchedule:
    """The best schedule if any part of an activation may leave, by equations (1)-(10)."""
    name = "offload_fractional"
    amounts = fractional_amounts(chain)
    makespan = seconds_by_equations(chain, amounts)
    simulation = simulate(chain, amounts, Transfers.FRACTIONAL)
    if makespan is None or isinstance(simulation, Deadlock):
        return no_schedule(name, chain, "The first activations leave too late.")
    return OffloadAnswer(
        solver=name,
        status=Status.OPTIMAL,
        transfers=Transfers.FRACTIONAL,
        amounts_bytes=amounts,
        makespan_seconds=makespan,
        lower_bound_seconds=chain.lower_bound_seconds,
        simulation=simulation,
    )


def greedy(
    chain: Chain, *, transfers: Transfers = Transfers.INTEGRAL
) -> OffloadAnswer | NoSchedule:
    """The no-wait ordered schedule that offloads the first k activations.

    Args:
      chain: what to run, and where.
      transfers: how whole activations free and take memory on their way.
    """
    name = "offload_greedy"
    amounts = whole_amounts(chain)
    simulation = simulate(chain, amounts, transfers)
    if isinstance(simulation, Deadlock):
        return no_schedule(name, chain, "The first activations leave too late.")
    return OffloadAnswer(
        solver=name,
        # If no operation ever waits, no schedule can be shorter.
        status=Status.FEASIBLE if simulation.idle_seconds else Status.OPTIMAL,
        transfers=transfers,
        amounts_bytes=amounts,
        makespan_seconds=simulation.makespan_seconds,
        lower_bound_seconds=chain.lower_bound_seconds,
        simulation=simulation,
    )
