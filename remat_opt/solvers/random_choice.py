"""Kept vertices by chance: the baseline of OGC.

Problem. As in ``arbitrary_graph``: vertices to keep so that the rest falls apart into independent
segments, for little memory.

Method. Draw one to five vertices among all; if the rest is not independent, draw again until there
are ten valid draws; report the best of the ten. Source and target are always kept (correction 1),
so the vertices drawn are others.

Why not a ready-made tool: there is nothing to it. The generator is Python's own. Its sequence for a
given seed is documented to stay the same between versions for ``random()``, the only method used.

Complexity: O(n + e) per draw.

Guarantee: none. The same seed gives the same answer. After ``MOST_DRAWS`` draws, the best of the
valid ones so far is taken; keeping only the ends is always valid, and is taken if no draw was.

Left out: everything that a search would do.

Reference: Feng & Huang (2021), section 6.
"""

from __future__ import annotations

import dataclasses
import random

from remat_opt.graph import Graph
from remat_opt.solvers.base import Solution, Status
from remat_opt.solvers.division_tree import Checkpoints, Dependent, assess, ends, schedule_of

#: Vertices drawn at a time: from the first number to the second.
FEWEST, MOST = 1, 5
#: Valid draws of which the best is reported.
TRIALS = 10
#: The number of draws after which the search ends in any case.
MOST_DRAWS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The best draw, and how many it took.

    Attributes:
      checkpoints: kept set and memory of the best.
      valid: how many draws left independent segments; ``TRIALS`` unless draws ran out.
      drawn: how many draws there were.
    """

    checkpoints: Checkpoints
    valid: int
    drawn: int


def solve(graph: Graph, *, seed: int = 0) -> Solution[Draws]:
    """The best of ten random kept sets.

    Args:
      graph: what to plan.
      seed: decides all draws.
    """
    generator = random.Random(seed)
    others = [vertex for vertex in range(len(graph)) if vertex not in ends(graph)]
    best: Checkpoints | None = None
    valid = drawn = 0
    # Without other vertices there is only one kept set.
    while others and valid < TRIALS and drawn < MOST_DRAWS:
        drawn += 1
        found = assess(graph, _sample(generator, others))
        if isinstance(found, Dependent):
            continue
        valid += 1
        if best is None or found.total_bytes < best.total_bytes:
            best = found
    if best is None:
        nothing = assess(graph, ())
        assert not isinstance(nothing, Dependent), "one segment, or several between the ends"
        best = nothing
    return Solution(
        schedule=schedule_of(graph, best),
        figures=Draws(checkpoints=best, valid=valid, drawn=drawn),
        status=Status.FEASIBLE,
        objective=float(best.total_bytes),
        bound=0.0,
    )


def _sample(generator: random.Random, vertices: list[int]) -> list[int]:
    """One to five distinct vertices."""
    count = min(FEWEST + int(generator.random() * (MOST - FEWEST + 1)), len(vertices))
    left = list(vertices)
    chosen = []
    for _ in range(count):
        chosen.append(left.pop(int(generator.random() * len(left))))
    return chosen
