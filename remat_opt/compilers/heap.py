"""How large a heap must be to hold arrays with given lives, as XLA lays it out.

What is alive at once is a lower bound. Arrays do not move, and between two that stay there may be a
hole too small for the next one.

Method. While memory is plentiful, arrays are placed in the order in which the program makes them:
each into the tightest hole that is free for as long as it lives, else on top. Given the lives of
the arrays of compiled programs, this yields their heaps, to 0.1 MiB, once the signals of copies are
added (``copies``): 9,800 MiB with 9,065 alive for an unchanged GPT, 2,776 with 2,730 for one of its
plans, 3,956 with 3,854 for a plan of ViT-B/16.

Arrays of up to 48 MiB never get there if they are read soon and vector memory, 128 MiB on a v5e,
has room for them until then. XLA compares how long an array waits with how long it takes to copy it
to the heap and back; here an array stays if at most 12 times its bytes are written while it lives,
and those come first during whose life the fewest are. Up to 96 MiB stay at a time: the rest holds
what kernels read ahead. Even a small array that waits for longer is moved to the heap. It may lie
above a large one there, and keep the next large one from its place: of an attention layer's plan
with 273 MiB alive, row sums of 128 KiB above the scores make 386.

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

#: Arrays of at most this many bytes can stay in vector memory, if at most this multiple of their
#: bytes is written while they live.
_VECTOR_BYTES, _SOON = 48 * 2**20, 12
#: Arrays smaller than this share of what is alive at once are not placed individually.
_SMALL_SHARE = 1 / 8192
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
    return 96 * 2**20 if compiler.has("vector_memory") else 0


def laid_out_bytes(arrays: Spans, compiler: Compiler, *, vector_bytes: int = 0) -> int:
    """The size of the heap on which a compiler lays the arrays out.

    Args:
      arrays: their lives.
      compiler: which one it is.
      vector_bytes: see ``heap_bytes``.
    """
    arrays = _without_negative(arrays)
    if compiler.has("heap_in_order"):
        return heap_bytes(arrays, vector_bytes)
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


def heap_bytes(arrays: Spans, vector_bytes: int = 0) -> int:
    """The size of the heap that holds those of the arrays that do not stay in vector memory.

    Args:
      arrays: their lives.
      vector_bytes: how much of it may hold arrays at a time.
    """
    if vector_bytes:
        arrays = _chosen(arrays, ~_staying(arrays, vector_bytes))
    least = arrays.peak_bytes
    small = arrays.bytes < least * _SMALL_SHARE
    placed = _chosen(arrays, ~small)
    placed = _chosen(placed, np.lexsort((-placed.bytes, placed.last, placed.first)))
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


def _staying(arrays: Spans, vector_bytes: int) -> np.ndarray:
    """Which arrays stay in vector memory, of those that are no small share of what is alive."""
    steps = int(arrays.last.max(initial=-1)) + 1
    written = np.cumsum(np.bincount(arrays.first, arrays.bytes, steps))
    between = written[arrays.last] - written[arrays.first]
    fitting = np.flatnonzero(
        (arrays.bytes >= arrays.peak_bytes * _SMALL_SHARE)
        & (arrays.bytes <= _VECTOR_BYTES)
        & (between <= arrays.bytes * _SOON)
    )
    free = np.full(steps, vector_bytes)
    stays = np.full(len(arrays.bytes), False)
    for number in fitting[np.argsort(between[fitting], kind="stable")]:
        life = slice(arrays.first[number], arrays.last[number] + 1)
        if free[life].min() >= arrays.bytes[number]:
            free[life] -= arrays.bytes[number]
            stays[number] = True
    return stays


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
