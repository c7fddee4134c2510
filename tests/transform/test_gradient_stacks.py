"""A ``scan`` that keeps what waits in the stacks of its gradients gives the same results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_opt
from remat_opt import _jax_internals as internals
from remat_opt.errors import PlanFileError
from remat_opt.program import tracing
from remat_opt.schedule import Inside, Loop, Stage
from remat_opt.transform.rewriting import rewrite
from tests.devices import needs_cuda_plugin, needs_libtpu
from tests.transform.test_loops import (
    PARTS,
    Parts,
    W,
    X,
    agree,
    backward_in_twos,
    frozen,
    layers,
    loops_of,
    nested,
    shared,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("quick_search")

Loss = Callable[..., jax.Array]
WHOLE: Sequence[Parts] = [[(7, False)], [(7, True)], [(2, False), (4, True), (1, False)]]


def narrow(w: jax.Array, x: jax.Array) -> jax.Array:
    """A state in half precision, and a mask, beside weights in single precision."""

    def body(carry: Any, w: jax.Array) -> Any:
        h, key = carry
        key, own = jax.random.split(key)
        out = jnp.tanh(h @ w.astype(h.dtype))
        kept = jax.random.bernoulli(own, 0.8, h.shape)
        return (jnp.where(kept, out, h) + jnp.sin(out), key), None

    start = (x.astype(jnp.bfloat16), jax.random.key(0))
    return jnp.sum(lax.scan(body, start, w)[0][0].astype(jnp.float32) ** 2)


def wide(w: jax.Array, x: jax.Array) -> jax.Array:
    """A state too large for the gradients of an iteration."""
    start = jnp.tile(x, (3, 1))
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), start, w)[0] ** 2)


def in_gradients(loops: Sequence[Inside]) -> list[Inside]:
    """The loops, all that are without chunks keeping in gradients."""
    found: list[Inside] = []
    for loop in loops:
        assert isinstance(loop, Loop)
        parts = tuple(
            dataclasses.replace(part, loops=tuple(in_gradients(part.loops))) for part in loop.parts
        )
        chunks = any(part.inside for part in parts)
        hosts = () if chunks else (0, 1, 2)
        found.append(dataclasses.replace(loop, parts=parts, in_gradients=hosts))
    return found


def planned(loss: Loss, parts: Parts, platform: str = "cpu") -> Loss:
    program = tracing.trace(loss, W, X, signature=tracing.Signature(argnums=(0, 1)))
    stages = [Stage(roots=tuple(range(len(program.equations))), kept=(), checkpointed=False)]
    run = rewrite(program, stages, platform, loops=in_gradients(loops_of(program, parts)))
    return lambda w, x: run(program.constant_values, [w, x])[0]


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        *((layers, parts) for parts in WHOLE),
        *((loss, WHOLE[2]) for loss in (frozen, backward_in_twos, narrow, wide)),
        *((loss, WHOLE[0]) for loss in (shared, nested, narrow)),
        *(
            pytest.param(loss, parts, marks=[pytest.mark.slow, pytest.mark.versions])
            for loss in (shared, frozen, backward_in_twos, nested, wide)
            for parts in WHOLE[1:]
        ),
    ],
)
def test_values_and_gradients_are_those_of_the_scan(loss: Loss, parts: Parts) -> None:
    written = planned(loss, parts)
    closed, _ = internals.make_jaxpr(jax.value_and_grad(written, (0, 1)), W, X)
    internals.check(closed)
    agree(jax.jit(jax.value_and_grad(written, (0, 1)))(W, X), unchanged(loss))


def near(found: Any, expected: Any, share: float = 1e-4) -> None:
    """Whether they are equal, to a share of the largest entry."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        assert scale > 0.1
        assert float(jnp.max(jnp.abs(one - other))) < share * scale


@pytest.mark.parametrize(
    "loss", [layers, *(pytest.param(one, marks=pytest.mark.slow) for one in (nested, shared))]
)
def test_other_transformations(loss: Loss) -> None:
    written = planned(loss, WHOLE[2])
    many = jnp.stack([X, 2 * X])
    for transformed in (
        lambda f: jax.jvp(f, (W, X), (W, X)),
        lambda f: jax.jvp(jax.grad(f), (W, X), (W, X)),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(W, many),
        lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(f, (None, 0))(w, many)))(W),
        lambda f: jax.grad(f, 1)(W, X),
        lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W),
        lambda f: jax.hessian(f, 1)(W, X),
    ):
        near(
            jax.jit(lambda transformed=transformed: transformed(written))(),
            jax.jit(lambda transformed=transformed: transformed(loss))(),
        )


def test_derivatives_of_gradients_see_what_was_packed() -> None:
    """Bits that wait in another dtype have no derivative: those of a plain loop are taken."""
    for loss in (narrow, wide):
        for transformed in (
            lambda f: jax.jvp(jax.grad(f), (W, X), (W, X))[1],
            lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W),
        ):
            written = planned(loss, WHOLE[2])
            found = jax.jit(lambda t=transformed, f=written: t(f))()
            expected = jax.jit(lambda t=transformed, f=loss: t(f))()
            near(found, expected, 0.1)


