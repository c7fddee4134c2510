"""Gathers that pick one element of each row, and what their gradients hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.row_gathers import is_row_gather, picking
from remat_opt.program import tracing
from remat_opt.schedule import Stage
from remat_opt.transform import rewriting
from tests.compiler_graphs import InStep, W, X
from tests.devices import needs_cuda_plugin

ROWS = jnp.zeros(X.shape[0], int)
IN_PAIRS = ROWS.reshape(2, 8)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.take_along_axis(x, ROWS[:, None], axis=1), True),
        (lambda x: jnp.take_along_axis(x, ROWS[:, None], axis=1, mode="clip"), True),
        (lambda x: x[jnp.arange(len(ROWS)), ROWS], True),
        (lambda x: x.at[jnp.arange(len(ROWS)), ROWS].get(mode="fill"), True),
        (lambda x: jax.vmap(lambda row, one: row[one])(x, ROWS), True),
        (lambda x: x.reshape(2, 8, 8)[jnp.arange(2)[:, None], jnp.arange(8), IN_PAIRS], True),
        # Positions along another axis, and positions that are something else's.
        (lambda x: x.reshape(2, 8, 8)[jnp.arange(2)[:, None], IN_PAIRS, IN_PAIRS], False),
        (lambda x: x[ROWS, jnp.arange(len(ROWS)) % 8], False),
        (lambda x: x[jnp.arange(len(ROWS)) // 2, ROWS], False),
        (lambda x: x[jnp.arange(len(ROWS) // 2), ROWS[: len(ROWS) // 2]], False),
        # Two from each row, whole rows, and one from each column.
        (lambda x: jnp.take_along_axis(x, jnp.stack([ROWS, ROWS], axis=1), axis=1), False),
        (lambda x: x[ROWS], False),
        (lambda x: jnp.take_along_axis(x, jnp.zeros((1, X.shape[1]), int), axis=0), False),
    ],
)
def test_what_picks_one_element_of_each_row(
    fn: Callable[[jax.Array], jax.Array], expected: bool
) -> None:
    program = tracing.trace(lambda x: jnp.sum(fn(x)), X)
    picks = functools.partial(is_row_gather, program, program.makers())
    gathers = [one for one in program.equations if one.operation.primitive == "gather"]
    assert [picks(one) for one in gathers] == [expected]
    assert not any(picks(one) for one in program.equations if one not in gathers)


def test_what_is_picked_from_is_what_was_widened() -> None:
    def loss(w: jax.Array, x: jax.Array, between: Any) -> jax.Array:
        logits = between(x @ w)
        return jnp.mean(jnp.take_along_axis(logits, ROWS[:, None], axis=-1))

    for dtype, between, narrow in (
        ("bfloat16", lambda y: y.astype(jnp.float32), "bfloat16"),
        ("bfloat16", lambda y: y.astype(jnp.float32).reshape(y.shape), "bfloat16"),
        ("bfloat16", lambda y: y, None),
        ("bfloat16", lambda y: y.astype(jnp.float32) * 2, None),
        ("float32", lambda y: y.astype(jnp.bfloat16), None),
        ("float16", lambda y: y.astype(jnp.bfloat16), None),
    ):
        fn = functools.partial(loss, between=between)
        program = tracing.trace(fn, W.astype(dtype), X.astype(dtype))
        found = picking(program, Rules(platform="tpu"))
        assert list(found.values()) == ([narrow] if narrow else [])
        # Elsewhere a gather reads what it read before.
        read = [
            e.operation.inputs[0].dtype
            for e in program.equations
            if is_row_gather(program, program.makers(), e)
        ]
        assert list(picking(program, Rules(platform="cuda")).values()) == read
        assert not picking(program, Rules(platform="cpu"))


@pytest.mark.parametrize(
    "pick",
    [
        lambda logits, labels: jnp.take_along_axis(logits, labels[:, None], axis=1),
        lambda logits, labels: jnp.take_along_axis(logits, labels[:, None], axis=1, mode="clip"),
        lambda logits, labels: logits[jnp.arange(len(labels)), labels],
        lambda logits, labels: logits.at[jnp.arange(len(labels)), labels].get(mode="clip"),
        lambda logits, labels: logits.at[jnp.arange(len(labels)), labels].get(
            mode="fill", fill_value=0
        ),
        lambda logits, labels: jax.vmap(lambda row, label: row[label])(logits, labels),
    ],
)
def test_the_elementwise_gradient_is_the_gathers(
    pick: Callable[[jax.Array, jax.Array], jax.Array],
) -> None:
    """For labels below zero and beyond the end, too."""
    labels = jnp.arange(-3, len(X) - 3)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(pick(jax.nn.log_softmax(X @ w), labels)))

    program = tracing.trace(loss, W)
    assert len(picking(program, Rules(platform="cuda"))) == 1
    root = next(n for n, e in enumerate(program.equations) if e.operation.primitive == "gather")
    stages = (
        Stage(roots=tuple(range(root)), kept=(), checkpointed=True),
        Stage(roots=tuple(range(root, len(program.equations))), kept=(), checkpointed=False),
    )
    run = rewriting.rewrite(program, stages, "cuda")

    def rewritten(w: jax.Array) -> jax.Array:
        (found,) = run(program.constant_values, [w])
        return found

    assert "scatter" in str(jax.make_jaxpr(jax.grad(loss))(W))
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(rewritten))(W))
    np.testing.assert_allclose(jax.grad(rewritten)(W), jax.grad(loss)(W), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize("of_logits", [lambda y: y, lambda y: 30 * jnp.tanh(y / 30)])
@pytest.mark.parametrize(
    "entropy",
    [
        lambda y, labels: optax.softmax_cross_entropy_with_integer_labels(y, labels).mean(),
        lambda y, labels: -jax.nn.log_softmax(y)[jnp.arange(len(labels)), labels].mean(),
    ],
)
def test_a_cross_entropy_of_widened_logits_takes_what_is_expected(
    entropy: Callable[..., jax.Array], of_logits: Callable[..., jax.Array]
) -> None:
    """Unchanged, with a scatter into a wide array, and in a plan, without."""

    def loss(weights: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in weights[:-1]:
            x = x + jnp.tanh(x @ w.astype(x.dtype))
        logits = x @ weights[-1].astype(x.dtype)
        return entropy(of_logits(logits.astype(jnp.float32)), labels)

    shape = jax.ShapeDtypeStruct
    weights = [shape((256, 256), "float32")] * 2 + [shape((256, 4096), "float32")]
    step = InStep(loss, weights, shape((2048, 256), "bfloat16"), shape((2048,), "int32"))
    expected = step.problem.unchanged.peak_bytes
    assert step.unplanned_bytes() == pytest.approx(expected, rel=0.02)
    plan = step.plan()
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.02)
