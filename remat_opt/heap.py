"""How large a heap must be that holds arrays with given lives, as XLA lays it out.

What is alive at once is a lower bound. Arrays do not move, and between two that stay there may be a
hole that the next one does not fit.

Method. XLA knows all lives when it compiles, so it can place the arrays in any order. It takes them
by falling size, and puts each into the tightest hole that is free for as long as it lives, else on
top; then again by falling length of life; and keeps the smaller heap. So does this file.

Why not a ready-made tool: the answer is to be the compiler's, not the best one.

Complexity: O(n^2) for n arrays, in numpy. Arrays too small to leave holes that matter are not
placed; the most bytes of them alive at once are added.

Guarantee: at least what is alive at once. The compiler's own order of steps differs from the
replay's, and with it the holes, so its heap is near this one but not equal.

Reference: XLA, ``GlobalDecreasingSizeBestFitHeap`` and ``ChooseBestHeapAlgorithm``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from remat_opt.spans import Spans

#: Arrays smaller than this share of what is alive at once are not placed one by one.
_SMALL_SHARE = 1 / 256
#: A heap that exceeds what is alive by less than this share is not tried to be made smaller.
_TIGHT_SHARE = 1 / 256


def heap_bytes(arrays: Spans) -> int:
    """The size of the heap that holds the arrays; at least their ``peak_bytes``."""
    least = arrays.peak_bytes
    small = arrays.bytes < least * _SMALL_SHARE
    beside_bytes = _chosen(arrays, small).peak_bytes if small.any() else 0
    placed = _chosen(arrays, ~small)
    length = placed.last - placed.first
    by_size = np.lexsort((placed.first, -length, -placed.bytes))
    by_life = np.lexsort((placed.first, -placed.bytes, -length))
    found = _best_fit(_chosen(placed, by_size)) + beside_bytes
    if found > least * (1 + _TIGHT_SHARE):
        found = min(found, _best_fit(_chosen(placed, by_life)) + beside_bytes)
    return max(least, found)


def _chosen(arrays: Spans, which: np.ndarray) -> Spans:
    return dataclasses.replace(
        arrays, first=arrays.first[which], last=arrays.last[which], bytes=arrays.bytes[which]
    )


def _best_fit(arrays: Spans) -> int:
    """The size of the heap once the arrays are placed in the order given."""
    count = len(arrays.bytes)
    starts, ends = np.zeros((2, count), dtype=np.int64)
    for number, size in enumerate(arrays.bytes):
        meets = (arrays.first[:number] <= arrays.last[number]) & (
            arrays.last[:number] >= arrays.first[number]
        )
        order = np.argsort(starts[:number][meets], kind="stable")
        # Below each of these is a hole, or nothing; above them all, room without end.
        floors = np.zeros(len(order) + 1, dtype=np.int64)
        np.maximum.accumulate(ends[:number][meets][order], out=floors[1:])
        holes = starts[:number][meets][order] - floors[:-1]
        fitting = np.flatnonzero(holes >= size)
        place = fitting[holes[fitting].argmin()] if len(fitting) else -1
        starts[number] = floors[place]
        ends[number] = floors[place] + size
    return int(ends.max(initial=0))
