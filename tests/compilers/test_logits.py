"""What is held beside the cotangents of a cross-entropy's logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.logits import one_cotangent
from remat_opt.program import tracing
from tests.compiler_graphs import InStep
from tests.devices import needs_cuda_plugin

ROWS, WIDTH, CLASSES = 512, 64, 4096
LOGITS = 4 * ROWS * CLASSES


def _own(values: jax.Array, labels: jax.Array) -> jax.Array:
    """The value of each label."""
    return jnp.take_along_axis(values, labels[..., None], axis=-1)[..., 0]


def picked(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -_own(jax.nn.log_softmax(logits), labels)


def chosen(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.sum(jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits), axis=-1)


def smoothed(logits: jax.Array, labels: jax.Array) -> jax.Array:
    found = jax.nn.log_softmax(logits)
    return -0.9 * _own(found, labels) - 0.1 * jnp.mean(found, axis=-1)


def as_in_optax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1) - _own(logits, labels)


def without_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)


def in_step(
    loss: Callable[..., jax.Array],
    *,
    device: str = "cpu",
    classes: int = CLASSES,
    rows: tuple[int, ...] = (4, ROWS // 4),
) -> InStep:
    """A layer and logits in a step."""

    def run(weights, x, labels):
        x = x + jnp.tanh(x @ weights[0])
        return jnp.mean(loss(x @ weights[1], labels))

    shape = jax.ShapeDtypeStruct
    weights = [shape((WIDTH, WIDTH), "float32"), shape((WIDTH, classes), "float32")]
    given = shape((*rows, WIDTH), "float32"), shape(rows, "int32")
    return InStep(run, weights, *given, device=device)


@pytest.mark.parametrize(
    "loss",
    [
        picked,
        chosen,
        smoothed,
        pytest.param(as_in_optax, marks=pytest.mark.slow),
        pytest.param(without_labels, marks=pytest.mark.slow),
    ],
)
def test_on_a_cpu_examples_and_tokens(loss: Callable[..., jax.Array]) -> None:
    step = in_step(loss)
    unchanged = step.unplanned_bytes()
    assert step.problem.unchanged.peak_bytes == pytest.approx(unchanged, rel=0.05)
    plan = step.plan()
    compiled = step.compiled_bytes(plan)
    assert plan.predicted.temporary_bytes == pytest.approx(compiled, rel=0.1)
    spared = step.compiled_bytes(plan, ["logits_together"]) - compiled
    # In the loss of optax labels are subtracted in place, and there is one array as it is.
    assert spared == 0 if loss is as_in_optax else spared > 0.9 * LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("loss", [picked, chosen, smoothed, as_in_optax])
def test_on_a_cpu_examples_alone(loss: Callable[..., jax.Array]) -> None:
    """The weight's gradient reads the cotangent as it is, so it is one array in any case."""
    step = in_step(loss, rows=(ROWS,))
    assert step.problem.unchanged.peak_bytes == pytest.approx(step.unplanned_bytes(), rel=0.1)
    plan = step.plan()
    compiled = step.compiled_bytes(plan)
    assert plan.predicted.temporary_bytes == pytest.approx(compiled, rel=0.1)
    assert step.compiled_bytes(plan, ["logits_together"]) == pytest.approx(compiled, rel=0.01)


@pytest.mark.cuda
@pytest.mark.slow
@needs_cuda_plugin
def test_on_a_gpu_labels_of_long_rows_are_scattered_beside_the_cotangent() -> None:
    step = in_step(picked, device="h200", classes=32_000)
    predicted = step.problem.unchanged.peak_bytes
    assert predicted == pytest.approx(step.unplanned_bytes(), rel=0.05)


def test_what_is_divided_by_the_sum_has_a_cotangent_of_its_own() -> None:
    def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(logits) * logits, axis=-1)

    def found(loss, platform="cpu"):
        program = tracing.trace(lambda w, x, y: jnp.sum(loss(x @ w, y)), *arguments)
        return one_cotangent(program, Rules(platform=platform))

    arguments = jnp.ones((4, CLASSES)), jnp.ones((2, 4)), jnp.zeros(2, int)
    assert found(picked) == {0}
    assert not found(entropy)
    assert not found(picked, "cuda")
