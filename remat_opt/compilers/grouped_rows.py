"""Rows that are looked up in groups on TPU: ten for each example, as in a bag of embeddings.

A lookup writes rows one below the other, a matrix, and its gradient reads such rows. What reads
them group by group wants the rows of a group in tiles of their own, eight by 128. Where they do not
fill those, one is not the other by another name: the rows are written once more, with padding, and
before their cotangent is added to the table's, it is written once more without
(``rows_grouped``). 65,536 bags of ten rows of 64 ``float32`` take 512 MiB, and 320 more while they
are summed up, or their cotangent is added.

A product reads and writes rows without padding. Its result is padded only on the way to the table.
A group that is read as one long row, as embeddings side by side, is always written once more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.lanes import gathered
from remat_opt.compilers.operands import is_batched
from remat_opt.operation import PRODUCTS, ArrayType
from remat_opt.program.dataflow import Dataflow

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How rows are laid out that are looked up in groups.

    Attributes:
      kind: the type in which they are stored.
      padded: whether the last two axes of it are innermost.
      beside_bytes: what is held beside their cotangent while that is added to the table's.
    """

    kind: ArrayType
    padded: bool
    beside_bytes: int


def groups(flow: Dataflow, compiler: Compiler) -> dict[int, Groups]:
    """The rows of a program that are not stored as they are looked up.

    Args:
      flow: of the program.
      compiler: the compiler.
    """
    found: dict[int, Groups] = {}
    if not compiler.has("rows_grouped"):
        return found
    types = flow.program.types
    of_several = [value for value in gathered(flow.program) if len(types[value].shape) > 2]
    if not of_several:
        return found
    flat, elsewhere = _flattened(flow), _read_elsewhere(flow)
    for value in of_several:
        kind = types[value]
        rows_bytes = compiler.buffer_bytes(_as_matrix(kind), lanes={1})
        padded_bytes = compiler.buffer_bytes(kind, *_tiles(kind))
        if value in flat:
            found[value] = Groups(kind=flat[value], padded=False, beside_bytes=rows_bytes)
        elif padded_bytes > rows_bytes:
            padded = value in elsewhere
            beside_bytes = rows_bytes if padded else padded_bytes
            found[value] = Groups(kind=kind, padded=padded, beside_bytes=beside_bytes)
    return found


def stored_bytes(one: Groups, kind: ArrayType, compiler: Compiler) -> int:
    """The bytes of such rows, or of their cotangent.

    Args:
      one: how they are laid out.
      kind: their type as they are looked up, or another of the same shape.
      compiler: the compiler.
    """
    kind = dataclasses.replace(one.kind, dtype=kind.dtype)
    if one.padded:
        return compiler.buffer_bytes(kind, *_tiles(kind))
    return compiler.buffer_bytes(kind)


def beside(storage: Storage) -> Iterator[tuple[int, int]]:
    """For vertices that are such rows, what is held beside their backward step.

    Args:
      storage: what is stored.
    """
    for value, one in storage.groups.items():
        if value in storage.flow.linearization.active_values and value in storage.vertex_of:
            yield storage.vertex_of[value], one.beside_bytes


def _flattened(flow: Dataflow) -> Mapping[int, ArrayType]:
    """What is only read with its last axis merged with others, and the type as read."""
    found: dict[int, ArrayType] = {}
    others = set(flow.program.output_values)
    for equation in flow.program.equations:
        operation = equation.operation
        for value, kind in zip(equation.inputs, operation.inputs, strict=True):
            if not isinstance(value, int):
                continue
            if operation.primitive == "reshape" and (
                kind.shape[-1:] != operation.outputs[0].shape[-1:]
            ):
                (found[value],) = operation.outputs
            else:
                others.add(value)
    return {value: kind for value, kind in found.items() if value not in others}


def _read_elsewhere(flow: Dataflow) -> set[int]:
    """What is not only read by products, perhaps through elementwise functions."""
    found = {flow.source[value] for value in flow.program.output_values}
    for index in reversed(range(len(flow.program.equations))):
        equation = flow.program.equations[index]
        if flow.is_alias(index):
            continue
        if equation.operation.primitive in PRODUCTS:
            elsewhere = is_batched(equation.operation)
        else:
            fusible = flow.costs[index].fusion is costs.Fusion.FUSIBLE
            elsewhere = not fusible or not found.isdisjoint(equation.outputs)
        if elsewhere:
            found.update(flow.reads(index))
    return found


def _tiles(kind: ArrayType) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The two axes that are innermost, and the one in the lanes, where groups are padded."""
    last = len(kind.shape) - 1
    return (last - 1, last), (last,)


def _as_matrix(kind: ArrayType) -> ArrayType:
    *rows, width = kind.shape
    return dataclasses.replace(kind, shape=(math.prod(rows), width))
