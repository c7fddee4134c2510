from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest

from remat_opt.offload.chain import Chain, in_grains
from remat_opt.offload.simulator import (
    Kind,
    NoSchedule,
    OffloadAnswer,
    OffloadSimulation,
    Status,
    Transfers,
    replay,
    simulate,
)
from remat_opt.solvers.offload_baselines import (
    autoswap,
    priority_scores,
    tflms,
    tflms_timeline,
    vdnn,
)
from tests.chains import hard_chains, subsets


def example(device_bytes: int, *, bandwidth: int = 2) -> Chain:
    return Chain(
        forward_seconds=(1.0, 4.0, 2.0, 3.0),
        backward_seconds=(2.0, 8.0, 4.0, 6.0),
        activation_bytes=(4, 4, 4, 4, 4),
        gradient_bytes=(0, 0, 0, 0, 0),
        forward_extra_bytes=(0, 0, 0, 0),
        backward_extra_bytes=(0, 0, 0, 0),
        bandwidth_bytes_per_second=bandwidth,
        device_bytes=device_bytes,
    )


def best_ordered(chain: Chain, transfers: Transfers) -> float:
    results = [simulate(chain, amounts, transfers) for amounts in subsets(chain)]
    return min(one.makespan_seconds for one in results if isinstance(one, OffloadSimulation))


def check_answer(chain, answer, transfers):
    assert isinstance(answer, OffloadAnswer)
    assert answer.transfers is transfers
    assert answer.simulation.violations == ()
    assert answer.simulation.peak_bytes <= chain.device_bytes
    assert answer.simulation.makespan_seconds == answer.makespan_seconds
    assert answer.simulation.transferred_bytes == sum(answer.amounts_bytes)
    assert answer.makespan_seconds >= answer.lower_bound_seconds * (1 - 1e-12)
    if answer.status is Status.OPTIMAL:
        assert answer.makespan_seconds == chain.compute_seconds


def check_vdnn(chain):
    """The best of all thresholds and variants, each written out again."""
    for transfers in Transfers:
        answer = vdnn(chain, transfers=transfers)
        check_answer(chain, answer, transfers)
        found = []
        stages = [i for i in range(len(chain)) if chain.activation_bytes[i]]
        for least in [None, *stages]:
            taken = [
                i
                for i in stages
                if least is not None
                and chain.forward_seconds[i] * chain.activation_bytes[least]
                >= chain.forward_seconds[least] * chain.activation_bytes[i]
            ]
            for part in (taken, taken[::2]):
                amounts = [
                    size if i in part else 0 for i, size in enumerate(chain.activation_bytes[:-1])
                ]
                result = simulate(chain, amounts, transfers)
                if isinstance(result, OffloadSimulation):
                    found.append(result.makespan_seconds)
        assert answer.makespan_seconds == min(found)


def check_autoswap(chain):
    answer = autoswap(chain, evaluations=20)
    check_answer(chain, answer, Transfers.INTEGRAL)
    assert answer.makespan_seconds >= best_ordered(chain, Transfers.INTEGRAL)
    # The fewest in its order: without the last of them, the step would not fit.
    scores = priority_scores(in_grains(chain))
    assert scores.shape == (4, len(chain))
    assert np.all(np.abs(scores) <= 1)
    gone = [i for i, amount in enumerate(answer.amounts_bytes) if amount]
    if gone:
        weights = np.array([weight for _, weight in answer.parameters])
        # Of equal priority, the later one comes last.
        last = min(gone, key=lambda i: ((weights @ scores)[i], -i))
        amounts = list(answer.amounts_bytes)
        amounts[last] = 0
        assert not isinstance(simulate(chain, amounts, Transfers.INTEGRAL), OffloadSimulation)


def check_tflms(chain):
    """The best of all counts and look-aheads that the referee finds legal."""
    exact = in_grains(chain)
    movable = [i for i in range(len(chain)) if chain.activation_bytes[i]]
    for transfers in Transfers:
        legal = []
        for count in range(len(movable) + 1):
            for ahead in range(len(chain)):
                timeline = tflms_timeline(exact, movable[:count], ahead)
                result = replay(chain, timeline, transfers)
                assert all("bytes are held" in broken for broken in result.violations)
                if not result.violations:
                    legal.append(result.makespan_seconds)
        answer = tflms(chain, transfers=transfers)
        if isinstance(answer, NoSchedule):
            assert not legal
        else:
            check_answer(chain, answer, transfers)
            assert answer.makespan_seconds == min(legal)
            assert answer.makespan_seconds >= best_ordered(chain, transfers)


