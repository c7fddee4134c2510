"""The hand-written policy nearest to a plan, and what it loses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt.errors import PlanFileError

pytestmark = pytest.mark.usefixtures("quick_search")

SHAPE = jax.ShapeDtypeStruct((64, 64), "float32")
ROWS = jax.ShapeDtypeStruct((256, 64), "float32")


def deep(weights, x):
    for number, (w, v) in enumerate(weights):
        with jax.named_scope(f"Block_{number}"):
            with jax.named_scope("Dense_0"):
                x = x + jnp.tanh(x @ w)
            with jax.named_scope("Dense_1"):
                x = x + jnp.tanh(x @ v)
    return jnp.sum(x)


def scanned(weights, x):
    return jnp.sum(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w) @ w, None), x, weights)[0])


WEIGHTS = [(SHAPE, SHAPE)] * 6


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_is_within_the_memory_of_the_plan_where_it_can_be(share):
    plan = remat_opt.make_plan(deep, WEIGHTS, ROWS, device="cpu", budget=share)
    found = remat_opt.nearest_policy(plan, deep, WEIGHTS, ROWS)
    assert found.plan_temporary_bytes == plan.predicted.temporary_bytes
    within = found.temporary_bytes <= plan.predicted.temporary_bytes
    # The plan is at least as good in one of the two.
    assert found.overhead_share >= plan.predicted.overhead_share - 1e-9 or not within


def test_says_what_to_put_round_which_modules():
    plan = remat_opt.make_plan(deep, WEIGHTS, ROWS, device="cpu", budget=0.5)
    text = repr(remat_opt.nearest_policy(plan, deep, WEIGHTS, ROWS))
    assert text.startswith(("nn.remat on every Block (6) with ", "jax.checkpoint around the whole"))
    assert "temporaries, predicted: " in text
    assert "of the time of a forward pass" in text


def test_names_what_a_scan_keeps():
    weights = jax.ShapeDtypeStruct((16, 64, 64), "float32")
    plan = remat_opt.make_plan(scanned, weights, ROWS, device="cpu", budget=0.7)
    found = remat_opt.nearest_policy(plan, scanned, weights, ROWS)
    assert found.where.startswith("jax.checkpoint around")
    for one in found.names:
        assert f'"{one.name}"' in found.policy
        assert "test_handover.py:" in one.source


def test_the_loss_may_be_one_that_its_step_defines():
    def step(weights, x):
        @remat_opt.optimal_remat(device="cpu")
        def loss(weights):
            return deep(weights, x)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    plan = remat_opt.make_plan(step, WEIGHTS, ROWS, device="cpu", budget=0.5)
    found = remat_opt.nearest_policy(plan, step, WEIGHTS, ROWS)
    assert found.plan_temporary_bytes == plan.predicted.temporary_bytes
    with pytest.raises(PlanFileError, match="another program"):
        remat_opt.nearest_policy(plan, step, WEIGHTS[:3], ROWS)


def test_the_source_of_a_loss_that_its_step_defines_takes_what_it_closes_over():
    def step(weights, state, batch):
        scale = state["scale"] * 2

        @remat_opt.optimal_remat(device="cpu")
        def loss(weights):
            return deep(weights, batch["image"]) * scale

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    arguments = WEIGHTS[:3], {"scale": jax.ShapeDtypeStruct((), "float32")}, {"image": ROWS}
    plan = remat_opt.make_plan(step, *arguments, device="cpu", budget=0.5)
    source = remat_opt.to_source(plan, step, *arguments)
    assert source.closed_over == ("batch['image']", "scale")
    assert "0. batch['image']: float32[256, 64]" in source.text
    numbers = np.random.default_rng(0)
    weights, image = jax.tree.map(
        lambda one: numbers.normal(size=one.shape).astype(one.dtype), (WEIGHTS[:3], ROWS)
    )
    run = jax.jit(jax.value_and_grad(source.load()))
    found = run(weights, closed_over=[image, jnp.float32(6)])
    expected = jax.jit(jax.value_and_grad(lambda weights: deep(weights, image) * 6))(weights)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-2)
    with pytest.raises(PlanFileError, match="another program"):
        remat_opt.to_source(plan, step, WEIGHTS[:2], *arguments[1:])


def test_a_plan_writes_itself_as_a_decorated_loss_does():
    options = {"device": "cpu", "budget": 0.5}
    plan = remat_opt.make_plan(deep, WEIGHTS, ROWS, **options)
    source = plan.to_source(deep, WEIGHTS, ROWS)
    assert source == remat_opt.to_source(plan, deep, WEIGHTS, ROWS)
    decorated = remat_opt.optimal_remat(deep, **options)
    assert source == decorated.to_source(WEIGHTS, ROWS) == plan.to_source(decorated, WEIGHTS, ROWS)
    with pytest.raises(PlanFileError, match="another program"):
        plan.to_source(deep, WEIGHTS[:3], ROWS)


def test_a_plan_for_another_program_is_refused():
    plan = remat_opt.make_plan(deep, WEIGHTS, ROWS, device="cpu", budget=0.5)
    with pytest.raises(PlanFileError, match="made for another program"):
        remat_opt.nearest_policy(plan, deep, WEIGHTS[:3], ROWS)


def test_the_body_of_a_scan_under_one_policy_needs_no_more_than_the_plan():
    weights = jax.ShapeDtypeStruct((16, 64, 64), "float32")
    plan = remat_opt.make_plan(scanned, weights, ROWS, device="cpu", budget=0.5)
    found = remat_opt.nearest_policy(plan, scanned, weights, ROWS)
    assert found.where == "jax.checkpoint around the body of every scan"
    assert found.temporary_bytes <= plan.predicted.temporary_bytes


def test_values_that_blocks_have_in_common_get_one_name_each():
    def stack(weights, x):
        for number, w in enumerate(weights):
            with jax.named_scope(f"Layer_{number}"):
                x = jax.nn.gelu(x @ w) @ w.T + x
        return jnp.sum(x)

    plan = remat_opt.make_plan(stack, [SHAPE] * 6, ROWS, device="cpu", budget=0.6)
    found = remat_opt.nearest_policy(plan, stack, [SHAPE] * 6, ROWS)
    names = [one.name for one in found.names]
    assert len(set(names)) == len(names)
    # Not one for each layer: only their numbers distinguish the layers.
    assert not any(one.module != "Layer_0" for one in found.names)
    assert found.where.startswith(("nn.remat on every Layer (6)", "jax.checkpoint around"))
