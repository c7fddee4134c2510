"""Random losses like those of users, each decorated and compared with itself undecorated.

A program is determined by its seed alone. It mixes what real programs mix and hand-made tests leave
out: frozen arguments, parts that nothing differentiated reaches, several loss terms that share
values, masks by statistics, loops of many kinds, with branches, keys or checkpoints inside, kernels
with custom rules, loops behind a ``stop_gradient``, derivative rules that give zero, inner
checkpoints, kept or dissolved, maps over devices, arguments on a mesh, branches without a
derivative, values that nothing reads, auxiliary outputs, and several dtypes. ``hunt`` goes through
many of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import remat_opt
from remat_opt.errors import BudgetError
from tests.op_by_op import run_op_by_op
from tests.rewritten import always_rewritten

DEVICES = ("h200", "v5e", "cpu")
#: How programs are run: as they are, most of them compiled; equation by equation, which is quicker;
#: or not at all, only traced.
How = Literal["as it is", "op by op", "traced"]
#: Of so many results that are got equation by equation, one is got as the program is, by whether it
#: is compiled. If not, our own cache of traces is at work.
_AS_IT_IS = {True: 6, False: 3}
#: By dtype, how far a gradient may be off, as a share of its largest entry.
_TOLERANCES = {"float64": 1e-8, "float32": 2e-3, "bfloat16": 0.2}


# --- What programs are made of: from arrays of rows and columns to one of the same shape ---


@jax.custom_jvp
def no_tangent(a: jax.Array) -> jax.Array:
    return jnp.cos(a)


@no_tangent.defjvp
def _no_tangent_rule(primals: Any, tangents: Any) -> Any:
    return no_tangent(*primals), jnp.zeros_like(primals[0])


@jax.custom_jvp
def half_tangent(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(a) * b


@half_tangent.defjvp
def _half_tangent_rule(primals: Any, tangents: Any) -> Any:
    return half_tangent(*primals), tangents[1] * jnp.tanh(primals[0])


@jax.custom_vjp
def own_gradient(a: jax.Array) -> jax.Array:
    return jnp.sin(a) * a


own_gradient.defvjp(lambda a: (own_gradient(a), a), lambda a, ct: (ct * jnp.tanh(a),))


@jax.custom_vjp
def kernel(a: jax.Array, w: jax.Array) -> jax.Array:
    """Like a user's own kernel: its rule says what it keeps."""
    return jnp.tanh(a @ w)


def _kernel_forward(a: jax.Array, w: jax.Array) -> Any:
    result = kernel(a, w)
    return result, (a, w, result)


def _kernel_backward(kept: Any, cotangent: jax.Array) -> Any:
    a, w, result = kept
    moved = cotangent * (1 - result * result)
    return moved @ w.T, a.T @ moved


