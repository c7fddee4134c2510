"""How large a heap must be to hold arrays with given lives, as XLA lays it out.

What is alive at once is a lower bound. Arrays do not move, and between two that stay there may be a
hole too small for the next one.

Method. While memory is plentiful, arrays are placed in the order in which the program makes them:
each into the tightest hole that is free for as long as it lives, else on top. Given the lives of
the arrays of compiled programs, this yields their heaps, to 0.1 MiB, once the signals of copies are
added (``copies``): 9,800 MiB with 9,065 alive for an unchanged GPT, 2,776 with 2,730 for one of its
plans, 3,956 with 3,854 for a plan of ViT-B/16.

Small arrays that are soon read never get there: they stay in vector memory, 128 MiB on a v5e. In
compiled programs, arrays of up to 48 MiB did if they were short-lived; none of 64 did. In the
backward pass, when a checkpoint's part has run again and its gradients are about to be taken, that
memory is full: of the last twelve values of a part of ResNet-152, 24.5 MiB each, seven were on the
heap. So what is written from there on stays as far as there is room, starting with those during
whose life the fewest bytes are written. Of what the forward pass writes last, less stays than would
fit.

Arrays of up to 16 MiB that do not stay are also written there, and copied to the heap by the time
the next step runs, when everything last read by the step that made them is gone. (In a GPT this is
the scores, of 512 MiB, and what attention makes of them takes their place. Placed above them, it
made 9 of 14 plans 2 to 24 % larger than compiled. In others it is above them anyway: only compiling
can tell.)

Why not a ready-made tool: we want the compiler's answer, not the best one.

Complexity: O(p log p) for p pairs of arrays that are alive at once. Arrays too small to leave holes
that matter are not placed; those alive at a step are added to what is placed then. (Adding their
maximum to the heap of the others made DenseNet-121's plans a sixth too large: small ones are alive
when the forward pass ends, large ones when the backward pass does.)

Guarantee: at least what is alive at once in this memory. The compiler's own order of steps differs
from the replay's, and with it the holes, so its heap is near this one but not equal. Where little
memory is left, the compiler packs tighter than this.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from remat_opt.compilers.compiler import Compiler
from remat_opt.spans import Spans

#: Arrays of at most this many bytes, and at most this share of what is alive at once, can stay in
#: vector memory, and do if they live for at most this many steps. In an iteration of a loop, most
#: of what is alive is stacks beside it, and the share does not count.
_VECTOR_BYTES, _VECTOR_SHARE, _VECTOR_STEPS = 48 * 2**20, 1 / 8, 4
#: Those of at most this many bytes that do not stay are copied from there.
_COPIED_BYTES = 16 * 2**20
#: Arrays smaller than this share of what is alive at once are not placed individually.
_SMALL_SHARE = 1 / 256
#: Likewise, if all are placed at once.
_SMALL_SHARE_AT_ONCE = 1 / 64
#: How many arrays, the largest, may lie in the buffers of results.
_MOST_LENT = 1024
#: A heap of at most this multiple of what is alive at once is taken without trying the other.
_TIGHT = 1.02


def vector_memory_bytes(compiler: Compiler) -> int:
    """The bytes of arrays that XLA can keep outside the device's memory; 0 for most.

    For every TPU, this is what its compiler was seen to use on v5e.
    """
    return 112 * 2**20 if compiler.has("vector_memory") else 0


def laid_out_bytes(arrays: Spans, compiler: Compiler, *, among_others: bool = False) -> int:
    """The size of the heap on which a compiler lays the arrays out.

    Args:
      arrays: their lives.
      compiler: which one it is.
      among_others: whether much else is alive beside them, as in an iteration of a loop.
    """
    arrays = _without_negative(arrays)
    if compiler.has("heap_in_order"):
        return heap_bytes(arrays, vector_memory_bytes(compiler), among_others=among_others)
    if compiler.has("heap_by_size"):
        return decreasing_size_heap_bytes(arrays)
    return arrays.peak_bytes


def outside_results(arrays: Spans, results: Sequence[tuple[int, int]]) -> Spans:
    """The arrays that do not lie in result buffers until the results are written.

    XLA takes arrays by size, the largest first, and gives each the smallest result's buffer that
    holds it and is free for as long as it lives. In a buffer all begin at its start.

    Args:
      arrays: all arrays.
      results: the first step and the bytes of each result; it stays to the end.
    """
    if not results:
        return arrays
    starts, sizes = np.array(sorted(results, key=lambda one: one[1]), dtype=np.int64).T
    taken: list[list[tuple[int, int]]] = [[] for _ in sizes]
    stays = np.full(len(arrays.bytes), True)
    for number in np.lexsort((arrays.first, -arrays.bytes))[:_MOST_LENT]:
        size, first, last = arrays.bytes[number], arrays.first[number], arrays.last[number]
        if size <= 0:
            break
        for one in range(int(sizes.searchsorted(size)), len(sizes)):
            if last < starts[one] and all(last < a or first > b for a, b in taken[one]):
                taken[one].append((first, last))
                stays[number] = False
                break
    return _chosen(arrays, stays)


def _without_negative(arrays: Spans) -> Spans:
    """The arrays, where a negative size at a step makes something there end a step sooner.

    A step's workspace is negative if its arrays are not all alive at once: what is freed first
    gives its place to what comes.
    """
    negative = np.flatnonzero(arrays.bytes < 0)
    if not len(negative):
        return arrays
    last, sizes = arrays.last.copy(), arrays.bytes.copy()
    for one in negative:
        going = np.flatnonzero((last == arrays.last[one]) & (arrays.first < last))
        enough = going[sizes[going] >= -sizes[one]]
        if len(enough):
            gone = enough[sizes[enough].argmin()]
            last[gone] -= 1
            sizes[one] += sizes[gone]
    return dataclasses.replace(arrays, last=last, bytes=sizes)


def heap_bytes(arrays: Spans, vector_bytes: int, *, among_others: bool = False) -> int:
    """The size of the heap that holds those of the arrays that do not stay in vector memory.

    Args:
      arrays: their lives.
      vector_bytes: how much vector memory there is for arrays of the backward pass.
      among_others: see ``laid_out_bytes``.
    """
    on_heap = np.full(len(arrays.bytes), True)
    if vector_bytes:
        on_heap = ~_staying(arrays, vector_bytes, among_others)
    least = _chosen(arrays, on_heap).peak_bytes
    arrays = _chosen(_copied_there(arrays), on_heap)
    small = arrays.bytes < least * _SMALL_SHARE
    placed = _chosen(arrays, ~small)
    placed = _chosen(placed, np.lexsort((-placed.bytes, placed.first)))
    beside = _chosen(arrays, small).live_bytes(int(arrays.last.max(initial=-1)) + 1)
    return max(least, _filled_bytes(placed, beside))


def decreasing_size_heap_bytes(arrays: Spans) -> int:
    """The size of the heap that XLA for NVIDIA and for CPU lays the arrays out on.

    All are placed before the program runs, each into the tightest hole that is free for as long as
    it lives, else on top: once with the largest first, and once with the longest-lived first; of
    equals, the one that is written first. The smaller of the two heaps is taken.

    Args:
      arrays: their lives.
    """
    least = arrays.peak_bytes
    small = arrays.bytes < least * _SMALL_SHARE_AT_ONCE
    placed = _chosen(arrays, ~small)
    beside = _chosen(arrays, small).live_bytes(int(arrays.last.max(initial=-1)) + 1)
    lengths = placed.last - placed.first
    found = sys.maxsize
    for keys in (
        (placed.first, -lengths, -placed.bytes),
        (placed.first, -placed.bytes, -lengths),
    ):
        # The second heap takes as long to lay out, and can hardly be smaller than this.
        if found > least * _TIGHT:
            found = min(found, _filled_bytes(_chosen(placed, np.lexsort(keys)), beside))
    return max(least, found)


def _filled_bytes(placed: Spans, beside: np.ndarray) -> int:
    """How far arrays fill a heap, placed in this order, with what is alive beside them."""
    ends = _best_fit(placed)
    filled = np.zeros(len(beside))
    # In ascending order, so that where arrays meet the one that ends highest is written last.
    upwards = ends.argsort()
    lives = zip(placed.first[upwards], placed.last[upwards] + 1, ends[upwards], strict=True)
    for start, stop, end in lives:
        filled[start:stop] = end
    return int((filled + beside).max(initial=0))


def _staying(arrays: Spans, vector_bytes: int, among_others: bool) -> np.ndarray:
    """Which arrays stay in vector memory."""
    least = arrays.peak_bytes
    largest = _VECTOR_BYTES if among_others else min(_VECTOR_BYTES, least * _VECTOR_SHARE)
    fits = arrays.bytes <= largest
    stays: np.ndarray = fits & (arrays.last - arrays.first <= _VECTOR_STEPS)
    matters = arrays.bytes >= least * _SMALL_SHARE
    late = np.flatnonzero(fits & matters & (arrays.first >= arrays.backward))
    steps = int(arrays.last.max(initial=-1)) + 1
    written = np.cumsum(np.bincount(arrays.first, arrays.bytes, steps))
    between = written[arrays.last[late]] - written[arrays.first[late]]
    free = np.full(steps, vector_bytes)
    for number in late[np.argsort(between, kind="stable")]:
        life = slice(arrays.first[number], arrays.last[number] + 1)
        if free[life].min() >= arrays.bytes[number]:
            free[life] -= arrays.bytes[number]
            stays[number] = True
    return stays


def _copied_there(arrays: Spans) -> Spans:
    """The arrays, where those that come from vector memory start a step later."""
    copied = (arrays.bytes <= _COPIED_BYTES) & (arrays.last > arrays.first)
    return dataclasses.replace(arrays, first=arrays.first + copied)


def _chosen(arrays: Spans, which: np.ndarray) -> Spans:
    return dataclasses.replace(
        arrays, first=arrays.first[which], last=arrays.last[which], bytes=arrays.bytes[which]
    )


def _best_fit(arrays: Spans) -> np.ndarray:
    """Where each array ends once all are placed in the given order."""
    bottoms: list[int] = []
    tops: list[int] = []
    for size, before in zip(arrays.bytes.tolist(), _met_before(arrays), strict=True):
        floor = place = 0
        tightest = sys.maxsize
        for bottom, top in sorted([(bottoms[one], tops[one]) for one in before]):
            if size <= bottom - floor < tightest:
                tightest, place = bottom - floor, floor
            if top > floor:
                floor = top
        if tightest == sys.maxsize:
            place = floor
        bottoms.append(place)
        tops.append(place + size)
    return np.array(tops, dtype=np.int64)


def _met_before(arrays: Spans) -> Iterator[list[int]]:
    """For each array those before it, in the given order, that are alive at one of its steps."""
    count = len(arrays.first)
    # By their first steps, each meets those that follow until one starts after it ends.
    order = arrays.first.argsort(kind="stable")
    follow = arrays.first[order].searchsorted(arrays.last[order], side="right")
    follow -= np.arange(1, count + 1)
    one = order.repeat(follow)
    position = np.arange(1, count + 1).repeat(follow)
    position += np.arange(len(one)) - (follow.cumsum() - follow).repeat(follow)
    other = order[position]
    after = np.maximum(one, other)
    grouped = after.argsort(kind="stable")
    before = np.minimum(one, other)[grouped].tolist()
    ends = after[grouped].searchsorted(np.arange(count), side="right").tolist()
    for begin, end in itertools.pairwise([0, *ends]):
        yield before[begin:end]
