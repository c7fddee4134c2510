from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from remat_opt.offload.chain import Chain, in_grains
from remat_opt.offload.equations import idle_by_equations
from remat_opt.offload.simulator import (
    Deadlock,
    NoSchedule,
    OffloadAnswer,
    OffloadSimulation,
    Status,
    Transfers,
    schedule,
    simulate,
)
from remat_opt.solvers.offload_dynamic_program import (
    SLOTS,
    algorithm_1,
    dynamic_program,
    exact_dynamic_program,
)
from tests.chains import best_makespan, chains, hard_chains, middles, subsets


def first(case):
    return case[0]


def best_of_all_subsets(chain: Chain, transfers: Transfers) -> float:
    """The least makespan over every set of whole activations, by the event simulation."""
    exact = in_grains(chain)
    found = []
    for amounts_bytes in subsets(chain):
        amounts = [int(amount * exact.grains_per_byte) for amount in amounts_bytes]
        timeline = schedule(exact, amounts, transfers)
        if not isinstance(timeline, Deadlock):
            found.append(timeline.operations[-1].end_grains)
    return exact.seconds(min(found))


def check_exact(chain):
    answer = exact_dynamic_program(chain)
    assert isinstance(answer, OffloadAnswer)
    assert answer.status is Status.OPTIMAL
    assert answer.simulation.violations == ()
    # Its own figure is by the equations, the referee's by events.
    assert answer.makespan_seconds == answer.simulation.makespan_seconds
    assert answer.makespan_seconds == best_of_all_subsets(chain, Transfers.FRACTIONAL)
    assert answer.makespan_seconds >= answer.lower_bound_seconds * (1 - 1e-12)
    # The same set sent whole is a schedule too, but no proof of anything.
    whole = exact_dynamic_program(chain, transfers=Transfers.INTEGRAL)
    assert isinstance(whole, OffloadAnswer)
    assert whole.amounts_bytes == answer.amounts_bytes
    assert whole.simulation.violations == ()
    assert whole.makespan_seconds >= answer.makespan_seconds
    if whole.status is Status.OPTIMAL:
        assert whole.simulation.idle_seconds == 0


def check_slots(chain, slots):
    best_ordered = best_of_all_subsets(chain, Transfers.INTEGRAL)
    for transfers in Transfers:
        answer = dynamic_program(chain, transfers=transfers, slots=slots)
        assert isinstance(answer, OffloadAnswer)
        assert answer.simulation.violations == ()
        assert answer.simulation.peak_bytes <= chain.device_bytes
        assert answer.makespan_seconds == answer.simulation.makespan_seconds
        assert answer.makespan_seconds >= answer.lower_bound_seconds * (1 - 1e-12)
    assert answer.transfers is Transfers.INTEGRAL
    assert answer.makespan_seconds >= best_ordered
    return answer.makespan_seconds, best_ordered


def check_slots_without_rounding(chain):
    """One slot per byte, and whole numbers everywhere: nothing is rounded."""
    if chain.device_bytes:
        answer = dynamic_program(chain, transfers=Transfers.FRACTIONAL, slots=chain.device_bytes)
        assert isinstance(answer, OffloadAnswer)
        assert answer.makespan_seconds == best_of_all_subsets(chain, Transfers.FRACTIONAL)


def example(device_bytes: int) -> Chain:
    """The instance of Theorem 3 (Fig. 3) for the numbers 4, 2, 3, 1, of sum 10, so V = 5.

    x_{n+2} has size V, and F_n and B_n alone take time: one second, in which V bytes can
    leave. A schedule of two seconds sends a set that sums to exactly V.
    """
    sizes = (4, 2, 3, 1)
    stages = len(sizes) + 3
    seconds = tuple(float(i == len(sizes)) for i in range(stages))
    return Chain(
        forward_seconds=seconds,
        backward_seconds=seconds,
        activation_bytes=(*sizes, 0, 0, 5, 0),
        gradient_bytes=(0,) * (stages + 1),
        forward_extra_bytes=(0,) * stages,
        backward_extra_bytes=(0,) * stages,
        bandwidth_bytes_per_second=5,
        device_bytes=device_bytes,
    )


def test_two_partition():
    # Fig. 3: M_GPU = 2 V.
    for solve in (exact_dynamic_program, dynamic_program):
        answer = solve(example(10))
        assert isinstance(answer, OffloadAnswer)
        assert answer.makespan_seconds == 2.0
        assert sum(answer.amounts_bytes) == 5
    # The first k are 4 + 2 bytes, of which one is too much.
    first_two = simulate(example(10), (4, 2, 0, 0, 0, 0, 0), Transfers.FRACTIONAL)
    assert isinstance(first_two, OffloadSimulation)
    assert first_two.makespan_seconds == 2 * 6 / 5


