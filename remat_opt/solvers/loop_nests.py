"""A loop reversed within a budget: which iterations keep what, in parts and nested chunks.

Problem. A loop runs n iterations that are alike. Each needs the state that the one before hands it,
and its backward step needs more, which it may keep, in one of a few ways, or compute again in its
turn. A whole run of iterations may also keep nothing but the state that it starts from, and be done
again as a loop of its own when its turn comes. Within M bytes: the least time computed again. A
program has to say it, so runs that are alike should be one loop of chunks, and parts be few.

Method. least(n, m) is the least time to compute again, if n iterations are run forward once, whose
time is not counted, and backward within m bytes, with the state that they start from among them.
Their first part is one of

  leaf    w iterations in way j, each of which keeps its state and k[j] bytes and takes t[j] again:
          w t[j] + least(n - w, m - w (state + k[j])), and the workspace of j must fit beside; or
  chunks  q chunks of c iterations, which keep one state each, in one loop:
          q (c t + least(c, m' - c result)) + least(n - q c, m - q state), where t is the time of an
          iteration, a result is the gradient of what one writes to stacks, which a chunk is handed,
          and m' is m - q state.

With chunks of which there is only one this would be Revolve's recursion. But such a chunk is no
loop, and a compiler that sees no loop may do its work again as soon as it was done (XLA on CPU
does). Without them the program is much shorter, and hardly more is computed again: of 400 steps
with 15 snapshots 3 % more than by Revolve, of which ways that keep more make up with more memory.
Every part costs a little time beside, so that of plans alike the shorter one is found.

All n up to a few octaves are too many: of each octave 32 lengths are looked at, in equal steps, and
what is left after a part is one of these. (A multiple of a step is one of all smaller steps.)
Memory is counted in slots, in tables whose budgets halve, and bytes are rounded up to slots, so
that what is found fits; ``judge`` gives its exact figures.

Why not a ready-made tool: published implementations of Revolve drive a program of their own step by
step, and know whole steps and neither kept parts of steps, nor loops.

Complexity: for each octave, table and way some millions of elementary steps in numpy; no more than
some tenths of a second for a loop.

Guarantee: where no length is skipped and nothing is rounded, optimal among all nests of parts with
at most ``MOST_CHUNKS`` chunks in each, time for parts included; none otherwise. Deterministic.

Reference: Griewank & Walther, *Algorithm 799: Revolve* (ACM TOMS 26, 2000); Gruslys et al.,
*Memory-efficient backpropagation through time* (NIPS 2016), for what iterations keep in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

#: Lengths in an octave.
_IN_OCTAVE = 32
#: Chunks in a part.
MOST_CHUNKS = 64
#: Slots of a table; how many times smaller the budget of the next one is; how many tables.
SLOTS, _FACTOR, _MOST_TABLES = 96, 2, 10
#: The time that a part costs, as a share of the loop's: a little, and more where plans get long.
_PART_SHARES = (1 / 10_000, 1 / 1000, 1 / 100)
#: Parts in a plan, those inside of one another counted.
MOST_PARTS = 96

#: One length, or many.
_Length = TypeVar("_Length", int, np.ndarray)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to run one iteration.

    Attributes:
      kept_bytes: what it keeps beside its state.
      workspace_bytes: what its backward step takes while it runs, beside what waits.
      alone_bytes: likewise in a part of one iteration, which is no loop, beside what it keeps.
      seconds: what it computes again.
    """

    kept_bytes: int
    workspace_bytes: int
    alone_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A loop.

    Attributes:
      length: n.
      state_bytes: of what an iteration hands to the next.
      result_bytes: of the gradients of what it writes to stacks.
      seconds: of an iteration, forward.
      ways: to run an iteration.
      chunks: whether there may be any.
      alone_bytes: what an iteration keeps more in a part of one.
    """

    length: int
    state_bytes: int
    result_bytes: int
    seconds: float
    ways: tuple[Way, ...]
    chunks: bool = True
    alone_bytes: int = 0

    def held_bytes(self, length: _Length, way: Way) -> _Length:
        """What so many iterations in a part keep, their states among it."""
        each = self.state_bytes + way.kept_bytes
        held: _Length = length * each + (length == 1) * self.alone_bytes
        return held


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part: iterations in one way, or in chunks.

    Attributes:
      length: how many iterations.
      way: the position of the way; that of the first where there are chunks.
      inside: the parts of a chunk; empty where there are none.
    """

    length: int
    way: int = 0
    inside: tuple[Piece, ...] = ()

    @property
    def chunk(self) -> int:
        """The length of a chunk."""
        return sum(piece.length for piece in self.inside)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What parts take.

    Attributes:
      held_bytes: what waits for the backward pass.
      peak_bytes: the most that is there while it runs, what waits among it.
      seconds: what is computed again.
    """

    held_bytes: int
    peak_bytes: int
    seconds: float


def judge(chain: Chain, pieces: Sequence[Piece]) -> Figures:
    """The exact figures of parts."""
    held = peak = 0
    seconds = 0.0
    for piece in pieces:
        if piece.inside:
            size = piece.chunk
            count = piece.length // size
            chunk = judge(chain, piece.inside)
            held += count * chain.state_bytes
            peak = max(peak, held + size * chain.result_bytes + chunk.peak_bytes)
            seconds += count * (chunk.seconds + size * chain.seconds)
        else:
            way = chain.ways[piece.way]
            held += chain.held_bytes(piece.length, way)
            beside = way.workspace_bytes if piece.length > 1 else way.alone_bytes
            peak = max(peak, held + beside)
            seconds += piece.length * way.seconds
    return Figures(held_bytes=held, peak_bytes=peak, seconds=seconds)


def nests(chain: Chain, *, slots: int = SLOTS) -> Iterator[tuple[Piece, ...]]:
    """Parts for many budgets, from the memory that the loop takes at most down to the least."""
    most = max(
        judge(chain, [Piece(length=chain.length, way=way)]).peak_bytes
        for way in range(len(chain.ways))
    )
    for number in range(_MOST_TABLES):
        top = most / _FACTOR**number
        for share in _PART_SHARES:
            table = _Table(chain, top, slots, share * chain.seconds * chain.length)
            found = list(table.plans(math.floor(top / _FACTOR / table.slot)))
            short = [pieces for pieces in found if count(pieces) <= MOST_PARTS]
            yield from short
            if len(short) == len(found):
                break
        if not found:
            return


def lengths(most: int) -> list[int]:
    """The lengths that are looked at, up to ``most``.

    >>> lengths(71)[-4:]
    [62, 64, 68, 71]
    """
    found = [1]
    while found[-1] < most:
        found.append(min(found[-1] + _step(found[-1]), most))
    return found


def _step(length: int) -> int:
    """How far the next length is that is looked at."""
    return 1 << max(0, (length // _IN_OCTAVE).bit_length())


def count(pieces: Sequence[Piece]) -> int:
    """How many parts there are, those inside of one another counted."""
    return sum(1 + count(piece.inside) for piece in pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class _Choices:
    """First parts that are alike in kind, for one length: arrays with one entry each.

    Attributes:
      way: the way of a leaf; -1 for chunks.
      counts: iterations of a leaf, or chunks.
      sizes: the positions of the lengths of chunks.
      rests: the positions of what is left.
    """

    way: int
    counts: np.ndarray
    sizes: np.ndarray
    rests: np.ndarray


class _Table:
    """least(n, m) for all lengths that are looked at and all slots up to a budget."""

    def __init__(self, chain: Chain, budget_bytes: float, slots: int, part_seconds: float) -> None:
        self.chain = chain
        slot = max(1.0, budget_bytes / slots)
        state = chain.state_bytes
        if state > slot:  # states are what is counted most: no rounding of these
            slot = state / math.ceil(state / slot)
        self.slot = slot
        self.slots = round(budget_bytes / slot)
        self.part_seconds = part_seconds
        self.lengths = [0, *lengths(chain.length)]
        self.place = {length: place for place, length in enumerate(self.lengths)}
        shape = (len(self.lengths), self.slots + 1)
        self.least = np.full(shape, np.inf)
        self.least[0] = 0
        # The number of a kind of choice, and which one it is.
        self.kinds = np.zeros(shape, np.int16)
        self.which = np.zeros(shape, np.int32)
        self.choices: list[list[_Choices]] = [[]]
        for place in range(1, len(self.lengths)):
            self._fill(place)

    def _rounded(self, size: np.ndarray | float) -> np.ndarray:
        return np.ceil(np.asarray(size) / self.slot - 1e-9).astype(np.int64)

    def _fill(self, place: int) -> None:
        chain, length = self.chain, self.lengths[place]
        step = _step(self.lengths[place - 1])
        rests = np.array([rest for rest in self.lengths[:place] if rest % step == 0])
        rest_places = np.array([self.place[rest] for rest in rests.tolist()])
        firsts = length - rests
        budgets = np.arange(self.slots + 1)
        choices: list[_Choices] = []
        for number, way in enumerate(chain.ways):
            held = self._rounded(chain.held_bytes(firsts, way))[:, None]
            beside = np.where(firsts > 1, way.workspace_bytes, way.alone_bytes)
            left = budgets - held
            seconds = np.where(
                left >= self._rounded(beside)[:, None],
                (firsts * way.seconds)[:, None] + self.least[rest_places[:, None], left.clip(0)],
                np.inf,
            )
            self._better(place, len(choices), seconds)
            choices.append(_Choices(number, firsts, firsts, rest_places))
        found = [
            (count, self.place[size], rest)
            for first, rest in zip(firsts.tolist(), rest_places.tolist(), strict=True)
            for count in range(2, min(MOST_CHUNKS, first) + 1 if chain.chunks else 0)
            if not first % count and 1 < (size := first // count) < length and size in self.place
        ]
        if found:
            counts, sizes, rest_places = np.array(found).T
            size = np.array(self.lengths)[sizes]
            held = self._rounded(counts * chain.state_bytes)
            within = held + self._rounded(size * chain.result_bytes)
            left, inner = budgets - held[:, None], budgets - within[:, None]
            seconds = np.where(
                np.minimum(left, inner) >= 0,
                (counts * size * chain.seconds)[:, None]
                + counts[:, None] * self.least[sizes[:, None], inner.clip(0)]
                + self.least[rest_places[:, None], left.clip(0)],
                np.inf,
            )
            self._better(place, len(choices), seconds)
            choices.append(_Choices(-1, counts, sizes, rest_places))
        self.choices.append(choices)

    def _better(self, place: int, kind: int, seconds: np.ndarray) -> None:
        """Takes over what is better than what was found so far."""
        best = np.argmin(seconds, axis=0)
        least = seconds[best, np.arange(self.slots + 1)] + self.part_seconds
        better = least < self.least[place]
        self.least[place] = np.where(better, least, self.least[place])
        self.kinds[place] = np.where(better, kind, self.kinds[place])
        self.which[place] = np.where(better, best, self.which[place])

    def plans(self, beyond: int) -> Iterator[tuple[Piece, ...]]:
        """What is found for each budget of more than so many slots, each once."""
        place = len(self.lengths) - 1
        before = np.inf
        for budget in range(beyond + 1, self.slots + 1):
            if self.least[place, budget] < before:
                before = self.least[place, budget]
                yield self._pieces(place, budget)

    def _pieces(self, place: int, budget: int) -> tuple[Piece, ...]:
        chain, found = self.chain, []
        while place:
            choice = self.choices[place][self.kinds[place, budget]]
            which = self.which[place, budget]
            number, size = int(choice.counts[which]), int(choice.sizes[which])
            if choice.way >= 0:
                found.append(Piece(length=number, way=choice.way))
                held = self._rounded(float(chain.held_bytes(number, chain.ways[choice.way])))
            else:
                length = self.lengths[size]
                held = self._rounded(float(number * chain.state_bytes))
                within = self._rounded(float(length * chain.result_bytes))
                inside = self._pieces(size, budget - int(held + within))
                found.append(Piece(length=number * length, inside=inside))
            budget -= int(held)
            place = int(choice.rests[which])
        return tuple(found)
