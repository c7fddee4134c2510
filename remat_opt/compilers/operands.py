"""What XLA for TPU stores of what its products read (``operands_fused``).

Its products read float32 operands as bfloat16, unless the program asks for more precision. So what
only they read is rounded before it is stored, and if another product makes it, by that product's
kernel: the queries of attention, for example, with their bias and scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import PRODUCTS, SCATTERS, ArrayType, Operation
from remat_opt.program.dataflow import ALIASES, Dataflow
from remat_opt.program.record import Program

#: What a product sees through: its operand is assembled as it is read.
_MOVES = frozenset({"concatenate", "slice", "stack"})


def as_operand(kind: ArrayType) -> ArrayType:
    """The type in which an array is stored if only products read it, at default precision."""
    return dataclasses.replace(kind, dtype="bfloat16") if kind.dtype == "float32" else kind


def rounded(flow: Dataflow, outputs: Set[int]) -> dict[int, int]:
    """The float32 values that are stored as bfloat16, with how many products read them.

    Nothing else reads them, forward or backward: the result of a pooling before a convolution is an
    example. A single product may read its value in parts, or with others. Sums of rows that were
    added up at places are written in full, and nothing rounds them for a product that reads them as
    they are.

    Args:
      flow: of the program.
      outputs: its output values, aliases resolved.
    """
    readers: dict[int, int] = {}
    others = set(outputs)
    equations = flow.program.equations
    sums = {one.outputs[0] for one in equations if one.operation.primitive in SCATTERS}
    for index in reversed(range(len(equations))):
        equation = equations[index]
        if flow.is_alias(index):
            continue
        derivative = flow.linearization.derivatives.get(index)
        if derivative is not None:
            others.update(equation.outputs[position] for position in derivative.outputs)
        read = flow.reads(index)
        if rounds_operands(equation.operation):
            count = 1
            others.update(sums.intersection(read))
        else:
            count = 0
            if equation.operation.primitive in _MOVES and others.isdisjoint(equation.outputs):
                count = readers.get(equation.outputs[0], 0)
            if count != 1:
                others.update(read)
        for value in read:
            readers[value] = readers.get(value, 0) + count
    return {
        value: count
        for value, count in readers.items()
        if value not in others and flow.program.types[value].dtype == "float32"
    }


def rounded_entries_bytes(body: Program, entries: Sequence[int], compiler: Compiler) -> int:
    """Bytes of one entry of the stacks that XLA rounds before a loop, and reads in their place.

    It turns the conversion of an entry into one of the whole stack, done once: both that of a
    product's operand, and one that the body has itself, as for weights to compute with in bfloat16.

    Args:
      body: the loop's body.
      entries: its arguments that are entries of stacks.
      compiler: the compiler.
    """
    if not compiler.has("entries_rounded"):
        return 0
    source = {value: value for value in entries if body.types[value].dtype == "float32"}
    found: dict[tuple[int, str], ArrayType] = {}
    for equation in body.equations:
        read = [source[value] for value in equation.value_inputs if value in source]
        if equation.operation.primitive in ALIASES:
            source.update((value, read[0]) for value in equation.outputs if read)
        elif rounds_operands(equation.operation):
            for value in read:
                kind = as_operand(body.types[value])
                found[value, kind.dtype] = kind
        elif equation.operation.primitive == "convert_element_type" and read:
            kind = equation.operation.outputs[0]
            if kind.bytes < body.types[read[0]].bytes:
                found[read[0], kind.dtype] = kind
    return sum(map(compiler.buffer_bytes, found.values()))


def completed(flow: Dataflow, outputs: Set[int], rounded: Mapping[int, int]) -> dict[int, int]:
    """For each product stored only in a biased, scaled and rounded form, that form.

    Args:
      flow: of the program.
      outputs: its output values, aliases resolved.
      rounded: those found by the function of that name.

    Returns:
      For what such a product writes, the value stored in its place.
    """
    if not rounded:
        return {}
    readers = flow.readers()
    of_arguments = _of_arguments(flow)
    found = {}
    for equation in flow.program.equations:
        if equation.operation.primitive not in PRODUCTS:
            continue
        (first,) = equation.outputs
        last = first
        while last not in rounded and last not in outputs and len(readers.get(last, ())) == 1:
            (reader,) = readers[last]
            if _only_operand(flow, reader, of_arguments) != last:
                break
            (last,) = flow.program.equations[reader].outputs
        if last != first and rounded.get(last) == 1:
            found[first] = last
    return found


def rounds_operands(operation: Operation) -> bool:
    """Whether the operation is a product at JAX's default precision."""
    precision = operation.params.get("precision")
    sides = precision if isinstance(precision, tuple) else (precision,)
    return operation.primitive in PRODUCTS and all(
        side is None or str(side).endswith("DEFAULT") for side in sides
    )


def is_batched(operation: Operation) -> bool:
    """Whether the operation is a product of several pairs of matrices."""
    if operation.primitive != "dot_general":
        return False
    _, (batch, _) = operation.params["dimension_numbers"]
    return bool(batch)


def _only_operand(flow: Dataflow, index: int, of_arguments: Set[int]) -> int | None:
    """What a bias or a scale is applied to, if the derivative does not read it."""
    operands = [value for value in flow.reads(index) if value not in of_arguments]
    outputs = flow.program.equations[index].outputs
    if len(operands) != 1 or len(outputs) != 1:
        return None
    before, after = (flow.program.types[value] for value in (operands[0], outputs[0]))
    if (before.size, before.dtype) != (after.size, after.dtype):
        return None
    if flow.costs[index].fusion is not costs.Fusion.FUSIBLE:
        return None
    return None if operands[0] in flow.derivative_reads(index) else operands[0]


def _of_arguments(flow: Dataflow) -> set[int]:
    """The values computed elementwise from arguments alone, such as a bias."""
    found: set[int] = set()
    for index, equation in enumerate(flow.program.equations):
        fusible = flow.costs[index].fusion is costs.Fusion.FUSIBLE
        if fusible and found.issuperset(flow.reads(index)):
            found.update(equation.outputs)
    return found
