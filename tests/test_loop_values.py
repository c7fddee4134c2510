"""Values inside opened loops, as a plan lists them."""

import jax
import jax.numpy as jnp
import pytest

import remat_opt

LAYERS, WIDTH, BATCH = 12, 64, 2**18


def loss(weights, x):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


ARGUMENTS = (
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"),
    jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
)


@pytest.fixture(scope="module", params=[0.6, 0.25])
def plan(request):
    return remat_opt.make_plan(loss, *ARGUMENTS, budget=request.param, device="h200")


def test_every_iteration_is_told_of_once(plan):
    (loop,) = plan.loops
    runs: dict[str, int] = {}
    for value in plan.loop_values:
        assert value.loop == loop.root
        if "start of each chunk" not in value.part:
            runs[value.part] = value.runs
    assert sum(runs.values()) == LAYERS


def test_what_they_keep_is_what_the_plan_keeps(plan):
    rows = [row for row in plan.rows if row["fate"] == "kept"]
    assert any(row["iterations"] for row in rows)
    assert sum(row["bytes"] for row in rows) == plan.predicted.kept_bytes


def test_they_have_the_users_own_lines_and_names(plan):
    values = [value for value in plan.loop_values if value.name.primitive == "tanh"]
    assert values
    assert all(value.source.startswith("test_loop_values.py:") for value in values)
    assert {value.name.shape for value in values} == {(BATCH, WIDTH)}


def test_they_outlive_a_file(plan):
    assert remat_opt.Plan.from_json(plan.to_json()) == plan


def test_a_loop_that_is_not_opened_has_none():
    plan = remat_opt.make_plan(loss, *ARGUMENTS, max_overhead=0.0, device="h200")
    assert bool(plan.loops) == bool(plan.loop_values)
    assert {value.loop for value in plan.loop_values} == {loop.root for loop in plan.loops}
