"""Region boundaries for a given kept set, by the linear-chain solver.

Problem. Given what is kept by name, cut the order of execution into a chain of regions so
that the peak over the whole backward pass is least, the last region left without a
checkpoint.

Method. While the region [i, j) runs backward, memory holds

    exports of the regions before it + W(i, j),

where W(i, j), its workspace, is the most that its kept, recomputed and cotangent bytes
reach at any of its steps; and the exports of a region are the values that later regions'
backward passes read and that are not kept anyway. For a trial bound C on the peak, the
least exports with which position j can be reached,

    D(j) = min { D(i) + exports(i, j) : D(i) + W(i, j) <= C },

is a shortest path over the positions (the accessibility graph of Feng & Huang, where an
edge is there if it fits the trial term), and fewer exports are never worse. Bisection on C
gives the least peak; a larger C lets the free last region grow, which costs memory and
saves recomputation.

Why not a ready-made tool: the edges of this path depend on C and on the distance reached so
far, and the workspace of all O(n^2) segments is computed together with numpy.

Complexity: O(n m) time for the workspaces and O(m^2) per trial, for n vertices and at most m
candidate positions.

Guarantee: the shortest path is exact for this model of the workspace, in which a value is
held from the first step that makes it needed to its last reader; ``simulator`` is the
judge of the result. Left out: nested regions.

Reference: Feng & Huang (2018, 2021), linear graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import demand
from remat_opt.solvers.lifetimes import cotangent_profile, crossing_bytes, lifetimes, positions

#: Strains that ``relaxed_chains`` tries, as shares of that of the first chain found.
_STRAIN_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The figures of all segments, for one kept set.

    Attributes:
      positions: candidate boundaries: 0, ..., the number of vertices.
      workspace_bytes: [a, b] for the segment between positions a and b, checkpointed.
      exports_bytes: [a, b] what the segment leaves for later regions.
      strain_bytes: [a, b] the part of the workspace that is recomputed values and cotangents.
      free_bytes: [a] workspace of the segment from position a to the end, no checkpoint.
    """

    positions: np.ndarray
    workspace_bytes: np.ndarray
    exports_bytes: np.ndarray
    strain_bytes: np.ndarray
    free_bytes: np.ndarray


def segments(graph: Graph, kept: Sequence[int], *, most_positions: int = 160) -> Segments:
    """Computes workspace and exports of every segment between candidate boundaries."""
    count = len(graph)
    sizes = np.asarray(graph.bytes, dtype=float)
    is_kept = np.zeros(count, dtype=bool)
    is_kept[list(kept)] = True
    whole = Schedule(regions=(Region(vertices=tuple(range(count)), kept=tuple(kept)),))
    again = demand(graph, whole).recomputed[0]
    last_reader, last_need, end_use = lifetimes(graph, again)
    cotangents = cotangent_profile(graph)

    # Kept values still alive at backward step t: those not yet past their last reader.
    kept_alive = np.zeros(count + 1)
    for value in np.flatnonzero(is_kept):
        kept_alive[min(last_reader[value], count)] += sizes[value]
    kept_at = np.cumsum(kept_alive)[:count]

    fixed = cotangents + kept_at
    recomputed = np.zeros(count, dtype=bool)
    recomputed[list(again)] = True
    needed = np.zeros(count, dtype=bool)
    needed[sorted({n for needs in graph.needs for n in needs})] = True

    edges = positions(crossing_bytes(graph, end_use, is_kept), most_positions)
    number = len(edges)
    workspace = np.full((number, number), np.inf)
    exports = np.zeros((number, number))
    strains = np.full((number, number), np.inf)
    free = np.full(number, np.inf)
    # Going down over the start of the segment, values join one after the other.
    alive = np.zeros(count)
    free_alive = np.zeros(count)
    internal = np.asarray(graph.internal_bytes, dtype=float)
    export_alive = np.zeros(count + 1)
    row = number - 1
    for vertex in range(count - 1, -1, -1):
        if not is_kept[vertex]:
            if recomputed[vertex]:
                alive[last_need[vertex] :] += sizes[vertex]
            if needed[vertex]:
                free_alive[last_need[vertex] :] += sizes[vertex]
            if end_use[vertex] > vertex:
                export_alive[vertex + 1 : end_use[vertex] + 1] += sizes[vertex]
        # Provided by the run of the vertex, kept or not, and held until its backward step.
        alive[vertex:] += internal[vertex]
        free_alive[vertex:] += internal[vertex]
        while row > 0 and edges[row] > vertex:
            row -= 1
        if edges[row] == vertex:
            profile = np.maximum.accumulate((fixed + alive)[vertex:])
            ends = edges[row + 1 :]
            workspace[row, row + 1 :] = profile[ends - vertex - 1]
            strained = np.maximum.accumulate((cotangents + alive)[vertex:])
            strains[row, row + 1 :] = strained[ends - vertex - 1]
            exports[row, row + 1 :] = export_alive[ends]
            free[row] = (fixed + free_alive)[vertex:].max()
    return Segments(
        positions=edges,
        workspace_bytes=workspace,
        exports_bytes=exports,
        strain_bytes=strains,
        free_bytes=free,
    )


