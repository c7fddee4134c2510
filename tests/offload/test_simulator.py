from __future__ import annotations

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from remat_opt.errors import GraphError
from remat_opt.offload.chain import Chain, in_grains
from remat_opt.offload.equations import seconds_by_equations
from remat_opt.offload.simulator import (
    Deadlock,
    Kind,
    OffloadSimulation,
    Timeline,
    Transfers,
    no_schedule,
    replay,
    simulate,
)
from tests.chains import best_makespan, chains, middles


@st.composite
def cases(draw, *, whole: bool, most_stages: int = 7, bandwidths=(1, 2)):
    chain = draw(chains(most_stages=most_stages, bandwidths=bandwidths))
    amounts = [
        draw(st.sampled_from((0, size)) if whole else st.integers(0, size))
        for size in chain.activation_bytes[:-1]
    ]
    return chain, tuple(amounts)


def example() -> Chain:
    """Two stages; F_1 has to wait for half of x_0, which leaves at one byte a second."""
    return Chain(
        forward_seconds=(1.0, 1.0),
        backward_seconds=(1.0, 1.0),
        activation_bytes=(4, 2, 2),
        gradient_bytes=(0, 0, 0),
        forward_extra_bytes=(0, 0),
        backward_extra_bytes=(0, 0),
        bandwidth_bytes_per_second=1,
        device_bytes=6,
    )


def check_simulation(transfers, chain, amounts):
    result = simulate(chain, amounts, transfers)
    if isinstance(result, OffloadSimulation):
        assert result.violations == ()
        assert result.peak_bytes <= chain.device_bytes
        assert result.peak_bytes == max(
            max(sample.start_bytes, sample.end_bytes) for sample in result.memory
        )
        assert result.makespan_seconds >= chain.lower_bound_seconds * (1 - 1e-12)
        assert result.idle_seconds == pytest.approx(
            result.makespan_seconds - chain.compute_seconds, abs=1e-9
        )
        assert result.transferred_bytes == sum(amounts)
        spans = [sample for sample in result.memory if sample.until_seconds > sample.seconds]
        for first, second in itertools.pairwise(spans):
            assert first.until_seconds == second.seconds
    if transfers is Transfers.FRACTIONAL:
        by_equations = seconds_by_equations(chain, amounts)
        if isinstance(result, Deadlock):
            assert by_equations is None
        else:
            assert by_equations == result.makespan_seconds
    return result


def test_a_small_schedule_step_by_step():
    result = simulate(example(), (2, 0), Transfers.FRACTIONAL)
    assert isinstance(result, OffloadSimulation)
    # F_0 [0, 1], x_0 leaves [0, 2], but is freed only from the end of F_0 on; F_1 [2, 3].
    operations = [(one.kind, one.index, one.start_grains) for one in result.timeline.operations]
    assert operations == [
        (Kind.FORWARD, 0, 0),
        (Kind.FORWARD, 1, 2),
        (Kind.BACKWARD, 1, 3),
        (Kind.BACKWARD, 0, 6),
    ]
    moves = [(one.kind, one.start_grains, one.end_grains) for one in result.timeline.transfers]
    # Reading 12: as late as possible, so not before B_1 has freed x_2.
    assert moves == [(Kind.OFFLOAD, 0, 2), (Kind.PREFETCH, 4, 6)]
    assert result.makespan_seconds == 7.0
    assert result.idle_seconds == 3.0
    assert [(one.seconds, one.start_bytes, one.end_bytes) for one in result.memory] == [
        (0.0, 6, 6),
        (1.0, 5, 4),
        (2.0, 6, 6),
        (3.0, 6, 6),
        (4.0, 4, 6),
        (6.0, 6, 6),
    ]
    assert result.peak_bytes == 6


def test_whole_transfers_take_longer():
    result = simulate(example(), (4, 0), Transfers.INTEGRAL)
    assert isinstance(result, OffloadSimulation)
    assert result.violations == ()
    # x_0 leaves [0, 4], F_1 and B_1 follow, then x_0 comes back.
    assert result.makespan_seconds == 4 + 1 + 1 + 4 + 1


