"""A ``scan`` run in parts gives the same results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt import _jax_internals as internals
from remat_opt.errors import PlanFileError
from remat_opt.program import bodies, tracing
from remat_opt.program.record import Program
from remat_opt.schedule import Loop, Part, Stage
from remat_opt.transform.rewriting import rewrite
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

W = array("w", 7, 4, 4, scale=0.3)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
Loss = Callable[..., jax.Array]


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)[0] ** 2)


def backward_in_twos(w: jax.Array, x: jax.Array) -> jax.Array:
    """Reverse, unrolled, stacked outputs, with an integer and a key in the carry."""

    def body(carry: Any, entry: Any) -> Any:
        h, key, count = carry
        w, number = entry
        key, own = jax.random.split(key)
        h = jnp.tanh(h @ w) * jax.random.bernoulli(own, 0.8, h.shape) + number
        return (h, key, count + 1), (jnp.sum(h), count, jnp.zeros((0, 2)))

    start = (x, jax.random.key(0), 0)
    (h, _, count), (sums, counts, _) = lax.scan(
        body, start, (w, jnp.arange(len(w))), reverse=True, unroll=2
    )
    return jnp.sum(h**2) + jnp.sum(sums * counts) + sums[0] * count


def shared(w: jax.Array, x: jax.Array) -> jax.Array:
    """No stacked inputs, closed-over constants, and a carry that is passed on unchanged."""

    def body(carry: Any, _: None) -> Any:
        h, same = carry
        return (jnp.sin(h @ w[0]) + same * X, same), h[0]

    (h, _), rows = lax.scan(body, (x, x[0, 0]), None, length=7)
    return jnp.sum(h) + jnp.sum(rows**2)


def frozen(w: jax.Array, x: jax.Array) -> jax.Array:
    """Part of the carry, and of what is read, has no derivative."""

    def body(carry: Any, w: Any) -> Any:
        h, statistics = carry
        h = h @ w + lax.stop_gradient(statistics)
        return (jnp.tanh(h), 0.9 * lax.stop_gradient(statistics + jnp.mean(h))), None

    return jnp.sum(lax.scan(body, (x, jnp.zeros(())), w)[0][0])


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    def outer(h: jax.Array, w: jax.Array) -> Any:
        h, sums = lax.scan(lambda h, row: (jnp.tanh(h @ w) + row, jnp.sum(h)), h, h)
        return h, jnp.sum(sums)

    h, sums = lax.scan(outer, x, w)
    return jnp.sum(h**2) + jnp.sum(sums)


#: Length, whether products are kept, and the parts of a chunk.
Parts = Sequence[tuple[int, Any]]
PARTS: list[Parts] = [
    [(7, False)],
    [(7, [(7, True)])],
    [(2, False), (5, True)],
    [(6, [(3, False)]), (1, True)],
    [(4, [(4, [(2, True)])]), (2, [(2, False)]), (1, False)],
    [(6, [(1, True), (2, [(1, False), (1, True)])]), (1, False)],
]


def loops_of(program: Program, parts: Parts) -> list[Loop]:
    found = []
    for root, equation in enumerate(program.equations):
        if equation.operation.primitive != "scan":
            continue
        body = bodies.body_of(equation, bodies.varying(program))
        inner = internals.scan_of(equation.jax_equation).length
        fits = [(inner, True)] if inner != sum(length for length, _ in parts) else parts
        found.append(Loop(root=root, parts=tuple(part(body, parts, *one) for one in fits)))
    return found


def part(body: Program, parts: Parts, length: int, inside: Any) -> Part:
    if not isinstance(inside, bool):
        return Part(length=length, inside=tuple(part(body, parts, *one) for one in inside))
    every = range(len(body.equations))
    products = [n for n in every if body.equations[n].operation.primitive == "dot_general"]
    return Part(
        length=length,
        kept=tuple(products) if inside else (),
        stages=(Stage(roots=tuple(every), kept=(), checkpointed=False),),
        loops=tuple(loops_of(body, parts)),
    )


def in_parts(loss: Loss, parts: Parts) -> Loss:
    program = tracing.trace(loss, W, X, signature=tracing.Signature(argnums=(0, 1)))
    stages = [Stage(roots=tuple(range(len(program.equations))), kept=(), checkpointed=False)]
    run = rewrite(program, stages, "cpu", loops=loops_of(program, parts))
    return lambda w, x: run(program.constant_values, [w, x])[0]


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.weak_type == other.weak_type
        assert jnp.allclose(one, other, rtol=2e-5, atol=2e-5)


@functools.cache
def unchanged(loss: Loss) -> Any:
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        *((layers, parts) for parts in PARTS),
        *[(shared, PARTS[4]), (frozen, PARTS[5]), (backward_in_twos, PARTS[3]), (nested, PARTS[2])],
        *(
            pytest.param(loss, parts, marks=[pytest.mark.slow, pytest.mark.versions])
            for loss, several in (
                *[(shared, [*PARTS[:4], PARTS[5]]), (frozen, PARTS[:5])],
                *[(backward_in_twos, PARTS[4:]), (nested, PARTS[3:4])],
            )
            for parts in several
        ),
    ],
)
def test_values_and_gradients_are_those_of_the_scan(loss: Loss, parts: Any) -> None:
    planned = in_parts(loss, parts)
    closed, _ = internals.make_jaxpr(jax.value_and_grad(planned, (0, 1)), W, X)
    internals.check(closed)
    agree(jax.jit(jax.value_and_grad(planned, (0, 1)))(W, X), unchanged(loss))


@pytest.mark.parametrize("loss", [layers, pytest.param(frozen, marks=pytest.mark.slow)])
def test_other_transformations(loss: Loss) -> None:
    planned = in_parts(loss, PARTS[3])
    many = jnp.stack([X, 2 * X])
    for transformed in (
        lambda f: jax.jvp(f, (W, X), (W, X)),
        lambda f: jax.jvp(jax.grad(f), (W, X), (W, X)),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(W, many),
        lambda f: jax.grad(f, 1)(W, X),
    ):
        agree(
            jax.jit(lambda transformed=transformed: transformed(planned))(),
            jax.jit(lambda transformed=transformed: transformed(loss))(),
        )


def test_gradients_of_parts_are_added_in_their_place() -> None:
    """No part has a separate gradient for everything stacked."""
    gradient = str(jax.make_jaxpr(jax.grad(in_parts(layers, PARTS[2])))(W, X))
    scans = [line for line in gradient.splitlines() if "= scan[" in line]
    assert len(scans) == 4
    assert gradient.count("f32[7,4,4] = broadcast_in_dim 0.0") == 1 + 2  # and of each slice


def test_nothing_but_what_is_kept_and_carried_is_stacked() -> None:
    for parts, shapes in (
        (PARTS[0], {(7, 3, 4)}),
        (PARTS[3], {(2, 3, 4), (1, 3, 4)}),
    ):
        residuals = jax.tree.leaves(jax.vjp(in_parts(layers, parts), W, X)[1])
        stacked = [one.shape for one in residuals if one.ndim == 3 and one.shape != W.shape]
        assert set(stacked) == shapes
    kept = jax.tree.leaves(jax.vjp(in_parts(layers, [(7, True)]), W, X)[1])
    assert sum(one.shape == (7, 3, 4) for one in kept) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: Loop(root=loop.root + 1, parts=loop.parts),
        lambda loop: Loop(root=99, parts=loop.parts),
        lambda loop: Loop(root=loop.root, parts=loop.parts[:1]),
        lambda loop: Loop(root=loop.root, parts=()),
    ],
)
def test_loops_that_do_not_fit_are_refused(change: Callable[[Loop], Loop]) -> None:
    program = tracing.trace(layers, W, X)
    (loop,) = loops_of(program, PARTS[2])
    with pytest.raises(PlanFileError, match="Make the plan again"):
        rewrite(program, (), "cpu", loops=[change(loop)])
    with pytest.raises(PlanFileError, match="Make the plan again"):
        rewrite(program, (), "cpu", loops=[loop, loop])
