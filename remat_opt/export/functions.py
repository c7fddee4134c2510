"""The functions of a file being written: their names and their text, each once."""

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
    """The functions of a file; ``texts`` has them in an order that can run.

    Attributes:
      texts: the functions.
      helpers: the names of what they call in ``support``.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.helpers: set[str] = set()
        self._functions = set(_OF_SUPPORT)
        self._values: set[str] = set()
        self._top = Distinct(self._functions, self._values, self._functions)
        self._known: dict[str, str] = {}

    def helper(self, function: Callable[..., Any]) -> str:
        """Notes that a function of ``support`` is needed; returns its name."""
        self.helpers.add(function.__name__)
        return function.__name__

    def name(self, wanted: str) -> str:
        """A name for a function."""
        return self._top.name(wanted)

    def distinct(self, taken: Iterable[str] = ()) -> Distinct:
        """Gives names to values in a function, none of them a function's name."""
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
          function: its name, as given by ``name``.
          arguments: its arguments.
          lines: its body.
          said: its docstring.
          decorator: lines before it.
        """
        head = [*decorator, *wrapped(Call(f"def {function}", tuple(arguments)), "", ":")]
        body = [f'"""{said}"""'] if said else []
        self.texts.append("\n".join([*head, *(f"{INDENT}{line}" for line in (*body, *lines))]))

    def defined_once(self, wanted: str, arguments: Sequence[str], lines: Sequence[str]) -> str:
        """Adds a function, unless the same one is there; returns its name."""

        def write(function: str) -> None:
            self.define(function, arguments, lines)

        return self.once("\n".join([*arguments, *lines]), wanted, write)

    def once(self, key: str, wanted: str, write: Callable[[str], None]) -> str:
        """The name of the function with this key, which is named and written the first time."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.name(wanted)
            write(found)
        return found
