"""Measuring the training step: overrides reach the compiler, and what a step shows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remat_opt
from remat_opt.comparison import checkpointed, checkpointed_per_block
from remat_opt.device import get_device
from remat_opt.errors import BudgetError, RematError
from remat_opt.measurement import compilation, step
from remat_opt.measurement.step import Step, as_it_is, running
from remat_opt.program.tracing import Signature
from remat_opt.training import training_step
from tests.devices import needs_libtpu

pytestmark = pytest.mark.usefixtures("quick_search")

Array = jax.ShapeDtypeStruct
CPU = get_device("cpu")
LAYERS = 4
WEIGHTS = [(Array((64, 256), "float32"), Array((256, 64), "float32"))] * LAYERS
X = Array((512, 64), "float32")
GRADIENT_BYTES = LAYERS * 2 * 64 * 256 * 4
ADAM = optax.adam(1e-3)
STATE = jax.eval_shape(ADAM.init, WEIGHTS)
NOTHING = jax.checkpoint_policies.nothing_saveable


def plain_loss(weights: Any, x: jax.Array) -> jax.Array:
    for first, second in weights:
        x = x + jax.nn.gelu(x @ first) @ second
    return jnp.mean(jnp.square(x))


def decorated(fn: Callable[..., Any] = plain_loss, **options: Any) -> Any:
    return remat_opt.optimal_remat(fn, device="cpu", **options)


def doubled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: 2 * fn(*args)


def adam_step(loss: Any, **options: Any) -> Step:
    return Step(
        fn=training_step(loss, ADAM, **options), args=(WEIGHTS, STATE, X), donate_argnums=(0, 1)
    )


# --- running something else ---------------------------------------------------------------


def test_what_runs_in_the_place_of_a_loss() -> None:
    first, second = decorated(jnp.sum), decorated(jnp.sum)
    x = jnp.ones(3)
    with running(doubled):
        assert (first(x), second(x)) == (6, 6)
        with running(as_it_is):
            assert first(x) == 3
        assert first(x) == 6
    with running(doubled, first._identity):
        assert (first(x), second(x)) == (6, 3)
    assert first(x) == 3


def test_inside_decorated_functions_are_themselves() -> None:
    inner = decorated(jnp.sum)
    outer = decorated(lambda x: inner(x) + 1)
    with running(doubled):
        assert outer(jnp.ones(3)) == 8
    with running(lambda fn: inner):
        assert outer(jnp.ones(3)) == 3


def test_a_method_is_one_loss_however_it_is_bound() -> None:
    class Model:
        @remat_opt.optimal_remat(device="cpu")
        def loss(self, x: jax.Array) -> jax.Array:
            return jnp.sum(x)

    identity = Model.__dict__["loss"]._identity
    with running(doubled, identity):
        assert Model().loss(jnp.ones(3)) == 6


def test_traces_of_inner_jitted_functions_are_not_taken_for_others() -> None:
    # JAX keeps the traces of jitted functions; each way to run the loss needs its own.
    loss = decorated()

    @jax.jit
    def helper(weights: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(loss)(weights, x)

    @jax.jit
    def update(weights: Any, x: jax.Array) -> Any:
        value, gradients = helper(weights, x)
        return value, jax.tree.map(lambda w, g: w - g, weights, gradients)

    whole = Step(fn=update, args=(WEIGHTS, X))
    signature = Signature()

    def temporary_bytes(how: step.How) -> int:
        return whole.measure(how, loss._identity, CPU).temporary_bytes

    def by_plan() -> int:
        return compilation.measure(update, WEIGHTS, X, device=CPU).temporary_bytes

    unplanned = temporary_bytes(as_it_is)
    planned = by_plan()
    per_block = temporary_bytes(checkpointed_per_block(NOTHING, signature))
    assert per_block < 0.5 * unplanned
    assert planned < 0.5 * unplanned
    assert temporary_bytes(checkpointed(NOTHING, signature)) > per_block
    assert temporary_bytes(as_it_is) == unplanned
    assert by_plan() == planned
    # And as numbers.
    weights = jax.tree.map(lambda one: jnp.full(one.shape, 0.01), WEIGHTS)
    x = jnp.ones(X.shape)
    value = float(update(weights, x)[0])
    with running(doubled):
        assert float(update(weights, x)[0]) == pytest.approx(2 * value, rel=1e-5)
    assert float(update(weights, x)[0]) == value


# --- what a step shows --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "times", "rows"),
    [
        ({}, [1], 512),
        ({"clip_norm": 1.0}, [1], 512),
        ({"microbatches": 2}, [1, 1], 256),
        # The scan asks for shapes first: a call that never runs.
        ({"microbatches": 4, "loop": "scan"}, [4], 128),
    ],
)
def test_the_calls_in_a_step(options: dict[str, Any], times: list[int], rows: int) -> None:
    loss = decorated()
    program, calls = adam_step(loss, **options).trace()
    assert [call.times for call in calls] == times
    batch = Array((rows, 64), "float32")
    for call in calls:
        assert call.loss is loss._identity
        assert call.program.fingerprint() == loss.program(WEIGHTS, batch).fingerprint()
        assert [leaf.shape for leaf in call.arguments][-1] == batch.shape
    assert len(program.arguments) == len(jax.tree.leaves((WEIGHTS, STATE, X)))
    assert step.forward_flops(calls) == pytest.approx(
        step.forward_flops(adam_step(loss).trace()[1]), rel=1e-3
    )


def test_a_helper_that_is_traced_once_and_called_twice() -> None:
    loss = decorated()
    gradient = jax.jit(jax.grad(loss))
    both = Step(
        fn=lambda w, x: jax.tree.map(jnp.add, gradient(w, x), gradient(w, 2 * x)), args=(WEIGHTS, X)
    )
    assert [call.times for call in both.trace()[1]] == [2]


def test_only_what_is_differentiated_counts() -> None:
    loss = decorated()

    def evaluating(weights: Any, x: jax.Array) -> Any:
        before = loss(weights, x[:8])
        return before, jax.grad(loss)(weights, x)

    calls = Step(fn=evaluating, args=(WEIGHTS, X)).trace()[1]
    assert [call.arguments[-1].shape for call in calls] == [X.shape]
    assert Step(fn=lambda w, x: loss(w, x), args=(WEIGHTS, X)).trace()[1] == ()


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss: jax.vmap(jax.grad(loss), (None, 0)),
        lambda loss: lambda w, x: jax.vjp(lambda w: loss(w, x[0]), w)[1](1.0),
        lambda loss: (
            lambda w, x: jax.grad(lambda w: jnp.mean(jax.lax.map(lambda part: loss(w, part), x)))(w)
        ),
    ],
)
def test_other_ways_to_differentiate(transform: Callable[..., Any]) -> None:
    loss = decorated()
    parts = Array((3, 16, 64), "float32")
    calls = Step(fn=transform(loss), args=(WEIGHTS, parts)).trace()[1]
    expected = loss.program(WEIGHTS, Array((16, 64), "float32")).fingerprint()
    assert [call.program.fingerprint() for call in calls] == [expected]


def test_what_a_jit_round_the_step_donates() -> None:
    loss = decorated()
    fn = training_step(loss, ADAM)
    given = Step(fn=fn, args=(WEIGHTS, STATE, X))
    assert step.donated_by(fn, given) == ()
    assert step.donated_by(jax.jit(fn, donate_argnums=(0, 1)), given) == (0, 1)

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
    def scaled(x: jax.Array, factor: float, weights: Any) -> Any:
        return jax.tree.map(lambda w, g: w - factor * g, weights, jax.grad(loss)(weights, x))

    static = Step(fn=scaled, args=(X, 0.1, WEIGHTS), static_argnums=(1,))
    assert step.donated_by(scaled, static) == (2,)


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_resident_bytes_are_what_the_compiler_says(donated: tuple[int, ...]) -> None:
    loss = decorated()
    given = Step(fn=training_step(loss, ADAM), args=(WEIGHTS, STATE, X), donate_argnums=donated)
    found = given.measure(as_it_is, loss._identity, CPU)
    expected = found.device_bytes - found.temporary_bytes
    assert given.resident(given.trace()[0], CPU).total == pytest.approx(expected, rel=1e-3)


# --- the step as the unit of truth --------------------------------------------------------


def test_in_a_step_gradients_are_temporaries() -> None:
    loss = decorated()
    how = checkpointed_per_block(NOTHING, Signature())
    # So few rows that activations hardly count.
    rows = Array((16, 64), "float32")
    alone = Step(fn=jax.grad(loss), args=(WEIGHTS, rows)).measure(how, None, CPU)
    updated, clipped = (
        Step(
            fn=training_step(loss, ADAM, **options),
            args=(WEIGHTS, STATE, rows),
            donate_argnums=(0, 1),
        ).measure(how, None, CPU)
        for options in ({}, {"clip_norm": 1.0})
    )
    assert alone.output_bytes == pytest.approx(GRADIENT_BYTES, rel=1e-3)
    assert updated.alias_bytes > 3 * GRADIENT_BYTES
    # Adam uses up each gradient as soon as it exists; a global norm needs all of them.
    assert alone.temporary_bytes < updated.temporary_bytes
    assert clipped.temporary_bytes >= alone.temporary_bytes + 0.95 * GRADIENT_BYTES


@pytest.mark.slow
@pytest.mark.versions
def test_a_comparison_in_a_step() -> None:
    loss = decorated(budget=0.5)
    update = adam_step(loss).fn
    found = remat_opt.compare(
        *(update, WEIGHTS, STATE, X),
        donate_argnums=(0, 1),
        budgets=[0.4],
        policies=("nothing_saveable", "dots_saveable"),
        device="cpu",
    )
    rows = {row["label"]: row for row in found.rows}
    assert list(rows) == [
        *("plain", "nothing_saveable", "dots_saveable"),
        *("nothing_saveable, per block", "dots_saveable, per block", "budget 40.0 %"),
    ]
    assert [row["error"] for row in found.rows] == [None] * 6
    assert (found.step, found.function) == ("step", "plain_loss")
    assert repr(found).startswith("step with plain_loss for cpu\n")
    assert found.notes[0] == (
        "Predictions assume that each gradient is used up as soon as it is computed. If "
        "'step' needs them all at once (512 KiB), as for clipping by their norm, give "
        'gradients="together".'
    )
    plain = rows["plain"]["temporary_bytes"]
    assert plain == adam_step(plain_loss).measure(as_it_is, None, CPU).temporary_bytes
    assert rows["nothing_saveable, per block"]["temporary_bytes"] < 0.5 * plain
    assert rows["budget 40.0 %"]["temporary_bytes"] < 0.6 * plain
    assert rows["nothing_saveable"]["recomputed_flops_share"] == pytest.approx(1.0, abs=0.02)
    assert rows["nothing_saveable, per block"]["argument_bytes"] > 3 * GRADIENT_BYTES


@pytest.mark.slow
@pytest.mark.versions
def test_recomputation_is_a_share_of_all_forward_passes() -> None:
    update = adam_step(decorated(), microbatches=4, loop="scan").fn
    found = remat_opt.compare(
        *(update, WEIGHTS, STATE, X),
        donate_argnums=(0, 1),
        max_overheads=[0.0],
        policies="nothing_saveable",
        device="cpu",
    )
    shares = {row["label"]: row["recomputed_flops_share"] for row in found.rows}
    assert shares["nothing_saveable"] == pytest.approx(1.0, abs=0.02)


def test_a_plan_made_in_a_step_is_that_of_its_loss() -> None:
    loss = decorated()
    update = jax.jit(adam_step(loss).fn, donate_argnums=(0, 1))
    predicted = remat_opt.make_plan(update, WEIGHTS, STATE, X, device="cpu", budget=0.4)
    alone = remat_opt.make_plan(loss, WEIGHTS, X, device="cpu", budget=0.4)
    assert predicted.stages == alone.stages
    assert predicted.predicted == alone.predicted
    assert predicted.fingerprint == loss.program(WEIGHTS, X).fingerprint()
    assert predicted.measured is None


@pytest.mark.slow
@pytest.mark.versions
def test_a_plan_chosen_in_a_step() -> None:
    loss = decorated()
    update = jax.jit(adam_step(loss).fn, donate_argnums=(0, 1))
    plain = adam_step(loss).measure(as_it_is, None, CPU).temporary_bytes
    chosen = remat_opt.make_plan(
        *(update, WEIGHTS, STATE, X), device="cpu", budget=0.4, verify="compile"
    )
    assert chosen.measured is not None
    assert chosen.budget_bytes == round(0.4 * plain)
    assert chosen.measured.temporary_bytes <= chosen.budget_bytes
    assert chosen.measured.alias_bytes > 3 * GRADIENT_BYTES
    assert chosen.objective.budget_share == 0.4
    assert "If 'step' needs them all at once (512 KiB)" in chosen.notes[-1]
    # To run it, the loss is decorated with it: the step needs what was promised.
    followed = adam_step(remat_opt.optimal_remat(plain_loss, plan=chosen)).fn
    found = remat_opt.measure(followed, WEIGHTS, STATE, X, donate_argnums=(0, 1), device="cpu")
    assert found.temporary_bytes == chosen.measured.temporary_bytes


@pytest.mark.slow
@pytest.mark.versions
def test_a_loss_that_the_step_defines_anew_each_time() -> None:
    """As in Flax's training loops: under ``jax.jit``, around what the step has at hand."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(weights: Any, x: jax.Array) -> Any:
        @decorated
        def loss(weights: Any) -> jax.Array:
            return plain_loss(weights, x)

        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights))

    plans = [
        remat_opt.make_plan(train_step, WEIGHTS, X, device="cpu", budget=share, verify="compile")
        for share in (0.9, 0.6)
    ]
    for plan in plans:
        assert plan.measured.temporary_bytes <= plan.budget_bytes
    assert plans[1].measured.temporary_bytes < plans[0].measured.temporary_bytes


