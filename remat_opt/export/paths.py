"""Where an argument's arrays are, as code: ``params["layers"][3]["kernel"]``."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax

from remat_opt.export.literals import quoted
from remat_opt.export.naming import identifier

_NUMBERED = re.compile(r"(.*?\D)(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: what comes before its number, the number, and what comes after.

    If the step has no number, the first part is all its text.
    """

    before: str
    number: int | None = None
    behind: str = ""

    def text(self, number: str | None = None) -> str:
        """The step as code, with an expression in place of its number."""
        if self.number is None:
            return self.before
        if not self.before.startswith('["'):
            return f"{self.before}{self.number if number is None else number}{self.behind}"
        if number is None:
            return f"{self.before}{self.number}{self.behind}"
        return f"[f{self.before[1:]}{{{number}}}{self.behind}"


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """An array in an argument.

    Attributes:
      root: the argument.
      steps: into it.
      words: the same in words.
    """

    root: str
    steps: tuple[Step, ...]
    words: tuple[str, ...]

    def pattern(self) -> str:
        """The path with * for its numbers."""
        return self.root + "".join(
            f"{step.before}*{step.behind}" if step.number is not None else step.text()
            for step in self.steps
        )

    def __str__(self) -> str:
        return self.root + "".join(step.text() for step in self.steps)


def paths_of(root: str, argument: Any) -> list[Path] | None:
    """Paths to the leaves of an argument; None if code cannot step into a node."""
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
        steps, words = [], [identifier(root)]
        reached = argument
        for key in keys:
            try:
                if isinstance(key, jax.tree_util.SequenceKey):
                    reached = reached[key.idx]
                    steps.append(Step("[", key.idx, "]"))
                elif isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str | int):
                    reached = reached[key.key]
                    steps.append(_of_key(key.key))
                    words.append(identifier(str(key.key)))
                elif isinstance(key, jax.tree_util.GetAttrKey):
                    reached = getattr(reached, key.name)
                    steps.append(Step(f".{key.name}"))
                    words.append(identifier(key.name))
                else:
                    return None
            except (AttributeError, IndexError, KeyError, TypeError):
                return None
        if reached is not leaf:
            return None
        found.append(Path(root, tuple(steps), tuple(words)))
    return found


def _of_key(key: str | int) -> Step:
    if isinstance(key, int):
        return Step(f"[{key}]")
    match = _NUMBERED.fullmatch(key)
    plain = key.isidentifier()
    if plain and match and not match[2].startswith("0" * 2) and str(int(match[2])) == match[2]:
        return Step(f'["{match[1]}', int(match[2]), '"]')
    return Step(f"[{quoted(key)}]")
