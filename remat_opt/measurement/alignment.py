"""Memory as compiled, matched to the moments of the replay.

The replay runs vertices; a compiled program runs instructions. Their names show their equation, its
region, and whether they run forward, again or backward, and an equation belongs to the vertex that
it is computed for. So each moment of the replay has the instructions that do its work, and the most
that is alive during them is what the replay should predict.

Names are not everything. A kernel that does the work of several moments has one name, mostly that
of the last: what is alive during it also counts for the moments before. An instruction without an
equation's name, such as a copy or the update of a weight, counts towards what runs before it.
Instructions that the compiler has moved far from their turn would count towards a moment that they
have nothing to do with. Their position among the others gives them away, and they are left out.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

from remat_opt.measurement.buffers import CompiledMemory, attributed
from remat_opt.scopes import AGAIN, origin
from remat_opt.simulator import Moment

#: The phase in names, and what it is in the replay.
_PHASES = {"forward": "forward", "recomputed": "recompute", "backward": "backward"}

_Places = defaultdict[tuple[str, int, int, int], list[int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What is alive as compiled, one entry for each moment of a replay.

    Attributes:
      compiled_bytes: the most temporary bytes alive during the moment's instructions, or during the
        kernel that does its work; None if no name of its region is found.
      named: whether instructions have the moment's own name.
      kept_bytes: for vertices with values that wait for the backward pass when the forward pass
        ends, their bytes, wherever they are. A fusion's results belong to the vertex it is named
        after.
    """

    compiled_bytes: tuple[int | None, ...]
    named: tuple[bool, ...]
    kept_bytes: dict[int, int]


def align(memory: CompiledMemory, moments: Sequence[Moment], roots: Sequence[int]) -> Alignment:
    """Finds what is alive as compiled at each moment of the replay.

    Args:
      memory: that of the program, compiled according to the schedule.
      moments: those of the schedule's replay.
      roots: for each vertex, the position of the equation that makes it, ascending.
    """
    places: _Places = defaultdict(list)
    for place, moment in enumerate(moments):
        places[moment.phase, moment.region, moment.vertex, moment.depth].append(place)
    named = [
        (step, found)
        for step, one in enumerate(memory.instructions)
        if (found := _place(one.op_name, places, roots)) is not None
    ]
    in_turn = _in_turn(named)
    most: dict[int, int] = {}
    last: int | None = None
    for step, live in enumerate(memory.timeline.tolist()):
        last = in_turn.get(step, last)
        if last is not None:
            most[last] = max(live, most.get(last, 0))
    turn = min(
        (step for step, place in in_turn.items() if moments[place].phase != "forward"),
        default=len(memory.instructions),
    )
    return Alignment(
        compiled_bytes=_with_fused(moments, [most.get(place) for place in range(len(moments))]),
        named=tuple(place in most for place in range(len(moments))),
        kept_bytes=_kept_bytes(memory, turn, roots),
    )


def _place(op_name: str, places: _Places, roots: Sequence[int]) -> int | None:
    """The number of the moment whose work an instruction does, if its name shows it."""
    for name in op_name.split(";"):
        found = origin(name)
        if found.equation is None or not found.region or found.phase not in _PHASES:
            continue
        # Of nested checkpoints, it is the one whose region comes before the word.
        depth = len(origin(name.rpartition(AGAIN)[0]).region) - 1 if AGAIN in name else 0
        key = (
            _PHASES[found.phase],
            found.region[0],
            _vertex(found.equation, roots),
            max(0, depth),
        )
        if key in places:
            return places[key][0]
    return None


def _vertex(equation: int, roots: Sequence[int]) -> int:
    """The vertex that an equation is computed for: the next one, into which it is fused."""
    return min(bisect.bisect_left(roots, equation), len(roots) - 1)


def _in_turn(named: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The steps whose moments are in the order of the replay, with their moments.

    A longest sequence of steps whose moments do not go back.
    """
    # Patience sorting: for each length, the step that ends a sequence at the earliest moment.
    ends: list[int] = []
    moments: list[int] = []
    before: list[int | None] = []
    for number, (_, moment) in enumerate(named):
        length = bisect.bisect_right(moments, moment)
        before.append(ends[length - 1] if length else None)
        if length == len(ends):
            ends.append(number)
            moments.append(moment)
        else:
            ends[length], moments[length] = number, moment
    found: dict[int, int] = {}
    at = ends[-1] if ends else None
    while at is not None:
        step, moment = named[at]
        found[step] = moment
        at = before[at]
    return found


def _with_fused(
    moments: Sequence[Moment], compiled_bytes: Sequence[int | None]
) -> tuple[int | None, ...]:
    """Fills missing figures with those of the next moment of the same pass, or the last.

    Args:
      moments: those of the replay.
      compiled_bytes: the figures of moments with their own instructions.
    """
    found = list(compiled_bytes)
    for places in (range(len(found) - 1, -1, -1), range(len(found))):
        known: tuple[tuple[bool, int], int] | None = None
        for place in places:
            of = moments[place].phase == "forward", moments[place].region
            figure = found[place]
            if figure is not None:
                known = of, figure
            elif known is not None and known[0] == of:
                found[place] = known[1]
    return tuple(found)


def _kept_bytes(memory: CompiledMemory, turn: int, roots: Sequence[int]) -> dict[int, int]:
    """Bytes that exist before the first backward step and are read in the backward pass."""
    found: Counter[int] = Counter()
    for one in attributed(memory):
        buffer = one.buffer
        if (
            one.origin.equation is not None
            and buffer.kind == "temporary"
            and buffer.counts
            and buffer.first_step < turn <= buffer.last_step
        ):
            found[_vertex(one.origin.equation, roots)] += buffer.size_bytes
    return dict(sorted(found.items()))
