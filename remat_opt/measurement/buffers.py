"""Memory over time as compiled: what is where, and from when to when, as the compiler says.

With ``xla_dump_to``, XLA writes what it decided about one program. Three of those texts are read
here: the scheduled program, with names; the order in which its instructions run and how long each
value lives (``live-range``); and each allocation with the values in it, with sizes and offsets
(``buffer-assignment``). They contain everything about a program's memory, so we need no rules about
what compilers fuse or share. CPU, GPU and TPU write the same formats in JAX 0.10 and 0.12, except
for a few words.

What you need to know about them:

*   The order has the instructions of loops' bodies, branches and calls in it, before the one that
    runs them. Here a *step* is one instruction of the entry computation; what lives inside a call
    alone counts at its step, as it is when the step is at its fullest.
*   A value is alive at the moment in which it is last read, in which another may take its place: as
    the result of an elementwise operation does, and as loops' values are those that went in. Such
    a moment is counted once.
*   From JAX 0.12 on, the program's text has no ``get-tuple-element``; the order has.
*   A TPU has several memories. What is counted is its main one, as budgets are about it.
*   Results and donated arguments have allocations of their own, in which temporaries lie while
    they are not written, or no longer read. These are listed, but not counted.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from remat_opt.errors import CompileError
from remat_opt.measurement.hlo_text import Instruction, Module, read_program
from remat_opt.scopes import Origin, origin

Kind = Literal["temporary", "argument", "result"]

_ALLOCATION = re.compile(r"allocation (?P<number>\d+): size (?P<size>\d+), (?P<words>.*):$")
_COLOR = re.compile(r"\bcolor (\d+)")
_VALUE = re.compile(
    r" value: <\d+ (?P<name>[^\s{]+)(?P<index>\{[\d, ]*\})?(?: \(phi\))? @(?P<color>\d+)>"
    r" \(size=(?P<size>\d+),offset=(?P<offset>\d+)\)"
)
_LENGTH = re.compile(r"HloLiveRange \(max (\d+)\):$")
_MOMENT = re.compile(r"\s+(\d+):(\S+)$")
_LIFE = re.compile(r"\s+(?P<name>[^\s{]+)(?P<index>\{[\d, ]*\}):(?P<first>\d+)-(?P<last>\d+)$")
_SECTIONS = ("InstructionSequence:", "BufferLiveRange:")

#: Instructions that pass a value on, perhaps to another place: if they have no name of their own,
#: the value's origin is that of what they read.
_HANDING_ON = frozenset(
    "async-done async-start async-update bitcast copy copy-done copy-start custom-call "
    "get-tuple-element opt-barrier slice tuple".split()
)
#: How far back to look for a name.
_FURTHEST = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction of the entry computation.

    Attributes:
      name: what the compiler calls it.
      opcode: what it does.
      op_name: what JAX says about its origin; "" if nothing.
    """

    name: str
    opcode: str
    op_name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value in main memory.

    Attributes:
      instruction: the compiler's name of what defines it.
      index: which part of the instruction's result it is, if that is a tuple.
      size_bytes: its size.
      offset_bytes: its position in its allocation.
      allocation_number: the number of its allocation.
      allocation: what that allocation is for: temporaries, an argument or a result.
      kind: what the value is. A "temporary" in the allocation of an argument or a result is there
        once the argument is no longer read, or until the result is written.
      first_step: the first step of the entry computation at which it counts.
      last_step: the last one.
      counts: whether it is alive at any step's fullest moment. If not, it lives only inside a call,
        whose step both steps are, or gives its place to another at once.
      op_name: what JAX says about the instruction; "" if nothing.
      made_by: ``op_name`` of what makes it, likeliest first: the root of a fusion, the fusion
        itself, others inside it; if none has one, what it is a copy of.
      read_by: ``op_name`` of what reads it, apart from copies and tuples of it.
      type: its element type and shape, such as ``f32[8,4]``; "" if unknown.
      source: the user's line of what makes it, as ``file.py:line (function)``; "" if unknown.
    """

    instruction: str
    index: tuple[int, ...]
    size_bytes: int
    offset_bytes: int
    allocation_number: int
    allocation: Kind
    kind: Kind
    first_step: int
    last_step: int
    counts: bool
    op_name: str
    made_by: tuple[str, ...]
    read_by: tuple[str, ...] = ()
    type: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledMemory:
    """Memory over time of one compiled program.

    Attributes:
      heap_bytes: size of the allocations for temporaries in main memory.
      peak_live_bytes: the most temporary bytes alive at once; the difference from ``heap_bytes`` is
        holes.
      peak_step: the first step at which this many are alive.
      timeline: int64, shape (steps,): temporary bytes alive at each step.
      instructions: the steps, in the order in which they run.
      buffers: all values in allocations for temporaries, results and arguments.
      source: which texts it was read from.
    """

    heap_bytes: int
    peak_live_bytes: int
    peak_step: int
    timeline: NDArray[np.int64]
    instructions: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    source: str

    def alive(self, step: int) -> list[Buffer]:
        """The temporaries that are counted at a step; their sizes add up to the timeline."""
        return [
            buffer
            for buffer in self.buffers
            if buffer.allocation == "temporary"
            and buffer.counts
            and buffer.first_step <= step <= buffer.last_step
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """A buffer and its origin.

    Attributes:
      buffer: the buffer.
      origin: equation, region and phase, as far as names show them.
    """

    buffer: Buffer
    origin: Origin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A value from the buffer assignment, with its life in moments of the whole order."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    number: int
    allocation: Kind
    first: int
    last: int


def parse_memory(
    *, program: str, live_ranges: str, assignment: str, device: str, source: str = "dump"
) -> CompiledMemory:
    """Reads what XLA wrote about one program.

    Args:
      program: text of the scheduled program, ``*after_optimizations.txt``.
      live_ranges: text of ``*after_optimizations-live-range.txt``.
      assignment: text of ``*after_optimizations-buffer-assignment.txt``.
      device: name of the device compiled for, for messages.
      source: what to say about the texts' origin.

    Raises:
      CompileError: a text does not have the known form.
    """
    module = read_program(program)
    order, lives, length = _live_ranges(live_ranges, device)
    values, heap_bytes = _assignment(assignment, lives, device)
    home = {
        instruction.name: (instruction, computation)
        for computation, body in module.computations.items()
        for instruction in body
    }
    for value in values:
        if value.name not in home:
            raise _unknown(device, f"the value {value.name!r} is of no instruction of the program")
    steps, step_ends = _steps(module, order, device)
    counted = _in_turn(values)
    moments = np.zeros(max(length, len(order)) + 2, np.int64)
    for value, (first, last) in zip(values, counted, strict=True):
        if value.allocation == "temporary" and first <= last:
            moments[first] += value.size
            moments[last + 1] -= value.size
    live = np.cumsum(moments)
    fullest = _fullest(live, step_ends)
    timeline = live[fullest]
    peak_step = int(np.argmax(timeline))
    sources = _Sources(module, home)
    return CompiledMemory(
        heap_bytes=heap_bytes,
        peak_live_bytes=int(timeline[peak_step]),
        peak_step=peak_step,
        timeline=timeline,
        instructions=tuple(
            Step(name=one.name, opcode=one.opcode, op_name=one.op_name) for one in steps
        ),
        buffers=tuple(
            _buffer(value, life, fullest, step_ends, sources, length, home)
            for value, life in zip(values, counted, strict=True)
        ),
        source=source,
    )


def attributed(memory: CompiledMemory) -> tuple[Attribution, ...]:
    """The origin of each buffer: the equation, its region, and whether it is recomputed.

    The first name in ``made_by`` with an equation decides; if there is none, the first with a
    region; otherwise the first.
    """
    return tuple(
        Attribution(buffer=buffer, origin=_likeliest(buffer.made_by)) for buffer in memory.buffers
    )


def split(memory: CompiledMemory, step: int) -> dict[Origin, int]:
    """Temporary bytes alive at a step, by origin, largest first."""
    found: Counter[Origin] = Counter()
    for buffer in memory.alive(step):
        found[_likeliest(buffer.made_by)] += buffer.size_bytes
    return dict(found.most_common())


def _likeliest(names: Sequence[str]) -> Origin:
    origins = [origin(name) for name in names]
    return next(
        (one for one in origins if one.equation is not None),
        next((one for one in origins if one.region), origins[0] if origins else origin("")),
    )


def _unknown(device: str, what: str) -> CompileError:
    return CompileError(
        f"What the compiler for {device} wrote about memory cannot be read: {what}. Its "
        "format may have changed: please report it with the versions of JAX and jaxlib.",
        device=device,
    )


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text or "")))


def _live_ranges(
    text: str, device: str
) -> tuple[list[str], dict[tuple[str, tuple[int, ...]], tuple[int, int]], int]:
    """The order, from when to when each value lives, and the moment at which the program ends."""
    order: list[str] = []
    lives: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    length: int | None = None
    section = ""
    for line in text.splitlines():
        if (found := _LENGTH.match(line)) is not None:
            length = int(found[1])
        elif line.endswith(":"):
            section = line.strip()
        elif section == _SECTIONS[0]:
            moment = _MOMENT.match(line)
            if moment is None or int(moment[1]) != len(order):
                raise _unknown(device, f"the order of instructions has the line {line!r}")
            order.append(moment[2])
        elif section == _SECTIONS[1] and line.strip():
            life = _LIFE.match(line)
            if life is None:
                raise _unknown(device, f"the values' lives have the line {line!r}")
            lives[life["name"], _index(life["index"])] = int(life["first"]), int(life["last"])
    if length is None or not order or not lives:
        raise _unknown(device, "it has no order of instructions, or no lives of values")
    return order, lives, length


def _assignment(
    text: str,
    lives: Mapping[tuple[str, tuple[int, ...]], tuple[int, int]],
    device: str,
) -> tuple[list[_Value], int]:
    """The values in main memory, and the size of the heap of temporaries."""
    values: list[_Value] = []
    heap_bytes = 0
    number = -1
    allocation: Kind | None = None
    known = False
    for line in text.splitlines():
        if (found := _ALLOCATION.match(line)) is not None:
            known = True
            number = int(found["number"])
            allocation = _allocation_kind(found["words"])
            heap_bytes += int(found["size"]) if allocation == "temporary" else 0
        elif line.startswith("allocation "):
            raise _unknown(device, f"the allocations have the line {line!r}")
        elif line.startswith(" value: ") and allocation is not None:
            value = _VALUE.match(line)
            if value is None:
                raise _unknown(device, f"the allocations have the line {line!r}")
            key = value["name"], _index(value["index"])
            if key not in lives:
                raise _unknown(device, f"from when to when {value['name']!r} lives is not said")
            first, last = lives[key]
            values.append(
                _Value(
                    name=key[0],
                    index=key[1],
                    size=int(value["size"]),
                    offset=int(value["offset"]),
                    number=number,
                    allocation=allocation,
                    first=first,
                    last=last,
                )
            )
    if not known:
        raise _unknown(device, "it has no allocations")
    return values, heap_bytes


def _allocation_kind(words: str) -> Kind | None:
    """What an allocation is for; None for constants, thread-local memory, and other memories."""
    color = _COLOR.search(words)
    if color is not None and color[1] != "0":
        return None
    if re.search(r"\bparameter \d+", words):
        return "argument"
    if "maybe-live-out" in words:
        return "result"
    return "temporary" if "preallocated-temp" in words else None


def _steps(
    module: Module, order: Sequence[str], device: str
) -> tuple[list[Instruction], NDArray[np.int64]]:
    """The instructions of the entry in the order in which they run, and the moment of each."""
    entry = {one.name: one for one in module.computations.get(module.entry, ())}
    found = [(entry[name], moment) for moment, name in enumerate(order) if name in entry]
    if not found or len(found) < sum(one.opcode != "get-tuple-element" for one in entry.values()):
        raise _unknown(device, "the order lacks instructions of the program")
    # Anything after the last one, such as returned values, belongs to its step.
    return [one for one, _ in found], np.array([moment for _, moment in found], np.int64)


def _fullest(live: NDArray[np.int64], step_ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each step, the moment since the previous step at which most bytes are alive."""
    starts = [0, *(step_ends[:-1] + 1).tolist()]
    return np.array(
        [
            start + int(np.argmax(live[start : end + 1]))
            for start, end in zip(starts, step_ends.tolist(), strict=True)
        ],
        np.int64,
    )


