from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest
from scipy.optimize import linprog

from remat_opt.offload.chain import Chain
from remat_opt.offload.simulator import NoSchedule, OffloadAnswer, Status, Transfers, simulate
from remat_opt.solvers.offload_greedy import fractional, greedy
from tests.chains import hard_chains


def least_idle(chain: Chain) -> float | None:
    """The least idle time with fractional transfers, by a linear program without any order.

    Per operation there is a gap before it and the operation itself; in each, any bytes of any
    present activation may be sent, and any that are away fetched. Variables: the gaps, and for each
    span and activation the bytes sent and fetched. Within a span sending comes first, so memory is
    largest at its ends.
    """
    stages = len(chain)
    x, y = chain.activation_bytes, chain.gradient_bytes
    beta = chain.bandwidth_bytes_per_second
    steps = [("F", i, chain.forward_seconds[i]) for i in range(stages)]
    steps += [("B", i, chain.backward_seconds[i]) for i in reversed(range(stages))]
    at = {(kind, i): position for position, (kind, i, _) in enumerate(steps)}
    count = len(steps)
    spans = 2 * count  # span 2 p is the gap before step p, 2 p + 1 the step
    # Variables: gap of each step, then sent and fetched of each span and activation.
    size = count + 2 * spans * stages

    def sent(span, j):
        return count + span * stages + j

    def fetched(span, j):
        return count + (spans + span) * stages + j

    rows, limits = [], []

    def at_most(entries, limit):
        row = np.zeros(size)
        for column, factor in entries:
            row[column] += factor
        rows.append(row)
        limits.append(limit)

    def away(span, j):
        """Bytes of x_j on the host after a span, as a linear form."""
        entries = [(sent(s, j), 1.0) for s in range(span + 1)]
        return entries + [(fetched(s, j), -1.0) for s in range(span + 1)]

    bounds = [(0.0, None)] * size
    for span in range(spans):
        step, running = divmod(span, 2)
        kind, i, seconds = steps[step]
        # The link.
        moved = [(sent(span, j), 1.0) for j in range(stages)]
        moved += [(fetched(span, j), 1.0) for j in range(stages)]
        at_most(moved + ([] if running else [(step, -beta)]), beta * seconds if running else 0.0)
        for j in range(stages):
            made = 0 if j == 0 else 2 * (at["F", j - 1] + 1)
            read = 2 * at["B", j] + 1
            if not made <= span < read:
                bounds[sent(span, j)] = bounds[fetched(span, j)] = (0.0, 0.0)
            at_most(away(span, j), x[j])
            at_most([(column, -factor) for column, factor in away(span, j)], 0.0)
            if span == read - 1:
                at_most(away(span, j), 0.0)
        # The memory at both ends of a step.
        if running:
            own = chain.forward_extra_bytes[i] if kind == "F" else chain.backward_extra_bytes[i]
            if kind == "B":
                own += y[i] + y[i + 1]
            held = [
                j
                for j in range(stages + 1)
                if (j == 0 or at["F", j - 1] <= step) and (j == 0 or at["B", j - 1] >= step)
            ]
            free = [j for j in held if j < stages and at["F", j] < step]
            room = chain.device_bytes - own - sum(x[j] for j in held)
            for moment in (span - 1, span):
                entries = [pair for j in free for pair in away(moment, j)]
                at_most([(column, -factor) for column, factor in entries], room)
    cost = np.zeros(size)
    cost[:count] = 1.0
    result = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), bounds=bounds)
    return None if result.status == 2 else float(result.fun)


def check_fractional(chain):
    answer = fractional(chain)
    assert isinstance(answer, OffloadAnswer)
    assert answer.status is Status.OPTIMAL
    assert answer.simulation.violations == ()
    assert answer.simulation.makespan_seconds == answer.makespan_seconds
    assert answer.makespan_seconds >= answer.lower_bound_seconds
    assert sum(answer.amounts_bytes) == chain.excess_bytes
    idle = least_idle(chain)
    assert idle == pytest.approx(answer.simulation.idle_seconds, abs=1e-6)


