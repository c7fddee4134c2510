"""Which axes of an array are those of matrices: a TPU's compiler stores them innermost.

A batched product multiplies one matrix for each index of its batch axis. XLA for TPU stores the two
other axes innermost, in the order that pads less, and does the same with elementwise values on the
way to such a product: 32,768 times 9 embeddings of 64, multiplied with one another, are padded to
16 x 128. With several batch axes, as in attention and in dispatching to experts, one of these may
also be innermost: ``bf16[256,256,4,144]`` is not padded.
"""

from __future__ import annotations

from collections.abc import Collection

from remat_opt import costs
from remat_opt.program.record import Program

#: Two axes of an array.
Axes = tuple[int, int]


def matrix_axes(program: Program) -> dict[int, Axes]:
    """For each value that a batched product reads or writes, the two axes of its matrices.

    What such a value is computed from elementwise has them too.
    """
    found: dict[int, Axes] = {}

    def note(value: int, batch: Collection[int]) -> None:
        others = [axis for axis in range(len(program.types[value].shape)) if axis not in batch]
        if len(others) == 2:
            found.setdefault(value, (others[0], others[1]))

    for equation in reversed(program.equations):
        operation = equation.operation
        if operation.primitive == "dot_general":
            _, batch = operation.params["dimension_numbers"]
            if len(batch[0]) == 1:
                note(equation.outputs[0], range(len(batch[0])))
                for atom, axes in zip(equation.inputs, batch, strict=True):
                    if isinstance(atom, int):
                        note(atom, axes)
            continue
        axes = next((found[value] for value in equation.outputs if value in found), None)
        if axes is None:
            continue
        if operation.primitive == "transpose":
            order = operation.params["permutation"]
            axes = order[axes[0]], order[axes[1]]
        elif costs.cost(operation).fusion is not costs.Fusion.FUSIBLE:
            continue
        shape = operation.outputs[0].shape
        for value in equation.value_inputs:
            if operation.primitive == "transpose" or program.types[value].shape == shape:
                found.setdefault(value, axes)
    return found
