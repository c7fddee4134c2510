"""Matrix products take 2 M N K FLOPs for each batch element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost

SHAPES = {
    "matrix": ("ij,jk->ik", (20, 7), (7, 11)),
    "matrix transposed": ("ji,jk->ik", (7, 20), (7, 11)),
    "batched": ("bij,bjk->bik", (3, 20, 7), (3, 7, 11)),
    "attention scores": ("bqhd,bkhd->bhqk", (2, 9, 4, 8), (2, 13, 4, 8)),
    "two contracted axes": ("bhqd,hdm->bqm", (2, 4, 9, 8), (4, 8, 5)),
    "matrix times vector": ("ij,j->i", (20, 7), (7,)),
    "outer": ("bi,bj->bij", (3, 5), (3, 6)),
}


@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64"])
@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_the_compilers(name: str, dtype: str, ours: Any, compiled: Any) -> None:
    equation, *shapes = SHAPES[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]

    def product(a: Any, b: Any) -> Any:
        return jnp.einsum(equation, a, b)

    if name == "outer":
        # Nothing is contracted: the compiler multiplies elementwise and adds nothing.
        assert ours(product, *args).flops == 2 * compiled(product, *args).flops
    else:
        assert ours(product, *args) == compiled(product, *args)


def test_a_product_of_vectors_is_one_addition_too_many(ours: Any, compiled: Any) -> None:
    vector = jax.ShapeDtypeStruct((7,), jnp.float32)
    assert ours(jnp.dot, vector, vector).flops == compiled(jnp.dot, vector, vector).flops + 1


def test_ragged_product_takes_each_row_through_one_group(only: Any) -> None:
    operation = only(lax.ragged_dot, jnp.ones((10, 4)), jnp.ones((3, 4, 5)), jnp.array([2, 3, 5]))
    assert cost(operation).flops == 2 * 10 * 4 * 5


def test_opaque_and_bytes(only: Any) -> None:
    left = jax.ShapeDtypeStruct((20, 7), jnp.bfloat16)
    right = jax.ShapeDtypeStruct((7, 11), jnp.bfloat16)
    answer = cost(only(lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32), left, right))
    assert answer.fusion is Fusion.OPAQUE
    assert (answer.bytes_read, answer.bytes_written) == (2 * (20 * 7 + 7 * 11), 4 * 20 * 11)
    assert not answer.estimated
