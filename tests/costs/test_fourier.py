"""Fourier transforms cost what the compiler says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

COMPLEX = jax.ShapeDtypeStruct((4, 16, 96), jnp.complex64)
REAL = jax.ShapeDtypeStruct((4, 16, 128), jnp.float32)
HALF = jax.ShapeDtypeStruct((4, 16, 65), jnp.complex64)

CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "forward": (lambda x: lax.fft(x, "fft", (96,)), COMPLEX),
    "inverse": (lambda x: lax.fft(x, "ifft", (96,)), COMPLEX),
    "two axes": (lambda x: lax.fft(x, "fft", (16, 96)), COMPLEX),
    "of reals": (lambda x: lax.fft(x, "rfft", (128,)), REAL),
    "to reals": (lambda x: lax.fft(x, "irfft", (128,)), HALF),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_are_the_compilers(name: str, ours: Any, operations: Any, compiled: Any) -> None:
    fn, array = CASES[name]
    assert ours(fn, array) == compiled(fn, array)
    assert cost(operations(fn, array)[-1]).fusion is Fusion.OPAQUE
