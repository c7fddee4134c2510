"""The static allocator: the paper's figures, every law of buffers, and all assignments of few."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_opt.errors import GraphError
from remat_opt.solvers.allocator import (
    NONE,
    Allocation,
    Execution,
    Optimization,
    allocate,
    live_bytes,
    prediction,
)
from tests.graphs import FAMILIES, graphs, layered

FIGURE_2 = Execution(
    names=("A", "B", "C", "F", "E", "G"),
    # A is the input, which is not an internal array.
    bytes=(0, 4, 4, 4, 4, 4),
    reads=((), (0,), (1,), (1,), (2,), (4, 3)),
    in_place=(False, True, True, False, False, True),  # pooling cannot
)


@st.composite
def executions(draw, *, max_values=12, same_size=False):
    count = draw(st.integers(1, max_values))
    size = st.just(4) if same_size else st.integers(0, 9)
    reads = []
    for value in range(count):
        chosen = draw(st.sets(st.integers(0, max(0, value - 1)), max_size=3)) if value else set()
        reads.append(tuple(draw(st.permutations(sorted(chosen)))))
    return Execution(
        names=tuple(f"v{value}" for value in range(count)),
        bytes=tuple(draw(size) for _ in range(count)),
        reads=tuple(reads),
        in_place=tuple(draw(st.booleans()) for _ in range(count)),
        outputs=tuple(sorted(draw(st.sets(st.integers(0, count - 1), max_size=2)))),
    )


def last_uses(execution):
    """For each value, the step after which it may be overwritten; outputs last forever."""
    last = list(range(len(execution)))
    for step, reads in enumerate(execution.reads):
        for read in reads:
            last[read] = max(last[read], step)
    for output in execution.outputs:
        last[output] = len(execution)
    return last


def may_overwrite(execution, last, old, new):
    return (
        execution.in_place[new]
        and old in execution.reads[new]
        and last[old] == new
        and execution.bytes[old] >= execution.bytes[new] > 0
    )


def may_share(execution, last, old, new):
    """Whether two values, the first of which is made earlier, may be in one buffer."""
    return last[old] < new or may_overwrite(execution, last, old, new)


def bound(execution):
    """The live bytes: at each step, the values that were made and not used up."""
    last = last_uses(execution)
    totals = [0]
    for step in range(len(execution)):
        alive = [v for v in range(step + 1) if last[v] >= step]
        spared = any(may_overwrite(execution, last, old, step) for old in alive if old != step)
        alive = [v for v in alive if v != step or not spared]
        totals.append(sum(execution.bytes[v] for v in alive))
    return max(totals)


def least_total(execution):
    """The best of all assignments, one value after the other."""
    last = last_uses(execution)
    held = [v for v in range(len(execution)) if execution.bytes[v]]
    best = sum(execution.bytes)

    def search(place, blocks, total):
        nonlocal best
        if total >= best:
            return
        if place == len(held):
            best = total
            return
        new = held[place]
        size = execution.bytes[new]
        for number, (members, largest) in enumerate(blocks):
            if all(may_share(execution, last, old, new) for old in members):
                grown = [*blocks]
                grown[number] = ([*members, new], max(largest, size))
                search(place + 1, grown, total + max(0, size - largest))
        search(place + 1, [*blocks, ([new], size)], total + size)

    search(0, [], 0)
    return best


def check(execution):
    last = last_uses(execution)
    totals = []
    for optimization in Optimization:
        found = allocate(execution, optimization)
        totals.append(found.total_bytes)
        assert found.total_bytes == sum(found.buffer_bytes)
        assert found.live_bytes == live_bytes(execution) == bound(execution) <= found.total_bytes
        assert {b for b in found.buffers if b != NONE} == set(range(len(found.buffer_bytes)))
        for value, buffer in enumerate(found.buffers):
            assert (buffer == NONE) == (execution.bytes[value] == 0)
        for buffer, size in enumerate(found.buffer_bytes):
            held = [v for v, number in enumerate(found.buffers) if number == buffer]
            assert size == max(execution.bytes[v] for v in held)
            for old, new in itertools.combinations(held, 2):
                assert may_share(execution, last, old, new)
            for old, new in itertools.pairwise(held):
                overwritten = found.overwrites[new] == old
                assert overwritten or (optimization is Optimization.SHARING and last[old] < new)
        for new, old in enumerate(found.overwrites):
            if old != NONE:
                assert optimization is not Optimization.NOTHING
                assert may_overwrite(execution, last, old, new)
                assert found.buffers[old] == found.buffers[new]
    assert sum(execution.bytes) == totals[0] >= totals[1] >= totals[2]
    return totals[2]


@given(executions())
@settings(max_examples=50)
def test_legal_and_between_the_bounds(execution):
    check(execution)


@pytest.mark.slow
@given(executions(max_values=20))
@settings(max_examples=300)
def test_legal_and_between_the_bounds_on_many(execution):
    check(execution)


def check_against_all(execution):
    best = least_total(execution)
    assert bound(execution) <= best <= allocate(execution).total_bytes


def check_same_size(execution):
    assert allocate(execution).total_bytes == least_total(execution) == bound(execution)


@given(executions(max_values=7))
@settings(max_examples=50)
def test_against_all_assignments(execution):
    check_against_all(execution)


@pytest.mark.slow
@given(executions(max_values=10))
@settings(max_examples=300)
def test_against_all_assignments_of_many(execution):
    check_against_all(execution)


@given(executions(max_values=8, same_size=True))
@settings(max_examples=50)
def test_optimal_where_all_sizes_are_the_same(execution):
    check_same_size(execution)


@pytest.mark.slow
@given(executions(max_values=10, same_size=True))
@settings(max_examples=300)
def test_optimal_where_all_sizes_are_the_same_on_many(execution):
    check_same_size(execution)


@given(graphs())
@settings(max_examples=40)
def test_prediction_of_any_graph(graph):
    check(prediction(graph))


def test_figure_2():
    """Step by step: B and C get tags, F a third; E takes that of B, and G is in place over E."""
    found = allocate(FIGURE_2)
    assert found == Allocation(
        buffers=(NONE, 0, 1, 2, 0, 0),
        overwrites=(NONE, NONE, NONE, NONE, NONE, 4),
        buffer_bytes=(4, 4, 4),
        total_bytes=12,
        live_bytes=12,
    )


def test_figure_2_without_sharing():
    found = allocate(FIGURE_2, Optimization.IN_PLACE)
    assert found.buffers == (NONE, 0, 1, 2, 3, 3)
    assert found.total_bytes == 16
    assert allocate(FIGURE_2, Optimization.NOTHING).total_bytes == 20


def test_figure_2_with_the_sizes_that_pooling_leaves():
    smaller = dataclasses.replace(FIGURE_2, bytes=(0, 4, 4, 1, 1, 1))
    found = allocate(smaller)
    # G could also be in place over E, as printed; F's buffer is the one that it fills.
    assert found.buffers == (NONE, 0, 1, 2, 0, 2)
    assert found.total_bytes == found.live_bytes == 9


def test_figure_1():
    """The sigmoid runs in place and its backward step takes over its storage.

    The gradient of the softmax shares with that of the first fully connected layer.
    """
    names = ("input", "label", "full1", "sigmoid", "full2", "softmax")
    names += ("softmax'", "full2'", "sigmoid'", "full1'")
    steps = Execution(
        names=names,
        bytes=(0, 0, *[4] * 8),
        reads=((), (), (0,), (2,), (3,), (4,), (5, 1), (6, 3), (3, 7), (8, 0)),
        in_place=tuple(name.startswith("sigmoid") for name in names),
    )
    found = allocate(steps)
    buffer = dict(zip(names, found.buffers, strict=True))
    assert buffer["full1"] == buffer["sigmoid"] == buffer["sigmoid'"]
    assert buffer["softmax'"] == buffer["full1'"]
    assert found.total_bytes == found.live_bytes == 12


def test_in_place_needs_the_last_read():
    steps = Execution(
        names=("a", "b", "c"),
        bytes=(4, 4, 4),
        reads=((), (0,), (0, 1)),
        in_place=(False, True, True),
    )
    assert allocate(steps).overwrites == (NONE, NONE, 0)


def test_in_place_needs_room():
    steps = Execution(
        names=("a", "b"), bytes=(3, 4), reads=((), (0,)), in_place=(True, True), outputs=(1,)
    )
    assert allocate(steps).overwrites == (NONE, NONE)
    assert allocate(steps).total_bytes == live_bytes(steps) == 7


def test_outputs_are_never_overwritten():
    steps = Execution(
        names=("a", "b"), bytes=(4, 4), reads=((), (0,)), in_place=(True, True), outputs=(0, 1)
    )
    assert allocate(steps).buffers == (0, 1)


def test_the_smallest_free_buffer_that_fits_and_else_the_largest_grows():
    steps = Execution(
        names=tuple("abcdef"),
        bytes=(8, 2, 4, 1, 3, 9),
        reads=((), (), (), (0, 1, 2), (3,), (3, 4)),
        in_place=(False,) * 6,
    )
    # The box holds 2, 4 and 8 when e comes, and 2 and 8 when f does.
    found = allocate(steps)
    assert found.buffers == (0, 1, 2, 3, 2, 0)
    assert found.buffer_bytes == (9, 2, 4, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_shared_where_all_is_held(family):
    forward = prediction(layered(family, 9))
    held = dataclasses.replace(forward, outputs=tuple(range(9)))
    assert allocate(held).total_bytes == live_bytes(held) == 9 * 4


def test_prediction_of_a_chain_takes_two_buffers_whatever_its_length():
    # Section 3: from O(n) to nearly O(1).
    for count in (2, 10, 1000):
        chain = layered("chain", count)
        assert allocate(prediction(chain)).total_bytes == 2 * 4
        elementwise = dataclasses.replace(chain, in_place=(True,) * count)
        assert allocate(prediction(elementwise)).total_bytes == 4
        assert allocate(prediction(chain), Optimization.IN_PLACE).total_bytes == 4 * count


def refuses(message):
    return pytest.raises(GraphError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bytes": (1,)}, "bytes has 1 entries for 2 steps."),
        ({"reads": ((),)}, "reads has 1 entries for 2 steps."),
        ({"in_place": ()}, "in_place has 0 entries for 2 steps."),
        ({"names": ("a", "a")}, "Two values are called 'a'; names must be unique."),
        ({"bytes": (1, -2)}, "Value 'b' has bytes = -2; it must be 0 or more."),
        (
            {"reads": ((), (1,))},
            "Step 'b' reads value 1, which no earlier step makes; give the steps in order of "
            "execution.",
        ),
        ({"reads": ((), (0, 0))}, "Step 'b' names a value twice among what it reads."),
        (
            {"outputs": (2,)},
            "Value 2 is to be held to the end, but there are only 2 values, numbered from 0.",
        ),
        ({"outputs": (1, 1)}, "A value is named twice among the outputs."),
    ],
)
def test_refusals(changed, message):
    good = {"names": ("a", "b"), "bytes": (1, 1), "reads": ((), (0,)), "in_place": (False, False)}
    with refuses(message):
        Execution(**{**good, **changed})


def test_an_execution_without_steps_takes_nothing():
    nothing = Execution(names=(), bytes=(), reads=(), in_place=())
    assert allocate(nothing).total_bytes == live_bytes(nothing) == 0