def test_a_budget_that_fits_knows_the_state_of_the_optimizer() -> None:
    loss = decorated()
    args = (adam_step(loss).fn, WEIGHTS, STATE, X)
    options: dict[str, Any] = {"budget": "fit", "device": "cpu"}
    donated = remat_opt.make_plan(*args, donate_argnums=(0, 1), **options)
    copied = remat_opt.make_plan(*args, donate_argnums=(), **options)
    reserved = remat_opt.make_plan(*args, donate_argnums=(0, 1), reserve="1GiB", **options)
    alone = remat_opt.make_plan(loss, WEIGHTS, X, **options)
    assert None not in (donated.budget_bytes, copied.budget_bytes)
    assert donated.budget_bytes - copied.budget_bytes == pytest.approx(3 * GRADIENT_BYTES, rel=0.01)
    assert donated.budget_bytes - reserved.budget_bytes == 1024**3
    assert alone.budget_bytes > donated.budget_bytes
    with pytest.raises(BudgetError, match="Nothing is left for temporaries on cpu: of its"):
        remat_opt.make_plan(*args, reserve=CPU.memory_bytes, **options)


def test_the_frontier_of_a_step_is_that_of_its_loss() -> None:
    loss = decorated()
    found = remat_opt.frontier(adam_step(loss).fn, WEIGHTS, STATE, X, device="cpu")
    expected = remat_opt.frontier(loss, WEIGHTS, X, device="cpu")
    # Beside the loss, the step holds the state.
    assert found.limit_bytes is not None
    assert found == dataclasses.replace(expected, limit_bytes=found.limit_bytes)


