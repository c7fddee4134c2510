"""Plans that open ``cond`` and ``switch``: what they are predicted to take, and that they agree."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat_opt
from remat_opt import _jax_internals as internals
from remat_opt import branches, loops
from remat_opt.checksum import checksum_of
from remat_opt.errors import PlanFileError
from remat_opt.plan import FORMAT, Plan
from remat_opt.program.record import Program
from remat_opt.schedule import Choice
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

SLOW = pytest.mark.slow

DEPTH, WIDTH, ROWS = 3, 32, 256
W = (
    array("up", 2 * DEPTH, WIDTH, 4 * WIDTH, scale=1 / 6),
    array("down", 2 * DEPTH, 4 * WIDTH, WIDTH, scale=1 / 12),
)
X = array("x", ROWS, WIDTH, scale=1)
Act = Callable[[jax.Array], jax.Array]


def block(act: Act, start: int, end: int) -> Callable[..., jax.Array]:
    def run(w: Any, x: jax.Array) -> jax.Array:
        for n in range(start, end):
            x = x + act(x @ w[0][n]) @ w[1][n]
        return x

    return run


def chosen(w: Any, x: jax.Array, which: Any) -> jax.Array:
    """Three branches, one of which does next to nothing and reads no weight."""
    branches = [block(jax.nn.gelu, 0, DEPTH), block(jnp.tanh, DEPTH, 2 * DEPTH), lambda w, x: x * 2]
    return jnp.mean(jnp.sin(lax.switch(which, branches, w, jnp.cos(x))) ** 2)


def nested(w: Any, x: jax.Array, which: Any) -> jax.Array:
    """A choice in a choice, and a loop in a branch."""

    def inner(w: Any, x: jax.Array) -> jax.Array:
        return lax.cond(which > 0, block(jax.nn.gelu, 0, 2), block(jnp.tanh, 0, 2), w, x)

    def looped(w: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, w)[0]

    first = block(jnp.tanh, 2, 4)
    return jnp.mean(lax.cond(which < 2, lambda w, x: inner(w, first(w, x)), looped, w, x) ** 2)


def in_loop(w: Any, x: jax.Array, which: Any) -> jax.Array:
    def step(x: jax.Array, entry: Any) -> Any:
        number, *own = entry
        own = [one[None] for one in own]
        even = (number + which) % 2 == 0
        return lax.cond(even, block(jax.nn.gelu, 0, 1), block(jnp.tanh, 0, 1), own, x), None

    return jnp.mean(lax.scan(step, x, (jnp.arange(2 * DEPTH), *w))[0] ** 2)


def skipping(w: Any, x: jax.Array, which: Any) -> jax.Array:
    """Layers that may be left out, alone and in a loop."""

    def step(x: jax.Array, entry: Any) -> Any:
        number, *own = entry
        own = [one[None] for one in own]
        kept = number % 3 != which
        return lax.cond(kept, block(jax.nn.gelu, 0, 1), lambda w, x: x, own, x), None

    x = lax.cond(which > 0, lambda w, x: x, block(jnp.tanh, 0, DEPTH), w, jnp.cos(x))
    return jnp.mean(lax.scan(step, x, (jnp.arange(2 * DEPTH), *w))[0] ** 2)


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(other))))


@functools.cache
def compiled(loss: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@functools.cache
def unchanged(loss: Any, which: int) -> Any:
    """The value and its gradients without a plan."""
    return compiled(loss)(W, X, which)


@functools.cache
def make_plan(fn: Any = chosen, **wanted: Any) -> Plan:
    return remat_opt.make_plan(fn, W, X, 0, **{"device": "cpu", "gradients": "results", **wanted})


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        pytest.param(chosen, 0.5, marks=SLOW),
        pytest.param(nested, 0.6, marks=SLOW),
        (in_loop, 0.3),
        pytest.param(skipping, 0.5, marks=SLOW),
    ],
)
def test_a_budget_is_met_and_all_branches_give_the_same(loss: Any, share: float) -> None:
    plan = make_plan(loss, budget=share)
    assert plan.loops
    assert plan.predicted.temporary_bytes <= share * plan.predicted.plain_temporary_bytes
    planned = jax.jit(jax.value_and_grad(remat_opt.apply_plan(plan, loss), argnums=(0, 1)))
    for which in range(3):
        agree(planned(W, X, which), unchanged(loss, which))


def test_more_memory_never_costs_more() -> None:
    plans = [make_plan(budget=share) for share in (0.5, 0.7, 0.9, 1.0)]
    overheads = [plan.predicted.overhead_seconds for plan in plans]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > overheads[-1] == 0


@pytest.mark.slow
def test_equal_branches_and_bodies_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Program] = []

    def counted(plan_one: Callable[..., Any]) -> Callable[..., Any]:
        return lambda body, *rest: planned.append(body) or plan_one(body, *rest)

    monkeypatch.setattr(loops, "_iterations", counted(loops._iterations))
    monkeypatch.setattr(branches, "ways", counted(branches.ways))

    def loss(w: Any, x: jax.Array, which: Any) -> jax.Array:
        # Branches that read something without a derivative would differ.
        x = x * jnp.mean(w[0])
        for _ in range(2):
            again = [block(jnp.tanh, 0, 2), block(jnp.tanh, 0, 2), block(jax.nn.gelu, 0, 2)]
            x = lax.switch(which, again, w, jnp.cos(x))
            x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, w)
        return jnp.mean(x**2)

    plan = make_plan(loss, budget=0.7)
    # Not eight: two choices of three branches each, and two loops.
    assert len(planned) == 3
    assert len({one.fingerprint() for one in planned}) == 3
    (choice,) = [one for one in plan.loops if isinstance(one, Choice)][:1]
    assert choice.branches[0] == choice.branches[1]


def test_a_plan_tells_what_branches_keep() -> None:
    plan = make_plan(budget=0.5)
    (choice,) = plan.loops
    assert isinstance(choice, Choice)
    assert len(choice.branches) == 3
    assert "cond of 3: one that keeps " in str(plan)
    assert {value.part for value in plan.loop_values} == {
        f"branch {number} of 3" for number in (1, 2, 3)
    }
    assert "inside the cond" in plan.to_page()
    assert not plan.diff(plan).loops
    assert "Choice cond in chosen (test_branches.py:" in str(plan.diff(make_plan(budget=1.0)))


def test_a_branch_that_only_hands_on_what_it_is_given_has_no_values() -> None:
    plan = make_plan(skipping, budget=0.5)
    (choice,) = (one for one in plan.loops if isinstance(one, Choice))
    assert () in [branch.stages for branch in choice.branches]
    parts = {value.part for value in plan.loop_values if value.loop == choice.root}
    assert parts == {"branch 1 of 2"}


@pytest.mark.parametrize("loss", [chosen, skipping, pytest.param(nested, marks=SLOW)])
def test_a_plan_outlives_a_file_and_becomes_code(loss: Any) -> None:
    plan = make_plan(loss, budget=0.6)
    assert any(isinstance(one, Choice) for one in plan.loops)
    assert Plan.from_json(plan.to_json()) == plan
    source = remat_opt.to_source(plan, loss, W, X, 0)
    assert "lax.switch(" in source.text
    run = jax.jit(jax.value_and_grad(source.load()))
    for which in range(3):
        value, (gradient, _) = unchanged(loss, which)
        agree(run(W, X, which), (value, gradient))


@pytest.mark.parametrize(
    ("field", "value"), [("branches", []), ("branches", [5]), ("root", 0), ("root", 10**6)]
)
def test_a_plan_file_with_wrong_branches_is_refused(field: str, value: Any) -> None:
    body = json.loads(make_plan(budget=0.5).to_json())["plan"]
    body["loops"][0][field] = value
    text = json.dumps({"format": FORMAT, "checksum": checksum_of(body), "plan": body})
    with pytest.raises(PlanFileError):
        remat_opt.apply_plan(Plan.from_json(text), chosen)(W, X, 0)


def test_what_cannot_be_opened_stays_as_it_is() -> None:
    def telling(w: Any, x: jax.Array, which: Any) -> jax.Array:
        seen = jax.new_ref(jnp.zeros(()))

        def told(w: Any, x: jax.Array) -> jax.Array:
            seen[...] = lax.stop_gradient(x[0, 0])
            return block(jnp.tanh, 0, 2)(w, x)

        return jnp.mean(lax.cond(which > 0, told, block(jnp.tanh, 0, 2), w, x))

    assert make_plan(telling).loops == ()


@pytest.mark.versions
def test_a_branch_with_effects_is_opened_and_has_them_once() -> None:
    told: list[float] = []

    def telling(w: Any, x: jax.Array, which: Any) -> jax.Array:
        def one(w: Any, x: jax.Array) -> jax.Array:
            x = block(jnp.tanh, 0, 2)(w, x)
            jax.debug.callback(lambda mean: told.append(float(mean)), jnp.mean(x))
            return block(jnp.tanh, 0, 2)(w, x)

        return jnp.mean(lax.cond(which > 0, one, block(jnp.sin, 0, 2), w, x))

    plan = make_plan(telling)
    assert [type(one) for one in plan.loops] == [Choice]
    expected = jax.jit(jax.value_and_grad(telling))(W, X, 1)
    jax.effects_barrier()
    before = list(told)
    found = jax.jit(jax.value_and_grad(remat_opt.apply_plan(plan, telling)))(W, X, 1)
    jax.effects_barrier()
    assert len(before) == 1
    assert told == pytest.approx(2 * before, rel=1e-4)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_the_inputs_of_branches_are_copied_by_old_jax_alone() -> None:
    version = tuple(map(int, jax.__version__.split(".")[:2]))
    assert internals.branches_copy_inputs() == (version < (0, 11))


def test_a_choice_by_platform_is_none_to_open() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    def conds(fn: Any) -> list[Any]:
        closed, _ = internals.make_jaxpr(fn, X)
        return [one for one in internals.parts(closed)[3] if one.primitive.name == "cond"]

    assert all(map(internals.is_choice_of_platform, conds(fn)))
    (plain,) = conds(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x))
    assert not internals.is_choice_of_platform(plain)


@pytest.mark.slow
@pytest.mark.versions
def test_choices_are_opened_as_compiled() -> None:
    plan = make_plan(nested, budget=0.6, verify="compile", device="cpu")
    assert any(isinstance(one, Choice) for one in plan.loops)
    assert plan.measured is not None
    assert plan.budget_bytes is not None
    assert plan.measured.temporary_bytes <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.versions
def test_the_compiler_agrees() -> None:
    plain = remat_opt.measure(jax.grad(chosen), W, X, 0, device="cpu").temporary_bytes
    plan = remat_opt.make_plan(chosen, W, X, 0, device="cpu", gradients="results", budget=0.6)
    planned = remat_opt.apply_plan(plan, chosen)
    assert (
        remat_opt.measure(jax.grad(planned), W, X, 0, device="cpu").temporary_bytes < 0.75 * plain
    )
