"""Small chains to judge offloading by: Hypothesis strategies, and an exhaustive search.

Times, sizes and the bandwidth are small whole numbers on purpose: ties are frequent, some
operations take no time and some activations no memory, and a best schedule then exists in
which everything starts at a whole number, so that a search over whole numbers is exhaustive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from remat_opt.offload.chain import Chain


@st.composite
def chains(draw: st.DrawFn, *, most_stages: int = 7, bandwidths: tuple[int, ...] = (1, 2)) -> Chain:
    """A chain whose device memory lies between the least it runs in and a little over M_peak.

    Each kind of number has its own scale. For example, if forward steps are slow and need much
    memory while backward steps are fast and need little, the first prefetches must fit into the end
    of the forward phase.
    """
    count = draw(st.integers(1, most_stages))

    def numbers(length: int) -> tuple[int, ...]:
        small = st.integers(0, draw(st.sampled_from((4, 1, 8))))
        return tuple(draw(st.lists(small, min_size=length, max_size=length)))

    bandwidth = draw(st.sampled_from(bandwidths))
    chain = Chain(
        forward_seconds=tuple(map(float, numbers(count))),
        backward_seconds=tuple(map(float, numbers(count))),
        activation_bytes=numbers(count + 1),
        gradient_bytes=numbers(count + 1),
        forward_extra_bytes=numbers(count),
        backward_extra_bytes=numbers(count),
        bandwidth_bytes_per_second=bandwidth,
        device_bytes=0,
    )
    device_bytes = draw(st.integers(chain.least_device_bytes, chain.peak_bytes + 1))
    return dataclasses.replace(chain, device_bytes=device_bytes)


@st.composite
def middles(draw: st.DrawFn, *, most_stages: int = 5) -> tuple[Chain, tuple[int, ...]]:
    """A chain and amounts for which equation (9) or (10) is likely to decide.

    In one phase operations are slow and need much memory, in the other they are fast and need
    little: the transfers of the fast phase reach into the slow one, and must fit there. The first
    bytes leave, some more than must.
    """
    count = draw(st.integers(2, most_stages))

    def numbers(length: int, least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(least, most), min_size=length, max_size=length)))

    fast, slow = numbers(count, 0, 1), numbers(count, 2, 6)
    lean, fat = numbers(count, 0, 1), numbers(count, 0, 8)
    mirrored = draw(st.booleans())
    chain = Chain(
        forward_seconds=tuple(map(float, slow if mirrored else fast)),
        backward_seconds=tuple(map(float, fast if mirrored else slow)),
        activation_bytes=numbers(count + 1, 0, 6),
        gradient_bytes=numbers(count + 1, 0, 2),
        forward_extra_bytes=fat if mirrored else lean,
        backward_extra_bytes=lean if mirrored else fat,
        bandwidth_bytes_per_second=1,
        device_bytes=0,
    )
    device_bytes = draw(st.integers(chain.least_device_bytes, chain.peak_bytes))
    chain = dataclasses.replace(chain, device_bytes=device_bytes)
    left = chain.excess_bytes + draw(st.integers(0, 4))
    amounts = []
    for size in chain.activation_bytes[:-1]:
        amounts.append(min(size, left))
        left -= amounts[-1]
    return chain, tuple(amounts)


def hard_chains(*, most_stages: int) -> st.SearchStrategy[Chain]:
    """Chains of both kinds."""
    middle = middles(most_stages=most_stages).map(lambda case: case[0])
    return st.one_of(chains(most_stages=most_stages), middle)


def subsets(chain: Chain) -> Iterator[tuple[int, ...]]:
    """All choices of whole activations to offload, as bytes of x_0..x_L."""
    return itertools.product(*({0, size} for size in chain.activation_bytes[:-1]))


def best_makespan(chain: Chain, amounts_bytes: tuple[int, ...], *, whole: bool) -> int | None:
    """The least makespan of ordered schedules that offload the amounts, by trying all.

    Bandwidth 1 is assumed. Each activation is sent in the given order and fetched in reverse: a
    piece at a time if ``whole`` is false (pieces of one byte, each freeing its memory), as one
    block otherwise. A state is how far the operations and the link have come; in each second either
    may start its next piece of work or wait.
    """
    assert chain.bandwidth_bytes_per_second == 1
    stages = len(chain)
    x, y = chain.activation_bytes, chain.gradient_bytes
    steps = [("F", i, int(chain.forward_seconds[i])) for i in range(stages)]
    steps += [("B", i, int(chain.backward_seconds[i])) for i in reversed(range(stages))]
    position = {(kind, i): at for at, (kind, i, _) in enumerate(steps)}
    sends = [
        piece
        for i, amount in enumerate(amounts_bytes)
        for piece in ([(i, amount)] if whole and amount else [(i, 1)] * amount)
    ]
    moves = [("send", *piece) for piece in sends] + [("fetch", *piece) for piece in sends[::-1]]

    def memory(done: int, running: bool, moved: int, moving: bool) -> int:
        """Bytes held: ``done`` steps and ``moved`` moves are over, the next may be in progress."""
        gone = [0] * (stages + 1)
        for kind, i, size in moves[:moved]:
            gone[i] += size if kind == "send" else -size
        if moving and moves[moved][0] == "fetch":
            gone[moves[moved][1]] -= moves[moved][2]  # reserved as it begins (E)
        total = 0
        for i in range(stages + 1):
            produced = i == 0 or position["F", i - 1] < done + running
            # x_i stays whole until F_i is over, and is freed only after B_{i-1} (reading 14).
            read = i <= stages - 1 and position["F", i] >= done
            freed = i > 0 and position["B", i - 1] < done
            if produced and not freed:
                total += x[i] if read else x[i] - gone[i]
        if running:
            kind, i, _ = steps[done]
            total += chain.forward_extra_bytes[i] if kind == "F" else chain.backward_extra_bytes[i]
        at = done if running else done - 1
        last = steps[at] if at >= 0 else ("F", 0, 0)
        if last[0] == "B":
            total += y[last[1]]
            if running:
                total += y[last[1] + 1]
        return total

    def may_move(done: int, moved: int) -> bool:
        """Whether the next move's data exists: produced, or entirely sent before."""
        kind, i, _ = moves[moved]
        if kind == "send":
            return i == 0 or position["F", i - 1] < done
        return True

    def may_run(done: int, moved: int) -> bool:
        kind, i, _ = steps[done]
        if kind == "F":
            return True
        back = sum(size for what, j, size in moves[:moved] if what == "fetch" and j == i)
        return back == amounts_bytes[i]

    limit = chain.device_bytes
    # (steps done, seconds left of the running one or 0, moves done, seconds left likewise)
    level = {(0, 0, 0, 0)}
    ever: set[tuple[int, int, int, int]] = set()
    second = 0
    while level:
        # At one instant, whatever may begin begins or waits, in any order; a step of no length ends
        # at once. Being in the same state later is never better.
        pending = list(level)
        ever |= level
        now = set(level)
        while pending:
            done, left, moved, busy = pending.pop()
            if done == len(steps):
                return second
            following = []
            if not left and may_run(done, moved) and memory(done, True, moved, busy > 0) <= limit:
                length = steps[done][2]
                following.append(
                    (done, length, moved, busy) if length else (done + 1, 0, moved, busy)
                )
            if (
                not busy
                and moved < len(moves)
                and may_move(done, moved)
                and memory(done, left > 0, moved, True) <= limit
            ):
                following.append((done, left, moved, moves[moved][2]))
            for state in following:
                if state not in ever:
                    ever.add(state)
                    now.add(state)
                    pending.append(state)
        level = set()
        for done, left, moved, busy in now:
            ran = (done + (left == 1), max(0, left - 1))
            sent = (moved + (busy == 1), max(0, busy - 1))
            level.add((*ran, *sent))
        level -= ever
        second += 1
    return None
