"""Which values each equation's derivative reads, as JAX says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat_opt import costs
from remat_opt.program import linearization, tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Derivative
from remat_opt.program.tracing import Signature
from tests.programs import DEAR, EXAMPLES, ones

X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)
SQUARE = ones(3, 3)
IMAGE, KERNEL = ones(1, 4, 4, 2), ones(3, 3, 2, 2)


def derivatives(fn: Callable[..., Any], *args: Any) -> dict[str, Derivative]:
    """The derivative of each equation of ``fn``, by primitive."""
    program = tracing.trace(fn, *args, signature=Signature(argnums=tuple(range(len(args)))))
    found = linearize(program).derivatives
    return {program.equations[i].operation.primitive: d for i, d in found.items()}


@pytest.mark.parametrize(
    ("fn", "args", "primitive", "inputs", "outputs"),
    [
        (jnp.tanh, (X,), "tanh", (), (0,)),
        (jnp.exp, (X,), "exp", (), (0,)),
        (lax.rsqrt, (X,), "rsqrt", None, (0,)),  # and its input, in some versions of JAX
        (lax.logistic, (X,), "logistic", (), (0,)),
        (jnp.sin, (X,), "sin", (0,), ()),
        (jnp.log, (X,), "log", (0,), ()),
        (lax.mul, (X, X), "mul", (0, 1), ()),
        (lax.dot, (X, SQUARE), "dot_general", (0, 1), ()),
        (lambda x: lax.dot(x, SQUARE), (X,), "dot_general", (1,), ()),
        # A rule that looks for the output among the inputs uses its own output.
        (lax.max, (X, X), "max", (0, 1), ()),
        (lax.min, (X, X), "min", (0, 1), ()),
        (lambda x: jnp.max(x, 0), (X,), "reduce_max", (0,), ()),
        (lambda x: jnp.min(x), (X,), "reduce_min", (0,), ()),
        (lambda x: lax.select(x > 0, x, -x), (X,), "select_n", (0,), ()),
        (lax.add, (X, X), "add", (), ()),
        (lax.sub, (X, X), "sub", (), ()),
        (lax.neg, (X,), "neg", (), ()),
        (lambda x: x.reshape(3, 2), (X,), "reshape", (), ()),
        (lambda x: x.T, (X,), "transpose", (), ()),
        (lambda x: jnp.sum(x, 0), (X,), "reduce_sum", (), ()),
        (lambda x: jnp.concatenate([x, x]), (X,), "concatenate", (), ()),
        (lambda x: x * 2.0, (X,), "mul", (), ()),
        (lambda x: x.astype(jnp.bfloat16), (X,), "convert_element_type", (), ()),
        (lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), (X,), "broadcast_in_dim", (), ()),
        (lambda x: lax.slice(x, (0, 0), (1, 3)), (X,), "slice", (), ()),
        (
            lambda x, k: lax.conv_general_dilated(
                x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (IMAGE, KERNEL),
            "conv_general_dilated",
            (0, 1),
            (),
        ),
    ],
)
def test_what_the_backward_step_reads(
    fn: Callable[..., Any], args: Any, primitive: str, inputs: Any, outputs: Any
) -> None:
    found = derivatives(fn, *args)[primitive]
    if inputs is not None:
        assert found.inputs == inputs
    if outputs is not None:
        assert found.outputs == outputs
    assert found.internal_bytes == 0
    assert found.active_outputs == (0,)
    assert not found.assumed


def test_division_reads_the_divisor_and_what_gives_the_quotient() -> None:
    found = derivatives(lax.div, X, X)["div"]
    assert 1 in found.inputs
    assert found.internal_bytes == 0


@pytest.mark.parametrize(
    ("fn", "late"),
    [
        (lambda x, rows: x.at[jnp.argsort(rows[:, 0])].set(rows), True),
        (lambda x, rows: x.at[jnp.argsort(rows[:, 0])].add(rows), False),
    ],
)
def test_where_a_scatter_writes_depends_on_integers_alone(fn: Any, late: bool) -> None:
    """JAX finds out which update each entry takes by scattering their numbers."""
    derivative = next(one for name, one in derivatives(fn, X, X).items() if "scatter" in name)
    assert derivative.internal_bytes == 0
    assert derivative.inputs == (1,)
    assert (derivative.late_bytes > 0) == late


def test_in_a_body_all_residuals_come_from_running_it() -> None:
    """Its backward pass is a program of its own: an iteration of a loop, for instance."""
    program = tracing.trace(lambda x: x.at[jnp.argsort(X[:, 0])].set(2 * x), X)
    (late,) = (one for one in linearize(program).derivatives.values() if one.late_bytes)
    (kept,) = (
        one for one in linearize(program, inside=True).derivatives.values() if one.internal_bytes
    )
    assert (kept.internal_bytes, kept.late_bytes) == (late.late_bytes, 0)


@pytest.mark.parametrize("fn", [lax.stop_gradient, jnp.floor, jnp.sign, lambda x: x > 0])
def test_inactive_equations_stop_the_backward_pass(fn: Callable[..., Any]) -> None:
    # Neither they nor the tanh before them have a backward step.
    assert set(derivatives(lambda x: jnp.sum(fn(jnp.tanh(x)) + x), X)) <= {
        "reduce_sum",
        "add",
        "add_any",
        "convert_element_type",
    }


def test_a_comparison_in_place_of_the_values_of_relu() -> None:
    found = derivatives(jax.nn.relu, X)
    (relu,) = (d for name, d in found.items() if name.startswith("custom_jvp"))
    # relu's rule reads x > 0: one input or the output, nothing that must be run again.
    assert len(relu.inputs) + len(relu.outputs) == 1
    assert relu.internal_bytes == 0


def test_only_the_way_from_argnums_to_the_loss_has_backward_steps() -> None:
    def loss(w, x):
        features = jnp.exp(x)
        aux = jnp.sin(w)
        return jnp.sum(jnp.tanh(w * features)), aux

    program = tracing.trace(loss, X, X, signature=Signature(has_aux=True))
    found = linearize(program)
    names = [program.equations[index].operation.primitive for index in found.derivatives]
    assert names == ["mul", "tanh", "reduce_sum"]
    product = found.derivatives[next(iter(found.derivatives))]
    assert product.inputs == (1,)  # w is what varies: only the features are read
    assert program.arguments[0] in found.active_values
    assert program.arguments[1] not in found.active_values


def test_scan_keeps_what_only_running_it_provides() -> None:
    def loss(w, sequence):
        def step(c, x):
            c = jnp.sin(c @ w) + x
            return c, None

        return jnp.sum(lax.scan(step, jnp.zeros(3), sequence)[0])

    program = tracing.trace(loss, SQUARE, jnp.ones((7, 3)))
    (scan,) = (
        d
        for i, d in linearize(program).derivatives.items()
        if program.equations[i].operation.primitive == "scan"
    )
    # Per step at least the carry and the cosine's argument, 3 numbers of 4 bytes each.
    assert scan.internal_bytes >= 2 * 7 * 3 * 4
    assert not scan.assumed


def test_a_checkpointed_scan_body_keeps_its_carries() -> None:
    def loss(w, sequence):
        @jax.checkpoint
        def step(c, x):
            return jnp.sin(jnp.sin(jnp.sin(c @ w))) + x, None

        return jnp.sum(lax.scan(step, jnp.zeros(3), sequence)[0])

    program = tracing.trace(loss, SQUARE, jnp.ones((7, 3)))
    (scan,) = (
        d
        for i, d in linearize(program).derivatives.items()
        if program.equations[i].operation.primitive == "scan"
    )
    assert 7 * 3 * 4 <= scan.internal_bytes < 2 * 7 * 3 * 4


def test_a_custom_rule_is_asked_not_guessed() -> None:
    @jax.custom_vjp
    def halved(x, y):
        return x * y

    # By its rule, the derivative reads nothing; an inner jvp would not even be possible.
    halved.defvjp(lambda x, y: (x * y, None), lambda _, g: (0.5 * g, g))
    found = derivatives(lambda x, y: halved(jnp.sin(x), y), X, X)
    (rule,) = (d for name, d in found.items() if name.startswith("custom_vjp"))
    assert rule == Derivative(active_outputs=(0,))


def test_several_outputs_are_active_each_for_itself() -> None:
    def fn(x):
        kept, stopped = jax.checkpoint(lambda x: (x * 2.0, lax.stop_gradient(x * 3.0)))(x)
        return jnp.sum(kept) + jnp.sum(stopped)

    found = derivatives(fn, X)
    (inner,) = (d for name, d in found.items() if name.startswith(("checkpoint", "remat")))
    assert inner.active_outputs == (0,)


def test_what_jax_cannot_differentiate_is_taken_to_read_all() -> None:
    def loss(x):
        y = jnp.sin(x)
        return jnp.sum(jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y.shape, y.dtype), y))

    found = derivatives(loss, X)
    assert found["pure_callback"] == Derivative(
        inputs=(0,), outputs=(0,), active_outputs=(0,), assumed=True
    )
    # ... and does not spoil what is known about the others.
    assert found["sin"] == Derivative(inputs=(0,), active_outputs=(0,))


def test_like_equations_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    original = linearization._trace_derivatives
    monkeypatch.setattr(
        linearization,
        "_trace_derivatives",
        lambda items: counts.append(len(items)) or original(items),
    )

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    linearize(tracing.trace(loss, [SQUARE] * 20, X))
    # The first product does not vary in x; then product, tanh and sum.
    assert counts == [4]


def test_what_residuals_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a physics engine has thousands of residuals, each made by what made the others."""

    @jax.custom_jvp
    def chain(x):
        for _ in range(20):
            x = jnp.sin(x)
        return x

    @chain.defjvp
    def _(primals, tangents):
        def unrolled(x):
            for _ in range(20):
                x = jnp.sin(x)
            return x

        return jax.jvp(unrolled, primals, tangents)

    asked: list[str] = []
    cost = costs.cost

    def counted(operation):
        asked.append(operation.primitive)
        return cost(operation)

    monkeypatch.setattr(costs, "cost", counted)
    (derivative,) = linearize(tracing.trace(chain, jnp.ones(()))).derivatives.values()
    assert derivative.inputs == (0,)
    assert 20 <= asked.count("sin") + asked.count("cos") <= 40


