"""What was learnt about a compiler by compiling one program: numbers, and how they carry over.

Problem. The replay of a schedule is a model of what a compiler does. Once a plan is compiled, we
know what the compiler did: what was alive at each moment of the replay. The program's other
schedules should be judged by that, even those that are cut differently.

Method. At each moment one vertex runs: forward, again or backward, in a *situation*: under which
checkpoints, and with which of its neighbours in one region. The difference between what was alive
as compiled and the replay is attributed to these: vertex, phase and situation. We expect it again
wherever the same happens. It covers what the vertex's kernel takes besides its operands, or saves
by writing in place; what fusion with its neighbours saves; and what the compiler holds besides the
program's values at that time, such as weights in another form, or gradients whose turn has not
come. What was not seen is taken from the nearest that was:

1.  the vertex itself, in this situation;
2.  the nearest similar vertex that was seen in it: with the same operation, type and shape. What is
    held at a time shifts slowly along a program.
3.  likewise, in any situation that is, like this one, under a checkpoint or under none;
4.  likewise, in any situation.

A heap is larger than what is alive, because of its holes: one number for each compiled plan, taken
from those nearest in size. If the compiler gives only the size, a ratio replaces it.

Why not differences of single values: names belong to kernels, and a kernel may write several
values. The total of what is alive does not depend on the names of values.

Guarantee: the schedule compiled last gets its compiled figures, at each moment that the compiler's
names show and as a whole.

Left out: a kept value may differ in size from what the replay says. This is part of the differences
at the moments when it is alive, as long as most of what is kept stays the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remat_opt.checksum import checksum_of
from remat_opt.errors import PlanFileError
from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule
from remat_opt.simulator import Moment

#: Changes when files of an older version can no longer be read.
FORMAT = "remat_opt learnt 1"
PHASES = ("forward", "recompute", "backward")
#: No amount of memory is larger.
_MOST_BYTES = 2**60
#: How many plans of a program are remembered, and how deep regions may nest in a file.
_MOST_COMPILED, _MOST_DEPTH = 32, 100
#: A program with more vertices than this is not one of ours.
_MOST_VERTICES = 10**6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """What something was learnt about: the numbers say nothing about anything else.

    Attributes:
      fingerprint: that of the program.
      device: name of the device compiled for.
      compiler: what the compiler calls itself.
      step: what was compiled around the program.
    """

    fingerprint: str
    device: str
    compiler: str
    step: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Difference:
    """By how much more is alive than the replay says while one vertex runs.

    Attributes:
      phase: one of ``PHASES``.
      situation: that of the vertex, see ``situations``; if it runs again, with its depth.
      vertex: its number.
      bytes: may be negative.
    """

    phase: str
    situation: str
    vertex: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One compiled plan.

    Attributes:
      schedule: the plan.
      replayed_bytes: the peak of what is alive by the replay, corrected by what was learnt; or, if
        the compiler did not show what is alive when, the need by the model alone.
      compiled_bytes: what the compiler needs.
      told: whether it showed that. If so, the two differ by the holes of a heap.
    """

    schedule: Schedule
    replayed_bytes: int
    compiled_bytes: int
    told: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Everything learnt about a program.

    Attributes:
      key: what it is about.
      labels: operation, type and shape of each vertex. Vertices with equal labels are similar.
      differences: ascending.
      compiled: the plans, in the order in which they were compiled.
    """

    key: Key
    labels: tuple[str, ...]
    differences: tuple[Difference, ...] = ()
    compiled: tuple[Compiled, ...] = ()

    @property
    def told(self) -> bool:
        """Whether the compiler has shown for any plan what is alive when."""
        return any(one.told for one in self.compiled)

    def with_plan(
        self,
        graph: Graph,
        schedule: Schedule,
        moments: Sequence[Moment],
        alive: Sequence[int | None] | None,
        *,
        model_bytes: int,
        compiled_bytes: int,
    ) -> Learnt:
        """The same plus what one more plan has shown, which overrides what was known.

        Args:
          graph: the program's graph.
          schedule: the plan.
          moments: those of its replay by the model.
          alive: the bytes alive at each moment as compiled, where known; None if the compiler gave
            only the size.
          model_bytes: its need by the model alone.
          compiled_bytes: its size.
        """
        known = {(one.phase, one.situation, one.vertex): one.bytes for one in self.differences}
        found: dict[tuple[str, str, int], int] = {}
        for place, moment, live in zip(
            places(graph, schedule, moments), moments, alive or (), strict=False
        ):
            if live is not None:
                more = live - moment.live_bytes
                found[place] = max(more, found.get(place, more))
        told = dataclasses.replace(
            self,
            differences=tuple(
                Difference(phase=phase, situation=situation, vertex=vertex, bytes=size)
                for (phase, situation, vertex), size in sorted((known | found).items())
            ),
        )
        if alive is not None:
            model_bytes = Corrections(told, graph).peak_bytes(schedule, moments)
        one = Compiled(
            schedule=schedule,
            replayed_bytes=model_bytes,
            compiled_bytes=compiled_bytes,
            told=alive is not None,
        )
        others = [other for other in self.compiled if other.schedule != schedule]
        return dataclasses.replace(told, compiled=(*others[1 - _MOST_COMPILED :], one))

    def to_plain(self) -> dict[str, Any]:
        """As plain data, fit for JSON."""
        return {
            "key": dataclasses.asdict(self.key),
            "labels": list(self.labels),
            "differences": [
                [one.phase, one.situation, one.vertex, one.bytes] for one in self.differences
            ],
            "compiled": [
                [_chain_of(one.schedule), one.replayed_bytes, one.compiled_bytes, one.told]
                for one in self.compiled
                # What happens inside loops is not written down, and the rest says little about it.
                if not one.schedule.loops
            ],
        }

    @classmethod
    def from_plain(cls, data: Any) -> Learnt:
        """Reads what ``to_plain`` wrote.

        Raises:
          ValueError: it is something else.
        """
        _check(isinstance(data, Mapping) and set(data) == _FIELDS, "what was learnt of a program")
        key, labels = data["key"], data["labels"]
        words = {field.name for field in dataclasses.fields(Key)}
        _check(isinstance(key, Mapping) and set(key) == words, "what it is about")
        _check(all(isinstance(word, str) for word in key.values()), "what it is about")
        _check(isinstance(labels, list) and len(labels) <= _MOST_VERTICES, "the vertices")
        _check(all(isinstance(label, str) for label in labels), "the vertices")
        return cls(
            key=Key(**key),
            labels=tuple(labels),
            differences=tuple(sorted(_differences(data["differences"], len(labels)))),
            compiled=tuple(_compiled(data["compiled"], len(labels))),
        )


_FIELDS = {"key", "labels", "differences", "compiled"}


def _check(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(f"{what} cannot be read")


def _is_size(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_BYTES


def _differences(data: Any, count: int) -> Iterable[Difference]:
    _check(isinstance(data, list), "the differences")
    for one in data:
        _check(isinstance(one, list) and len(one) == 4, "a difference")
        phase, situation, vertex, size = one
        _check(
            phase in PHASES
            and isinstance(situation, str)
            and type(vertex) is int
            and 0 <= vertex < count
            and _is_size(size, -_MOST_BYTES),
            "a difference",
        )
        yield Difference(phase=phase, situation=situation, vertex=vertex, bytes=size)


def _compiled(data: Any, count: int) -> Iterable[Compiled]:
    _check(isinstance(data, list), "the plans that were compiled")
    for one in data:
        _check(isinstance(one, list) and len(one) == 4, "a plan that was compiled")
        chain, replayed, compiled, told = one
        _check(
            _is_size(replayed, 0) and _is_size(compiled, 0) and type(told) is bool,
            "a plan that was compiled",
        )
        yield Compiled(
            schedule=_schedule(chain, count),
            replayed_bytes=replayed,
            compiled_bytes=compiled,
            told=told,
        )


def _chain_of(schedule: Schedule) -> list[Any]:
    """A schedule's chain as plain data; that of the unchanged function is empty."""
    return [] if schedule.unchanged else _chain(schedule.regions)


