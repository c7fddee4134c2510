"""Written loops that keep in the stacks of their gradients do what the plan does."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat_opt
from remat_opt.export import support
from remat_opt.gradient_places import places
from tests.lowered import operations
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

W = array("written_in_gradients", 9, 16, 16)
X = array("written_in_gradients_x", 16, 16)


def layers(w, x):
    """Stacked outputs, one of which has no derivative."""

    def layer(h, w):
        return h + jnp.tanh(h @ w), (jnp.sum(h), lax.stop_gradient(h[0]))

    h, (sums, first) = lax.scan(layer, x, w)
    return jnp.mean(h**2) + jnp.sum(jnp.sin(sums)) + jnp.mean(first)


def backward_in_twos(w, x):
    """From the last entry to the first, two at a time, with a constant."""
    scale = jnp.sin(x[0])

    def layer(h, w):
        return h + jnp.tanh(h @ w * scale), jnp.sum(h)

    h, sums = lax.scan(layer, x, w, reverse=True, unroll=2)
    return jnp.mean(h**2) + jnp.sum(jnp.sin(sums))


def narrow(w, x):
    """A state in half precision, and a mask, beside weights in single precision."""

    def layer(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        out = jnp.tanh(h @ w.astype(h.dtype))
        there = jax.random.bernoulli(own, 0.8, h.shape)
        return (jnp.where(there, out, h) + jnp.sin(out), key), None

    start = (x.astype(jnp.bfloat16), jax.random.key(0))
    return jnp.sum(lax.scan(layer, start, w)[0][0].astype(jnp.float32) ** 2)


def two_stacks(both, x):
    """Only one of the gradients takes what waits."""

    def layer(h, both):
        return h + jnp.tanh(h @ both[0]) @ both[1], None

    return jnp.mean(lax.scan(layer, x, both)[0] ** 2)


def nested(w, x):
    """A loop that keeps in gradients in another one that does."""

    def outer(h, w):
        h = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, w)[0]
        return jnp.sin(h), None

    return jnp.mean(lax.scan(outer, x, w)[0] ** 2)


CASES = {
    "layers": (layers, (W, X)),
    "backward_in_twos": (backward_in_twos, (W, X)),
    "narrow": (narrow, (W, X)),
    "two_stacks": (two_stacks, ((W, W), X)),
    "nested": (nested, (W.reshape(3, 3, 16, 16), X)),
}
#: Of those in half precision.
ROUNDING = {"narrow": 0.05}


def in_gradients(loop, lengths):
    """The loop and those in it, in such parts as keep in the first of their gradients."""
    part = loop.parts[0]
    while part.inside:
        part = part.inside[0]
    part = dataclasses.replace(part, loops=tuple(in_gradients(one, ()) for one in part.loops))
    parts = [
        dataclasses.replace(part, length=length)
        for length in lengths or [sum(one.length for one in loop.parts)]
    ]
    return dataclasses.replace(loop, parts=tuple(parts), in_gradients=(0,))


def planned(loss, args, lengths=(), argnums=(0, 1), device="cpu"):
    """The loss as planned, and its source."""
    plan = remat_opt.make_plan(loss, *args, device=device, argnums=argnums)
    loops = tuple(in_gradients(loop, lengths) for loop in plan.loops)
    assert loops
    plan = dataclasses.replace(plan, unchanged=False, loops=loops)
    source = remat_opt.to_source(plan, loss, *args, argnums=argnums)
    assert "= scan_in_gradients(" in source.text
    return remat_opt.apply_plan(plan, loss, argnums=argnums), source


def agree(here, there, tolerance=1e-5):
    """Differences are compared with the largest number."""
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        atol = tolerance * float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *((name, ()) for name in CASES),
        *((name, (3, 1, 5)) for name in ("layers", "backward_in_twos", "narrow")),
    ],
)
def test_same_gradients_in_the_same_bytes(name, lengths):
    loss, args = CASES[name]
    decorated, source = planned(loss, args, lengths)
    exported = source.load()
    gradients = [jax.value_and_grad(fn, (0, 1)) for fn in (decorated, exported, loss)]
    ours, theirs, plain = (jax.jit(gradient)(*args) for gradient in gradients)
    agree(ours, theirs, 0)
    agree(theirs, plain, ROUNDING.get(name, 1e-5))
    measured = [
        remat_opt.measure(gradient, *args, device="cpu").temporary_bytes
        for gradient in gradients[:2]
    ]
    assert measured[0] == measured[1]
    if jax.__version_info__ >= (0, 11):  # before, JAX also hands on a function that nothing calls
        assert operations(gradients[0], *args) == operations(gradients[1], *args)


def test_lays_gradients_out_as_the_plan_does():
    """A TPU puts another axis innermost if that fills its tiles."""
    args = jnp.zeros((9, 128, 16)), jnp.zeros((9, 16, 128)), jnp.zeros((64, 128))

    def loss(into, out, x):
        return two_stacks((into, out), x)

    decorated, source = planned(loss, args, argnums=(0, 1, 2), device="v5e")
    assert "hosts={0: 0}" in source.text
    gradients = [jax.grad(fn, (0, 1, 2)) for fn in (decorated, source.load())]
    ours, theirs = (
        [line for line in operations(gradient, *args) if "_layouts = " in line]
        for gradient in gradients
    )
    assert ours
    assert ours == theirs


@pytest.mark.parametrize("name", ["layers", "narrow"])
def test_derivatives_of_gradients(name):
    """Bits that wait in another dtype have no derivative: those of a plain loop are taken."""
    loss, args = CASES[name]
    _, source = planned(loss, args, (3, 1, 5))
    for transformed in (
        lambda fn: jax.grad(lambda w: jnp.sum(jax.grad(fn)(w, X) ** 2))(W),
        lambda fn: jax.jvp(jax.grad(fn), (W, X), (W, X))[1],
    ):
        found, expected = (
            jax.jit(lambda fn=fn, t=transformed: t(fn))() for fn in (source.load(), loss)
        )
        assert jnp.max(jnp.abs(expected)) > 1e-2
        agree(found, expected, ROUNDING.get(name, 1e-5))


def test_other_transformations():
    _, source = planned(layers, (W, X), (3, 1, 5))
    many = jnp.stack([X, 2 * X])
    for transformed in (
        lambda fn: jax.grad(fn)(W, X),
        lambda fn: jax.vmap(jax.grad(fn), (None, 0))(W, many),
        lambda fn: jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, many)))(W),
        lambda fn: jax.grad(jax.checkpoint(fn), 1)(W, X),
    ):
        found, expected = (
            jax.jit(lambda fn=fn, t=transformed: t(fn))() for fn in (source.load(), layers)
        )
        agree(found, expected)


def test_other_derivatives_are_refused():
    _, source = planned(backward_in_twos, (W, X), argnums=(0,))
    exported = source.load()
    with pytest.raises(ValueError, match="no derivative of the scan along all of its inputs"):
        jax.grad(exported, 1)(W, X)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda w: exported(w, X), (W,), (W,))


def test_where_types_name_a_mesh_it_waits_in_stacks_of_its_own():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = X[:8]
    _, source = planned(layers, (W, x))
    exported = source.load()

    def stacked(w, x):
        residuals = jax.tree.leaves(jax.vjp(exported, w, x)[1])
        return {one.shape for one in residuals if one.shape[:1] == (9,)}

    assert (9, 8, 16) not in stacked(W, x)
    with jax.set_mesh(mesh):
        w = jax.device_put(W, jax.NamedSharding(mesh, jax.P(None, None, None)))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows", None)))
        assert (9, 8, 16) in stacked(w, x)


def test_values_wait_where_the_plan_says():
    draw = random.Random(0)
    dtypes = ["float32", "bfloat16", "bool", "int8", "float16", "complex64", "uint32"]

    def kinds(count):
        shapes = [[draw.randint(0, 9) for _ in range(draw.randint(0, 3))] for _ in range(count)]
        return [jax.ShapeDtypeStruct(shape, draw.choice(dtypes)) for shape in shapes]

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    waiting = several = 0
    for _ in range(200):
        values, entries = [*kinds(5), keys], kinds(3)
        found = places(values, entries)
        waiting += sum(one.place is not None for pieces in found for one in pieces)
        several += sum(len(pieces) > 1 for pieces in found)
        as_tuples = [
            [
                (
                    one.first,
                    one.lines,
                    one.place
                    and (one.place.entry, one.place.row, one.place.rows, one.place.together),
                )
                for one in pieces
            ]
            for pieces in found
        ]
        assert support.places_in(values, entries) == as_tuples
    assert waiting > 100
    assert several > 20


def test_asks_for_nothing_but_jax_and_numpy():
    _, source = planned(layers, (W, X))
    lines = [line for line in source.text.splitlines() if line.startswith(("import", "from"))]
    roots = {line.split()[1].partition(".")[0] for line in lines}
    assert roots <= {"__future__", "collections", "functools", "jax", "numpy", "typing"}
    # What other plans need is not there.
    for name in ("chosen", "tied", "stored"):
        assert f"def {name}(" not in source.text