def _in_turn(values: Sequence[_Value]) -> list[tuple[int, int]]:
    """The span in which each value counts, so that no place counts twice at any moment.

    Values share a place in the moment when one replaces another, and where loops and calls pass one
    array in and out. The later one counts from its start, unless it is part of the earlier one or
    ends before it; then it counts from when that is gone.
    """
    lives = [(value.first, value.last) for value in values]
    places: defaultdict[int, list[int]] = defaultdict(list)
    for position, value in enumerate(values):
        places[value.number].append(position)
    for positions in places.values():
        active: list[int] = []
        # Of those that begin together, the largest first: the others are parts of it.
        for here in sorted(positions, key=lambda p: (values[p].first, -values[p].size, p)):
            value = values[here]
            active = [p for p in active if lives[p][1] >= value.first]
            begin, end = value.offset, value.offset + value.size
            first = value.first
            for other in active:
                there = values[other]
                if there.offset >= end or there.offset + there.size <= begin:
                    continue
                inside = there.offset <= begin and end <= there.offset + there.size
                if (inside and value.size < there.size) or lives[other][1] > value.last:
                    first = max(first, lives[other][1] + 1)
                else:
                    lives[other] = (lives[other][0], min(lives[other][1], value.first - 1))
            lives[here] = (first, value.last)
            active.append(here)
    return lives