def _schedule(data: Any, count: int) -> Schedule:
    """Reads what ``_chain_of`` wrote."""
    regions = _regions(data, count, 0)
    if regions:
        return Schedule(regions=regions)
    whole = Region(vertices=tuple(range(count)), checkpointed=False)
    return Schedule(regions=(whole,), unchanged=True)


def _chain(regions: Sequence[Region]) -> list[Any]:
    """A chain of regions as plain data."""
    return [
        [list(one.vertices), list(one.kept), one.checkpointed, _chain(one.inside)]
        for one in regions
    ]


def _regions(data: Any, count: int, depth: int) -> tuple[Region, ...]:
    what = "a plan that was compiled"
    _check(isinstance(data, list) and depth < _MOST_DEPTH, what)
    found = []
    for one in data:
        _check(isinstance(one, list) and len(one) == 4, what)
        vertices, kept, checkpointed, inside = one
        _check(type(checkpointed) is bool, what)
        for numbers in (vertices, kept):
            _check(isinstance(numbers, list), what)
            _check(all(type(one) is int and 0 <= one < count for one in numbers), what)
        found.append(
            Region(
                vertices=tuple(vertices),
                kept=tuple(kept),
                checkpointed=checkpointed,
                inside=_regions(inside, count, depth + 1),
            )
        )
    return tuple(found)


