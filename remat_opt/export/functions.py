"""The functions of a file that is being written: their names, their text, each one once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from remat_opt.export import support
from remat_opt.export.calls import Call
from remat_opt.export.layout import INDENT, wrapped
from remat_opt.export.naming import Distinct

#: The names of the functions of ``support``.
_OF_SUPPORT = frozenset(name for name, _ in inspect.getmembers(support, inspect.isfunction))


class Functions:
    """The functions of a file; in ``texts`` they are in an order in which they can be run.

    Attributes:
      texts: the functions.
      helpers: the names of what they call of ``support``.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.helpers: set[str] = set()
        self._functions = set(_OF_SUPPORT)
        self._values: set[str] = set()
        self._top = Distinct(self._functions, self._values, self._functions)
        self._known: dict[str, str] = {}

    def helper(self, function: Callable[..., Any]) -> str:
        """A function of ``support`` that is needed; its name."""
        self.helpers.add(function.__name__)
        return function.__name__

    def name(self, wanted: str) -> str:
        """A name for a function."""
        return self._top.name(wanted)

    def distinct(self, taken: Iterable[str] = ()) -> Distinct:
        """Gives the names of values in a function; none of them is that of a function."""
        return Distinct(taken, self._functions, self._values)

    def define(
        self,
        function: str,
        arguments: Sequence[str],
        lines: Sequence[str],
        *,
        said: str = "",
        decorator: Sequence[str] = (),
    ) -> None:
        """Adds a function.

        Args:
          function: its name, which ``name`` has given.
          arguments: of it.
          lines: its body.
          said: its docstring.
          decorator: lines before it.
        """
        head = [*decorator, *wrapped(Call(f"def {function}", tuple(arguments)), "", ":")]
        body = [f'"""{said}"""'] if said else []
        self.texts.append("\n".join([*head, *(f"{INDENT}{line}" for line in (*body, *lines))]))

    def defined_once(self, wanted: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
        """Adds a function, unless one that is the same is there; its name."""

        def write(function: str) -> None:
            self.define(function, arguments, lines)

        return self.once("\n".join([*arguments, *lines]), wanted, write)

    def once(self, key: str, wanted: str, write: Callable[[str], None]) -> str:
        """The name of what has this key; the first time it is given a name and written."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.name(wanted)
            write(found)
        return found
