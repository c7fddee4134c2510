"""Calls in order -> lines: values get names, and what repeats becomes a loop.

A value's name is free again after its last reader. So calls that pass a value from one to the next
use the same name for it, and stretches that differ only in the numbers of arguments (``layers[3]``,
then ``layers[4]``) are written as a ``for`` loop.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from remat_opt.export.calls import Call
from remat_opt.export.layout import INDENT, assigned
from remat_opt.export.naming import Distinct, snake_case
from remat_opt.export.paths import Path

#: The most calls in the body of a loop.
_LONGEST = 12
#: With this many arrays, a part of an argument, such as a layer, gets a name.
_MANY = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A call to be written.

    Attributes:
      function: what is called.
      first: arguments that are not values.
      reads: the values it receives.
      writes: the values it returns; those both read and returned are rebound.
      unpack: whether it returns a tuple only for several values.
    """

    function: str
    first: tuple[str, ...] = ()
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    unpack: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """A call with names for its values."""

    item: Item
    arguments: tuple[str | Path, ...]
    results: tuple[str, ...]

    def shape(self) -> object:
        """What two calls have in common if they differ only in the numbers of arguments."""
        arguments = tuple(
            (one.root, tuple((step.before, step.behind) for step in one.steps))
            if isinstance(one, Path)
            else one
            for one in self.arguments
        )
        return self.item.function, self.item.first, self.item.unpack, arguments, self.results

    def numbers(self) -> list[int]:
        """The numbers in its arguments."""
        return [
            step.number
            for one in self.arguments
            if isinstance(one, Path)
            for step in one.steps
            if step.number is not None
        ]


def lines_of(
    items: Sequence[Item],
    given: Mapping[int, str | Path],
    hint: Callable[[int], str],
    distinct: Callable[[Iterable[str]], Distinct],
    wanted: Iterable[int],
) -> tuple[list[str], dict[int, str]]:
    """Lines that make the calls.

    Args:
      items: the calls.
      given: the text of the values that exist before.
      hint: suggests a word for a value.
      distinct: gives names that are not in use.
      wanted: the values needed after the last call.

    Returns:
      The lines, and the text of every value known after them.
    """
    roots = {one.root if isinstance(one, Path) else one for one in given.values()}
    names = distinct(roots)
    written, known = _named(items, given, hint, names, set(wanted))
    writer = _Writer(names)
    lines: list[str] = []
    place = 0
    while place < len(written):
        period, count = _repetition(written, place)
        lines += writer.lines(written[place : place + 2 * period], period, count)
        place += period * count
    return lines, {value: str(text) for value, text in known.items()}


def _named(
    items: Sequence[Item],
    given: Mapping[int, str | Path],
    hint: Callable[[int], str],
    names: Distinct,
    wanted: set[int],
) -> tuple[list[_Written], dict[int, str | Path]]:
    last = {value: place for place, item in enumerate(items) for value in item.reads}
    last |= dict.fromkeys(wanted, len(items))
    known = dict(given)
    # Names given for a word, in order, and names in use by value.
    pools: dict[str, list[str]] = {}
    holder: dict[str, int] = {}
    found = []
    for place, item in enumerate(items):
        arguments = tuple(known[value] for value in item.reads)
        for name, value in list(holder.items()):
            if last.get(value, -1) <= place and value not in item.writes:
                del holder[name]
        results = []
        for value in item.writes:
            present = known.get(value)
            if isinstance(present, str):
                results.append(present)
                continue
            word = hint(value)
            pool = pools.setdefault(word, [])
            free = next((one for one in pool if one not in holder), None)
            if free is None:
                free = names.name(word)
                pool.append(free)
            holder[free], known[value] = value, free
            results.append(free)
        found.append(_Written(item, arguments, tuple(results)))
    return found, known


def _is_regular(apart: Sequence[int]) -> bool:
    """Whether numbers stay as they are, or advance by one stride."""
    strides = set(apart) - {0}
    return not strides or (len(strides) == 1 and min(strides) > 0)


