"""Products of concatenations: which they are, what is written, and what is stored."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.joins import joins
from remat_opt.compilers.rewrites import rewrites
from remat_opt.program import tracing
from remat_opt.schedule import Region, Schedule, Stage, unchanged
from remat_opt.transform import rewriting
from tests.compiler_graphs import InStep, graph_of, names, stored
from tests.devices import needs_libtpu
from tests.programs import convolved, ones

X, W, WIDE = ones(512, 128), ones(128, 128), ones(256, 128)
IMAGES, KERNEL, WIDE_KERNEL = ones(2, 4, 4, 128), ones(3, 3, 128, 128), ones(3, 3, 256, 128)


def skip(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return jnp.sum(jnp.sin(jnp.concatenate([h, jnp.cos(h @ w), x], 1)[:, :256] @ wide))


def join(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return jnp.sum(jnp.sin(jnp.concatenate([h, jnp.cos(h @ w)], 1) @ wide))


def join_on_the_right(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(w @ x.T)
    return jnp.sum(jnp.sin(wide.T @ jnp.concatenate([h, jnp.cos(w @ h)])))


def join_of_batches(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(jnp.stack([x, 2 * x]) @ w)
    both = jnp.concatenate([h, jnp.cos(h @ w)], axis=-1)
    return jnp.sum(jnp.sin(jnp.einsum("bti,bij->btj", both, jnp.stack([wide, -wide]))))


def read_twice(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    both = jnp.concatenate([h, jnp.cos(h @ w)], 1)
    return jnp.sum(both @ wide) + jnp.sum(both)


def join_with_itself(w: jax.Array, _: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    both = jnp.concatenate([h, jnp.cos(h)], 1)
    return jnp.sum(jnp.sin(both @ both.T) + jnp.sin(jnp.einsum("ti,ui->tu", both, both)))


def join_of_rows(w: jax.Array, _: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.concatenate([jnp.tanh(x @ w), x]) @ w))


def join_of_columns(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    pieces = [jnp.cos(n * h[:, :16]) for n in range(8)]
    return jnp.sum(jnp.sin(jnp.concatenate(pieces, 1) @ wide[:128]))


def small_join(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    return join(w, wide, x) + jnp.sum(jnp.tanh(jnp.tile(x, (9, 1)) @ w))


def join_of_weights(w: jax.Array, _: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.tanh(jnp.tile(x, 2)) @ jnp.concatenate([w, w])))


def up(kernel: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(convolved(x, kernel))
    return jnp.sum(jnp.sin(convolved(jnp.concatenate([h, convolved(h, kernel)], -1), wide)))


def up_in_groups(kernel: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(convolved(x, kernel))
    return jnp.sum(convolved(jnp.concatenate([h, jnp.sin(h)], -1), wide[:, :, :2, :], groups=128))


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (join, [(0, 0)]),
        (join_on_the_right, [(1, 1)]),
        (join_of_batches, [(0, 1)]),
        (skip, []),
        (read_twice, []),
        (join_with_itself, []),
        (join_of_rows, []),
        (join_of_weights, []),
        (join_of_columns, []),
        (small_join, []),
    ],
)
def test_products_that_sum_over_what_is_joined(
    fn: Callable[..., Any], found: list[tuple[int, int]]
) -> None:
    program = tracing.trace(fn, W, WIDE, X)
    assert [(one.place, one.axis) for one in joins(program).values()] == found


def test_convolutions_that_sum_over_what_is_joined() -> None:
    (one,) = joins(tracing.trace(up, KERNEL, WIDE_KERNEL, IMAGES)).values()
    assert (one.place, one.axis) == (0, 2)
    assert not joins(tracing.trace(up_in_groups, KERNEL, WIDE_KERNEL, IMAGES))


def test_only_for_tpus_are_pieces_written_apart() -> None:
    program = tracing.trace(join, W, WIDE, X)
    for_tpu = rewrites(program, Rules(platform="tpu"), recomputes=True)
    assert for_tpu.joined == joins(program)
    for platform in ("cuda", "cpu"):
        assert not rewrites(program, Rules(platform=platform), recomputes=True).joined


def written(fn: Callable[..., Any], *arguments: Any, kept: bool = False) -> Callable[..., Any]:
    """The function as written for a TPU, all of it under one checkpoint."""
    program = tracing.trace(fn, *arguments)
    products = tuple(joins(program)) if kept else ()
    stages = [Stage(roots=tuple(range(len(program.equations))), kept=products, checkpointed=True)]
    run = rewriting.rewrite(program, stages, "tpu")
    return lambda *given: run(program.constant_values, list(given))[0]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (join, (W, WIDE, X)),
        (join_on_the_right, (W, WIDE, X)),
        (join_of_batches, (W, WIDE, X)),
        (up, (KERNEL, WIDE_KERNEL, IMAGES)),
    ],
)
def test_each_piece_has_its_own_cotangent(
    fn: Callable[..., Any], arguments: tuple[Any, ...], kept: bool
) -> None:
    given = [
        jnp.sin(jnp.arange(one.size)).reshape(one.shape) * 0.1 * (1 + n)
        for n, one in enumerate(arguments)
    ]
    call = written(fn, *given, kept=kept)
    for argnums in ((0, 1, 2), (0,), (1,), (2,)):
        gradients = [jax.grad(one, argnums) for one in (fn, call)]
        for expected, found in zip(*(jax.jit(one)(*given) for one in gradients), strict=True):
            close = 1e-5 * jnp.max(jnp.abs(expected))
            assert jnp.allclose(expected, found, rtol=1e-5, atol=close), argnums
    assert jax.jit(fn)(*given) == jax.jit(call)(*given)
    found, expected = (
        jax.jit(lambda *x, one=one: jax.jvp(one, x, x)[1])(*given) for one in (call, fn)
    )
    assert jnp.allclose(found, expected, rtol=1e-3)
    # No product writes the cotangent of the whole.
    program = tracing.trace(fn, *given)
    (one,) = joins(program).values()
    shape = program.types[program.equations[one.equation].outputs[0]].shape
    shapes = "|".join(",".join(map(str, one)) for one in (shape, shape[::-1]))
    whole = rf"f32\[({shapes})\] = (dot_general|conv_general_dilated)\["
    assert not re.search(whole, str(jax.make_jaxpr(jax.grad(call))(*given)))
    assert re.search(whole, str(jax.make_jaxpr(jax.grad(fn))(*given)))


def test_a_product_of_pieces_after_a_loop() -> None:
    """What is read after a loop is tied to its results: the pieces, not the concatenation."""

    def loss(w: jax.Array, wide: jax.Array, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([w, 2 * w]))
        return jnp.sum(jnp.sin(jnp.concatenate([h, jnp.cos(h)], 1) @ wide))

    given = 0.1 * W, 0.1 * WIDE, X
    found, expected = (jax.jit(jax.grad(fn))(*given) for fn in (written(loss, *given), loss))
    assert jnp.allclose(found, expected, rtol=1e-4)


def test_pieces_are_stored_and_have_no_cotangent_in_between() -> None:
    """The product's kernel writes the cotangents of what they are computed from."""

    def loss(weights: list[Any], x: jax.Array) -> jax.Array:
        first, second, wide = weights
        h = jax.nn.relu(x @ first)
        return jnp.sum(jnp.sin(jnp.concatenate([h, jax.nn.relu(x @ second)], 1) @ wide))

    square, rows = ones(128, 128), ones(16, 128)
    _, _, graph = graph_of(loss, [square, square, ones(256, 128)], rows, device="v5e")
    assert names(graph)[:4] == ["dot_general", "custom_jvp_call"] * 2
    assert [graph.cotangent_bytes[vertex] for vertex in range(4)] == [16 * 128 * 2, 1] * 2
    # Rounded, beside what the derivatives read.
    assert [graph.bytes[vertex] for vertex in range(4)] == [16 * 128 * 4, 16 * 128 * 2] * 2
    assert stored(graph)[:4] == names(graph)[:4]


