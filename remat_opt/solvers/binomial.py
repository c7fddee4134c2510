"""Chains reversed with few snapshots: Revolve, and its counterpart for unequal links.

Problem. A chain of n steps must be run backward, from its last step to its first. Every backward
step needs the state from which its own step starts; a state that is not in memory is recomputed
from an earlier one, as often as necessary. (Revolve) All steps are alike, with at most s states
(snapshots) in memory at a time: recompute the fewest steps. (Under a budget) Each step has its own
bytes and seconds, with at most M bytes in memory: recompute for the fewest seconds.

Steps are the links of the graph. A vertex v is a cut if nothing before it is read past it, by a
forward or a backward step; a link is what lies after one cut up to and including the next, and
its state is the value of that cut. On a chain every vertex is a link. A graph whose only cuts are
its first and last vertex is refused.

Method, Revolve. With one step the state is there. Otherwise advance m steps from the first state,
store the state reached, reverse the n - m steps after it with the s - 1 snapshots that are left,
drop it, and reverse the m steps before it with s. So

    t(1, s) = 0,    t(n, 1) = n (n - 1) / 2,
    t(n, s) = min over 0 < m < n of  m + t(m, s) + t(n - m, s - 1).

s counts the stored initial state, but not the state that a step in its turn starts from. With
beta(s, r) = binomial(s + r, s), the number of steps that can be reversed with s snapshots if none
is advanced over more than r times, and r the least number with n <= beta(s, r), it is

    t(n, s) = r n - beta(s + 1, r - 1).

Method, executed. The first m steps are a checkpointed region with a chain of regions inside, and
the rest is the chain that follows it:

    chain(a, b, s) = region [a, m) with chain(a, m, s) inside, then chain(m, b, s - 1),

down to one step, which is not checkpointed, since its backward step follows at once. This repeats
exactly the t(n, s) steps of the paper. Revolve runs t(n, s) advances and n turns, a turn being the
forward step just before each backward step, which the paper does not count. The executed form runs
the same steps. Of these, n - 1 advances and the turn of the last step are the forward pass itself,
not recomputation, so t(n, s) + n - n are left. The n - 1 other turns are among them: a step that is
its own region runs again in its turn. If backward steps read nothing that their own step computes,
those turns are dead code, and t(n, s) - (n - 1) steps are left.

Method, under a budget. least(i, j, m) is the least time to recompute links i to j, given the state
before them in memory, and to run them backward within m bytes besides that state. (If j is the last
link, it runs in the forward pass, whose time is not counted.) Either

  save    run link i, hold what its backward step reads, go on with i + 1 .. j, run it backward;
          alone if i = j; or
  nest    for some k: run i .. k - 1 and hold only the last state, go on with k .. j, then
          reverse i .. k - 1 as a separate problem: least(k, j, m - state) + least(i, k - 1, m).

Saved links become regions without a checkpoint, nested ones regions with regions inside. Memory is
counted in slots. If all bytes of the model are multiples of some slot, and the budget holds at most
``slots`` of these, that slot is used and nothing is rounded. If not, the budget is divided into
``slots`` and bytes are rounded up, so that the result fits; the same table with bytes rounded down
gives a bound.

Model of memory. It is the referee's, on links (``link_figures``): values are freed after their last
reader, a cotangent waits while what precedes it is recomputed, and the referee's rules for a step
hold inside links. The state before a link is assumed to be read until the link has run backward,
and everything recomputed to be read.

Why not a ready-made tool: published implementations drive their own program step by step; here the
answer must be a nest of checkpointed regions, and its memory the referee's.

Equal rows of links are solved once, wherever they occur.

Complexity: O(1) for t(n, s), O(n^2 s) for its table. Under a budget O(n^3 slots) time, if no rows
are equal, and O(n^2 slots) memory for n links, bounded by ``MOST_ENTRIES``.

Guarantee. Revolve: the fewest steps of all schedules that store whole states. Under a budget:
optimal among all nests of saved and checkpointed links in the model of memory if nothing was
rounded (status OPTIMAL); else within the gap to the bound. The model's peak and seconds are the
referee's on a chain whose backward steps read their own value and the one before; on other graphs
they are never less. ``least_budget`` is exact in the model, whatever the slots.

Left out: keeping part of a link (a link is saved or computed again as a whole), the last region
of a chain under a checkpoint (it would only cost more), several snapshots for one state.

Reference: Griewank & Walther, *Algorithm 799: Revolve* (ACM TOMS 26, 2000), section 2, for t,
beta and r; Gruslys et al., *Memory-efficient backpropagation through time* (NIPS 2016), for the
table over a budget; Beaumont et al., *Optimal checkpointing for heterogeneous chains* (2019), for
saving links between checkpoints.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule, merged
from remat_opt.solvers.base import Candidate, Infeasible, Refused, Solution, Status, judged
from remat_opt.solvers.link_figures import Link, Run, measure

#: Into how many slots a budget is divided if its bytes have no common measure as coarse.
SLOTS = 500
#: A budget's table is refused beyond this number of entries (12 bytes each).
MOST_ENTRIES = 30_000_000
#: Deeper nests of checkpoints are refused: at a depth of about 50, JAX's own transforms reach
#: Python's recursion limit.
MOST_REPETITIONS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reversal:
    """How Revolve reverses a chain.

    Attributes:
      steps: n, the links of the graph.
      snapshots: s, states in memory at a time, the initial one included.
      repetitions: r; no link runs again more often than this.
      recomputed_steps: t(n, s), how many links run again, each counted as often as it runs.
    """

    steps: int
    snapshots: int
    repetitions: int
    recomputed_steps: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """How a chain is reversed under a budget, in the model of memory.

    Attributes:
      links: number of links.
      depth: how deep checkpoints nest at most.
      peak_bytes: most bytes in memory.
      overhead_seconds: time of what runs again.
      slot_bytes: the unit in which memory was counted.
    """

    links: int
    depth: int
    peak_bytes: int
    overhead_seconds: float
    slot_bytes: int


def links(graph: Graph) -> tuple[range, ...]:
    """The vertices of each link, in order."""
    farthest = [max((vertex, *found)) for vertex, found in enumerate(graph.successors())]
    for vertex, needs in enumerate(graph.needs):
        for needed in needs:
            farthest[needed] = max(farthest[needed], vertex)
    stops, reached = [], 0
    for vertex in range(len(graph)):
        if reached <= vertex:  # nothing before this vertex is read past it
            stops.append(vertex + 1)
        reached = max(reached, farthest[vertex])
    return tuple(itertools.starmap(range, itertools.pairwise([0, *stops])))


def _refusal(graph: Graph, found: Sequence[range]) -> Refused | None:
    # The first vertex is always a cut, as nothing precedes it, and so is the last.
    if len(found) > 2 or len(graph) <= 2 or found[0][-1] > 0:
        return None
    return Refused(
        message=f"The graph of {len(graph)} vertices has no cut between the first and the last: "
        "after each of them something before it is still read, so there is no chain of links to "
        "reverse. Use arbitrary_graph.solve or dynamic_program.approximate."
    )


# ------------------------------------------------------------------------------------- Revolve


def beta(snapshots: int, repetitions: int) -> int:
    """How many steps s snapshots can reverse with at most r repetitions of each.

    >>> beta(3, 2)
    10
    """
    return math.comb(snapshots + repetitions, snapshots) if repetitions >= 0 else 0


def repetition_number(steps: int, snapshots: int) -> int:
    """r: the least number of repetitions with n <= beta(s, r)."""
    high = 1
    while beta(snapshots, high) < steps:
        high *= 2
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        if beta(snapshots, middle) < steps:
            low = middle
        else:
            high = middle
    return high


def recomputed_steps(steps: int, snapshots: int) -> int:
    """t(n, s) by its closed form.

    >>> [recomputed_steps(10, snapshots) for snapshots in (1, 2, 3, 9, 10)]
    [45, 20, 15, 9, 9]
    """
    repetitions = repetition_number(steps, snapshots)
    return repetitions * steps - beta(snapshots + 1, repetitions - 1)


def recomputed_steps_table(steps: int, snapshots: int) -> list[list[int]]:
    """The table t(n, s) by its recurrence: entry [s][n] for all s and n up to those given.

    >>> recomputed_steps_table(4, 2)[2]
    [0, 0, 1, 2, 4]
    """
    table = [[0] * (steps + 1), [count * (count - 1) // 2 for count in range(steps + 1)]]
    for _ in range(2, snapshots + 1):
        fewer, row = table[-1], [0, 0]
        for count in range(2, steps + 1):
            row.append(min(m + row[m] + fewer[count - m] for m in range(1, count)))
        table.append(row[: steps + 1])
    return table


def split(steps: int, snapshots: int) -> int:
    """The smallest m that is best in the recurrence of t(n, s), for n > 1.

    m must need r - 1 repetitions with s snapshots, and n - m no more than r with s - 1, or be on
    the border to the next number.

    >>> split(10, 3), split(7, 1)
    (4, 6)
    """
    if snapshots == 1:
        return steps - 1
    repetitions = repetition_number(steps, snapshots)
    return max(beta(snapshots, repetitions - 2), steps - beta(snapshots - 1, repetitions), 1)


def solve(graph: Graph, snapshots: int) -> Solution[Reversal] | Refused:
    """Revolve on the links of a graph, all assumed to be alike.

    Args:
      graph: what to plan.
      snapshots: s, how many states may be in memory at a time, including the initial one, which
        consists of the program's arguments and takes no temporary bytes.

    Returns:
      A solution whose objective is t(n, s); or a refusal.
    """
    found = links(graph)
    if refused := _refusal(graph, found):
        return refused
    steps = len(found)
    if snapshots < 1:
        return Refused(
            message=f"{snapshots} snapshots reverse nothing: the initial state is one of them. "
            "Give 1 or more."
        )
    if any(graph.pinned):
        return Refused(
            message=f"Vertex {graph.names[graph.pinned.index(True)]!r} has side effects and must "
            "not run again, and Revolve runs all but the last link again. Use "
            "binomial.least_overhead, which saves its link."
        )
    repetitions = repetition_number(steps, snapshots)
    if repetitions > MOST_REPETITIONS:
        enough = snapshots
        while beta(enough, MOST_REPETITIONS) < steps:
            enough += 1
        return Refused(
            message=f"With {snapshots} snapshots, {steps} links take {repetitions} checkpoints "
            f"inside one another; the limit is {MOST_REPETITIONS}. Give {enough} snapshots or more."
        )
    objective = recomputed_steps(steps, snapshots)
    return Solution(
        schedule=Schedule(regions=_regions(found, revolve(steps, snapshots))),
        figures=Reversal(
            steps=steps,
            snapshots=snapshots,
            repetitions=repetitions,
            recomputed_steps=objective,
        ),
        status=Status.OPTIMAL,
        objective=float(objective),
        bound=float(objective),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Links ``start`` to ``stop - 1`` of a chain: saved, or reversed later as the parts inside.

    Attributes:
      start: the first link.
      stop: the link after the last; ``start + 1`` if the link is saved.
      inside: the parts inside; empty if the link is saved.
    """

    start: int
    stop: int
    inside: tuple[Part, ...] = ()


