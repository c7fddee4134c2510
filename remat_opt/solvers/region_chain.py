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

is a shortest path over the positions (the accessibility graph of Feng & Huang, where an edge exists
if it fits the trial term), and fewer exports are never worse. Bisection on C gives the least peak;
a larger C lets the free last region grow, which costs memory and saves recomputation.

Why not a ready-made tool: the edges of this path depend on C and on the distance reached so
far, and the workspace of all O(n^2) segments is computed together with numpy.

Complexity: O(n m) time for the workspaces and O(m^2) per trial, for n vertices and at most m
candidate positions. Several kept sets are solved together: one alone is too little work for numpy.

Guarantee: the shortest path is exact for this model of the workspace, in which a value is held from
the first step that makes it needed to its last reader; ``simulator`` judges the result. Left out:
nested regions.

Reference: Feng & Huang (2018, 2021), linear graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.graph_arrays import arrays_of
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import demand
from remat_opt.solvers.lifetimes import (
    cotangent_profile,
    crossing_bytes,
    lifetimes,
    positions,
    sums_from,
    weights,
)
from remat_opt.spans import read_from_memory

#: Strains that ``relaxed_chains`` tries, as shares of the first chain's.
_STRAIN_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: How many kept sets' bounds are solved together: enough to be worth the call, few enough for the
#: cache.
_TOGETHER = 8


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


def segments(graph: Graph, kept: Sequence[int], *, most_positions: int = 64) -> Segments:
    """Computes workspace and exports of every segment between candidate boundaries."""
    count = len(graph)
    arrays = arrays_of(graph)
    is_kept = np.zeros(count, dtype=bool)
    is_kept[list(kept)] = True
    whole = Schedule(regions=(Region(vertices=tuple(range(count)), kept=tuple(kept)),))
    again = demand(graph, whole).recomputed[0]
    last_reader, last_need, end_use = lifetimes(graph, again)
    cotangents = cotangent_profile(graph)
    recomputed = np.zeros(count, dtype=bool)
    recomputed[list(again)] = True
    needed = np.zeros(count, dtype=bool)
    needed[arrays.backward.read] = True

    # Kept values still alive at backward step t: those not yet past their last reader.
    kept_alive = np.zeros(count + 1)
    np.add.at(kept_alive, last_reader[is_kept], arrays.bytes[is_kept])
    fixed = cotangents + np.cumsum(kept_alive)[:count]

    crossing = crossing_bytes(graph, end_use, is_kept)
    edges = positions(crossing, weights(graph), most_positions)
    # The last position is the end of the program: no segment starts there.
    starts = edges[:-1]
    row = np.searchsorted(edges, np.arange(count), side="right") - 1
    number = len(edges)
    # Unnamed residuals come from running the vertex, kept or not, and are held until its backward
    # step.
    internal = np.flatnonzero(arrays.internal_bytes)

    def held(chosen: np.ndarray) -> np.ndarray:
        values = np.flatnonzero(chosen & ~is_kept)
        until = np.concatenate((last_need[values], internal))
        sizes = np.concatenate((arrays.bytes[values], arrays.internal_bytes[internal]))
        within = row[np.concatenate((values, internal))]
        return sums_from(within, until, sizes, rows=len(starts), columns=count)

    # All tables have the end of the segment first, as they are read in that order.
    alive = held(recomputed)
    workspace = np.full((number, number), np.inf)
    workspace[1:, :-1] = _most_between(fixed[:, None] + alive, starts)
    strains = np.full((number, number), np.inf)
    strains[1:, :-1] = _most_between(cotangents[:, None] + alive, starts)
    free = np.full(number, np.inf)
    to_the_end = np.arange(count)[:, None] >= starts
    free[:-1] = np.max(fixed[:, None] + held(needed), axis=0, where=to_the_end, initial=-np.inf)
    exports = np.zeros((number, number))
    # A value crosses the positions after it, up to that of its last use.
    values = np.flatnonzero(~is_kept & (end_use > np.arange(count)))
    from_to = np.concatenate(
        (row[values] + 1, np.searchsorted(edges, end_use[values], side="right"))
    )
    sizes = np.concatenate((arrays.bytes[values], -arrays.bytes[values]))
    exports[:, :-1] = sums_from(
        np.tile(row[values], 2), from_to, sizes, rows=len(starts), columns=number
    )
    return Segments(
        positions=edges,
        workspace_bytes=workspace.T,
        exports_bytes=exports.T,
        strain_bytes=strains.T,
        free_bytes=free,
    )


