"""The last few of what was worked out, by what it was worked out for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """At most so many values; the one that was asked for the longest ago goes first.

    Several threads may use it. Of two that ``put`` a value, both are given the one that was first.

    Example:
      >>> squares = Recent(2)
      >>> [squares.put(number, number**2) for number in (1, 2, 3)]
      [1, 4, 9]
      >>> squares.get(1), squares.get(3), len(squares)
      (None, 9, 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[KeyT, ValueT] = OrderedDict()
        self._lock = threading.Lock()
        # Of what is being worked out.
        self._making: dict[KeyT, threading.RLock] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: KeyT) -> ValueT | None:
        """The value for ``key``, or None where it is not there."""
        with self._lock:
            if key not in self._known:
                return None
            self._known.move_to_end(key)
            return self._known[key]

    def put(self, key: KeyT, value: ValueT) -> ValueT:
        """Holds the value, unless there is one already; gives the one that is there."""
        with self._lock:
            found = self._known.setdefault(key, value)
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
            return found

    def renew(self, key: KeyT, value: ValueT) -> ValueT:
        """Holds the value in place of the one that is there."""
        with self._lock:
            self._known.pop(key, None)
        return self.put(key, value)

    def made(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """The value for ``key``, worked out where it is not there.

        Of several threads one does so, and the others wait. What ``make`` raises is raised, and
        then the next tries.

        Example:
          >>> squares = Recent(2)
          >>> squares.made(3, lambda: 9), squares.made(3, lambda: 10)
          (9, 9)
        """
        with self._lock:
            making = self._making.setdefault(key, threading.RLock())
        try:
            with making:
                found = self.get(key)
                return self.put(key, make()) if found is None else found
        finally:
            with self._lock:
                self._making.pop(key, None)
