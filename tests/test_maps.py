"""Maps (``jax.shard_map``) inside a program are opened: the same values, in less memory."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import remat_opt
from remat_opt import BudgetError, PlanFileError, optimal_remat
from remat_opt import _jax_internals as internals
from remat_opt.checksum import checksum_of
from remat_opt.plan import FORMAT, Plan
from remat_opt.schedule import Choice, Loop, Mapped
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

P = PartitionSpec
Loss = Callable[[Any, jax.Array], jax.Array]

LAYERS, WIDTH, ROWS = 4, 32, 2048
W = [
    (array(f"a{n}", WIDTH, 2 * WIDTH, scale=1 / 6), array(f"b{n}", 2 * WIDTH, WIDTH, scale=1 / 8))
    for n in range(LAYERS)
]
X = array("x", ROWS, WIDTH, scale=1)
STACKED = tuple(jnp.stack(one) for one in zip(*W, strict=True))


def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def layer(x: jax.Array, w: Any) -> jax.Array:
    return x + jnp.tanh(x @ w[0]) @ w[1]


def on_mesh(tree: Any, *spec: Any) -> Any:
    return jax.device_put(tree, NamedSharding(mesh(), P(*spec)))


def plain(w: Any, x: jax.Array) -> jax.Array:
    for one in w:
        x = layer(x, one)
    return jnp.mean(x**2)


def scanned(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda x, one: (layer(x, one), None), x, w)[0] ** 2)


def mean_of(fn: Loss, w: Any, x: jax.Array) -> jax.Array:
    return lax.pmean(fn(w, x), ("data", "model"))


def mapped(fn: Loss, **more: Any) -> Loss:
    """A loss whose whole network is in a map over rows."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        run = jax.shard_map(
            lambda w, x: mean_of(fn, w, x),
            mesh=mesh(),
            in_specs=(P(), P(("data", "model"))),
            out_specs=P(),
            **more,
        )
        return run(w, x)

    return loss


def split_products(w: Any, x: jax.Array) -> jax.Array:
    """Tensor parallel: each layer's hidden values are split, and its results summed."""

    def body(w: Any, x: jax.Array) -> jax.Array:
        for a, b in w:
            x = x + lax.psum(jnp.tanh(x @ a) @ b, "model")
        return lax.pmean(jnp.mean(x**2), "data")

    specs = [(P(None, "model"), P("model"))] * LAYERS
    run = jax.shard_map(body, mesh=mesh(), in_specs=(specs, P("data")), out_specs=P())
    return run(w, x)


def gathered_weights(w: Any, x: jax.Array) -> jax.Array:
    """Fully sharded: each layer's weights are gathered where they are used."""

    def body(w: Any, x: jax.Array) -> jax.Array:
        for one in w:
            x = layer(x, [lax.all_gather(part, ("data", "model"), tiled=True) for part in one])
        return lax.pmean(jnp.mean(x**2), ("data", "model"))

    rows = P(("data", "model"))
    return jax.shard_map(body, mesh=mesh(), in_specs=(rows, rows), out_specs=P())(w, x)


