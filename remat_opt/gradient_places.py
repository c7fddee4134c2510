"""Where what an iteration keeps can wait in the stacks of gradients.

Problem. An iteration of a loop keeps some values for the backward pass. The gradients of what it
reads of stacks will be written there once it has been differentiated, and until then these entries
are free. Which values go where?

Method. First fit, the largest first. A value takes whole rows of one entry; if its elements are
smaller than those of the entry, two or more of them lie in one. Of several entries it takes one
whose rows are as long as its own, so that no compiler has to move elements within them, and of
these the one with the least room. What fits nowhere as a whole is cut into pieces along all axes
but the last one, each for the entry with the most room, but into no small ones. The rest waits in
a stack of its own.

On a mesh each device puts its part of a value into its part of an entry. Devices that have equal
parts of an entry must not write different things there, so that a value can wait only in entries
that are split along every axis of the mesh along which it is.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set
from typing import Any, Protocol

import numpy as np

#: No piece is smaller than this share of its value.
_LEAST_SHARE = 1 / 8


class Kind(Protocol):
    """What is asked of the type of an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> Any:
        """Its dtype."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a value waits.

    Attributes:
      entry: the position of the entry.
      row: the first row there.
      rows: how many it takes, the last of them maybe in part.
      together: how many of its elements lie in one of the entry's.
    """

    entry: int
    row: int
    rows: int
    together: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some of a value's lines, which are what differs in no index but the last one.

    Attributes:
      first: the first line.
      lines: how many.
      place: where they wait; None for a stack of their own.
    """

    first: int
    lines: int
    place: Place | None


def places(
    values: Sequence[Kind],
    entries: Sequence[Kind],
    value_axes: Sequence[Set[str]] | None = None,
    entry_axes: Sequence[Set[str]] | None = None,
) -> list[list[Piece]]:
    """For each value its pieces, in order.

    Args:
      values: what an iteration keeps; on a mesh, one device's parts.
      entries: what its gradients have an entry of each; scalars take nothing.
      value_axes: the axes of a mesh that each value is split along; None without one.
      entry_axes: likewise of the entries.
    """
    value_axes = value_axes or [frozenset()] * len(values)
    entry_axes = entry_axes or [frozenset()] * len(entries)
    free = [entry.shape[0] if entry.shape else 0 for entry in entries]

    def placed(value: Kind, lines: int, entry: int) -> Place:
        together = _together(value, entries[entry])
        rows = _rows(value, lines, entries[entry])
        row = entries[entry].shape[0] - free[entry]
        free[entry] -= rows
        return Place(entry=entry, row=row, rows=rows, together=together)

    found: list[list[Piece]] = [[] for _ in values]
    for number in sorted(range(len(values)), key=lambda n: (-_bytes(values[n]), n)):
        value, lines = values[number], lines_of(values[number])
        # Whether their rows are of other lengths, their room, and which they are.
        ranked = sorted(
            (value.shape[-1:] != entry.shape[-1:], free[n] * _bytes(entry), n)
            for n, entry in enumerate(entries)
            if _together(value, entry)
            and free[n]
            and _bytes(entry)
            and value_axes[number] <= entry_axes[n]
        )
        whole = (n for _, _, n in ranked if 0 < _rows(value, lines, entries[n]) <= free[n])
        if (best := next(whole, None)) is not None:
            found[number].append(Piece(first=0, lines=lines, place=placed(value, lines, best)))
            continue
        first = 0
        for _, _, n in sorted(ranked, key=lambda one: (one[0], -one[1], one[2])):
            most = _lines(value, free[n], entries[n])
            if _LEAST_SHARE * lines <= (some := min(most, lines - first)) and some:
                place = placed(value, some, n)
                found[number].append(Piece(first=first, lines=some, place=place))
                first += some
        if first < lines or not lines:
            found[number].append(Piece(first=first, lines=lines - first, place=None))
    return found


def lines_of(value: Kind) -> int:
    """How many lines a value has."""
    return math.prod(value.shape[:-1] if len(value.shape) > 1 else value.shape)


def _line(value: Kind) -> int:
    """The elements of a line."""
    return value.shape[-1] if len(value.shape) > 1 else 1


def _rows(value: Kind, lines: int, entry: Kind) -> int:
    """The rows of an entry that some lines of a value take."""
    in_row = _together(value, entry) * math.prod(entry.shape[1:])
    return -(-lines * _line(value) // in_row)


def _lines(value: Kind, rows: int, entry: Kind) -> int:
    """The lines of a value that some rows of an entry take."""
    in_row = _together(value, entry) * math.prod(entry.shape[1:])
    return rows * in_row // _line(value) if _line(value) else 0


def _bytes(kind: Kind) -> int:
    return math.prod(kind.shape) * _itemsize(kind)


def _together(value: Kind, entry: Kind) -> int:
    """How many elements of a value lie in one of an entry; 0 if none can."""
    small, large = _itemsize(value), _itemsize(entry)
    return large // small if small and large and not large % small else 0


def _itemsize(kind: Kind) -> int:
    """Bytes of an element; 0 if its bits cannot be taken for others."""
    try:
        dtype = np.dtype(kind.dtype)
    except TypeError:  # keys
        return 0
    return 0 if dtype.kind in "cO" or dtype.itemsize > 8 else dtype.itemsize
