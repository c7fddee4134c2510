"""A call costs what it calls, and fuses if and only if everything in it does."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from remat_opt.costs import Fusion, cost
from remat_opt.operation import ArrayType, Operation

MATRIX = jax.ShapeDtypeStruct((10, 10), jnp.float32)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, cotangent: (cotangent * 2,))

CASES: dict[str, tuple[Callable[..., Any], Fusion]] = {
    "custom_jvp_call": (jax.nn.relu, Fusion.FUSIBLE),
    "custom_vjp_call": (doubled, Fusion.FUSIBLE),
    "jit": (jax.jit(lambda x: jnp.sin(x) * 2), Fusion.FUSIBLE),
    "jit of nothing": (jax.jit(lambda x: x), Fusion.FUSIBLE),
    "jit of a reduction": (jax.jit(lambda x: jnp.exp(x).sum(0)), Fusion.REDUCTION),
    "jit of a product": (jax.jit(lambda x: jnp.exp(x @ x).sum(0)), Fusion.OPAQUE),
    "nested": (jax.jit(lambda x: jax.nn.silu(jax.nn.relu(x))), Fusion.FUSIBLE),
    "checkpoint": (jax.checkpoint(lambda x: jnp.tanh(x) + 1), Fusion.FUSIBLE),
    "checkpoint of a product": (jax.checkpoint(lambda x: jnp.tanh(x @ x)), Fusion.OPAQUE),
}


@pytest.mark.parametrize("name", CASES)
def test_cost_and_fusion(name: str, operations: Any, ours: Any, compiled: Any) -> None:
    fn, fusion = CASES[name]
    answers = [cost(operation) for operation in operations(fn, MATRIX)]
    assert ours(fn, MATRIX) == compiled(fn, MATRIX)
    assert all(answer.fusion is fusion for answer in answers)
    assert not any(answer.estimated for answer in answers)


def test_a_fusible_call_reads_its_inputs_and_writes_its_outputs(only: Any) -> None:
    answer = cost(only(jax.jit(lambda x: jnp.sin(x) * jnp.cos(x)), MATRIX))
    assert (answer.bytes_read, answer.bytes_written) == (400, 400)


def test_one_of_several_programs_runs(only: Any) -> None:
    operation = only(doubled, MATRIX)
    dearer = only(jax.jit(lambda x: x @ x), MATRIX).bodies[0]
    both = Operation(
        primitive="custom_vjp_call",
        inputs=operation.inputs,
        outputs=operation.outputs,
        bodies=(operation.bodies[0], dearer),
    )
    assert cost(both).flops == 2000


def test_a_call_without_its_program_is_estimated() -> None:
    array = ArrayType(shape=(5,), dtype="float32")
    answer = cost(Operation(primitive="jit", inputs=(array,), outputs=(array,)))
    assert answer.estimated
    assert answer.fusion is Fusion.OPAQUE


def test_a_kernels_author_knows_its_cost() -> None:
    array = ArrayType(shape=(5,), dtype="float32")
    estimate = types.SimpleNamespace(flops=1000, transcendentals=5, bytes_accessed=400)
    answer = cost(
        Operation(
            primitive="pallas_call",
            inputs=(array,),
            outputs=(array,),
            params={"cost_estimate": estimate},
        )
    )
    assert (answer.flops, answer.transcendentals) == (1000, 5)
    assert (answer.bytes_read, answer.bytes_written) == (380, 20)
    assert not answer.estimated


def test_a_kernel_whose_author_says_nothing_is_estimated() -> None:
    array = ArrayType(shape=(5,), dtype="float32")
    operation = Operation(
        primitive="pallas_call", inputs=(array,), outputs=(array,), params={"cost_estimate": None}
    )
    assert cost(operation).estimated


def test_a_kernel_without_an_estimate_is_its_blocks(only: Any) -> None:
    def product(x: jax.Array) -> jax.Array:
        def body(x_ref: Any, y_ref: Any) -> None:
            y_ref[...] = jnp.tanh(x_ref[...] @ x_ref[...].T)

        array: jax.Array = pallas.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((64, 8), x.dtype),
            grid=(8,),
            in_specs=[pallas.BlockSpec((8, 16), lambda n: (n, 0))],
            out_specs=pallas.BlockSpec((8, 8), lambda n: (n, 0)),
        )(x)
        return array

    answer = cost(only(product, jax.ShapeDtypeStruct((64, 16), jnp.float32)))
    assert (answer.flops, answer.transcendentals) == (8 * 2 * 8 * 8 * 16, 64 * 8)
    assert (answer.bytes_read, answer.bytes_written) == (4 * 64 * 16, 4 * 64 * 8)
    assert answer.estimated
