"""Loops multiply by their length, branches count the costliest, and both are opaque."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.costs import Fusion, cost, estimated_flops
from remat_opt.operation import GUESSED_TURNS, ArrayType, Body, Operation

MATRIX = jax.ShapeDtypeStruct((10, 10), jnp.float32)
LAYERS = jax.ShapeDtypeStruct((7, 10, 10), jnp.float32)
DOT = 2 * 10**3


def _stack(carry: jax.Array, layers: jax.Array) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), carry, layers)


def test_scan_is_the_compilers_once_multiplied_by_its_length(
    only: Any, ours: Any, compiled: Any
) -> None:
    """The compiler counts one turn of the body, and a few FLOPs for counter and slices."""
    whole, once = ours(_stack, MATRIX, LAYERS), compiled(_stack, MATRIX, LAYERS)
    assert whole.transcendentals == 7 * once.transcendentals
    assert whole.flops == pytest.approx(7 * once.flops, rel=0.01)
    answer = cost(only(_stack, MATRIX, LAYERS))
    assert answer.fusion is Fusion.OPAQUE
    assert not answer.estimated


def test_scan_moves_what_its_body_moves_each_turn(only: Any) -> None:
    answer = cost(only(_stack, MATRIX, LAYERS))
    # Each turn the product reads two matrices and the sum one; they write a matrix, a number.
    assert answer.bytes_read == 7 * 3 * 400
    assert answer.bytes_written == 7 * (400 + 4)


def test_nested_scans_multiply(ours: Any) -> None:
    def nested(x: jax.Array) -> Any:
        def inner(x: jax.Array, _: None) -> Any:
            return x @ x, None

        def outer(x: jax.Array, _: None) -> Any:
            return lax.scan(inner, x, None, length=3)[0], None

        return lax.scan(outer, x, None, length=5)[0]

    assert ours(nested, MATRIX).flops == 15 * DOT


def test_a_scan_of_elementwise_steps_moves_its_carry_each_turn(only: Any) -> None:
    def steps(x: jax.Array) -> Any:
        return lax.scan(lambda x, _: (jnp.sin(x) + 1, None), x, None, length=9)[0]

    answer = cost(only(steps, MATRIX))
    assert answer.fusion is Fusion.OPAQUE
    assert answer.bytes_written == 9 * 400


def test_a_scan_that_computes_nothing_moves_its_arrays() -> None:
    layers = ArrayType(shape=LAYERS.shape, dtype="float32")
    body = Body(operations=(), repeats=7)
    answer = cost(Operation(primitive="scan", inputs=(layers,), outputs=(layers,), bodies=(body,)))
    assert answer.flops == 0
    assert (answer.bytes_read, answer.bytes_written) == (2800, 2800)


def test_a_while_that_does_not_say_how_often_is_a_guess(
    only: Any, ours: Any, compiled: Any
) -> None:
    """The compiler counts one turn."""

    def loop(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ c, x)

    once = compiled(loop, MATRIX)
    assert ours(loop, MATRIX).flops == GUESSED_TURNS * once.flops
    answer = cost(only(loop, MATRIX))
    assert answer.estimated
    assert answer.fusion is Fusion.OPAQUE


def test_a_while_that_counts_is_its_turns(only: Any) -> None:
    def loop(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 2, c[1] @ c[1]), (0, x))

    answer = cost(only(loop, MATRIX))
    # A comparison and an addition besides the product.
    assert answer.flops == 4 * (DOT + 2)
    assert not answer.estimated


def test_cond_is_the_compilers_costliest_branch(operations: Any, ours: Any, compiled: Any) -> None:
    predicate = jax.ShapeDtypeStruct((), jnp.bool_)

    def branch(predicate: jax.Array, x: jax.Array) -> Any:
        return lax.cond(predicate, lambda c: c @ c, lambda c: c + 1, x)

    assert ours(branch, predicate, MATRIX).flops == pytest.approx(
        compiled(branch, predicate, MATRIX).flops, abs=2
    )
    (answer,) = [
        cost(operation)
        for operation in operations(branch, predicate, MATRIX)
        if operation.primitive == "cond"
    ]
    assert answer.flops == DOT
    assert answer.fusion is Fusion.OPAQUE


def test_cond_of_fusible_branches_is_opaque_all_the_same(operations: Any) -> None:
    def branch(index: jax.Array, x: jax.Array) -> Any:
        return lax.switch(index, [jnp.sin, jnp.cos, lambda c: c * c], x)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    assert cost(operations(branch, index, MATRIX)[-1]).fusion is Fusion.OPAQUE


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_linear_solve_is_what_solves(symmetric: bool, only: Any) -> None:
    def solve(x: jax.Array, b: jax.Array) -> Any:
        return lax.custom_linear_solve(
            lambda y: x @ y,
            b,
            lambda _, b: x @ (x @ (x @ b)),
            symmetric=symmetric,
        )

    answer = cost(only(solve, MATRIX, MATRIX))
    assert answer.flops == 3 * DOT
    assert answer.fusion is Fusion.OPAQUE
    assert not answer.estimated


def test_of_a_loop_with_a_guess_inside_only_that_is_a_guess(only: Any) -> None:
    def scanned(x: jax.Array) -> Any:
        def step(c: jax.Array, _: None) -> Any:
            return c @ x + jnp.sum(lax.top_k(c, 2)[0]), None

        return lax.scan(step, x, None, length=3)[0]

    operation = only(scanned, MATRIX)
    assert cost(operation).estimated
    assert 0 < estimated_flops(operation) < cost(operation).flops / 2
    exact = only(lambda x: lax.scan(lambda c, _: (c @ x, None), x, None, length=3)[0], MATRIX)
    assert estimated_flops(exact) == 0
    guessed = only(lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ x, x), MATRIX)
    assert estimated_flops(guessed) == cost(guessed).flops > 0