def test_a_loss_with_a_decorated_part_is_a_loss() -> None:
    part = decorated(lambda w, x: jnp.sum(jnp.sin(x @ w)))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return part(w, x) + jnp.sum(w)

    w, x = Array((8, 8), "float32"), Array((4, 8), "float32")
    found = remat_opt.compare(loss, w, x, budgets=[None], policies=(), device="cpu")
    assert (found.step, found.function) == ("", "loss")
    assert remat_opt.make_plan(loss, w, x, device="cpu").function == "loss"
    assert remat_opt.frontier(loss, w, x, device="cpu").function == "loss"


def test_what_is_no_step() -> None:
    message = (
        "donate_argnums=0 is for a training step, but 'plain_loss' differentiates no decorated "
        "loss. Decorate the loss that the step differentiates with optimal_remat, or, if this is "
        "the loss, leave donate_argnums out."
    )
    for door in (remat_opt.compare, remat_opt.make_plan):
        with pytest.raises(RematError) as caught:
            door(plain_loss, WEIGHTS, X, donate_argnums=0, device="cpu")
        assert str(caught.value) == message


def test_two_losses_in_a_step() -> None:
    first, second = decorated(), decorated(lambda w, x: jnp.sum(w[0][0]) * jnp.sum(x))

    def both(weights: Any, x: jax.Array) -> Any:
        return jax.grad(first)(weights, x), jax.grad(second)(weights, x)

    with pytest.raises(RematError) as caught:
        remat_opt.compare(both, WEIGHTS, X, device="cpu")
    assert str(caught.value) == (
        "The step differentiates 2 decorated losses: 'plain_loss', '<lambda>'. Leave the decorator "
        "off all but the one that is asked about."
    )