@pytest.mark.parametrize("solve", [vdnn, autoswap, tflms])
def test_nothing_leaves_where_the_chain_fits(solve):
    answer = solve(example(20))
    assert isinstance(answer, OffloadAnswer)
    assert answer.amounts_bytes == (0, 0, 0, 0)
    assert answer.status is Status.OPTIMAL
    assert answer.makespan_seconds == 30.0


@pytest.mark.parametrize("solve", [vdnn, autoswap, tflms])
def test_too_little_memory_is_proven_so(solve):
    answer = solve(example(7))
    assert isinstance(answer, NoSchedule)
    assert answer.proven
    assert answer.least_device_bytes == 8
    assert "offloading cannot help" in answer.reason


def test_vdnn_prefers_long_computations():
    answer = vdnn(example(16))
    assert isinstance(answer, OffloadAnswer)
    # x_1 alone: F_1 computes longest for its size.
    assert answer.amounts_bytes == (0, 4, 0, 0)
    assert dict(answer.parameters) == {"threshold_seconds_per_byte": 1.0, "half": 0.0}
    # At 12 bytes two must leave before F_3: of x_0 to x_3, every other one is x_0 and x_2.
    half = vdnn(example(12), variants=("half",))
    assert isinstance(half, OffloadAnswer)
    assert half.amounts_bytes == (4, 0, 4, 0)
    with pytest.raises(ValueError, match="no variant 'third'"):
        vdnn(example(12), variants=("third",))


def test_one_variant_of_vdnn_may_find_nothing():
    answer = vdnn(example(8), variants=("half",))
    assert isinstance(answer, NoSchedule)
    assert not answer.proven
    assert answer.reason == "No threshold frees enough memory."


def test_scores_of_autoswap():
    exact = in_grains(example(16, bandwidth=1))
    durations, areas, weighted, submodular = priority_scores(exact)
    # From the end of F_i to the start of B_i: 27, 15, 9, 0, less 2 * 4 for the transfers.
    np.testing.assert_allclose(durations, np.array([19, 7, 1, -8]) / 19)
    # Divided by the size if negative: -8 / 4 beside 19 * 4.
    np.testing.assert_allclose(areas, np.array([76, 28, 4, -2]) / 76)
    # Only F_3 and B_3 are above 16 bytes, by 4, and x_3 is not absent from either.
    np.testing.assert_allclose(weighted, [1, 1, 1, 0])
    # Once x_0 has left, no excess remains for the others.
    np.testing.assert_allclose(submodular, [1, 0, 0, 0])


def test_autoswap_is_the_same_every_time():
    assert autoswap(example(12)) == autoswap(example(12))
    weights = dict(autoswap(example(12)).parameters)
    assert list(weights) == ["duration", "area", "weighted_duration", "submodular"]


def test_tflms_fetches_ahead():
    exact = in_grains(example(16))
    late = tflms_timeline(exact, [0], 0)
    early = tflms_timeline(exact, [0], 3)
    assert [move.kind for move in late.transfers] == [Kind.OFFLOAD, Kind.PREFETCH]
    # B_1 ends at 28, and two seconds later x_0 is back; or from the end of F_3 on.
    assert late.transfers[1].start_grains == 28 * exact.grains_per_second
    assert early.transfers[1].start_grains == 10 * exact.grains_per_second
    assert late.operations[-1].end_grains == 32 * exact.grains_per_second
    assert early.operations[-1].end_grains == 30 * exact.grains_per_second


def test_tflms_does_not_wait_for_memory():
    slow = dataclasses.replace(example(12), bandwidth_bytes_per_second=0.25)
    answer = tflms(slow)
    assert isinstance(answer, NoSchedule)
    assert not answer.proven
    assert answer.reason.startswith("Without waiting for memory")
    assert isinstance(vdnn(slow), OffloadAnswer)


@hypothesis.settings(max_examples=20)
@hypothesis.given(hard_chains(most_stages=7))
def test_vdnn_is_the_best_of_its_thresholds(chain):
    check_vdnn(chain)


@hypothesis.settings(max_examples=15)
@hypothesis.given(hard_chains(most_stages=6))
def test_autoswap_is_legal(chain):
    check_autoswap(chain)


@hypothesis.settings(max_examples=15)
@hypothesis.given(hard_chains(most_stages=5))
def test_tflms_is_the_best_of_its_choices(chain):
    check_tflms(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=6))
def test_vdnn_is_the_best_of_its_thresholds_often(chain):
    check_vdnn(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=5))
def test_autoswap_is_legal_often(chain):
    check_autoswap(chain)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(hard_chains(most_stages=4))
def test_tflms_is_the_best_of_its_choices_often(chain):
    check_tflms(chain)
