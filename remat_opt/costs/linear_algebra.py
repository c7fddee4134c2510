"""Dense factorisations and solves: textbook counts.

They run as library calls or loops, whose FLOPs ``cost_analysis()`` does not see, except
the two that XLA knows itself: Cholesky and the triangular solve follow its count. The
others are from Golub and Van Loan, Matrix Computations (4th edition), and flagged as
estimated: iterative ones depend on the data.
"""

from __future__ import annotations

import math

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import register
from remat_opt.operation import Operation


def _opaque(operation: Operation, flops: int, *, estimated: bool) -> Cost:
    return Cost(
        flops=flops,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
        estimated=estimated,
    )


def _matrices(operation: Operation) -> tuple[int, int, int]:
    """How many matrices the first input holds, and the longer and shorter side of one."""
    *batch, rows, columns = operation.inputs[0].shape
    return math.prod(batch), max(rows, columns), min(rows, columns)


@register("cholesky")
def cholesky(operation: Operation) -> Cost:
    """n**3 / 3, as XLA's HandleCholesky."""
    matrix = operation.inputs[0]
    return _opaque(operation, matrix.size * matrix.shape[-1] // 3, estimated=False)


@register("triangular_solve")
def triangular_solve(operation: Operation) -> Cost:
    """2 n for each element of the right-hand side, as XLA's HandleTriangularSolve."""
    matrix, right = operation.inputs[:2]
    return _opaque(operation, 2 * matrix.shape[-1] * right.size, estimated=False)


@register("lu")
def lu(operation: Operation) -> Cost:
    """M n**2 - n**3 / 3, which is 2/3 n**3 for a square matrix."""
    count, long, short = _matrices(operation)
    return _opaque(operation, count * (long * short**2 - short**3 // 3), estimated=True)


@register("qr", "geqrf", "geqp3", "householder_product")
def qr(operation: Operation) -> Cost:
    """2 m n**2 - 2/3 n**3 for the reflectors, and the same again for forming Q.

    All m columns of Q take 4 (m**2 n - m n**2 + n**3 / 3) (section 5.2.2).
    """
    count, long, short = _matrices(operation)
    flops = forming = 2 * long * short**2 - 2 * short**3 // 3
    if operation.primitive != "qr":
        forming = 0
    elif operation.outputs[0].shape[-1] > short:
        forming = 4 * (long**2 * short - long * short**2 + short**3 // 3)
    return _opaque(operation, count * (flops + forming), estimated=True)


# Multiples of n**3, by the outputs asked for (Golub and Van Loan, sections 7.5 and 8.3).
_EIGENVALUES_ONLY = {"eigh": 2, "eig": 10, "schur": 10}
_WITH_VECTORS = {"eigh": 9, "eig": 27, "schur": 25}


@register("eigh", "eig", "schur")
def eigenvalues(operation: Operation) -> Cost:
    """A multiple of n**3: 9 for the symmetric problem with vectors, about 25 for the general."""
    count, order, _ = _matrices(operation)
    table = _EIGENVALUES_ONLY if len(operation.outputs) == 1 else _WITH_VECTORS
    return _opaque(operation, count * table[operation.primitive] * order**3, estimated=True)


@register("svd")
def singular_values(operation: Operation) -> Cost:
    """6 m n**2 + 20 n**3 with vectors, 2 m n**2 + 2 n**3 without (section 8.6).

    With all m vectors of the longer side, it is 4 m**2 n + 22 n**3.
    """
    count, long, short = _matrices(operation)
    if len(operation.outputs) == 1:
        flops = 2 * long * short**2 + 2 * short**3
    elif max(one.shape[-1] * one.shape[-2] for one in operation.outputs[1:]) > long * short:
        flops = 4 * long**2 * short + 22 * short**3
    else:
        flops = 6 * long * short**2 + 20 * short**3
    return _opaque(operation, count * flops, estimated=True)


@register("hessenberg", "tridiagonal")
def condensed_form(operation: Operation) -> Cost:
    """10/3 n**3 to Hessenberg form, 4/3 n**3 to tridiagonal form."""
    count, order, _ = _matrices(operation)
    thirds = 10 if operation.primitive == "hessenberg" else 4
    return _opaque(operation, count * thirds * order**3 // 3, estimated=True)


@register("tridiagonal_solve")
def tridiagonal_solve(operation: Operation) -> Cost:
    """8 for each unknown (the Thomas algorithm)."""
    return _opaque(operation, 8 * operation.output_size, estimated=True)


@register("lu_pivots_to_permutation")
def permutation(operation: Operation) -> Cost:
    """Swaps only."""
    return _opaque(operation, 0, estimated=False)
