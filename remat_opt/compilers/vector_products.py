"""Products with a vector, which XLA for TPU does not compute as products of matrices.

Where one side has no axis of its own, or one of length 1, it multiplies and sums, as in a head with
one output, in ``einsum("btdn,btn->btd")`` or in a weighted sum over experts: nothing is rounded,
and the gradient of the other side is that of a sum, broadcast and multiplied. Where nothing is
summed, as in ``einsum("btd,btn->btdn")``, it multiplies, elementwise: no array is written.
(``vector_products``; three layers of ``f32[64,1024,512]``, each with such a product, unchanged: 771
and 769 MiB, predicted before 898 and 2,113.)
"""

from __future__ import annotations

import dataclasses
import math

from remat_opt.compilers.compiler import Compiler
from remat_opt.costs import OUTER_PRODUCT, VECTOR_PRODUCT
from remat_opt.operation import Operation
from remat_opt.program.record import Equation, Program


def as_compiled(program: Program, compiler: Compiler) -> Program:
    """The program, with names of their own for its products with vectors.

    Args:
      program: a traced function.
      compiler: the compiler.
    """
    if not compiler.has("vector_products"):
        return program
    equations = tuple(map(_as_compiled, program.equations))
    changed = any(
        one is not before for one, before in zip(equations, program.equations, strict=True)
    )
    return dataclasses.replace(program, equations=equations) if changed else program


def as_written(operation: Operation) -> str:
    """What an operation is called in the program."""
    of_vectors = operation.primitive in (OUTER_PRODUCT, VECTOR_PRODUCT)
    return "dot_general" if of_vectors else operation.primitive


def _as_compiled(equation: Equation) -> Equation:
    operation = equation.operation
    if operation.primitive != "dot_general":
        return equation
    contracted, batch = operation.params["dimension_numbers"]
    summed = math.prod(operation.inputs[0].shape[axis] for axis in contracted[0])
    own = (
        math.prod(
            size
            for axis, size in enumerate(kind.shape)
            if axis not in contracted[side] and axis not in batch[side]
        )
        for side, kind in enumerate(operation.inputs)
    )
    if summed == 1:
        primitive = OUTER_PRODUCT
    elif 1 in own:
        primitive = VECTOR_PRODUCT
    else:
        return equation
    return dataclasses.replace(
        equation, operation=dataclasses.replace(operation, primitive=primitive)
    )