def situations(graph: Graph, schedule: Schedule) -> list[str]:
    """For each vertex, the situation in which a schedule runs it, as text.

    First, for each region around it, from outside in: whether it is under a checkpoint (``c``) or
    not (``o``). Then: which of the vertices that it reads, and that read it, are in its region
    (``1``).

    Example:
      >>> from remat_opt.schedule import Region
      >>> chain = Graph.from_edges([8, 8, 8], [(0, 1), (1, 2)])
      >>> cut = Region(vertices=(0, 1)), Region(vertices=(2,), checkpointed=False)
      >>> situations(chain, Schedule(regions=cut))
      ['c  1', 'c 1 0', 'o 0 ']
    """
    leaf: dict[int, tuple[int, ...]] = {}
    words: dict[int, str] = {}
    for path, word, region in _leaves(schedule.regions, (), ""):
        leaf.update(dict.fromkeys(region.vertices, path))
        words.update(dict.fromkeys(region.vertices, word))
    readers = graph.successors()

    def beside(vertex: int, others: Sequence[int]) -> str:
        return "".join("1" if leaf[other] == leaf[vertex] else "0" for other in others)

    return [
        f"{words[vertex]} {beside(vertex, read)} {beside(vertex, readers[vertex])}"
        for vertex, read in enumerate(graph.predecessors)
    ]


def _leaves(
    regions: Sequence[Region], path: tuple[int, ...], word: str
) -> Iterator[tuple[tuple[int, ...], str, Region]]:
    """The regions without regions inside, with their positions and the text for what is around."""
    for number, region in enumerate(regions):
        here = word + ("c" if region.checkpointed else "o")
        if region.inside:
            yield from _leaves(region.inside, (*path, number), here)
        else:
            yield (*path, number), here, region


def places(
    graph: Graph, schedule: Schedule, moments: Sequence[Moment]
) -> Iterator[tuple[str, str, int]]:
    """For each moment of a replay, the phase, the situation and the vertex."""
    of = situations(graph, schedule)
    for one in moments:
        situation = of[one.vertex]
        if one.phase == "recompute":
            situation += f" {one.depth}"
        yield one.phase, situation, one.vertex


