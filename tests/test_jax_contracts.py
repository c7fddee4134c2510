"""What this package assumes about JAX, one test for each assumption.

When a new version of JAX breaks one of these, the place to fix it is ``_jax_internals``, or the
file that the test names. Without these tests, such a change would show as a wrong plan.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jax_core

from remat_opt import _jax_checkpoints, _jax_meshes
from remat_opt import _jax_internals as internals
from remat_opt.measurement import compilation
from remat_opt.program import tracing
from tests.programs import ones

pytestmark = pytest.mark.usefixtures("quick_search")

X5 = ones(5)
KEEP_NAMED = jax.checkpoint_policies.save_only_these_names


def residuals_of(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return jax.tree.leaves(jax.vjp(fn, *args)[1])


def shapes_of(values: Sequence[Any]) -> list[tuple[int, ...]]:
    return sorted(value.shape for value in values)


# --- linearization ------------------------------------------------------------------------


def test_residuals_are_the_leaves_of_the_pullback() -> None:
    x = jnp.arange(3.0)
    residuals = residuals_of(jnp.tanh, x)
    assert residuals
    assert all(residual.shape == (3,) for residual in residuals)
    assert residuals_of(lambda a: a + 1.0, x) == []
    assert len(residuals_of(lambda a, b: a * b, x, x + 1)) == 2


def test_traced_residuals_can_be_followed_back_through_the_jaxpr() -> None:
    def run(x):
        outputs, pullback = jax.vjp(jnp.exp, x)
        return outputs, jax.tree.leaves(pullback)

    closed, _ = internals.make_jaxpr(run, jnp.ones(3))
    _, _, inputs, equations, outputs = internals.parts(closed)
    result, residual = outputs
    assert residual is result
    assert [equation.primitive.name for equation in equations] == ["exp"]
    assert equations[0].invars == inputs


def test_a_pullback_of_an_inactive_output_does_not_use_its_cotangent() -> None:
    def run(x, cotangent):
        return jax.vjp(jnp.floor, x)[1](cotangent)

    closed, _ = internals.make_jaxpr(run, jnp.ones(3), jnp.ones(3))
    _, _, inputs, equations, outputs = internals.parts(closed)
    assert outputs != [inputs[1]]
    assert all(inputs[1] not in equation.invars for equation in equations)


def test_abstract_values_stand_in_for_arguments() -> None:
    weak = jax.typeof(jnp.asarray(2.0))
    closed, shape = internals.make_jaxpr(lambda a: a * 2, weak)
    assert internals.parts(closed)[2][0].aval == weak
    assert shape.weak_type
    assert internals.cotangent_type(jax.typeof(jnp.ones(3))).shape == (3,)


# --- transform ----------------------------------------------------------------------------


@pytest.mark.parametrize("remat3", [False, True])
def test_a_names_policy_keeps_exactly_the_named(remat3: bool) -> None:
    if remat3 and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has no jax_remat3")
    before = getattr(jax.config, "jax_remat3", None)

    def region(x, w):
        y = checkpoint_name(jnp.log(x), "kept")
        z = checkpoint_name(jnp.exp(y @ w), "not kept")
        return jnp.sum(jnp.cos(z))

    x, w = jnp.ones((2, 3)), jnp.ones((3, 5))
    try:
        if before is not None:
            jax.config.update("jax_remat3", remat3)
        checkpointed = jax.checkpoint(region, policy=KEEP_NAMED("kept"))
        text = str(jax.make_jaxpr(jax.grad(checkpointed))(x, w))
    finally:
        if before is not None:
            jax.config.update("jax_remat3", before)
    assert len(re.findall(r"= exp ", text)) == 2
    # What is kept is not run again.
    assert len(re.findall(r"= log ", text)) == 1


def test_only_readers_of_the_named_value_profit_from_its_name() -> None:
    def region(x, *, rerouted):
        y = jnp.sin(x)
        named = checkpoint_name(y, "kept")
        return jnp.sum(jnp.sin(named if rerouted else y))

    def recomputed_sines(rerouted: bool) -> int:
        fn = functools.partial(region, rerouted=rerouted)
        gradient = jax.grad(jax.checkpoint(fn, policy=KEEP_NAMED("kept")))
        return str(jax.make_jaxpr(gradient)(jnp.ones(3))).count("= sin ")

    assert recomputed_sines(False) > recomputed_sines(True)


def test_complex_values_cannot_be_kept_by_name_themselves() -> None:
    # transform._named works around this by naming their parts. When this test fails because JAX can
    # do it, remove that detour.
    def region(x):
        return jnp.sum(jnp.abs(jnp.exp(checkpoint_name(jnp.exp(1j * x), "kept"))))

    with pytest.raises(TypeError, match="reduce_precision"):
        jax.grad(jax.checkpoint(region, policy=KEEP_NAMED("kept")))(jnp.ones(3))


def test_a_chain_of_checkpoints_needs_less_memory_and_one_round_the_whole_does_not() -> None:
    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w) + x
        return x

    def plain(weights, x):
        return jnp.sum(layers(weights, x) ** 2)

    def chain(weights, x):
        for start in range(0, 16, 4):
            x = jax.checkpoint(layers)(weights[start : start + 4], x)
        return jnp.sum(x**2)

    weights, x = [jnp.ones((16, 16))] * 16, jnp.ones((4096, 16))

    def temporary_bytes(fn: Callable[..., Any]) -> int:
        return compilation.measure(jax.grad(fn), weights, x, device="cpu").temporary_bytes

    plain_bytes = temporary_bytes(plain)
    assert temporary_bytes(jax.checkpoint(plain)) > 0.9 * plain_bytes
    assert temporary_bytes(chain) < 0.6 * plain_bytes


# --- _jax_internals -----------------------------------------------------------------------


def equations_of(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return internals.parts(internals.make_jaxpr(fn, *args)[0])[3]


def custom_rules() -> tuple[Callable[..., Any], Callable[..., Any]]:
    @jax.custom_vjp
    def reverse(x):
        return jnp.sin(x)

    reverse.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))

    @jax.custom_jvp
    def forward(x):
        return jnp.sin(x)

    forward.defjvp(lambda p, t: (forward(*p), 3.0 * t[0]))
    return reverse, forward


@pytest.mark.parametrize(
    ("fn", "primitive"),
    [
        (jnp.sin, "sin"),
        (lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x)[1], "scan"),
        (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), "cond"),
        (lambda x: lax.fori_loop(0, x.shape[0], lambda i, y: y * 2.0, x), "scan"),
        (lambda x: lax.while_loop(lambda y: y[0] < 9, lambda y: y * 2.0, x), "while"),
        (custom_rules()[0], "custom_vjp_call"),
        (custom_rules()[1], "custom_jvp_call"),
        (jax.checkpoint(jnp.sin), ("remat", "checkpoint")),
        (lambda x: lax.sort((x, x), num_keys=1)[1], "sort"),
    ],
)
def test_any_equation_can_be_bound_again(
    fn: Callable[..., Any], primitive: str | tuple[str, ...]
) -> None:
    x = jnp.arange(1.0, 4.0)
    found = [e for e in equations_of(fn, x) if e.primitive.name.startswith(primitive)]
    assert found, [e.primitive.name for e in equations_of(fn, x)]
    program = tracing.trace(fn, x)

    def again(x):
        values: dict[Any, Any] = dict(zip(program.arguments, [x], strict=True))
        for equation in program.equations:
            inputs = [values[a] if isinstance(a, int) else a.value for a in equation.inputs]
            results = internals.bind(equation.jax_equation, equation.name_stack, inputs)
            values.update(zip(equation.outputs, results, strict=True))
        return values[program.outputs[0]]

    np.testing.assert_array_equal(again(x), fn(x))
    if primitive != "while":
        np.testing.assert_array_equal(
            jax.grad(lambda x: jnp.sum(again(x)))(x), jax.grad(lambda x: jnp.sum(fn(x)))(x)
        )


def test_scalar_constants_can_be_kept_apart() -> None:
    x = jnp.linspace(-2.0, 2.0, 6)
    (equation,) = equations_of(jax.nn.relu, x)
    assert equation.primitive.name == "custom_jvp_call"

    def apart(x):
        (result,) = internals.bind_apart(equation, equation.source_info.name_stack, [x])
        return result

    assert "optimization_barrier" in str(jax.make_jaxpr(apart)(x))
    np.testing.assert_array_equal(apart(x), jax.nn.relu(x))
    for order in (1, 2):
        found, expected = apart, jax.nn.relu
        for _ in range(order):
            found = jax.grad(lambda x, f=found: jnp.sum(jnp.sin(f(x))))
            expected = jax.grad(lambda x, f=expected: jnp.sum(jnp.sin(f(x))))
        np.testing.assert_array_equal(found(x), expected(x))
    matrix = jnp.stack([x, -x])
    np.testing.assert_array_equal(jax.vmap(apart)(matrix), jax.nn.relu(matrix))
    np.testing.assert_array_equal(
        jax.jit(jax.jvp, static_argnums=0)(apart, (x,), (x,)), jax.jvp(jax.nn.relu, (x,), (x,))
    )


def test_calls_that_only_group_equations_are_recognised() -> None:
    (equation,) = equations_of(jax.jit(lambda x: jnp.sin(x) + 1), jnp.ones(3))
    body = internals.inlinable_body(equation)
    assert [e.primitive.name for e in internals.parts(body)[3]] == ["sin", "add"]
    (plain,) = equations_of(jnp.sin, jnp.ones(3))
    assert internals.inlinable_body(plain) is None


def test_a_jit_with_prescribed_shardings_is_not_inlined() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (equation,) = equations_of(jax.jit(jnp.sin, out_shardings=sharding), jnp.ones(3))
    assert internals.inlinable_body(equation) is None


def test_constants_come_with_the_closed_jaxpr() -> None:
    table = np.arange(3.0)
    constant_variables, constants, *_ = internals.parts(
        internals.make_jaxpr(lambda x: x * table, jnp.ones(3))[0]
    )
    assert len(constant_variables) == len(constants) == 1
    np.testing.assert_array_equal(constants[0], table)


def test_inner_jaxprs_are_found() -> None:
    (scan,) = equations_of(lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x), jnp.ones(5))
    assert len(list(internals.inner_jaxprs(scan.params))) == 1
    assert internals.scan_length(scan.params) == 5
    *_, cond = equations_of(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), jnp.ones(3))
    assert len(list(internals.inner_jaxprs(cond.params))) == 2


def test_a_scan_says_what_is_carried() -> None:
    def fn(w, x, k):
        def body(carry, entry):
            h, count = carry
            return (jnp.tanh(h @ entry) + k, count + 1), (jnp.sum(h), h, count)

        return lax.scan(body, (x, 0), w, reverse=True, unroll=2)

    (scan,) = equations_of(fn, jnp.ones((4, 3, 3)), jnp.ones((2, 3)), jnp.ones(3))
    found = internals.scan_of(scan)
    assert (found.constants, found.carries, found.length) == (1, 2, 4)
    assert found.reverse
    assert found.unroll == 2
    _, _, inputs, _, outputs = internals.parts(found.body)
    assert [v.aval.shape for v in inputs] == [(3,), (2, 3), (), (3, 3)]
    assert len(outputs) == 2 + 3
    assert [v.aval.shape for v in scan.invars] == [(3,), (2, 3), (), (4, 3, 3)]
    (whole,) = equations_of(lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x, unroll=True), X5)
    assert internals.scan_of(whole).unroll == 5


def test_what_a_scan_only_hands_on_is_no_carry_unless_it_is_copied() -> None:
    """``transform.loops`` copies tangents so that their transposes are added in place."""

    def carried(hand_on):
        def body(carry, _):
            h, same = carry
            return (h * same, hand_on(same)), None

        (scan,) = [
            e
            for e in equations_of(lambda x: lax.scan(body, (x, x), None, length=3)[0], jnp.ones(2))
            if e.primitive.name == "scan"
        ]
        return internals.scan_of(scan).carries

    assert carried(lambda same: same) == 1
    assert carried(jnp.copy) == 2


def test_symbolic_zeros_are_made_arrays_of_the_tangent_type() -> None:
    seen = []

    @jax.custom_jvp
    def both(x, n):
        return x

    def rule(primals, tangents):
        seen.extend(internals.instantiated(t, p) for t, p in zip(tangents, primals, strict=True))
        return primals[0], seen[0]

    both.defjvp(rule, symbolic_zeros=True)
    jax.jvp(lambda x: both(x, jnp.ones(3)), (jnp.ones(2),), (jnp.full(2, 5.0),))
    assert seen[0].shape == (2,)
    np.testing.assert_array_equal(seen[1], jnp.zeros(3))


def test_effects_are_said_by_the_equation() -> None:
    def fn(x):
        jax.debug.print("{}", x)
        return jnp.sin(x)

    assert sorted(internals.has_effects(e) for e in equations_of(fn, 1.0)) == [False, True]


@pytest.mark.parametrize(
    ("test", "step", "first", "turns"),
    [
        (lambda n: n < 5, lambda n: n + 1, 0, 5),
        (lambda n: n < 5, lambda n: 2 + n, 0, 3),
        (lambda n: n <= 4, lambda n: n + 2, 0, 3),
        (lambda n: n > 0, lambda n: n - 3, 10, 4),
        (lambda n: n >= 0, lambda n: n - 5, 10, 3),
        (lambda n: lax.gt(9, n), lambda n: n + 1, 2, 7),
        (lambda n: n < 5, lambda n: n + 1, 8, 0),
        # Not constants, or no end.
        (lambda n: n < 5, lambda n: n * 2, 1, None),
        (lambda n: n < 5, lambda n: n - 1, 0, None),
        (lambda n: n != 5, lambda n: n + 1, 0, None),
        (lambda n: (n < 5) & (n >= 0), lambda n: n + 1, 0, None),
        (lambda n: n < 0.5, lambda n: n + 0.25, 0.0, None),
    ],
)
def test_how_often_a_loop_runs(test: Any, step: Any, first: Any, turns: int | None) -> None:
    def counted(x: Any) -> Any:
        def turn(state: Any) -> Any:
            return state[0], step(state[1]), state[2] + 1

        return lax.while_loop(lambda state: test(state[1]), turn, (x, first, 0))

    (loop,) = equations_of(counted, 1.0)
    assert internals.while_turns(loop) == turns
    if turns is not None:
        assert counted(1.0)[2] == turns


def test_how_often_a_loop_over_a_range_runs() -> None:
    def over(low: Any, high: Any) -> Any:
        return lax.fori_loop(low, high, lambda n, x: x * n, 1)

    found = [
        internals.while_turns(next(e for e in equations if e.primitive.name == "while"))
        for equations in (
            equations_of(lambda n: over(n, 5), 2),
            equations_of(lambda n: over(0, n), 2),
            equations_of(lambda n: n + lax.while_loop(lambda c: c < 7, lambda c: c + 1, 2), 2),
        )
    ]
    assert found == [None, None, 5]


def test_mutable_arrays_are_told_by_their_kind() -> None:
    def fn(x):
        made = jax.new_ref(x)
        return made[...] * x

    made, *others = [v for e in equations_of(fn, jnp.float32(1)) for v in e.outvars]
    assert internals.is_mutable(made)
    assert not any(map(internals.is_mutable, others))


def test_calls_back_to_python_are_found_in_inner_programs_too() -> None:
    def called(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x)

    def scanned(x):
        return lax.scan(lambda c, _: (called(c), None), x, None, length=2)[0]

    for fn, expected in ((called, True), (scanned, True), (jnp.sin, False)):
        found = [internals.calls_back(e) for e in equations_of(fn, jnp.float32(1))]
        assert any(found) is expected
    # JAX considers it pure.
    assert not any(internals.has_effects(e) for e in equations_of(called, jnp.float32(1)))


def test_a_checkpoint_says_what_is_under_it_and_by_which_policy() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    (equation,) = equations_of(jax.checkpoint(jnp.sin, policy=policy), 1.0)
    found = internals.checkpoint_of(equation)
    assert found is not None
    assert found.policy is policy
    assert [e.primitive.name for e in internals.parts(found.body)[3]] == ["sin"]
    (equation,) = equations_of(jnp.sin, 1.0)
    assert internals.checkpoint_of(equation) is None


def test_a_cond_has_branches_of_all_its_inputs_but_the_first() -> None:
    def fn(x):
        return lax.cond(x > 0, jnp.sin, lambda a: a * x, x)

    equation = next(e for e in equations_of(fn, 1.0) if e.primitive.name == "cond")
    branches = internals.branches_of(equation)
    assert len(branches) == 2
    assert all(len(internals.parts(b)[2]) == len(equation.invars) - 1 for b in branches)


def test_checkpoints_are_dissolved_in_inner_programs() -> None:
    body = jax.checkpoint(lambda a: jnp.sin(a) * 2)

    def fn(x):
        def step(c, _):
            return lax.cond(c > 0, lambda a: body(body(a)), jnp.cos, c), body(c)

        return lax.scan(step, x, None, length=2)

    (equation,) = [e for e in equations_of(fn, 1.0) if e.primitive.name == "scan"]
    dissolved = internals.without_checkpoints(equation)
    assert "sin" in str(dissolved)
    assert "checkpoint" not in str(dissolved)
    closed, _ = internals.make_jaxpr(
        lambda x: internals.bind(dissolved, equation.source_info.name_stack, [x]), 1.0
    )
    internals.check(closed)
    again = internals.without_checkpoints(dissolved)
    assert again is dissolved


def test_name_stack_and_source_line() -> None:
    @jax.jit
    def inner(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    def fn(x):
        with jax.named_scope("outside"):
            return inner(x)

    (equation,) = tracing.trace(fn, 1.0).equations
    assert equation.module == "outside/inside"
    line = internals.source_line(equation.jax_equation)
    assert line.startswith("test_jax_contracts.py:")
    assert line.endswith("inner)")

    def again(x):
        return internals.bind(equation.jax_equation, equation.name_stack, [x])[0]

    (bound,) = equations_of(again, 1.0)
    assert str(internals.name_stack_of(bound)) == "outside/inside"
    assert internals.source_line(bound) == line


def test_functions_of_jax_s_have_no_line_of_their_own() -> None:
    def fn(x):
        return jnp.clip(x, 0.0, 1.0)

    equations = tracing.trace(fn, jnp.ones(3)).equations
    inside = [one for one in equations if one.calls]
    assert inside, "jnp.clip is a function under jit"
    for one in inside:
        assert internals.source_line(one.jax_equation) == ""
        assert internals.source_line(one.jax_equation, one.calls).endswith(".fn)")
    (call,) = inside[-1].calls
    assert call.params["name"] == "clip"
    assert internals.results_of_call(call, inside[-1].jax_equation.outvars) == call.outvars
    assert internals.results_of_call(call, inside[0].jax_equation.outvars) == []


def test_a_rule_of_a_function_tells_its_name() -> None:
    (relu,) = tracing.trace(jax.nn.relu, jnp.ones(3)).equations
    assert internals.custom_name(relu.jax_equation) == "relu"
    (plain,) = tracing.trace(jnp.sin, 1.0).equations
    assert internals.custom_name(plain.jax_equation) == ""


def test_settings_in_force_where_an_equation_was_traced_are_kept() -> None:
    def fn(x):
        with jax.default_matmul_precision("highest"):
            return x @ x

    (equation,) = tracing.trace(fn, jnp.ones((2, 2))).equations
    (bound,) = equations_of(
        lambda x: internals.bind(equation.jax_equation, equation.name_stack, [x, x])[0],
        jnp.ones((2, 2)),
    )
    assert bound.params["precision"] == equation.jax_equation.params["precision"] is not None


def test_literals_become_arrays_of_their_type() -> None:
    closed, _ = internals.make_jaxpr(lambda: (3, 2.5, np.float16(1), jnp.zeros((), jnp.int8), True))
    outputs = internals.parts(closed)[4]
    for literal in outputs:
        found = internals.array_of(literal.val, literal.aval)
        assert isinstance(found, jax.Array)
        assert jax.typeof(found) == literal.aval


def test_dead_code_is_left_out_of_inner_programs_too() -> None:
    def fn(x):
        def step(c, _):
            return jnp.sin(c), jnp.exp(c)

        jnp.cos(x)
        return lax.scan(step, x, None, length=3)[0]

    closed, _ = internals.make_jaxpr(fn, 1.0)
    assert "exp" in str(closed)
    assert "cos" in str(closed)
    live = str(internals.without_dead_code(closed))
    assert "exp" not in live
    assert "cos" not in live
    assert "sin" in live


def test_a_linear_function_can_have_a_transpose_of_its_own() -> None:
    """Under ``vmap``, and differentiated along what it is not linear in, it is what it computes."""

    def scaled(x: Any, scale: Any) -> Any:
        return internals.call_linear(
            lambda given, tangents: [given[0] * tangents[0]],
            lambda given, cotangents: [3 * given[0] * cotangents[0]],
            [scale],
            [x],
            [x],
        )[0]

    @jax.custom_jvp
    def f(x: jax.Array) -> jax.Array:
        return 2 * x

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return f(*primals), scaled(tangents[0], jnp.full((), 2.0))

    x = jnp.float32(5.0)
    assert jax.jvp(f, (x,), (x,))[1] == 10
    assert jax.jit(jax.grad(f))(x) == 6
    many = jnp.arange(3.0)
    assert jax.vmap(jax.grad(f))(many).tolist() == [6] * 3
    assert jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(many).tolist() == [2] * 3
    both = jax.jvp(lambda x: scaled(x, x**2), (x,), (jnp.float32(1.0),))
    assert both == (125, 75)


def test_an_array_can_be_laid_out_otherwise_and_differentiated() -> None:
    x = ones(3, 4)
    assert internals.laid_out(x, 1) is x
    closed = jax.make_jaxpr(lambda x: internals.laid_out(x, 0))(x)
    assert "layout_constraint" in str(closed)
    assert "(1, 0)" in str(closed)
    assert "layout_constraint" not in str(jax.make_jaxpr(lambda x: internals.laid_out(x, 0))(x[0]))
    found = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(internals.laid_out(x, 1)))))(x)
    assert jnp.allclose(found, jnp.cos(x))


def test_an_array_of_any_content_is_the_same_for_all_of_a_vmap() -> None:
    def put(x: jax.Array, *, shared: bool) -> tuple[jax.Array, jax.Array]:
        return internals.empty((3,), jnp.float32, after=jnp.ones(2), shared=shared), x

    for shared in (False, True):
        of_each = functools.partial(put, shared=shared)
        kept, _ = jax.vmap(of_each, out_axes=(None, 0))(ones(2))
        assert kept.shape == (3,)


def test_an_ill_formed_jaxpr_is_refused() -> None:
    closed, _ = internals.make_jaxpr(lambda x: jnp.sin(x) * 2, jnp.ones(3))
    internals.check(closed)
    jaxpr = getattr(closed, "jaxpr", closed)
    broken = jaxpr.replace(eqns=list(jaxpr.eqns)[::-1])
    with pytest.raises(
        jax_core.JaxprTypeError if hasattr(jax_core, "JaxprTypeError") else Exception
    ):
        internals.check(broken)


FINGERPRINT = """
    import jax, jax.numpy as jnp
    from jax import lax
    from remat_opt.program import tracing

    @jax.custom_jvp
    def f(x): return jnp.sin(x)
    f.defjvp(lambda p, t: (f(*p), t[0]))

    def loss(params, x):
        for name in ("a", "b"):
            x = jax.nn.relu(f(x @ params[name]))
        x, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack(list(params.values())))
        x = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names("q"))(x)
        x = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        x = x + jax.random.normal(jax.random.key(0), x.shape)
        x = lax.conv_general_dilated(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME")[0, 0]
        return jnp.sum(lax.sort(x) * jnp.cumsum(x, axis=0))

    params = {"a": jnp.ones((3, 3)), "b": jnp.ones((3, 3))}
    print(tracing.trace(loss, params, jnp.ones((2, 3))).fingerprint())
"""


@pytest.mark.slow
@pytest.mark.versions
def test_fingerprint_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    script = textwrap.dedent(FINGERPRINT)
    exec(script, {})
    here = capsys.readouterr().out
    assert len(here.strip()) == 64
    there = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        # Not the seed that may be set here.
        env=os.environ | {"PYTHONHASHSEED": "31337"},
    )
    assert there.stdout == here


def test_axes_round_equations() -> None:
    seen = []

    def body(x: jax.Array, of_others: bool) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sin(lax.pmean(x, "i") if of_others else x)

        seen.append(internals.surrounding_axes(internals.parts(jax.make_jaxpr(loss)(x))[3]))
        return x

    for of_others in (True, False):
        fn = functools.partial(body, of_others=of_others)
        jax.vmap(fn, axis_name="i")(jnp.ones(3))
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("i")
        jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.ones(3))
    # Under vmap only named axes count; a shard_map's types also mention its axes.
    assert seen == [("i",), ("i",), (), ("i",)]
    assert internals.surrounding_axes(()) == ()


def test_a_slice_in_a_checkpoint_knows_its_mesh_only_where_it_was_taken_in_one() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.ones((4, 3)), jax.sharding.NamedSharding(mesh, jax.P()))

    def loss(x: jax.Array) -> jax.Array:
        def step(total: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
            with _jax_meshes.explicit_mesh_of(x):
                entry = lax.dynamic_index_in_dim(x, place, keepdims=False)
            return total + jnp.sin(entry), None

        total, _ = lax.scan(jax.checkpoint(step), jnp.sin(x[0]), np.arange(4))
        return jnp.sum(total)

    assert jax.jit(jax.grad(loss))(x).shape == x.shape
    assert jax.grad(loss)(jnp.ones((4, 3))).shape == x.shape


def test_what_values_tell_of_a_mesh() -> None:
    auto, explicit = (
        jax.make_mesh((4, 2), ("data", "model"), axis_types=(one,) * 2)
        for one in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    )
    spec = jax.sharding.PartitionSpec(("data", "model"), None)
    seen: list[tuple[Any, Any]] = []

    def note(x: jax.Array) -> jax.Array:
        mesh = _jax_meshes.mesh_of(x)
        seen.append((mesh and tuple(mesh.shape.items()), _jax_meshes.split_of(x)))
        return jnp.zeros(()) if isinstance(x, jax.ShapeDtypeStruct) else jnp.sum(x)

    axes, split = (("data", 4), ("model", 2)), (("data", "model"), ())
    for mesh in (auto, explicit):
        with jax.set_mesh(mesh):
            sharding = jax.sharding.NamedSharding(mesh, spec)
            x = jax.device_put(jnp.ones((8, 3)), sharding)
            note(x)
            note(jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding))
            jax.grad(note)(x)
            jax.jit(jax.grad(note))(x)
            # Inside a shard_map, an array is one device's part.
            mapped = jax.shard_map(
                lambda x: note(x)[None], mesh=mesh, in_specs=spec, out_specs=jax.P(spec[0])
            )
            jax.eval_shape(mapped, x)
    note(jnp.ones(3))
    on_mesh, under_jit, unknown = (axes, split), (axes, None), (None, None)
    found = [(mesh, None if mesh is None else of_axes) for mesh, of_axes in seen]
    assert found == [*[on_mesh] * 3, under_jit, unknown, *[on_mesh] * 4, unknown, unknown]


def test_a_shard_map_says_what_it_maps_and_its_body_can_be_traced() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.sharding.PartitionSpec("data")
    for axes, check_vma in (({"data", "model"}, True), ({"data"}, True), (set(), False)):
        mapped = jax.shard_map(
            lambda x: lax.psum(jnp.sin(x), "data"),
            mesh=mesh,
            in_specs=rows,
            out_specs=jax.sharding.PartitionSpec(),
            axis_names=axes,
            check_vma=check_vma,
        )
        (equation,) = internals.parts(jax.make_jaxpr(mapped)(jnp.ones((8, 3))))[3]
        said = _jax_meshes.map_of(equation)
        assert said.axes == (axes or {"data", "model"})
        assert said.over_all_axes == (axes != {"data"})
        assert said.check_vma == check_vma
        assert said.in_specs == (rows,)
        assert said.out_specs == (jax.sharding.PartitionSpec(),)
        *_, summing = internals.parts(said.body)[3]
        (given,) = summing.invars

        def trace(one: Any = summing, kind: Any = given.aval) -> Any:
            return internals.make_jaxpr(
                lambda x: internals.bind(one, internals.name_stack_of(one), [x]), kind
            )[0]

        (again,) = internals.parts(_jax_meshes.within_map(equation, trace))[3]
        assert again.primitive is summing.primitive
        assert again.invars[0].aval.shape == (2, 3)
        with pytest.raises(NameError):
            trace()


def test_collectives_are_told_from_side_effects() -> None:
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def body(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        x, _ = lax.scan(lambda x, _: (lax.psum(x, "i") * x, None), x, length=2)
        return jnp.sin(x)

    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (mapped,) = internals.parts(jax.make_jaxpr(run)(jnp.ones(8)))[3]
    # JAX notes it itself.
    assert internals.noting_collectives(mapped) is mapped
    for equation, again in (
        (mapped, False),
        (internals.noting_collectives(mapped, again=True), True),
    ):
        printing, scan, sine = internals.parts(_jax_meshes.map_of(equation).body)[3]
        assert internals.has_effects(printing)
        assert internals.has_side_effects(printing)
        assert internals.has_effects(scan) is not again
        assert not internals.has_side_effects(scan)
        assert not internals.has_effects(sine)
        inner = internals.parts(internals.scan_of(scan).body)[3]
        assert any(map(internals.has_effects, inner)) is not again
        # It can still run, and says which axes it needs.
        assert internals.surrounding_axes(inner) == ("i",)

        def bound(x: jax.Array, one: Any = equation) -> Any:
            return internals.bind(one, internals.name_stack_of(one), [x])

        np.testing.assert_allclose(jax.jit(bound)(jnp.ones(8))[0], jax.jit(run)(jnp.ones(8)))


def test_collectives_are_noted_where_jax_leaves_it_out() -> None:
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def body(x: jax.Array) -> jax.Array:
        x = x + lax.axis_index("i")
        turn = [(n, (n + 1) % 8) for n in range(8)]
        step = jax.checkpoint(lambda x: lax.ppermute(jnp.sin(x), "i", turn))
        return lax.fori_loop(0, 2, lambda _, x: step(x), x)

    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    (mapped,) = internals.parts(jax.make_jaxpr(run)(jnp.ones(8)))[3]
    noted = internals.noting_collectives(mapped)
    assert not noted.effects
    assert internals.noting_collectives(noted) is noted
    by_jax, by_us, again = (
        {one.primitive.name: one for one in internals.parts(_jax_meshes.map_of(each).body)[3]}
        for each in (mapped, noted, internals.noting_collectives(noted, again=True))
    )
    assert internals.has_effects(by_jax["axis_index"])
    assert not internals.has_effects(by_us["axis_index"])
    # If the first fails, JAX has learnt it.
    assert not internals.has_effects(by_jax["scan"])
    assert internals.has_effects(by_us["scan"])
    assert not internals.has_side_effects(by_us["scan"])
    assert not internals.has_effects(again["scan"])

    def bound(x: jax.Array) -> Any:
        return internals.bind(noted, internals.name_stack_of(noted), [x])

    np.testing.assert_allclose(jax.jit(bound)(jnp.ones(8))[0], jax.jit(run)(jnp.ones(8)))


def test_a_barrier_keeps_over_which_axes_values_vary() -> None:
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        seen.append((jax.typeof(w), jax.typeof(x)))
        w, x = internals.barrier(w, x)
        seen.append((jax.typeof(w), jax.typeof(x)))
        return x * w

    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(body, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec("i"))
    np.testing.assert_array_equal(jax.jit(run)(jnp.ones(3), jnp.ones((8, 3))), np.ones((8, 3)))
    assert seen[0] == seen[1]
    # JAX's own did not, before 0.11.
    joined = jax.shard_map(
        lambda w, x: jnp.ones(()) * len(str(jax.typeof(lax.optimization_barrier((w, x))[0]))),
        mesh=mesh,
        in_specs=(spec(), spec("i")),
        out_specs=spec(),
    )
    assert (joined(jnp.ones(3), jnp.ones((8, 3))) > len("float32[3]")) == (
        jax.__version_info__ < (0, 11)
    )


def test_the_compiler_says_how_it_splits_values() -> None:
    mesh = jax.sharding.AbstractMesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def shape(*extents: int, spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(extents, jnp.float32, sharding=sharding)

    def fn(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        y = jax.nn.relu(x @ w)
        rows, _ = lax.scan(lambda c, _: (jnp.sin(c), None), y, length=3)
        return [y, rows, y.reshape(8, 2, 8), jnp.sum(y, axis=0), jnp.sum(y)]

    found = _jax_meshes.propagated(
        fn, [shape(16, 8, spec=(("data",),)), shape(8, 8, spec=(None, "model"))]
    )
    data, model = (("data", 4),), (("model", 2),)
    assert found == [(data, model), (data, model), (data, (), model), (model,), ()]


def test_meshes_are_found_in_inner_programs() -> None:
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))

    def fn(x: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(lambda c, _: (lax.with_sharding_constraint(c, sharding), None), x, length=2)

    found = list(_jax_meshes.meshes_in(internals.parts(jax.make_jaxpr(fn)(jnp.ones(8)))[3]))
    assert found == [mesh]
    assert not list(_jax_meshes.meshes_in(equations_of(jnp.sin, jnp.ones(3))))


def test_types_tell_of_a_mesh() -> None:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    seen: list[tuple[bool, bool]] = []

    def tell(x: jax.Array) -> jax.Array:
        kind = internals.type_of(x)
        seen.append((_jax_meshes.knows_a_mesh(kind), _jax_meshes.is_a_part(kind)))
        return x

    jax.jit(tell)(ones(8))
    with jax.set_mesh(mesh):
        jax.jit(tell)(jax.device_put(ones(8), jax.NamedSharding(mesh, jax.P("rows"))))
    automatic = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(tell, mesh=automatic, in_specs=jax.P("rows"), out_specs=jax.P("rows"))
    jax.jit(mapped)(ones(8))
    assert seen == [(False, False), (True, False), (True, True)]


def test_a_mesh_may_be_set_around() -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    kind = jax.typeof(jax.device_put(ones(8), jax.NamedSharding(mesh, jax.P("rows"))))
    assert _jax_meshes.knows_a_mesh(kind)
    assert not _jax_meshes.is_a_part(kind)
    assert not _jax_meshes.within_a_mesh()
    with jax.set_mesh(mesh):
        assert _jax_meshes.within_a_mesh()


def test_texts_of_parameters_hold_no_addresses_and_no_hash_order() -> None:
    class Thing:
        def __call__(self) -> None: ...

    assert internals.describe(Thing()) == "Thing"
    assert internals.describe(lambda: None) == "<lambda>"
    assert "0x" not in internals.describe(object())
    assert internals.describe({"b", "a"}) == internals.describe(frozenset(["a", "b"]))
    assert internals.describe((1, [2.0, None])) == "(1,(2.0,None))"
    assert internals.describe({"k": (1,)}) == "{'k':(1)}"


def test_tracers_of_derivatives() -> None:
    seen = []

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append((internals.is_differentiated(x), internals.is_differentiated(y)))
        return jnp.sum(x * y)

    x = jnp.ones((2, 2))
    taken: list[Callable[..., Any]] = [
        jax.grad(loss),
        jax.jit(jax.grad(loss)),
        jax.vmap(jax.grad(loss)),
        jax.grad(lambda *args: jnp.sum(jax.vmap(loss)(*args))),
        jax.hessian(loss),
        lambda x, y: jax.jvp(lambda x: loss(x, y), (x,), (x,)),
    ]
    for derivative in taken:
        derivative(x, x)
    assert seen == [(True, False)] * len(taken)
    seen.clear()
    loss(x, x)
    jax.jit(jax.vmap(loss))(x, x)
    jax.grad(jax.jit(loss))(x, x)  # the derivative is outside, and not to be seen
    assert seen == [(False, False)] * 3


def test_where_there_are_arrays() -> None:
    seen = []

    def loss(x: jax.Array) -> jax.Array:
        seen.append(internals.is_concrete(x))
        return jnp.sum(x * x)

    x = jnp.ones((2, 2))
    for taken in (loss, jax.grad(loss), jax.vmap(jax.grad(loss)), jax.hessian(loss)):
        taken(x)
    jax.jvp(jax.grad(loss), (x,), (x,))
    jax.linearize(loss, x)
    assert all(seen)
    seen.clear()
    jax.jit(loss)(x)
    jax.grad(jax.jit(loss))(x)
    jax.jit(jax.vmap(jax.grad(loss)))(x)
    jax.eval_shape(loss, x)
    assert not any(seen)
    assert not internals.is_concrete(jax.ShapeDtypeStruct((2,), "float32"))
    assert internals.is_concrete(1.0)


def test_settings_tell_what_traces_depend_on() -> None:
    context = jax.make_user_context(default_value=0)  # each is one more setting
    before = internals.settings()
    assert internals.settings() == before
    assert hash(internals.settings()) == hash(before)
    inside = []
    for setting in (
        jax.enable_x64(True),
        jax.default_matmul_precision("float32"),
        jax.disable_jit(),
        jax.numpy_dtype_promotion("strict"),
        context(1),
    ):
        with setting:
            inside.append(internals.settings())
    jax.vmap(lambda x: inside.append(internals.settings()) or x, axis_name="i")(jnp.ones(2))
    assert len({before, *inside}) == 7
    assert internals.settings() == before


# --- _jax_checkpoints ---------------------------------------------------------------------


def named_and_checkpointed(policy):
    def fn(x):
        return jnp.sin(checkpoint_name(jnp.cos(x), "y"))

    (equation,) = equations_of(jax.checkpoint(fn, policy=policy), jnp.ones(3))
    return equation


def test_a_checkpoint_says_what_runs_under_it():
    policy = jax.checkpoint_policies.save_only_these_names("y")
    found = internals.checkpoint_of(named_and_checkpointed(policy))
    assert found is not None
    assert not found.differentiated
    assert found.policy == policy
    inside = internals.parts(found.body)[3]
    assert [one.primitive.name for one in inside] == ["cos", "name", "sin"]
    assert [_jax_checkpoints.name_of(one) for one in inside] == [None, "y", None]
    assert internals.checkpoint_of(inside[0]) is None


def test_of_a_checkpoint_in_a_gradient_the_rest_is_marked():
    def fn(x):
        return jnp.sum(jnp.sin(jnp.cos(x)))

    equations = equations_of(jax.grad(jax.checkpoint(fn)), jnp.ones(3))
    found = [one for e in equations if (one := internals.checkpoint_of(e)) is not None]
    assert [one.differentiated for one in found] == [True]


def test_policies_tell_what_equations_they_keep():
    policy = jax.checkpoint_policies.dots_saveable
    found = internals.checkpoint_of(named_and_checkpointed(policy))
    assert not any(_jax_checkpoints.saves(policy, one) for one in internals.parts(found.body)[3])
    (product,) = equations_of(lambda x: x @ x, jnp.ones(3))
    assert _jax_checkpoints.saves(policy, product)
    assert not _jax_checkpoints.saves(None, product)


def test_policies_tell_what_names_they_keep():
    policies = jax.checkpoint_policies
    only = policies.save_only_these_names("a", "b")
    offloaded = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    others = policies.save_any_names_but_these("b")
    for policy in (only, offloaded):
        assert _jax_checkpoints.listed_names(policy) == {"a", "b"}
        assert _jax_checkpoints.saves_name(policy, "a")
        assert _jax_checkpoints.saves_name(policy, "b")
        assert not _jax_checkpoints.saves_name(policy, "c")
    assert _jax_checkpoints.listed_names(others) is None
    assert _jax_checkpoints.saves_name(others, "a")
    assert not _jax_checkpoints.saves_name(others, "b")
    for policy in (None, policies.nothing_saveable, policies.dots_saveable):
        assert _jax_checkpoints.listed_names(policy) is None
        assert not _jax_checkpoints.saves_name(policy, "a")
    assert _jax_checkpoints.saves_nothing(policies.nothing_saveable)
    assert not _jax_checkpoints.saves_nothing(policies.dots_saveable)


def test_policies_are_told_apart():
    policies = jax.checkpoint_policies
    broken = policies.save_anything_except_these_names("a")
    assert _jax_checkpoints.is_save_anything_except(broken)
    assert broken(), "where it keeps to its names at last, the check can go"
    assert not _jax_checkpoints.is_save_anything_except(policies.save_any_names_but_these("a"))
    assert _jax_checkpoints.is_plain_policy(lambda *_, **__: True)
    own = (policies.dots_saveable, policies.save_only_these_names("a"), broken)
    assert not any(map(_jax_checkpoints.is_plain_policy, own))


def test_the_new_checkpoint_is_a_flag():
    assert not _jax_checkpoints.uses_new_checkpoint()
    jax.config.update("jax_remat3", True)
    try:
        assert _jax_checkpoints.uses_new_checkpoint()
        assert not _jax_checkpoints.with_old_checkpoint(_jax_checkpoints.uses_new_checkpoint)
        assert _jax_checkpoints.uses_new_checkpoint()
    finally:
        jax.config.update("jax_remat3", False)


def test_what_a_custom_rule_keeps():
    @jax.custom_vjp
    def squared(x):
        return x * x

    squared.defvjp(lambda x: (x * x, (x, jnp.sin(x))), lambda kept, g: (g * kept[1],))
    (equation,) = equations_of(squared, jnp.ones(3))
    assert _jax_checkpoints.function_name(equation) == "squared"
    closed, residuals = _jax_checkpoints.residuals_of(equation)
    made = {out: one.primitive.name for one in internals.parts(closed)[3] for out in one.outvars}
    assert "sin" in [made.get(one) for one in residuals]
    assert "mul" not in [made.get(one) for one in residuals]
