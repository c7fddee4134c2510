"""The best canonical strategy under a budget, by dynamic programming over lower sets.

Problem. Among the increasing sequences of lower sets L_1 < ... < L_k = V whose peak (Eq. 2) is
within a budget, find the one with the least recomputation (time-centric), or with the most
(memory-centric: coarse blocks, on which liveness analysis works best).

Method. Once a sequence has reached L, only two numbers matter to what follows: the time t forgotten
so far and the bytes m cached so far. opt[L, t] is the least m; tables are sparse, and hold only the
t that occur. Lower sets are taken by ascending size; all steps into one of them are computed
together with numpy. Time-centric, an entry is dropped when another one of the same lower set has
neither more t nor more m (Sec. 4.2). That rule is wrong for memory-centric, where the larger t is
better, and is not used there (correction 9).

``exact`` searches all lower sets, ``approximate`` the pruned family of Sec. 4.3: one lower set
per vertex, with the empty set and V added (correction 7).

``least_budget`` is computed, not bisected (correction 10): the same recursion, with the peak so far
in place of t, and the pairs (peak, m) that no other beats.

Why not a ready-made tool: the states are pairs on a lattice that depends on the graph; no
library searches that.

Complexity: O(#T #L^2) time, where #L counts lower sets and #T the entries per lower set;
O(#L n) memory for terms and O(#T #L) for entries.

Guarantee: ``exact`` is optimal over all canonical strategies in the paper's model, where times are
whole multiples of a power of two with a total of less than 2**40 of them; other times are first
rounded to 2**-40 of the forward pass. ``approximate`` is optimal over its family, with times
rounded to one of ``TIME_STEPS`` steps unless they are already as coarse; for the whole problem it
has no guarantee. Figures are always computed from the true times.

Left out: recomputing a value more than once, and what ``lower_sets`` leaves out.

Reference: Kusumoto et al. (2019), Algorithm 1, sections 4.2-4.4.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.solvers.base import Infeasible, Refused, Solution, Status
from remat_opt.solvers.lower_sets import (
    Family,
    Strategy,
    Terms,
    all_lower_sets,
    evaluate,
    pruned_lower_sets,
    schedule_of,
    time_units,
)

#: ``exact`` refuses graphs with more lower sets than this.
MOST_LOWER_SETS = 4_000
#: Either refuses when its tables outgrow this number of entries.
MOST_ENTRIES = 4_000_000
#: Into how many steps ``approximate`` divides the time of a forward pass.
TIME_STEPS = 2_000
_EXACT_STEPS = 1 << 40


class Centric(enum.Enum):
    """What a strategy is chosen for.

    TIME: the least recomputation within the budget.
    MEMORY: the most, for the sake of liveness analysis (Sec. 4.4).
    """

    TIME = "time"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A strategy and how much was searched for it.

    Attributes:
      strategy: with all its figures.
      lower_sets: how many lower sets the family holds.
      entries: how many table entries there were.
    """

    strategy: Strategy
    lower_sets: int
    entries: int


Answer = Solution[Searched] | Infeasible | Refused


def exact(
    graph: Graph,
    budget_bytes: float,
    *,
    centric: Centric = Centric.TIME,
    last_block_free: bool = False,
    most_lower_sets: int = MOST_LOWER_SETS,
) -> Answer:
    """The best canonical strategy.

    Args:
      graph: what to plan.
      budget_bytes: bound on the peak without liveness analysis, Eq. 2.
      centric: what to choose the strategy for.
      last_block_free: whether the last block costs nothing, as executed, or is charged as in
        Eq. 1 (correction 6).
      most_lower_sets: refuse graphs with more lower sets.

    Returns:
      A solution whose objective is the overhead in seconds; or that none is within the budget,
      with the least budget; or a refusal.
    """
    masks = _bounded(graph, most_lower_sets)
    if isinstance(masks, Refused):
        return masks
    units = time_units(graph, _EXACT_STEPS)
    return _search(graph, masks, units, budget_bytes, centric, last_block_free, Status.OPTIMAL)