@pytest.mark.parametrize(
    ("loss", "parts", "beside"),
    [
        (layers, WHOLE[0], set()),
        # Of the product and the state, three rows each, four fit.
        (layers, WHOLE[1], {(7, 2, 4)}),
        (narrow, WHOLE[0], {(7,)}),  # the keys
        (wide, WHOLE[0], {(7, 5, 4)}),
    ],
)
def test_nothing_else_waits_but_what_does_not_fit(
    loss: Loss, parts: Parts, beside: set[tuple[int, ...]]
) -> None:
    residuals = jax.tree.leaves(jax.vjp(planned(loss, parts), W, X)[1])
    stacked = [one.shape for one in residuals if one.shape[:1] == (7,)]
    assert stacked.count(W.shape) == 2  # the weights, and the stack of their gradient
    assert set(stacked) - {W.shape} == beside


def test_where_types_name_a_mesh_it_waits_in_stacks_of_its_own() -> None:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    split = jax.NamedSharding(mesh, jax.P("rows", None))
    written = planned(layers, WHOLE[0])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, split)
        w = jax.device_put(W, jax.NamedSharding(mesh, jax.P(None, None, None)))
        residuals = jax.tree.leaves(jax.vjp(written, w, x)[1])
        assert (7, 3, 4) in {one.shape for one in residuals}
        agree(jax.jit(jax.value_and_grad(written, (0, 1)))(w, x), unchanged(layers))


def test_chunks_are_refused() -> None:
    program = tracing.trace(layers, W, X)
    loops = [dataclasses.replace(one, in_gradients=(0,)) for one in loops_of(program, PARTS[3])]
    with pytest.raises(PlanFileError, match="Make the plan again"):
        rewrite(program, (), "cpu", loops=loops)


def mlp(w: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> Any:
        return h + jnp.tanh(h @ w[0]) @ w[1], None

    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def by_hand(w: Any, x: jax.Array) -> jax.Array:
    """A checkpoint around the body keeps the state of every iteration."""

    def layer(h: jax.Array, w: Any) -> Any:
        return h + jnp.tanh(h @ w[0]) @ w[1], None

    return jnp.mean(lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)[0] ** 2)


CUDA, TPU = [pytest.mark.cuda, needs_cuda_plugin], [pytest.mark.tpu, needs_libtpu]


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


@pytest.mark.parametrize(
    ("device", "length", "width", "rows", "share"),
    [
        ("cpu", 8, 64, 256, 0.9),
        pytest.param("h200", 24, 1024, 4096, 0.9, marks=[*CUDA, pytest.mark.slow]),
        pytest.param("v5e", 24, 1024, 4096, 0.35, marks=[*TPU, pytest.mark.slow]),
    ],
)
def test_states_take_no_memory_beside_the_gradients(
    device: str, length: int, width: int, rows: int, share: float
) -> None:
    """On TPU, some of them would be in half precision, and in vector memory."""
    w = shape(length, width, 4 * width), shape(length, 4 * width, width)
    x = shape(rows, width)
    plan = remat_opt.make_plan(mlp, w, x, device=device, gradients="results", verify=True)
    (loop,) = plan.loops
    assert isinstance(loop, Loop)
    assert loop.in_gradients
    assert plan.measured is not None
    found = plan.measured.temporary_bytes
    written = remat_opt.measure(jax.grad(by_hand), w, x, device=device).temporary_bytes
    assert found < written - share * length * rows * width * 4
    assert plan.predicted.temporary_bytes == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize(
    ("device", "length", "width", "rows"),
    [
        ("cpu", 8, 64, 256),
        pytest.param("h200", 24, 1024, 4096, marks=[*CUDA, pytest.mark.slow]),
        pytest.param("v5e", 24, 1024, 4096, marks=[*TPU, pytest.mark.slow]),
    ],
)
def test_in_a_step_the_gradients_are_counted_once(
    device: str, length: int, width: int, rows: int
) -> None:
    w = shape(length, width, 4 * width), shape(length, 4 * width, width)
    x = shape(rows, width)
    kept = remat_opt.make_plan(
        mlp, w, x, device=device, gradients="consumed", budget=0.4, verify=True
    )
    assert any(isinstance(loop, Loop) and loop.in_gradients for loop in kept.loops)
    assert any(part.kept for loop in kept.loops if isinstance(loop, Loop) for part in loop.parts)
    assert kept.measured is not None
    found = kept.measured.temporary_bytes
    assert found > 2 * length * 4 * width * width * 4
    assert kept.predicted.temporary_bytes == pytest.approx(found, rel=0.15)


def test_integers_may_have_64_bits() -> None:
    with jax.enable_x64(True):
        for loss in (layers, wide):
            program = tracing.trace(loss, W, X, signature=tracing.Signature(argnums=(0, 1)))
            roots = tuple(range(len(program.equations)))
            stages = [Stage(roots=roots, kept=(), checkpointed=False)]
            loops = in_gradients(loops_of(program, WHOLE[2]))
            run = rewrite(program, stages, "cpu", loops=loops)
            found = jax.grad(lambda w, run=run, own=program.constant_values: run(own, [w, X])[0])(W)
            near(found, jax.grad(loss)(W, X))