def split_products_in_a_scan(w: Any, x: jax.Array) -> jax.Array:
    def body(w: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            return x + lax.psum(jnp.tanh(x @ one[0]) @ one[1], "model"), None

        return lax.pmean(jnp.mean(lax.scan(step, x, w)[0] ** 2), "data")

    specs = P(None, None, "model"), P(None, "model")
    run = jax.shard_map(body, mesh=mesh(), in_specs=(specs, P("data")), out_specs=P())
    return run(w, x)


def gathered_weights_in_a_scan(w: Any, x: jax.Array) -> jax.Array:
    def body(w: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            gather = functools.partial(lax.all_gather, axis_name=("data", "model"), tiled=True)
            return layer(x, list(map(gather, one))), None

        return lax.pmean(jnp.mean(lax.scan(step, x, w)[0] ** 2), ("data", "model"))

    rows = P(("data", "model"))
    specs = P(None, *rows), rows
    return jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=P())(w, x)


def swapped_rows_in_a_scan(w: Any, x: jax.Array) -> jax.Array:
    """Each iteration sends rows elsewhere and back, in parts and a loop of its own."""

    def body(w: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            parts = lax.all_to_all(x.reshape(4, -1, WIDTH), "data", 0, 0)
            parts, _ = lax.scan(lambda x, _: (jnp.sin(layer(x, one)), None), parts, None, length=2)
            there = lax.all_to_all(parts, "data", 0, 0).reshape(x.shape)
            return x + lax.ppermute(there, "model", [(0, 1), (1, 0)]), None

        return lax.pmean(jnp.mean(lax.scan(step, x, w)[0] ** 2), ("data", "model"))

    rows = P(("data", "model"))
    return jax.shard_map(body, mesh=mesh(), in_specs=(P(), rows), out_specs=P())(w, x)


def two_layers_each(w: Any, x: jax.Array) -> jax.Array:
    rows = P(("data", "model"))
    run = jax.shard_map(
        lambda x, w: layer(layer(x, w), w), mesh=mesh(), in_specs=(rows, P()), out_specs=rows
    )
    for one in w:
        x = run(x, one)
    return jnp.mean(x**2)


def in_a_scan(w: Any, x: jax.Array) -> jax.Array:
    rows = P(("data", "model"))
    run = jax.shard_map(
        lambda x, w: layer(layer(x, w), w), mesh=mesh(), in_specs=(rows, P()), out_specs=rows
    )
    return jnp.mean(lax.scan(lambda x, one: (run(x, one), None), x, w)[0] ** 2)


def in_a_cond(w: Any, x: jax.Array) -> jax.Array:
    return lax.cond(jnp.sum(x) > 0, mapped(plain), lambda w, x: jnp.mean(x @ w[0][0]), w, x)


def beside_others(w: Any, x: jax.Array) -> jax.Array:
    """Something before the map, something after, and a value that is not differentiated."""
    rows = P(("data", "model"))
    run = jax.shard_map(
        lambda w, x, n: (layer(layer(x, w[1]), w[2]) * n, jnp.sum(n, keepdims=True)),
        mesh=mesh(),
        in_specs=(P(), rows, P()),
        out_specs=(rows, P()),
        check_vma=False,
    )
    x, n = run(w, layer(x, w[0]), jnp.arange(WIDTH))
    return jnp.mean(layer(x, w[3]) ** 2) / jnp.sum(n)


CASES: dict[str, tuple[Loss, Any]] = {
    "whole": (mapped(plain), W),
    "whole, without types": (mapped(plain, check_vma=False), W),
    "a scan inside": (mapped(scanned), STACKED),
    "in a scan": (in_a_scan, STACKED),
    "in a cond": (in_a_cond, W),
    "split products": (split_products, W),
    "gathered weights": (gathered_weights, W),
    "two layers each": (two_layers_each, W),
    "beside others": (beside_others, W),
}


def maps_in(loops: Any) -> list[Mapped]:
    """The opened maps of a plan, at any depth."""
    found: list[Mapped] = []
    for one in loops:
        if isinstance(one, Mapped):
            found += [one, *maps_in(one.body.loops)]
        elif isinstance(one, Choice):
            found += [inner for branch in one.branches for inner in maps_in(branch.loops)]
        else:
            found += [inner for part in one.parts for inner in maps_in(part.loops)]
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_function(name: str) -> None:
    loss, w = CASES[name]
    args = on_mesh(w), on_mesh(X, "data" if name == "split products" else ("data", "model"))
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    plans = [remat_opt.make_plan(loss, *args, max_overhead=most) for most in (0.2, 4.0)]
    assert any(maps_in(plan.loops) for plan in plans)
    least = plans[-1]
    assert least.predicted.temporary_bytes < 0.75 * least.predicted.plain_temporary_bytes
    found = jax.jit(jax.value_and_grad(remat_opt.apply_plan(least, loss)))(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("step", ["results", "consumed", "together"])
def test_a_map_around_everything_takes_what_its_body_takes(step: Any) -> None:
    """All is counted once: what is kept, gradients, and what one step holds."""
    given = {"device": "h200", "gradients": step, "max_overhead": 4.0}
    rows = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    inside = remat_opt.make_plan(plain, W, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"), **given)
    around = remat_opt.make_plan(mapped(plain), W, rows, **given)
    for figure in ("plain_temporary_bytes", "temporary_bytes"):
        own, other = (getattr(plan.predicted, figure) for plan in (inside, around))
        assert other == pytest.approx(own, rel=0.05)


def test_what_communicates_runs_once() -> None:
    plan = remat_opt.make_plan(split_products, W, X, max_overhead=4.0)
    closed = jax.make_jaxpr(jax.grad(remat_opt.apply_plan(plan, split_products)))(W, X)
    before = jax.make_jaxpr(jax.grad(split_products))(W, X)
    # The forward pass's sums; those of gradients are the same as well.
    assert str(closed).count(" psum") == str(before).count(" psum")


COLLECTIVES = {"psum", "psum_invariant", "all_gather", "all_to_all", "ppermute", "reduce_scatter"}


def collectives_run(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each kind of collective runs, as often as the loops around it say."""
    found: Counter[str] = Counter()

    def count(jaxpr: Any, times: int) -> None:
        for equation in internals.parts(jaxpr)[3]:
            name = equation.primitive.name
            found.update({name: times} if name in COLLECTIVES else {})
            length = equation.params["length"] if name == "scan" else 1
            for _, inner in internals.inner_jaxprs(equation.params):
                count(inner, times * length)

    count(jax.make_jaxpr(fn)(*args), 1)
    return found


@pytest.mark.versions
@pytest.mark.parametrize(
    ("loss", "w_spec", "x_spec"),
    [
        (split_products_in_a_scan, (None, None, "model"), ("data",)),
        (gathered_weights_in_a_scan, (None, ("data", "model")), (("data", "model"),)),
        pytest.param(swapped_rows_in_a_scan, (), (("data", "model"),), marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_communicates_is_opened_and_communicates_once(
    loss: Loss, w_spec: tuple[Any, ...], x_spec: tuple[Any, ...]
) -> None:
    args = on_mesh(STACKED, *w_spec), on_mesh(X, *x_spec)
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    once = collectives_run(jax.grad(loss), *args)
    assert once
    plain_bytes = remat_opt.measure(jax.grad(loss), *args, device="cpu").temporary_bytes
    for max_overhead in (1.0, 4.0):
        ours = optimal_remat(
            loss, max_overhead=max_overhead, device="cpu", gradients="results", errors="raise"
        )
        plan = ours.plan(*args)
        (inside,) = plan.loops
        assert isinstance(inside, Mapped)
        assert [type(one) for one in inside.body.loops] == [Loop]
        assert any("Collectives" in note for note in plan.notes) == (
            loss is gathered_weights_in_a_scan
        )
        found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(*args)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
        assert collectives_run(jax.grad(ours), *args) == once
        ours_bytes = remat_opt.measure(jax.grad(ours), *args, device="cpu").temporary_bytes
        assert ours_bytes < 0.9 * plain_bytes


def split_products_each(x: jax.Array, w: Any) -> jax.Array:
    """A layer in a map of its own: its hidden values are split, and its results summed."""
    run = jax.shard_map(
        lambda x, w: x + lax.psum(jnp.tanh(x @ w[0]) @ w[1], "model"),
        mesh=mesh(),
        in_specs=(P("data"), (P(None, "model"), P("model"))),
        out_specs=P("data"),
    )
    return run(x, w)


def gathered_weights_each(x: jax.Array, w: Any) -> jax.Array:
    rows = P(("data", "model"))
    run = jax.shard_map(
        lambda x, w: layer(x, [lax.all_gather(one, ("data", "model"), tiled=True) for one in w]),
        mesh=mesh(),
        in_specs=(rows, rows),
        out_specs=rows,
    )
    return run(x, w)


def in_a_row(each: Loss) -> Loss:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        for n in range(LAYERS):
            x = each(x, jax.tree.map(lambda one, n=n: one[n], w))
        return jnp.mean(x**2)

    return loss


def in_a_loop(each: Loss) -> Loss:
    return lambda w, x: jnp.mean(lax.scan(lambda x, one: (each(x, one), None), x, w)[0] ** 2)


def ring_in_a_scan(w: Any, x: jax.Array) -> jax.Array:
    """Each iteration has a loop in which rows go round."""

    def body(w: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            turn = [(n, (n + 1) % 4) for n in range(4)]
            there, _ = lax.scan(
                lambda x, _: (lax.ppermute(jnp.sin(x), "data", turn), None), x, None, length=4
            )
            return layer(there, one), None

        return lax.pmean(jnp.mean(lax.scan(step, x, w)[0] ** 2), ("data", "model"))

    rows = P(("data", "model"))
    return jax.shard_map(body, mesh=mesh(), in_specs=(P(), rows), out_specs=P())(w, x)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("loss", "w_spec", "x_spec", "share"),
    [
        (in_a_row(split_products_each), (None, None, "model"), ("data",), 0.7),
        (in_a_loop(split_products_each), (None, None, "model"), ("data",), 0.6),
        (in_a_row(gathered_weights_each), (None, ("data", "model")), (("data", "model"),), 0.9),
        (in_a_loop(gathered_weights_each), (None, ("data", "model")), (("data", "model"),), 0.9),
        (ring_in_a_scan, (), (("data", "model"),), 0.7),
    ],
    ids=["split", "split in a loop", "gathered", "gathered in a loop", "ring"],
)
def test_what_communicates_in_maps_and_inner_loops_runs_once(
    loss: Loss, w_spec: tuple[Any, ...], x_spec: tuple[Any, ...], share: float
) -> None:
    args = on_mesh(STACKED, *w_spec), on_mesh(X, *x_spec)
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    once = collectives_run(jax.grad(loss), *args)
    assert once
    ours = optimal_remat(loss, max_overhead=4.0, device="cpu", gradients="results", errors="raise")
    plan = ours.plan(*args)
    assert maps_in(plan.loops)
    found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert collectives_run(jax.grad(ours), *args) == once
    before, after = (
        remat_opt.measure(jax.grad(fn), *args, device="cpu").temporary_bytes for fn in (loss, ours)
    )
    assert after < share * before
    # Plans say so for themselves, and no other may be put into their place.
    assert Plan.from_json(plan.to_json()) == plan
    assert not any("as one piece" in note for note in plan.notes)


@pytest.mark.slow
def test_all_of_a_map_in_a_loop_is_counted_for_one_device() -> None:
    """In ``scan``, JAX's residuals of a map are those of all devices together."""
    args = on_mesh(STACKED), on_mesh(X, ("data", "model"))
    loss = in_a_loop(
        jax.shard_map(
            layer,
            mesh=mesh(),
            in_specs=(P(("data", "model")), P()),
            out_specs=P(("data", "model")),
        )
    )
    plan = remat_opt.make_plan(loss, *args, device="cpu", gradients="results")
    found = remat_opt.measure(jax.grad(loss), *args, device="cpu").temporary_bytes
    assert plan.predicted.plain_temporary_bytes == pytest.approx(found, rel=0.2)


@pytest.mark.slow
@pytest.mark.versions
def test_what_a_checkpoint_by_hand_repeats_is_counted_though_it_communicates() -> None:
    args = on_mesh(STACKED, None, None, "model"), on_mesh(X, "data")

    def several(x: jax.Array, w: Any) -> jax.Array:
        return split_products_each(split_products_each(split_products_each(x, w), w), w)

    loss = in_a_loop(jax.checkpoint(several))
    plan = remat_opt.make_plan(loss, *args, device="cpu", gradients="results")
    found = remat_opt.measure(jax.grad(loss), *args, device="cpu").temporary_bytes
    # A closed map counts with all that it keeps by itself, which is more than need be there.
    assert 0.9 < plan.predicted.plain_temporary_bytes / found < 2.2


def test_maps_in_a_row_may_keep_different_things() -> None:
    args = on_mesh(STACKED, None, None, "model"), on_mesh(X, "data")
    loss = in_a_row(split_products_each)
    least, most = (
        remat_opt.make_plan(loss, *args, device="cpu", max_overhead=most).predicted.temporary_bytes
        for most in (4.0, 0.0)
    )
    plans = [
        remat_opt.make_plan(loss, *args, device="cpu", budget=budget)
        for budget in np.linspace(least, most, 6, dtype=int).tolist()
    ]
    bodies = [[one.body.kept_bytes for one in maps_in(plan.loops)] for plan in plans]
    assert any(len(set(kept)) > 1 for kept in bodies)


@pytest.mark.versions
def test_a_loop_may_communicate_again_if_allowed() -> None:
    rows = (None, ("data", "model"))
    args = on_mesh(STACKED, *rows), on_mesh(X, *rows[1:])
    loss = gathered_weights_in_a_scan
    once = remat_opt.make_plan(loss, *args, max_overhead=4.0)
    plan = remat_opt.make_plan(loss, *args, max_overhead=4.0, collectives="recompute")
    assert plan.predicted.temporary_bytes < once.predicted.temporary_bytes
    # A plan says for itself whether it may.
    ours = remat_opt.apply_plan(Plan.from_json(plan.to_json()), loss)
    expected = jax.jit(jax.value_and_grad(loss))(*args)
    found = jax.jit(jax.value_and_grad(ours))(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    runs = collectives_run(jax.grad(ours), *args), collectives_run(jax.grad(loss), *args)
    assert runs[0]["all_gather"] > runs[1]["all_gather"]
    assert remat_opt.nearest_policy(plan, loss, *args).temporary_bytes > 0


@pytest.mark.versions
@pytest.mark.parametrize("collectives", ["keep", "recompute"])
def test_a_loop_that_sums_over_a_vmap_around_it_is_opened(collectives: str) -> None:
    def local(w: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            return x + lax.psum(jnp.tanh(x @ one[0]) @ one[1], "i") / 8, None

        return jnp.mean(lax.scan(step, x, w)[0] ** 2)

    def over_all(fn: Loss) -> Loss:
        return lambda w, x: jax.vmap(fn, in_axes=(None, 0), axis_name="i")(w, x).sum()

    args = STACKED, X.reshape(8, -1, WIDTH)
    ours = optimal_remat(local, max_overhead=1.0, errors="raise", collectives=collectives)
    expected = jax.jit(jax.grad(over_all(local)))(*args)
    found = jax.jit(jax.grad(over_all(ours)))(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    before, after = (
        remat_opt.measure(jax.grad(over_all(fn)), *args, device="cpu").temporary_bytes
        for fn in (local, ours)
    )
    assert after < 0.9 * before


def test_collectives_may_run_again_if_allowed() -> None:
    args = on_mesh(W, ("data", "model")), on_mesh(X, ("data", "model"))
    once = remat_opt.make_plan(gathered_weights, *args, max_overhead=4.0)
    (told,) = (note for note in once.notes if "Collectives" in note)
    assert told.startswith("Collectives (test_maps.py:")
    assert 'collectives="recompute" lets the plan run them again' in told
    plan = remat_opt.make_plan(gathered_weights, *args, max_overhead=4.0, collectives="recompute")
    assert plan.fingerprint == once.fingerprint
    assert not [note for note in plan.notes if "Collectives" in note]
    gathered = 4 * 2 * LAYERS * WIDTH * 2 * WIDTH
    assert plan.predicted.temporary_bytes < once.predicted.temporary_bytes - gathered / 2
    with pytest.raises(BudgetError, match='collectives="recompute" lets the plan run them again'):
        remat_opt.make_plan(gathered_weights, *args, budget=plan.predicted.temporary_bytes)
    # Applied, a plan says all; planned by a decorator, it must be allowed.
    decorated = optimal_remat(gathered_weights, max_overhead=4.0, collectives="recompute")
    expected = jax.jit(jax.value_and_grad(gathered_weights))(*args)
    for fn in (remat_opt.apply_plan(plan, gathered_weights), decorated):
        found = jax.jit(jax.value_and_grad(fn))(*args)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
        again = str(jax.make_jaxpr(jax.grad(fn))(*args)).count(" all_gather[")
        assert again > str(jax.make_jaxpr(jax.grad(gathered_weights))(*args)).count(" all_gather[")


def test_collectives_may_run_again_inside_a_map() -> None:
    def local(w: Any, x: jax.Array) -> jax.Array:
        for one in w:
            x = layer(x, [lax.all_gather(part, ("data", "model"), tiled=True) for part in one])
        return lax.pmean(jnp.mean(x**2), ("data", "model"))

    rows = P(("data", "model"))
    args = on_mesh(W, *rows), on_mesh(X, *rows)
    expected = jax.jit(jax.value_and_grad(plain))(W, X)
    for collectives in ("keep", "recompute"):
        decorated = optimal_remat(local, max_overhead=4.0, collectives=collectives)
        run = jax.shard_map(decorated, mesh=mesh(), in_specs=(rows, rows), out_specs=P())
        found = jax.jit(jax.value_and_grad(run))(*args)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
        checked = optimal_remat(local, collectives=collectives, verify=True)
        run = jax.shard_map(checked, mesh=mesh(), in_specs=(rows, rows), out_specs=P())
        with pytest.raises(remat_opt.RematError, match="tied to the axes data, model"):
            jax.eval_shape(jax.grad(run), *args)


def test_what_to_do_with_collectives_is_one_of_two() -> None:
    with pytest.raises(remat_opt.RematError, match="collectives='twice': give 'keep' to run"):
        optimal_remat(plain, collectives="twice")


def test_a_loop_in_parts_in_a_map_may_have_its_gradient_outside() -> None:
    """Tangents that start as zeros vary over the same axes as what they are of."""
    plan = remat_opt.make_plan(mapped(scanned), STACKED, X, max_overhead=4.0)
    (inside,) = maps_in(plan.loops)
    (loop,) = inside.body.loops
    assert isinstance(loop, Loop)
    parts = (
        dataclasses.replace(loop.parts[0], length=1),
        dataclasses.replace(loop.parts[0], length=LAYERS - 1),
    )
    changed = dataclasses.replace(loop, parts=parts)
    body = dataclasses.replace(inside.body, loops=(changed,))
    plan = dataclasses.replace(plan, loops=(dataclasses.replace(inside, body=body),))
    found = jax.jit(jax.grad(remat_opt.apply_plan(plan, mapped(scanned))))(STACKED, X)
    expected = jax.jit(jax.grad(scanned))(STACKED, X)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_a_plan_tells_what_a_map_keeps() -> None:
    plan = remat_opt.make_plan(mapped(plain), W, X, budget=0.6)
    assert "shard_map: keeps " in str(plan)
    assert {value.part for value in plan.loop_values} == {"each device"}
    assert "estimated cost rules" not in str(plan)
    assert any(value.fate == "recomputed" for value in plan.loop_values)
    assert "inside the shard_map" in plan.to_page()
    assert Plan.from_json(plan.to_json()) == plan
    other = remat_opt.make_plan(mapped(plain), W, X, budget=1.0)
    assert not plan.diff(plan).loops
    assert "Map shard map in loss" in str(plan.diff(other))
    assert not [note for note in plan.notes if "shard_map" in note and "These run once" not in note]


def test_a_plan_file_with_a_wrong_map_is_refused() -> None:
    loss = mapped(plain)
    plan = remat_opt.make_plan(loss, W, X, budget=0.6)
    for field, value in (("body", 5), ("root", 10**6), ("body", {})):
        body = json.loads(plan.to_json())["plan"]
        body["loops"][0][field] = value
        text = json.dumps({"format": FORMAT, "checksum": checksum_of(body), "plan": body})
        with pytest.raises(PlanFileError):
            remat_opt.apply_plan(Plan.from_json(text), loss)(W, X)
    of_scan = remat_opt.make_plan(scanned, STACKED, X)
    (loop,) = of_scan.loops
    wrong = Mapped(root=loop.root, body=maps_in(plan.loops)[0].body)
    with pytest.raises(PlanFileError, match="not a map that can be opened"):
        remat_opt.apply_plan(dataclasses.replace(of_scan, loops=(wrong,)), scanned)(STACKED, X)


def test_a_map_over_some_axes_says_where_the_decorator_belongs() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        run = jax.shard_map(
            lambda w, x: lax.pmean(plain(w, x), "data"),
            mesh=mesh(),
            in_specs=(P(), P("data")),
            out_specs=P(),
            axis_names={"data"},
        )
        return run(w, x)

    with pytest.raises(BudgetError, match=r"jax\.shard_map\(optimal_remat\(fn\), \.\.\.\)"):
        remat_opt.make_plan(loss, W, X, budget=0.4)
    plan = remat_opt.make_plan(lambda *given: 2 * loss(*given), W, X)
    assert [note for note in plan.notes if "A shard_map (test_maps.py:" in note]
    assert not plan.loops


def test_a_map_has_no_code() -> None:
    plan = remat_opt.make_plan(mapped(plain), W, X, budget=0.6)
    with pytest.raises(remat_opt.RematError, match="mesh"):
        plan.to_source(mapped(plain), W, X)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", ["whole", "a scan inside", "split products", "two layers each"])
def test_the_compiler_agrees(name: str) -> None:
    loss, w = CASES[name]
    rows = NamedSharding(mesh(), P("data" if name == "split products" else ("data", "model")))
    x = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32, sharding=rows)
    plan = remat_opt.make_plan(loss, w, x, device="cpu", gradients="results", max_overhead=4.0)
    before, after = (
        remat_opt.measure(jax.grad(fn), w, x, device="cpu").temporary_bytes
        for fn in (loss, remat_opt.apply_plan(plan, loss))
    )
    assert after < 0.75 * before
    assert plan.predicted.temporary_bytes == pytest.approx(after, rel=0.25)
    assert plan.predicted.plain_temporary_bytes == pytest.approx(before, rel=0.25)


@pytest.mark.slow
@pytest.mark.versions
def test_a_map_is_opened_as_compiled() -> None:
    plan = remat_opt.make_plan(mapped(plain), W, X, budget=0.6, verify="compile", device="cpu")
    assert maps_in(plan.loops)
    assert plan.measured is not None
    assert plan.budget_bytes is not None
    assert plan.measured.temporary_bytes <= plan.budget_bytes


def test_the_decorator_opens_a_map() -> None:
    decorated = optimal_remat(mapped(plain), budget=0.6)
    value, gradient = jax.jit(jax.value_and_grad(decorated))(W, X)
    expected = jax.jit(jax.value_and_grad(plain))(W, X)
    np.testing.assert_allclose(value, expected[0], rtol=2e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