def test_functions_of_the_same_name_are_not_taken_for_each_other() -> None:
    def make(reads):
        @jax.custom_vjp
        def rule(x):
            return x * 1.0

        rule.defvjp(
            lambda x: (x * 1.0, x if reads else None),
            lambda saved, g: (g * saved if reads else g,),
        )
        return rule

    first, second = make(True), make(False)
    program = tracing.trace(lambda x: jnp.sum(second(first(x))), X)
    found = list(linearize(program).derivatives.values())[:2]
    assert [d.inputs for d in found] == [(0,), ()]


def test_complex_and_bfloat16_carry_derivatives_and_integers_do_not() -> None:
    def loss(x):
        index = jnp.argsort(x, axis=-1)
        z = jnp.exp(1j * x)
        return jnp.sum(jnp.abs(jnp.take_along_axis(z, index, -1))) + jnp.sum(
            x.astype(jnp.bfloat16) * jnp.bfloat16(2)
        ).astype(jnp.float32)

    found = derivatives(loss, X)
    assert found["exp"].outputs == (0,)
    assert "sort" not in found
    assert 1 in found["gather"].inputs


def test_what_a_literal_makes_of_a_derivative() -> None:
    found = derivatives(lambda x: x ** np.float32(1.5), X)["pow"]
    assert found.inputs == (0,) or found.outputs == (0,)


