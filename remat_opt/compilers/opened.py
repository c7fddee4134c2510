"""Opened loops and choices: what their vertices take, depending on what is decided inside."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from remat_opt.compilers.effects import Effect, Figures
from remat_opt.schedule import Inside, Schedule
from remat_opt.solvers.base import Overhead


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One way to open a loop or a choice.

    Attributes:
      vertex: the loop or choice.
      loop: what is decided.
      stacked_bytes: the total that its iterations, or branches, keep for the backward pass.
      workspace_bytes: what its backward pass takes besides.
      closed_bytes: what it takes besides what it keeps if the loop is not opened.
      seconds: of recomputation.
      flops: likewise.
    """

    vertex: int
    loop: Inside
    stacked_bytes: int
    workspace_bytes: int
    closed_bytes: int
    seconds: float
    flops: int

    def cost(self, measure: Overhead) -> float:
        """What is computed again, in the given measure."""
        return measure.of(self.seconds, self.flops)

    def write(self, figures: Figures) -> None:
        """Writes what the loop takes then."""
        figures.internal_bytes[self.vertex] = self.stacked_bytes
        figures.workspace_bytes[self.vertex] += self.workspace_bytes - self.closed_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened(Effect):
    """All ways to open the loops and choices of a program.

    Attributes:
      ways: by what is decided.
    """

    ways: Mapping[Inside, Opening]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Writes what the opened loops take."""
        for loop in schedule.loops:
            self.ways[loop].write(figures)

    def recomputation(self, schedule: Schedule) -> tuple[float, int]:
        """What their iterations compute again."""
        ways = [self.ways[loop] for loop in schedule.loops]
        return math.fsum(way.seconds for way in ways), sum(way.flops for way in ways)
