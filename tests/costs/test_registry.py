"""Users add their own rules; nobody replaces one by accident; nothing unknown stops a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.costs import (
    Cost,
    Fusion,
    cost,
    parameter,
    register,
    registered,
    registry,
    unknown_cost,
)
from remat_opt.operation import ArrayType, Body, Operation

ARRAY = ArrayType(shape=(10, 4), dtype="float32")
SMALL = ArrayType(shape=(10,), dtype="float32")
FREE = Cost(flops=0, transcendentals=0, bytes_read=0, bytes_written=0, fusion=Fusion.FUSIBLE)


@pytest.fixture(autouse=True)
def forget_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes rules registered in a test when it ends."""
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


def _operation(primitive: str, **fields: Any) -> Operation:
    return Operation(primitive=primitive, inputs=(ARRAY,), outputs=(SMALL,), **fields)


def test_a_users_rule_is_used() -> None:
    @register("my_kernel", "my_other_kernel")
    def my_rule(operation: Operation) -> Cost:
        return Cost(
            flops=7 * operation.output_size,
            transcendentals=0,
            bytes_read=operation.input_bytes,
            bytes_written=operation.output_bytes,
            fusion=Fusion.OPAQUE,
        )

    assert {"my_kernel", "my_other_kernel"} <= registered()
    assert cost(_operation("my_other_kernel")).flops == 70
    assert cost(_operation("my_kernel")) == my_rule(_operation("my_kernel"))


def test_a_second_rule_for_a_primitive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'dot_general' has a cost rule already") as raised:
        register("my_new_primitive", "dot_general")(lambda _: FREE)
    assert "remat_opt.costs.contraction.matrix_product" in str(raised.value)
    assert "override=True" in str(raised.value)
    assert "my_new_primitive" not in registered()


def test_a_rule_can_be_replaced_on_purpose() -> None:
    register("dot_general", override=True)(lambda _: FREE)
    assert cost(_operation("dot_general")) == FREE


def test_a_rule_defined_again_replaces_itself() -> None:
    """As when a notebook cell is run twice."""
    for flops in (1, 2):

        @register("my_kernel")
        def my_rule(operation: Operation, flops: int = flops) -> Cost:
            return dataclasses.replace(FREE, flops=flops)

    assert cost(_operation("my_kernel")).flops == 2


def test_a_forgotten_name_is_pointed_out() -> None:
    with pytest.raises(TypeError, match=r'Write @register\("name"\) above the rule'):
        register(lambda _: FREE)
    with pytest.raises(ValueError, match=r"needs a primitive name"):
        register()


def test_a_rule_that_returns_no_cost_is_named() -> None:
    register("my_kernel")(lambda _: 17)  # type: ignore[return-value]
    with pytest.raises(TypeError, match=r"of 'my_kernel' returned a int; it must return a"):
        cost(_operation("my_kernel"))


def test_an_unknown_primitive_is_opaque_and_estimated() -> None:
    answer = cost(_operation("never_heard_of"))
    assert answer == Cost(
        flops=40,
        transcendentals=0,
        bytes_read=160,
        bytes_written=40,
        fusion=Fusion.OPAQUE,
        estimated=True,
    )


def test_an_unknown_primitive_costs_what_is_inside_it() -> None:
    inner = Operation(primitive="exp", inputs=(ARRAY,), outputs=(ARRAY,))
    answer = cost(_operation("never_heard_of", bodies=(Body(operations=(inner,), repeats=3),)))
    assert answer.transcendentals == 120
    assert answer.estimated


def test_a_rule_whose_parameters_are_gone_is_estimated() -> None:
    """Another JAX may name them differently; a plan is still made, and says so."""
    operation = _operation("dot_general")
    assert cost(operation) == unknown_cost(operation)


def test_a_missing_parameter_is_named() -> None:
    operation = _operation("dot_general", params={"precision": None})
    with pytest.raises(LookupError, match=r"dot_general has no parameter 'axes'; it has precision"):
        parameter(operation, "axes")


def test_a_cost_is_made_of_non_negative_integers() -> None:
    with pytest.raises(ValueError, match=r"Cost.flops is 1.5; it must be an int of at least 0"):
        Cost(
            flops=1.5,
            transcendentals=0,
            bytes_read=0,
            bytes_written=0,
            fusion=Fusion.FUSIBLE,
        )


def test_every_primitive_of_a_network_has_a_rule(operations: Any) -> None:
    def loss(weights: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(x @ weights)
        normed = (hidden - hidden.mean(-1, keepdims=True)) * jax.lax.rsqrt(hidden.var() + 1e-5)
        logits = jax.nn.log_softmax(normed @ weights)
        return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()

    args = (
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        jax.ShapeDtypeStruct((5, 8), jnp.float32),
        jax.ShapeDtypeStruct((5,), jnp.int32),
    )
    assert not [
        operation.primitive
        for operation in operations(jax.grad(loss), *args)
        if cost(operation).estimated
    ]
