"""The differences between two plans: fates, regions, loops and bytes; from plain data.

Both plans are dictionaries as from ``Plan.to_dict``. If they are for the same program, values are
compared one by one. Otherwise, as after a change to the function, values with the same description
are compared.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.units import format_bytes, format_share
from remat_opt.view import report
from remat_opt.view.plan_words import loop_words, value_title

#: How many rows of values a text shows.
_MOST_ROWS = 20

#: The number that distinguishes a module from others of its kind.
_NUMBER = re.compile(r"(?<=_)\d+(?=[/,\])]|$| )|(?<=\[)\d+(?=\])")

Data = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Values that two plans treat differently.

    Attributes:
      label: what the value is, with its extents.
      module: where they are made; ``*`` stands for the numbers that differ.
      source: line of the user's code.
      before: their fate in the first plan; "" if it does not have them.
      after: their fate in the second plan, likewise.
      count: how many there are.
      bytes: of all of them.
    """

    label: str
    module: str
    source: str
    before: str
    after: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanDifference:
    """Two plans side by side; as text, a table.

    Attributes:
      same_program: whether both are for the same program.
      changes: values whose fates differ, the largest first.
      regions: how many regions each has; none if the function runs as it is.
      checkpoints: how many of them are under a checkpoint.
      loops: by the equation of each loop that they treat differently, the text of its parts in
        each; "" if it is not opened.
      loop_names: by the same equations, what each loop is and where.
      figures: by name, the predicted and, where both were compiled, the measured amounts of each.
    """

    same_program: bool
    changes: tuple[Change, ...]
    regions: tuple[int, int]
    checkpoints: tuple[int, int]
    loops: Mapping[int, tuple[str, str]]
    figures: Mapping[str, tuple[float, float]]
    loop_names: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether both plans decide the same."""
        return not self.changes and not self.loops and self._same_regions

    @property
    def _same_regions(self) -> bool:
        return self.regions[0] == self.regions[1] and self.checkpoints[0] == self.checkpoints[1]

    def __repr__(self) -> str:
        lines = []
        if not self.same_program:
            lines.append("The plans are for different programs; values are matched by their words.")
        figures = report.Table(
            title="",
            headings=("", "first", "second"),
            rows=tuple(
                [
                    (name, _written(name, a), _written(name, b))
                    for name, (a, b) in self.figures.items()
                ]
                + [
                    ("regions", *map(str, self.regions)),
                    ("under a checkpoint", *map(str, self.checkpoints)),
                ]
            ),
            align="lrr",
        )
        lines.append(figures.text(report.columns()))
        for root, (before, after) in self.loops.items():
            name = self.loop_names.get(root, f"Loop or cond at equation {root}")
            change = f"{before or 'as it is'} -> {after or 'as it is'}"
            lines.append(
                f"{name}: {change if before != after else f'{before}, though not of the same'}"
            )
        if self.changes:
            shown, left = self.changes[:_MOST_ROWS], self.changes[_MOST_ROWS:]
            table = report.Table(
                title="Values whose fates differ",
                headings=("value", "", "bytes", "first", "second", "module", "source"),
                rows=tuple(
                    (
                        one.label,
                        f"{one.count} x" if one.count > 1 else "",
                        format_bytes(one.bytes),
                        one.before or "not there",
                        one.after or "not there",
                        one.module,
                        one.source,
                    )
                    for one in shown
                ),
                align="lrrllll",
                footer=f"and {len(left)} more, {format_bytes(sum(one.bytes for one in left))}"
                if left
                else "",
            )
            lines.append(table.text(report.columns()))
        else:
            outside = " outside of loops" if self.loops else ""
            lines.append(f"No value{outside} has another fate.")
        return "\n".join(lines)


def difference(first: Data, second: Data) -> PlanDifference:
    """How the second plan differs from the first; both come from ``Plan.to_dict``."""
    same = first["fingerprint"] == second["fingerprint"]
    changes = _by_value(first, second) if same else _by_words(first, second)
    return PlanDifference(
        same_program=same,
        changes=tuple(sorted(_alike(changes), key=lambda one: (-one.bytes, one.label, one.module))),
        regions=(_regions(first), _regions(second)),
        checkpoints=(_checkpoints(first["stages"]), _checkpoints(second["stages"])),
        loops=_loops(first, second),
        figures=_figures(first, second),
        loop_names=_loop_names(second) | _loop_names(first),
    )


def _alike(changes: Sequence[Change]) -> list[Change]:
    """The changes, merging those that differ only in the numbers of their modules."""
    groups: defaultdict[tuple[str, ...], list[Change]] = defaultdict(list)
    for one in changes:
        words = (*map(_unnumbered, _told(one)), one.source, one.before, one.after)
        groups[words].append(one)
    return [
        dataclasses.replace(
            group[0],
            label=_starred([one.label for one in group]),
            module=_starred([one.module for one in group]),
            count=sum(one.count for one in group),
            bytes=sum(one.bytes for one in group),
        )
        for group in groups.values()
    ]


def _told(change: Change) -> tuple[str, str]:
    return change.label, change.module


def _unnumbered(text: str) -> str:
    return _NUMBER.sub("*", text)


def _starred(texts: Sequence[str]) -> str:
    """Merges texts that differ only in module numbers, with ``*`` for the numbers."""
    numbers = [_NUMBER.findall(text) for text in texts]
    columns = [column[0] if len(set(column)) == 1 else "*" for column in zip(*numbers, strict=True)]
    left = iter(columns)
    return _NUMBER.sub(lambda _: next(left), texts[0])


def _loop_names(plan: Data) -> dict[int, str]:
    """What the loops and choices of a plan are, and where."""
    names = {one["root"]: one["name"] for one in plan["decisions"]}
    found = {}
    for one in plan["loops"]:
        if (name := names.get(one["root"])) is not None:
            told = ", ".join(filter(None, (name["module"], name["source"])))
            kind = "Choice" if "branches" in one else "Map" if "body" in one else "Loop"
            found[one["root"]] = f"{kind} {name['what']} ({told})" if told else name["what"]
    return found


def _words(decision: Data) -> tuple[str, str, str]:
    name = decision["name"]
    return value_title(name), name["module"], name["source"]


def _fate(decision: Data | None) -> str:
    if decision is None:
        return ""
    times = decision["times"]
    return f"{decision['fate']} {times} times" if times > 1 else str(decision["fate"])


def _by_value(first: Data, second: Data) -> list[Change]:
    """Changes between plans for one program, grouped by equal words and fates."""
    others = {one["root"]: one for one in second["decisions"]}
    mine = {one["root"]: one for one in first["decisions"]}
    counts: Counter[tuple[str, ...]] = Counter()
    sizes: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for root in sorted(mine.keys() | others.keys()):
        before, after = mine.get(root), others.get(root)
        fates = _fate(before), _fate(after)
        if fates[0] != fates[1]:
            one = before or after
            assert one is not None
            key = (*_words(one), *fates)
            counts[key] += 1
            sizes[key] += one["bytes"]
    return [_change(key, count, sizes[key]) for key, count in counts.items()]


def _by_words(first: Data, second: Data) -> list[Change]:
    """Changes between plans for different programs: what one has more of than the other."""
    found = []
    for plan, other, is_first in ((first, second, True), (second, first, False)):
        left = Counter((*_words(one), _fate(one)) for one in plan["decisions"])
        left -= Counter((*_words(one), _fate(one)) for one in other["decisions"])
        size = {(*_words(one), _fate(one)): one["bytes"] for one in plan["decisions"]}
        for key, count in left.items():
            fates = (key[3], "") if is_first else ("", key[3])
            found.append(_change((*key[:3], *fates), count, count * size[key]))
    return found


def _change(key: Sequence[str], count: int, size: int) -> Change:
    label, module, source, before, after = key
    return Change(
        label=label,
        module=module,
        source=source,
        before=before,
        after=after,
        count=count,
        bytes=size,
    )


def _regions(plan: Data) -> int:
    return 0 if plan["unchanged"] else len(plan["stages"])


def _checkpoints(stages: Sequence[Data]) -> int:
    return sum(one["checkpointed"] + _checkpoints(one["inside"]) for one in stages)


def _loops(first: Data, second: Data) -> dict[int, tuple[str, str]]:
    mine = {one["root"]: one for one in first["loops"]}
    others = {one["root"]: one for one in second["loops"]}

    def words(loop: Data | None) -> str:
        return loop_words(loop) if loop is not None else ""

    return {
        root: (words(mine.get(root)), words(others.get(root)))
        for root in sorted(mine.keys() | others.keys())
        if mine.get(root) != others.get(root)
    }


def _figures(first: Data, second: Data) -> dict[str, tuple[float, float]]:
    def pair(name: str, key: str, of: str) -> tuple[str, tuple[float, float]]:
        return name, (first[of][key], second[of][key])

    found = [
        pair("temporaries, predicted", "temporary_bytes", "predicted"),
        pair("kept, predicted", "kept_bytes", "predicted"),
    ]
    if first["measured"] and second["measured"]:
        found.append(pair("temporaries, compiled", "temporary_bytes", "measured"))
    shares = tuple(
        one["predicted"]["overhead_seconds"] / one["predicted"]["forward_seconds"]
        if one["predicted"]["forward_seconds"]
        else 0.0
        for one in (first, second)
    )
    return dict([*found, ("recomputation, of a forward pass", (shares[0], shares[1]))])


def _written(name: str, amount: float) -> str:
    return format_share(amount) if name.startswith("recomputation") else format_bytes(int(amount))
