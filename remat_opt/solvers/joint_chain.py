"""Boundaries, fates and nesting decided together, for all budgets at once.

Problem. Cut the order of execution into a chain of regions, give each its own fate, and find for
every amount of memory the chain that recomputes the least. A region, from one position to a later
one, is either

  saved    no checkpoint: everything its backward steps read is held;
  kept     a checkpoint that keeps its part of one of several given kept sets; or
  nested   a checkpoint that keeps nothing, with a chain of regions of these kinds inside.

What later regions read is held anyway, so every checkpoint keeps it too, and it is not recomputed.

Method. While a region runs backward, memory holds what the regions before it hold, and its own
needs. So with m bytes left at position i, the least cost of the way to position j is

    way(i, j, m) = min over k and fate of  cost(i, k) + way(k, j, m - held(i, k)),
                   where needs(i, k) <= m,

and the last region is saved, since its backward pass follows at once. The inside of a nested region
obeys the same recursion, but first all of it runs again: a nested region from i to k costs
cost(i, k) of keeping nothing and way(i, k, m), and holds what crosses its end. Bytes are counted in
slots, in several tables from coarse to fine: the finer one ends where the coarser one has few slots
left. Positions are those that the fewest bytes cross, densest where values are large. Nesting is
tried at fewer of them, but at more if memory is short.

Why not a ready-made tool: it is a shortest path whose states are position and memory left; the
tables are filled with numpy.

Complexity: for p positions, q of them for nesting, f fates and s slots, O(p^2 f s) and O(q^3 f s)
additions; all four are bounded by constants. The figures of all regions take O(f n^2) for n
vertices.

Guarantee: for every number of slots, the least cost in this model of memory, in which a value is
held from the first step that makes it needed to its last reader, and bytes are rounded to the
nearest slot. The cost is never less than what the schedule really takes. ``simulator`` judges the
result.

Left out: the memory of the forward pass alone, and of recomputing what lies between boundaries;
kept values of a nested region.

Reference: the recursion is that of dynamic programming over a chain (Gruslys et al., 2016;
Beaumont et al., 2019) with the fates of a minimum cut (``min_cut``) in place of all or nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, merged, plain
from remat_opt.simulator import demand, evaluate
from remat_opt.solvers.base import thinned
from remat_opt.solvers.lifetimes import (
    cotangent_profile,
    crossing_bytes,
    lifetimes,
    positions,
    weights,
)

#: Positions at which regions may be cut.
MOST_POSITIONS = 56
#: Slots of a table, how much less memory each table has than the one before, and at how many
#: positions nested regions, which are for short memory, may be cut.
SLOTS = 256
_SCALES = (1.0, 0.4, 0.15)
MOST_NESTED = (16, 24, 48)
#: How many choices are tried at a time, so that tables have one small size and reuse memory.
_BLOCK = 128
#: Costs that differ by less than this share of a forward pass make no new schedule.
_RESOLUTION = 1e-3
#: Fates: index 0 is saved, 1 keeps nothing, and then come the given kept sets; -1 is nested.
_SAVED, _NOTHING, _NESTED = 0, 1, -1


def schedules(
    graph: Graph, kept_sets: Sequence[Sequence[int]], *, most: int | None = None
) -> list[Schedule]:
    """Schedules from the least memory up, one for every step of the cost.

    Args:
      graph: what to plan.
      kept_sets: what regions may keep; saving and keeping nothing are always among the fates.
      most: how many steps to take at most, evenly from all, including the first and the last; all
        if None.
    """
    most_bytes = evaluate(graph, plain(graph)).peak_bytes
    if not most_bytes:
        return [plain(graph)]
    regions = _Regions(graph, kept_sets)
    tables = [
        _Table(regions, scale * most_bytes / SLOTS, nested)
        for scale, nested in zip(_SCALES, regions.nested, strict=True)
    ]
    steps = [(table, level) for table in tables for level in table.levels()]
    if most is not None and most > 1:
        steps = thinned(steps, most)
    return list(dict.fromkeys(table.schedule(level) for table, level in steps))


class _Regions:
    """The figures of every region between two positions, for every fate.

    ``needs[f, a, b]``, ``held[f, a, b]`` and ``cost[f, a, b]`` are for fate f from position a to
    position b; needs are infinite if there is no such region.
    """

    def __init__(self, graph: Graph, kept_sets: Sequence[Sequence[int]]) -> None:
        self.graph = graph
        whole = frozenset(range(len(graph)))
        self.end_use = lifetimes(graph, self._again(frozenset()))[2]
        crossing = crossing_bytes(graph, self.end_use)
        weight = weights(graph)
        self.positions = positions(crossing, weight, MOST_POSITIONS)
        between = np.add.reduceat(weight, self.positions[:-1])
        self.nested = [
            positions(crossing[self.positions], between, most).tolist() for most in MOST_NESTED
        ]
        self.kept = [whole, frozenset[int](), *map(frozenset, kept_sets)]
        self.is_kept = np.zeros((len(self.kept), len(graph)), dtype=bool)
        for fate, kept in enumerate(self.kept):
            self.is_kept[fate, list(kept)] = True
        self._found: dict[tuple[int, int, int], Region] = {}
        needed = frozenset(n for needs in graph.needs for n in needs)
        parts = [self._figures(needed, frozenset(), saved=True)]
        parts += [self._figures(kept, self._again(kept), saved=False) for kept in self.kept[1:]]
        self.needs, self.held, self.cost = (np.stack(part) for part in zip(*parts, strict=True))
        # What has side effects must not run again.
        pinned = np.concatenate(([0], np.cumsum(graph.pinned)))[self.positions]
        self.pinned = (pinned[None, :] - pinned[:, None]) > 0
        self.needs[1:, self.pinned] = np.inf

    def region(self, fate: int, i: int, k: int) -> Region:
        """The region of a fate between two positions; the same object for every table."""
        if (fate, i, k) not in self._found:
            start, stop = int(self.positions[i]), int(self.positions[k])
            vertices = tuple(range(start, stop))
            if fate == _SAVED:
                found = Region(vertices=vertices, checkpointed=False)
            else:
                named = self.is_kept[fate, start:stop] | (self.end_use[start:stop] >= stop)
                kept = tuple((start + np.flatnonzero(named)).tolist())
                found = Region(vertices=vertices, kept=kept)
            self._found[fate, i, k] = found
        return self._found[fate, i, k]

    def _again(self, kept: frozenset[int]) -> frozenset[int]:
        """What runs again if all regions keep their part of ``kept``."""
        whole = Region(vertices=tuple(range(len(self.graph))), kept=tuple(sorted(kept)))
        return demand(self.graph, Schedule(regions=(whole,))).recomputed[0]

    def _figures(
        self, kept: frozenset[int], again: frozenset[int], *, saved: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        graph, end_use = self.graph, self.end_use
        count, number = len(graph), len(self.positions)
        last_reader, last_need, _ = lifetimes(graph, again)
        cotangents = cotangent_profile(graph)
        row_of = {int(position): row for row, position in enumerate(self.positions[:-1])}
        needs = np.full((number, number), np.inf)
        held = np.zeros((number, number))
        cost = np.zeros((number, number))
        # As the start of the region goes down, values join one after the other.
        alive = np.zeros(count)
        waiting = np.zeros(count + 1)
        running = np.zeros(count + 1)
        for vertex in range(count - 1, -1, -1):
            size, internal = graph.bytes[vertex], graph.internal_bytes[vertex]
            last_use = max(vertex, int(end_use[vertex]))
            if vertex in kept and last_reader[vertex] < count:
                alive[last_reader[vertex] :] += size
                waiting[vertex + 1 :] += size
            else:
                if vertex in again:
                    alive[last_need[vertex] :] += size
                waiting[vertex + 1 : last_use + 1] += size
            if vertex in again:
                # What crosses the end exists, unless it has unnamed residuals.
                running[(vertex if internal else last_use) + 1 :] += graph.seconds[vertex]
            if internal:
                alive[vertex:] += internal
                if saved:
                    waiting[vertex + 1 :] += internal
            if vertex in row_of:
                row = row_of[vertex]
                ends = self.positions[row + 1 :]
                profile = np.maximum.accumulate((cotangents + alive)[vertex:])
                needs[row, row + 1 :] = profile[ends - vertex - 1]
                held[row, row + 1 :] = waiting[ends]
                cost[row, row + 1 :] = running[ends]
        return needs, held, cost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The regions from one position that may be next, in a fixed order; one entry each.

    Attributes:
      fates: none of them nested.
      ends: positions.
      then: the rows of the table with the ways on from there.
      cost: of running again.
      held: slots that it holds during the regions after it.
      least: the slots it needs.
    """

    fates: np.ndarray
    ends: np.ndarray
    then: np.ndarray
    cost: np.ndarray
    held: np.ndarray
    least: np.ndarray


