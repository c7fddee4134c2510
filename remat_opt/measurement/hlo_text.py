"""The text of a compiled program, read into plain records.

XLA writes one computation after the other, each with its instructions, the entry last; in a
scheduled program, instructions are in execution order. Before them come tables of the source lines
that instructions come from: each has a frame, and each frame the one that called it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from remat_opt.naming import file_title

_PRODUCTS = frozenset({"dot", "convolution", "ragged-dot"})
#: Libraries to which compilers delegate products.
_PRODUCT_CALLS = ("__cublas$", "__cudnn$", "__onednn$")

#: Opcodes that run other computations.
_CALLERS = frozenset("async-start call conditional custom-call fusion while".split())

_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[a-z][\w\-]*)\("
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALL_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TYPE = re.compile(r"\b[a-z]\w*\[[\d,]*\]")

#: The tables of source lines, and a line of each.
_TABLES = {
    "FileNames": re.compile(r'(\d+) "(.*)"$'),
    "FunctionNames": re.compile(r'(\d+) "(.*)"$'),
    "FileLocations": re.compile(r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)\b"),
    "StackFrames": re.compile(r"(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}$"),
}
#: This package, whose lines are never the user's.
_PACKAGE = __file__.replace("\\", "/").rsplit("/", 2)[0] + "/"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a compiled program, or of the program asked for.

    Attributes:
      name: what it is called in the text.
      opcode: what it does.
      op_name: what JAX says about its origin; "" if nothing.
      operands: the names it reads, in order, followed by all others in its line.
      called: the computations that it runs.
      is_product: whether it is a matrix product or a convolution.
      is_root: whether it is the result of its computation.
      types: the types of its result, one for each part of a tuple, such as ``f32[8,4]``.
      frame: the number of the source line that it comes from; 0 if unknown.
    """

    name: str
    opcode: str
    op_name: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    is_product: bool
    is_root: bool = False
    types: tuple[str, ...] = ()
    frame: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A line of source code."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is in no installed package."""
        path = self.file.replace("\\", "/")
        return not (
            "/site-packages/" in path or "/dist-packages/" in path or path.startswith(_PACKAGE)
        )

    def __str__(self) -> str:
        return f"{file_title(self.file)}:{self.line} ({self.function})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Instructions by computation; for the program asked for, not all of them.

    Attributes:
      computations: the instructions of each.
      entry: the computation that runs first.
      frames: by number, the line and the number of the frame that called it; 0 for none.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    frames: Mapping[int, tuple[Location, int]] = dataclasses.field(default_factory=dict)

    def stack(self, frame: int) -> Iterator[Location]:
        """The line of a frame, the line that called it, and so on."""
        while frame in self.frames:
            location, caller = self.frames[frame]
            yield location
            # A caller has a lower number than what it calls.
            frame = caller if caller < frame else 0

    def users_line(self, frame: int) -> str:
        """The innermost line outside installed packages, as ``file.py:line (function)``.

        If there is no such line, the innermost of all; "" if unknown.
        """
        stack = list(self.stack(frame))
        found = next((one for one in stack if one.is_users), stack[0] if stack else None)
        return "" if found is None else str(found)


def read_program(text: str) -> Module:
    """Reads HLO text, as ``compiled.as_text()`` gives it."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    body: list[Instruction] = []
    tables: dict[str, dict[int, tuple[str, ...]]] = {name: {} for name in _TABLES}
    table = ""
    for line in text.splitlines():
        if line in tables:
            table = line
        elif table and (row := _TABLES[table].match(line)) is not None:
            tables[table][int(row[1])] = row.groups()[1:]
        elif (match := _INSTRUCTION.match(line)) is not None:
            body.append(_instruction(match, line))
        elif (opened := _COMPUTATION.match(line)) is not None:
            body = computations.setdefault(opened["name"], [])
            entry = opened["name"] if opened["entry"] else entry
    return Module(computations=computations, entry=entry, frames=_frames(tables))


def _frames(
    tables: Mapping[str, Mapping[int, tuple[str, ...]]],
) -> dict[int, tuple[Location, int]]:
    """The frames, from the four tables."""
    files, functions, locations, frames = tables.values()
    lines = {
        number: Location(
            file=files.get(int(file), ("",))[0],
            line=int(line),
            function=functions.get(int(function), ("",))[0],
        )
        for number, (file, function, line) in locations.items()
    }
    return {
        # XLA counts callers from 1, and 1 means none.
        number: (lines[int(place)], int(caller) - 1)
        for number, (place, caller) in frames.items()
        if int(place) in lines
    }


def _instruction(match: re.Match[str], line: str) -> Instruction:
    # The compiler's configuration, at the end, is long and irrelevant here.
    attributes, _, rest = line[match.end() :].partition(", metadata={")
    op_name, frame = _OP_NAME.search(rest), _FRAME.search(rest)
    opcode = match["opcode"]
    target = _CALL_TARGET.search(attributes) if opcode == "custom-call" else None
    called = _CALLED.findall(attributes) if opcode in _CALLERS else ()
    return Instruction(
        name=match["name"],
        opcode=opcode,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        operands=tuple(_NAME.findall(attributes)),
        called=tuple(name for names in called for name in _NAME.findall(names)),
        is_product=opcode in _PRODUCTS
        or (target is not None and target[1].startswith(_PRODUCT_CALLS)),
        is_root=line.lstrip().startswith("ROOT "),
        types=tuple(_TYPE.findall(match["type"])),
        frame=int(frame[1]) if frame else 0,
    )
