"""Gathers that pick one element of each row, as a cross-entropy picks the logit of each label.

JAX's gradient of a gather is a scatter. XLA for NVIDIA scatters in place, into an array that holds
the rest of the operand's cotangent, in its full width: of logits that a product wrote in bfloat16,
a second array twice as large. The gradient of picking can also be written elementwise: zero except
where an index says. ``transform`` does so, and the cotangent is rounded as it is written (2,048
rows of 32,000 logits on h200: 285 MiB instead of 410).

XLA for TPU stores what a gather reads: logits that a product wrote in bfloat16 also in float32, or
a whole ``log_softmax``. Picking can be written as a sum, too: over a row of which all but the
picked element is set to zero. That is a part of the kernels that sum exponentials, and reads what
they read. ``transform`` does so there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.effects import Effect, Unchanged
from remat_opt.program.record import Constant, Equation, Program

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage
    from remat_opt.program.dataflow import Dataflow


def picking(program: Program, rules: Rules) -> frozenset[int]:
    """The gathers whose gradient is to be written elementwise."""
    if not rules.has("rows_picked"):
        return frozenset()
    return frozenset(index for index, _ in _row_gathers(program, program.makers()))


def summing(program: Program, rules: Rules) -> frozenset[int]:
    """The gathers that are to be written as sums: of numbers that a program computes."""
    if not rules.has("picks_summed"):
        return frozenset()
    maker = program.makers()
    return frozenset(
        index
        for index, equation in _row_gathers(program, maker)
        if equation.inputs[0] in maker
        and "float" in equation.operation.inputs[0].dtype
        and _fills_nan(equation.operation.params["fill_value"])
    )


def stored(flow: Dataflow, rules: Rules) -> set[int]:
    """What gathers read that are not written as sums, and is stored for them."""
    if not rules.has("picked_stored"):
        return set()
    equations = flow.program.equations
    read = (equations[index].inputs[0] for index in summing(flow.program, rules))
    return {flow.source[value] for value in read if isinstance(value, int)}


def _fills_nan(value: float | None) -> bool:
    """Whether NaN is what stands in for elements that are not there, if anything."""
    return value is None or math.isnan(value)


def scattered(
    storage: Storage, cotangent_bytes: Sequence[int], predecessors: Sequence[Sequence[int]]
) -> Iterator[Effect]:
    """The cotangents of what is picked from, if the array behind it is narrower.

    The scatter's result is as wide as what the gather reads. What is written next can take its
    place only if it is as wide.

    Args:
      storage: what is stored.
      cotangent_bytes: for each vertex, the bytes of its cotangent.
      predecessors: for each vertex, those that it reads.
    """
    if not storage.compiler.has("rows_scattered"):
        return
    types = storage.flow.program.types
    found = {}
    for _, equation in _row_gathers(storage.flow.program, storage.flow.maker):
        value = equation.inputs[0]
        if not isinstance(value, int):
            continue
        wide = storage.compiler.buffer_bytes(types[value])
        for one in storage.leaves.get(value, (value,)):
            if one in storage.vertex_of and types[one].size == types[value].size:
                vertex = storage.vertex_of[one]
                behind = (vertex, *predecessors[vertex])
                if wide > max(cotangent_bytes[array] for array in behind):
                    found[vertex] = wide
    if found:
        yield Unchanged(cotangent_bytes=found)


def _row_gathers(program: Program, maker: Mapping[int, int]) -> Iterator[tuple[int, Equation]]:
    """The equations that pick one element of each row, with their numbers."""
    for index, equation in enumerate(program.equations):
        if is_row_gather(program, maker, equation):
            yield index, equation


def is_row_gather(program: Program, maker: Mapping[int, int], equation: Equation) -> bool:
    """Whether an equation reads one element along its operand's last axis, for all others.

    There are three ways to write it: ``take_along_axis``; one label at a time under ``vmap``; and
    with all indices, such as ``logits[jnp.arange(len(labels)), labels]``.

    Args:
      program: the program.
      maker: for each of its values, the equation that makes it.
      equation: one of its equations.
    """
    operation = equation.operation
    if operation.primitive != "gather":
        return False
    (operand, indices), numbers = operation.inputs, operation.params["dimension_numbers"]
    last = len(operand.shape) - 1
    rows = tuple(range(last))
    if last < 0 or math.prod(operation.outputs[0].shape) != math.prod(operand.shape[:-1]):
        return False
    if tuple(numbers.operand_batching_dims) == rows:
        # Of the operand's last axis, one element is left, or no axis.
        return (
            tuple(numbers.start_index_map) == (last,)
            and tuple(numbers.start_indices_batching_dims) == rows
            and math.prod(indices.shape) == math.prod(operand.shape[:-1])
        )
    return (
        tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (*rows, last)
        and indices.shape == (*operand.shape[:-1], last + 1)
        and _are_positions(program, maker, equation.inputs[1], last)
    )


def _are_positions(program: Program, maker: Mapping[int, int], indices: object, last: int) -> bool:
    """Whether indices into all axes are, but for the last one, where in them the index stands."""
    made = _made(program, maker, indices)
    return (
        made is not None
        and made.operation.primitive == "concatenate"
        and made.operation.params["dimension"] == last
        and len(made.inputs) == last + 1
        and all(
            _is_position(program, maker, part, axis) for axis, part in enumerate(made.inputs[:-1])
        )
    )


def _is_position(program: Program, maker: Mapping[int, int], value: object, axis: int) -> bool:
    """Whether each entry of a value is its position along an axis, as ``jnp.arange`` makes them."""
    made = _made(program, maker, value)
    if made is None:
        return False
    params = made.operation.params
    match made.operation.primitive:
        case "iota":
            return bool(params["dimension"] == axis)
        case "convert_element_type":
            return _is_position(program, maker, made.inputs[0], axis)
        case "broadcast_in_dim":
            (before, after) = made.operation.inputs[0].shape, made.operation.outputs[0].shape
            kept = tuple(params["broadcast_dimensions"])
            if axis not in kept or before[kept.index(axis)] != after[axis]:
                return False
            return _is_position(program, maker, made.inputs[0], kept.index(axis))
        case "select_n":
            # What an index below zero stands for: of positions, none is.
            below = _made(program, maker, made.inputs[0])
            return (
                below is not None
                and below.operation.primitive == "lt"
                and below.inputs[0] == made.inputs[1]
                and isinstance(below.inputs[1], Constant)
                and below.inputs[1].value == 0
                and _is_position(program, maker, made.inputs[1], axis)
            )
        case _:
            return False


def _made(program: Program, maker: Mapping[int, int], value: object) -> Equation | None:
    """The equation that makes a value; none makes a literal or an argument."""
    made = maker.get(value) if isinstance(value, int) else None
    return None if made is None else program.equations[made]
