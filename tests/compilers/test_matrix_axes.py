"""Which axes a TPU's compiler stores innermost, compared with what was seen compiled."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from remat_opt.compilers.matrix_axes import matrix_axes
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from tests.compiler_graphs import compiler_of

TOKENS, WIDTH, DEPTH = 24, 16, 8


def attention(parameters, x):
    query, key, value = (
        (jnp.einsum("btw,wd->btd", x, weight) + bias) / 2 for weight, bias in parameters
    )
    weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", query, key))
    return jnp.sum(jnp.einsum("bqk,bkd->bqd", weights, value))


def axes_by_shape(fn, *args):
    program = tracing.trace(fn, *args)
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for value, matrices in matrix_axes(program).items():
        assert matrices.shape == program.types[value].shape
        found.setdefault(matrices.shape, set()).add(matrices.axes)
    return program, found


def test_of_attention_tokens_and_channels_are_innermost() -> None:
    one = jnp.ones((WIDTH, DEPTH)), jnp.ones((DEPTH,))
    x = jnp.ones((3, TOKENS, WIDTH))
    program, found = axes_by_shape(attention, [one] * 3, x)
    # Of queries, keys and values, including biases, whatever lies between them and the product.
    assert found[(3, TOKENS, DEPTH)] == {(1, 2)}
    assert found[(3, TOKENS, TOKENS)] == {(1, 2)}
    # What the projections read is not an operand of a batched product; nor are weights.
    assert (3, TOKENS, WIDTH) not in found
    assert (WIDTH, DEPTH) not in found
    by_products = {
        equation.outputs[0]
        for equation in program.equations
        if equation.operation.primitive == "dot_general"
    }
    assert by_products <= matrix_axes(program).keys()


def test_a_transposed_operand_has_them_where_it_comes_from() -> None:
    def loss(x, y):
        moved = jnp.transpose(jnp.sin(x), (2, 0, 1))
        return jnp.sum(jnp.einsum("bij,bjk->bik", moved, y))

    program, found = axes_by_shape(loss, jnp.ones((4, 5, 3)), jnp.ones((3, 5, 6)))
    assert found[(3, 4, 5)] == {(1, 2)}
    assert found[(4, 5, 3)] == {(0, 1)}
    assert program.equations[0].outputs[0] in matrix_axes(program)


def test_of_several_batch_axes_none_is_innermost() -> None:
    def loss(x, y):
        return jnp.sum(jnp.einsum("abij,abjk->abik", jnp.sin(x), y))

    _, found = axes_by_shape(loss, jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 5, 6)))
    assert set(found) == {(2, 3, 4, 5), (2, 3, 5, 6), (2, 3, 4, 6)}
    assert set.union(*found.values()) == {(2, 3)}


def test_what_is_dispatched_lies_as_it_is_read() -> None:
    # Each token's expert and slot in it: a product of one matrix for each token writes what the
    # tokens of each group are multiplied with.
    def loss(expert, slot, x):
        send = jnp.einsum("gske,gskc->gsec", expert, slot)
        return jnp.sum(jnp.einsum("gsec,gsw->gecw", send, x) ** 2)

    _, found = axes_by_shape(
        loss, jnp.ones((2, 16, 3, 4)), jnp.ones((2, 16, 3, 5)), jnp.ones((2, 16, 6))
    )
    assert found[(2, 16, 4, 5)] == {(1, 2, 3)}
    assert found[(2, 4, 5, 6)] == {(1, 2, 3)}


def test_what_is_reshaped_on_the_way_lies_as_it_is_read() -> None:
    def loss(x, w, key):
        query = jnp.reshape(jnp.tanh(x @ w), (2, 5, 3, 4))
        return jnp.sum(jnp.einsum("bqhd,bkhd->bhqk", query, key))

    program = tracing.trace(loss, jnp.ones((2, 5, 7)), jnp.ones((7, 12)), jnp.ones((2, 6, 3, 4)))
    (product,) = [
        one.outputs[0]
        for one in program.equations
        if one.outputs and program.types[one.outputs[0]].shape == (2, 5, 12)
        if one.operation.primitive == "dot_general"
    ]
    found = matrix_axes(program)[product]
    assert (found.shape, found.axes) == ((2, 5, 3, 4), (1, 3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.sum(x @ x),
        # A matrix times a vector for each batch.
        lambda x: jnp.sum(jnp.einsum("bi,bi->b", x, x)),
        lambda x: jnp.sum(jnp.sin(x)),
    ],
)
def test_without_matrices_in_a_batch_there_are_none(fn) -> None:
    assert matrix_axes(tracing.trace(fn, jnp.ones((8, 8)))) == {}


@pytest.mark.parametrize(
    ("shape", "dtype", "axes", "mebibytes"),
    [
        # Of ViT-B/16 at batch 64, compiled for v5e: {1,3,2,0:T(8,128)}, and rounded.
        ((64, 197, 12, 64), "float32", (1, 3), 48.0),
        ((64, 197, 12, 64), "bfloat16", (1, 3), 24.0),
        ((64, 12, 197, 197), "float32", (2, 3), 150.0),
        # Of messages along edges: {0,1:T(8,128)}, and indices, whose second dimension is dropped.
        ((262144, 64), "float32", None, 64.0),
        ((262144, 1), "int32", None, 1.0),
        # Of attention, 256 x 6 heads and 197 tokens: {2,3,1,0:T(8,128)}, {1,3,2,0:T(8,128)(2,1)}.
        ((256, 6, 197, 197), "float32", (2, 3), 300.0),
        ((256, 197, 6, 64), "bfloat16", (1, 3), 48.0),
        # Of few queries: {3,2,1,0:T(4,128)}.
        ((256, 256, 4, 144), "float32", (2, 3), 256.0),
    ],
)
def test_padding_as_compiled(shape, dtype, axes, mebibytes) -> None:
    kind = ArrayType(shape=shape, dtype=dtype)
    assert compiler_of("v5e").buffer_bytes(kind, axes) == mebibytes * 2**20
    assert compiler_of("h200").buffer_bytes(kind, axes) == kind.bytes
