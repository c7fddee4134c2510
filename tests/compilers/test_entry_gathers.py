"""Gathers of entries along one axis, for each place along the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.entry_gathers import flattening, is_entry_gather, listed
from remat_opt.compilers.storage import Storage, dataflow
from remat_opt.device import Platform
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.propagation import per_device
from remat_opt.schedule import Stage
from remat_opt.transform import rewriting
from tests.compiler_graphs import InStep, compiler_of
from tests.devices import needs_cuda_plugin

A = jnp.sin(jnp.arange(2.0 * 3 * 4 * 5)).reshape(2, 3, 4, 5)
#: Below zero and beyond the end, too.
PLACES = (jnp.arange(2 * 3 * 4 * 5).reshape(A.shape) * 7) % 11 - 5
CUDA = Rules(platform="cuda")

along = jnp.take_along_axis


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda a: along(a, PLACES, -1), True),
        (lambda a: along(a, PLACES, 1, mode="clip"), True),
        (lambda a: along(a, PLACES[:, :, :1], 2), True),
        (lambda a: along(a[:1], PLACES[:1], -1), True),
        (lambda a: jax.vmap(lambda row, places: row[places])(a[0, 0], PLACES[0, 0]), True),
        # Whole rows, from an axis without others, and with indices into two axes.
        (lambda a: a[PLACES[0, 0, 0]], False),
        (lambda a: a[0, 0, 0][PLACES], False),
        (lambda a: a[jnp.arange(2)[:, None], PLACES[0, 0, :2]], False),
    ],
)
def test_what_reads_entries_along_an_axis(
    fn: Callable[[jax.Array], jax.Array], expected: bool
) -> None:
    program = tracing.trace(lambda a: jnp.sum(fn(a)), A)
    found = [is_entry_gather(one) for one in program.equations]
    assert sum(one.operation.primitive == "gather" for one in program.equations) == 1
    assert sum(found) == expected
    assert len(flattening(program, CUDA)) == expected
    assert not flattening(program, Rules(platform="tpu"))


def test_on_a_mesh_no_array_is_flat() -> None:
    """Each device looks up its own rows, and needs no others."""
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("i"))
    a, places = (jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=split) for one in (A, PLACES))
    program = tracing.trace(lambda a, places: jnp.sum(along(a, places, -1)), a, places)
    assert any(map(is_entry_gather, program.equations))
    assert not flattening(program, CUDA)
    part = per_device(program)
    assert not flattening(part, CUDA)
    # So plans store the indices, too.
    flow = dataflow(part, linearize(part), compiler_of("h200"))
    (value,) = listed(flow, CUDA)
    for unchanged in (True, False):
        storage = Storage(flow, compiler_of("h200"), unchanged=unchanged)
        assert storage.bytes_of(value) == 4 * 4 * PLACES.size // 2


def test_one_entry_of_each_row_is_another_matter() -> None:
    program = tracing.trace(lambda a: jnp.sum(along(a, PLACES[..., :1], -1)), A)
    assert any(map(is_entry_gather, program.equations))
    assert not flattening(program, CUDA)


def test_indices_are_as_many_times_as_large_as_there_are_axes() -> None:
    def sizes(fn: Callable[..., jax.Array], *args: Any) -> list[int]:
        program = tracing.trace(fn, *args)
        flow = dataflow(program, linearize(program), compiler_of("h200"))
        return sorted(listed(flow, CUDA).values())

    assert sizes(lambda a, i: jnp.sum(along(a, i, -1)), A, PLACES) == [4]
    assert sizes(lambda a, i: jnp.sum(along(a[0], i[0], -1)), A, PLACES) == [3]
    # The same ones twice, and others.
    assert sizes(lambda a, i: jnp.sum(along(jnp.sin(along(a, i, -1)), i, -1)), A, PLACES) == [0, 4]
    assert sizes(lambda a, i: jnp.sum(along(along(a, i, -1), i + 1, -1)), A, PLACES) == [4, 4]


def rewritten(fn: Callable[[jax.Array], jax.Array], platform: Platform) -> Callable[..., Any]:
    """The function under a checkpoint."""
    program = tracing.trace(fn, A)
    stages = (Stage(roots=tuple(range(len(program.equations))), kept=(), checkpointed=True),)
    run = rewriting.rewrite(program, stages, platform)
    return lambda a: run(program.constant_values, [a])[0]


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize(
    "pick",
    [
        lambda a, i, mode: along(a, i, -1, mode=mode),
        lambda a, i, mode: along(a, i, 0, mode=mode),
        lambda a, i, mode: along(a, i[:, :, :2], 2, mode=mode),
        lambda a, i, mode: along(a[:, :1], i[:, :1], -1, mode=mode),
        lambda a, i, mode: along(a, i.astype("int8"), 1, mode=mode),
        lambda a, i, mode: along(a, jnp.abs(i).astype("uint8"), 1, mode=mode),
        lambda a, i, mode: along(jnp.round(9 * a).astype(int), i, -1, mode=mode) * jnp.mean(a),
    ],
)
def test_as_a_flat_array_it_is_the_same(
    pick: Callable[[jax.Array, jax.Array, str], jax.Array], mode: str
) -> None:
    """Value and gradient, of indices that are out of bounds where there is a rule for them."""
    places = jnp.abs(PLACES) % 2 if mode == "promise_in_bounds" else PLACES

    def found(a: jax.Array) -> jax.Array:
        return pick(jnp.sin(a), places, mode)

    def loss(a: jax.Array) -> jax.Array:
        picked = found(a)
        return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(picked), picked, 0)))

    np.testing.assert_array_equal(rewritten(found, "cuda")(A), found(A))
    run = rewritten(loss, "cuda")
    assert "operand_batching_dims=()" not in str(jax.make_jaxpr(loss)(A))
    assert "operand_batching_dims=()" in str(jax.make_jaxpr(run)(A))
    np.testing.assert_allclose(jax.grad(run)(A), jax.grad(loss)(A), rtol=1e-6, atol=1e-7)
    here, there = (jax.jvp(fn, (A,), (jnp.cos(A),))[1] for fn in (run, loss))
    np.testing.assert_allclose(here, there, rtol=1e-5)
    here, there = (jax.vmap(jax.grad(fn))(jnp.stack([A, 2 * A])) for fn in (run, loss))
    np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.cuda
@needs_cuda_plugin
def test_reordered_layers_take_what_is_expected() -> None:
    """Unchanged, with the indices along all axes; in a plan, without."""

    def loss(weights: list[jax.Array], x: jax.Array, places: jax.Array) -> jax.Array:
        for w in weights:
            x = x + jnp.tanh(along(jnp.tanh(x @ w), places, -1))
        return jnp.mean(x**2)

    shape = jax.ShapeDtypeStruct
    x, places = (shape((8, 8, 512, 512), kind) for kind in ("float32", "int32"))
    step = InStep(loss, [shape((512, 512), "float32")] * 4, x, places)
    entries = 8 * 8 * 512 * 512
    expected = step.problem.unchanged.peak_bytes
    assert step.unplanned_bytes() == pytest.approx(expected, rel=0.02)
    assert expected > (4 * 12 + 16) * entries
    plan = step.plan()
    assert plan.predicted.temporary_bytes < 28 * entries
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.02)