def revolve(steps: int, snapshots: int, *, start: int = 0) -> tuple[Part, ...]:
    """chain(start, start + steps, s): the parts in order; the last is a saved link."""
    parts = []
    stop = start + steps
    while stop - start > 1:
        middle = start + split(stop - start, snapshots)
        inside = revolve(middle - start, snapshots, start=start)
        parts.append(Part(start=start, stop=middle, inside=inside))
        start = middle
        snapshots = max(snapshots - 1, 1)
    return (*parts, Part(start=start, stop=stop))


def _regions(found: Sequence[range], parts: Sequence[Part]) -> tuple[Region, ...]:
    """Parts as regions; consecutive saved links are one region."""
    regions: list[Region | range] = []
    for part in parts:
        vertices = range(found[part.start].start, found[part.stop - 1].stop)
        if not part.inside:
            regions.append(vertices)
            continue
        inside = _regions(found, part.inside)
        # A checkpoint by itself already does what one region that saves everything would.
        nested = inside if len(inside) > 1 else ()
        regions.append(Region(vertices=tuple(vertices), inside=nested))
    return tuple(merged(regions))


# ------------------------------------------------------------------------------ under a budget


_NEVER = 1 << 62


class _Chain:
    """The choices at pairs of links i to j: what each takes by itself, and what it holds.

    They are numbered: 0 is to save link i, and c, from 1 to j - i, to nest up to k = j - c + 1.
    """

    def __init__(self, graph: Graph) -> None:
        self.ranges = links(graph)
        readers = graph.successors()
        found = tuple(measure(graph, part, readers[part[-1]]) for part in self.ranges)
        self.last = len(found) - 1
        known: dict[Link, int] = {}
        self._kinds = np.array([known.setdefault(link, len(known)) for link in found])
        # The last link runs backward at once.
        self._kinds[-1] = len(known)
        self._states = np.array([link.state_bytes for link in found], dtype=np.int64)
        self._waiting = np.array([link.waiting_bytes for link in found], dtype=np.int64)
        self._held = np.array([link.held_bytes for link in found], dtype=np.int64)
        self._backward = np.array([link.backward_bytes for link in found], dtype=np.int64)
        self._seconds = np.cumsum([0.0, *(link.again.seconds for link in found)])
        # By how link i is saved: in the forward pass, again as the last of its run, or again.
        saved = [(link.first_saved, link.again_last, link.again_saved) for link in found]
        self._saved_bytes = np.array([[run.bytes for run in runs] for runs in saved])
        self._saved_seconds = np.array([[run.seconds for run in runs] for runs in saved])
        pinned = np.array([link.pinned for link in found])
        self._first = _running([link.first for link in found], pinned)
        self._again = _running([link.again for link in found], pinned)

    def __len__(self) -> int:
        return self.last + 1

    def alike(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """All pairs of links by the distance between them; equal ones are solved once.

        Yields:
          The distance of the last links from the first ones; first links, one for each pair with a
          separate answer; and for every first link, the number of the one that has its answer.
        """
        alike = self._kinds
        for length in range(len(self)):
            if length:
                alike = alike[:-1] * (len(self) + 1) + self._kinds[length:]
            _, first, alike = np.unique(alike, return_index=True, return_inverse=True)
            yield length, first, alike

    def choices(self, i: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All choices at links i to i + length, for several i.

        Args:
          i: the first links.
          length: the distance of the last ones from them.

        Returns:
          The least bytes needed, the bytes then held, and seconds, each [i, choice].
        """
        j = i + length
        how = np.where(j == self.last, 0, 1 if not length else 2)
        needed = np.empty((len(i), length + 1), dtype=np.int64)
        held = np.empty_like(needed)
        seconds = np.zeros(needed.shape)
        needed[:, 0] = np.maximum(self._waiting[j] + self._saved_bytes[i, how], self._backward[i])
        held[:, 0] = self._held[i]
        seconds[:, 0] = self._saved_seconds[i, how]
        if length:
            waiting = self._waiting[j][:, None]
            forward = (j == self.last)[:, None]
            running = np.where(forward, self._first[i, :length], self._again[i, :length])
            needed[:, 1:] = np.minimum(running, _NEVER - waiting)[:, ::-1] + waiting
            stops = self.stops(j, length)
            held[:, 1:] = self._states[stops - 1]
            again = self._seconds[stops] - self._seconds[i][:, None]
            seconds[:, 1:] = np.where(forward, 0.0, again)
        return needed, held, seconds

    def held_bytes(self, i: int, stop: int) -> np.ndarray:
        """Bytes held once link i is saved (stop 0), or run up to a stop, as an array of one."""
        return self._states[stop - 1 : stop] if stop else self._held[i : i + 1]

    def stops(self, j: np.ndarray, length: int) -> np.ndarray:
        """The stop k of each choice from 1 on, [j, choice - 1]."""
        return j[:, None] - np.arange(length)

    def figures(self, parts: Sequence[Part], j: int) -> tuple[int, float, int]:
        """Peak, seconds and depth of a chain of parts that ends in link j, without rounding."""
        peak, seconds, depth = 0, 0.0, 0
        for part in reversed(parts):
            choice = j - part.stop + 1 if part.inside else 0
            figures = self.choices(np.array([part.start]), j - part.start)
            needed, held, own = (one[0, choice].item() for one in figures)
            after = held + peak if part.start < j else 0
            if part.inside:
                inner, again, deep = self.figures(part.inside, part.stop - 1)
                own += again
                after = max(after, inner)
                depth = max(depth, deep + 1)
            peak = max(needed, after)
            seconds += own
        return peak, seconds, depth


def _running(runs: Sequence[Run], pinned: np.ndarray) -> np.ndarray:
    """The most memory of running from each link on, up to some number of links later."""
    own = np.array([run.bytes for run in runs], dtype=np.int64)
    own[pinned] = _NEVER
    after = np.array([run.bytes_with_input for run in runs], dtype=np.int64)
    after[pinned] = _NEVER
    most = np.zeros((len(runs), len(runs)), dtype=np.int64)
    for start in range(len(runs)):
        row = np.concatenate((own[start : start + 1], after[start + 1 :]))
        most[start, : len(row)] = np.maximum.accumulate(row)
    return most


class _Table:
    """least(i, j, m) for all links and all m that are multiples of a slot."""

    def __init__(self, chain: _Chain, slot: int, slots: int, *, up: bool) -> None:
        self.chain, self._slot, self._up = chain, slot, up
        levels = np.arange(slots + 1)
        # The last column is what memory below 0 leads to.
        self.least = np.full((len(chain), len(chain), slots + 2), np.inf)
        # 0 to save, or for which choice of a stop.
        self._choice = np.zeros((len(chain), len(chain), slots + 1), dtype=np.int32)
        for length, first, alike in chain.alike():
            costs = self._costs(first, length, levels)
            i = np.arange(len(alike))
            self.least[i, i + length, :-1] = costs.min(axis=1)[alike]
            self._choice[i, i + length] = costs.argmin(axis=1)[alike]

    def _in_slots(self, bytes_: np.ndarray) -> np.ndarray:
        return -(-bytes_ // self._slot) if self._up else bytes_ // self._slot

    def _costs(self, i: np.ndarray, length: int, levels: np.ndarray) -> np.ndarray:
        """The cost of every choice at the levels, [i, choice, level]."""
        needed, held, seconds = self.chain.choices(i, length)
        needed, held = self._in_slots(needed), self._in_slots(held)
        costs = seconds[:, :, None] + np.zeros(len(levels))
        if length:
            j = (i + length)[:, None]
            stops = self.chain.stops(i + length, length)
            then = np.concatenate((i[:, None] + 1, stops), axis=1)
            left = np.maximum(levels - held[:, :, None], -1)
            costs += self.least[then[:, :, None], j[:, :, None], left]
            costs[:, 1:] += self.least[i[:, None], stops - 1][:, :, levels]
        costs[levels < needed[:, :, None]] = np.inf
        return costs

    def choose(self, i: int, j: int, level: int) -> tuple[int, int]:
        """The best choice with this much memory: 0 to save, or k; and the level left after it."""
        choice = int(self._choice[i, j, level])
        stop = j + 1 - choice if choice else 0
        return stop, level - self._in_slots(self.chain.held_bytes(i, stop)).item()


def _parts(
    choose: Callable[[int, int, int], tuple[int, int]],
    i: int,
    j: int,
    level: int,
    deepest: int = MOST_REPETITIONS,
) -> tuple[Part, ...] | None:
    """Links i to j as chosen; None if checkpoints nest deeper than ``deepest``."""
    parts: list[Part] = []
    while i <= j:
        stop, left = choose(i, j, level)
        if stop and not deepest:
            return None
        inside = _parts(choose, i, stop - 1, level, deepest - 1) if stop else ()
        if inside is None:
            return None
        parts.append(Part(start=i, stop=stop or i + 1, inside=inside))
        i, level = parts[-1].stop, left
    return tuple(parts)


def least_budget(graph: Graph) -> int | Refused:
    """The least peak of any nest, in the model of memory, in bytes."""
    if refused := _refusal(graph, links(graph)):
        return refused
    return _least(_Chain(graph))[0]


def _least(chain: _Chain) -> tuple[int, tuple[Part, ...] | None]:
    """The least peak of any nest, and the nest unless it is too deep.

    It is the recursion of least(i, j, m), with the peak as its value.
    """
    count = len(chain)
    least = np.zeros((count + 1, count), dtype=np.int64)
    chosen = np.zeros((count, count), dtype=np.int64)
    for length, first, alike in chain.alike():
        peaks, held, _ = chain.choices(first, length)
        if length:
            j = first + length
            stops = chain.stops(j, length)
            then = np.concatenate((first[:, None] + 1, stops), axis=1)
            peaks = np.maximum(peaks, held + least[then, j[:, None]])
            peaks[:, 1:] = np.maximum(peaks[:, 1:], least[first[:, None], stops - 1])
        choice = np.argmin(peaks, axis=1)[alike]
        i = np.arange(len(alike))
        j = i + length
        least[i, j] = peaks.min(axis=1)[alike]
        chosen[i, j] = np.where(choice, j + 1 - choice, 0)
    parts = _parts(lambda i, j, level: (int(chosen[i, j]), level), 0, chain.last, 0)
    return int(least[0, chain.last]), parts


Answer = Solution[Nest] | Infeasible | Refused


def least_overhead(graph: Graph, budget_bytes: float, *, slots: int = SLOTS) -> Answer:
    """The nest within a budget that computes the least again.

    Args:
      graph: what to plan.
      budget_bytes: bound on the peak in the model of memory.
      slots: into how many parts to divide the budget if it cannot be counted exactly in this many.

    Returns:
      A solution whose objective is the overhead in seconds, in the model; or that none is within
      the budget, with the least one; or a refusal.
    """
    found = _prepare(graph, budget_bytes, slots)
    if isinstance(found, Refused):
        return found
    chain, slot, levels = found
    least_bytes, fallback = _least(chain)
    if least_bytes > budget_bytes:
        return Infeasible(budget_bytes=budget_bytes, least_bytes=least_bytes)
    table = _Table(chain, slot, levels, up=True)
    reached = bool(np.isfinite(table.least[0, chain.last, levels]))
    parts = _parts(table.choose, 0, chain.last, levels) if reached else fallback
    if parts is None:
        return Refused(
            message=f"The nest for {budget_bytes} bytes has more than {MOST_REPETITIONS} "
            "checkpoints inside one another. Give a larger budget."
        )
    peak, seconds, depth = chain.figures(parts, chain.last)
    bound = seconds
    if slot != _common_measure(graph):
        table = _Table(chain, slot, levels, up=False)
        proven = float(table.least[0, chain.last, levels])
        # Sums of the same seconds in another order count as equal.
        bound = proven if proven < seconds * (1 - 1e-12) else seconds
    return Solution(
        schedule=Schedule(regions=_regions(chain.ranges, parts)),
        figures=Nest(
            links=len(chain),
            depth=depth,
            peak_bytes=peak,
            overhead_seconds=seconds,
            slot_bytes=slot,
        ),
        status=Status.FEASIBLE if bound < seconds else Status.OPTIMAL,
        objective=seconds,
        bound=bound,
    )


def frontier(graph: Graph, *, slots: int = SLOTS) -> list[Candidate] | Refused:
    """The ``schedules`` with the referee's figures."""
    found = schedules(graph, slots=slots)
    return found if isinstance(found, Refused) else judged(graph, found)


def schedules(graph: Graph, *, slots: int = SLOTS) -> list[Schedule] | Refused:
    """The best nests for all budgets, by ascending budget.

    Args:
      graph: what to plan.
      slots: into how many parts to divide the peak of the chain with every link saved.
    """
    found = _prepare(graph, math.inf, slots)
    if isinstance(found, Refused):
        return found
    chain, slot, levels = found
    table = _Table(chain, slot, levels, up=True)
    costs = table.least[0, chain.last, : levels + 1]
    nests = [_least(chain)[1]]
    for level in np.flatnonzero(costs < np.concatenate([[np.inf], costs[:-1]])):
        nests.append(_parts(table.choose, 0, chain.last, int(level)))
    return list(
        dict.fromkeys(
            Schedule(regions=_regions(chain.ranges, parts)) for parts in nests if parts is not None
        )
    )


def _prepare(graph: Graph, budget_bytes: float, slots: int) -> tuple[_Chain, int, int] | Refused:
    """The chain, the bytes of a slot, and how many slots the budget holds."""
    if refused := _refusal(graph, links(graph)):
        return refused
    chain = _Chain(graph)
    count = len(chain)
    everything = tuple(Part(start=i, stop=i + 1) for i in range(count))
    budget = max(0, math.floor(min(budget_bytes, chain.figures(everything, chain.last)[0])))
    slot = _common_measure(graph)
    if budget // slot > slots:
        slot = -(-budget // slots)
    entries = count**2 * (budget // slot + 2)
    if entries > MOST_ENTRIES:
        return Refused(
            message=f"{count} links and {budget // slot} slots take a table of {entries} entries; "
            f"the limit is {MOST_ENTRIES}. Give fewer slots, or use dynamic_program.approximate."
        )
    return chain, slot, budget // slot


def _common_measure(graph: Graph) -> int:
    """The largest number that all bytes of the model are multiples of."""
    sizes = (
        graph.bytes,
        graph.cotangent_bytes,
        graph.internal_bytes,
        graph.workspace_bytes,
        graph.forward_workspace_bytes,
    )
    return math.gcd(*itertools.chain(*sizes)) or 1
