"""Array types know their bytes, for every dtype JAX has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from remat_opt.operation import ArrayType, Operation

DTYPES = [
    *("bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_numpys(dtype: str) -> None:
    assert ArrayType(shape=(3, 5), dtype=dtype).bytes == 15 * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_narrow_elements_are_packed_and_rounded_up(dtype: str) -> None:
    assert str(np.dtype(getattr(ml_dtypes, dtype))) == dtype
    assert ArrayType(shape=(3, 5), dtype=dtype).bytes == 8
    assert ArrayType(shape=(9,), dtype="int2").bytes == 3


@pytest.mark.parametrize(("implementation", "words"), [("threefry2x32", 2), ("rbg", 4)])
def test_keys_count_as_their_words(implementation: str, words: int) -> None:
    keys = jax.eval_shape(lambda: jax.random.key(0, impl=implementation))
    assert ArrayType(shape=(7,), dtype=str(keys.dtype)).bytes == 7 * words * 4


def test_keys_of_an_unknown_generator_count_as_the_usual_ones() -> None:
    assert ArrayType(shape=(), dtype="key<mine>").bytes == 8


def test_tangents_of_integers_count_as_booleans() -> None:
    assert ArrayType(shape=(6,), dtype=str(jax.dtypes.float0)).bytes == 6
    assert ArrayType(shape=(6,), dtype=str(np.dtype(jax.dtypes.float0))).bytes == 6


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"dtype 'object' is not known"):
        _ = ArrayType(shape=(2,), dtype="object").bytes


def test_empty_arrays_and_scalars() -> None:
    assert ArrayType(shape=(0, 5), dtype="float32").bytes == 0
    assert ArrayType(shape=(), dtype="float32").size == 1


def test_an_operation_sums_its_arrays() -> None:
    wide = ArrayType(shape=(3,), dtype="float64")
    narrow = ArrayType(shape=(4,), dtype="int8")
    operation = Operation(primitive="f", inputs=(wide, narrow, wide), outputs=(narrow, wide))
    assert operation.input_bytes == 52
    assert operation.output_bytes == 28
    assert operation.output_size == 7
