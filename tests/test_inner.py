"""A function's own checkpoints: kept and counted, or dissolved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_opt
from remat_opt import inner
from remat_opt.compilers.compiler import Compiler
from remat_opt.device import get_device
from remat_opt.errors import BudgetError, PlanFileError, RematError
from remat_opt.gradients import Gradients
from remat_opt.program.linearization import linearize
from remat_opt.program.tracing import Signature, trace
from tests.compiler_graphs import compiler_of

pytestmark = pytest.mark.usefixtures("quick_search")

Body = Callable[..., jax.Array]
W = np.linspace(-1, 1, 4 * 16 * 64, dtype="float32").reshape(4, 16, 64) * 0.2
X = np.linspace(-1, 1, 32 * 16, dtype="float32").reshape(32, 16)
ARRAY = X.nbytes


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A wide hidden array: its workspace is larger than its input."""
    h = checkpoint_name(x @ w, "hidden")
    return jnp.tanh(jax.nn.gelu(h) @ w.T) + x


def unrolled(body: Body) -> Callable[..., jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(len(w)):
            x = body(x, w[number])
        return jnp.mean(x**2)

    return loss


def scanned(body: Body) -> Callable[..., jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(lambda c, one: (body(c, one), None), x, w)[0] ** 2)

    return loss


def branched(body: Body) -> Callable[..., jax.Array]:
    return unrolled(lambda x, w: lax.cond(x.sum() > 0, body, lambda a, _: jnp.sin(a), x, w))


def workspaces(
    loss: Callable[..., Any], primitive: str, device: str = "h200", off: Collection[str] = ()
) -> list[int]:
    """What vertices of one kind take for their inner programs, perhaps without some rules."""
    program = trace(loss, W, X)
    compiler = compiler_of(device, off)
    found = inner.model(program, linearize(program), compiler, Gradients.CONSUMED)
    return [
        found.inside.get(vertex, 0)
        for vertex, root in enumerate(found.roots)
        if program.equations[root].operation.primitive == primitive
    ]


def test_a_body_that_runs_again_takes_what_is_alive_in_it() -> None:
    # At its peak: the hidden array, its cotangent and the activation's result.
    nothing = workspaces(unrolled(jax.checkpoint(layer)), "remat2")
    assert len(nothing) == 4
    assert all(2 * 4 * ARRAY <= size <= 6 * 4 * ARRAY for size in nothing)
    # What a policy keeps is there anyway.
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    kept = workspaces(unrolled(jax.checkpoint(layer, policy=policy)), "remat2")
    assert all(0 < some < all_of_it for some, all_of_it in zip(kept, nothing, strict=True))


def test_branches_and_iterations_take_what_is_alive_in_them() -> None:
    assert all(workspaces(branched(layer), "cond"))
    assert workspaces(scanned(layer), "scan")[0] > 0
    # One iteration at a time, however many there are.
    inside = workspaces(scanned(jax.checkpoint(layer)), "scan")[0]
    library = 2**25  # for a product that reads an entry of a stack
    assert 2 * 4 * ARRAY <= inside - library <= 6 * 4 * ARRAY
    arrays = workspaces(scanned(jax.checkpoint(layer)), "scan", off={"entries_taken"})[0]
    assert 2 * 4 * ARRAY <= arrays <= 6 * 4 * ARRAY


def of_wide_scan(**options: Any) -> int:
    """What an iteration takes whose weights are larger than its arrays; in bytes, on h200."""
    width = 4096
    body = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), **options)
    shapes = (jax.ShapeDtypeStruct(one, "float32") for one in ((4, width, width), (8, width)))
    program = trace(scanned(body), *shapes)
    found = inner.model(program, linearize(program), compiler_of("h200"), Gradients.CONSUMED)
    return max(found.inside.values())


def test_without_a_barrier_what_runs_again_reads_entries_where_they_lie() -> None:
    entry, library, small = 4 * 4096**2, 2**25, 2**20
    assert library < of_wide_scan(prevent_cse=False) < library + small
    assert entry < of_wide_scan() < entry + small


@pytest.mark.parametrize(("shape", "primitive"), [(scanned, "scan"), (branched, "cond")])
def test_what_is_inside_is_not_rewritten(shape: Callable[[Body], Any], primitive: str) -> None:
    def similar(x: jax.Array, w: jax.Array) -> jax.Array:
        features = (x @ w).reshape(-1, 4, 16)
        return x + jnp.sin(jnp.einsum("bif,bjf->bij", features, features)).reshape(x.shape)

    # Where it is opened, its gradient is one product.
    expected = workspaces(shape(similar), primitive, "cpu", ["squares_once"])
    assert workspaces(shape(similar), primitive, "cpu") == expected
    assert workspaces(shape(similar), primitive, "cpu", ["squares"]) != expected


