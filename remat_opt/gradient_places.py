"""Where what an iteration keeps can wait in the stacks of gradients.

Problem. An iteration of a loop keeps some values for the backward pass. The gradients of what it
reads of stacks will be written there once it has been differentiated, and until then these entries
are free. Which values go where?

Method. First fit, the largest first. A value takes whole rows of one entry; if its elements are
smaller than those of the entry, two or more of them lie in one. Of several entries it takes one
whose rows are as long as its own, so that no compiler has to move elements within them, and of
these the one with the least room. What fits nowhere waits in a stack of its own.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


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


def places(values: Sequence[Kind], entries: Sequence[Kind]) -> list[Place | None]:
    """For each value where it waits; None if it fits nowhere.

    Args:
      values: what an iteration keeps.
      entries: what its gradients have an entry of each; scalars take nothing.
    """
    free = [entry.shape[0] if entry.shape else 0 for entry in entries]
    found: list[Place | None] = [None] * len(values)
    for number in sorted(range(len(values)), key=lambda n: (-_bytes(values[n]), n)):
        value = values[number]
        fitting = [
            (value.shape[-1:] != entry.shape[-1:], free[n] * _bytes(entry), n, rows, together)
            for n, entry in enumerate(entries)
            if (together := _together(value, entry))
            and 0 < (rows := _rows(value, entry, together)) <= free[n]
        ]
        if fitting:
            _, _, n, rows, together = min(fitting)
            row = entries[n].shape[0] - free[n]
            found[number] = Place(entry=n, row=row, rows=rows, together=together)
            free[n] -= rows
    return found


def _rows(value: Kind, entry: Kind, together: int) -> int:
    in_row = together * math.prod(entry.shape[1:])
    return -(-math.prod(value.shape) // in_row) if in_row else 0


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
