"""What is known about pieces of regions with the same code, and the functions they become."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

#: Names of the outputs of named equations, by the equations' positions in their function.
Labels = dict[int, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A piece as a function.

    Attributes:
      name: the function's name.
      takes_at: whether its first argument is a prefix for the names in it.
      labels: the names in it.
    """

    name: str
    takes_at: bool
    labels: Labels


class Same:
    """What is known about pieces with the same code, by that code.

    Attributes:
      as_region: how often they are a region.
      inside: how often they are called otherwise.
      told: those whose names must differ by caller.
      named: positions of the equations that have a name in any of them.
      reached: positions and inputs of the equations that have a derivative in any of them.
      written: the functions; if callers do not pass a prefix, also by their prefix.
    """

    def __init__(self) -> None:
        self.as_region: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self.told: set[str] = set()
        self.named: defaultdict[str, set[int]] = defaultdict(set)
        self.reached: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        self.written: dict[tuple[str, str], Function] = {}

    def uses(self, key: str) -> int:
        """How often a piece occurs."""
        return self.as_region[key] + self.inside[key]