def _most_between(profiles: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """For each segment, the most that its profile reaches; infinite if it would be empty.

    Args:
      profiles: [step, start] the bytes.
      starts: the first step of each of the stretches that make up segments.

    Returns:
      [end, start]
    """
    # A tenth of the time that ``np.maximum.reduceat`` takes.
    most: np.ndarray = profiles[starts]
    lasts = np.append(starts[1:], len(profiles)) - 1
    for step in range(1, int(np.max(lasts - starts)) + 1):
        np.maximum(most, profiles[np.minimum(starts + step, lasts)], out=most)
    empty = np.tri(len(starts), k=-1, dtype=bool).T
    most[empty] = -np.inf
    np.maximum.accumulate(most, axis=0, out=most)
    most[empty] = np.inf
    return most


def chains(
    figures: Sequence[Segments],
    bounds_bytes: Sequence[Sequence[float]],
    *,
    strains_bytes: Sequence[Sequence[float]] | None = None,
) -> list[list[list[int] | None]]:
    """For each bound, the boundaries of a chain within it, with the largest free region.

    Args:
      figures: those of all segments, for each of several kept sets of one graph.
      bounds_bytes: for each kept set, bounds C on the peak; all are solved together.
      strains_bytes: for each bound, a limit on the strain of every region; none if left out.

    Returns:
      For each bound, ascending positions from 0 to the start of the free region, or None if no
      chain is within it.
    """
    found: list[list[list[int] | None]] = [[] for _ in figures]
    # Group similar numbers of bounds: shorter rows are padded.
    order = sorted(range(len(figures)), key=lambda number: len(bounds_bytes[number]))
    for start in range(0, len(order), _TOGETHER):
        chosen = order[start : start + _TOGETHER]
        together = [figures[number] for number in chosen]
        bounds = _filled_up([bounds_bytes[number] for number in chosen])
        limits, limited = None, None
        if strains_bytes is not None:
            limits = _filled_up([strains_bytes[number] for number in chosen])
            limited = _stacked([one.strain_bytes for one in together]), limits
        reached = _least_exports(
            _stacked([one.workspace_bytes for one in together]),
            _stacked([one.exports_bytes for one in together]),
            bounds,
            limited,
        )
        for place, number in enumerate(chosen):
            found[number] = [
                _boundaries(
                    figures[number],
                    reached[:, row, place],
                    bound,
                    np.inf if limits is None else limits[row, place],
                )
                for row, bound in enumerate(bounds_bytes[number])
            ]
    return found


def _filled_up(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """The rows as columns of one array; missing entries are a bound that nothing meets."""
    table = np.full((max(map(len, rows)), len(rows)), -np.inf)
    for place, row in enumerate(rows):
        table[: len(row), place] = row
    return table


def _boundaries(
    figures: Segments, reached: np.ndarray, bound: float, limit: float
) -> list[int] | None:
    """Follows the least exports of each position back from the first one that can be the last."""
    # The last position is the end of the program: no region starts there.
    ends = reached[:-1] + figures.free_bytes[:-1] <= bound
    if not ends.any():
        return None
    chain = [int(ends.argmax())]
    while chain[-1] > 0:
        target = chain[-1]
        before = reached[:target]
        within = before + figures.workspace_bytes[:target, target] <= bound
        within &= figures.strain_bytes[:target, target] <= limit
        exports = before + figures.exports_bytes[:target, target]
        # Among equals the longest region: fewer barriers.
        chain.append(int(np.where(within, exports, np.inf).argmin()))
    return [int(figures.positions[position]) for position in chain[::-1]]


def _stacked(tables: Sequence[np.ndarray]) -> np.ndarray:
    """A figure of all segments, for several kept sets: [target, source, 1, kept set]."""
    return np.stack([table.T for table in tables], axis=2)[:, :, None]


def _least_exports(
    workspace: np.ndarray,
    exports: np.ndarray,
    bounds: np.ndarray,
    limited: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """D: [position, bound, kept set] the least exports of a chain up to a position.

    Args:
      workspace: of all segments, ``_stacked``.
      exports: likewise.
      bounds: [bound, kept set] on the peak.
      limited: the strain, likewise, and [bound, kept set] limits on that of every region.
    """
    number = len(workspace)
    reached = np.full((number, *bounds.shape), np.inf)
    reached[0] = 0.0
    fits = workspace[:, :, 0] <= bounds.max(axis=0)
    if limited is not None:
        strain, limits = limited
        fits &= strain[:, :, 0] <= limits.max(axis=0)
    # The shorter a segment, the less it takes: those too long for any bound come first.
    fitting = fits.any(axis=2)
    first = np.where(fitting.any(axis=1), fitting.argmax(axis=1), number).tolist()
    for target in range(1, number - 1):
        start = first[target]
        if start >= target:
            continue
        before = reached[start:target]
        too_much = before + workspace[target, start:target] > bounds
        if limited is not None:
            too_much |= strain[target, start:target] > limits
        after = before + exports[target, start:target]
        np.putmask(after, too_much, np.inf)
        after.min(axis=0, out=reached[target])
    return reached


def relaxed_chains(
    figures: Sequence[Segments], bounds_bytes: Sequence[Sequence[float]]
) -> list[list[list[int] | None]]:
    """Chains as ``chains`` finds them, with the least strain that costs nothing.

    Many chains have the same peak, because another region decides it. Of those, the one whose
    regions recompute the least at a time is the safest: the compiler may choose the order within a
    region. A smaller strain is taken if the free last region stays as large.
    """
    found = chains(figures, bounds_bytes)
    trials: list[list[tuple[int, float]]] = []
    for one, several in zip(figures, found, strict=True):
        row_of = {int(position): row for row, position in enumerate(one.positions)}
        trials.append([])
        for number, boundaries in enumerate(several):
            if boundaries is not None and len(boundaries) > 1:
                rows = [row_of[boundary] for boundary in boundaries]
                strain = one.strain_bytes[rows[:-1], rows[1:]].max()
                trials[-1] += [(number, strain * share) for share in _STRAIN_SHARES]
    tried = [place for place, several in enumerate(trials) if several]
    attempts = chains(
        [figures[place] for place in tried],
        [[bounds_bytes[place][number] for number, _ in trials[place]] for place in tried],
        strains_bytes=[[strain for _, strain in trials[place]] for place in tried],
    )
    for place, answers in zip(tried, attempts, strict=True):
        own = found[place]
        # Shares ascend, so the first success is the least strain.
        settled: set[int] = set()
        for (number, _), attempt in zip(trials[place], answers, strict=True):
            current = own[number]
            if number in settled or attempt is None or current is None:
                continue
            if attempt[-1] <= current[-1]:
                own[number] = attempt
                settled.add(number)
    return found


def least_bounds(figures: Sequence[Segments], *, rounds: int = 5, trials: int = 4) -> list[float]:
    """For each kept set, the least peak bound for which there is a chain.

    It is found to ``trials ** -rounds`` of the unchanged function's bound.
    """
    workspace = _stacked([one.workspace_bytes for one in figures])
    exports = _stacked([one.exports_bytes for one in figures])
    free = np.stack([one.free_bytes for one in figures], axis=1)
    low, high = np.zeros(len(figures)), free[0]
    every = np.arange(len(figures))
    for _ in range(rounds):
        bounds = np.linspace(low, high, trials + 1)
        tried = bounds[1:-1]
        ends = _least_exports(workspace, exports, tried)[:-1] + free[:-1, None] <= tried
        feasible = np.ones((trials, len(figures)), dtype=bool)
        feasible[:-1] = ends.any(axis=0)
        first = feasible.argmax(axis=0) + 1
        low, high = bounds[first - 1, every], bounds[first, every]
    found: list[float] = high.tolist()
    return found


def schedule_of(graph: Graph, kept: Sequence[int], boundaries: Sequence[int]) -> Schedule:
    """The schedule with these boundaries; exported values are also kept by name."""
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
    stored = read_from_memory(graph, draft)[0].tolist()
    return Schedule(
        regions=tuple(
            dataclasses.replace(
                region,
                kept=tuple(v for v in region.vertices if stored[v]) if region.checkpointed else (),
            )
            for region in draft.regions
        )
    )


def _around_pinned(graph: Graph, edges: Sequence[int]) -> list[tuple[int, int]]:
    """The segments between edges, with each side effect in a separate segment."""
    cuts = set(edges)
    for vertex, pinned in enumerate(graph.pinned):
        if pinned:
            cuts |= {vertex, vertex + 1}
    # The free region needs no cuts.
    last = sorted(edges)[-2] if len(edges) > 1 else 0
    ordered = [*sorted(cut for cut in cuts if cut <= last), len(graph)]
    return [(start, stop) for start, stop in itertools.pairwise(ordered) if start < stop]