def _repetition(written: Sequence[_Written], start: int) -> tuple[int, int]:
    """How many calls repeat from here on, and how often."""
    best = (1, 1)
    for period in range(1, min(_LONGEST, (len(written) - start) // 2) + 1):
        first = written[start : start + period]
        count, steps = 1, None
        while True:
            later = written[start + count * period : start + (count + 1) * period]
            if [one.shape() for one in later] != [one.shape() for one in first]:
                break
            before = written[start + (count - 1) * period : start + count * period]
            apart = [
                b - a
                for one, other in zip(before, later, strict=True)
                for a, b in zip(one.numbers(), other.numbers(), strict=True)
            ]
            if not _is_regular(apart) or (steps is not None and apart != steps):
                break
            steps, count = apart, count + 1
        if count > 1 and period * (count - 1) > best[0] * (best[1] - 1):
            best = (period, count)
    return best


class _Writer:
    """Writes calls, or loops of calls.

    Args:
      names: the names in use.
    """

    def __init__(self, names: Distinct) -> None:
        self._names = names
        self._pools: dict[str, list[str]] = {}
        self._roots: dict[str, str] = {}

    def lines(self, written: Sequence[_Written], period: int, count: int) -> list[str]:
        """The lines of calls that repeat a number of times.

        Args:
          written: the calls; if they repeat, followed by those of the second time.
          period: how many there are.
          count: how often they occur.
        """
        first = written[:period]
        if count == 1:
            return self._calls(first, [[None] * len(one.numbers()) for one in first])
        moves = [
            [b - a for a, b in zip(one.numbers(), other.numbers(), strict=True)]
            for one, other in zip(first, written[period:], strict=True)
        ]
        moving = [
            (number, stride)
            for one, strides in zip(first, moves, strict=True)
            for number, stride in zip(one.numbers(), strides, strict=True)
            if stride
        ]
        start, stride = min(moving, default=(0, 1))
        variable = self._variable("i", 0) if moving else "_"

        def expression(number: int, moves_on: int) -> str | None:
            if not moves_on:
                return None
            return variable if number == start else f"{variable} + {number - start}"

        expressions = [
            [expression(number, on) for number, on in zip(one.numbers(), moved, strict=True)]
            for one, moved in zip(first, moves, strict=True)
        ]
        limits = [str(start), str(start + count * stride), str(stride)]
        if stride == 1:
            limits = limits[0 if start else 1 : 2]
        over = f"range({', '.join(limits)})"
        inside = self._calls(first, expressions)
        return [f"for {variable} in {over}:", *(f"{INDENT}{line}" for line in inside)]

    def _calls(
        self, written: Sequence[_Written], expressions: Sequence[Sequence[str | None]]
    ) -> list[str]:
        """The lines of calls, with expressions in place of numbers."""
        arguments = []
        for one, given in zip(written, expressions, strict=True):
            left = iter(given)
            arguments.append(
                [
                    (
                        a,
                        [s.text(next(left) if s.number is not None else None) for s in a.steps],
                    )
                    if isinstance(a, Path)
                    else a
                    for a in one.arguments
                ]
            )
        # What many arrays are part of gets a name, which includes the argument's if two would
        # clash.
        starts: Counter[str] = Counter()
        words: dict[str, str] = {}
        for argument in itertools.chain.from_iterable(arguments):
            if not isinstance(argument, str):
                path, steps = argument
                start, word = _start(path, steps)
                starts[start] += 1
                if self._roots.setdefault(word, path.root) != path.root:
                    word = f"{path.root}_{word}"
                words[start] = word
        lines: list[str] = []
        variables: dict[str, str] = {}
        used: Counter[str] = Counter()
        for start, times in sorted(starts.items(), key=lambda pair: (len(pair[0]), pair[0])):
            if start and times >= _MANY:
                word = words[start]
                variables[start] = self._variable(word, used[word])
                used[word] += 1
                lines.append(f"{variables[start]} = {start}")
        for one, given_arguments in zip(written, arguments, strict=True):
            texts = []
            for argument in given_arguments:
                if not isinstance(argument, str):
                    path, steps = argument
                    whole = path.root + "".join(steps)
                    start = _start(path, steps)[0]
                    argument = variables.get(start, start) + whole[len(start) :]
                texts.append(argument)
            call = Call(one.item.function, (*one.item.first, *texts))
            lines += assigned(one.results, call, unpack=one.item.unpack)
        return lines

    def _variable(self, word: str, number: int) -> str:
        pool = self._pools.setdefault(word, [])
        while len(pool) <= number:
            first = word if self._names.is_free(word) else f"this_{word}"
            pool.append(self._names.name(f"next_{word}" if pool else first))
        return pool[number]


def _start(path: Path, steps: Sequence[str]) -> tuple[str, str]:
    """A path up to its first number, if more follows, and a word for what is there."""
    place = next((n for n, step in enumerate(path.steps) if step.number is not None), None)
    if place is None or place + 1 == len(steps):
        return "", ""
    step = path.steps[place]
    told = step.before[2:] if step.before.startswith('["') else ""
    words = [one for one in path.steps[:place] if one.number is None]
    if not told:
        told = words[-1].before if words else path.root
        told = re.sub(r"(?<=\w\w)s$", "", re.sub(r"\W+", "", told))
    return path.root + "".join(steps[: place + 1]), snake_case(told)