class _Sources:
    """Finds the names of what makes a value."""

    def __init__(self, module: Module, home: Mapping[str, tuple[Instruction, str]]) -> None:
        self._module = module
        self._home = home
        self._callers = {
            called: one
            for body in module.computations.values()
            for one in body
            for called in one.called
        }
        self._reading: defaultdict[str, list[Instruction]] = defaultdict(list)
        for body in module.computations.values():
            for one in body:
                # After the operands a line has other names, mostly of computations.
                for operand in dict.fromkeys(one.operands):
                    self._reading[operand].append(one)

    def readers(self, name: str, depth: int = 0) -> list[str]:
        """Names of what reads an instruction's result, passed on or not."""
        found: list[str] = []
        for one in self._reading.get(name, ()):
            if one.opcode in _HANDING_ON and one.opcode != "custom-call":
                found += self.readers(one.name, depth + 1) if depth < _FURTHEST else []
            else:
                found += _own_names(one)[:1]
        return list(dict.fromkeys(found))

    def source(self, names: Sequence[tuple[str, int]]) -> str:
        """The user's line that the likeliest of several names comes from."""
        lines = (self._module.users_line(frame) for _, frame in names)
        return next(filter(None, lines), "")

    def names(self, name: str, index: Sequence[int], depth: int = 0) -> list[tuple[str, int]]:
        """Names of what makes a part of an instruction's result, likeliest first.

        Each comes with its frame.
        """
        if depth > _FURTHEST or name not in self._home:
            return []
        instruction, computation = self._home[name]
        found: list[tuple[str, int]] = []
        bodies = [self._module.computations.get(called, ()) for called in instruction.called]
        if instruction.opcode == "fusion":
            for body in bodies:
                found += self._made_inside(body, index)
        found += _parts(instruction)
        if instruction.opcode in ("fusion", "call", "async-start"):
            for body in bodies:
                for one in reversed(body):
                    found += _parts(one)
        if not found and instruction.opcode in _HANDING_ON:
            for operand in instruction.operands[:_FURTHEST]:
                found += self.names(operand, (), depth + 1)
        if not found and computation in self._callers:
            caller = self._callers[computation]
            if caller.opcode != "fusion":
                found += self.names(caller.name, (), depth + 1)
        return list(dict.fromkeys(found))

    def _made_inside(
        self, body: Sequence[Instruction], index: Sequence[int]
    ) -> list[tuple[str, int]]:
        """Names of what makes a part of a fusion's result."""
        inside = {one.name: one for one in body}
        maker = next((one for one in body if one.is_root), None)
        for place in index:
            if maker is None or maker.opcode != "tuple" or place >= len(maker.operands):
                break
            maker = inside.get(maker.operands[place])
        pending = [maker] if maker is not None else []
        for _ in range(_FURTHEST):
            found = [part for one in pending for part in _parts(one)]
            if found:
                return found
            pending = [
                inside[operand]
                for one in pending
                for operand in one.operands
                if operand in inside and inside[operand].opcode != "parameter"
            ]
        return []


