"""A cache of the last few results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """Holds a limited number of values and drops the least recently used first.

    Several threads may use it. If two ``put`` a value, both get the first one.

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
        # For values being worked out.
        self._making: dict[KeyT, threading.RLock] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: KeyT) -> ValueT | None:
        """The value for ``key``, or None if it is not there."""
        with self._lock:
            if key not in self._known:
                return None
            self._known.move_to_end(key)
            return self._known[key]

    def put(self, key: KeyT, value: ValueT) -> ValueT:
        """Stores the value unless there is one already; returns the stored one."""
        with self._lock:
            found = self._known.setdefault(key, value)
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
            return found

    def renew(self, key: KeyT, value: ValueT) -> ValueT:
        """Stores the value in place of any that is there."""
        with self._lock:
            self._known.pop(key, None)
        return self.put(key, value)

    def made(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """The value for ``key``, worked out if it is not there.

        Of several threads, one works it out and the others wait. If ``make`` raises, so does this,
        and the next thread tries.

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
