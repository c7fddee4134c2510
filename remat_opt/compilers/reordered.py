"""Arguments that XLA for TPU copies in another order (``entries_reordered``).

Arguments come in row-major order. If a program reads entries along an axis that is not the first,
such as the steps of ``f32[batch, time, features]`` in a Python loop, each is scattered over the
array. So the whole of it is copied, with the entries one by one, unless the program reads a single
one; rounded, if only products read them. A checkpoint reads the argument itself, and copies it
again. (A recurrent cell over ``f32[32768,8,512]``: 803 MiB, predicted before 579, of which the copy
is 256; with checkpoints 485, predicted before 196.)

Sums over the features of entries read them where they are. And if the last two axes do not fill
tiles of 8 x 128, the argument comes in an order in which entries are one by one already.

In plans, entries that only products read are copied one by one instead (``entries_turned``): the
argument is turned so that they come first, which XLA does to each slice by itself. (The same cell:
229 MiB.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from remat_opt import costs
from remat_opt.compilers import operands, strides
from remat_opt.compilers.compiler import LANES, Rules, tile_rows
from remat_opt.operation import PRODUCTS, ArrayType, Operation
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Program
from remat_opt.spans import ArgumentCopy

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage


def scattered_entries(program: Program, rules: Rules) -> dict[int, int]:
    """Entries of arguments that lie scattered over these, each with its argument."""
    if not rules.has("entries_reordered"):
        return {}
    maker = program.makers()
    return {
        entry: value
        for equation in program.equations
        if _takes_entries(equation.operation)
        for value in equation.value_inputs
        if value not in maker
        for entry in equation.outputs
    }


def reordered(storage: Storage) -> Iterator[ArgumentCopy]:
    """The arguments that are copied, and what reads the copies."""
    flow = storage.flow
    argument_of = scattered_entries(flow.program, storage.compiler.rules)
    if not argument_of:
        return
    # For each argument, of each vertex that reads it an entry that it reads.
    entry_of: dict[int, dict[int, int]] = {}
    backward: dict[int, set[int]] = {}
    scattered: dict[int, set[int]] = {}
    for entry, vertex, is_backward in _reads(storage, argument_of):
        argument = argument_of[entry]
        entry_of.setdefault(argument, {})[vertex] = entry
        if is_backward:
            backward.setdefault(argument, set()).add(vertex)
        root = storage.roots[vertex]
        if is_backward or flow.costs[root].fusion is not costs.Fusion.REDUCTION:
            scattered.setdefault(argument, set()).add(entry)
    alone = turned(flow.program, storage.compiler.rules, argument_of)
    for argument, read in scattered.items():
        if len(read) > 1:
            kind = flow.program.types[argument]
            if storage.rounded.keys() >= read:
                kind = operands.as_operand(kind)
            some = next(iter(read))
            yield ArgumentCopy(
                bytes=storage.compiler.buffer_bytes(kind),
                readers=frozenset(entry_of[argument]),
                backward=frozenset(backward.get(argument, ())),
                entry_of=entry_of[argument] if some in alone else None,
                # Rounded, with every other row of a tile empty.
                entry_bytes=flow.program.types[some].bytes,
            )


def turned(program: Program, rules: Rules, argument_of: Mapping[int, int]) -> frozenset[int]:
    """The entries that plans read one by one, each with a copy of its own.

    That is so if the argument is turned first, with that axis in front, products alone read its
    entries, rounded, and it has no gradient.

    Args:
      program: a traced function.
      rules: those about the compiler that is expected.
      argument_of: those found by ``scattered_entries``.
    """
    if not rules.has("entries_turned"):
        return frozenset()
    source = {entry: entry for entry in argument_of}
    # What has a gradient would have that turned back, as another array.
    left_out = set(program.differentiated)
    for equation in program.equations:
        read = {source[value] for value in equation.value_inputs if value in source}
        operation = equation.operation
        if not argument_of.keys().isdisjoint(equation.outputs):
            if operation.primitive != "slice" or operation.outputs[0].dtype != "float32":
                left_out.update(argument_of[entry] for entry in equation.outputs)
        elif operation.primitive in ALIASES and len(read) == 1:
            source.update(dict.fromkeys(equation.outputs, *read))
        elif not operands.rounds_operands(operation):
            left_out.update(argument_of[entry] for entry in read)
    left_out.update(argument_of[source[one]] for one in program.output_values if one in source)
    return frozenset(entry for entry, argument in argument_of.items() if argument not in left_out)


def _takes_entries(operation: Operation) -> bool:
    """Whether single entries are taken along an axis that is not the first."""
    if operation.primitive not in ("slice", "split", "unstack"):
        return False
    if any(stride > 1 for stride in strides.of(operation)):
        return False
    (kind,) = operation.inputs
    axis = entry_axis(operation)
    if axis is None:
        return False
    size = kind.size // kind.shape[axis] if kind.size else 0
    entries = all(one.size == size for one in operation.outputs)
    return entries and math.prod(kind.shape[:axis]) > 1 and _scatters(kind, axis)


def entry_axis(operation: Operation) -> int | None:
    """The axis along which parts are taken, if there is one."""
    if "axis" in operation.params:
        return int(operation.params["axis"])
    whole, part = operation.inputs[0].shape, operation.outputs[0].shape
    shorter = [axis for axis, size in enumerate(part) if size != whole[axis]]
    return shorter[0] if len(shorter) == 1 else None


def _scatters(kind: ArrayType, axis: int) -> bool:
    """Whether entries along an axis are scattered over an argument, as far as was seen.

    The last two axes are in tiles; the rows of those are along the last one, if that pads less.
    """
    if len(kind.shape) < 3 or not _fills(kind.shape[axis]):
        return False
    rows, columns = kind.shape[-2:]
    if axis == len(kind.shape) - 1:
        rows, columns = columns, rows
    return _fills(rows) and columns % LANES == 0


def _fills(rows: int) -> bool:
    return rows > 1 and rows % tile_rows(rows, packing=1) == 0


def _reads(storage: Storage, entries: Mapping[int, int]) -> Iterator[tuple[int, int, bool]]:
    """What reads entries from their argument: entry, vertex, and whether its backward step does.

    Args:
      storage: what is stored.
      entries: all of them, each with its argument.
    """
    flow = storage.flow
    products = {
        value
        for value, reading in flow.readers().items()
        if len(reading) == 1
        and flow.program.equations[flow.maker[value]].operation.primitive in PRODUCTS
    }
    for vertex, root in enumerate(storage.roots):
        # Of fused values and the result, the entries that they are computed from.
        behind: dict[int, set[int]] = {}
        for index in storage.cone(root):
            equation = flow.program.equations[index]
            if flow.is_alias(index):
                continue
            inputs = [flow.source[value] for value in equation.value_inputs]
            read = set().union(*(behind.get(value, ()) for value in inputs))
            read |= entries.keys() & equation.outputs
            yield from ((entry, vertex, False) for entry in read)
            # What a product adds as it writes its result is not read for that again.
            written = not products.isdisjoint(inputs)
            for value in equation.outputs:
                behind[value] = {value} if value in entries else set() if written else read
            derivative = flow.linearization.derivatives.get(index)
            if derivative is not None:
                kept = [equation.inputs[position] for position in derivative.inputs]
                if index != root:
                    kept += [equation.outputs[position] for position in derivative.outputs]
                for atom in kept:
                    if isinstance(atom, int):
                        for entry in behind.get(flow.source[atom], ()):
                            yield entry, vertex, True
