"""The repeated parts of a program: what a careful user would put under a checkpoint each.

**By name.** Equations carry the names of the modules that made them. Siblings whose names end in a
number (``Block_0``, ``Block_1``, ...) are blocks if they hold more than one thing: modules, or
products. If such modules are nested, each level is a candidate.

**By repetition.** If names say nothing, an equation is a letter: its primitive, parameters, shapes
and dtypes. What repeats is a *run*: a stretch of the text, at least two periods long, in which
every letter equals the one a period before. Candidate periods are distances between equal words of
1, 2, 4, ... letters, numbered by doubling as for a suffix array; the most frequent distances of
each length are tried. Runs are taken by how much they cover, longest first. The letters do not say
where in a run the blocks begin: we choose where the fewest bytes cross. A stretch between two runs
that is about as long as a block is one too (the first block of a stage, with its own projection).
The same is done with letters without sizes, so that stages of different widths form one run.

Of several candidates we take the one that, roughly, holds the least bytes if every block keeps
nothing: what is made outside blocks, what crosses from one block to a later one, and everything
that the largest block makes. If that is no less than all bytes made, there are no blocks.

Time: O(n log^2 n) for n equations; at most a constant number of periods is tried for each word
length. A repetition whose period is not among the most frequent distances is not found.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from remat_opt.naming import modules_of
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Equation, Program

#: Distances that are tried for each word length.
_MOST_PERIODS = 12
#: A run must make this share of the program's bytes.
_LEAST_SHARE = 0.05
#: A stretch between two runs is a block if it is at most this many blocks long.
_MOST_PERIODS_BETWEEN = 2.0

_NUMBERED = re.compile(r"(?P<stem>.*?\D)(?P<number>\d+)[\])]*")


def blocks(program: Program) -> tuple[range, ...]:
    """The blocks of a program as runs of consecutive equations, in order; none if there are none.

    Args:
      program: a traced function.

    Returns:
      Positions of equations, as ranges that do not overlap; at least two, or none.
    """
    named = list(_by_name(program))
    sizes = _Sizes(program)
    found = sizes.best(named)
    if not found:
        exact = [_letter(one, sized=True) for one in program.equations]
        rough = [_letter(one, sized=False) for one in program.equations]
        found = sizes.best(
            [answer for text in (exact, rough) for answer in _by_repetition(text, sizes)]
        )
    return found


class _Sizes:
    """Bytes made and crossing, for every position in the program."""

    def __init__(self, program: Program) -> None:
        count = len(program.equations)
        self.made = np.zeros(count + 1, dtype=np.int64)
        values: list[tuple[int, int, int]] = []
        maker = program.makers()
        last = dict.fromkeys(program.output_values, count)
        for index in range(count - 1, -1, -1):
            for value in program.equations[index].value_inputs:
                last.setdefault(value, index)
        for value, index in maker.items():
            size = program.types[value].bytes
            self.made[index + 1] += size
            if value in last:
                values.append((index, last[value], size))
        self.made = np.cumsum(self.made)
        self._first = np.array([v[0] for v in values], dtype=np.int64)
        self._last = np.array([v[1] for v in values], dtype=np.int64)
        self._bytes = np.array([v[2] for v in values], dtype=np.int64)
        # Before equation i: what earlier ones made and it or a later one reads.
        change = np.zeros(count + 2, dtype=np.int64)
        np.add.at(change, self._first + 1, self._bytes)
        np.add.at(change, self._last + 1, -self._bytes)
        self.crossing = np.cumsum(change)[: count + 1]

    def of(self, run: range) -> int:
        """Bytes that a run of equations makes."""
        return int(self.made[run.stop] - self.made[run.start])

    def held(self, runs: Sequence[range]) -> int:
        """Bytes held, roughly, if every run keeps nothing."""
        block_of = np.arange(len(self.made), 2 * len(self.made))
        for number, run in enumerate(runs):
            block_of[run.start : run.stop] = number
        crosses = block_of[self._first] != block_of[self._last]
        within = block_of[self._first] < len(self.made)
        kept = int(self._bytes[crosses & within].sum())
        total, inside = int(self.made[-1]), [self.of(run) for run in runs]
        return total - sum(inside) + kept + max(inside, default=0)

    def best(self, answers: Iterable[Sequence[range]]) -> tuple[range, ...]:
        """The candidate that holds the least bytes; none if that is no less than without blocks."""
        least = int(self.made[-1])
        found: tuple[range, ...] = ()
        for answer in answers:
            if len(answer) > 1 and (held := self.held(answer)) < least:
                least, found = held, tuple(answer)
        return found


# --- by name ------------------------------------------------------------------------------


def _by_name(program: Program) -> Iterator[list[range]]:
    """For each level of numbered modules, its runs of equations."""
    paths = [modules_of(one.module) for one in program.equations]
    inside: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    products: defaultdict[tuple[str, ...], int] = defaultdict(int)
    siblings: defaultdict[tuple[tuple[str, ...], str], set[tuple[str, ...]]] = defaultdict(set)
    for path, equation in zip(paths, program.equations, strict=True):
        is_product = equation.operation.primitive in PRODUCTS
        for length in range(1, len(path) + 1):
            module = path[:length]
            products[module] += is_product
            if length < len(path):
                inside[module].add(path[length])
            if numbered := _NUMBERED.fullmatch(module[-1]):
                siblings[module[:-1], numbered["stem"]].add(module)
    candidates = {
        module
        for family in siblings.values()
        if len(family) > 1
        for module in family
        if len(inside[module]) > 1 or products[module] > 1
    }
    chains = {
        path: [path[:n] for n in range(1, len(path) + 1) if path[:n] in candidates]
        for path in set(paths)
    }
    # Where a level has no modules, those of the level above stay whole.
    with_inner = {outer for chain in chains.values() for outer in chain[:-1]}
    for level in range(max(map(len, chains.values()), default=0)):
        keys = []
        for path in paths:
            chain = chains[path]
            reached = chain[: level + 1]
            in_block = len(reached) == level + 1 or (reached and reached[-1] not in with_inner)
            keys.append(reached[-1] if in_block else None)
        yield _spans(keys)


def _spans(keys: Sequence[Hashable | None]) -> list[range]:
    """From the first to the last of each key, unless these overlap; then consecutive stretches."""
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for index, key in enumerate(keys):
        if key is not None:
            first.setdefault(key, index)
            last[key] = index
    spans = sorted((range(first[key], last[key] + 1) for key in first), key=lambda span: span.start)
    if all(left.stop <= right.start for left, right in itertools.pairwise(spans)):
        return spans
    found = []
    for key, group in itertools.groupby(range(len(keys)), key=keys.__getitem__):
        if key is not None:
            row = list(group)
            found.append(range(row[0], row[-1] + 1))
    return found


# --- by repetition ------------------------------------------------------------------------


def _letter(equation: Equation, *, sized: bool) -> Hashable:
    kinds = (*equation.operation.inputs, *equation.operation.outputs)
    if sized:
        return equation.operation.primitive, equation.parameters, kinds
    ranks = tuple((len(kind.shape), kind.dtype) for kind in kinds)
    return equation.operation.primitive, ranks


def _by_repetition(letters: Sequence[Hashable], sizes: _Sizes) -> Iterator[list[range]]:
    """Blocks from the runs of a text; also with those between two runs."""
    numbers: dict[Hashable, int] = {}
    text = np.array([numbers.setdefault(one, len(numbers)) for one in letters], dtype=np.int64)
    least_bytes = _LEAST_SHARE * int(sizes.made[-1])
    found = sorted(
        {run for period in _periods(text) for run in _runs(text, period)},
        key=lambda run: (-(run[1] - run[0]), run[2], run[0]),
    )
    taken: list[tuple[int, int, int]] = []
    free = np.ones(len(text), dtype=bool)
    for start, stop, period in found:
        for part in _stretches(free[start:stop], 2 * period):
            whole = range(start + part.start, start + part.stop)
            if sizes.of(whole) > least_bytes:
                taken.append((whole.start, whole.stop, period))
                free[whole.start : whole.stop] = False
    cut = [_cut(sizes, *run) for run in sorted(taken)]
    yield [block for run in cut for block in run]
    between: list[range] = []
    for left, right in itertools.pairwise(cut):
        gap = range(left[-1].stop, right[0].start)
        if 0 < len(gap) <= _MOST_PERIODS_BETWEEN * max(len(left[-1]), len(right[0])):
            between.append(gap)
    if between:
        both = [*(block for run in cut for block in run), *between]
        yield sorted(both, key=lambda block: block.start)


def _periods(text: np.ndarray) -> list[int]:
    """Frequent distances between equal words, for words of 1, 2, 4, ... letters."""
    found: set[int] = set()
    words, length = text, 1
    while len(words) > 1:
        order = np.argsort(words, kind="stable")
        same = words[order[1:]] == words[order[:-1]]
        distances, counts = np.unique((order[1:] - order[:-1])[same], return_counts=True)
        if not len(distances):
            break
        # Of equally frequent ones, the shortest.
        found.update(distances[np.lexsort((distances, -counts))][:_MOST_PERIODS].tolist())
        if len(words) <= length:
            break
        pairs = words[:-length] * (words.max() + 1) + words[length:]
        words = np.unique(pairs, return_inverse=True)[1]
        length *= 2
    return sorted(found)


def _runs(text: np.ndarray, period: int) -> list[tuple[int, int, int]]:
    """(start, stop, period) of each run of at least two periods."""
    repeats = text[:-period] == text[period:]
    return [(part.start, part.stop + period, period) for part in _stretches(repeats, period)]


def _stretches(flags: np.ndarray, least: int) -> list[range]:
    """Where at least this many consecutive flags are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= least
    return [range(a, b) for a, b in zip(starts[long].tolist(), stops[long].tolist(), strict=True)]


def _cut(sizes: _Sizes, start: int, stop: int, period: int) -> list[range]:
    """A run cut into blocks of one period, beginning where the fewest bytes cross."""
    count = (stop - start) // period
    begins = range(start, stop - count * period + 1)
    crossing = [
        int(sizes.crossing[begin : begin + count * period + 1 : period].sum()) for begin in begins
    ]
    begin = begins[min(range(len(begins)), key=crossing.__getitem__)]
    return [range(begin + k * period, begin + (k + 1) * period) for k in range(count)]