def approximate(
    graph: Graph,
    budget_bytes: float,
    *,
    centric: Centric = Centric.TIME,
    last_block_free: bool = False,
    time_steps: int = TIME_STEPS,
) -> Answer:
    """A near-optimal canonical strategy, over the pruned family.

    Args:
      graph: what to plan.
      budget_bytes: bound on the peak without liveness analysis, Eq. 2.
      centric: what to choose the strategy for.
      last_block_free: as for ``exact``.
      time_steps: into how many steps to divide the time of a forward pass.

    Returns:
      As ``exact``; the bound is the trivial one, and an infeasible answer refers to this family.
    """
    masks = pruned_lower_sets(graph)
    units = time_units(graph, time_steps)
    return _search(graph, masks, units, budget_bytes, centric, last_block_free, Status.FEASIBLE)


def least_budget(graph: Graph, *, most_lower_sets: int = MOST_LOWER_SETS) -> int | Refused:
    """The least peak (Eq. 2) of any canonical strategy, in bytes."""
    masks = _bounded(graph, most_lower_sets)
    if isinstance(masks, Refused):
        return masks
    return _least_budget(Family(graph, masks, time_units(graph, 1)))


def least_approximate_budget(graph: Graph) -> int:
    """The least peak (Eq. 2) of any canonical strategy over the pruned family, in bytes."""
    return _least_budget(Family(graph, pruned_lower_sets(graph), time_units(graph, 1)))


def _bounded(graph: Graph, most: int) -> Sequence[int] | Refused:
    masks = tuple(itertools.islice(all_lower_sets(graph), most + 1))
    if len(masks) > most:
        return Refused(
            message=f"The graph of {len(graph)} vertices has more than {most} lower sets, the "
            "limit of the exact dynamic program. Use dynamic_program.approximate, which needs "
            f"no more than {len(graph) + 2}, or raise most_lower_sets."
        )
    return masks


