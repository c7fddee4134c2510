"""From a function and its arguments to a flat program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat_opt
from remat_opt.errors import TraceError
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from remat_opt.program.record import Constant, Program
from remat_opt.program.static_leaves import release
from remat_opt.program.tracing import Signature

pytestmark = pytest.mark.usefixtures("quick_search")


def primitives(program: Program) -> list[str]:
    return [equation.operation.primitive for equation in program.equations]


def test_values_are_numbered_constants_first_then_arguments_then_results() -> None:
    table = np.arange(3.0, dtype=np.float32)
    program = tracing.trace(lambda a, b: jnp.sin(a * table) + b, jnp.ones(3), jnp.ones(3))
    assert program.constants == (0,)
    assert program.arguments == (1, 2)
    assert [equation.outputs for equation in program.equations] == [(3,), (4,), (5,)]
    assert program.outputs == (5,)
    assert program.types[3] == ArrayType(shape=(3,), dtype="float32")
    np.testing.assert_array_equal(program.constant_values[0], table)


def test_nested_jits_are_inlined_and_other_inner_programs_are_not() -> None:
    @jax.jit
    def inner(x):
        return jax.jit(jnp.sin)(x) * 2

    def loss(x):
        x = inner(inner(x))
        x, _ = lax.scan(lambda c, _: (jnp.cos(c), None), x, None, length=3)
        return jnp.sum(jax.checkpoint(jnp.exp)(x))

    program = tracing.trace(loss, jnp.ones(3))
    *most, checkpoint, last = primitives(program)
    assert most == ["sin", "mul", "sin", "mul", "scan"]
    assert checkpoint.startswith(("remat", "checkpoint"))
    assert last == "reduce_sum"
    scan = program.equations[4].operation
    assert [body.repeats for body in scan.bodies] == [3]


def test_a_jit_with_side_effects_inside_is_inlined_too() -> None:
    @jax.jit
    def loss(x):
        jax.debug.print("{}", x)
        return jnp.sum(jnp.sin(x))

    program = tracing.trace(loss, jnp.ones(3))
    assert primitives(program)[1:] == ["sin", "reduce_sum"]
    assert [equation.effects for equation in program.equations] == [True, False, False]


def test_equations_that_nothing_reads_are_left_out() -> None:
    def loss(x):
        jnp.exp(x) @ x
        return jnp.sum(jnp.sin(x))

    assert primitives(tracing.trace(loss, jnp.ones(3))) == ["sin", "reduce_sum"]


def test_products_that_repeat_another_are_left_out_with_what_follows() -> None:
    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.sin(x) @ w))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        # Once for its value, once for its derivative.
        slope = jax.grad(model, argnums=1)(w, x)
        return model(w, x) + jnp.sum(slope**2)

    w, x = jnp.ones((4, 4)), jnp.linspace(0, 1, 12).reshape(3, 4)
    program = tracing.trace(loss, w, x)
    found = primitives(program)
    assert found.count("dot_general") == 2
    assert found.count("tanh") == 1
    # The second sine only led to the product that is left out.
    assert found.count("sin") == 1
    flat = remat_opt.optimal_remat(loss, device="cpu")
    for one, other in zip(jax.grad(flat, (0, 1))(w, x), jax.grad(loss, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_what_repeats_no_product_is_computed_where_it_is_read() -> None:
    def masked(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x, 0) @ jnp.sin(x)
        return jnp.sum(x)

    program = tracing.trace(masked, jnp.ones((4, 4)))
    found = primitives(program)
    assert found.count("ge") == found.count("dot_general") == 3


def test_a_barrier_and_another_layout_keep_products_apart() -> None:
    def hidden(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ w) + jnp.sum(jnp.sin(jax.lax.optimization_barrier(x) @ w))

    def widened(w: jax.Array, x: jax.Array) -> jax.Array:
        wide = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jnp.sum(x @ w).astype(jnp.float32) + jnp.sum(jnp.sin(wide))

    w = jnp.ones((4, 4), jnp.bfloat16)
    for fn in (hidden, widened):
        program = tracing.trace(fn, w, w)
        assert primitives(program).count("dot_general") == 2, fn


def test_argument_kinds() -> None:
    tree = {
        "array": jnp.ones(2),
        "numpy": np.ones((2, 1)),
        "struct": jax.ShapeDtypeStruct((3,), "int8"),
        "float": 1.0,
        "int": 2,
        "bool": True,
        "scalar": np.float16(1),
        "none": None,
        "key": jax.random.key(0),
    }
    program = tracing.trace(lambda t, *, more: t["float"] * more, tree, more=jnp.ones(()))
    assert [program.types[value].dtype for value in program.arguments] == [
        "float32",
        "bool",
        "float32",
        "int32",
        "key<fry>",
        "float32",
        "float16",
        "int8",
        "float32",
    ]
    # Only numbers that have a derivative are differentiated; keyword arguments are not.
    assert [program.types[value].dtype for value in program.differentiated] == [
        "float32",
        "float32",
        "float32",
        "float16",
    ]


def test_argnums_name_the_differentiated() -> None:
    def loss(x, w, b):
        return jnp.sum(x @ w["k"] + b)

    args = jnp.ones((2, 3)), {"k": jnp.ones((3, 3))}, jnp.ones(3)
    for argnums, expected in {(0,): (0,), (1, 2): (1, 2), (-1,): (2,)}.items():
        program = tracing.trace(loss, *args, signature=Signature(argnums=argnums))
        assert program.differentiated == expected


def test_a_differentiated_argument_may_be_passed_by_name() -> None:
    program = tracing.trace(lambda w, x: jnp.sum(w * x), x=jnp.ones(3), w=jnp.ones(3))
    # Keyword arguments are flattened in the order of their names: w before x.
    assert program.differentiated == (0,)


@pytest.mark.parametrize(
    ("signature", "args", "kwargs"),
    [
        (Signature(static_argnums=(1,)), (1.0, "tanh"), {}),
        (Signature(static_argnums=(-1,)), (1.0, "tanh"), {}),
        (Signature(static_argnames=("kind",)), (1.0, "tanh"), {}),
        (Signature(static_argnames=("kind",)), (1.0,), {"kind": "tanh"}),
        (Signature(static_argnums=(1,)), (1.0,), {"kind": "tanh"}),
        (Signature(static_argnums=(1,)), (1.0,), {}),
    ],
)
def test_static_arguments(signature: Signature, args: Any, kwargs: Any) -> None:
    def loss(x, kind="tanh"):
        return getattr(jnp, kind)(x)

    program = tracing.trace(loss, *args, signature=signature, **kwargs)
    assert primitives(program) == ["tanh"]
    assert program.name == "loss"


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        (
            Signature(argnums=(2,)),
            "argnums names argument 2, but the function was called with 2 positional argument(s). "
            "Pass that argument by position, or change the number.",
        ),
        (
            Signature(static_argnums=(-3,)),
            "static_argnums names argument -3, but the function was called with 2 positional "
            "argument(s). Pass that argument by position, or change the number.",
        ),
        (
            Signature(argnums=(0,), static_argnums=(0,)),
            "Argument 0 is differentiated (argnums) and also static (static_argnums or "
            "static_argnames); a static argument has no derivative. Take it out of one of them.",
        ),
        (
            Signature(argnums=(0,), static_argnames=("w",)),
            "Argument 0 is differentiated (argnums) and also static (static_argnums or "
            "static_argnames); a static argument has no derivative. Take it out of one of them.",
        ),
        (
            Signature(has_aux=True),
            "has_aux=True says that the function returns a pair (loss, auxiliary), but it returns "
            "a ShapeDtypeStruct. Return a pair, or leave has_aux out.",
        ),
    ],
)
def test_messages(signature: Signature, message: str) -> None:
    def loss(w, x):
        return jnp.sum(w * x)

    with pytest.raises(TraceError) as caught:
        tracing.trace(loss, jnp.ones(3), jnp.ones(3), signature=signature)
    assert str(caught.value) == message


def test_leaves_that_are_no_arrays_go_round_the_trace() -> None:
    def loss(a, options):
        return options["f"](a) if options["mode"] == ["train"] else a, options

    args = jnp.ones(3), {"mode": ["train"], "f": jnp.sin}
    program = tracing.trace(loss, *args, signature=Signature(has_aux=True))
    assert len(program.arguments) == 1
    assert [one.operation.primitive for one in program.equations] == ["sin"]
    empty = jax.tree.unflatten(program.output_tree, [None])
    assert release(empty) == (None, args[1])


def test_tracers_that_are_closed_over_are_arguments() -> None:
    programs = []

    def outer(a, b, c):
        def inner(x):
            return jnp.sum(jnp.tanh(a @ x) * b + table)

        table = np.arange(3.0)
        programs.append(tracing.trace(inner, c))
        return inner(c)

    args = jnp.ones((3, 3)), jnp.ones(3), jnp.ones(3)
    jax.grad(outer, argnums=(0, 1))(*args)
    jax.grad(outer, argnums=2)(*args)
    jax.jit(outer)(*args)
    both, one, unseen = programs
    assert (len(both.arguments), len(both.closed_over), len(both.constants)) == (3, 2, 1)
    assert both.differentiated == both.arguments[1:]
    assert one.closed_over == ()
    assert one.differentiated == one.arguments
    # If it is not visible, it is for the first argument; without arguments, for everything.
    assert unseen.differentiated == unseen.arguments[:1]

    def alone(a, b):
        programs.append(tracing.trace(lambda: jnp.sum(a * b)))
        return jnp.sum(a * b)

    jax.grad(jax.jit(alone))(*args[1:])
    assert programs[-1].differentiated == programs[-1].arguments
    assert len(programs[-1].arguments) == 2


def test_results_that_are_no_equations() -> None:
    def loss(x):
        return jnp.sum(x), (x, 3, jnp.zeros(()), None, np.arange(2.0))

    program = tracing.trace(loss, jnp.ones(3), signature=Signature(has_aux=True))
    total, same, number, zero, table = program.outputs
    assert (program.loss_outputs, same, table) == (1, program.arguments[0], program.constants[0])
    assert isinstance(number, Constant)
    assert type(number.value) is int
    assert isinstance(zero, Constant)
    assert isinstance(zero.value, jax.Array)
    assert total == program.equations[0].outputs[0]


def test_fingerprint_tells_programs_apart_and_not_names() -> None:
    def make(function, shape=(3,), factor=2.0, **options):
        def loss(w, x):
            return jnp.sum(function(w * factor) * x)

        return tracing.trace(
            loss, jnp.ones(shape), jnp.ones(shape), signature=Signature(**options)
        ).fingerprint()

    def scoped(x):
        with jax.named_scope("elsewhere"):
            return jnp.sin(x)

    reference = make(jnp.sin)
    assert make(scoped) == make(jax.jit(jnp.sin)) == reference
    others = [
        make(jnp.cos),
        make(jnp.sin, shape=(4,)),
        make(jnp.sin, factor=3.0),
        make(jnp.sin, argnums=(1,)),
        make(functools.partial(jnp.sum, axis=0)),
        make(functools.partial(jnp.sum, axis=0, keepdims=True)),
    ]
    assert len({reference, *others}) == 7


def test_constants_do_not_enter_the_fingerprint_but_their_shapes_do() -> None:
    def print_of(table):
        return tracing.trace(lambda x: jnp.sum(x * table), jnp.ones(3)).fingerprint()

    assert print_of(np.ones(3)) == print_of(np.zeros(3))
    assert print_of(np.ones(3)) != print_of(np.ones((2, 3)))
