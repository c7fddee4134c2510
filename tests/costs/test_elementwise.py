"""Elementwise operations cost what the compiler says, and fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

FLOAT = jax.ShapeDtypeStruct((7, 13), jnp.float32)
INTEGER = jax.ShapeDtypeStruct((7, 13), jnp.int32)
BOOLEAN = jax.ShapeDtypeStruct((7, 13), jnp.bool_)
COMPLEX = jax.ShapeDtypeStruct((7, 13), jnp.complex64)

UNARY = [
    "abs",
    "acos",
    "acosh",
    "asinh",
    "atan",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "is_finite",
    "log",
    "log1p",
    "logistic",
    "neg",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
BINARY = [
    "add",
    "atan2",
    "complex",
    "div",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "nextafter",
    "pow",
    "rem",
    "sub",
]
INTEGER_UNARY = ["abs", "bitwise_not", "clz", "neg", "population_count", "sign"]
INTEGER_BINARY = [
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "div",
    "eq",
    "max",
    "min",
    "mul",
    "rem",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sub",
]

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{name: (getattr(lax, name), (FLOAT,)) for name in UNARY},
    **{name: (getattr(lax, name), (FLOAT, FLOAT)) for name in BINARY},
    **{f"integer {name}": (getattr(lax, name), (INTEGER,)) for name in INTEGER_UNARY},
    **{f"integer {name}": (getattr(lax, name), (INTEGER, INTEGER)) for name in INTEGER_BINARY},
    **{
        f"power {y}": (lambda x, y=y: lax.integer_pow(x, y), (FLOAT,))
        for y in (-3, -2, -1, 2, 3, 4, 5, 6, 7, 15)
    },
    "complex add": (lax.add, (COMPLEX, COMPLEX)),
    "complex mul": (lax.mul, (COMPLEX, COMPLEX)),
    "real": (lax.real, (COMPLEX,)),
    "imag": (lax.imag, (COMPLEX,)),
    "select": (lax.select_n, (BOOLEAN, FLOAT, FLOAT)),
    "select of 3": (lax.select_n, (INTEGER, FLOAT, FLOAT, FLOAT)),
    "select of 5": (lax.select_n, (INTEGER, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT)),
    "clamp": (lambda x: lax.clamp(0.0, x, 1.0), (FLOAT,)),
    "convert": (lambda x: lax.convert_element_type(x, jnp.bfloat16), (FLOAT,)),
    "convert boolean": (lambda x: lax.convert_element_type(x, jnp.float32), (BOOLEAN,)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (FLOAT,)),
    "reduce precision": (lambda x: lax.reduce_precision(x, 5, 10), (FLOAT,)),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_are_the_compilers(name: str, only: Any, ours: Any, compiled: Any) -> None:
    fn, args = CASES[name]
    operation = only(fn, *args)
    assert ours(fn, *args) == compiled(fn, *args)
    assert cost(operation).fusion is Fusion.FUSIBLE
    assert not cost(operation).estimated


@pytest.mark.parametrize("name", ["asin", "digamma", "lgamma", "zeta"])
def test_special_functions_that_compilers_expand_differently(
    name: str, only: Any, ours: Any, compiled: Any
) -> None:
    """Versions differ: the count is right to a factor of 10."""
    fn = getattr(lax, name)
    args = (FLOAT, FLOAT) if name == "zeta" else (FLOAT,)
    assert compiled(fn, *args).flops / 10 < ours(fn, *args).flops < 10 * compiled(fn, *args).flops
    assert cost(only(fn, *args)).fusion is Fusion.FUSIBLE


@pytest.mark.parametrize("name", ["igamma", "igammac"])
def test_functions_that_iterate_are_opaque_and_estimated(name: str, only: Any) -> None:
    answer = cost(only(getattr(lax, name), FLOAT, FLOAT))
    assert answer.estimated
    assert answer.fusion is Fusion.OPAQUE


@pytest.mark.parametrize("name", ["tanh", "logistic", "exp", "rsqrt", "log1p"])
def test_derivatives_are_the_compilers_within_2_flops_an_element(
    name: str, ours: Any, compiled: Any
) -> None:
    """Versions differ in the equations a derivative is made of, and the compiler folds some."""

    def derivative(x: jax.Array, tangent: jax.Array) -> Any:
        return jax.jvp(getattr(lax, name), (x,), (tangent,))[1]

    counted = compiled(derivative, FLOAT, FLOAT)
    assert abs(ours(derivative, FLOAT, FLOAT).flops - counted.flops) <= 2 * 91


def test_half_precision_counts_as_much_as_single(ours: Any) -> None:
    """Only CPU converts to float32 and back; its count is not followed."""
    half = jax.ShapeDtypeStruct(FLOAT.shape, jnp.bfloat16)
    assert ours(lax.add, half, half) == ours(lax.add, FLOAT, FLOAT)


def test_a_change_of_weak_type_is_free(only: Any) -> None:
    operation = only(lambda x: lax.convert_element_type(x, jnp.float32), 1.0)
    assert operation.primitive == "convert_element_type"
    assert cost(operation).flops == 0


def test_bytes_are_those_of_inputs_and_outputs(only: Any) -> None:
    answer = cost(only(lax.select_n, BOOLEAN, FLOAT, FLOAT))
    assert answer.bytes_read == 91 * (1 + 4 + 4)
    assert answer.bytes_written == 91 * 4