def _own_names(one: Instruction) -> list[str]:
    """The names in an ``op_name``: XLA joins those of what it merges."""
    return [name for name in one.op_name.split(";") if name]


def _parts(one: Instruction) -> list[tuple[str, int]]:
    """An instruction's names, each with its frame."""
    return [(name, one.frame) for name in _own_names(one)]


def _buffer(
    value: _Value,
    life: tuple[int, int],
    fullest: NDArray[np.int64],
    step_ends: NDArray[np.int64],
    sources: _Sources,
    length: int,
    home: Mapping[str, tuple[Instruction, Any]],
) -> Buffer:
    first_step = int(np.searchsorted(fullest, life[0]))
    last_step = int(np.searchsorted(fullest, life[1], side="right")) - 1
    counts = first_step <= last_step
    if not counts:
        first_step = last_step = min(bisect.bisect_left(step_ends, value.first), len(step_ends) - 1)
    instruction = home[value.name][0]
    names = sources.names(value.name, value.index)
    place = value.index[0] if value.index else 0
    kind: Kind = "temporary"
    if instruction.opcode == "parameter" and value.allocation == "argument":
        kind = "argument"
    elif value.last >= length and value.allocation != "temporary":
        kind = "result"
    return Buffer(
        instruction=value.name,
        index=value.index,
        size_bytes=value.size,
        offset_bytes=value.offset,
        allocation_number=value.number,
        allocation=value.allocation,
        kind=kind,
        first_step=first_step,
        last_step=last_step,
        counts=counts,
        op_name=instruction.op_name,
        made_by=tuple(dict.fromkeys(name for name, _ in names)),
        read_by=tuple(sources.readers(value.name)),
        type=instruction.types[place] if place < len(instruction.types) else "",
        source=sources.source(names),
    )
