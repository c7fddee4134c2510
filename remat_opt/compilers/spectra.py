"""What a Fourier transform takes on TPU, where XLA computes it by products.

Real and imaginary parts are arrays of their own. That of real numbers is computed in full, and
kept so: ``rfft`` of 1,024 numbers is stored as 1,024 of each, of which readers take 513. (Layers
that filter ``f32[8,1024,512]`` over time, padded to 2,048, keep 64 MiB each.)
"""

from __future__ import annotations

import dataclasses

from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import ArrayType
from remat_opt.program.record import Program


def whole(program: Program, compiler: Compiler) -> dict[int, ArrayType]:
    """For each result of a transform of real numbers, what is stored (``spectra_whole``)."""
    found: dict[int, ArrayType] = {}
    if not compiler.has("spectra_whole"):
        return found
    for equation in program.equations:
        operation = equation.operation
        if operation.primitive == "fft" and operation.inputs[0].dtype in ("float32", "float64"):
            kind = operation.outputs[0]
            shape = (*kind.shape[:-1], int(operation.params["fft_lengths"][-1]))
            found[equation.outputs[0]] = dataclasses.replace(kind, shape=shape)
    return found
