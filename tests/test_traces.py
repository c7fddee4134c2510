"""Called outside ``jax.jit``: traced and planned once, compiled, and never out of date."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_opt
from remat_opt import planning
from remat_opt.program import tracing

pytestmark = pytest.mark.usefixtures("quick_search")

WEIGHTS = [jnp.full((4, 4), 0.1 * n) for n in range(2)]
X = jnp.linspace(-1, 1, 24).reshape(6, 4)
SCALE = 1.0


def layers(weights: Any, x: jax.Array, depth: int = 2, act: Any = jnp.tanh) -> jax.Array:
    for w in weights[:depth]:
        x = act(x @ w) * SCALE + x
    return jnp.mean(x**2)


class Counts:
    traced = 0
    planned = 0


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found = Counts()
    trace, make = tracing.trace_call, planning.make

    def traced(*args: Any, **kwargs: Any) -> Any:
        found.traced += 1
        return trace(*args, **kwargs)

    def planned(*args: Any) -> Any:
        found.planned += 1
        return make(*args)

    monkeypatch.setattr(tracing, "trace_call", traced)
    monkeypatch.setattr(planning, "make", planned)
    return found


def decorated(fn: Callable[..., Any], **options: Any) -> Any:
    return remat_opt.optimal_remat(fn, device="cpu", errors="raise", **options)


def same(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def test_traced_planned_and_compiled_once(
    counts: Counts, capfd: pytest.CaptureFixture[str]
) -> None:
    fn = decorated(layers)
    expected = jax.value_and_grad(layers)(WEIGHTS, X)
    for _ in range(3):
        same(jax.value_and_grad(fn)(WEIGHTS, X), expected)
    assert (counts.traced, counts.planned) == (1, 1)
    with jax.log_compiles():
        jax.value_and_grad(fn)(WEIGHTS, X + 1)
    assert "Compiling" not in capfd.readouterr().err
    # A second derivative takes its first from the same trace.
    direction = jax.tree.map(jnp.cos, WEIGHTS)
    for _ in range(2):
        same(
            jax.jvp(lambda w: jax.grad(fn)(w, X), (WEIGHTS,), (direction,)),
            jax.jvp(lambda w: jax.grad(layers)(w, X), (WEIGHTS,), (direction,)),
        )
    stacked = jnp.stack([X, X + 1])
    same(
        jax.vmap(jax.grad(fn), (None, 0))(WEIGHTS, stacked),
        jax.vmap(jax.grad(layers), (None, 0))(WEIGHTS, stacked),
    )
    assert (counts.traced, counts.planned) == (1, 1)


def test_what_calls_may_differ_in(counts: Counts) -> None:
    fn = decorated(layers, static_argnames=("depth", "act"))
    calls: list[Callable[[Any], Any]] = [
        lambda f: jax.grad(f)(WEIGHTS, X),
        lambda f: jax.grad(f)(WEIGHTS, X[:3]),
        lambda f: jax.grad(f, argnums=1)(WEIGHTS, X),
        lambda f: jax.grad(f, argnums=(0, 1))(WEIGHTS, X),
        lambda f: jax.grad(f)(WEIGHTS, X, 1),
        lambda f: jax.grad(f)(WEIGHTS, X, act=jnp.sin),
        lambda f: jax.grad(lambda w: f([w, *WEIGHTS], X))(WEIGHTS[1]),
    ]
    plain = jax.jit(layers, static_argnames=("depth", "act"))
    expected = [call(plain) for call in calls]
    for _ in range(2):
        for call, gradient in zip(calls, expected, strict=True):
            same(call(fn), gradient)
    assert counts.traced == len(calls)
    before = counts.traced
    with jax.default_matmul_precision("float32"):
        calls[0](fn)
    assert counts.traced == before + 1


def test_without_derivatives_nothing_is_planned(counts: Counts) -> None:
    fn = decorated(layers, budget=1)  # which cannot be reached
    for _ in range(2):
        same(fn(WEIGHTS, X), layers(WEIGHTS, X))
    assert (counts.traced, counts.planned) == (1, 0)
    with pytest.raises(remat_opt.BudgetError):
        jax.grad(fn)(WEIGHTS, X)


def test_what_the_function_refers_to_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = decorated(layers)
    jax.grad(fn)(WEIGHTS, X)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    same(jax.grad(fn)(WEIGHTS, X), jax.grad(layers)(WEIGHTS, X))
    table = {"x": X}
    reads = decorated(lambda weights: layers(weights, table["x"]))
    jax.grad(reads)(WEIGHTS)
    table["x"] = X + 1
    same(jax.grad(reads)(WEIGHTS), jax.grad(layers)(WEIGHTS, X + 1))


def test_arrays_that_were_not_seen_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if in an installed package: these lines are taken to be a package's.
    monkeypatch.setattr("remat_opt.program.references._is_installed", lambda _: True)
    frames = {"x": X}
    monkeypatch.setitem(globals(), "FRAMES", frames)
    fn = decorated(lambda weights: layers(weights, globals()["FRAMES"]["x"]))
    jax.grad(fn)(WEIGHTS)
    frames["x"] = X + 1
    same(jax.grad(fn)(WEIGHTS), jax.grad(layers)(WEIGHTS, X + 1))


def test_methods(counts: Counts) -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @remat_opt.optimal_remat(device="cpu", errors="raise")
        def loss(self, weights: Any) -> jax.Array:
            return layers(weights, self.scale * X)

    models = Model(1.0), Model(2.0)
    for _ in range(2):
        for model in models:
            expected = jax.grad(layers)(WEIGHTS, model.scale * X)
            same(jax.grad(model.loss)(WEIGHTS), expected)
    assert counts.traced == 2
    models[0].scale = 3.0
    same(jax.grad(models[0].loss)(WEIGHTS), jax.grad(layers)(WEIGHTS, 3 * X))


@pytest.mark.parametrize(
    "make",
    [jax.jit, lambda fn: functools.partial(fn, depth=2), lambda fn: lambda *args: fn(*args)],
    ids=["jit", "partial", "lambda"],
)
def test_functions_of_other_kinds(counts: Counts, make: Callable[..., Any]) -> None:
    fn = decorated(make(layers))
    for _ in range(2):
        same(jax.grad(fn)(WEIGHTS, X), jax.grad(layers)(WEIGHTS, X))
    assert counts.traced == 1


def test_tracers_are_never_kept(counts: Counts) -> None:
    holder: list[Any] = []
    decorated_once = decorated(lambda weights: layers(weights, holder[0] * X))

    def loss(scale: jax.Array) -> jax.Array:
        holder[:] = [scale]
        return decorated_once(WEIGHTS)

    expected = jax.grad(lambda scale: layers(WEIGHTS, scale * X))
    for scale in (1.0, 2.0):
        same(jax.grad(loss)(scale), expected(scale))
    assert counts.traced == 2
    assert counts.planned == 1
    assert len(decorated_once._traces) == 0


def test_results_that_are_no_arrays() -> None:
    def loss(weights: Any, x: jax.Array) -> Any:
        return layers(weights, x), {"depth": 2, "kind": "mean", "of": jnp.mean, "x": x}

    fn = decorated(loss, has_aux=True)
    for _ in range(2):
        _, found = jax.grad(fn, has_aux=True)(WEIGHTS, X)
        assert (found["depth"], found["kind"], found["of"]) == (2, "mean", jnp.mean)
        assert type(found["depth"]) is int


def test_without_compiling(counts: Counts) -> None:
    fn = decorated(layers)
    with jax.disable_jit():
        for _ in range(2):
            same(jax.grad(fn)(WEIGHTS, X), jax.grad(layers)(WEIGHTS, X))
    same(jax.grad(fn)(WEIGHTS, X), jax.grad(layers)(WEIGHTS, X))
    assert counts.traced == 2
    assert counts.planned == 1


def test_threads_plan_once(counts: Counts) -> None:
    fn, found = decorated(layers), []
    threads = [
        threading.Thread(target=lambda: found.append(jax.jit(jax.grad(fn))(WEIGHTS, X)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.planned == 1
    for gradient in found:
        same(gradient, jax.grad(layers)(WEIGHTS, X))
    assert len(found) == 6


def test_modules_of_nnx(counts: Counts) -> None:
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(x))

    def loss(model: Network, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    def run(fn: Callable[..., Any]) -> tuple[list[Any], jax.Array]:
        model = Network(nnx.Rngs(0))
        return [nnx.value_and_grad(fn)(model, X)[0] for _ in range(2)], model.norm.mean[...]

    same(run(decorated(loss)), run(loss))
    assert counts.traced == 1
