"""Compiler options: those of a ``jax.jit`` around a step, and those of a device."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remat_opt
from remat_opt import _jax_internals as internals
from remat_opt.compilers.rules import IN_ORDER
from remat_opt.device import CompilerOption, get_device
from remat_opt.errors import CompileError
from remat_opt.measurement import compilation
from remat_opt.training import training_step
from tests.devices import needs_libtpu
from tests.programs import ones

#: A schedule that takes another amount of memory than the usual one on a CPU.
OTHER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
#: What is needed on a CPU in any case, by JAX.
NEEDED = compilation.compiler_options(get_device("cpu"))
WEIGHTS, X = [ones(64, 64)] * 6, ones(256, 64)


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Six layers, each of which reads the input as well."""
    h = x
    for w in weights:
        h = jnp.tanh(h @ w) + jnp.sin(x)
    return jnp.sum(h**2)


def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    gradients = jax.grad(decorated)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


decorated = remat_opt.optimal_remat(loss, device="cpu")


def by_hand(fn: Callable[..., Any], options: Mapping[str, CompilerOption]) -> int:
    """What JAX itself says that a function takes when compiled with some options."""
    with jax.default_device(jax.devices("cpu")[0]):
        jitted = jax.jit(fn, compiler_options=dict(options) or None)
        analysis = jitted.lower(WEIGHTS, X).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def test_a_function_is_measured_with_the_options_of_its_jit() -> None:
    gradient = jax.grad(decorated)
    found = remat_opt.measure(jax.jit(gradient, compiler_options=OTHER), WEIGHTS, X, device="cpu")
    assert found.temporary_bytes == by_hand(gradient, {**OTHER, **NEEDED})
    assert found.temporary_bytes != by_hand(gradient, NEEDED)
    assert f"xla_cpu_scheduler_type={OTHER['xla_cpu_scheduler_type']}" in " ".join(found.notes)


def test_and_with_those_of_a_device() -> None:
    told = get_device("cpu").told(OTHER)
    found = remat_opt.measure(jax.grad(loss), WEIGHTS, X, device=told)
    assert found.temporary_bytes == by_hand(jax.grad(loss), {**OTHER, **NEEDED})


def test_one_that_the_compiler_does_not_have_is_an_error() -> None:
    jitted = jax.jit(loss, compiler_options={"xla_no_such_option": "1"})
    with pytest.raises(CompileError, match="xla_no_such_option"):
        remat_opt.measure(jitted, WEIGHTS, X, device="cpu")


def test_a_plan_is_verified_with_them() -> None:
    """JAX cannot trace a jit with options inside another, as planning would."""
    jitted = jax.jit(step, donate_argnums=0, compiler_options=OTHER)
    plan = remat_opt.make_plan(jitted, WEIGHTS, X, device="cpu", verify=True)
    usual = remat_opt.make_plan(step, WEIGHTS, X, donate_argnums=0, device="cpu", verify=True)
    assert plan.measured is not None
    assert usual.measured is not None
    assert plan.stages == usual.stages
    assert plan.measured.alias_bytes == usual.measured.alias_bytes
    assert plan.measured.temporary_bytes != usual.measured.temporary_bytes
    rows = remat_opt.compare(jitted, WEIGHTS, X, policies=(), budgets=[None], device="cpu").rows
    assert rows[-1]["temporary_bytes"] == plan.measured.temporary_bytes


def test_what_was_learnt_with_them_is_not_taken_for_others(tmp_path: Any) -> None:
    file = tmp_path / "learnt.json"
    for options in (None, OTHER):
        jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
        plan = remat_opt.make_plan(
            jitted, WEIGHTS, X, device="cpu", verify="compile", learnt=file, budget=0.9
        )
        fresh = remat_opt.make_plan(jitted, WEIGHTS, X, device="cpu", verify="compile", budget=0.9)
        assert plan.measured is not None
        assert fresh.measured is not None
        assert plan.measured.temporary_bytes == fresh.measured.temporary_bytes


def test_a_decorated_loss_may_be_under_such_a_jit() -> None:
    jitted: Any = jax.jit(loss, compiler_options=NEEDED or {"xla_dump_to": ""})
    ours = remat_opt.optimal_remat(jitted, device="cpu")
    for found, expected in zip(jax.grad(ours)(WEIGHTS, X), jax.grad(loss)(WEIGHTS, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_everything_else_that_the_jit_says_stays() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with_options = jax.jit(
        lambda x, times: x * times,
        static_argnums=1,
        donate_argnums=0,
        in_shardings=(rows,),
        out_shardings=rows,
        compiler_options=OTHER,
    )
    found: Any = internals.without_compiler_options(with_options)
    assert not internals.compiler_options_of(found)
    traced, expected = (fn.trace(jnp.ones(4), 2) for fn in (found, with_options))
    assert str(traced.jaxpr) == str(expected.jaxpr)
    assert traced.args_info == expected.args_info
    lowered = (one.lower().as_text() for one in (traced, expected))
    assert len(set(lowered)) == 1


def test_static_names_stay() -> None:
    @functools.partial(jax.jit, static_argnames="by", compiler_options=OTHER)
    def fn(x: jax.Array, by: int = 1) -> jax.Array:
        return x + by if by else x

    found: Any = internals.without_compiler_options(fn)
    assert found(jnp.ones(2), by=2).tolist() == [3, 3]
    assert found.__name__ == "fn"


def test_a_function_without_any_is_itself() -> None:
    for fn in (loss, jax.jit(loss), decorated):
        assert internals.without_compiler_options(fn) is fn
        assert internals.compiler_options_of(fn) == {}


def test_a_device_that_is_told_something_is_another() -> None:
    device = get_device("v5e")
    told = device.told({"a": True}).told({"b": "1"})
    assert dict(told.compiler_options) == {"a": True, "b": "1"}
    assert told != device
    assert pickle.loads(pickle.dumps(told)) == copy.deepcopy(told) == told
    assert not device.compiler_options


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
def test_in_order_a_plan_takes_what_it_promises_where_updates_are_put_off() -> None:
    """Gated layers with as many rows as two thirds of what would be enough."""

    def gated(weights: list[tuple[jax.Array, ...]], x: jax.Array) -> jax.Array:
        for gate, up, down in weights:
            y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
        return jnp.mean(x * x)

    wide, narrow = (jax.ShapeDtypeStruct(s, "float32") for s in ((2048, 4096), (4096, 2048)))
    params, x = [(wide, wide, narrow)] * 4, jax.ShapeDtypeStruct((4096, 2048), "float32")
    ours, adam = remat_opt.optimal_remat(gated, device="v5e"), optax.adam(1e-3)
    taken = {}
    for name, options in (("usual", None), ("in order", dict(IN_ORDER))):
        jitted = jax.jit(training_step(ours, adam), donate_argnums=(0, 1), compiler_options=options)
        state = jax.eval_shape(adam.init, params)
        plan = remat_opt.make_plan(jitted, params, state, x, device="v5e", verify=True)
        assert plan.measured is not None
        assert ("xla_memory_scheduler" in " ".join(plan.notes)) is (options is None)
        taken[name] = plan.measured.temporary_bytes
        predicted_bytes = plan.predicted.temporary_bytes
    assert taken["in order"] <= 1.05 * predicted_bytes
    assert taken["usual"] >= 1.5 * taken["in order"]
