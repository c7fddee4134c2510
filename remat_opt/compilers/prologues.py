"""What products read in place of an operand that is cheap to compute from one array.

XLA for NVIDIA fuses into a product of matrices what its operand is computed with, as long as that
reads no more bytes than the operand has: a ``relu``, a wider type, heads that are repeated. It does
so for the products of the gradient, too, and the operand is never stored. A ``relu`` between two
layers of an MLP is computed from what the first product writes, bias and all. Where two arrays go
in, as into a gated unit or the end of a normalisation, the operand is stored, and so is all that a
convolution reads. An argument as large as the operand is such an array: that which a loop hands to
its body. (As in the compiler's ``gemm_fusion``, and seen on h200.)
"""

from __future__ import annotations

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler
from remat_opt.program.dataflow import Dataflow


def read_in_place(flow: Dataflow, value: int, compiler: Compiler) -> int:
    """The value that a matrix product reads in place of its operand, often the operand itself.

    Args:
      flow: the program's dataflow.
      value: the operand, aliases resolved.
      compiler: the compiler.
    """
    if not compiler.has("prologues"):
        return value
    types, arguments = flow.program.types, set(flow.program.arguments)
    # What is made only from arguments, such as a bias, is read in addition.
    alone, found = True, value
    while value in flow.maker:
        index = flow.maker[value]
        equation = flow.program.equations[index]
        if flow.costs[index].fusion is not costs.Fusion.FUSIBLE or flow.opaque(index):
            return value
        read = {flow.source[one] for one in equation.value_inputs}
        arrays = [one for one in read if not _is_of(flow, one, arguments, types[value].size)]
        if (
            len(arrays) != 1
            or types[arrays[0]].bytes > types[value].bytes
            or flow.costs[index].flops > types[value].size
        ):
            break
        alone = alone and len(read) == 1
        (value,) = arrays
        found = value if alone else found
    return found


def _is_of(flow: Dataflow, value: int, arguments: set[int], size: int) -> bool:
    """Whether a value is an argument of fewer than so many elements, or a broadcast of one."""
    while value in flow.maker:
        equation = flow.program.equations[flow.maker[value]]
        if equation.operation.primitive != "broadcast_in_dim" or not equation.value_inputs:
            return False
        value = flow.source[equation.value_inputs[0]]
    return value in arguments and flow.program.types[value].size < size
