"""Which axes of an array are those of matrices: a TPU's compiler stores them innermost.

A batched product multiplies one matrix for each index of its batch axes. XLA for TPU stores two of
the other axes innermost, those that pad less, and does the same with elementwise values on the way
to such a product, and with what is only reshaped on that way. 32,768 times 9 embeddings of 64,
multiplied with one another, are padded to 16 x 128, and the scores of attention between 197 tokens
to 200 x 256, however many examples and heads there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from remat_opt import costs
from remat_opt.program.record import Program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """How an array is laid out.

    Attributes:
      shape: the shape in which it is stored.
      axes: two of these axes of it are innermost.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]


def matrix_axes(program: Program) -> dict[int, Matrices]:
    """The matrices in each value that a batched product reads or writes.

    What such a value is computed from elementwise, or reshaped from, has them too. If a product
    writes a value and another one reads it, what the reader wants goes first.
    """
    found: dict[int, Matrices] = {}

    def note(value: int, batch: Collection[int]) -> None:
        shape = program.types[value].shape
        others = tuple(axis for axis in range(len(shape)) if axis not in batch)
        if len(others) > 1:
            found.setdefault(value, Matrices(shape=shape, axes=others))

    for equation in reversed(program.equations):
        operation = equation.operation
        if operation.primitive == "dot_general":
            _, batch = operation.params["dimension_numbers"]
            if batch[0]:
                note(equation.outputs[0], range(len(batch[0])))
                for atom, axes in zip(equation.inputs, batch, strict=True):
                    if isinstance(atom, int):
                        note(atom, axes)
            continue
        known = next((found[value] for value in equation.outputs if value in found), None)
        if known is None:
            continue
        moved = operation.primitive in ("transpose", "reshape")
        if operation.primitive == "transpose" and known.shape == operation.outputs[0].shape:
            order = operation.params["permutation"]
            known = Matrices(
                shape=operation.inputs[0].shape, axes=tuple(order[axis] for axis in known.axes)
            )
        elif not moved and costs.cost(operation).fusion is not costs.Fusion.FUSIBLE:
            continue
        shape = operation.outputs[0].shape
        for value in equation.value_inputs:
            if moved or program.types[value].shape == shape:
                found.setdefault(value, known)
    return found