def narrow(weights: list[Any], x: jax.Array) -> jax.Array:
    """Layers of joins whose pieces do not fill lanes."""
    for w in weights:
        x = x + jnp.concatenate([x, jnp.tanh(x), x * x], -1) @ w
    return jnp.mean(x**2)


def test_pieces_are_stored_where_the_cotangent_of_the_whole_is_written() -> None:
    """Where they are narrow, products are left as they are, in plans, too."""
    program, found, graph = graph_of(narrow, [ones(192, 64)] * 2, ones(256, 64), device="v5e")
    assert not joins(program)
    assert names(graph)[:3] == ["tanh", "mul", "dot_general"]
    second = [v for v, name in enumerate(graph.names) if "dot_general" in name][1]
    whole_bytes = 256 * 192 * 4
    regions = tuple(Region(vertices=(vertex,)) for vertex in range(len(graph)))
    for schedule in (unchanged(graph), Schedule(regions=regions)):
        changed = found.graph_of(schedule)
        assert changed.workspace_bytes[second] - graph.workspace_bytes[second] == whole_bytes


@pytest.mark.slow
@pytest.mark.tpu
@needs_libtpu
def test_narrow_joins_take_what_was_predicted_on_a_tpu() -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    step = InStep(narrow, [shape((192, 64))] * 3, shape((2**19, 64)), device="v5e")
    plan = step.plan()
    said = plan.predicted.temporary_bytes
    assert step.compiled_bytes(plan) == pytest.approx(said, rel=0.1)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.tpu
@needs_libtpu
def test_skips_of_a_net_have_cotangents_of_their_own_on_a_tpu() -> None:
    """XLA would write those of whole concatenations, and hold them to the bottom of the net."""

    def loss(weights: tuple[Any, ...], x: jax.Array) -> jax.Array:
        into, down, ups = weights
        h = convolved(x, into)
        skips = []
        for kernel in down:
            h = jax.nn.relu(convolved(h, kernel))
            skips.append(h)
        for kernel in ups:
            h = jax.nn.relu(convolved(jnp.concatenate([h, skips.pop()], -1), kernel))
        return jnp.mean(h * h)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    weights = (
        shape((3, 3, 4, 128)),
        [shape((3, 3, 128, 128))] * 4,
        [shape((3, 3, 256, 128))] * 4,
    )
    step = InStep(loss, weights, shape((32, 64, 64, 4)), device="v5e")
    plan = step.plan()
    said, found = plan.predicted.temporary_bytes, step.compiled_bytes(plan)
    assert found < 0.55 * step.problem.unchanged.peak_bytes
    assert 0.85 * said < found < 1.15 * said
