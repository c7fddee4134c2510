"""If planning fails, the function still runs, and a report says why."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt import failure, planning
from remat_opt.errors import BudgetError, GraphError, PlanningWarning, RewriteError
from remat_opt.program import tracing
from remat_opt.transform import rewriting
from tests.programs import ones

pytestmark = pytest.mark.usefixtures("quick_search")


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


ARGS = ones(8, 8) * 0.1, ones(4, 8)


def broken(*_: Any, **__: Any) -> Any:
    raise KeyError("first line\nsecond line")


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("room", "what"),
    [(planning, "make"), (rewriting, "rewrite"), (tracing._Flattener, "program")],
)
@pytest.mark.parametrize("jit", [False, True])
def test_the_function_runs_unchanged(
    monkeypatch: pytest.MonkeyPatch, reports: Path, room: Any, what: str, jit: bool
) -> None:
    expected = jax.value_and_grad(loss)(*ARGS)
    monkeypatch.setattr(room, what, broken)
    fn = jax.value_and_grad(remat_opt.optimal_remat(loss, device="h200", budget=0.9))
    with pytest.warns(PlanningWarning) as caught:
        found = (jax.jit(fn) if jit else fn)(*ARGS)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    (report,) = reports.iterdir()
    assert str(caught[0].message) == (
        "remat_opt failed to plan 'loss': KeyError: 'first line\\nsecond line'. The function "
        "runs unchanged: its results are the same, and it takes as much memory as without "
        f"remat_opt. This is a bug in remat_opt: please file an issue and attach {report}, "
        'which holds the function\'s program but no arrays. With errors="raise" it is raised.'
    )
    text = report.read_text()
    for said in (
        "function: loss\n",
        f"remat_opt: {remat_opt.__version__}\n",
        f"jax: {jax.__version__}\n",
        "device: h200\n",
        "budget_share=0.9",
        "Traceback (most recent call last):",
        "in broken",
        "dot_general",
    ):
        assert said in text
    assert re.search(r"lambda ; a:f32\[8,8\] b:f32\[4,8\]", text)


def test_one_warning_for_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "make", broken)
    fn = remat_opt.optimal_remat(loss, device="cpu")
    gradient = jax.grad(lambda *args: fn(*args))
    with pytest.warns(PlanningWarning) as caught:
        gradient(*ARGS)
    assert caught[0].filename == __file__
    gradient(*ARGS)
    with pytest.warns(PlanningWarning):
        gradient(ARGS[0], ARGS[1][:2])


def test_where_no_report_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "make", broken)
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.warns(PlanningWarning, match=r"please file an issue\. With"):
        jax.grad(remat_opt.optimal_remat(loss, device="cpu"))(*ARGS)


def test_raised_where_asked_for(monkeypatch: pytest.MonkeyPatch, reports: Path) -> None:
    monkeypatch.setattr(planning, "make", broken)
    with pytest.raises(KeyError):
        jax.grad(remat_opt.optimal_remat(loss, device="cpu", errors="raise"))(*ARGS)
    with pytest.raises(KeyError):
        remat_opt.optimal_remat(loss, device="cpu").plan(*ARGS)
    with pytest.raises(KeyError):
        remat_opt.make_plan(loss, *ARGS, device="cpu")
    assert not list(reports.iterdir())
    with pytest.raises(remat_opt.RematError, match=r"errors='ignore': give 'warn' or 'raise'\."):
        remat_opt.optimal_remat(loss, errors="ignore")


def test_what_the_user_asked_for_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BudgetError):
            jax.grad(remat_opt.optimal_remat(loss, device="cpu", budget=1))(*ARGS)
        with pytest.raises(remat_opt.DeviceError):
            jax.grad(remat_opt.optimal_remat(loss, device="abacus"))(*ARGS)
        with pytest.raises(remat_opt.TraceError):
            remat_opt.optimal_remat(loss, device="cpu", argnums=5)(*ARGS)


def test_symbolic_shapes_have_no_plan() -> None:
    @remat_opt.optimal_remat
    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    (size,) = jax.export.symbolic_shape("b")
    weights = [ones(4, 4)] * 2
    with pytest.warns(PlanningWarning, match="symbolic shapes") as caught:
        exported = jax.export.export(jax.jit(jax.grad(loss)))(
            weights, jax.ShapeDtypeStruct((size, 4), jnp.float32)
        )
    assert not any("bug" in str(one.message) for one in caught)
    found = exported.call(weights, ones(3, 4))
    expected = jax.grad(loss)(weights, ones(3, 4))
    assert all(np.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected, strict=True))


def test_the_functions_own_error_is_its_own() -> None:
    def wrong(w: jax.Array) -> jax.Array:
        if w.sum() > 0:
            raise KeyError("mine")
        return w.sum()

    with pytest.raises(jax.errors.TracerBoolConversionError):
        remat_opt.optimal_remat(wrong)(jnp.ones(3))
    with pytest.raises(TypeError, match="dot_general"):
        remat_opt.optimal_remat(loss)(jnp.ones((3, 3)), jnp.ones((4, 8)))


def test_whose_fault() -> None:
    assert failure.is_own_fault(GraphError("x"))
    assert failure.is_own_fault(RewriteError("x"))
    assert failure.is_own_fault(AttributeError("x"))
    assert not failure.is_own_fault(remat_opt.RematError("x"))
    assert not failure.is_own_fault(remat_opt.PlanFileError("x"))
    assert not failure.is_own_fault(FloatingPointError("x"))