def chains(
    figures: Segments,
    bounds_bytes: Sequence[float],
    *,
    strains_bytes: Sequence[float] | None = None,
) -> list[list[int] | None]:
    """For each bound the boundaries of a chain within it, with the largest free region.

    Args:
      figures: of all segments.
      bounds_bytes: bounds C on the peak; all are solved together.
      strains_bytes: for each bound a limit on the strain of every region; none if left out.

    Returns:
      For each bound ascending positions from 0 to the start of the free region, or None
      where no chain is within it.
    """
    bounds = np.asarray(bounds_bytes, dtype=float)[:, None]
    limits = np.full_like(bounds, np.inf)
    if strains_bytes is not None:
        limits[:, 0] = strains_bytes
    number = len(figures.positions)
    reached = np.full((len(bounds), number), np.inf)
    reached[:, 0] = 0.0
    came_from = np.zeros((len(bounds), number), dtype=int)
    workspace, exports = figures.workspace_bytes.T.copy(), figures.exports_bytes.T.copy()
    strain = figures.strain_bytes.T.copy()
    rows = np.arange(len(bounds))
    for target in range(1, number - 1):
        before = reached[:, :target]
        within = before + workspace[target, :target] <= bounds
        within &= strain[target, :target] <= limits
        costs = np.where(within, before + exports[target, :target], np.inf)
        # Among equals the longest region: fewer barriers.
        best = costs.argmin(axis=1)
        came_from[:, target] = best
        reached[:, target] = costs[rows, best]
    # The last position is the end of the program: no region starts there.
    ends = reached[:, :-1] + figures.free_bytes[:-1] <= bounds
    found: list[list[int] | None] = []
    for row in rows:
        if not ends[row].any():
            found.append(None)
            continue
        chain = [int(ends[row].argmax())]
        while chain[-1] > 0:
            chain.append(int(came_from[row, chain[-1]]))
        found.append([int(figures.positions[position]) for position in chain[::-1]])
    return found


def relaxed_chains(figures: Segments, bounds_bytes: Sequence[float]) -> list[list[int] | None]:
    """Chains as ``chains`` finds them, with the least strain that costs nothing.

    Many chains have the same peak, because another region decides it. Of those the one whose
    regions recompute the least at a time is the safest: the compiler is free in the order
    within a region. A smaller strain is taken if the free last region stays as large.
    """
    found = chains(figures, bounds_bytes)
    trials: list[tuple[int, float]] = []
    place = {int(position): index for index, position in enumerate(figures.positions)}
    for number, boundaries in enumerate(found):
        if boundaries is None or len(boundaries) < 2:
            continue
        rows = [place[boundary] for boundary in boundaries]
        strain = figures.strain_bytes[rows[:-1], rows[1:]].max()
        trials += [(number, strain * share) for share in _STRAIN_SHARES]
    if not trials:
        return found
    attempts = chains(
        figures,
        [bounds_bytes[number] for number, _ in trials],
        strains_bytes=[strain for _, strain in trials],
    )
    # Shares ascend, so the first success is the least strain.
    settled: set[int] = set()
    for (number, _), attempt in zip(trials, attempts, strict=True):
        current = found[number]
        if number in settled or attempt is None or current is None:
            continue
        if attempt[-1] <= current[-1]:
            found[number] = attempt
            settled.add(number)
    return found


def least_bound(figures: Segments, *, rounds: int = 3, trials: int = 16) -> float:
    """The least peak bound for which there is a chain, to ``trials ** -rounds`` of the start."""
    low, high = 0.0, float(figures.free_bytes[0])
    for _ in range(rounds):
        bounds = np.linspace(low, high, trials + 1)
        feasible = [chain is not None for chain in chains(figures, bounds[1:-1].tolist())] + [True]
        first = feasible.index(True) + 1
        low, high = float(bounds[first - 1]), float(bounds[first])
    return high


def schedule_of(graph: Graph, kept: Sequence[int], boundaries: Sequence[int]) -> Schedule:
    """The schedule with these boundaries, in which exported values are kept by name too."""
    count = len(graph)
    edges = [*boundaries, count]
    keep = set(kept)
    regions = []
    for start, stop in _around_pinned(graph, edges):
        vertices = tuple(range(start, stop))
        free = stop == count or graph.pinned[start]
        regions.append(
            Region(
                vertices=vertices,
                kept=() if free else tuple(v for v in vertices if v in keep),
                checkpointed=not free,
            )
        )
    draft = Schedule(regions=tuple(regions)) if regions else plain(graph)
    stored = demand(graph, draft).stored
    return Schedule(
        regions=tuple(
            dataclasses.replace(
                region,
                kept=tuple(v for v in region.vertices if v in stored)
                if region.checkpointed
                else (),
            )
            for region in draft.regions
        )
    )


def _around_pinned(graph: Graph, edges: Sequence[int]) -> list[tuple[int, int]]:
    """The segments between edges, each vertex with side effects in a segment of its own."""
    cuts = set(edges)
    for vertex, pinned in enumerate(graph.pinned):
        if pinned:
            cuts |= {vertex, vertex + 1}
    # The free region needs no cuts.
    last = sorted(edges)[-2] if len(edges) > 1 else 0
    ordered = [*sorted(cut for cut in cuts if cut <= last), len(graph)]
    return [(start, stop) for start, stop in itertools.pairwise(ordered) if start < stop]