def check_greedy(chain):
    best = fractional(chain)
    for transfers in Transfers:
        answer = greedy(chain, transfers=transfers)
        assert isinstance(answer, OffloadAnswer)
        assert answer.simulation.violations == ()
        assert answer.simulation.makespan_seconds == answer.makespan_seconds
        assert answer.makespan_seconds >= best.makespan_seconds
        # The first k, and k is the least.
        gone = [i for i, amount in enumerate(answer.amounts_bytes) if amount]
        sizes = [(i, size) for i, size in enumerate(chain.activation_bytes) if size]
        assert gone == [i for i, _ in sizes[: len(gone)]]
        assert sum(answer.amounts_bytes) >= chain.excess_bytes
        if gone:
            assert sum(answer.amounts_bytes[: gone[-1]]) < chain.excess_bytes
        if chain.peak_bytes <= chain.device_bytes:
            assert not gone
            assert answer.status is Status.OPTIMAL
            assert answer.makespan_seconds == chain.compute_seconds


def example(device_bytes: int) -> Chain:
    return Chain(
        forward_seconds=(1.0, 1.0, 1.0),
        backward_seconds=(2.0, 2.0, 2.0),
        activation_bytes=(4, 4, 4, 4),
        gradient_bytes=(4, 4, 4, 4),
        forward_extra_bytes=(0, 0, 0),
        backward_extra_bytes=(0, 0, 0),
        bandwidth_bytes_per_second=2,
        device_bytes=device_bytes,
    )


def test_nothing_leaves_where_the_chain_fits():
    for solve in (fractional, greedy):
        answer = solve(example(24))
        assert isinstance(answer, OffloadAnswer)
        assert answer.amounts_bytes == (0, 0, 0)
        assert answer.makespan_seconds == answer.lower_bound_seconds == 9.0
        assert answer.status is Status.OPTIMAL


def test_what_is_missing_leaves_first():
    assert fractional(example(19)).amounts_bytes == (4, 1, 0)
    assert greedy(example(19)).amounts_bytes == (4, 4, 0)
    assert greedy(example(19)).status is Status.FEASIBLE


def test_too_little_memory_is_proven_so():
    for solve in (fractional, greedy):
        answer = solve(example(15))
        assert isinstance(answer, NoSchedule)
        assert answer.proven
        assert answer.least_device_bytes == 16
        assert "needs 16 bytes" in answer.reason
        assert isinstance(solve(example(16)), OffloadAnswer)


def test_memory_buys_time():
    figures = [fractional(example(size)).makespan_seconds for size in range(16, 26)]
    assert figures == sorted(figures, reverse=True)
    assert figures[0] > figures[-1]


def test_sending_more_is_never_faster():
    # Lemma 2.
    chain = example(18)
    previous = fractional(chain).makespan_seconds
    for extra in range(1, 7):
        total = chain.excess_bytes + extra
        amounts = (min(4, total), min(4, total - 4), max(0, total - 8))
        result = simulate(chain, amounts, Transfers.FRACTIONAL)
        assert result.makespan_seconds >= previous
        previous = result.makespan_seconds


@hypothesis.settings(max_examples=20)
@hypothesis.given(hard_chains(most_stages=6))
def test_fractional_is_optimal(chain):
    check_fractional(chain)


@hypothesis.given(hard_chains(most_stages=7))
def test_greedy_is_legal_and_rounds_up(chain):
    check_greedy(chain)


@hypothesis.given(hard_chains(most_stages=7))
def test_below_the_least_memory_there_is_no_schedule(chain):
    least = chain.least_device_bytes
    assert isinstance(greedy(dataclasses.replace(chain, device_bytes=least)), OffloadAnswer)
    if least:
        assert isinstance(greedy(dataclasses.replace(chain, device_bytes=least - 1)), NoSchedule)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=5))
def test_fractional_is_optimal_often(chain):
    check_fractional(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=8))
def test_greedy_is_legal_and_rounds_up_often(chain):
    check_greedy(chain)