class Corrections:
    """What was learnt, ready to correct replays, with gaps filled in.

    Args:
      learnt: of the program.
      graph: of the program.
    """

    def __init__(self, learnt: Learnt, graph: Graph) -> None:
        self.learnt = learnt
        self._graph = graph
        # Of each phase and situation, then of less and less of that, the vertices seen in it.
        self._seen: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for one in learnt.differences:
            for word in _less_and_less(one.situation):
                seen = self._seen[one.phase, word]
                # Of several situations, the one that takes most.
                seen[one.vertex] = max(one.bytes, seen.get(one.vertex, one.bytes))
        self._alike: defaultdict[str, list[int]] = defaultdict(list)
        for vertex, label in enumerate(learnt.labels):
            self._alike[label].append(vertex)
        self._found: dict[tuple[str, str, int], int] = {}
        self._sizes = {one.schedule: one.compiled_bytes for one in learnt.compiled}

    def bytes(self, phase: str, situation: str, vertex: int) -> int:
        """By how much more is expected to be alive than the replay says."""
        place = phase, situation, vertex
        found = self._found.get(place)
        if found is None:
            found = self._found[place] = self._nearest(*place)
        return found

    def _nearest(self, phase: str, situation: str, vertex: int) -> int:
        for word in _less_and_less(situation):
            seen = self._seen.get((phase, word), {})
            if vertex in seen:
                return seen[vertex]
            alike = (one for one in self._alike[self.learnt.labels[vertex]] if one in seen)
            nearest = min(alike, key=lambda one: (abs(one - vertex), one), default=None)
            if nearest is not None:
                return seen[nearest]
        return 0

    def moments(self, schedule: Schedule, moments: Sequence[Moment]) -> tuple[Moment, ...]:
        """The moments of a replay with what is expected to be alive.

        Args:
          schedule: what was replayed.
          moments: those of the model.
        """
        return tuple(
            dataclasses.replace(one, live_bytes=max(0, one.live_bytes + self.bytes(*place)))
            for one, place in zip(moments, places(self._graph, schedule, moments), strict=True)
        )

    def peak_bytes(self, schedule: Schedule, moments: Sequence[Moment]) -> int:
        """The most that is expected to be alive at once; see ``moments``."""
        alive = (
            one.live_bytes + self.bytes(*place)
            for one, place in zip(moments, places(self._graph, schedule, moments), strict=True)
        )
        return max(0, *alive)

    @property
    def told(self) -> bool:
        """Whether the compiler has shown for any plan what is alive when."""
        return self.learnt.told

    def compiled_bytes(self, schedule: Schedule) -> int | None:
        """What the compiler needed for a schedule, if it was compiled."""
        return self._sizes.get(schedule)

    def heap_bytes(self, peak_bytes: int) -> int:
        """What the compiler is expected to need if this much is expected to be alive at once."""
        known: dict[int, int] = {}
        for one in self.learnt.compiled:
            if one.told is not self.told or one.schedule.unchanged:
                continue
            size = one.replayed_bytes
            known[size] = max(one.compiled_bytes, known.get(size, 0))
        if not known:
            return peak_bytes
        sizes = sorted(known)
        if self.told:
            holes = [known[size] - size for size in sizes]
            return max(0, peak_bytes + round(float(np.interp(peak_bytes, sizes, holes))))
        ratios = [known[size] / max(1, size) for size in sizes]
        return round(peak_bytes * float(np.interp(peak_bytes, sizes, ratios)))

    def graphs(self, graph: Graph, *, signed: bool) -> tuple[Graph, ...]:
        """The graph with what was learnt about checkpointed backward steps, as workspace.

        A graph knows no situations. In the first result, each vertex gets the most that was seen of
        it, or of the nearest similar one. In the second, if it differs, it gets the least seen of
        all similar ones, so that a search finds what such a situation saves.

        A step whose kernels take less than its arrays has a negative workspace, but never more
        negative than the arrays that always exist allow.

        Args:
          graph: the model's graph.
          signed: whether workspaces may be negative; if not, those are 0.
        """
        labels = self.learnt.labels
        least: dict[str, int] = {}
        for one in self.learnt.differences:
            if one.phase == "backward" and one.situation.startswith("c"):
                label = labels[one.vertex]
                least[label] = min(one.bytes, least.get(label, one.bytes))
        most = [self._nearest("backward", "c", vertex) for vertex in range(len(graph))]
        found = [most, [least.get(labels[vertex], more) for vertex, more in enumerate(most)]]
        return tuple(dict.fromkeys(self._with(graph, more, signed) for more in found))

    def _with(self, graph: Graph, more: Sequence[int], signed: bool) -> Graph:
        """The graph with more workspace."""
        workspaces = []
        for vertex, size in enumerate(graph.workspace_bytes):
            limit = 0
            if signed:
                there = {vertex, *graph.predecessors[vertex]}
                limit -= sum(graph.cotangent_bytes[one] for one in there)
                limit -= sum(graph.bytes[one] for one in graph.needs[vertex])
            workspaces.append(max(limit, size + more[vertex]))
        return graph.with_bytes(workspace_bytes=tuple(workspaces))


def _less_and_less(situation: str) -> tuple[str, ...]:
    """The situation; then only whether it is under a checkpoint; then nothing."""
    return situation, situation[:1], ""


# --- Files ----------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], one: Learnt) -> None:
    """Adds what was learnt about a program to a file, beside that about others.

    Raises:
      PlanFileError: the existing file is not one of these.
    """
    target = Path(path)
    known = {other.key: other for other in read(target)} if target.exists() else {}
    known[one.key] = one
    body = [known[key].to_plain() for key in sorted(known)]
    text = json.dumps(
        {"format": FORMAT, "checksum": checksum_of(body), "learnt": body}, indent=None
    )
    draft = target.with_name(target.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(target)


def read(path: str | os.PathLike[str]) -> tuple[Learnt, ...]:
    """Reads what was learnt about programs from a file.

    Raises:
      PlanFileError: the file is missing, cut short, edited, or something else.
    """
    where = repr(os.fspath(path))
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanFileError(
            f'There is no file {where} of learnt results: plan with verify="compile" and '
            "learnt= to write it."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanFileError(f"{where} cannot be read as what was learnt: {error}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or "learnt" not in data:
        raise PlanFileError(
            f"{where} does not hold results of compiling in the format {FORMAT!r}, which this "
            "version of remat_opt reads. Learn it again, into another file."
        )
    body = data["learnt"]
    if data.get("checksum") != checksum_of(body):
        raise PlanFileError(
            f"{where} was changed after it was written: its checksum does not match. Learn it "
            "again, into another file."
        )
    try:
        _check(isinstance(body, list), "the list of programs")
        return tuple(map(Learnt.from_plain, body))
    except (TypeError, ValueError) as error:
        raise PlanFileError(
            f"{where} does not hold what was learnt by this version: {error}. Learn it again, into "
            "another file."
        ) from None