def test_deadlocks_are_told():
    tight = dataclasses.replace(example(), device_bytes=5)
    assert simulate(tight, (0, 0), Transfers.FRACTIONAL) == Deadlock(
        operation=Kind.FORWARD, stage=0, missing_bytes=1
    )
    assert simulate(example(), (0, 2), Transfers.INTEGRAL) == Deadlock(
        operation=Kind.FORWARD, stage=1, missing_bytes=2
    )


def test_no_schedule_says_whether_there_is_one():
    own = no_schedule("any", example(), "Its rules forbid it.")
    assert (own.proven, own.least_device_bytes, own.reason) == (False, 6, "Its rules forbid it.")
    none = no_schedule("any", dataclasses.replace(example(), device_bytes=5), "")
    assert none.proven
    assert "needs 6 bytes" in none.reason
    assert "has 5" in none.reason


@pytest.mark.parametrize(
    ("amounts", "transfers", "message"),
    [
        ((1,), Transfers.FRACTIONAL, "1 amounts are given for 2 stages"),
        ((5, 0), Transfers.FRACTIONAL, "5 bytes of x_0.*between 0 and all of its 4"),
        ((0, -1), Transfers.FRACTIONAL, "-1 bytes of x_1"),
        ((3, 0), Transfers.INTEGRAL, "0 or all of its 4"),
    ],
)
def test_bad_amounts_are_refused(amounts, transfers, message):
    with pytest.raises(GraphError, match=message):
        simulate(example(), amounts, transfers)


def tampered(change):
    """The example's timeline with one piece changed, and what the referee says about it."""
    result = simulate(example(), (2, 0), Transfers.FRACTIONAL)
    assert isinstance(result, OffloadSimulation)
    operations = list(result.timeline.operations)
    moves = list(result.timeline.transfers)
    change(operations, moves)
    timeline = Timeline(operations=tuple(operations), transfers=tuple(moves))
    return " ".join(replay(example(), timeline, Transfers.FRACTIONAL).violations)


def shifted(pieces, number, by):
    piece = pieces[number]
    pieces[number] = dataclasses.replace(
        piece, start_grains=piece.start_grains + by, end_grains=piece.end_grains + by
    )


def test_the_referee_sees_what_is_wrong():
    assert tampered(lambda operations, moves: None) == ""
    early = tampered(lambda operations, moves: shifted(operations, 1, -1))
    assert early == "7 bytes are held during F_1, but the device has 6."
    assert "B_1 starts before the end of F_1" in tampered(
        lambda operations, moves: shifted(operations, 2, -1)
    )
    assert "ends after the start of B_0" in tampered(lambda operations, moves: shifted(moves, 1, 1))
    hasty = tampered(lambda operations, moves: shifted(moves, 1, -1))
    assert hasty == "7 bytes are held during B_1, but the device has 6."
    assert "What is offloaded is not what is prefetched." in tampered(
        lambda operations, moves: moves.pop()
    )
    assert "before the offload has ended" in tampered(
        lambda operations, moves: shifted(moves, 1, -3)
    )
    assert "does not move what the offload moved" in tampered(
        lambda operations, moves: moves.append(dataclasses.replace(moves.pop(), start_grains=5))
    )
    assert "operations are not F_0..F_L" in tampered(lambda operations, moves: operations.pop())
    assert "starts before the beginning" in tampered(
        lambda operations, moves: shifted(moves, 0, -1)
    )
    assert "moves 2 of 4 bytes" in " ".join(
        replay(
            example(),
            simulate(example(), (2, 0), Transfers.FRACTIONAL).timeline,
            Transfers.INTEGRAL,
        ).violations
    )
    assert "before F_0 has made it" in tampered(
        lambda operations, moves: moves.__setitem__(0, dataclasses.replace(moves[0], index=1))
    )