#: One equation each, at a small shape and at others, including extents of one and zero.
ELEMENTWISE = {
    "abs": jnp.abs,
    "cos": jnp.cos,
    "exp": jnp.exp,
    "integer_pow": lambda x: x**3,
    "log": jnp.log,
    "logistic": lax.logistic,
    "neg": jnp.negative,
    "rsqrt": lax.rsqrt,
    "sin": jnp.sin,
    "sqrt": jnp.sqrt,
    "square": lax.square,
    "tanh": jnp.tanh,
    "add": lambda x: lax.add(x, x),
    "sub": lambda x: lax.sub(x, 2 * x),
    "mul": lambda x: lax.mul(x, x),
    "mul by a literal": lambda x: x * 3.0,
    "div": lambda x: lax.div(x, 2 * x),
    "div by a literal": lambda x: x / 3.0,
    "pow": lambda x: lax.pow(x, x),
    "max": lambda x: lax.max(x, 2 * x),
    "min": lambda x: lax.min(x, 2 * x),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "select_n": lambda x: lax.select(x > 0, x, -x),
}


def own_derivatives(fn: Callable[..., Any], *args: Any) -> list[Derivative]:
    """The derivative of every equation that can have one, traced separately."""
    program = tracing.trace(fn, *args, signature=Signature(argnums=tuple(range(len(args)))))
    found = []
    for equation in program.equations:
        positions = tuple(
            position
            for position, atom in enumerate(equation.inputs)
            if isinstance(atom, int) and program.types[atom].dtype.startswith("float")
        )
        if positions:
            found += linearization._trace_derivatives([(equation, positions)])
    return found


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_extents_do_not_matter_to_elementwise_derivatives(name: str) -> None:
    shapes = [(2, 3), (5,), (1, 1, 4), (7, 1), (0, 3), ()]
    small, *others = [own_derivatives(ELEMENTWISE[name], jnp.ones(shape)) for shape in shapes]
    assert small
    assert others == [small] * len(others)


