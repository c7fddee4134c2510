"""Cholesky and the triangular solve cost what the compiler says; the others are textbook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

SQUARE = jax.ShapeDtypeStruct((3, 30, 30), jnp.float32)
TALL = jax.ShapeDtypeStruct((3, 40, 10), jnp.float32)


def test_cholesky(ours: Any, unexpanded: Any) -> None:
    def cholesky(a: jax.Array) -> Any:
        return lax.linalg.cholesky(a, symmetrize_input=False)

    # JAX blanks the upper half in separate equations, some of which XLA folds away.
    assert ours(cholesky, SQUARE).flops == pytest.approx(
        unexpanded(cholesky, SQUARE).flops, rel=0.05
    )


@pytest.mark.parametrize("left_side", [True, False])
def test_triangular_solve(left_side: bool, only: Any, ours: Any, unexpanded: Any) -> None:
    right = jax.ShapeDtypeStruct((3, 30, 7) if left_side else (3, 7, 30), jnp.float32)

    def solve(a: jax.Array, b: jax.Array) -> Any:
        return lax.linalg.triangular_solve(a, b, left_side=left_side, lower=True)

    assert ours(solve, SQUARE, right) == unexpanded(solve, SQUARE, right)
    assert not cost(only(solve, SQUARE, right)).estimated


CASES: dict[str, tuple[Callable[[jax.Array], Any], Any, int]] = {
    "lu": (lax.linalg.lu, SQUARE, 3 * 18_000),
    "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), TALL, 2 * 3 * (8000 - 666)),
    "qr, all columns": (
        lambda a: lax.linalg.qr(a, full_matrices=True),
        TALL,
        3 * (8000 - 666 + 4 * (16_000 - 4000 + 333)),
    ),
    "svd, all vectors": (
        lambda a: lax.linalg.svd(a, full_matrices=True),
        TALL,
        3 * (4 * 16_000 + 22_000),
    ),
    "svd": (lambda a: lax.linalg.svd(a, full_matrices=False), TALL, 3 * (24_000 + 20_000)),
    "singular values": (lambda a: lax.linalg.svd(a, compute_uv=False), TALL, 3 * 10_000),
    "eigh": (lambda a: lax.linalg.eigh(a, symmetrize_input=False), SQUARE, 3 * 9 * 27_000),
    "schur": (lax.linalg.schur, SQUARE, 3 * 25 * 27_000),
    "eig": (lax.linalg.eig, SQUARE, 3 * 27 * 27_000),
    "hessenberg": (lax.linalg.hessenberg, SQUARE, 3 * 90_000),
}


@pytest.mark.parametrize("name", CASES)
def test_textbook_counts_are_flagged(name: str, operations: Any) -> None:
    fn, array, flops = CASES[name]
    (answer,) = [
        answer for answer in map(cost, operations(fn, array)) if answer.fusion is Fusion.OPAQUE
    ]
    assert answer.flops == flops
    assert answer.estimated