def test_options_of_a_loss_are_for_the_decorator() -> None:
    with pytest.raises(RematError) as caught:
        remat_opt.compare(adam_step(decorated()).fn, WEIGHTS, STATE, X, argnums=1, device="cpu")
    assert str(caught.value) == (
        "argnums= and has_aux= say how to differentiate a loss, but this is a step that "
        "differentiates a decorated loss. Give them to the decorator."
    )


def test_auxiliary_outputs_and_static_arguments_in_a_step() -> None:
    def loss(x: jax.Array, weights: Any, kind: str) -> Any:
        for w in weights:
            x = getattr(jnp, kind)(x @ w)
        return jnp.sum(x), x

    marked = decorated(loss, argnums=1, has_aux=True, static_argnums=2)

    def update(weights: Any, x: jax.Array, kind: str) -> Any:
        gradients, found = jax.grad(marked, argnums=1, has_aux=True)(x, weights, kind)
        return jax.tree.map(jnp.add, weights, gradients), found

    weights, x = [Array((16, 16), "float32")] * 4, Array((64, 16), "float32")
    found = remat_opt.compare(
        *(update, weights, x, "sin"),
        static_argnums=2,
        donate_argnums=0,
        budgets=[None],
        policies="nothing_saveable",
        device="cpu",
    )
    assert [row["error"] for row in found.rows] == [None] * 4


