"""Batched products: what XLA for NVIDIA writes of the cotangents that they read.

The library takes a stack of matrices. If the rows or the columns of a batched product are several
axes of the program, as the queries and the heads of a group in grouped-query attention, XLA merges
them, and a matrix made of merged axes is read as it lies. The two products of the backward step
then want the cotangent of the result in one order if one operand of the product has its contracted
axes first and the other last, and otherwise in two. XLA writes both. (Without batch axes, or if
rows and columns are one axis each, one array is read either way.) Three layers of grouped-query
attention with weights of 128 MiB, each under a checkpoint, take 929 MiB on h200, and 673 with the
keys repeated for every head.

A product with an algorithm such as ``BF16_BF16_F32``, which ``jax.nn.dot_product_attention`` asks
for, reads its operands in that type. So what it writes in float32 has a cotangent in bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import ArrayType, Operation

#: The types that JAX's names of algorithms begin with, if narrower than what they write.
_READS: Final = {"BF16": "bfloat16", "F16": "float16"}


def reads_two_orders(operation: Operation, compiler: Compiler) -> bool:
    """Whether the products of the backward step read the result's cotangent in two orders.

    Args:
      operation: any.
      compiler: the compiler.
    """
    if operation.primitive != "dot_general" or not compiler.has("orders"):
        return False
    contracted, batched = operation.params["dimension_numbers"]
    # The batch axes of both operands have the same lengths.
    if all(operation.inputs[0].shape[axis] == 1 for axis in batched[0]):
        return False
    merged, contracted_first = False, set()
    for kind, summed, batch in zip(operation.inputs, contracted, batched, strict=True):
        free = [
            axis
            for axis, length in enumerate(kind.shape)
            if length > 1 and axis not in (*summed, *batch)
        ]
        merged |= len(free) > 1
        contracted_first.add(min(summed, default=-1) < min(free, default=0))
    return merged and len(contracted_first) == 1


def as_read(operation: Operation, kind: ArrayType, compiler: Compiler) -> ArrayType:
    """The type in which products read the cotangent of what the operation writes.

    Args:
      operation: any.
      kind: the type of what it writes.
      compiler: the compiler.
    """
    algorithm = getattr(operation.params.get("precision"), "name", "")
    dtype = _READS.get(algorithm.partition("_")[0])
    if dtype is None or kind.dtype != "float32" or not compiler.has("algorithms"):
        return kind
    return dataclasses.replace(kind, dtype=dtype)