def test_nothing_leaves_where_the_chain_fits():
    for solve in (exact_dynamic_program, dynamic_program):
        answer = solve(example(15))
        assert isinstance(answer, OffloadAnswer)
        assert answer.status is Status.OPTIMAL
        assert sum(answer.amounts_bytes) == 0
        assert answer.makespan_seconds == answer.lower_bound_seconds == 2.0


def test_too_little_memory_is_proven_so():
    for solve in (exact_dynamic_program, dynamic_program):
        answer = solve(example(4))
        assert isinstance(answer, NoSchedule)
        assert answer.proven
        assert answer.least_device_bytes == 6
        assert "offloading cannot help" in answer.reason


def test_too_large_a_table_is_refused():
    exact = exact_dynamic_program(example(9), most_states=1)
    assert isinstance(exact, NoSchedule)
    assert not exact.proven
    assert exact.reason == (
        "Its table has more than 1 states at stage 0. Use dynamic_program, which rounds memory "
        "to slots."
    )
    rounded = dynamic_program(example(9), most_states=1)
    assert isinstance(rounded, NoSchedule)
    assert rounded.reason.endswith("Use fewer slots than 500.")


def test_sizes_are_rounded_until_the_set_fits():
    parameters = []
    for device_bytes in range(6, 15):
        answer = dynamic_program(example(device_bytes), slots=2)
        assert isinstance(answer, OffloadAnswer)
        assert answer.simulation.violations == ()
        parameters.append(dict(answer.parameters)["rounds"])
    # 0: no set fits once rounded to two slots, so the best first-k set stands in.
    assert min(parameters) == 0
    assert max(parameters) > 1


def test_without_any_memory():
    nothing = dataclasses.replace(example(0), activation_bytes=(0,) * 8)
    answer = dynamic_program(nothing)
    assert isinstance(answer, OffloadAnswer)
    assert answer.makespan_seconds == 2.0


def test_idle_time_is_in_grains():
    chain = example(9)
    found = algorithm_1(in_grains(chain))
    assert found is not None
    assert (
        in_grains(chain).seconds(found.idle) == exact_dynamic_program(chain).simulation.idle_seconds
    )


@hypothesis.given(hard_chains(most_stages=7))
def test_exact_is_the_best_of_all_subsets(chain):
    check_exact(chain)


@hypothesis.settings(max_examples=40)
@hypothesis.given(hard_chains(most_stages=10))
def test_what_is_left_out_of_the_table_is_not_missed(chain):
    exact = in_grains(chain)
    found = algorithm_1(exact)
    assert found is not None
    idles = (
        idle_by_equations(exact, [int(amount * exact.grains_per_byte) for amount in amounts])
        for amounts in subsets(chain)
    )
    assert found.idle == min(idle for idle in idles if idle is not None)


@hypothesis.given(hard_chains(most_stages=7))
def test_slots_give_legal_schedules(chain):
    check_slots(chain, SLOTS)
    check_slots(chain, 6)


@hypothesis.given(hard_chains(most_stages=7))
def test_slots_without_rounding_are_exact(chain):
    check_slots_without_rounding(chain)


def check_against_search(chain):
    """No ordered schedule, of any set and with any waiting, is shorter."""
    best = {
        whole: min(
            found
            for amounts in subsets(chain)
            if (found := best_makespan(chain, amounts, whole=whole)) is not None
        )
        for whole in (True, False)
    }
    exact = exact_dynamic_program(chain)
    assert isinstance(exact, OffloadAnswer)
    assert exact.makespan_seconds == best[False]
    rounded = dynamic_program(chain)
    assert isinstance(rounded, OffloadAnswer)
    assert rounded.makespan_seconds >= best[True] == best_of_all_subsets(chain, Transfers.INTEGRAL)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    st.one_of(chains(most_stages=4, bandwidths=(1,)), middles(most_stages=4).map(first))
)
def test_no_ordered_schedule_is_shorter(chain):
    check_against_search(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=7))
def test_exact_is_the_best_of_all_subsets_often(chain):
    check_exact(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=6))
def test_slots_give_legal_schedules_often(chain):
    check_slots(chain, SLOTS)
    check_slots_without_rounding(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.one_of(chains(most_stages=3, bandwidths=(1,)), middles(most_stages=3).map(first))
)
def test_no_ordered_schedule_is_shorter_often(chain):
    check_against_search(chain)