def test_values_in_a_step_are_those_of_the_plain_loss() -> None:
    signature = Signature()
    loss = decorated(budget=0.4)
    optimizer = optax.sgd(0.1)
    update = jax.jit(training_step(loss, optimizer))
    key = jax.random.key(0)
    weights = jax.tree.map(lambda one: 0.1 * jax.random.normal(key, one.shape), WEIGHTS)
    args = weights, optimizer.init(weights), jax.random.normal(key, X.shape)
    with running(as_it_is):
        expected = update(*args)
    ways = [checkpointed(NOTHING, signature), checkpointed_per_block(NOTHING, signature)]
    results = [update(*args)]
    for how in ways:
        with running(how):
            results.append(update(*args))
    for result in results:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), result, expected)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.versions
@needs_libtpu
def test_a_step_for_a_tpu() -> None:
    # Too large for vector memory.
    weights = [(Array((256, 1024), "float32"), Array((1024, 256), "float32"))] * 4
    x = Array((16384, 256), "float32")
    loss = remat_opt.optimal_remat(plain_loss, device="v5e")
    optimizer = optax.sgd(1e-3)
    whole = Step(
        fn=training_step(loss, optimizer),
        args=(weights, jax.eval_shape(optimizer.init, weights), x),
        donate_argnums=(0, 1),
    )
    v5e = get_device("v5e")
    plain = whole.measure(as_it_is, loss._identity, v5e)
    per_block = whole.measure(checkpointed_per_block(NOTHING, Signature()), loss._identity, v5e)
    assert per_block.temporary_bytes < 0.3 * plain.temporary_bytes
    assert plain.alias_bytes >= 4 * 2 * 256 * 1024 * 4
