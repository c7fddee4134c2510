"""A plan's promise holds, or the check says which part is broken and what to do."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.errors import CompileError, PlanFileError, RematError
from remat_opt.measurement.step import Step
from remat_opt.testing import check_plan, verdict

pytestmark = pytest.mark.usefixtures("quick_search")

SHAPE = jax.ShapeDtypeStruct((64, 64), "float32")


def loss(w, x):
    for _ in range(8):
        x = jnp.sin(x @ w)
    return jnp.sum(x)


def deeper(w, x):
    return loss(w, jnp.sin(x @ w))


decorated = remat_opt.optimal_remat(loss, device="cpu")


def step(w, x):
    return w - 0.1 * jax.grad(decorated)(w, x)


@pytest.fixture(scope="module")
def plan():
    return remat_opt.make_plan(loss, SHAPE, SHAPE, device="cpu", verify=True)


@pytest.fixture(scope="module")
def plan_of_step():
    return remat_opt.make_plan(step, SHAPE, SHAPE, donate_argnums=0, device="cpu", verify=True)


def promised(plan, temporary_bytes):
    measured = dataclasses.replace(plan.measured, temporary_bytes=temporary_bytes)
    return dataclasses.replace(plan, measured=measured)


def test_a_plan_that_holds(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    found = check_plan(tmp_path / "plan.json", loss, SHAPE, SHAPE)
    assert found.now_bytes == found.then_bytes == plan.measured.temporary_bytes
    assert (found.function, found.device, found.complaint) == ("loss", "cpu", "")


def test_a_plan_of_a_step_that_holds(plan_of_step):
    found = check_plan(plan_of_step, step, SHAPE, SHAPE, donate_argnums=0)
    assert found.now_bytes == plan_of_step.measured.temporary_bytes


def test_a_peak_that_has_grown(plan):
    least = plan.measured.temporary_bytes
    with pytest.raises(AssertionError) as caught:
        check_plan(promised(plan, round(least / 1.5)), loss, SHAPE, SHAPE)
    said = str(caught.value)
    assert "The peak of 'loss' under its plan has grown from" in said
    assert "by 50.0 %; 2.0 % is tolerated" in said
    assert 'Make the plan again, with verify="compile"' in said


def test_a_little_more_is_tolerated(plan):
    a_little_less = promised(plan, round(plan.measured.temporary_bytes / 1.01))
    assert check_plan(a_little_less, loss, SHAPE, SHAPE).complaint == ""
    assert verdict(a_little_less, loss, (SHAPE, SHAPE), {}, tolerance=0.001).complaint
    much_less = promised(plan, plan.measured.temporary_bytes // 2)
    assert check_plan(much_less, loss, SHAPE, SHAPE, tolerance=1.5).complaint == ""


def test_less_is_no_reason_to_complain(plan):
    check_plan(promised(plan, 2 * plan.measured.temporary_bytes), loss, SHAPE, SHAPE)


def test_a_program_that_has_changed(plan):
    with pytest.raises(AssertionError) as caught:
        check_plan(plan, deeper, SHAPE, SHAPE)
    said = str(caught.value)
    assert "'deeper' is no longer the program that the plan was made for" in said
    assert "A plan for the same request is predicted to take " in said
    assert said.endswith("Make the plan again.")


def test_a_program_for_which_the_request_cannot_be_met():
    budget = remat_opt.frontier(loss, SHAPE, SHAPE, device="cpu").rows[0]["temporary_bytes"]
    plan = remat_opt.make_plan(loss, SHAPE, SHAPE, device="cpu", budget=budget, verify=True)
    large = jax.ShapeDtypeStruct((512, 64), "float32")
    with pytest.raises(AssertionError, match="The plan's request can no longer be met: "):
        check_plan(plan, loss, SHAPE, large)


def test_a_step_whose_shapes_have_changed(plan_of_step):
    other = jax.ShapeDtypeStruct((32, 64), "float32")
    found = verdict(plan_of_step, step, (SHAPE, other), {}, donate_argnums=0)
    assert "no longer the program" in found.complaint
    assert found.now_bytes is None


def test_a_step_that_does_not_compile_any_more(plan_of_step, monkeypatch):
    def refuse(*args, **kwargs):
        raise CompileError("It does not fit.", device="cpu", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr(Step, "measure", refuse)
    with pytest.raises(AssertionError, match=r"does not compile now\. It does not fit"):
        check_plan(plan_of_step, step, SHAPE, SHAPE, donate_argnums=0)


def test_a_plan_without_figures():
    plan = remat_opt.make_plan(loss, SHAPE, SHAPE, device="cpu")
    with pytest.raises(PlanFileError, match="was not compiled when it was made"):
        check_plan(plan, loss, SHAPE, SHAPE)


def test_a_tolerance_below_nothing(plan):
    with pytest.raises(RematError, match="give a share such as"):
        check_plan(plan, loss, SHAPE, SHAPE, tolerance=-0.1)


def test_a_loss_donates_nothing(plan):
    with pytest.raises(RematError, match="is for a training step"):
        check_plan(plan, loss, SHAPE, SHAPE, donate_argnums=0)
