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
from remat_opt.compilers.row_gathers import is_row_gather, picking, summing
from remat_opt.device import Platform
from remat_opt.program import tracing
from remat_opt.schedule import Stage
from remat_opt.transform import rewriting
from tests.compiler_graphs import InStep, W, X, model_of
from tests.devices import needs_cuda_plugin, needs_libtpu

ROWS = jnp.zeros(X.shape[0], int)
IN_PAIRS = ROWS.reshape(2, 8)
#: Labels below zero and beyond the end, too.
OUTSIDE = jnp.arange(-3, len(X) - 3)


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


def test_picking_from_what_is_computed_is_a_sum_on_a_tpu() -> None:
    pick = functools.partial(jnp.take_along_axis, axis=-1)
    for loss, sums in (
        (lambda w, x: pick(jax.nn.log_softmax(x @ w), ROWS[:, None]), 1),
        (lambda w, x: pick((x @ w).astype(jnp.bfloat16).astype(jnp.float32), ROWS[:, None]), 1),
        # An argument is an array already, and integers have no gradient.
        (lambda w, x: pick(w, ROWS[:8, None]) + jnp.sum(x), 0),
        (lambda w, x: jnp.sum(x @ w) + pick(jnp.argsort(x @ w), ROWS[:, None]), 0),
        # Zeros in place of what is not there could be picked, too.
        (lambda w, x: pick(x @ w, ROWS[:, None], mode="fill", fill_value=0), 0),
    ):
        program = tracing.trace(lambda w, x, loss=loss: jnp.sum(loss(w, x)), W, X)
        assert len(summing(program, Rules(platform="tpu"))) == sums
        assert not picking(program, Rules(platform="tpu"))
        assert len(picking(program, Rules(platform="cuda"))) == 1
        for platform in ("cuda", "cpu"):
            assert not summing(program, Rules(platform=platform))
        assert not picking(program, Rules(platform="cpu"))


def test_on_a_tpu_logits_that_are_picked_from_have_no_cotangent_array() -> None:
    """However the picked element is shaped before it is subtracted, as in optax."""

    def loss(w: jax.Array, x: jax.Array, entropy: Callable[..., jax.Array]) -> jax.Array:
        return jnp.mean(entropy((x @ w).astype(jnp.bfloat16).astype(jnp.float32), ROWS))

    for entropy in (
        optax.softmax_cross_entropy_with_integer_labels,
        lambda y, labels: jax.nn.logsumexp(y, -1) - y[jnp.arange(len(labels)), labels],
    ):
        program = tracing.trace(functools.partial(loss, entropy=entropy), W, X)
        found = model_of(program, "v5e")
        assert found.as_it_is is not None
        for graph in (found.graph, found.as_it_is.graph):
            assert max(graph.bytes) >= 2 * len(X) * W.shape[1]
            assert max(graph.cotangent_bytes) < 2 * len(X) * W.shape[1]


PICKS = [
    lambda logits, labels: jnp.take_along_axis(logits, labels[:, None], axis=1),
    lambda logits, labels: jnp.take_along_axis(logits, labels[:, None], axis=1, mode="clip"),
    lambda logits, labels: logits[jnp.arange(len(labels)), labels],
    lambda logits, labels: logits.at[jnp.arange(len(labels)), labels].get(mode="clip"),
    lambda logits, labels: logits.at[jnp.arange(len(labels)), labels].get(
        mode="fill", fill_value=0
    ),
    lambda logits, labels: jax.vmap(lambda row, label: row[label])(logits, labels),
]


def rewritten(fn: Callable[[jax.Array], jax.Array], platform: Platform) -> Callable[..., Any]:
    """The function in two regions, the second of which begins with the gather."""
    program = tracing.trace(fn, W)
    root = next(n for n, e in enumerate(program.equations) if e.operation.primitive == "gather")
    stages = (
        Stage(roots=tuple(range(root)), kept=(), checkpointed=True),
        Stage(roots=tuple(range(root, len(program.equations))), kept=(), checkpointed=False),
    )
    run = rewriting.rewrite(program, stages, platform)
    return lambda w: run(program.constant_values, [w])[0]


@pytest.mark.parametrize("pick", PICKS)
def test_the_elementwise_gradient_is_the_gathers(
    pick: Callable[[jax.Array, jax.Array], jax.Array],
) -> None:
    """For labels below zero and beyond the end, too."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(pick(jax.nn.log_softmax(X @ w), OUTSIDE)))

    run = rewritten(loss, "cuda")
    assert "scatter" in str(jax.make_jaxpr(jax.grad(loss))(W))
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(run))(W))
    np.testing.assert_allclose(jax.grad(run)(W), jax.grad(loss)(W), rtol=1e-6)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_labels_may_be_of_a_type_that_cannot_count_a_row(platform: Platform) -> None:
    """Byte labels among 300 words: the 256th and the first are different ones."""
    labels = jnp.arange(4, dtype="uint8")
    x = jnp.sin(jnp.arange(32.0)).reshape(4, 8)
    wide = jnp.sin(jnp.arange(8 * 300.0)).reshape(8, 300)

    def loss(w: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(x @ (w @ wide))
        return jnp.sum(jax.vmap(lambda row, label: row[label])(logits, labels))

    run = rewritten(loss, platform)
    np.testing.assert_allclose(run(W), loss(W), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(run)(W), jax.grad(loss)(W), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pick", PICKS)
def test_a_sum_picks_what_the_gather_picks(
    pick: Callable[[jax.Array, jax.Array], jax.Array],
) -> None:
    """For labels below zero and beyond the end, too, and beside infinities."""

    def rows(w: jax.Array) -> jax.Array:
        logits = X @ w
        return pick(jax.nn.log_softmax(jnp.where(logits > 1, logits, -jnp.inf)), OUTSIDE)

    def loss(w: jax.Array) -> jax.Array:
        found = rows(w)
        return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(found), found, 0)))

    run = rewritten(loss, "tpu")
    before, after = (str(jax.make_jaxpr(jax.grad(fn))(W)) for fn in (loss, run))
    assert "scatter" in before
    assert ("scatter" in after) == ("fill_value=0" in before)
    np.testing.assert_array_equal(rewritten(rows, "tpu")(W), rows(W))
    np.testing.assert_allclose(jax.grad(run)(W), jax.grad(loss)(W), rtol=1e-6)


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


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.tpu
@needs_libtpu
def test_a_log_softmax_of_widened_logits_takes_what_is_expected_on_a_tpu() -> None:
    """Unchanged, all of it is stored for a gather, in float32; in a plan, nothing is."""

    def loss(weights: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in weights[:-1]:
            x = x + jnp.tanh(x @ w.astype(x.dtype))
        logits = (x @ weights[-1].astype(x.dtype)).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1).mean()

    shape = jax.ShapeDtypeStruct
    weights = [shape((512, 512), "float32")] * 2 + [shape((512, 16_384), "float32")]
    x, labels = shape((32_768, 512), "bfloat16"), shape((32_768,), "int32")
    step = InStep(loss, weights, x, labels, device="v5e")
    logits = 32_768 * 16_384
    expected = step.problem.unchanged.peak_bytes
    assert expected > 6 * logits
    assert step.unplanned_bytes() == pytest.approx(expected, rel=0.03)
    plan = step.plan()
    assert plan.predicted.temporary_bytes < 2.4 * logits
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.06)