class _Table:
    """``way`` for all amounts of memory that are multiples of a slot.

    ``_rest[i]`` leads to the end of the program, ``_again[first, last]`` is inside a nested region.
    For states on the way to the end, the cheapest choice is recorded: 0 for the saved last region,
    then those of ``_options``, then the nested regions.
    """

    def __init__(self, regions: _Regions, slot: float, nested: Sequence[int]) -> None:
        self._of = regions
        needs = np.minimum(regions.needs / slot, 4 * SLOTS)
        self._needs = np.ceil(needs - 0.5).astype(int)
        self._held = np.rint(np.minimum(regions.held / slot, SLOTS + 1)).astype(int)
        self._leave_out_worse()
        self._end = len(regions.positions) - 1
        # A nested region does not end at the end of the program.
        self._nested = np.asarray(nested[:-1], dtype=int)
        self._place = {position: place for place, position in enumerate(self._nested.tolist())}
        places = np.arange(len(self._nested))
        self._again_options = [
            self._options(i, self._nested[first + 1 :], places[first + 1 :])
            for i, first in self._place.items()
        ]
        every = np.arange(self._end)
        self._rest_options = [
            self._options(i, every[i + 1 :], every[i + 1 :]) for i in range(self._end)
        ]
        self._again = self._fill_again()
        self._rest, self._rest_choice = self._fill_rest()
        self._nests: dict[tuple[int, int, float], tuple[int, Region]] = {}

    def _leave_out_worse(self) -> None:
        """Removes every fate of a region for which another is as good in everything."""
        needs, held, cost = self._needs, self._held, self._of.cost
        for fate in range(len(needs) - 1, 0, -1):
            for other in range(len(needs)):
                if other != fate:
                    worse = needs[other] <= needs[fate]
                    worse &= held[other] <= held[fate]
                    worse &= cost[other] <= cost[fate]
                    needs[fate][worse] = 4 * SLOTS

    def _options(self, i: int, stops: np.ndarray, rows: np.ndarray) -> _Options:
        """The regions from i to one of several positions that fit at all, with their rows."""
        fates, places = np.nonzero(self._needs[:, i, stops] <= SLOTS)
        ends = stops[places]
        held = self._held[fates, i, ends]
        return _Options(
            fates=fates,
            ends=ends,
            then=rows[places],
            cost=self._of.cost[fates, i, ends],
            held=held,
            least=np.maximum(held, self._needs[fates, i, ends]),
        )

    def _fill_again(self) -> np.ndarray:
        of, count = self._of, len(self._nested)
        costs = np.full((count, count, SLOTS + 1), np.inf)
        for first in range(count - 2, -1, -1):
            i = int(self._nested[first])
            stop = first + 1 + int(np.sum(~of.pinned[i, self._nested[first + 1 :]]))
            ways = costs[first, :stop]
            for last in range(first + 1, stop):
                ways[last, self._needs[_SAVED, i, self._nested[last]] :] = 0.0
            options = self._again_options[first]
            for cost, then, held, least in zip(
                options.cost.tolist(),
                options.then.tolist(),
                options.held.tolist(),
                options.least.tolist(),
                strict=True,
            ):
                way = costs[then, then + 1 : stop, least - held : SLOTS + 1 - held] + cost
                found = ways[then + 1 :, least:]
                np.minimum(found, way, out=found)
            # A nested region needs what its chain needs, not what the whole does at once.
            for then in range(first + 1, stop):
                k = self._nested[then]
                held = self._held[_NOTHING, i, k]
                way = costs[then, then + 1 : stop, : SLOTS + 1 - held]
                way = of.cost[_NOTHING, i, k] + ways[then, held:] + way
                found = ways[then + 1 :, held:]
                np.minimum(found, way, out=found)
        return costs

    def _fill_rest(self) -> tuple[np.ndarray, np.ndarray]:
        of = self._of
        # [slots needed, level]
        too_few = np.tri(SLOTS + 2, SLOTS + 1, k=-1, dtype=bool)
        # The levels are preceded by as many that stand for negative memory.
        below = SLOTS + 1
        costs = np.full((self._end, below + SLOTS + 1), np.inf)
        ways = np.lib.stride_tricks.sliding_window_view(costs, SLOTS + 1, axis=1)
        chosen = np.zeros((self._end, SLOTS + 1), dtype=np.int32)
        for i in range(self._end - 1, -1, -1):
            least, choice = costs[i, below:], chosen[i]
            least[self._needs[_SAVED, i, self._end] :] = 0.0
            options = self._rest_options[i]
            for start in range(0, len(options.ends), _BLOCK):
                part = slice(start, start + _BLOCK)
                table = ways[options.then[part], below - options.held[part]]
                table += options.cost[part, None]
                np.copyto(table, np.inf, where=too_few[options.least[part]])
                _offer(table, 1 + start, least, choice)
            inner = self._nested[self._place[i] + 1 :] if i in self._place else self._nested[:0]
            if len(inner):
                table = ways[inner, below - self._held[_NOTHING, i, inner]]
                table += of.cost[_NOTHING, i, inner, None]
                first = self._place[i]
                table += self._again[first, first + 1 :]
                _offer(table, 1 + len(options.ends), least, choice)
        return costs[:, below:], chosen

    def _next(self, i: int, level: int) -> tuple[int, int]:
        """Fate and end of the next region, if the way to the end has this many slots."""
        options, choice = self._rest_options[i], int(self._rest_choice[i, level]) - 1
        if choice < 0:
            return _SAVED, self._end
        if choice < len(options.ends):
            return int(options.fates[choice]), int(options.ends[choice])
        return _NESTED, int(self._nested[self._place[i] + 1 + choice - len(options.ends)])

    def _next_inside(self, first: int, last: int, level: int) -> tuple[int, int]:
        """Fate and end of the next region, if the way to a position has this many slots.

        There are far more such states than schedules pass through, so this is computed on demand.
        """
        i, k = int(self._nested[first]), int(self._nested[last])
        if level >= self._needs[_SAVED, i, k]:
            return _SAVED, k
        options, to_last = self._again_options[first], self._again[:, last]
        costs = options.cost + to_last[options.then, level - options.held]
        costs[level < options.least] = np.inf
        places = np.arange(first + 1, last)
        inner = self._nested[places]
        left = level - self._held[_NOTHING, i, inner]
        nested = self._of.cost[_NOTHING, i, inner] + self._again[first, places, level]
        nested += to_last[places, left]
        nested[left < 0] = np.inf
        best = int(np.argmin(np.concatenate((costs, nested))))
        if best < len(costs):
            return int(options.fates[best]), int(options.ends[best])
        return _NESTED, int(inner[best - len(costs)])

    def levels(self) -> list[int]:
        """The levels at which the cost falls, from the least memory up."""
        found = []
        least_step = _RESOLUTION * self._of.graph.forward_seconds
        before = np.inf
        for level, cost in enumerate(self._rest[0].tolist()):
            if cost < before - least_step:
                before = cost
                found.append(level)
        return found

    def schedule(self, level: int) -> Schedule:
        """The cheapest schedule with this many slots of memory, which must suffice for one."""
        return Schedule(regions=tuple(merged(self._chain(0, level))))

    def _chain(self, i: int, level: int) -> list[Region]:
        regions: list[Region] = []
        while i < self._end:
            fate, k = self._next(i, level)
            if fate == _NESTED:
                regions.append(self._nest(self._place[i], self._place[k], level))
                fate = _NOTHING
            else:
                regions.append(self._of.region(fate, i, k))
            level -= int(self._held[fate, i, k])
            i = k
        return regions

    def _nest(self, first: int, last: int, level: int) -> Region:
        """A nested region; more slots at the same cost give the same region."""
        key = first, last, float(self._again[first, last, level])
        known = self._nests.get(key)
        if known is None or known[0] > level:
            inside = tuple(merged(self._inside(first, last, level)))
            outer = self._of.region(_NOTHING, int(self._nested[first]), int(self._nested[last]))
            outer = dataclasses.replace(outer, inside=inside if len(inside) > 1 else ())
            known = self._nests[key] = level, outer
        return known[1]

    def _inside(self, first: int, last: int, level: int) -> list[Region]:
        regions: list[Region] = []
        while first < last:
            fate, k = self._next_inside(first, last, level)
            i, then = int(self._nested[first]), self._place[k]
            if fate == _NESTED:
                regions.append(self._nest(first, then, level))
                fate = _NOTHING
            else:
                regions.append(self._of.region(fate, i, k))
            level -= int(self._held[fate, i, k])
            first = then
        return regions


def _offer(table: np.ndarray, first: int, costs: np.ndarray, choices: np.ndarray) -> None:
    """Takes from a table what costs less than the best so far.

    Args:
      table: [choice, level] what each costs.
      first: number of the first choice.
      costs: [level] the least cost so far; written to.
      choices: [level] the number of its choice; written to.
    """
    best = table.argmin(axis=0)
    found = table[best, np.arange(len(best))]
    less = found < costs
    costs[less] = found[less]
    choices[less] = first + best[less]
