"""Local improvement: many small changes to the best schedules at hand, under the referee's rules.

Problem. Schedules come from models of memory that leave something out. Find better ones nearby, for
all budgets at once.

Method. The search holds a set of chains of regions, none of which is beaten by another in both
memory and recomputation. In each round, the moves of those not yet explored are judged together by
``chain_figures``, and the best of all stay. A move

  keeps a value, drops one, or one in place of the other, at either level of nesting;
  makes, removes or shifts a boundary, at either level;
  makes a stretch one region, flat or with up to two boundaries inside, that keeps what crosses its
  ends, or a region without a checkpoint;
  wraps a stretch: its regions go inside a new one; or unwraps it: those inside replace it.

After the search, each chain is also tried with what a region keeps at its end in a region of its
own, without a checkpoint: the backward steps there need nothing that runs again, and are done
before it does. (An activation whose derivative reads its result, as ``tanh``, leaves one array
there instead of two.)

Memory is measured in two ways: by the peak, and by a norm of the bytes alive over all steps. Chains
that no other beats by either measure stay. If several steps share the peak, a move lowers only one
of them at a time: the peak shows nothing, but the norm does. Small graphs try all moves. In large
ones each chain tries a few: values that cost the most to recompute, or the most for their bytes,
are kept, those alive at the peak that cost the least for their bytes are dropped, and the region
whose turn it is at the peak is cut, widened and narrowed. Blocks repeat: of similar values, one
stands for all in a chain, and another in the next.

Small graphs are searched twice more, from random chains: from the other starts, some optima lie
behind plateaus.

Why not a ready-made tool: the moves and their judge are specific to this problem.

Complexity: a fixed number of chains is judged, ``EVALUATIONS`` in each search of a small graph and
``WORK`` vertices of chains for a large one; O(n + e) each for n vertices and e edges.

Guarantee: for each given schedule, the search returns one that is no worse by the figures of the
searched graph (on large graphs, up to ``_SAME_PEAK`` and ``_SAME_SECONDS``). On small ones it is
nearly always the best of all, see ``benchmarks.optimality_gap``. Deterministic; it stops at a
counted step.

Left out: what ``chain_figures`` leaves out: such schedules are passed over, and returned.

Reference: Paquete, Chiarandini, Stützle, *Pareto local optimum sets in the biobjective traveling
salesman problem* (2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.graph_arrays import arrays_of
from remat_opt.schedule import Schedule
from remat_opt.solvers.base import Candidate, Overhead, judged, priced
from remat_opt.solvers.chain_figures import (
    LEVELS,
    ChainFigures,
    Chains,
    Figures,
    chains_of,
    is_chain,
    joined,
    schedule_of,
    spread,
)
from remat_opt.solvers.coarsening import Coarse

#: Graphs of at most this many vertices try all moves.
SMALL = 12
#: How many chains to judge for a small graph. For a large one: the number of chains times that of
#: its vertices, and the most chains.
EVALUATIONS = 40_000
WORK, MOST = 632_000, 632
#: Of the chains to judge, one in so many is tried with open ends at last.
_ENDS = 20
#: A round explores only as many chains as leave moves for this many rounds: for a small graph,
#: where many rounds follow one another, and for a large one, where as many chains as possible get a
#: turn.
ROUNDS, ROUNDS_OF_LARGE = 4, 1
#: Further starts for a small graph, each from this many random chains.
STARTS, _DRAWN = 2, 30
#: Pairs of flags that change together are at most this many vertices apart.
_APART = 2
#: Regions of at most this many vertices are tried with every set of kept values.
_TEMPLATE = 7
#: For a large graph: how many values kept and dropped, and boundaries, each chain tries.
_VALUES, _BOUNDARIES = 2, 2
#: How many of the next best take turns.
_IN_TURN = 6
#: For a large graph, chains that differ by less than these shares, of the peak and of the forward
#: pass, count as one.
_SAME_PEAK, _SAME_SECONDS = 4e-3, 1e-3
#: Values smaller than this share of the peak are not worth a move.
_SMALL_SHARE = 1 / 4096
#: Vertices count as similar if they are, together with what lies up to this many edges before them.
_AROUND = 3


def front(
    seen: Coarse, schedules: Sequence[Schedule], measure: Overhead = Overhead.SECONDS
) -> list[Candidate]:
    """The given schedules, and those found near them, that no other beats.

    Args:
      seen: the graph to search, and what it stands for; its groups are stretches of the order of
        execution.
      schedules: where to start, on the graph to search; better starts give better results.
      measure: what recomputation is counted in.

    Returns:
      Schedules of what the graph stands for. First, by ascending peak, those that no other beats in
      both memory and recomputation; of equals, the one with the fewest regions. For a large graph,
      those that hardly differ are left out. Then the given ones that were passed over.
    """
    graph = seen.graph
    known = ChainFigures(priced(graph, measure))
    count = len(graph)
    small = count <= SMALL
    left = EVALUATIONS if small else min(MOST, WORK // count)
    taken: list[Schedule] = []
    passed_over: list[Schedule] = []
    for one in schedules:
        (taken if is_chain(graph, one) else passed_over).append(one)
    if not taken:
        return judged(seen.whole, map(seen.spread, passed_over))
    given = chains_of(graph, taken)
    moves = _AllMoves(known) if small else _FewMoves(known)
    pool = _Pool(known)
    settled = known.settled(given)
    pool.add(settled)
    for part in moves.templates() if isinstance(moves, _AllMoves) else ():
        left -= pool.add(part, left)
    ends = left // _ENDS
    _search(pool, moves, left - ends, rounds=ROUNDS if small else ROUNDS_OF_LARGE)
    for number in range(STARTS if small else 0):
        # In a separate pool: what is already known would crowd out its starts.
        other = _Pool(known)
        other.add(known.settled(_drawn(count, number)))
        _search(other, moves, EVALUATIONS, rounds=ROUNDS)
        pool.add(other.chains)
    pool.add(_with_open_ends(known, pool.chains), ends)
    before: dict[bytes, Schedule] = {}
    for key, schedule, same in zip(
        given.keys(), taken, known.same_residuals(given, settled), strict=True
    ):
        if same:
            before[key] = schedule
        else:
            passed_over.append(schedule)
    best = pool.front()
    if not small:
        best = _apart(pool.figures, best, _SAME_SECONDS * graph.forward_seconds)
    chains, figures = pool.chains[best], pool.figures[best]
    if not seen.is_whole:
        known, before = ChainFigures(seen.whole), {}
        chains = known.settled(spread(chains, seen))
        figures = known.figures(chains)
    found = [
        before.get(pool.keys[number]) or schedule_of(chains, place)
        for place, number in enumerate(best)
    ]
    return known.candidates(seen.whole, found, chains, figures) + judged(
        seen.whole, map(seen.spread, passed_over)
    )


def _with_open_ends(known: ChainFigures, chains: Chains) -> Chains:
    """The chains, where what a region keeps at its end is in a region of its own."""
    arrays = arrays_of(known.graph)
    reads, starts = arrays.backward, chains.starts.copy()
    readers, firsts = np.unique(reads.reader, return_index=True)
    for level in range(LEVELS):
        dropped, region = chains.drops[level], np.cumsum(chains.starts[level], axis=0)
        # Whose backward step needs nothing that runs again.
        again = dropped[reads.read] & (region[reads.read] == region[reads.reader])
        free = ~dropped & (arrays.internal_bytes == 0)[:, None]
        if len(firsts):
            free[readers] &= ~np.logical_or.reduceat(again, firsts, axis=0)
        for vertex in reversed(range(len(free) - 1)):
            free[vertex] &= free[vertex + 1] | chains.starts[level, vertex + 1]
        starts[level, 1:] |= free[1:] & ~free[:-1]
    return known.settled(Chains(starts=starts, drops=chains.drops))


def _apart(figures: Figures, front: Sequence[int], same_seconds: float) -> list[int]:
    """A front without those hardly larger or faster than the one before; its ends stay."""
    found = list(front[:1])
    for number in front[1:]:
        larger = figures.peak_bytes[number] > figures.peak_bytes[found[-1]] * (1 + _SAME_PEAK)
        faster = figures.seconds[number] < figures.seconds[found[-1]] - same_seconds
        if larger or faster or number == front[-1]:
            found.append(number)
    return found


def _search(pool: _Pool, moves: _AllMoves | _FewMoves, left: int, *, rounds: int) -> None:
    """Explores until no chain of the pool is left, or this many were judged."""
    most_a_round = max(1, left // (moves.most * rounds))
    while left > 0:
        chosen = pool.unexplored(most_a_round)
        if not chosen:
            break
        left -= pool.add(moves.from_each(pool.chains[chosen], pool.figures[chosen]), left)


def _drawn(count: int, seed: int) -> Chains:
    """Random chains, with many or few regions and much or little kept."""
    draw = np.random.default_rng(seed)
    shape = (LEVELS, count, _DRAWN)
    often, much = draw.random(2)
    return Chains(starts=draw.random(shape) < often, drops=draw.random(shape) < much)


class _Pool:
    """The chains that no other beats, with their figures.

    Attributes:
      chains: one after the other.
      figures: theirs.
      keys: what distinguishes them.
    """

    def __init__(self, known: ChainFigures) -> None:
        self._known = known
        self._seen: set[bytes] = set()
        self._explored: set[bytes] = set()
        self.chains: Chains
        self.figures: Figures
        self.keys: list[bytes] = []

    def add(self, chains: Chains, most: int | None = None) -> int:
        """Judges the new ones, up to a limit; returns how many."""
        keys = chains.keys()
        fresh = (key for key in dict.fromkeys(keys) if key not in self._seen)
        chosen = list(itertools.islice(fresh, most))
        self._seen.update(chosen)
        if not chosen:
            return 0
        # Of equal ones, the first.
        places = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        chains = chains[[places[key] for key in chosen]]
        figures = self._known.figures(chains)
        if self.keys:
            chains = joined([self.chains, chains])
            figures = Figures.joined([self.figures, figures])
        keys = [*self.keys, *chosen]
        kept = sorted(
            {
                *_unbeaten(figures.peak_bytes, figures.seconds),
                *_unbeaten(figures.strain_bytes, figures.seconds),
            }
        )
        self.chains, self.figures = chains[kept], figures[kept]
        self.keys = [keys[number] for number in kept]
        return len(chosen)

    def unexplored(self, most: int) -> list[int]:
        """At most this many of those not yet given, evenly over their peaks."""
        found = [n for n, key in enumerate(self.keys) if key not in self._explored]
        found.sort(key=lambda n: (self.figures.peak_bytes[n], self.figures.seconds[n]))
        if len(found) > most:
            found = [found[(2 * n + 1) * len(found) // (2 * most)] for n in range(most)]
        self._explored.update(self.keys[number] for number in found)
        return found

    def front(self) -> list[int]:
        """Those that no other beats in both peak and overhead, by ascending peak."""
        return _unbeaten(
            self.figures.peak_bytes, self.figures.seconds, self.chains.starts.sum(axis=(0, 1))
        )


def _unbeaten(
    memory: np.ndarray, seconds: np.ndarray, regions: np.ndarray | None = None
) -> list[int]:
    first = [np.arange(len(memory))] if regions is None else [regions]
    order = np.lexsort((*first, seconds, memory))
    best = np.minimum.accumulate(seconds[order])
    # Sums of seconds in another order differ in the last digits.
    falls = np.concatenate(([True], best[1:] < best[:-1] * (1 - 1e-12)))
    return [int(number) for number in order[falls]]


class _AllMoves:
    """All moves of a small graph, as flags to flip and flags to set.

    Attributes:
      most: how many there are.
    """

    def __init__(self, known: ChainFigures) -> None:
        self._known = known
        self._shape = (2 * LEVELS, len(known.graph))
        size = self._shape[0] * self._shape[1]
        turned = list(self._turned())
        self._flips = np.zeros((size, len(turned)), dtype=bool)
        for move, flags in enumerate(turned):
            self._flips[list(flags), move] = True
        masks, values = zip(*self._stretches(), strict=True)
        self._masks = np.stack([one.ravel() for one in masks], axis=1)
        self._values = np.stack([one.ravel() for one in values], axis=1)
        spans, wraps = zip(*self._wraps(), strict=True)
        self._spans = np.stack(spans, axis=1)
        self._around = np.stack(wraps, axis=2)
        self._edges = self._around[0] | self._spans
        self.most = len(turned) + len(masks) + 2 * len(spans)

    def _turned(self) -> Iterator[tuple[int, ...]]:
        """One flag, or two close together; flags are starts, then drops, by level."""
        rows, count = self._shape
        flags = [(row, v) for row in range(rows) for v in range(count) if v or row >= LEVELS]
        for row, v in flags:
            yield (row * count + v,)
        for (row, v), (other, w) in itertools.combinations(flags, 2):
            if abs(v - w) <= _APART:
                yield row * count + v, other * count + w

    def _stretches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The flags that a stretch of vertices sets, and their values."""
        count = self._shape[1]
        for first, stop in itertools.combinations(range(count + 1), 2):
            mask = np.zeros(self._shape, dtype=bool)
            mask[LEVELS:, first:stop] = True
            yield mask.copy(), np.zeros_like(mask)
            mask[:LEVELS, first : stop + 1] = True
            for number in range(3):
                for inner in itertools.combinations(range(first + 1, stop), number):
                    yield mask, self._region(first, stop, inner)

    def _region(self, first: int, stop: int, inner: Sequence[int]) -> np.ndarray:
        found = np.zeros(self._shape, dtype=bool)
        last_read = self._known.last_read
        found[:LEVELS, first] = True
        found[:LEVELS, stop : stop + 1] = True
        found[LEVELS, first:stop] = last_read[first:stop] < stop
        # The last of those inside runs backward at once, and needs no checkpoint.
        for start, end in itertools.pairwise([first, *inner]):
            found[1, end] = True
            found[LEVELS + 1, start:end] = last_read[start:end] < end
        return found

    def _wraps(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Stretches, and the flags of a region around each; it may drop one value that crosses."""
        for first, stop in itertools.combinations(range(self._shape[1] + 1), 2):
            span = np.zeros(self._shape[1], dtype=bool)
            span[first:stop] = True
            region = self._region(first, stop, ())
            yield span, region
            for v in np.flatnonzero(span & ~region[LEVELS]):
                more = region.copy()
                more[LEVELS, v] = True
                yield span, more

    def _wrapped(self, starts: np.ndarray, drops: np.ndarray) -> np.ndarray:
        outer = np.where(self._edges, self._around[0], starts[0])
        kept = np.where(self._spans, self._around[LEVELS], drops[0])
        inside = np.where(self._spans, drops[0] | drops[1], drops[1])
        return np.stack([outer, starts[1] | outer, kept, inside])

    def _unwrapped(self, starts: np.ndarray, drops: np.ndarray) -> np.ndarray:
        outer = np.where(self._spans, starts[1], starts[0])
        kept = np.where(self._spans, drops[1], drops[0])
        return np.stack([outer, starts[1] | outer, kept, drops[1] & ~self._spans])

    def templates(self) -> Iterator[Chains]:
        """Short regions with a boundary inside and any kept values, alone in the program.

        The first region inside keeps everything that crosses its end, or only what is read before
        the stretch ends.
        """
        count = self._shape[1]
        for first, stop in itertools.combinations(range(count + 1), 2):
            if stop - first > _TEMPLATE:
                continue
            subsets = np.array(list(itertools.product((False, True), repeat=stop - first))).T
            for inner in range(first + 1, stop):
                region = self._region(first, stop, (inner,))
                less = region.copy()
                for v in range(first, inner):
                    readers = {*self._known.successors[v], *self._known.needed_by[v]}
                    less[LEVELS + 1, v] = readers.isdisjoint(range(inner, stop))
                for one in (region, less):
                    table = np.repeat(one[:, :, None], subsets.shape[1], axis=2)
                    table[LEVELS, first:stop] = subsets
                    yield self._known.settled(Chains(starts=table[:LEVELS], drops=table[LEVELS:]))

    def from_each(self, chains: Chains, figures: Figures) -> Chains:
        """All moves from each chain, settled."""
        flags = np.concatenate([*chains.starts, *chains.drops])
        moved = []
        for number, column in enumerate(np.split(flags, flags.shape[1], axis=1)):
            turned = [column ^ self._flips, np.where(self._masks, self._values, column)]
            moved += [one.reshape(*self._shape, -1) for one in turned]
            both = chains.starts[:, :, [number]], chains.drops[:, :, [number]]
            moved += [self._wrapped(*both), self._unwrapped(*both)]
        table = np.concatenate(moved, axis=2)
        return self._known.settled(Chains(starts=table[:LEVELS], drops=table[LEVELS:]))


class _FewMoves:
    """The moves of a large graph that look best.

    Attributes:
      most: how many there are for each chain.
    """

    def __init__(self, known: ChainFigures) -> None:
        self._known = known
        graph = known.graph
        self._seconds = np.asarray(graph.seconds)
        self._bytes = np.asarray(graph.bytes)
        self._least_seconds = 1e-9 * graph.forward_seconds + 1e-30
        self._alike = _alike(graph)
        self._turn = 0
        self._saved = self._seconds / (self._bytes + 1)
        self.most = 5 * (_VALUES + 1) + _BOUNDARIES + 2

    def from_each(self, chains: Chains, figures: Figures) -> Chains:
        """The moves from each chain, settled."""
        parts = [
            self._from_one(chains.starts[:, :, n], chains.drops[:, :, n], figures[[n]])
            for n in range(len(chains))
        ]
        return self._known.settled(joined(parts))

    def _from_one(self, starts: np.ndarray, drops: np.ndarray, figures: Figures) -> Chains:
        again, held = figures.again[:, 0], figures.held[:, 0]
        turn = self._turn
        self._turn += 1
        by_bytes = _largest(self._saved, again, self._alike, turn)
        by_seconds = _largest(self._seconds, again, self._alike, turn)
        large = self._bytes > figures.peak_bytes[0] * _SMALL_SHARE
        free = held & ~drops[0] & self._known.droppable & large
        freed = self._bytes / (self._to_compute(again | held) + self._least_seconds)
        dropped = _largest(freed, free, self._alike, turn)
        found: list[tuple[np.ndarray, np.ndarray]] = []

        def change(keep: Sequence[int] = (), drop: Sequence[int] = ()) -> None:
            after = drops.copy()
            after[:, list(keep)] = False
            after[0, list(drop)] = True
            found.append((starts, after))

        for v in dict.fromkeys([*by_bytes, *by_seconds]):
            change(keep=(v,))
        for v in dropped:
            change(drop=(v,))
        for v, w in itertools.product(dict.fromkeys([*by_bytes[:1], *by_seconds[:1]]), dropped):
            change(keep=(v,), drop=(w,))
        found += [(cut, drops) for cut in self._cut(starts, int(figures.turn[0]))]
        return Chains(
            starts=np.stack([one for one, _ in found], axis=2),
            drops=np.stack([one for _, one in found], axis=2),
        )

    def _to_compute(self, there: np.ndarray) -> np.ndarray:
        """For each vertex, the seconds to compute it, and what is missing before it."""
        found: list[float] = self._seconds.tolist()
        reads = arrays_of(self._known.graph).forward
        missing = ~there[reads.read]
        for vertex, read in zip(
            reads.reader[missing].tolist(), reads.read[missing].tolist(), strict=True
        ):
            found[vertex] += found[read]
        return np.array(found)

    def _cut(self, starts: np.ndarray, turn: int) -> Iterator[np.ndarray]:
        """Changes the boundaries of the region around a vertex."""
        count = starts.shape[1]
        edges = [0, *(np.flatnonzero(starts[0, 1:]) + 1).tolist(), count]
        stop = next(edge for edge in edges if edge > turn)
        first = max(edge for edge in edges if edge <= turn)
        places = range(first + 1, stop)
        step = max(1, len(places) // _BOUNDARIES)
        for place in places[step // 2 :: step]:
            after = starts.copy()
            after[:, place] = True
            yield after
        for edge in (first, stop):
            if 0 < edge < count:
                after = starts.copy()
                after[0, edge] = False
                yield after


def _alike(graph: Graph) -> np.ndarray:
    """For each vertex, a number that it shares with similar ones, such as those of equal layers.

    They have the same figures, and so do the vertices before them.
    """
    numbers = np.zeros(len(graph), dtype=int)
    for _ in range(_AROUND):
        known: dict[tuple[object, ...], int] = {}
        keys = (
            (
                graph.bytes[vertex],
                graph.seconds[vertex],
                graph.cotangent_bytes[vertex],
                *sorted(int(numbers[read]) for read in graph.predecessors[vertex]),
            )
            for vertex in range(len(graph))
        )
        numbers = np.array([known.setdefault(key, len(known)) for key in keys])
    return numbers


def _largest(by: np.ndarray, among: np.ndarray, alike: np.ndarray, turn: int) -> list[int]:
    """The vertices of a mask with the largest figures, and one of the next ones in turn.

    Of similar vertices one stands for all, another each time.
    """
    chosen = np.flatnonzero(among & (by > 0))
    ranked = chosen[np.argsort(-by[chosen], kind="stable")]
    kinds = alike[ranked]
    # The kinds in order of first occurrence.
    best = list(dict.fromkeys(kinds.tolist()))
    rest = best[_VALUES : _VALUES + _IN_TURN]
    taken = best[:_VALUES] + ([rest[turn % len(rest)]] if rest else [])
    groups = (ranked[kinds == kind] for kind in taken)
    return [int(group[turn % len(group)]) for group in groups]