@pytest.mark.parametrize("fn", [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum])
@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1)])
def test_extents_do_not_matter_where_an_operand_is_repeated(
    fn: Callable[..., Any], argnums: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(x: Any, bias: Any, rest: Any) -> Any:
        # The same twice, except for the extents; the other way round it is another equation.
        parts = [fn(one, other).sum() for one, other in zip(x, bias, strict=True)]
        return sum(parts) + fn(bias[0], x[0]).sum() + rest

    shapes = [(2, 3), (4, 5), (7, 2)]
    x = [jnp.ones(shape) for shape in shapes]
    bias = [jnp.ones((1, shape[1])) for shape in shapes]
    program = tracing.trace(loss, x, bias, 0.0, signature=Signature(argnums=argnums))
    shared = linearize(program)
    monkeypatch.setattr(linearization, "_ELEMENTWISE", frozenset())
    assert linearize(program) == shared


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in EXAMPLES],
)
def test_sharing_changes_no_derivative(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = EXAMPLES[name]()
    options = {
        key: (value,) if key != "has_aux" and isinstance(value, int | str) else value
        for key, value in built.options.items()
    }
    program = tracing.trace(built.fn, *built.args, signature=Signature(**options), **built.kwargs)
    shared = linearize(program)
    monkeypatch.setattr(linearization, "_ELEMENTWISE", frozenset())
    monkeypatch.setattr(linearization, "_LINEAR", frozenset())
    monkeypatch.setattr(linearization, "_HANDING_ON", frozenset())
    assert linearize(program) == shared


def test_layers_of_any_width_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    original = linearization._trace_derivatives
    monkeypatch.setattr(
        linearization,
        "_trace_derivatives",
        lambda items: traced.append(len(items)) or original(items),
    )

    def stack(x: Any, *weights: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x.sum()

    widths = [3, 4, 5, 6, 7]
    weights = [jnp.ones(pair) for pair in itertools.pairwise(widths)]
    program = tracing.trace(stack, jnp.ones((2, 3)), *weights, signature=Signature(argnums=(1,)))
    linearize(program)
    # tanh, sum, and the product with only the weight or only the input.
    assert traced == [4]