kernel.defvjp(_kernel_forward, _kernel_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(a: jax.Array, factor: float) -> jax.Array:
    return jnp.sin(a) * factor


scaled.defvjp(
    lambda a, factor: (scaled(a, factor), a),
    lambda factor, a, cotangent: (cotangent * jnp.cos(a) * factor,),
)


def loop(a: jax.Array) -> jax.Array:
    """A loop that has no derivative."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, a))[1]


def scanned(a: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.tanh(c @ w) + c, jnp.sum(c)), a, None, length=3)[0]


def scanned_with_frozen(a: jax.Array, w: jax.Array) -> jax.Array:
    def step(carry: Any, row: jax.Array) -> Any:
        c, frozen = carry
        return (jnp.tanh(c @ w) + frozen, lax.stop_gradient(frozen + row)), jnp.mean(c)

    return lax.scan(step, (a, lax.stop_gradient(a)), a[:3])[0][0]


def scanned_checkpoint(a: jax.Array, w: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda c, _: (jnp.tanh(jnp.sin(c @ w) @ w) + c, None))
    return lax.scan(body, a, None, length=4)[0]


def scanned_with_policy(a: jax.Array, w: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.dots_saveable
    body = jax.checkpoint(lambda c, _: (jnp.tanh(jnp.sin(c @ w) @ w), c[0]), policy=policy)
    last, rows = lax.scan(body, a, None, length=3, reverse=True)
    return last + rows.sum(0)


def scanned_branches(a: jax.Array, w: jax.Array) -> jax.Array:
    """Layers that may be skipped."""

    def step(carry: Any, skipped: jax.Array) -> Any:
        c, count = carry
        c = lax.cond(skipped, lambda b: b, lambda b: kernel(jnp.cos(b), w) + b, c)
        return (c, count + 1), count * jnp.mean(c)

    (last, _), means = lax.scan(step, (a, 0), jnp.arange(4) % 3 == 1)
    return last + means.sum()


def scanned_stack(a: jax.Array, w: jax.Array) -> jax.Array:
    """Stacked weights, each iteration with its own key."""

    def step(c: jax.Array, entry: Any) -> Any:
        one, key = entry
        mask = jax.random.bernoulli(key, 0.8, c.shape)
        return jnp.where(mask, jnp.tanh(normalised(c) @ one), 0).astype(c.dtype) + c, None

    weights = jnp.stack([w, w * 0.5, -w, w.T])
    return lax.scan(step, a, (weights, jax.random.split(jax.random.key(1), 4)))[0]


def scanned_layers(a: jax.Array, w: jax.Array) -> jax.Array:
    """Layers of two products, whose states and activations wait for the backward pass."""

    def step(c: jax.Array, entry: Any) -> Any:
        up, down = entry
        return c + jnp.tanh(jnp.tanh(c @ up) @ down), None

    up = jnp.stack([jnp.concatenate([w, w * k], 1) for k in range(4)])
    return lax.scan(step, a, (up, jnp.swapaxes(up, 1, 2) * 0.5))[0]


def scanned_twice(a: jax.Array, w: jax.Array) -> jax.Array:
    def inside(c: jax.Array, _: None) -> Any:
        return jnp.tanh(c @ w) + c * 0.5, None

    return lax.scan(lambda c, _: lax.scan(inside, jnp.sin(c), None, length=2), a, None, length=3)[0]


def switched(a: jax.Array, w: jax.Array) -> jax.Array:
    branches = [
        lambda b: jnp.tanh(jnp.sin(b @ w) @ w),
        jax.checkpoint(lambda b: jnp.tanh(jnp.sin(b @ w) @ w) * 2),
        lambda b: b * 0.1,
    ]
    which = jnp.int32(jnp.abs(lax.stop_gradient(a).sum()) * 10) % 3
    return lax.switch(which, branches, a)


def branch_with_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(
        jnp.sum(lax.stop_gradient(a)) > 0,
        lambda b: scanned_checkpoint(b, w),
        lambda b: jnp.sin(b) @ w,
        a,
    )


def shared_by_branches(a: jax.Array, w: jax.Array) -> jax.Array:
    """Both branches read earlier values; outputs of many types, some never read."""
    shared = jnp.tanh(a @ w)

    def first(b: jax.Array, c: jax.Array) -> Any:
        d = jnp.sin(b @ w) * c
        return jnp.tanh(d @ w), jnp.argmax(d, -1), d > 0

    def second(b: jax.Array, c: jax.Array) -> Any:
        return b + c, jnp.argmin(c, -1), jnp.isfinite(lax.stop_gradient(b))

    last, places, mask = lax.cond(chance_of(a) % 2 == 0, first, second, shared, jnp.cos(shared))
    return jnp.where(mask, last, 0) + shared * (places[:, None] % 2)


def chance_of(a: jax.Array) -> jax.Array:
    """A whole number that depends on an array and has no derivative."""
    return jnp.int32(jnp.abs(lax.stop_gradient(a.astype(jnp.float32)).sum()) * 10)


def switched_twice(a: jax.Array, w: jax.Array) -> jax.Array:
    """A choice in a choice, with equal branches and one without a derivative."""
    deep = lambda b: jnp.tanh(jnp.sin(b @ w) @ w) + b  # noqa: E731

    def inner(b: jax.Array) -> jax.Array:
        return lax.cond(chance_of(b) % 2 == 0, deep, lambda c: jnp.cos(c) @ w, deep(b))

    return lax.switch(chance_of(a) % 4, [deep, deep, inner, lax.stop_gradient], jnp.sin(a))


def scan_of_choices(a: jax.Array, w: jax.Array) -> jax.Array:
    """Each iteration chooses by its number among branches that share its carry, and counts."""

    def step(carry: Any, which: jax.Array) -> Any:
        c, count = carry
        d = normalised(c)
        branches = [
            lambda b, d: jnp.tanh(d @ w) @ w + b,
            lambda b, d: b + d,
            lambda b, d: lax.stop_gradient(b) * 0.5,
        ]
        c = lax.switch(which, branches, c, d)
        return (c, count + (which > 0)), jnp.max(lax.stop_gradient(c))

    (last, count), most = lax.scan(step, (a, jnp.int32(0)), jnp.arange(5) % 3)
    return last / (1 + count).astype(a.dtype) + most.sum() * 0.01


def choice_of_scans(a: jax.Array, w: jax.Array) -> jax.Array:
    """Loops of different lengths in branches, one of which returns what it stacked."""

    def stacked(b: jax.Array) -> jax.Array:
        last, rows = lax.scan(lambda c, _: (jnp.tanh(c @ w) + c, jnp.sin(c)), b, None, length=3)
        return last + rows.sum(0)

    def backward(b: jax.Array) -> jax.Array:
        return lax.scan(lambda c, row: (jnp.tanh(c @ w) * row, None), b, b[:4], reverse=True)[0]

    return lax.switch(
        chance_of(a) % 3, [stacked, backward, lambda b: loop(lax.stop_gradient(b))], a
    )


def choice_behind_stop(a: jax.Array, w: jax.Array) -> jax.Array:
    """An undifferentiated choice with an unbounded loop inside; its result is used."""
    frozen = lax.stop_gradient(a)
    found = lax.cond(
        chance_of(a) % 2 == 0, lambda b: loop(jnp.tanh(b @ w)), lambda b: b @ w, frozen
    )
    return jnp.tanh(a @ w) * lax.stop_gradient(found)


def nested_checkpoints(a: jax.Array, w: jax.Array) -> jax.Array:
    inner = jax.checkpoint(lambda b: jnp.tanh(b @ w) * b)
    return jax.checkpoint(lambda b: inner(jnp.sin(inner(b))) + b)(a)


def named_inside(a: jax.Array, w: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names("mine")
    return jax.checkpoint(
        lambda b: jnp.sin(checkpoint_name(jnp.tanh(b @ w), "mine") @ w), policy=policy
    )(a)


def in_double(a: jax.Array, w: jax.Array) -> jax.Array:
    """Mixed precision the other way round: nothing is newly rounded."""
    return jnp.tanh(a.astype(jnp.float64) @ w.astype(jnp.float64)).astype(a.dtype)


def by_static_count(a: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i * 0.1, a)


def normalised(a: jax.Array) -> jax.Array:
    mean, variance = jnp.mean(a, -1, keepdims=True), jnp.var(a, -1, keepdims=True)
    return (a - mean) * lax.rsqrt(variance + 1e-3)


def attention(a: jax.Array, w: jax.Array) -> jax.Array:
    scores = (a @ w) @ a.T / a.shape[-1]
    return jax.nn.softmax(scores, -1) @ a


def gated(a: jax.Array, w: jax.Array) -> jax.Array:
    """Like a recurrent layer: one product, cut into gates."""
    gates = jnp.concatenate([a, a], -1) @ jnp.concatenate([w, -w]) / a.shape[-1]
    first, second = jnp.split(jnp.concatenate([gates, gates + a], -1), 2, -1)
    return jax.nn.sigmoid(first) * jnp.tanh(second)


def cross_entropy(a: jax.Array) -> jax.Array:
    labels = jnp.arange(a.shape[0]) % a.shape[1]
    picked = jnp.take_along_axis(jax.nn.log_softmax(a), labels[:, None], axis=1)
    return a * 0.5 - jnp.mean(picked)


def pooled(a: jax.Array) -> jax.Array:
    image = jax.nn.relu(a)[None, :, :, None]
    window, strides = (1, 2, 2, 1), (1, 1, 1, 1)
    return lax.reduce_window(image, -jnp.inf, lax.max, window, strides, "SAME")[0, :, :, 0]


def convolved(a: jax.Array, w: jax.Array) -> jax.Array:
    kernel = w[:3, :3, None, None]
    layout = ("NHWC", "HWIO", "NHWC")
    image = a[None, :, :, None]
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=layout)[
        0, :, :, 0
    ]


def edges(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Three edges from each row; some rows get none."""
    ends = jnp.arange(3 * len(a))
    return ends * 5 % len(a), ends * ends % len(a)


def messages(a: jax.Array, w: jax.Array) -> jax.Array:
    sources, targets = edges(a)
    a = a @ w
    near = jax.nn.sigmoid(jnp.sum(a[sources] * a[targets], -1, keepdims=True))
    return jnp.tanh(jax.ops.segment_sum(near * a[sources], targets, len(a)))


def multiplied_messages(a: jax.Array, w: jax.Array) -> jax.Array:
    sources, targets = edges(a)
    sent = jnp.tanh(a[sources] @ w + a[targets])
    return a + jax.ops.segment_sum(sent, targets, len(a)) / 3


def graph_attention(a: jax.Array, w: jax.Array) -> jax.Array:
    sources, targets = edges(a)
    a = a @ w
    scores = jnp.tanh(a[:, 0])[sources] + jnp.sin(a[:, 1])[targets]
    most = lax.stop_gradient(jax.ops.segment_max(scores, targets, len(a)))
    odds = jnp.exp(scores - most[targets])
    share = odds / jax.ops.segment_sum(odds, targets, len(a))[targets]
    return jax.ops.segment_sum(share[:, None] * a[sources], targets, len(a))


def embedded(a: jax.Array, w: jax.Array) -> jax.Array:
    rows = jnp.tanh(w)[jnp.arange(len(a)) * 3 % len(w)] + 0.5
    return a * rows + jnp.cos(rows)


def bags(a: jax.Array, w: jax.Array) -> jax.Array:
    places = (jnp.arange(len(a))[:, None] + jnp.array([0, 2, 5])) % len(w)
    return a + jnp.sin(w[places].sum(1)) + a[places % len(a)].max(1)


def few_rows(a: jax.Array, w: jax.Array) -> jax.Array:
    """Rows of something larger than they are, read in two places."""
    found = (a @ w)[jnp.array([3, 1, 3])] * 2
    return a + (jnp.sin(found) @ w).mean(0) + jnp.tanh(found).sum(0)


def interactions(a: jax.Array, w: jax.Array) -> jax.Array:
    """Products of rows with one another, of columns, and of the halves of each row."""
    features = a @ w
    rows, columns = features @ features.T, features.T @ features
    halves = features[:, : 2 * (features.shape[1] // 2)].reshape(len(a), 2, -1)
    pairs = jnp.einsum("nif,njf->nij", halves, halves).sum((1, 2))
    mixed = jnp.tanh(rows / len(a)) @ a @ jnp.tanh(columns / len(a)) / len(w)
    return mixed + jnp.sin(pairs / a.shape[1])[:, None]


def taught(a: jax.Array, w: jax.Array) -> jax.Array:
    teacher = jax.nn.log_softmax(lax.stop_gradient(a) @ lax.stop_gradient(w))
    student = jax.nn.log_softmax(a @ w)
    return a + jnp.sum(jnp.exp(teacher) * (teacher - student), -1, keepdims=True)


def dropped(a: jax.Array) -> jax.Array:
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, a.shape)
    return jnp.where(mask, a / 0.7, 0).astype(a.dtype)


def varying(a: jax.Array) -> jax.Array:
    """The same, as something that varies over the map, as what a loop carries must do."""
    return a + 0 * lax.axis_index("i").astype(a.dtype)


def gathered_in_a_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    def step(c: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(c @ lax.all_gather(own, "i", tiled=True)) + c, lax.psum(c.sum(), "i")

    c, sums = lax.scan(step, varying(a), jnp.stack([w, w / 2, jnp.sin(w)]))
    return c + sums.mean() / a.size


def summed_in_a_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(c) + lax.psum(jnp.tanh(c @ w), "i") / 2, None

    return lax.scan(step, varying(a), None, length=4)[0]


def turned_in_a_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    """Ring attention, but for the softmax: a loop that communicates in another."""

    def turn(state: Any, _: None) -> tuple[Any, None]:
        c, there, found = state
        return (c, lax.ppermute(there, "i", [(0, 0)]), found + jnp.tanh(c @ there.T) @ there), None

    def step(c: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        there = lax.ppermute(jnp.tanh(c @ w), "i", [(0, 0)])
        (_, _, found), _ = lax.scan(turn, (c, there, jnp.zeros_like(c)), None, length=2)
        return c + found * scale / c.size, None

    return lax.scan(step, varying(a), jnp.linspace(0, 1, 3).astype(a.dtype))[0]


def scattered_in_a_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        parts = lax.all_to_all(c[None], "i", 0, 0)[0]
        return jnp.tanh(lax.psum_scatter(parts @ w, "i", tiled=True)) + c, None

    return lax.scan(step, varying(a), None, length=3)[0]


def one_device() -> Mesh:
    """Several on few cores may wait for each other's threads. To JAX it is the same."""
    return jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


def mapped(step: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A step of a value and a weight as a ``shard_map`` over rows; the weight is gathered in it."""
    rows = PartitionSpec("i")

    def body(a: jax.Array, w: jax.Array) -> jax.Array:
        return step(a, lax.all_gather(w, "i", tiled=True))

    return jax.shard_map(body, mesh=one_device(), in_specs=(rows, rows), out_specs=rows)


def summed_map(a: jax.Array, w: jax.Array) -> jax.Array:
    return mapped(lambda a, w: jnp.tanh(a @ w) + lax.psum(jnp.sin(a).mean(), "i"))(a, w)


def maps_in_a_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    """Two maps in the body, one of them with a loop in it."""

    def step(c: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = c + mapped(lambda a, w: jnp.tanh(jnp.sin(a @ w) @ w))(jnp.cos(c), own)
        c = mapped(summed_in_a_loop)(c, own) / 4
        return c, c.sum()

    c, sums = lax.scan(step, a, jnp.stack([w, w / 2, jnp.sin(w)]))
    return c + sums.mean() / a.size


def map_in_a_branch(a: jax.Array, w: jax.Array) -> jax.Array:
    layers = mapped(lambda a, w: jnp.tanh(jnp.sin(a @ w) @ w) + lax.pmean(a, "i"))
    return lax.cond(chance_of(a) < 0.6, layers, lambda a, w: jnp.sin(a @ w), a, w)


def told_in_a_loop(a: jax.Array, w: jax.Array) -> jax.Array:
    """Something is called in each iteration, and something else in a branch of it."""

    def tells(a: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, a.mean())
        return jnp.tanh(a @ w) @ w

    def step(c: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda _: None, scale, ordered=False)
        c = c + lax.cond(chance_of(c) < 0.5, tells, jnp.sin, jnp.sin(c @ w)) * scale
        return c, c[0]

    c, rows = lax.scan(step, a, jnp.linspace(0, 1, 4).astype(a.dtype), reverse=True)
    return c + rows.mean()


SMOOTH: list[Callable[..., jax.Array]] = [
    jnp.tanh,
    jnp.sin,
    jax.nn.gelu,
    jax.nn.sigmoid,
    normalised,
    cross_entropy,
    dropped,
    own_gradient,
    functools.partial(scaled, factor=0.5),
    lambda a: lax.map(lambda row: jnp.tanh(row) * row.sum(), a) / a.shape[1],
    lambda a: lax.associative_scan(jnp.add, a) / a.shape[0],
    lambda a: jnp.abs(jnp.tanh(a + 1j * jnp.cos(a))).astype(a.dtype),
    lambda a: jnp.concatenate([a[:, :0], jnp.sin(a)], 1) + jnp.sum(jnp.cos(a[:0])),
    lambda a: a.at[jnp.array([1, 2, 2])].add(jnp.sin(a[:3])),
    lax.stop_gradient,
    no_tangent,
    lambda a: jax.nn.softmax(a, -1),
    lambda a: a - jax.nn.logsumexp(a, -1, keepdims=True),
    lambda a: a * 0.5 + 1,
    lambda a: a[::-1],
    lambda a: jnp.cumsum(a, 0) / a.shape[0],
    lambda a: a - jnp.mean(a),
    lambda a: a * jnp.tanh(jnp.sum(a)),
    lambda a: a.reshape(-1).reshape(a.shape) + a,
    lambda a: a.astype(jnp.float32).astype(a.dtype) if a.dtype == jnp.bfloat16 else a * 2,
    lambda a: jnp.tanh(a) + lax.stop_gradient(jnp.cos(a)),
    lambda a: jnp.tanh(a) + loop(lax.stop_gradient(a)),
    lambda a: jnp.tanh(a) * loop(lax.stop_gradient(jnp.sin(a))),
    lambda a: a + jax.checkpoint(lax.stop_gradient)(jnp.tanh(a)),
    lambda a: a * jax.checkpoint(lambda b: lax.stop_gradient(jnp.sin(b)))(a),
    lambda a: a + loop(jax.checkpoint(lambda b: lax.stop_gradient(jnp.tanh(b)))(a)),
    jax.checkpoint(lambda a: jnp.sin(jnp.tanh(a)) * a),
    jax.jit(lambda a: jnp.cos(a) * a),
    lambda a: a * jax.vmap(lambda row: jnp.tanh(row) * jnp.sum(row))(a) / a.shape[1],
    lambda a: a.at[0].set(jnp.tanh(a[1])),
    lambda a: lax.dynamic_slice(jnp.concatenate([a, a]), (1, 0), a.shape),
    lambda a: jnp.pad(a, 1)[1:-1, :-2],
    lambda a: jnp.asarray(np.linspace(0, 1, a.size).reshape(a.shape), a.dtype) * a,
]
SHARP: list[Callable[..., jax.Array]] = [
    jax.nn.relu,
    pooled,
    jnp.floor,
    jnp.abs,
    lambda a: jnp.where(a > a.mean(), a, 0),
    lambda a: jnp.where(a > jnp.mean(a, -1, keepdims=True), jnp.tanh(a), a * 0.1),
    lambda a: a * (a > jnp.quantile(lax.stop_gradient(a), 0.3)),
    lambda a: jnp.clip(a, -a.std(), a.std()),
    lambda a: jnp.sort(a, -1),
    lambda a: a[jnp.argsort(a[:, 0])],
    lambda a: jnp.take(a, jnp.argmax(a, -1), axis=0),
    lambda a: lax.cond(a.sum() > 0, jnp.ones_like, jnp.zeros_like, a),
    lambda a: a + lax.cond(a.sum() > 0, jnp.ones_like, jnp.zeros_like, a),
    lambda a: a * loop(lax.cond(a.sum() > 0, jnp.ones_like, jnp.zeros_like, a)),
    lambda a: lax.cond(a.mean() > 0, jnp.tanh, lambda b: b * b.mean(), a),
    lambda a: a + jnp.round(a * 3).astype(jnp.int32).astype(a.dtype),
    lambda a: a - jnp.max(a, -1, keepdims=True),
    lambda a: lax.top_k(a, a.shape[-1])[0],
]
PAIRS: list[Callable[..., jax.Array]] = [
    jnp.add,
    jnp.subtract,
    half_tangent,
    lambda a, b: a * jnp.tanh(b),
    lambda a, b: a @ jnp.tanh(b).T @ a / a.size,
    lambda a, b: jnp.einsum("ij,kj,kl->il", a, jnp.tanh(b), jnp.cos(b)) / a.size,
    lambda a, b: jnp.concatenate([a, b])[a.shape[0] // 2 :][: a.shape[0]],
    lambda a, b: jnp.where(jnp.arange(a.shape[1]) % 2 == 0, a, b),
    lambda a, b: a + b.mean(0) * jnp.sin(b).sum() / b.size,
    lambda a, b: jnp.logaddexp(a, b),
    lambda a, b: jax.checkpoint(lambda c, d: jnp.tanh(c) * lax.stop_gradient(d))(a, b),
    lambda a, b: lax.cond(
        jnp.sum(lax.stop_gradient(b)) > 0, lambda c, d: c + d, lambda c, d: jnp.cos(c), a, b
    ),
]
PRODUCTS: list[Callable[..., jax.Array]] = [
    lambda a, w: a @ w,
    lambda a, w: a @ w.T / 2,
    lambda a, w: jnp.tanh(a @ w),
    lambda a, w: a @ w + jnp.sin(a) @ w,
    lambda a, w: jax.nn.relu(a @ w + w[0]) @ w,
    lambda a, w: a + jnp.tanh(normalised(a) @ w),
    lambda a, w: a @ (w / (1 + jnp.linalg.norm(w))),
    lambda a, w: a @ lax.stop_gradient(w),
    lambda a, w: jnp.tanh(a[::2] @ w).repeat(2, 0)[: a.shape[0]] + a,
    attention,
    gated,
    scanned,
    scanned_with_frozen,
    scanned_checkpoint,
    scanned_with_policy,
    scanned_branches,
    scanned_stack,
    scanned_twice,
    by_static_count,
    nested_checkpoints,
    named_inside,
    kernel,
    in_double,
    convolved,
]
SHARP_PRODUCTS: list[Callable[..., jax.Array]] = [
    lambda a, w: jnp.where((t := jnp.tanh(a @ w)) > t.mean(), t, 0) @ w + t @ w,
    switched,
    branch_with_loop,
]
#: Choices: programs from ``CHOOSING_FROM`` on have them; earlier ones are unchanged.
CHOICES: list[Callable[..., jax.Array]] = [
    shared_by_branches,
    switched_twice,
    scan_of_choices,
    choice_of_scans,
    choice_behind_stop,
    switched,
    branch_with_loop,
    scanned_branches,
]
CHOOSING_FROM = 1_000_000
#: Lookups and sums at places: programs from ``LOOKING_UP_FROM`` on have them.
LOOKUPS: list[Callable[..., jax.Array]] = [
    messages,
    multiplied_messages,
    graph_attention,
    embedded,
    bags,
    few_rows,
    interactions,
    taught,
]
LOOKING_UP_FROM = 2_000_000
#: Programs from ``MAPPED_FROM`` on are in a ``shard_map``, with collectives.
MAPPED_FROM = 3_000_000
#: Those from ``COMMUNICATING_FROM`` on have collectives in their loops, too.
COLLECTIVES: list[Callable[..., jax.Array]] = [
    gathered_in_a_loop,
    summed_in_a_loop,
    turned_in_a_loop,
    scattered_in_a_loop,
    lambda a, w: lax.ppermute(varying(a) @ w, "i", [(0, 0)]),
]
COMMUNICATING_FROM = 3_500_000
#: Those from ``MAPPING_FROM`` on are not, but have maps, also in loops and branches, and callbacks.
MAPS: list[Callable[..., jax.Array]] = [
    summed_map,
    maps_in_a_loop,
    map_in_a_branch,
    told_in_a_loop,
]
MAPPING_FROM = 3_700_000
#: In those from ``SHARDED_FROM`` on, arguments lie on a mesh; some in stacks.
STACKED: list[Callable[..., jax.Array]] = [scanned_stack, scanned_layers]
SHARDED_FROM = 4_000_000
TERMS: list[Callable[..., jax.Array]] = [
    jnp.sum,
    jnp.mean,
    lambda a: jnp.mean(a**2),
    lambda a: jnp.mean(a[0]),
    lambda a: jax.nn.logsumexp(a),
    lambda a: jnp.sum(jnp.tanh(a.mean(0))),
    lambda a: jnp.linalg.norm(a) / a.size,
    lambda a: jnp.mean(lax.stop_gradient(a)),
]


# --- One program --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomProgram:
    """A loss of a list of weights and a batch.

    Attributes:
      seed: the seed it is drawn from.
      fn: the loss.
      weights: its first argument.
      x: its second one.
      has_aux: whether it also returns an auxiliary output.
      planned: the ``argnums`` given to the decorator.
      taken: what the gradient is taken for: how many of the first weights, and whether ``x``.
      jit: whether it is compiled.
      tolerance: how far a gradient may be off, as a share of its largest entry.
      existing: what happens to checkpoints in it.
      collectives: what happens to what devices exchange.
    """

    seed: int
    fn: Callable[..., Any]
    weights: list[jax.Array]
    x: jax.Array
    has_aux: bool
    planned: tuple[int, ...]
    taken: tuple[int, bool]
    jit: bool
    tolerance: float
    existing: str
    collectives: str

    def in_double(self) -> RandomProgram:
        """The same with more precise numbers."""
        wide = [one.astype(jnp.float64) for one in (*self.weights, self.x)]
        return dataclasses.replace(
            self, weights=wide[:-1], x=wide[-1], tolerance=_TOLERANCES["float64"]
        )

    def value_and_grad(self, fn: Callable[..., Any], how: How = "as it is") -> Any:
        """The loss and its gradient for what the program takes it for; the rest is frozen.

        If it is not run, arrays of zeros.
        """
        count, for_x = self.taken

        def loss(moving: list[jax.Array], frozen: list[jax.Array]) -> Any:
            x = moving[-1] if for_x else frozen[-1]
            return fn([*moving[:count], *frozen[: len(self.weights) - count]], x)

        given = [*self.weights[:count], *([self.x] if for_x else [])]
        frozen = [*self.weights[count:], *([] if for_x else [self.x])]
        taken = jax.value_and_grad(loss, has_aux=self.has_aux)
        if how == "traced":
            shapes = jax.eval_shape(taken, given, frozen)
            return jax.tree.map(lambda one: np.zeros(one.shape, one.dtype), shapes)
        # A map is one equation, and nothing is gained; on a mesh, all devices run each of them.
        if how == "op by op" and self.seed < MAPPED_FROM:
            return run_op_by_op(taken, given, frozen)
        return (jax.jit(taken) if self.jit else taken)(given, frozen)

    def is_steady(self) -> bool:
        """Whether undecorated it gives the same compiled, run by JAX, and op by op.

        Where rounding decides a mask, a count or a tie, nothing can be compared.
        """
        ways = [
            dataclasses.replace(self, jit=jit).value_and_grad(self.fn, how)
            for jit, how in ((True, "as it is"), (False, "as it is"), (False, "op by op"))
        ]
        value = jax.jit(self.fn)(self.weights, self.x)
        alone = [value, ways[0][0]]
        return not any(
            differences(one, other, self.tolerance)
            for one, other in [*itertools.pairwise(ways), alone]
        )


def draw(seed: int) -> RandomProgram:
    """The program of a seed."""
    chance = random.Random(seed)
    dtype = chance.choices(["float64", "float32", "bfloat16"], [6, 3, 1])[0]
    # Masks flip if numbers are rounded: then any two programs differ.
    unary = SMOOTH + SHARP * 2 if dtype == "float64" else SMOOTH
    products = PRODUCTS + SHARP_PRODUCTS if dtype == "float64" else PRODUCTS
    if seed >= CHOOSING_FROM:
        products = products + CHOICES * 3
    if seed >= LOOKING_UP_FROM:
        products = products + LOOKUPS * 6
    if seed >= SHARDED_FROM:
        products = products + STACKED * 20
    elif seed >= MAPPING_FROM:
        products = products + MAPS * 8
    elif seed >= COMMUNICATING_FROM:
        products = products + COLLECTIVES * 6
    rows, columns = chance.choice([(8, 8), (16, 8), (12, 12), (64, 16)])
    depth = chance.choice([1, 2, 4])
    steps: list[tuple[Callable[..., jax.Array], int, int]] = []
    for _ in range(chance.randint(2, chance.choice([5, 10, 20]))):
        kind = chance.choices(["unary", "pair", "product"], [4, 2, 4])[0]
        function = chance.choice({"unary": unary, "pair": PAIRS, "product": products}[kind])
        second = chance.randrange(99) if kind != "unary" else -1
        # Mostly the latest values; weights come first among the operands of products.
        first = chance.choice([0, 0, 0, 1, 2, chance.randrange(99)])
        steps.append((function, first, second if kind != "product" else second + 100))
    terms = [
        (chance.choice(TERMS), chance.choice([0, 0, 1, chance.randrange(99)]))
        for _ in range(chance.choice([1, 1, 2, 3, 5]))
    ]
    repeats = chance.choice([1, 1, 1, 2, 4])
    has_aux = chance.random() < 0.3
    auxiliary = [chance.randrange(99) for _ in range(chance.randint(1, 3))]
    untouched = chance.random() < 0.15

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> Any:
        values = [lax.stop_gradient(x) if untouched else x]
        for _ in range(repeats):
            for function, first, second in steps:
                given = [values[-1 - first % len(values)]]
                if second >= 100:
                    given.append(weights[second % len(weights)])
                elif second >= 0:
                    given.append(values[second % len(values)])
                values.append(function(*given).astype(x.dtype))
        total = sum(term(values[-1 - place % len(values)]) for term, place in terms)
        aux = {
            f"value_{number}": values[-1 - place % len(values)].sum()
            for number, place in enumerate(auxiliary)
        }
        aux["count"] = jnp.sum(values[-1] > 0)
        return (total, aux) if has_aux else total

    numbers = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(numbers.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    collectives = "keep"
    if SHARDED_FROM > seed >= MAPPED_FROM:
        loss = _mapped(loss, chance) if seed < MAPPING_FROM else loss
        collectives = chance.choice(["keep", "recompute"])
    weights, x = [array(columns, columns) for _ in range(depth)], array(rows, columns)
    if seed >= SHARDED_FROM:
        weights, x = _sharded(weights, x, chance)
    for_x = chance.random() < 0.3
    count = chance.choice([depth, depth, chance.randint(0, depth)])
    return RandomProgram(
        seed=seed,
        fn=loss,
        weights=weights,
        x=x,
        has_aux=has_aux,
        planned=chance.choice([(0,), (0,), (0, 1), (1,)]),
        taken=(count, for_x or not count),
        # Under ``jax.jit`` nothing would show how arguments are split.
        jit=chance.random() < 0.9 and seed < SHARDED_FROM,
        tolerance=_TOLERANCES[dtype],
        existing=chance.choice(["keep", "replace"]),
        collectives=collectives,
    )


def _mapped(loss: Callable[..., Any], chance: random.Random) -> Callable[..., Any]:
    """The loss in a ``shard_map``."""
    splits_x, gathers, check_vma = (chance.random() < 0.5 for _ in range(3))

    def everywhere(one: jax.Array) -> jax.Array:
        if jnp.issubdtype(one.dtype, jnp.integer):
            return lax.psum(one, "i")
        return lax.pmean(one, "i")

    def body(weights: Sequence[jax.Array], x: jax.Array) -> Any:
        if gathers:
            weights = [lax.all_gather(one, "i", tiled=True) for one in weights]
        return jax.tree.map(everywhere, loss(weights, x))

    specs = PartitionSpec("i") if gathers else PartitionSpec()
    of_x = PartitionSpec("i") if splits_x else PartitionSpec()
    return jax.shard_map(
        body,
        mesh=one_device(),
        in_specs=(specs, of_x),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )


def _sharded(
    weights: Sequence[jax.Array], x: jax.Array, chance: random.Random
) -> tuple[list[jax.Array], jax.Array]:
    """The arguments on a mesh of two devices: more would wait for each other on few cores."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def laid_out(one: jax.Array, *specs: PartitionSpec) -> jax.Array:
        return jax.device_put(one, NamedSharding(mesh, chance.choice(specs)))

    rows, columns, whole = PartitionSpec("i"), PartitionSpec(None, "i"), PartitionSpec()
    return [laid_out(one, rows, columns, whole) for one in weights], laid_out(x, rows, rows, whole)


# --- The check ----------------------------------------------------------------------------


#: What is said of a program whose results cannot be compared.
UNSTEADY = "without the decorator it gives different results, depending on how it is run"


def failures(
    program: RandomProgram, devices: Sequence[str] = DEVICES, how: How = "as it is"
) -> list[str] | None:
    """What is wrong with the plans for some devices, by default and with the least memory.

    Args:
      program: the program to plan.
      devices: the devices to plan for.
      how: how to get the results. If equation by equation, some are run as they are after all, for
        each program others.

    Returns:
      A line for each failure; None if JAX itself does not accept the program.
    """
    try:
        expected = program.value_and_grad(program.fn, how)
    except Exception:
        return None
    with always_rewritten():
        return list(_failures(program, expected, devices, how))


def _failures(
    program: RandomProgram, expected: Any, devices: Sequence[str], how: How
) -> Iterator[str]:
    """What is wrong where this is expected; see ``failures``."""
    number = itertools.count(program.seed)
    for device in devices:
        decorate = functools.partial(
            remat_opt.optimal_remat,
            device=device,
            argnums=program.planned,
            has_aux=program.has_aux,
            existing=program.existing,
            collectives=program.collectives,
            errors="raise",
        )
        try:
            remat_opt.make_plan(
                program.fn,
                program.weights,
                program.x,
                budget=1,
                device=device,
                argnums=program.planned,
                has_aux=program.has_aux,
                existing=program.existing,
                collectives=program.collectives,
            )
            budgets: list[int | None] = [None]
        except BudgetError as error:
            budgets = [None, error.least_peak_bytes]
        except Exception as error:
            yield f"{device}: {_told(error)}"
            continue
        for budget in budgets:
            called = f"{device}, budget {budget}"
            is_next = next(number) % _AS_IT_IS[program.jit] == 0
            own: How = "as it is" if how == "op by op" and is_next else how
            try:
                answer = program.value_and_grad(decorate(program.fn, budget=budget), own)
            except BudgetError as error:
                # More may be differentiated than was declared: next we try what is least then.
                if budget is None or error.least_peak_bytes <= budget:
                    yield f"{called}: {_told(error)}"
                else:
                    budgets.append(error.least_peak_bytes)
            except Exception as error:
                yield f"{called}: {_told(error)}"
            else:
                lines = differences(expected, answer, program.tolerance)
                if lines and program.x.dtype != jnp.float64:
                    # What cancels to nothing is off in proportion to its terms.
                    wide = program.in_double()
                    exact = wide.value_and_grad(wide.fn, how)
                    answer = wide.value_and_grad(decorate(wide.fn), own)
                    lines = differences(exact, answer, wide.tolerance) and lines
                if lines and not program.is_steady():
                    yield UNSTEADY
                    return
                yield from (f"{called}: {one}" for one in lines)


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}"


def differences(expected: Any, found: Any, tolerance: float) -> list[str]:
    """How two results differ, one line each."""
    ours, tree = jax.tree.flatten_with_path(found)
    theirs, other_tree = jax.tree.flatten_with_path(expected)
    if tree != other_tree:
        return [f"the result is a {tree}, not a {other_tree}"]
    lines = []
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        where = jax.tree_util.keystr(path)
        if jax.typeof(one) != jax.typeof(other):
            lines.append(f"{where} is {jax.typeof(one)}, not {jax.typeof(other)}")
            continue
        left, right = np.asarray(one, np.float64), np.asarray(other, np.float64)
        limit = tolerance * max(1e-3, float(np.abs(right).max(initial=0, where=~np.isnan(right))))
        if not np.allclose(left, right, rtol=0, atol=limit, equal_nan=True):
            apart = float(np.nanmax(np.abs(left - right)))
            lines.append(f"{where} is off by {apart:.3g}, allowed are {limit:.3g}")
    return lines
