"""What values are called: by modules, calls, arguments and the user's own lines."""

from __future__ import annotations

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.naming import ValueName
from remat_opt.program import bodies, tracing
from remat_opt.program.names import Names
from remat_opt.program.record import Program


def names(program: Program) -> list[ValueName]:
    told = Names(program)
    return [told.of(index) for index in range(len(program.equations))]


def line_of(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def called(x: jax.Array) -> jax.Array:
    x = jnp.clip(x, 0.0, 6.0)
    x = x + 1.0
    return jnp.clip(x, -1.0, 1.0)


def test_what_a_function_of_jax_s_makes_is_told_by_the_line_that_calls_it() -> None:
    found = names(tracing.trace(called, jnp.ones((2, 3))))
    clips = [one for one in found if one.what == "clip in called"]
    lines = [line_of(called, text) for text in ("0.0, 6.0", "-1.0, 1.0")]
    assert [one.source for one in clips] == [f"test_names.py:{line} (called)" for line in lines]
    assert clips[0].title == "clip in called, 2x3 float32"
    assert "maximum in clip" in {one.what for one in found}, "a step on the way to it"


@jax.jit
def mine(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2.0


def test_a_function_of_the_user_s_is_told_by_its_own_line() -> None:
    (sine, _) = names(tracing.trace(lambda x: mine(x), jnp.ones(3)))
    assert sine.what == "sin in mine"
    assert sine.source == f"test_names.py:{line_of(inspect.unwrap(mine), 'jnp.sin')} (mine)"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.LayerNorm()(nn.Dense(4)(x)))
        return x + nn.Dense(4)(y)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = Block()(x)
        return jnp.sum(x)


def test_a_network_is_told_by_its_modules() -> None:
    net, x = Net(), jnp.ones((2, 4))
    parameters = net.init(jax.random.key(0), x)
    found = names(tracing.trace(net.apply, parameters, x))
    by_title = {one.title: one for one in found}
    relu = by_title["relu of Block_1/LayerNorm_0, 2x4 float32"]
    assert relu.module == "Net/Block_1"
    assert relu.source == f"test_names.py:{line_of(Block, 'nn.relu')} (Block.__call__)"
    assert "matrix product in Block_0/Dense_1, 2x4 float32" in by_title
    assert "output of Block_0/LayerNorm_0, 2x4 float32" in by_title
    assert "sum of Net/Block_1, scalar float32" in by_title
    dense = by_title["matrix product in Block_0/Dense_0, 2x4 float32"]
    assert (dense.primitive, dense.dtype, dense.shape) == ("dot_general", "float32", (2, 4))
    assert dense.source.startswith("test_names.py:"), "not a line of Flax's"


def test_a_product_is_told_by_the_argument() -> None:
    def loss(params: dict[str, list[jax.Array]], x: jax.Array, *, scale: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"][1].astype("float32")) @ scale

    weights = {"up": [jnp.ones((3, 3), "bfloat16")] * 2}
    found = names(tracing.trace(loss, weights, jnp.ones((2, 3)), scale=jnp.ones((3, 3))))
    assert [one.what for one in found if one.primitive == "dot_general"] == [
        "matrix product with params['up'][1]",
        "matrix product with scale",
    ]
    assert "tanh in loss" in {one.what for one in found}


def test_scopes_that_jax_opens_by_itself_are_no_modules() -> None:
    def layer(x: jax.Array) -> jax.Array:
        with jax.named_scope("Layer"):
            return jnp.einsum("i,j->ij", jnp.sin(x), x)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bij->", *[jax.vmap(layer)(x)] * 2)

    found = names(tracing.trace(loss, jnp.ones((2, 3))))
    assert {one.module for one in found} == {"Layer", ""}
    assert {one.what for one in found} >= {"sin in Layer", "matrix product in loss"}


class Scale:
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(x)


def test_a_special_method_is_told_by_its_class() -> None:
    (sine,) = names(tracing.trace(lambda x: Scale()(x), jnp.ones(3)))
    assert sine.what == "sin in Scale"
    assert sine.source.endswith("(Scale.__call__)")


def test_inside_a_loop_a_product_is_told_by_the_argument_of_the_whole() -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w @ params["shared"]), None

        return jax.lax.scan(layer, x, params["layers"].astype("float32"))[0]

    weights = {"layers": jnp.ones((4, 3, 3), "bfloat16"), "shared": jnp.ones((3, 3))}
    program = tracing.trace(loss, weights, jnp.ones((2, 3)))
    (scan,) = (one for one in program.equations if one.operation.primitive == "scan")
    body = bodies.body_of(scan, bodies.varying(program))
    told = Names(program).inside(scan, body)
    found = [told.of(index) for index in range(len(body.equations))]
    assert [one.what for one in found if one.primitive == "dot_general"] == [
        "matrix product with params['layers']",
        "matrix product with params['shared']",
    ]


def test_unnamed_functions_and_primitives_without_a_word() -> None:
    (found,) = names(tracing.trace(lambda x: jax.lax.erf_inv(x), 0.5))
    assert found.title == "erf inv, scalar float32"
    assert found.label == "erf_inv f32[]"
