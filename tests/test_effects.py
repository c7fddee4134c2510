"""Side effects happen as often as without the decorator, in the same order; the plan says so."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import remat_opt
from remat_opt.errors import BudgetError, PlanFileError
from remat_opt.schedule import Loop

pytestmark = pytest.mark.usefixtures("quick_search")

WEIGHTS = [np.linspace(-1, 1, 256, dtype="float32").reshape(16, 16) * s for s in (0.1, 0.2, 0.3)]
BATCH = np.linspace(-1, 1, 1024, dtype="float32").reshape(64, 16)
SCALAR = jax.ShapeDtypeStruct((), "float32")

Step = Callable[[jax.Array, int], jax.Array]


def loss_of(step: Step) -> Callable[..., jax.Array]:
    """Three layers, each followed by a step."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(weights):
            x = step(jnp.tanh(x @ w) + x, number)
        return jnp.mean(x**2)

    return loss


class Log:
    """Records what is called, and in which order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    def told(self, kind: str, number: int, value: Any) -> None:
        self.lines.append((kind, number))

    def doubled(self, kind: str, number: int, value: Any) -> Any:
        self.lines.append((kind, number))
        return np.asarray(value) * 2


def steps(log: Log) -> dict[str, Step]:
    """One step for each kind of side effect."""

    def debug(x: jax.Array, number: int, ordered: bool = False) -> jax.Array:
        told = functools.partial(log.told, "debug", number)
        jax.debug.callback(told, x.mean(), ordered=ordered)
        return jnp.sin(x)

    def called(x: jax.Array, number: int, ordered: bool = False) -> jax.Array:
        doubled = functools.partial(log.doubled, "io", number)
        return x * io_callback(doubled, SCALAR, lax.stop_gradient(x.mean()), ordered=ordered)

    def pure(x: jax.Array, number: int) -> jax.Array:
        doubled = functools.partial(log.doubled, "pure", number)
        frozen = lax.stop_gradient(jnp.cos(x))
        return x + jax.pure_callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), frozen)

    @jax.custom_vjp
    def host(x: jax.Array) -> Any:
        doubled = functools.partial(log.doubled, "forward", 0)
        return jax.pure_callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def backward(_: None, cotangent: jax.Array) -> Any:
        doubled = functools.partial(log.doubled, "backward", 0)
        return (jax.pure_callback(doubled, SCALAR, jnp.float32(1)) * cotangent,)

    host.defvjp(lambda x: (host(x), None), backward)

    def scanned(x: jax.Array, number: int) -> jax.Array:
        return lax.scan(lambda c, _: (debug(c, number), None), x, None, length=2)[0]

    def branched(x: jax.Array, number: int) -> jax.Array:
        return lax.cond(x.sum() > 0, lambda a: debug(a, number), lambda a: called(a, number), x)

    def under_checkpoint(x: jax.Array, number: int) -> jax.Array:
        return jax.checkpoint(lambda a: debug(a, number))(x)

    def reference(x: jax.Array, number: int) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = jnp.sin(ref[...])
        first = ref[...]
        ref[...] = first * 2
        return first + ref[...] * jnp.cos(x)

    def summed(x: jax.Array, number: int) -> jax.Array:
        # Read in a later region than the one that makes it.
        ref = jax.new_ref(jnp.sin(x))
        ref[...] += jnp.tanh(x) @ (x.T @ x)
        return ref[...] * x

    return {
        "debug callback": debug,
        "ordered debug callback": functools.partial(debug, ordered=True),
        "io callback": called,
        "ordered io callback": functools.partial(called, ordered=True),
        "pure callback": pure,
        "callback with its own derivative": lambda x, _: host(jnp.sin(x)),
        "in a scan": scanned,
        "in a branch": branched,
        "under a checkpoint": under_checkpoint,
        "reference": reference,
        "reference to what varies": summed,
    }


def least(loss: Callable[..., Any], device: str) -> int:
    """The least budget there is."""
    with pytest.raises(BudgetError) as told:
        remat_opt.make_plan(loss, WEIGHTS, BATCH, budget=1, device=device)
    return told.value.least_peak_bytes


def run(log: Log, loss: Callable[..., Any], weights: Any = WEIGHTS) -> Any:
    """The gradient, and what was called for it."""
    log.lines.clear()
    result = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(weights, BATCH))
    jax.effects_barrier()
    return result, list(log.lines)


@pytest.mark.parametrize(
    ("name", "thorough"),
    [
        ("ordered debug callback", False),
        ("callback with its own derivative", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in steps(Log())),
    ],
)
def test_once_and_in_order(name: str, thorough: bool) -> None:
    log = Log()
    loss = loss_of(steps(log)[name])
    expected, lines = run(log, loss)
    ways = itertools.product(("cpu", "h200"), (False, True)) if thorough else [("cpu", True)]
    for device, tight in ways:
        budget = least(loss, device) if tight else None
        ours = remat_opt.optimal_remat(loss, device=device, budget=budget, errors="raise")
        found, found_lines = run(log, ours)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), expected, found)
        # Unordered effects may come in any order.
        ordered = "ordered" in name
        assert (found_lines if ordered else sorted(found_lines)) == (
            lines if ordered else sorted(lines)
        )


@pytest.mark.slow
@pytest.mark.versions
def test_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def printed(x: jax.Array, number: int) -> jax.Array:
        jax.debug.print("layer {} has {}", number, x.sum(), ordered=True)
        return x

    loss = loss_of(printed)
    expected = jax.jit(jax.grad(loss))(WEIGHTS, BATCH)
    jax.effects_barrier()
    lines = capfd.readouterr().out
    assert lines.count("layer") == 3
    ours = remat_opt.optimal_remat(loss, device="h200", errors="raise")
    found = jax.jit(jax.grad(ours))(WEIGHTS, BATCH)
    jax.effects_barrier()
    assert capfd.readouterr().out == lines
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), expected, found)


def test_the_plan_says_so() -> None:
    log = Log()
    loss = loss_of(steps(log)["debug callback"])
    plan = remat_opt.make_plan(loss, WEIGHTS, BATCH, device="h200")
    (note,) = [note for note in plan.notes if "These run once" in note]
    place = "debug_callback at test_effects.py:"
    assert note.startswith(
        "These run once, in the order of the function, and under no checkpoint, because they "
        f"have side effects, call back to Python or communicate with other devices: {place}"
    )
    assert note.endswith(
        "(steps.<locals>.debug), 3 times. What their derivatives read is kept. No iterations of "
        "a loop with one inside share a checkpoint."
    )
    # And it still gains.
    assert plan.predicted.temporary_bytes < plan.predicted.plain_temporary_bytes
    assert sum(stage.checkpointed for stage in plan.stages) > 1
    assert not any("These run once" in note for note in quiet().notes)


def quiet() -> remat_opt.Plan:
    """A plan for a function without side effects."""
    return remat_opt.make_plan(loss_of(lambda x, _: jnp.sin(x)), WEIGHTS, BATCH, device="h200")


@pytest.mark.versions
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "ordered debug callback" else pytest.mark.slow)
        for name in steps(Log())
    ],
)
def test_a_loop_with_effects_is_opened_and_has_them_once(name: str) -> None:
    log = Log()
    step = steps(log)[name]

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            x = step(x, 0)
            for _ in range(4):
                x = x + jnp.sin(jnp.tanh(x) @ w)
            return x / 2, None

        return jnp.mean(lax.scan(layer, x, weights)[0] ** 2)

    weights = jnp.stack([WEIGHTS[0]] * 5)
    args = weights, BATCH
    expected, lines = run(log, loss, weights)
    ours = remat_opt.optimal_remat(
        loss, device="cpu", gradients="results", max_overhead=1.0, errors="raise"
    )
    found, found_lines = run(log, ours, weights)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, expected, found)
    assert found_lines == lines if "ordered" in name else sorted(found_lines) == sorted(lines)
    plan = ours.plan(*args)
    (loop,) = plan.loops
    assert isinstance(loop, Loop)
    assert [(part.length, part.checkpointed) for part in loop.parts] == [(5, False)]
    assert plan.predicted.temporary_bytes < plan.predicted.plain_temporary_bytes
    assert "5 that keep" in repr(plan)
    # A file that says to repeat them is refused.
    broken = dataclasses.replace(
        plan,
        loops=(
            dataclasses.replace(
                loop, parts=(dataclasses.replace(loop.parts[0], checkpointed=True),)
            ),
        ),
    )
    with pytest.raises(PlanFileError, match="repeats the side effects of the loop"):
        jax.grad(remat_opt.apply_plan(broken, loss))(*args)


@pytest.mark.slow
@pytest.mark.versions
def test_checkify_inside_and_outside() -> None:
    def checked(x: jax.Array, number: int) -> jax.Array:
        checkify.check(jnp.all(x < 0.5), "layer {n} is too large", n=jnp.int32(number))
        return x

    loss = loss_of(checked)

    def inside(weights: Any, x: jax.Array) -> Any:
        error, value = checkify.checkify(loss)(weights, x)
        return value, error

    ours = remat_opt.optimal_remat(inside, device="h200", has_aux=True, errors="raise")
    taken = [jax.jit(jax.grad(f, has_aux=True))(WEIGHTS, BATCH) for f in (inside, ours)]
    (expected, error), (found, our_error) = taken
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), expected, found)
    assert error.get() is not None
    assert error.get() == our_error.get()

    decorated = remat_opt.optimal_remat(loss, device="h200", errors="raise")
    errors = []
    for fn in (loss, decorated):
        error, found = checkify.checkify(jax.grad(fn))(WEIGHTS, BATCH)
        errors.append(error.get())
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), expected, found)
    assert errors[0] is not None
    assert errors[1] == errors[0]


def test_a_reference_that_is_an_argument() -> None:
    """State that is changed in place: not under a checkpoint, and written once."""

    def loss(weights: Any, x: jax.Array, count: Any) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w) + x
            count[...] += 1
        return jnp.mean(x**2)

    ours = remat_opt.optimal_remat(loss, device="h200", errors="raise")
    counts = []
    for fn in (loss, ours):
        count = jax.new_ref(jnp.zeros((), "int32"))
        jax.jit(jax.grad(fn))(WEIGHTS, BATCH, count)
        counts.append(int(count[...]))
    assert counts == [3, 3]
