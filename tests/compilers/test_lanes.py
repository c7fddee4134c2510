"""Which axes may be in the lanes of a TPU's tiles, compared with what was seen compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.lanes import convolved, gathered
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from remat_opt.program.record import Program
from tests.compiler_graphs import compiler_of, graph_of


def lanes(program: Program) -> dict[int, tuple[int, ...]]:
    """All values some of whose axes may not be innermost, with those that may."""
    return convolved(program) | gathered(program)


def test_rows_that_are_gathered_are_stored_as_rows() -> None:
    def loss(table, picked, spread):
        rows = table[picked]
        return jnp.sum(jnp.sin(rows)) + jnp.sum(jnp.sin(jnp.take(table, spread, axis=1)))

    program = tracing.trace(loss, jnp.ones((32, 64)), jnp.arange(300), jnp.arange(7))
    ((value, axes),) = lanes(program).items()
    assert program.types[value].shape == (300, 64)
    assert axes == (1,)


def test_convolutions_have_channels_or_batch_innermost_and_what_is_beside_them_too() -> None:
    numbers = ("NCHW", "OIHW", "NCHW")

    def loss(kernel, x):
        y = lax.conv_general_dilated(jnp.sin(x), kernel, (1, 1), "SAME", dimension_numbers=numbers)
        y = jax.nn.relu(y) + 1.0
        return jnp.sum(y.mean((2, 3)) @ jnp.ones((4, 5)))

    program = tracing.trace(loss, jnp.ones((4, 3, 2, 2)), jnp.ones((2, 3, 8, 8)))
    found = lanes(program)
    images = [v for v, kind in enumerate(program.types) if len(kind.shape) == 4 and v in found]
    assert set(found) == set(images)
    assert {found[value] for value in images} == {(0, 1)}
    # All of them except the kernel.
    assert sum(len(kind.shape) == 4 for kind in program.types) - 1 == len(images)


def test_what_a_convolution_writes_is_padded_though_a_product_would_read_it_otherwise() -> None:
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(kernel, x):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        pixels = jnp.tanh(y).reshape(len(x), -1, 64)
        return jnp.sum(jnp.sin(jnp.einsum("bnc,bnd->bcd", pixels, pixels)))

    _, _, graph = graph_of(loss, jnp.ones((3, 3, 4, 64)), jnp.ones((2, 16, 16, 4)), device="v5e")
    assert graph.names[0].endswith("conv_general_dilated")
    assert graph.bytes[0] == 2 * 16 * 16 * 128 * 4


@pytest.mark.parametrize(
    ("shape", "dtype", "innermost", "mebibytes"),
    [
        ((262144, 64), "bfloat16", (1,), 64.0),  # gathered: {1,0:T(8,128)(2,1)}
        ((32, 4096, 64), "float32", (0, 2), 64.0),  # of a convolution
        ((128, 32, 32, 64), "float32", (0, 3), 32.0),  # its batch in the lanes
    ],
)
def test_padding_as_compiled(shape, dtype, innermost, mebibytes) -> None:
    kind = ArrayType(shape=shape, dtype=dtype)
    assert compiler_of("v5e").buffer_bytes(kind, lanes=innermost) == mebibytes * 2**20
    assert compiler_of("h200").buffer_bytes(kind, lanes=innermost) == kind.bytes
