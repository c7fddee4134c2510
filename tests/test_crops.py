"""Slices that come where their operand is made, as the crops of a U-Net."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt import tracing
from remat_opt.crops import crops
from remat_opt.device import get_device
from remat_opt.linearization import linearize
from remat_opt.materialization import materialize
from remat_opt.schedule import Stage
from remat_opt.transform import rewrite

W, X = jnp.full((16, 16), 0.1), jnp.linspace(-1.0, 1.0, 64 * 16).reshape(64, 16)


def crossing(w: jax.Array, x: jax.Array) -> jax.Array:
    """Half of a value is handed over three products to where it is read."""
    skipped = jnp.tanh(x @ w)
    deep = jnp.tanh(jnp.tanh(skipped @ w) @ w)
    return jnp.sum(jnp.concatenate([skipped[:32], deep]) @ w)


def all_of_it(w: jax.Array, x: jax.Array) -> jax.Array:
    """The slices together are what they are taken from."""
    skipped = jnp.tanh(x @ w)
    deep = jnp.tanh(jnp.tanh(skipped @ w) @ w)
    return jnp.sum(jnp.concatenate([skipped[:32], deep, skipped[32:]]) @ w)


def at_once(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ w)[:32] @ w)


def read_later(w: jax.Array, x: jax.Array) -> jax.Array:
    skipped = jnp.tanh(x @ w)
    deep = jnp.tanh(jnp.tanh(skipped @ w) @ w)
    return jnp.sum(jnp.concatenate([skipped[:32], deep]) @ w) + jnp.sum(skipped @ w)


def twice(w: jax.Array, x: jax.Array) -> jax.Array:
    """A crop of which a part is cropped once more."""
    skipped = jnp.tanh(x @ w)
    half = skipped[:32]
    deep = jnp.tanh(skipped @ w)
    return jnp.sum(jnp.concatenate([half[:8], jnp.tanh(deep @ w) @ w]) @ w)


def of_an_argument(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)[:32] * x[:32])


def names(program: Any) -> list[str]:
    return [equation.operation.primitive for equation in program.equations]


@pytest.mark.parametrize(
    ("fn", "count"),
    [(crossing, 1), (twice, 1), (all_of_it, 0), (at_once, 0), (of_an_argument, 0)],
)
def test_what_is_left_to_read_of_a_value_is_a_crop(fn: Callable[..., Any], count: int) -> None:
    program = tracing.trace(fn, W, X)
    assert len(list(crops(program))) == count
    expected = collections.Counter(names(program))
    jaxpr = jax.make_jaxpr(fn)(W, X).jaxpr
    assert expected == collections.Counter(equation.primitive.name for equation in jaxpr.eqns)


def test_a_value_that_is_read_as_a_whole_later_is_not_cropped() -> None:
    """The last product reads all of it: until then it is there anyway."""
    program = tracing.trace(read_later, W, X)
    assert not list(crops(program))


def test_a_crop_comes_where_its_operand_is_made() -> None:
    program = tracing.trace(crossing, W, X)
    (crop,) = crops(program)
    assert names(program)[crop - 1 : crop + 1] == ["tanh", "slice"]
    assert program.equations[crop].value_inputs == program.equations[crop - 1].outputs


@pytest.mark.parametrize(
    ("device", "planned", "unchanged"),
    [("h200", True, False), ("v5e", True, True), ("cpu", False, False)],
)
def test_a_crop_is_an_array_where_the_compiler_or_the_transform_stores_it(
    device: str, planned: bool, unchanged: bool
) -> None:
    program = tracing.trace(crossing, W, X)
    found = materialize(program, linearize(program), get_device(device))
    for graph, expected in ((found.graph, planned), (found.unchanged_graph, unchanged)):
        assert any(name.endswith(":slice") for name in graph.names) is expected


@pytest.mark.parametrize("platform", ["cuda", "tpu", "cpu"])
def test_storing_a_crop_changes_no_gradient(platform: Any) -> None:
    program = tracing.trace(crossing, W, X)
    (crop,) = crops(program)
    rest = tuple(range(crop + 1, len(program.equations)))
    stages = (
        Stage(roots=tuple(range(crop + 1)), kept=(), checkpointed=True),
        Stage(roots=rest, kept=(), checkpointed=False),
    )
    run = rewrite(program, stages, platform)
    found = jax.grad(lambda w, x: run([], [w, x])[0], argnums=(0, 1))(W, X)
    expected = jax.grad(crossing, argnums=(0, 1))(W, X)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    text = str(jax.make_jaxpr(lambda w, x: run([], [w, x]))(W, X))
    # On NVIDIA by the transform itself, on CPU as all that a checkpointed region hands on.
    stored = re.search(r"^ *\w+:f32\[32,16\] = optimization_barrier", text, re.MULTILINE)
    assert (stored is not None) is (platform != "tpu")
