"""Plans that open loops: what they are predicted to take, and take."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_opt
from remat_opt.checksum import checksum_of
from remat_opt.errors import BudgetError, PlanFileError
from remat_opt.plan import FORMAT, Plan
from remat_opt.program.flop_count import forward_flops, gradient_flops
from remat_opt.schedule import Loop
from tests.programs import array

pytestmark = pytest.mark.usefixtures("quick_search")

LENGTH, WIDTH, ROWS = 13, 32, 256
W = (
    array("up", LENGTH, WIDTH, 4 * WIDTH, scale=1 / 6),
    array("down", LENGTH, 4 * WIDTH, WIDTH, scale=1 / 12),
)
X = array("x", ROWS, WIDTH, scale=1)


def mlp(w: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> Any:
        return h + jnp.tanh(h @ w[0]) @ w[1], None

    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def recurrent(w: Any, x: jax.Array) -> jax.Array:
    """Two loops, one with another inside, and something around them."""

    def step(carry: Any, row: jax.Array) -> Any:
        h, count = carry
        v = w[0][0], w[1][0] / 8
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ v[0]) @ v[1] + h, None), h, None, length=4)
        return (jnp.sin(h + row), count + 1), jnp.sum(h)

    x = jnp.tanh(x)
    (h, _), sums = lax.scan(step, (x, 0), x[:LENGTH])
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1] + h, None), h, w, reverse=True)
    return jnp.mean(jnp.sin(h) ** 2) + jnp.mean(sums)


def attention(w: Any, x: jax.Array) -> jax.Array:
    """Layers whose scores are large beside what passes between them."""

    def layer(h: jax.Array, w: Any) -> Any:
        up, down = w
        q, k, v = (h @ up[:, n * WIDTH : (n + 1) * WIDTH] for n in range(3))
        h = (h + jax.nn.softmax(q @ k.T / WIDTH) @ v) / 2
        return h + jnp.tanh(h @ up) @ down, None

    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def agree(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(other))))


def make_plan(fn: Any = mlp, **wanted: Any) -> Plan:
    return remat_opt.make_plan(fn, W, X, device="cpu", gradients="results", **wanted)


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_a_budget_is_met_by_opening_the_loop(share: float) -> None:
    plan = make_plan(budget=share)
    (loop,) = plan.loops
    assert isinstance(loop, Loop)
    assert sum(part.length for part in loop.parts) == LENGTH
    assert plan.predicted.temporary_bytes <= share * plan.predicted.plain_temporary_bytes
    agree(
        jax.jit(jax.value_and_grad(remat_opt.apply_plan(plan, mlp)))(W, X),
        jax.jit(jax.value_and_grad(mlp))(W, X),
    )


def test_more_memory_never_costs_more() -> None:
    plain = make_plan(budget=1.0).predicted
    assert plain.temporary_bytes == plain.plain_temporary_bytes
    assert plain.overhead_seconds == 0
    overheads = []
    least = make_plan(max_overhead=3.0).predicted.temporary_bytes
    most = make_plan(max_overhead=0.0).predicted.temporary_bytes
    assert most < plain.temporary_bytes
    for step in range(12):
        budget = round(least * (most / least) ** (step / 11))
        found = make_plan(budget=budget).predicted
        assert found.temporary_bytes <= budget
        overheads.append(found.overhead_seconds)
    assert overheads == sorted(overheads, reverse=True)
    assert len(set(overheads)) > 8
    with pytest.raises(BudgetError):
        make_plan(budget=round(least * 0.9))


def test_what_policies_in_the_body_do_is_matched() -> None:
    """The plans find the bytes that they keep, and what is then recomputed."""
    # Of so many rows that the workspace of the library's products does not count.
    rows = 512 * ROWS
    unit, product = rows * WIDTH * 4, 2 * rows * WIDTH * 4 * WIDTH
    forward = 2 * LENGTH * product
    x = jax.ShapeDtypeStruct((rows, WIDTH), "float32")
    front = remat_opt.frontier(mlp, W, x, device="h200", gradients="results", overhead="flops").rows
    for kept, again in ((1, 0.5), (5, 0.01)):
        beside = 16 * unit
        assert any(
            row["temporary_bytes"] <= LENGTH * kept * unit + beside
            and row["recomputed_flops_share"] <= again * LENGTH * 2 * product / forward + 0.02
            for row in front
        )


def test_iterations_keep_what_passes_between_the_regions_in_them() -> None:
    """Scores and hidden units are then never there together, and nothing runs again twice."""
    plan = remat_opt.make_plan(
        attention, W, X, device="cpu", gradients="results", budget=0.09, overhead="flops"
    )
    (loop,) = plan.loops
    assert isinstance(loop, Loop)
    assert any(
        part.kept and sum(stage.checkpointed for stage in part.stages) > 1 for part in loop.parts
    )
    assert Plan.from_json(plan.to_json()) == plan
    written = remat_opt.apply_plan(plan, attention)
    again = gradient_flops(written, W, X) - gradient_flops(attention, W, X)
    forward = forward_flops(attention, W, X)
    assert again == pytest.approx(plan.predicted.recomputed_flops, abs=0.02 * forward)
    assert again < forward
    agree(jax.jit(jax.value_and_grad(written))(W, X), jax.jit(jax.value_and_grad(attention))(W, X))


@pytest.mark.slow
@pytest.mark.versions
def test_loops_in_loops_with_a_program_round_them() -> None:
    plan = make_plan(recurrent, max_overhead=2.5)
    assert len(plan.loops) == 2
    assert any(part.loops for loop in plan.loops for part in loop.parts)
    assert "(inside: scan of 4: " in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    agree(
        jax.jit(jax.value_and_grad(remat_opt.apply_plan(plan, recurrent)))(W, X),
        jax.jit(jax.value_and_grad(recurrent))(W, X),
    )


def test_a_plan_file_says_what_is_done_in_loops() -> None:
    plan = make_plan(budget=0.2)
    assert Plan.from_json(plan.to_json()) == plan
    assert "scan of 13: " in str(plan)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("length", "13"), ("length", 99), ("inside", [5]), ("inside", 5), ("kept", [99])),
        *(("loops", 1), ("stages", [{}]), ("kept_bytes", -1.5)),
    ],
)
def test_a_plan_file_with_wrong_loops_is_refused(field: str, value: Any) -> None:
    body = json.loads(make_plan(budget=0.2).to_json())["plan"]
    body["loops"][0]["parts"][0][field] = value
    text = json.dumps({"format": FORMAT, "checksum": checksum_of(body), "plan": body})
    with pytest.raises(PlanFileError):
        remat_opt.apply_plan(Plan.from_json(text), mlp)(W, X)


def test_what_cannot_be_opened_stays_as_it_is() -> None:
    def telling(w: Any, x: jax.Array) -> jax.Array:
        seen = jax.new_ref(jnp.zeros(()))

        def layer(h: jax.Array, w: Any) -> Any:
            seen[...] = lax.stop_gradient(h[0, 0])
            return jnp.tanh(h @ w[0]) @ w[1], None

        return jnp.mean(lax.scan(layer, x, w)[0])

    def once(w: Any, x: jax.Array) -> jax.Array:
        return mlp(jax.tree.map(lambda one: one[:1], w), x)

    for loss in (telling, once):
        assert make_plan(loss).loops == ()


@pytest.mark.slow
@pytest.mark.versions
def test_the_compiler_agrees() -> None:
    def sizes(**wanted: Any) -> tuple[int, int]:
        plan = remat_opt.make_plan(mlp, W, X, device="cpu", verify=True, **wanted)
        assert plan.measured is not None
        return plan.predicted.temporary_bytes, plan.measured.temporary_bytes

    plain = remat_opt.measure(jax.grad(mlp), W, X, device="cpu").temporary_bytes
    for share in (0.35, 0.6):
        predicted, compiled = sizes(budget=share)
        assert compiled < plain
        assert 0.6 < compiled / predicted < 1.25
