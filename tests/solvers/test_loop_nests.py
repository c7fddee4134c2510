"""Parts and chunks of a loop: against exhaustive search, and against Revolve."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import pytest

from remat_opt.solvers import binomial, loop_nests
from remat_opt.solvers.loop_nests import Chain, Piece, Way

WAYS = (
    Way(kept_bytes=0, workspace_bytes=4, alone_bytes=4, seconds=1.0),
    Way(kept_bytes=1, workspace_bytes=5, alone_bytes=3, seconds=0.6),
    Way(kept_bytes=3, workspace_bytes=2, alone_bytes=1, seconds=0.0),
)


def chain(length: int, *, results: int = 0) -> Chain:
    return Chain(length=length, state_bytes=2, result_bytes=results, seconds=1.0, ways=WAYS)


@functools.cache
def judged(of: Chain) -> tuple[loop_nests.Figures, ...]:
    return tuple(loop_nests.judge(of, pieces) for pieces in loop_nests.nests(of))


def best(of: Chain, budget: float) -> float:
    """The least seconds within a budget among those found."""
    return min((one.seconds for one in judged(of) if one.peak_bytes <= budget), default=math.inf)


def least(of: Chain, budget: int) -> float:
    """The same, among all possible nests."""

    @functools.cache
    def search(n: int, m: int) -> float:
        if not n:
            return 0.0
        found = math.inf
        for first in range(1, n + 1):
            for way in of.ways:
                held = first * (of.state_bytes + way.kept_bytes)
                held += of.alone_bytes if first == 1 else 0
                if held + (way.workspace_bytes if first > 1 else way.alone_bytes) <= m:
                    found = min(found, first * way.seconds + search(n - first, m - held))
            for count in range(2, first // 2 + 1):
                size, held = first // count, count * of.state_bytes
                inside = m - held - size * of.result_bytes
                if not first % count and inside >= 0:
                    again = count * (size * of.seconds + search(size, inside))
                    found = min(found, again + search(n - first, m - held))
        return found

    return search(of.length, budget)


@pytest.mark.parametrize(("length", "results"), [(1, 0), (7, 0), (12, 0), (12, 1)])
def test_nothing_is_better_than_what_is_found(length: int, results: int) -> None:
    of = chain(length, results=results)
    most = length * 5 + 4
    for budget in range(4, most + 1, 2):
        expected = least(of, budget)
        # A part costs a thousandth of the loop's time, or less.
        assert best(of, budget) == pytest.approx(expected, abs=0.002 * length * length)
    assert best(of, most) == 0


def test_nothing_is_better_where_one_iteration_alone_keeps_more() -> None:
    of = dataclasses.replace(chain(12), alone_bytes=3)
    for budget in range(4, 64, 2):
        assert best(of, budget) == pytest.approx(least(of, budget), abs=0.3)
    # Twelve by itself would keep 3 bytes more each.
    together, apart = [Piece(length=12)], [Piece(length=1)] * 12
    held = [loop_nests.judge(of, pieces).held_bytes for pieces in (together, apart)]
    assert held == [24, 60]


def add_up(pieces: Sequence[Piece], length: int) -> bool:
    return sum(piece.length for piece in pieces) == length and all(
        not piece.inside or (piece.length // piece.chunk > 1 and add_up(piece.inside, piece.chunk))
        for piece in pieces
    )


@pytest.mark.parametrize("length", [97, pytest.param(1003, marks=pytest.mark.slow)])
def test_parts_add_up_and_are_few(length: int) -> None:
    found = list(loop_nests.nests(chain(length)))
    assert all(add_up(pieces, length) for pieces in found)
    assert 0 < max(map(loop_nests.count, found)) <= loop_nests.MOST_PARTS
    assert all(piece.length % piece.chunk == 0 for one in found for piece in one if piece.inside)


@pytest.mark.parametrize(("share", "most"), [(0.01, 1.03), (0.05, 0.54), (0.2, 0.63)])
def test_beside_revolve(share: float, most: float) -> None:
    """An LSTM of 400 steps: 2 arrays are passed on, and the unchanged function keeps 12 on CPU.

    In the least memory, Revolve's single chunks are missing.
    """
    length, unit = 400, 2**16
    ways = tuple(
        Way(
            kept_bytes=kept * unit,
            workspace_bytes=12 * unit,
            alone_bytes=12 * unit,
            seconds=seconds,
        )
        for kept, seconds in ((0, 1.0), (4, 0.004), (5, 0.0))
    )
    of = Chain(length=length, state_bytes=2 * unit, result_bytes=0, seconds=1.0, ways=ways)
    budget = math.floor(share * length * 12) - 3  # for what is round the loop
    found = best(of, budget * unit) / length
    # Besides the snapshots there is the state that a step starts from.
    snapshots = (budget - 12) // 2 - 1
    assert found < most * binomial.recomputed_steps(length, min(snapshots, length)) / length


def test_without_room_nothing_is_found() -> None:
    of = chain(64)
    least_peak = min(one.peak_bytes for one in judged(of))
    assert 2 + 4 < least_peak < 40
    assert best(of, least_peak - 1) == math.inf