class _Entries:
    """Table entries of all lower sets so far: (lower set, key, bytes cached), in that order."""

    def __init__(self) -> None:
        self._used = 1
        self._owner = np.zeros(1024, dtype=np.int64)
        self._key = np.zeros(1024)
        self._cached = np.zeros(1024)
        self.starts = [0, 1]  # opt[empty set, 0] = 0

    def __len__(self) -> int:
        return self._used

    def add(self, keys: np.ndarray, cached: np.ndarray) -> None:
        """Appends the entries of the next lower set."""
        end = self._used + len(keys)
        if end > len(self._key):
            size = max(end, 2 * len(self._key))
            for name in ("_owner", "_key", "_cached"):
                old = getattr(self, name)
                new = np.zeros(size, dtype=old.dtype)
                new[: self._used] = old[: self._used]
                setattr(self, name, new)
        self._owner[self._used : end] = len(self.starts) - 1
        self._key[self._used : end] = keys
        self._cached[self._used : end] = cached
        self._used = end
        self.starts.append(end)

    def before(self, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Owner, key and bytes of all entries of lower sets below ``target``."""
        end = self.starts[target]
        return self._owner[:end], self._key[:end], self._cached[:end]

    def of(self, target: int) -> tuple[np.ndarray, np.ndarray]:
        """Key and bytes of the entries of one lower set."""
        part = slice(self.starts[target], self.starts[target + 1])
        return self._key[part], self._cached[part]


def _steps(
    entries: _Entries, target: int, terms: Terms, budget: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All steps into ``target`` within the budget: entry, t' and m'."""
    owner, keys, cached = entries.before(target)
    # Algorithm 1, lines 6-8: M = opt[L, t] + 2 M(V') + ... must not exceed B.
    fits = terms.inside[owner] & (cached + terms.block_bytes[owner] <= budget)
    chosen = np.flatnonzero(fits)
    owner = owner[chosen]
    return (
        chosen,
        keys[chosen] + terms.forgotten[owner],  # line 9
        cached[chosen] + terms.boundary_bytes[owner],  # line 10
    )


def _search(
    graph: Graph,
    masks: Sequence[int],
    units: Sequence[int],
    budget: float,
    centric: Centric,
    last_block_free: bool,
    status: Status,
) -> Answer:
    family = Family(graph, masks, units)
    last = len(family) - 1
    entries = _Entries()

    def steps(target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        terms = family.steps_to(target)
        if target == last and last_block_free:
            terms = dataclasses.replace(terms, forgotten=np.zeros_like(terms.forgotten))
        return _steps(entries, target, terms, budget)

    for target in range(1, last + 1):
        _, times, cached = steps(target)
        times, cached = _least_per_key(times, cached, family.total)
        if centric is Centric.TIME:
            times, cached = _undominated(times, cached)
        entries.add(times, cached)
        if len(entries) > MOST_ENTRIES:
            return Refused(
                message=f"The tables outgrew {MOST_ENTRIES} entries after {target} of {last} "
                "lower sets. Use dynamic_program.approximate with fewer time_steps, which "
                "rounds times so that fewer of them differ."
            )
    reached, _ = entries.of(last)
    if not len(reached):
        return Infeasible(budget_bytes=budget, least_bytes=_least_budget(family))

    # Algorithm 1, lines 15 and 16, without optarg: we search again for the step that led here.
    pick = int(np.argmin(reached) if centric is Centric.TIME else np.argmax(reached))
    sequence: list[int] = []
    target, entry = last, entries.starts[last] + pick
    while target > 0:
        sequence.append(family.masks[target])
        _, keys, bytes_cached = entries.before(target + 1)
        chosen, times, cached = steps(target)
        came = np.flatnonzero((times == keys[entry]) & (cached == bytes_cached[entry]))
        entry = int(chosen[came[0]])
        target = int(np.searchsorted(entries.starts, entry, side="right")) - 1
    strategy = evaluate(graph, sequence[::-1])
    objective = strategy.overhead_seconds if last_block_free else strategy.paper_overhead_seconds
    trivial = 0.0 if centric is Centric.TIME else graph.forward_seconds
    return Solution(
        schedule=schedule_of(graph, sequence[::-1]),
        figures=Searched(strategy=strategy, lower_sets=len(family), entries=len(entries)),
        status=status,
        objective=objective,
        bound=objective if status is Status.OPTIMAL else trivial,
    )


def _least_per_key(
    keys: np.ndarray, cached: np.ndarray, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the entries with the same key, the one with the fewest bytes; keys ascend."""
    if total < 1 << 16:
        # Few keys: a dense table is faster than sorting.
        table = np.full(total + 1, np.inf)
        np.minimum.at(table, keys.astype(np.int64), cached)
        found = np.flatnonzero(table < np.inf)
        return found.astype(float), table[found]
    order = np.lexsort((cached, keys))
    keys, cached = keys[order], cached[order]
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    return keys[first], cached[first]


def _undominated(keys: np.ndarray, cached: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries, by ascending key, for which no smaller key has as few bytes (Sec. 4.2)."""
    least = np.minimum.accumulate(cached)
    better = np.ones(len(cached), dtype=bool)
    better[1:] = cached[1:] < least[:-1]
    return keys[better], cached[better]


#: How many budgets are tried side by side, and how often, before the exact search.
_TRIALS, _ROUNDS = 24, 2


def _least_budget(family: Family) -> int:
    """The least over all sequences of the largest Eq. 2 of their blocks (correction 10).

    Trial budgets narrow down its range, which is then searched exactly.
    """
    low, high = 0.0, float(family.steps_to(len(family) - 1).block_bytes[0])
    for _ in range(_ROUNDS):
        trials = np.linspace(low, high, _TRIALS + 2)[1:-1]
        feasible = [*_feasible(family, trials), True]
        first = feasible.index(True)
        low, high = ([low, *trials][first]), ([*trials, high][first])
    entries = _Entries()
    for target in range(1, len(family)):
        terms = family.steps_to(target)
        owner, peaks, cached = entries.before(target)
        # At least ``low`` is needed anyway, so lower peaks are no better.
        needed = np.maximum(np.maximum(peaks, low), cached + terms.block_bytes[owner])
        chosen = np.flatnonzero(terms.inside[owner] & (needed <= high))
        cached = cached[chosen] + terms.boundary_bytes[owner[chosen]]
        # A larger number is never better, so here the rule of Sec. 4.2 holds.
        entries.add(*_undominated(*_least_per_key(needed[chosen], cached, 1 << 16)))
    peaks, _ = entries.of(len(family) - 1)
    return round(float(peaks.min()))


def _feasible(family: Family, budgets: np.ndarray) -> list[bool]:
    """For each budget, whether there is a strategy: fewer bytes cached are never worse."""
    least = np.full((len(budgets), len(family)), np.inf)
    least[:, 0] = 0.0
    for target in range(1, len(family)):
        terms = family.steps_to(target)
        before = least[:, :target]
        fits = terms.inside & (before + terms.block_bytes <= budgets[:, None])
        least[:, target] = np.where(fits, before + terms.boundary_bytes, np.inf).min(axis=1)
    return [bool(reached) for reached in least[:, -1] < np.inf]
