"""Arguments that XLA for TPU copies in another order, compared with what was seen compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.compilers import reordered
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.model import Model
from remat_opt.compilers.reordered import scattered_entries
from remat_opt.graph import Graph
from remat_opt.program import tracing
from remat_opt.program.record import Program
from remat_opt.schedule import Region, Schedule, unchanged
from remat_opt.spans import ArgumentCopy
from remat_opt.transform.rewriting import rewrite
from tests.compiler_graphs import InStep, graph_of
from tests.devices import needs_libtpu
from tests.programs import ones

TPU = Rules(platform="tpu")
W = ones(128, 128)


def turned(program: Program, rules: Rules) -> frozenset[int]:
    return reordered.turned(program, rules, scattered_entries(program, rules))


def steps(
    w: jax.Array, x: jax.Array, *, axis: int = 1, read: Sequence[int] = range(4)
) -> jax.Array:
    y = jnp.zeros(())
    for step in read:
        y = jnp.tanh(jax.lax.index_in_dim(x, step, axis, keepdims=False) @ w + y)
    return jnp.sum(y)


def unstacked(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(sum(jnp.tanh(one @ w) for one in jnp.unstack(x, axis=1)))


def halves(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(sum(jnp.tanh(one @ w) for one in jnp.split(x, 2, axis=1)))


def computed(w: jax.Array, x: jax.Array) -> jax.Array:
    return steps(w, jnp.sin(x))


@pytest.mark.parametrize(
    ("fn", "shape", "entries"),
    [
        (steps, (64, 8, 128), 4),
        (steps, (64, 4, 128), 4),
        (steps, (2, 8, 64, 128), 4),
        (unstacked, (64, 8, 128), 8),
        (halves, (64, 8, 128), 0),
        (computed, (64, 8, 128), 0),
        # These arguments come with the steps outermost.
        (steps, (64, 20, 128), 0),
        (steps, (64, 8, 100), 0),
    ],
)
def test_entries_of_arguments_are_scattered(
    fn: Callable[..., Any], shape: tuple[int, ...], entries: int
) -> None:
    w = ones(shape[-1], shape[-1])
    assert len(scattered_entries(tracing.trace(fn, w, ones(*shape)), TPU)) == entries


def test_entries_along_the_first_axis_are_not_scattered() -> None:
    program = tracing.trace(lambda w, x: steps(w, x, axis=0), W, ones(8, 64, 128))
    assert not scattered_entries(program, TPU)


def test_features_may_lie_across() -> None:
    program = tracing.trace(lambda w, x: steps(w, x, axis=2), W, ones(64, 128, 8))
    assert len(scattered_entries(program, TPU)) == 4


def copies_of(fn: Callable[..., Any], device: str = "v5e") -> tuple[ArgumentCopy, ...]:
    return graph_of(fn, W, ones(512, 8, 128), device=device)[1].argument_copies


@pytest.mark.parametrize(
    ("fn", "bytes_per_element"),
    [
        (steps, 2),
        (lambda w, x: steps(w, x, read=[5]), None),
        (lambda w, x: jnp.sum((x[:, 1] + x[:, 2]) @ w), 4),
        # Two sums over features, each of which reads its step where it is.
        (lambda w, x: jnp.sum(w) * jnp.sum(jnp.sum(jnp.sin(x[:, 0] + x[:, 1]), -1)), None),
    ],
)
def test_they_are_copied_as_they_are_read(
    fn: Callable[..., Any], bytes_per_element: int | None
) -> None:
    found = copies_of(fn)
    assert [copy.bytes for copy in found] == [
        512 * 8 * 128 * size for size in [bytes_per_element] if size
    ]
    assert not copies_of(fn, "h200")


def test_what_is_added_to_a_product_is_not_read_again() -> None:
    (copy,) = copies_of(added)
    assert copy.readers
    assert not copy.backward
    (multiplied,) = copies_of(steps)
    assert multiplied.backward == multiplied.readers


def added(w: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.zeros((512, 128))
    for step in range(8):
        y = jnp.tanh(x[:, step] + y @ w)
    return jnp.mean(jnp.square(y @ w))


def halved(graph: Graph) -> Schedule:
    middle = len(graph) // 2
    return Schedule(
        regions=(
            Region(vertices=tuple(range(middle))),
            Region(vertices=tuple(range(middle, len(graph))), checkpointed=False),
        )
    )


def lives(found: Model, schedule: Schedule, size: int) -> list[tuple[int, int]]:
    """The first and last steps of arrays of that size, in order."""
    spans = found.lives(found.graph_of(schedule), schedule)
    those = spans.bytes == size
    return sorted(zip(spans.first[those].tolist(), spans.last[those].tolist(), strict=True))


def test_each_checkpoint_copies_again() -> None:
    def scaled(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.zeros((512, 128))
        for step in range(8):
            y = jnp.tanh((2.0 * x[:, step]) @ w + y)
        return jnp.sum(y)

    _, found, graph = graph_of(scaled, W, ones(512, 8, 128), device="v5e")
    (copy,) = found.argument_copies
    ((first, last),) = lives(found, unchanged(graph), copy.bytes)
    forward = len(graph) - 1
    assert first == 0
    assert last > forward
    (early, early_end), (late, late_end), (again, again_end) = lives(
        found, halved(graph), copy.bytes
    )
    assert 0 == early <= early_end < late <= forward < late_end < again <= again_end


def test_in_plans_products_read_turned_entries_each_by_itself() -> None:
    program, found, graph = graph_of(steps, W, ones(512, 8, 128), device="v5e")
    assert len(turned(program, TPU)) == 4
    (copy,) = found.argument_copies
    assert copy.entry_bytes == 512 * 128 * 4
    assert len(lives(found, unchanged(graph), copy.bytes)) == 1
    # Neither is the whole argument copied, nor does one step wait for another.
    assert copy.bytes not in found.lives(found.graph_of(halved(graph)), halved(graph)).bytes
    # What is not only multiplied is copied with all of its argument.
    program, found, _ = graph_of(added, W, ones(512, 8, 128), device="v5e")
    assert not turned(program, TPU)
    assert found.argument_copies[0].entry_of is None


def test_what_has_a_gradient_is_not_turned() -> None:
    program = tracing.trace(lambda x, w: steps(w, x), ones(512, 8, 128), W)
    assert len(scattered_entries(program, TPU)) == 4
    assert not turned(program, TPU)


@pytest.mark.parametrize(("axis", "shape"), [(1, (16, 8, 128)), (2, (16, 128, 8))])
def test_turned_entries_have_the_same_values_and_gradients(
    axis: int, shape: tuple[int, ...]
) -> None:
    w = jax.random.normal(jax.random.key(0), (128, 128)) * 0.1
    x = jax.random.normal(jax.random.key(1), shape)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return steps(w, x, axis=axis, read=range(8))

    program, found, graph = graph_of(loss, w, x, device="v5e")
    assert len(turned(program, TPU)) == 8
    run = rewrite(program, found.stages(halved(graph)), "tpu")
    expected = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
    given = jax.value_and_grad(lambda *both: run(program.constant_values, both)[0], argnums=(0, 1))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6),
        given(w, x),
        expected,
    )


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
def test_for_tpu_they_are_predicted_and_plans_copy_less() -> None:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        y = jnp.zeros((x.shape[0], x.shape[2]))
        for step in range(8):
            y = jnp.tanh(x[:, step] @ weights[0] + y @ weights[1])
        return jnp.mean(jnp.square(y @ weights[2]))

    shape = jax.ShapeDtypeStruct
    weights, x = [shape((512, 512), "float32")] * 3, shape((32768, 8, 512), "float32")
    step = InStep(loss, weights, x, device="v5e")
    assert step.unplanned_bytes() == pytest.approx(step.problem.unchanged.peak_bytes, rel=0.08)
    plan = step.plan()
    compiled = step.compiled_bytes(plan)
    # Arrays of 64 MiB fit vector memory or do not.
    assert compiled == pytest.approx(plan.predicted.temporary_bytes, rel=0.3)
    assert compiled < 0.6 * step.compiled_bytes(plan, ["entries_turned"])
