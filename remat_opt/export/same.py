"""What is known of pieces of regions that are the same code, and the functions they become."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

#: Names of the outputs of named equations, by the place of these in their function.
Labels = dict[int, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A piece as a function.

    Attributes:
      name: of the function.
      takes_at: whether it is told what to put before the names in it, as its first argument.
      labels: the names in it.
    """

    name: str
    takes_at: bool
    labels: Labels


class Same:
    """What is known of pieces that are the same code, by that code.

    Attributes:
      as_region: how often they are a region.
      inside: how often they are called otherwise.
      told: those of which the names are to differ by who calls them.
      named: places of the equations that have a name in any of them.
      reached: places and inputs of equations that have a derivative in any of them.
      written: the functions; also by what begins the names in them, where they are not told.
    """

    def __init__(self) -> None:
        self.as_region: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self.told: set[str] = set()
        self.named: defaultdict[str, set[int]] = defaultdict(set)
        self.reached: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        self.written: dict[tuple[str, str], Function] = {}

    def uses(self, key: str) -> int:
        """How often a piece comes."""
        return self.as_region[key] + self.inside[key]