@hypothesis.given(cases(whole=False))
def test_fractional_simulation_equals_the_equations(case):
    check_simulation(Transfers.FRACTIONAL, *case)


@hypothesis.settings(max_examples=100)
@hypothesis.given(middles(most_stages=7))
def test_fractional_simulation_equals_the_equations_in_the_middle(case):
    check_simulation(Transfers.FRACTIONAL, *case)


@hypothesis.given(cases(whole=True))
def test_integral_simulation_is_legal(case):
    chain, amounts = case
    result = check_simulation(Transfers.INTEGRAL, chain, amounts)
    # The same amounts in pieces are never slower, and possible in the same cases.
    pieces = check_simulation(Transfers.FRACTIONAL, chain, amounts)
    assert isinstance(result, Deadlock) == isinstance(pieces, Deadlock)
    if isinstance(result, OffloadSimulation):
        assert pieces.makespan_seconds <= result.makespan_seconds


def test_figures_that_are_no_whole_numbers_agree_exactly():
    chain = dataclasses.replace(
        example(),
        forward_seconds=(0.1, 0.7),
        backward_seconds=(0.3, 1e-3),
        bandwidth_bytes_per_second=3.7,
    )
    for amount in range(2, 5):
        result = check_simulation(Transfers.FRACTIONAL, chain, (amount, 0))
        assert isinstance(result, OffloadSimulation)
    assert in_grains(chain).grains_per_byte > 2**50


def check_best_ordered(transfers, chain, amounts):
    """No ordered schedule of the same amounts is shorter (Prop. 1 with reading 12)."""
    result = check_simulation(transfers, chain, amounts)
    best = best_makespan(chain, amounts, whole=transfers is Transfers.INTEGRAL)
    if isinstance(result, Deadlock):
        assert best is None
    else:
        assert result.makespan_seconds == best


@hypothesis.settings(max_examples=20)
@hypothesis.given(cases(whole=False, most_stages=5, bandwidths=(1,)))
def test_no_ordered_fractional_schedule_is_shorter(case):
    check_best_ordered(Transfers.FRACTIONAL, *case)


@hypothesis.settings(max_examples=20)
@hypothesis.given(cases(whole=True, most_stages=5, bandwidths=(1,)))
def test_no_ordered_integral_schedule_is_shorter(case):
    check_best_ordered(Transfers.INTEGRAL, *case)


@hypothesis.settings(max_examples=20)
@hypothesis.given(middles(most_stages=4))
def test_no_ordered_fractional_schedule_is_shorter_in_the_middle(case):
    check_best_ordered(Transfers.FRACTIONAL, *case)


@hypothesis.settings(max_examples=20)
@hypothesis.given(middles(most_stages=4))
def test_no_ordered_integral_schedule_is_shorter_in_the_middle(case):
    chain, amounts = case
    whole = [
        size if amount else 0 for size, amount in zip(chain.activation_bytes, amounts, strict=False)
    ]
    check_best_ordered(Transfers.INTEGRAL, chain, tuple(whole))


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(middles())
def test_no_ordered_schedule_is_shorter_in_the_middle_often(case):
    chain, amounts = case
    check_best_ordered(Transfers.FRACTIONAL, chain, amounts)
    whole = [
        size if amount else 0 for size, amount in zip(chain.activation_bytes, amounts, strict=False)
    ]
    check_best_ordered(Transfers.INTEGRAL, chain, tuple(whole))


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(cases(whole=False, bandwidths=(1,), most_stages=5))
def test_no_ordered_fractional_schedule_is_shorter_often(case):
    check_best_ordered(Transfers.FRACTIONAL, *case)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(cases(whole=True, bandwidths=(1,), most_stages=5))
def test_no_ordered_integral_schedule_is_shorter_often(case):
    check_best_ordered(Transfers.INTEGRAL, *case)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(cases(whole=False, most_stages=8))
def test_fractional_simulation_equals_the_equations_often(case):
    check_simulation(Transfers.FRACTIONAL, *case)
