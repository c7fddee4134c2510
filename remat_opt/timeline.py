"""Memory over time as data: what is alive at each moment, and what it belongs to.

The referee's replay knows the life of every array. Here it is reduced to what a picture and its
reader need: the bytes of each kind at a few hundred moments, the fullest of each stretch, and the
arrays that are among the largest at any of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from remat_opt.graph import Graph
from remat_opt.schedule import Schedule
from remat_opt.simulator import Life, Simulation

Kind = Literal["kept", "boundaries", "passing", "recomputed", "gradients", "workspace"]

#: Kinds of what is alive, in the order in which they are stacked.
KINDS: tuple[Kind, ...] = get_args(Kind)

#: How many moments are recorded.
_MOST_MOMENTS = 240
#: How many arrays are recorded at each moment.
_MOST_ARRAYS = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """One array that is among the largest at some moment.

    Attributes:
      root: position of the equation of the value that it belongs to.
      kind: one of ``KINDS``.
      bytes: its size.
      first: number, among the recorded moments, of the first at which it is alive.
      last: likewise of the last.
    """

    root: int
    kind: Kind
    bytes: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is alive at the moments of a forward and a backward pass; bytes of temporaries.

    All tuples but ``arrays`` have one entry for each moment.

    Attributes:
      steps: how many steps the two passes have.
      at: numbers of the recorded steps, ascending: the fullest of each stretch.
      phases: what is done: ``forward``, ``recompute`` or ``backward``.
      roots: position of the equation of the value that is computed or differentiated.
      kept: values, and unnamed residuals such as those of loops, that wait for the backward pass of
        their own region.
      boundaries: values that wait for the backward pass of a later region.
      passing: values that wait for the forward pass alone.
      recomputed: values that were computed again.
      gradients: gradients of values, and of parameters if those are temporaries.
      workspace: what a step takes while it runs, unnamed residuals that were computed again, and
        the correction by what was learnt about the compiler.
      arrays: those that are among the largest at some moment.
    """

    steps: int
    at: tuple[int, ...]
    phases: tuple[Literal["forward", "recompute", "backward"], ...]
    roots: tuple[int, ...]
    kept: tuple[int, ...]
    boundaries: tuple[int, ...]
    passing: tuple[int, ...]
    recomputed: tuple[int, ...]
    gradients: tuple[int, ...]
    workspace: tuple[int, ...]
    arrays: tuple[Alive, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """What a training step has in memory throughout, besides its temporaries; in bytes.

    Attributes:
      parameters: what is differentiated.
      optimizer_state: what the optimizer alone reads.
      inputs: other arguments, such as the batch, and constants.
      results: what the step returns and no donated argument has room for.
    """

    parameters: int
    optimizer_state: int
    inputs: int
    results: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.parameters + self.optimizer_state + self.inputs + self.results


#: For a function that computes nothing.
NOTHING = Timeline(
    steps=0,
    at=(),
    phases=(),
    roots=(),
    kept=(),
    boundaries=(),
    passing=(),
    recomputed=(),
    gradients=(),
    workspace=(),
    arrays=(),
)


def timeline(
    graph: Graph,
    schedule: Schedule,
    found: Simulation,
    *,
    live_bytes: Sequence[int],
    gradient_bytes: Sequence[int],
    roots: Sequence[int],
) -> Timeline:
    """What is alive when, from a replay.

    Args:
      graph: what was replayed.
      schedule: likewise.
      found: the replay.
      live_bytes: all that is expected to be alive at each of its moments, if corrected; the
        difference counts as workspace.
      gradient_bytes: for each vertex, how much of its workspace is gradients of parameters.
      roots: for each vertex, the position of its equation.
    """
    chosen = _fullest(live_bytes)
    boundaries = _boundaries(graph, schedule, found)
    shares = {kind: np.zeros(len(chosen), dtype=np.int64) for kind in KINDS}
    arrays: list[Alive] = []
    for life in found.lives:
        # The recorded moments at which it is alive.
        first, last = np.searchsorted(chosen, (life.first, life.last + 1))
        if first == last:
            continue
        waits = found.waits_inside(life)
        for kind, size in _parts(life, boundaries, gradient_bytes, waits_inside=waits):
            shares[kind][first:last] += size
            arrays.append(
                Alive(
                    root=roots[life.vertex],
                    kind=kind,
                    bytes=size,
                    first=int(first),
                    last=int(last) - 1,
                )
            )
    _add_difference(shares, np.array(live_bytes, dtype=np.int64)[chosen])
    moments = [found.moments[step] for step in chosen]
    return Timeline(
        steps=len(found.moments),
        at=tuple(chosen.tolist()),
        phases=tuple(moment.phase for moment in moments),
        roots=tuple(roots[moment.vertex] for moment in moments),
        arrays=_largest(arrays, len(chosen)),
        **{kind: tuple(shares[kind].tolist()) for kind in KINDS},
    )


def _fullest(live_bytes: Sequence[int]) -> NDArray[np.int64]:
    """For each stretch, the step at which most is alive."""
    count = len(live_bytes)
    edges = np.unique(np.linspace(0, count, min(count, _MOST_MOMENTS) + 1).astype(np.int64))
    amounts = np.array(live_bytes, dtype=np.int64)
    return np.array(
        [start + int(amounts[start:end].argmax()) for start, end in itertools.pairwise(edges)],
        dtype=np.int64,
    )


def _boundaries(graph: Graph, schedule: Schedule, found: Simulation) -> frozenset[int]:
    """The vertices that are in memory only for the backward pass of later regions.

    What a region keeps for itself, by name or without a checkpoint, is not among them.
    """
    own: set[int] = set()
    for region in schedule.regions:
        if region.checkpointed:
            own.update(region.kept)
        else:
            within = set(region.vertices)
            for vertex in region.vertices:
                own.update(within.intersection(graph.needs[vertex]))
    return frozenset(found.stored) - own


def _parts(
    life: Life,
    boundaries: frozenset[int],
    gradient_bytes: Sequence[int],
    *,
    waits_inside: bool,
) -> list[tuple[Kind, int]]:
    """The kinds of an array, and the bytes of each."""
    if waits_inside:
        return [("kept", life.bytes)]
    if life.role == "kept":
        return [("boundaries" if life.vertex in boundaries else "kept", life.bytes)]
    if life.role == "forward":
        return [("passing", life.bytes)]
    if life.role == "recomputed":
        return [("recomputed", life.bytes)]
    if life.role == "cotangent":
        return [("gradients", life.bytes)]
    if life.role == "workspace":
        of_parameters = min(gradient_bytes[life.vertex], max(life.bytes, 0))
        parts: list[tuple[Kind, int]] = [
            ("gradients", of_parameters),
            ("workspace", life.bytes - of_parameters),
        ]
        return [(kind, size) for kind, size in parts if size]
    return [("workspace", life.bytes)]


def _add_difference(shares: dict[Kind, NDArray[np.int64]], totals: NDArray[np.int64]) -> None:
    """Makes the shares sum up to the totals: workspace first, then what is stacked below it."""
    left = totals - sum(shares.values())
    for kind in reversed(KINDS):
        changed = np.maximum(shares[kind] + left, 0)
        left -= changed - shares[kind]
        shares[kind] = changed


def _largest(arrays: Sequence[Alive], count: int) -> tuple[Alive, ...]:
    """Those that are among the largest at some moment, in order of creation."""
    room = np.full(count, _MOST_ARRAYS, dtype=np.int64)
    found = []
    for one in sorted(arrays, key=lambda one: (-one.bytes, one.root, one.kind, one.first)):
        if one.bytes > 0 and room[one.first : one.last + 1].any():
            room[one.first : one.last + 1] -= room[one.first : one.last + 1] > 0
            found.append(one)
    return tuple(sorted(found, key=lambda one: (one.first, one.last, one.root, one.kind)))
