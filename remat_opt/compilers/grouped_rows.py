"""Rows that are looked up in groups on TPU: ten for each example, as in a bag of embeddings.

A lookup writes rows one below the other, a matrix, and its gradient reads such rows. What reads
them group by group wants the rows of a group in tiles of their own, eight by 128. Where they do not
fill those, one is not the other by another name: the rows are written once more, with padding, and
before their cotangent is added to the table's, it is written once more without
(``rows_grouped``). 65,536 bags of ten rows of 64 ``float32`` take 512 MiB, and 320 more while they
are summed up, or their cotangent is added.

A product reads and writes rows without padding. Its result is padded only on the way to the table.
A group that is read as one long row, as embeddings side by side, is always written once more.

So it is where a program itself puts looked-up rows into groups, or takes groups apart to add them
up at places, as tokens that go to the best two of many experts: the reshape is a kernel, forward
and backward, and what is repeated for that, as by ``jnp.repeat``, is an array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from remat_opt import costs
from remat_opt.compilers.compiler import SUBLANES, Compiler
from remat_opt.compilers.lanes import gathered
from remat_opt.compilers.operands import is_batched
from remat_opt.operation import PRODUCTS, SCATTERS, ArrayType
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """A reshape that is a kernel: one way round or the other, between rows and groups of them.

    Attributes:
      index: the reshape.
      bytes: what it writes.
      repeated: the value that is repeated in each group, if that is so.
    """

    index: int
    bytes: int
    repeated: int | None


def regroupings(flow: Dataflow, compiler: Compiler) -> Iterator[Regrouping]:
    """The reshapes between looked-up rows, or rows to add up at places, and groups of them.

    Args:
      flow: of the program.
      compiler: the compiler.
    """
    if not compiler.has("rows_grouped"):
        return
    program = flow.program
    reshapes = [
        (index, equation)
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive == "reshape"
        and flow.is_alias(index)
        and _regroups(*equation.operation.inputs, *equation.operation.outputs)
    ]
    if not reshapes:
        return
    looked_up, added_up = _behind_lookups(flow), _before_sums(flow)
    for index, equation in reshapes:
        (before,), (after,) = equation.operation.inputs, equation.operation.outputs
        (read,), (made,) = equation.value_inputs, equation.outputs
        apart = made in added_up and _is_split(after, before)
        together = read in looked_up and _is_split(before, after)
        if apart or together:
            yield Regrouping(
                index=index,
                bytes=compiler.buffer_bytes(_as_matrix(after)),
                repeated=_repeated(flow, read) if apart else None,
            )


def _repeated(flow: Dataflow, groups: int) -> int | None:
    """The computed value that groups are copies of, if they are."""
    maker = flow.maker.get(groups)
    if maker is None:
        return None
    equation = flow.program.equations[maker]
    if equation.operation.primitive != "broadcast_in_dim" or not equation.value_inputs:
        return None
    copied = flow.source[equation.value_inputs[0]]
    return copied if copied in flow.maker else None


def _regroups(before: ArrayType, after: ArrayType) -> bool:
    """Whether a reshape is between rows and groups of them, either way."""
    return _is_split(after, before) or _is_split(before, after)


def _is_split(rows: ArrayType, groups: ArrayType) -> bool:
    """Whether groups of these rows do not fill tiles."""
    return (
        (len(rows.shape), len(groups.shape)) == (2, 3)
        and rows.shape[-1] == groups.shape[-1]
        and groups.shape[-2] > 1
        and groups.shape[-2] % SUBLANES > 0
    )


def _behind_lookups(flow: Dataflow) -> set[int]:
    """What is computed elementwise, row by row, from looked-up rows."""
    found: set[int] = set()
    for index, equation in enumerate(flow.program.equations):
        if equation.operation.primitive == "gather":
            found.update(equation.outputs)
        elif flow.costs[index].fusion is costs.Fusion.FUSIBLE and not flow.is_alias(index):
            shapes = {one.shape for one in equation.operation.outputs}
            read = zip(equation.inputs, equation.operation.inputs, strict=True)
            if any(isinstance(v, int) and v in found and kind.shape in shapes for v, kind in read):
                found.update(equation.outputs)
    return found


def _before_sums(flow: Dataflow) -> set[int]:
    """What rows that are added up at places are computed from, elementwise and row by row."""
    found: set[int] = set()
    for index in reversed(range(len(flow.program.equations))):
        equation = flow.program.equations[index]
        if equation.operation.primitive in SCATTERS:
            found.update(value for value in equation.inputs[2:] if isinstance(value, int))
        elif flow.costs[index].fusion is costs.Fusion.FUSIBLE and not found.isdisjoint(
            equation.outputs
        ):
            (made, *_) = equation.operation.outputs
            found.update(
                value
                for value, kind in zip(equation.inputs, equation.operation.inputs, strict=True)
                if isinstance(value, int) and kind.shape == made.shape
            )
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
    active = storage.flow.linearization.active_values
    for value, one in storage.groups.items():
        if value in active and value in storage.vertex_of:
            yield storage.vertex_of[value], one.beside_bytes
    for vertex, size in running(storage).items():
        made = storage.flow.program.equations[storage.roots[vertex]].outputs
        if not active.isdisjoint(made):
            yield vertex, size


def running(storage: Storage) -> dict[int, int]:
    """For vertices that read rows through a regrouping, what that writes for them.

    Args:
      storage: what is stored.
    """
    found = {one.index: one.bytes for one in storage.regroupings}
    taken: dict[int, int] = {}
    for vertex, root in enumerate(storage.roots if found else ()):
        if size := sum(found[index] for index in found.keys() & set(storage.cone(root))):
            taken[vertex] = size
    return taken


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
