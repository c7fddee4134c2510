"""The text of a compiled program, read into plain records.

XLA writes one computation after the other, each with its instructions, the entry last; where the
program is scheduled, instructions stand in the order in which they run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

_PRODUCTS = frozenset({"dot", "convolution", "ragged-dot"})
#: Libraries that compilers hand products to.
_PRODUCT_CALLS = ("__cublas$", "__cudnn$", "__onednn$")

#: What runs computations of their own.
_CALLERS = frozenset("async-start call conditional custom-call fusion while".split())

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?P<opcode>[a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALL_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a compiled program, or of the program asked for.

    Attributes:
      name: what it is called in the text.
      opcode: what it does.
      op_name: what JAX says of where it comes from; "" where nothing.
      operands: the names it reads, in order; after them all others that its line has.
      called: the computations that it runs.
      is_product: whether it is a product of matrices or a convolution.
      is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    op_name: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    is_product: bool
    is_root: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """Instructions by the computation that they are in; of the program asked for, not all."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str


def read_program(text: str) -> Module:
    """Reads HLO text, as ``compiled.as_text()`` gives it."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    body: list[Instruction] = []
    for line in text.splitlines():
        if (match := _INSTRUCTION.match(line)) is not None:
            body.append(_instruction(match, line))
        elif (opened := _COMPUTATION.match(line)) is not None:
            body = computations.setdefault(opened["name"], [])
            entry = opened["name"] if opened["entry"] else entry
    return Module(computations=computations, entry=entry)


def _instruction(match: re.Match[str], line: str) -> Instruction:
    # The compiler's configuration, at the end, is long and says nothing of this.
    attributes, _, rest = line[match.end() :].partition(", metadata={")
    op_name = _OP_NAME.search(rest)
    opcode = match["opcode"]
    target = _CALL_TARGET.search(attributes) if opcode == "custom-call" else None
    called = _CALLED.findall(attributes) if opcode in _CALLERS else ()
    return Instruction(
        name=match["name"],
        opcode=opcode,
        op_name=op_name[1] if op_name else "",
        operands=tuple(_NAME.findall(attributes)),
        called=tuple(name for names in called for name in _NAME.findall(names)),
        is_product=opcode in _PRODUCTS
        or (target is not None and target[1].startswith(_PRODUCT_CALLS)),
        is_root=line.lstrip().startswith("ROOT "),
    )
