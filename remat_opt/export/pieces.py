"""What belongs together in a region: by block, by module, by the user's functions.

A region is a list of equations. Consecutive ones from the same block, module or function form a
piece, in which those of an inner module or function are pieces again. A piece may become a separate
function; here we only determine its contents, and what goes in and out.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from remat_opt import _jax_internals as internals
from remat_opt.export.equations import Turn
from remat_opt.naming import modules_of
from remat_opt.program import blocks
from remat_opt.program.record import Equation, Program
from remat_opt.transform.steps import Rewriting, Step
from remat_opt.transform.turns import ties

#: The least number of equations in a piece.
_LEAST = 3
#: Blocks are cut in no more places than this.
_MOST_CUTS = 4

#: A module or a function, with the line that called the function; for a block, "" and its number.
Level = tuple[str, int]
_NO_BLOCK: Level = ("", -1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Consecutive equations of one region.

    Attributes:
      path: the levels that they have in common, outermost first.
      indices: the equations.
      parts: the same, grouped where some form inner pieces.
      inputs: the values that go in.
      outputs: those that come out: made in it, or passed on by it, and read later on.
      again: whether it is under a checkpoint of its own (``Step.twice``).
    """

    path: tuple[Level, ...]
    indices: tuple[int, ...]
    parts: tuple[int | Piece, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    again: bool = False

    def pieces(self) -> Iterator[Piece]:
        """The pieces that it consists of."""
        return (part for part in self.parts if isinstance(part, Piece))

    @property
    def in_block(self) -> str:
        """Its unnamed block and part; "" if it is in none, or in several."""
        numbers = [number for name, number in self.path if not name]
        if not numbers or numbers[0] == _NO_BLOCK[1]:
            return ""
        return "block" if len(numbers) == 1 else "part_of_block"

    @property
    def name(self) -> str:
        """The innermost module or function that contains all its equations."""
        names = [name for name, _ in self.path if name]
        return names[-1] if names else ""


def turns_of(rewriting: Rewriting, step: Step) -> dict[int, Turn]:
    """How to write each equation of a step, as ``rewriting._runner`` runs it."""
    program, ways = rewriting.program, rewriting.ways
    waits = ties(rewriting, step)
    known = set(step.inputs)
    found = {}
    for index in step.equations:
        waited: tuple[int, ...] | None = None
        if index in ways.partner and not step.checkpointed:
            partner = program.equations[ways.partner[index]]
            read = set(partner.value_inputs).difference(program.arguments)
            waited = tuple(sorted(read)) if read <= known else None
        found[index] = Turn(
            named=index in step.named,
            before=waits.before.get(index, frozenset()),
            behind=waits.behind.get(index),
            after=waits.after.get(index, frozenset()),
            tied=waits.inputs.get(index, ()),
            follows=waits.follows.get(index),
            waited=waited,
            unmerged=ways.unmerged.get(index),
            weight=ways.weight_place.get(index) if index in waits.inputs else None,
            join=step.joined.get(index),
        )
        known.update(program.equations[index].outputs)
    return found


def paths_of(program: Program, regions: Iterable[Sequence[int]] = ()) -> list[tuple[Level, ...]]:
    """For each equation, its block, the part of that, and the modules or functions that made it.

    What all of them have in common is left out. Blocks with the same code have the same parts: they
    are cut where regions begin in any of them, unless there are too many such places.

    Args:
      program: a traced function.
      regions: their equations.
    """
    modules = [_modules(one) for one in program.equations]
    functions = [_functions(one) for one in program.equations]
    shared = _common([one for one in modules if one]), _common(functions)
    found: list[tuple[Level, ...]] = []
    block_of = {index: number for number, run in enumerate(blocks.blocks(program)) for index in run}
    part_of = _parts(program, regions)
    for index, (by_module, by_function) in enumerate(zip(modules, functions, strict=True)):
        told = by_module[shared[0] :] if by_module else by_function[shared[1] :]
        called = [(name, 0) for name in internals.names_of_calls(program.equations[index].calls)]
        block = ("", block_of[index]) if index in block_of else _NO_BLOCK
        part = [("", part_of[index])] if index in part_of else []
        found.append((block, *part, *told, *called))
    return found


def _parts(program: Program, regions: Iterable[Sequence[int]]) -> dict[int, int]:
    """For equations in cut blocks, the number of their part."""
    runs = blocks.blocks(program)
    block_of = {index: run for run in runs for index in run}
    kinds = {
        run: tuple(program.equations[index].operation.primitive for index in run) for run in runs
    }
    cuts: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
    for indices in regions:
        for run, group in itertools.groupby(indices, key=block_of.get):
            if run is not None:
                first = next(group)
                cuts[kinds[run]].add(first - run.start)
    found = {}
    for run in runs:
        places = sorted(cuts[kinds[run]] - {0})
        if len(places) <= _MOST_CUTS:
            found.update({index: bisect.bisect(places, index - run.start) for index in run})
    return found


def _modules(equation: Equation) -> tuple[Level, ...]:
    return tuple((part, 0) for part in modules_of(equation.module) if part.isidentifier())


def _functions(equation: Equation) -> tuple[Level, ...]:
    found = []
    for name, line in internals.functions_around(equation.jax_equation, equation.calls):
        word = name.rpartition("<locals>.")[2].removesuffix(".__call__").rpartition(".")[2]
        if word.isidentifier():
            found.append((word, line))
    return tuple(found)


def _common(paths: Sequence[tuple[Level, ...]]) -> int:
    """How many levels all paths have in common."""
    if not paths:
        return 0
    first, last = min(paths), max(paths)
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return sum(1 for _ in shared)


class Region:
    """A step that holds equations, as pieces.

    Args:
      program: a traced function.
      step: one of its steps.
      turns: those of its equations.
      paths: those of the program's equations.

    Attributes:
      step: the step.
      turns: those of its equations.
      whole: all of it.
    """

    def __init__(
        self,
        program: Program,
        step: Step,
        turns: Mapping[int, Turn],
        paths: Sequence[tuple[Level, ...]],
    ) -> None:
        self.step, self.turns = step, turns
        self._program = program
        self._group_of = {index: group for group in step.twice for index in group}
        self._paths = {index: paths[index] for index in step.equations}
        for index, group in self._group_of.items():
            self._paths[index] = _shared_path([paths[one] for one in group])
        self._position = {index: n for n, index in enumerate(step.equations)}
        self._made_at: dict[int, int] = {}
        self._last_read: dict[int, int] = {}
        for index, place in self._position.items():
            self._made_at |= dict.fromkeys(program.equations[index].outputs, place)
            self._last_read |= dict.fromkeys(self._reads(index), place)
        self._last_read |= dict.fromkeys(step.outputs, len(step.equations))
        self.whole = dataclasses.replace(
            self.piece(step.equations, self._split(step.equations)),
            inputs=step.inputs,
            outputs=step.outputs,
        )

    def _reads(self, index: int) -> tuple[int, ...]:
        turn = self.turns[index]
        read = self.step.values_read_by(self._program, index)
        return (*read, *(turn.waited or ()), *sorted(turn.passed_on - turn.before))

    def piece(self, indices: Sequence[int], parts: tuple[int | Piece, ...]) -> Piece:
        """Consecutive equations as a piece consisting of these parts."""
        start, stop = self._position[indices[0]], self._position[indices[-1]] + 1
        inputs = dict.fromkeys(
            value
            for index in indices
            for value in self._reads(index)
            if not start <= self._made_at.get(value, -1) < stop
        )
        turns = {index: self.turns[index] for index in indices}
        handed_on = dict.fromkeys(
            value
            for index, turn in turns.items()
            for value in (
                *sorted(turn.passed_on),
                *self._program.equations[index].outputs,
            )
        )
        return Piece(
            path=_shared_path([self._paths[index] for index in indices]),
            indices=tuple(indices),
            parts=parts,
            inputs=tuple(inputs),
            outputs=tuple(v for v in handed_on if self._last_read.get(v, -1) >= stop),
            again=tuple(indices) == self._group_of.get(indices[0]),
        )

    def _split(self, indices: Sequence[int]) -> tuple[int | Piece, ...]:
        """Consecutive equations as parts: those from the same place are a piece."""
        shared = _common([self._paths[index] for index in indices])
        groups = [
            (level, list(group))
            for level, group in itertools.groupby(
                indices, key=lambda index: self._paths[index][shared : shared + 1]
            )
        ]
        if len(groups) == 1:
            return self._units(indices)
        parts: list[int | Piece] = []
        for level, group in groups:
            if level == (_NO_BLOCK,):
                parts += self._split(group)
            elif level and len(group) >= _LEAST:
                parts.append(self.piece(group, self._split(group)))
            else:
                parts += self._units(group)
        return tuple(parts)

    def _units(self, indices: Sequence[int]) -> tuple[int | Piece, ...]:
        """Equations one by one, but for those under a checkpoint of their own together."""
        if tuple(indices) == self._group_of.get(indices[0]):
            return tuple(indices)
        parts: list[int | Piece] = []
        for index in indices:
            group = self._group_of.get(index)
            if group is None:
                parts.append(index)
            elif index == group[0]:
                parts.append(self.piece(group, group))
        return tuple(parts)


def _shared_path(paths: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    """The levels that equations share: their block and its part, modules and functions."""
    found: list[Level] = []
    for of_block in (True, False):
        levels = [tuple(one for one in path if (not one[0]) == of_block) for path in paths]
        found += levels[0][: _common(levels)]
    return tuple(found)