def test_nothing_inside_changes_nothing() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.relu(x @ w[0]) @ w[1].T)

    program = trace(loss, W, X)
    compiler = Compiler(device=get_device("h200"))
    found = inner.model(program, linearize(program), compiler, Gradients.CONSUMED)
    assert not found.inside


@pytest.mark.parametrize("shape", [unrolled, scanned, branched])
def test_dissolved_is_the_same_program_as_without(shape: Callable[[Body], Any]) -> None:
    plain = trace(shape(layer), W, X)
    own = trace(shape(jax.checkpoint(layer)), W, X)
    dissolved = trace(shape(jax.checkpoint(layer)), W, X, signature=Signature(dissolved=True))
    assert own.fingerprint() != plain.fingerprint()
    assert dissolved.fingerprint() == plain.fingerprint()
    same = trace(shape(layer), W, X, signature=Signature(dissolved=True))
    assert same.fingerprint() == plain.fingerprint()


@pytest.mark.slow
@pytest.mark.versions
def test_checkpoints_in_checkpoints_and_twice_the_same() -> None:
    body = jax.checkpoint(lambda a, w: jax.checkpoint(layer)(jax.checkpoint(layer)(a, w), w))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, one: jax.Array) -> Any:
            return lax.cond(carry.sum() > 0, body, layer, body(carry, one), one), carry.sum()

        carry, sums = lax.scan(step, x, w)
        return jnp.mean(carry**2) + sums.sum()

    program = trace(loss, W, X, signature=Signature(dissolved=True))
    assert "remat2" not in program.equations[0].parameters + str(
        [one.operation for one in program.equations]
    )
    ours = remat_opt.optimal_remat(loss, device="h200", existing="replace", errors="raise")
    found = jax.jit(jax.grad(ours))(W, X)
    np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(W, X), rtol=2e-2, atol=1e-3)


def test_a_plan_for_the_dissolved_function_is_applied_to_it(tmp_path: Path) -> None:
    loss = scanned(jax.checkpoint(layer))
    plan = remat_opt.make_plan(loss, W, X, device="h200", existing="replace")
    assert plan.fingerprint != remat_opt.make_plan(loss, W, X, device="h200").fingerprint
    plan.save(tmp_path / "plan.json")
    applied = remat_opt.apply_plan(tmp_path / "plan.json", loss)
    expected = jax.make_jaxpr(jax.grad(remat_opt.apply_plan(plan, scanned(layer))))(W, X)
    assert str(jax.make_jaxpr(jax.grad(applied))(W, X)) == str(expected)
    assert applied.plan(W, X) == plan
    # It may also be given. A plan that keeps them cannot be applied to a function without any.
    assert remat_opt.apply_plan(plan, loss, existing="replace").plan(W, X) == plan
    kept = remat_opt.make_plan(loss, W, X, device="h200")
    with pytest.raises(PlanFileError, match="another program"):
        remat_opt.apply_plan(kept, loss, existing="replace").plan(W, X)


@pytest.mark.parametrize("shape", [unrolled, scanned])
def test_a_budget_that_they_rule_out_names_the_remedy(shape: Callable[[Body], Any]) -> None:
    loss = shape(jax.checkpoint(lambda x, w: layer(layer(x, w), w)))
    with pytest.raises(BudgetError) as told:
        remat_opt.make_plan(loss, W, X, device="h200", budget=1)
    assert "smaller batch. The function's own checkpoints (test_inner.py:" in str(told.value)
    assert 'existing="replace" lets the plan decide' in str(told.value)
    with pytest.raises(BudgetError) as told:
        remat_opt.make_plan(loss, W, X, device="h200", budget=1, existing="replace")
    assert "existing" not in str(told.value)


def test_what_is_recomputed_anyway_is_told() -> None:
    make = functools.partial(remat_opt.make_plan, device="h200")
    for shape in (unrolled, scanned):
        loss = shape(jax.checkpoint(layer))
        own = "The function's own checkpoints"
        (note,) = [n for n in make(loss, W, X).notes if n.startswith(own)]
        assert "stay as they are (test_inner.py:" in note
        assert note.endswith('existing="replace" lets the plan decide about the values under them.')
        share = float(note.partition("They compute ")[2].partition(" %")[0])
        assert 50 < share <= 100
        for other in (make(loss, W, X, existing="replace"), make(shape(layer), W, X)):
            assert not any(n.startswith(own) for n in other.notes)


def test_options_are_checked() -> None:
    with pytest.raises(RematError, match="existing='drop': give 'keep' to leave") as told:
        remat_opt.optimal_remat(layer, existing="drop")
    assert "'replace' to let the plan decide" in str(told.value)
