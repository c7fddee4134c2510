"""The rewritten program: how many checkpoints, what they keep, and who reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt import _jax_internals as internals
from remat_opt.device import Platform
from remat_opt.errors import PlanFileError, RewriteError
from remat_opt.operation import ArrayType
from remat_opt.program import tracing
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.schedule import Stage
from remat_opt.transform import equations, rewriting
from tests.programs import ones

pytestmark = pytest.mark.usefixtures("quick_search")

X, W = ones(4, 8), [ones(8, 8)] * 3


def layers(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


# Equations: 0 dot, 1 tanh, 2 dot, 3 tanh, 4 dot, 5 tanh, 6 sum
CHAIN = (
    Stage(roots=(0, 1), kept=(0,), checkpointed=True),
    Stage(roots=(2, 3), kept=(), checkpointed=True),
    Stage(roots=(4, 5, 6), kept=(), checkpointed=False),
)


def rewritten(
    stages: Sequence[Stage],
    fn: Callable[..., Any] = layers,
    *args: Any,
    platform: Platform = "tpu",
    **options: Any,
) -> tuple[Program, Callable[..., Any], Any]:
    """The program, its rewritten function, and the jaxpr of that."""
    args = args or (W, X)
    program = tracing.trace(fn, *args, signature=Signature(**options))
    run = rewriting.rewrite(program, stages, platform)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(
            program.output_tree, run(program.constant_values, jax.tree.leaves((args, {})))
        )

    return program, call, internals.make_jaxpr(call, *args)[0]


def checkpoints(closed: Any) -> list[Any]:
    return [
        equation
        for equation in internals.parts(closed)[3]
        if equation.primitive.name.startswith(("remat", "checkpoint"))
    ]


def body(checkpoint: Any) -> list[Any]:
    """The equations of a checkpoint, with those that run a kept equation in its place."""
    found = []
    for equation in internals.parts(checkpoint.params["jaxpr"])[3]:
        if equation.primitive.name == "custom_jvp_call":
            found += internals.parts(equation.params["call_jaxpr"])[3]
        else:
            found.append(equation)
    return found


def primitives(equations: Sequence[Any]) -> list[str]:
    return [equation.primitive.name for equation in equations]


def test_each_region_is_a_checkpoint_and_the_last_is_free() -> None:
    _, _, closed = rewritten(CHAIN)
    first, second, *rest = internals.parts(closed)[3]
    assert checkpoints(closed) == [first, second]
    assert primitives(body(first)) == ["dot_general", "name", "tanh"]
    assert primitives(body(second)) == ["dot_general", "tanh"]
    assert primitives(rest) == ["dot_general", "tanh", "reduce_sum"]
    internals.check(closed)


def test_readers_inside_a_region_read_the_named_value() -> None:
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(y) + jnp.cos(y) * y)

    stages = (Stage(roots=(0, 1, 2, 3, 4, 5), kept=(0,), checkpointed=True),)
    _, _, closed = rewritten(stages, loss, W[0], X)
    dot, name, *readers = body(*checkpoints(closed))
    assert name.params["name"] == equations.name_of(0, 0)
    assert name.invars == dot.outvars
    # The pair runs inside a separate equation, whose result is the named value.
    (kept, *_) = internals.parts(checkpoints(closed)[0].params["jaxpr"])[3]
    assert internals.parts(kept.params["call_jaxpr"])[4] == name.outvars
    assert sum(kept.outvars[0] in reader.invars for reader in readers) == 3


def test_later_regions_read_the_kept_value_too() -> None:
    _, _, closed = rewritten(
        (
            Stage(roots=(0,), kept=(0,), checkpointed=True),
            Stage(roots=(1, 2, 3, 4, 5, 6), kept=(), checkpointed=False),
        )
    )
    (first,) = checkpoints(closed)
    assert primitives(body(first)) == ["dot_general", "name"]
    (kept,) = internals.parts(first.params["jaxpr"])[3]
    assert internals.parts(first.params["jaxpr"])[4] == kept.outvars


def test_the_gradient_recomputes_what_is_not_kept_and_nothing_else() -> None:
    _, call, _ = rewritten(CHAIN)
    text = str(internals.make_jaxpr(jax.grad(call), W, X)[0])
    # Forward three; again those of the second region, as the first keeps its product.
    assert len(re.findall(r"= tanh", text)) == 3 + 2
    plain = str(internals.make_jaxpr(jax.grad(layers), W, X)[0])
    backward_products = len(re.findall(r"= dot_general", plain)) - 3
    assert len(re.findall(r"= dot_general", text)) == 3 + 1 + backward_products


def test_what_the_plan_keeps_is_not_run_again() -> None:
    def products(kept: bool) -> int:
        stages = (Stage(roots=(0, 1), kept=(0,) if kept else (), checkpointed=True), *CHAIN[1:])
        _, call, _ = rewritten(stages)
        return str(internals.make_jaxpr(jax.grad(call), W, X)[0]).count("= dot_general")

    assert products(kept=True) == products(kept=False) - 1


def test_a_derivative_that_reads_the_output_reads_the_kept_one() -> None:
    # JAX's rule for tanh reads the value it computes itself, not the named copy of it.
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    stages = (Stage(roots=(0, 1, 2), kept=(1,), checkpointed=True),)
    _, call, _ = rewritten(stages, loss, W[0], X)
    text = str(internals.make_jaxpr(jax.grad(call), W[0], X)[0])
    assert len(re.findall(r"= tanh", text)) == 1
    plain = str(internals.make_jaxpr(jax.grad(loss), W[0], X)[0])
    assert text.count("= dot_general") == plain.count("= dot_general")


def test_what_is_kept_without_a_derivative_is_not_run_again() -> None:
    # No derivative is taken along x: its name must not hide in a rule that is never called.
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x) * w))

    stages = (Stage(roots=(0, 1, 2, 3), kept=(0,), checkpointed=True),)
    _, call, _ = rewritten(stages, loss, X, X)
    text = str(internals.make_jaxpr(jax.grad(call), X, X)[0])
    assert len(re.findall(r"= tanh", text)) == 1
    # If it has one, its derivative reads what is kept, as before.
    _, call, _ = rewritten(stages, loss, X, X, argnums=(0, 1))
    text = str(internals.make_jaxpr(jax.grad(call, argnums=(0, 1)), X, X)[0])
    assert len(re.findall(r"= tanh", text)) == 1


@pytest.mark.parametrize(
    "select", [lambda y: jnp.max(y, 1), lambda y: jnp.min(y, 1), lambda y: jnp.maximum(y, 0.0)]
)
def test_a_kept_maximum_is_not_looked_for_among_what_was_computed_again(
    select: Callable[[jax.Array], jax.Array],
) -> None:
    # A compiler may round differently the second time; this function certainly does.
    runs = []

    def rounded(x: Any) -> Any:
        runs.append(x)
        return np.asarray(x) * np.float32(1 + len(runs) * 1e-6)

    @jax.custom_jvp
    def noisy(x: jax.Array) -> jax.Array:
        return jax.pure_callback(rounded, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    noisy.defjvp(lambda primals, tangents: (noisy(*primals), *tangents))

    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(select(noisy(x)))

    x = jnp.arange(1.0, 13).reshape(3, 4)
    program = tracing.trace(fn, x)
    last = len(program.equations) - 1
    stages = (
        Stage(roots=tuple(range(last)), kept=(last - 1,), checkpointed=True),
        Stage(roots=(last,), kept=(), checkpointed=False),
    )
    _, run, _ = rewritten(stages, fn, x)
    expected = jax.grad(lambda x: jnp.sum(select(x)))(x)
    found = jax.grad(run)(x)
    assert len(runs) == 2
    assert found.tolist() == expected.tolist()


def test_a_rule_that_changes_what_the_primitive_makes() -> None:
    # The primitive leaves the upper triangle as it is; its derivative rule clears it.
    def loss(w):
        return jnp.sum(jnp.linalg.cholesky(w @ w.T + 3 * jnp.eye(8)))

    program = tracing.trace(loss, W[0])
    order = [equation.operation.primitive for equation in program.equations]
    everything = tuple(range(len(order)))
    stages = (Stage(roots=everything, kept=(order.index("cholesky"),), checkpointed=True),)
    w = jnp.arange(64.0).reshape(8, 8) / 64
    _, call, _ = rewritten(stages, loss, w)
    found, expected = (jax.jit(jax.grad(fn))(w) for fn in (call, loss))
    assert jnp.allclose(found, expected, rtol=1e-4)
    text = str(internals.make_jaxpr(jax.grad(call), w)[0])
    assert len(re.findall(r"= cholesky", text)) == 1


def test_fused_equations_are_emitted_again_where_they_are_read() -> None:
    def loss(w, x):
        shared = jnp.exp(x)  # equation 0 is not a vertex
        return jnp.sum(shared @ w) + jnp.sum(jnp.sin(shared))

    program = tracing.trace(loss, W[0], X)
    order = [equation.operation.primitive for equation in program.equations]
    assert order == ["exp", "dot_general", "reduce_sum", "sin", "reduce_sum", "add"]
    stages = (
        Stage(roots=(1,), kept=(), checkpointed=True),
        Stage(roots=(2, 4, 5), kept=(), checkpointed=False),
    )
    _, _, closed = rewritten(stages, loss, W[0], X)
    (region,) = checkpoints(closed)
    assert primitives(body(region)) == ["exp", "dot_general"]
    assert primitives(internals.parts(closed)[3])[1:] == [
        "exp",
        "reduce_sum",
        "sin",
        "reduce_sum",
        "add",
    ]
    assert len(region.outvars) == 1


def test_outputs_of_another_shape_come_after_the_last_region() -> None:
    def loss(w, x):
        y = x @ w
        return jnp.sum(y), y.reshape(-1)

    stages = (Stage(roots=(0, 1), kept=(), checkpointed=True),)
    _, _, closed = rewritten(stages, loss, W[0], X, has_aux=True)
    assert primitives(internals.parts(closed)[3])[1:] == ["reshape"]
    # Without any stage the program is unchanged.
    _, _, closed = rewritten((), loss, W[0], X, has_aux=True)
    assert sorted(primitives(internals.parts(closed)[3])) == [
        "dot_general",
        "reduce_sum",
        "reshape",
    ]


def test_side_effects_are_never_lost() -> None:
    def loss(w, x):
        jax.debug.print("{}", x[0, 0])
        return jnp.sum(x @ w)

    _, _, closed = rewritten((), loss, W[0], X)
    assert sum(internals.has_effects(e) for e in internals.parts(closed)[3]) == 1


def test_names_scopes_and_lines_survive() -> None:
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.tanh(x @ w))

    stages = (Stage(roots=(0, 1, 2), kept=(), checkpointed=True),)
    program, _, closed = rewritten(stages, loss, W[0], X)
    inside = zip(body(*checkpoints(closed)), program.equations, strict=True)
    for number, (equation, original) in enumerate(inside):
        assert original.module == "layer"
        assert str(internals.name_stack_of(equation)) == f"remat_eq{number}/layer"
        assert internals.source_line(equation).startswith("test_rewriting.py:")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            (Stage(roots=(9,), kept=(), checkpointed=True),),
            "Region 0 of the plan names equation 9, but the program has 7. Make the plan again.",
        ),
        (
            (CHAIN[0], Stage(roots=(1, 2), kept=(), checkpointed=True)),
            "The plan computes equation 1 in two regions. Make the plan again.",
        ),
        (
            (Stage(roots=(0,), kept=(1,), checkpointed=True),),
            "Region 0 of the plan keeps equation 1, which it does not compute. Make the plan "
            "again.",
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        rewritten(stages)
    assert str(caught.value) == message


def test_side_effects_under_a_checkpoint_are_refused() -> None:
    def loss(w):
        jax.debug.print("{}", w)
        return w * 2

    with pytest.raises(
        PlanFileError, match=r"recomputes equation 0, a debug_\w+ with side effects"
    ):
        rewritten((Stage(roots=(0, 1), kept=(), checkpointed=True),), loss, 1.0)


def test_a_result_of_another_type_is_a_fault_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "array_type", lambda _: ArrayType(shape=(2,), dtype="int8"))
    with pytest.raises(RewriteError) as caught:
        rewritten(CHAIN)
    assert str(caught.value) == (
        "Rewriting 'layers' turned a float32[4, 8] into a int8[2]. This is a fault of remat_opt: "
        "please report it with the function."
    )


def pooled(kernel: jax.Array, x: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    window = ((1, 3, 3, 1), (1, 2, 2, 1))
    return jnp.sum(jax.lax.reduce_window(jax.nn.relu(y), -jnp.inf, jax.lax.max, *window, "VALID"))


@pytest.mark.parametrize("kept", [(), (1,)])
def test_for_nvidia_an_activation_before_a_pooling_has_zeros_of_its_own(
    kept: tuple[int, ...],
) -> None:
    args = jnp.ones((3, 3, 2, 2)), jnp.linspace(-1.0, 1.0, 2 * 9 * 9 * 2).reshape(2, 9, 9, 2)
    stages = (
        Stage(roots=(0, 1, 2), kept=kept, checkpointed=True),
        Stage(roots=(3,), kept=(), checkpointed=False),
    )
    program, call, _ = rewritten(stages, pooled, *args, platform="cuda")
    primitives = [equation.operation.primitive for equation in program.equations]
    assert primitives[1:3] == ["custom_jvp_call", "reduce_window_max"]
    shared = rewriting.rewrite(program, stages, "cuda", {"zeros_apart"})
    with_shared = jax.make_jaxpr(jax.grad(lambda *args: shared((), args)[0]))(*args)
    assert barriers(jax.make_jaxpr(jax.grad(call))(*args)) > barriers(with_shared)
    _, on_a_tpu, _ = rewritten(stages, pooled, *args, platform="tpu")
    assert barriers(jax.make_jaxpr(jax.grad(on_a_tpu))(*args)) == 0
    for found, expected in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(call, argnums=(0, 1)))(*args)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(pooled, argnums=(0, 1)))(*args)),
        strict=True,
    ):
        assert jnp.array_equal(found, expected)


def barriers(closed: Any) -> int:
    return len(re.findall("optimization_barrier", str(closed)))


# The first product reads two arguments, the second an argument and a value computed from it.
@pytest.mark.parametrize("kept", [(), (0,), (2,), (0, 2)])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_for_nvidia_gradients_of_products_are_not_put_off(
    kept: tuple[int, ...], checkpointed: bool
) -> None:
    stages = (
        Stage(roots=(0, 1, 2, 3), kept=kept if checkpointed else (), checkpointed=checkpointed),
        Stage(roots=(4, 5, 6), kept=(), checkpointed=False),
    )
    args = W, X
    # Those of all products, if there is a checkpoint anywhere.
    for platform, expected in (("cuda", 3 if checkpointed else 0), ("tpu", 0)):
        _, call, closed = rewritten(stages, layers, *args, platform=platform, argnums=(0, 1))
        # Forward, the product reads what it read before.
        assert barriers(closed) == 0
        gradient = jax.grad(call, argnums=(0, 1))
        assert barriers(jax.make_jaxpr(gradient)(*args)) == expected
        tangents = jax.jvp(call, args, args)[1]
        assert jnp.allclose(tangents, jax.jvp(layers, args, args)[1], rtol=1e-6)
        for found, right in zip(
            jax.tree.leaves(gradient(*args)),
            jax.tree.leaves(jax.grad(layers, argnums=(0, 1))(*args)),
            strict=True,
        ):
            assert jnp.allclose(found, right, rtol=1e-6)


def loop_and_head(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """Equations: 0 scan, 1 product, 2 tanh, 3 sum."""
    layers, head = weights
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
    return jnp.sum(jnp.tanh(x @ head))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 fails on such barriers")
@pytest.mark.parametrize("regions", [((0, 1, 2, 3),), ((0,), (1, 2, 3))])
def test_for_tpu_gradients_come_before_the_loop_that_runs_backward(
    regions: tuple[tuple[int, ...], ...],
) -> None:
    args = (jnp.ones((3, 8, 8)), jnp.ones((8, 5))), jnp.ones((4, 8))
    stages = [Stage(roots=roots, kept=(), checkpointed=False) for roots in regions]
    for platform in ("tpu", "cpu"):
        _, call, _ = rewritten(stages, loop_and_head, *args, platform=platform, argnums=(0, 1))
        gradient = jax.grad(call)
        equations = jax.make_jaxpr(gradient)(*args).eqns
        (backward,) = (
            n for n, e in enumerate(equations) if e.primitive.name == "scan" and e.params["reverse"]
        )
        tied = [
            {variable.aval.shape for variable in equation.invars}
            for equation in equations[:backward]
            if equation.primitive.name == "optimization_barrier"
        ]
        # The head's gradient and the cotangent that enters the loop.
        assert ({(8, 5), (4, 8)} in tied) == (platform == "tpu"), platform
        for found, right in zip(gradient(*args), jax.grad(loop_and_head)(*args), strict=True):
            assert jnp.allclose(found, right, rtol=1e-6)


def test_what_has_no_cotangent_gets_none_where_gradients_come_before_a_loop() -> None:
    """A loop that only a derivative rule reads, which passes nothing on to it, is not run backward.

    Zeros that it would pass on meet the slope of a norm at zero, which is infinite.
    """

    @jax.custom_jvp
    def gated(gate: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.tanh(gate) * value

    @gated.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return gated(*primals), jnp.tanh(primals[0]) * tangents[1]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        nothing = jnp.sin((x - x) @ w)
        start = nothing + jnp.linalg.norm(nothing)
        gate = jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i * 0.1, start)
        return jnp.sum(jnp.cos(gated(gate, jnp.sin(x @ w)) @ w) ** 2)

    w, x = jnp.eye(8) / 2, jnp.ones((8, 8))
    planned = remat_opt.optimal_remat(loss, device="v5e", errors="raise")
    np.testing.assert_allclose(jax.grad(planned)(w, x), jax.grad(loss)(w, x), rtol=1e-5)


@pytest.mark.parametrize("kept", [(), (0,)])
def test_for_nvidia_a_pooling_without_overlap_waits_for_its_cotangent(
    kept: tuple[int, ...],
) -> None:
    def halved(x: jax.Array) -> jax.Array:
        window = ((1, 2, 2, 1), (1, 2, 2, 1))
        return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window, "VALID") ** 2)

    x = jnp.linspace(-1.0, 1.0, 2 * 8 * 8 * 2).reshape(2, 8, 8, 2)
    stages = (Stage(roots=(0, 1, 2), kept=kept, checkpointed=False),)
    for platform, expected in (("cuda", 1), ("cpu", 0), ("tpu", 0)):
        program, call, _ = rewritten(stages, halved, x, platform=platform)
        assert program.equations[0].operation.primitive == "reduce_window_max"
        closed = jax.make_jaxpr(jax.grad(call))(x)
        assert len(checkpoints(closed)) == expected
        assert jnp.array_equal(jax.grad(call)(x), jax.grad(halved)(x))


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("fill", jnp.float32),
        *(
            pytest.param(mode, dtype, marks=[pytest.mark.slow, pytest.mark.versions])
            for mode in ("fill", "clip", "promise_in_bounds")
            for dtype in (jnp.float32, jnp.bfloat16)
            if (mode, dtype) != ("fill", jnp.float32)
        ),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_for_nvidia_and_tpus_the_gradient_of_picking_from_rows_is_elementwise(
    mode: Any, dtype: Any, kept: bool
) -> None:
    outside = {"fill": -1, "clip": 7, "promise_in_bounds": 1}
    labels = jnp.array([[0, 4, outside[mode]], [3, 2, 1]])[..., None]

    def loss(x):
        y = jnp.sin(x)
        picked = jnp.take_along_axis(y, labels, axis=-1, mode=mode)
        return jnp.mean(jax.nn.logsumexp(y, axis=-1) - picked[..., 0])

    x = jnp.linspace(-1.0, 2.0, 2 * 3 * 5, dtype=dtype).reshape(2, 3, 5)
    program = tracing.trace(loss, x)
    order = [equation.operation.primitive for equation in program.equations]
    roots = tuple(range(len(order)))
    stages = (Stage(roots=roots, kept=(order.index("gather"),) * kept, checkpointed=True),)
    for platform, scatters in (("cuda", 0), ("cpu", 1), ("tpu", 0)):
        _, call, _ = rewritten(stages, loss, x, platform=platform)
        gradient = jax.make_jaxpr(jax.grad(call))(x)
        assert len(re.findall(r"= scatter-add\[", str(gradient))) == scatters
        (here, slope), (there, expected) = (
            jax.jit(jax.value_and_grad(fn))(x) for fn in (call, loss)
        )
        assert here == there
        assert jnp.array_equal(slope, expected)
        found, expected = (
            jax.jit(lambda x, fn=fn: jax.jvp(fn, (x,), (x,))[1])(x) for fn in (call, loss)
        )
        assert jnp.allclose(found, expected, rtol=20 * jnp.finfo(dtype).eps)
        batched = jnp.stack([x, 2 * x])
        assert jnp.array_equal(*(jax.jit(jax.vmap(jax.grad(fn)))(batched) for fn in (call, loss)))


def test_for_a_tpu_picking_from_rows_is_a_sum_over_them() -> None:
    """So no float32 logits are needed; value and gradient are the same to the last bit."""

    def loss(x):
        y = jnp.sin(x).astype(jnp.bfloat16).reshape(6, 5).astype(jnp.float32)
        picked = jnp.take_along_axis(y, jnp.arange(6)[:, None] % 5, axis=-1)
        return jnp.mean(jax.nn.logsumexp(y, axis=-1) - picked[..., 0])

    x = jnp.linspace(-1.0, 2.0, 2 * 3 * 5).reshape(2, 3, 5)
    program = tracing.trace(loss, x)
    stages = (Stage(roots=tuple(range(len(program.equations))), kept=(), checkpointed=True),)
    _, call, _ = rewritten(stages, loss, x, platform="tpu")
    before, after = (str(jax.make_jaxpr(jax.grad(fn))(x)) for fn in (loss, call))
    assert "gather[" in before
    assert "gather[" not in after
    (here, slope), (there, expected) = (jax.jit(jax.value_and_grad(fn))(x) for fn in (call, loss))
    assert here == there
    assert jnp.array_equal(slope, expected)


def own_barriers(closed: Any) -> list[Any]:
    """The barriers of a program, each with our derivative rule."""
    found = []
    for equation in internals.parts(closed)[3]:
        if equation.primitive.name == "custom_jvp_call":
            found += internals.parts(equation.params["call_jaxpr"])[3]
    return [e for e in found if e.primitive.name == "optimization_barrier"]


def test_on_a_cpu_what_a_region_hands_on_is_stored() -> None:
    """Behind a barrier nothing is computed from the region's inputs, however cheap."""

    def loss(w, x):
        y = jnp.tanh(x @ w) + x
        return jnp.sum(jnp.sin(y) @ w)

    args = W[0], X
    program = tracing.trace(loss, *args)
    order = [equation.operation.primitive for equation in program.equations]
    first = (order.index("dot_general"), order.index("add"))
    rest = tuple(n for n in range(len(order)) if n > first[1])
    stages = (
        Stage(roots=first, kept=(), checkpointed=True),
        Stage(roots=rest, kept=(), checkpointed=False),
    )
    for platform, expected in (("cpu", 1), ("tpu", 0)):
        _, call, closed = rewritten(stages, loss, *args, platform=platform)
        found = own_barriers(closed)
        alone = [e for e in found if [read.aval.shape for read in e.invars] == [(4, 8)]]
        assert len(alone) == expected
        # Not the last region's outputs; and nothing changes.
        assert jnp.allclose(call(*args), loss(*args), rtol=1e-6)


def test_a_product_waits_for_what_its_partner_reads() -> None:
    """A recurrent layer: its input is not multiplied before the state exists."""

    def loss(w, u, x):
        state = jnp.zeros_like(x[0])
        for given in x:
            state = jnp.tanh(given @ w + state @ u)
        return jnp.sum(state)

    args = jnp.full((8, 8), 0.1), jnp.full((8, 8), -0.2), jnp.arange(96.0).reshape(3, 4, 8) / 96
    program = tracing.trace(loss, *args)
    order = [equation.operation.primitive for equation in program.equations]
    roots = tuple(n for n, primitive in enumerate(order) if primitive in ("dot_general", "tanh"))
    assert len(roots) == 9
    for platform, checkpointed, expected in (
        ("cuda", False, 3),
        ("cuda", True, 0),
        ("tpu", False, 0),
    ):
        stages = (
            Stage(roots=roots, kept=(), checkpointed=checkpointed),
            Stage(roots=(order.index("reduce_sum"),), kept=(), checkpointed=False),
        )
        _, call, closed = rewritten(stages, loss, *args, platform=platform)
        # The input, the weight, the state; a stored sum is alone.
        found = [
            e
            for e in internals.parts(closed)[3]
            if e.primitive.name == "custom_jvp_call" and len(e.outvars) == 3
        ]
        assert len(found) == expected
        for one, other in zip(
            jax.grad(call, argnums=(0, 1))(*args), jax.grad(loss, (0, 1))(*args), strict=True
        ):
            assert jnp.allclose(one, other, rtol=1e-5)


def test_products_that_are_summed_add_up_both_gradients_in_turn() -> None:
    """Two recurrent layers: what the upper one reads and its state pass one barrier."""

    def loss(weights, x):
        w, u = weights
        state = above = jnp.zeros_like(x[0])
        for given in x:
            state = jnp.tanh(given @ w + state @ u)
            above = jnp.tanh(state @ w + above @ u)
        return jnp.sum(above)

    weights = jnp.full((8, 8), 0.1), jnp.full((8, 8), -0.2)
    args = weights, jnp.arange(96.0).reshape(3, 4, 8) / 96
    program = tracing.trace(loss, *args)
    order = [equation.operation.primitive for equation in program.equations]
    roots = tuple(n for n, primitive in enumerate(order) if primitive in ("dot_general", "tanh"))
    stages = (
        Stage(roots=roots, kept=(), checkpointed=False),
        Stage(roots=(order.index("reduce_sum"),), kept=(), checkpointed=False),
    )
    for platform, expected in (("cuda", 2), ("tpu", 0)):
        _, call, closed = rewritten(stages, loss, *args, platform=platform)
        found = [
            [read.aval.shape for read in e.invars]
            for e in internals.parts(closed)[3]
            if e.primitive.name == "custom_jvp_call" and len(e.outvars) == 4
        ]
        # The first state, zeros, has no cotangent.
        assert found == [[(4, 8), (8, 8), (4, 8), (8, 8)]] * expected
        for one, other in zip(jax.grad(call)(*args), jax.grad(loss)(*args), strict=True):
            assert jnp.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_rule_that_needs_no_cotangent_runs_under_a_checkpoint(*, inside: bool) -> None:
    """As in Flax's FP8 layers, whose rule returns new scaling factors as gradients."""

    @jax.custom_vjp
    def observe(x, most):
        return x / (1 + most)

    observe.defvjp(
        lambda x, most: (observe(x, most), jnp.max(jnp.abs(x))), lambda new, _: (None, new)
    )

    @jax.custom_vjp
    def dot(x, seen, w):
        return seen @ w

    dot.defvjp(
        lambda x, seen, w: (seen @ w, (seen, w)), lambda r, g: (g @ r[1].T, None, r[0].T @ g)
    )

    def loss(most, x):
        return jnp.sum(dot(x, observe(x, most), x))

    args = jnp.float32(0.5), jnp.full((4, 4), 3.0)
    program = tracing.trace(loss, *args)
    order = [equation.operation.primitive for equation in program.equations]
    first, last = order.index("custom_vjp_call"), len(order) - 1
    alone = Stage(roots=(first,), kept=(), checkpointed=True)
    rest = tuple(n for n, primitive in enumerate(order) if n > first and primitive != "mul")
    assert last in rest
    stages = (
        (
            Stage(
                roots=(first, *rest),
                kept=(),
                checkpointed=True,
                inside=(alone, Stage(roots=rest, kept=(), checkpointed=True)),
            ),
        )
        if inside
        else (alone, Stage(roots=rest, kept=(), checkpointed=False))
    )
    _, call, _ = rewritten(stages, loss, *args)
    assert jax.grad(call)(*args) == jax.grad(loss)(*args) == 3.0


def test_cotangents_are_summed_region_by_region() -> None:
    """What several regions read reaches each later one together with a region's outputs."""

    def loss(w, x):
        y = x @ w
        return sum(jnp.sum(jnp.sin(y * n) @ w) for n in (1.0, 2.0, 3.0))

    args = W[0], X
    program = tracing.trace(loss, *args)
    order = [equation.operation.primitive for equation in program.equations]
    products = [n for n, primitive in enumerate(order) if primitive == "dot_general"]
    sums = [n for n, primitive in enumerate(order) if primitive == "reduce_sum"]
    assert (len(products), len(sums)) == (4, 3)
    rest = tuple(n for n in range(len(order)) if n > sums[-1] or order[n] == "add")
    stages = (
        Stage(roots=(products[0],), kept=(), checkpointed=True),
        *(
            Stage(roots=(product, total), kept=(), checkpointed=True)
            for product, total in zip(products[1:], sums, strict=True)
        ),
        Stage(roots=rest, kept=(), checkpointed=False),
    )
    _, call, closed = rewritten(stages, loss, *args)
    found = own_barriers(closed)
    # The first product and the weight, each with the outputs. Not x: it is not differentiated.
    assert [sorted(read.aval.shape for read in e.invars) for e in found] == [
        [(4, 8), (8, 8)],
        [(), (4, 8)],
        [(), (8, 8)],
        [(), (4, 8)],
        [(), (8, 8)],
    ]
    assert jnp.allclose(jax.grad(call)(*args), jax.grad(loss)(*args), rtol=1e-6)


def test_the_parts_of_a_weights_gradient_are_added_one_by_one() -> None:
    """A weight reaches each product after the first together with the other operand."""

    def recurrent(w, x):
        state = jnp.zeros_like(x)
        for _ in range(4):
            state = jnp.tanh(x + state @ w)
        return jnp.sum(state)

    args = W[0], X
    program = tracing.trace(recurrent, *args)
    order = range(len(program.equations))
    for checkpointed in (True, False):
        stages = (Stage(roots=tuple(order), kept=(), checkpointed=checkpointed),)
        _, call, closed = rewritten(stages, recurrent, *args)
        assert barriers(closed) == 3
        assert jnp.allclose(jax.grad(call)(*args), jax.grad(recurrent)(*args), rtol=1e-6)

    # One product for each weight: nothing to add up.
    _, _, closed = rewritten((Stage(roots=tuple(range(7)), kept=(), checkpointed=False),))
    assert "optimization_barrier" not in str(closed)


def test_what_has_no_cotangent_gets_none_where_parts_are_added() -> None:
    """A batch that is repeatedly multiplied with the same weight."""

    def pooled(w, xs):
        return sum(jnp.sum(jnp.tanh(x @ w)) for x in xs)

    args = W[0], [X] * 4
    every = tuple(range(len(tracing.trace(pooled, *args).equations)))
    for checkpointed in (True, False):
        stages = (Stage(roots=every, kept=(), checkpointed=checkpointed),)
        _, call, _ = rewritten(stages, pooled, *args)
        gradient = jax.make_jaxpr(jax.grad(call))(*args)
        # The first three parts wait for the ones after them, only backward.
        assert barriers(gradient) == 3
        # The last one waits for nothing, and so for no array of zeros.
        zeros = rf"f32\[{W[0].shape[0]},{W[0].shape[1]}\] = broadcast_in_dim"
        assert not re.search(zeros, str(gradient))
        products = len(re.findall("dot_general", str(gradient)))
        assert products == (12 if checkpointed else 8)
        assert jnp.allclose(jax.grad(call)(*args), jax.grad(pooled)(*args), rtol=1e-6)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_for_nvidia_a_sum_of_products_is_one_array(platform: Platform) -> None:
    """Its cotangent is unchanged: only forward is it kept from being computed elsewhere."""

    def gated(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        first, second = x @ weights[0], jnp.sin(x) @ weights[1]
        # The last product is read twice, so its sum is not an array that would replace it.
        third = x @ weights[2]
        return jnp.sum(jnp.tanh(first + second) + third + jnp.cos(third))

    args = [jnp.full((8, 8), 0.1 * n) for n in (1, 2, 3)], jnp.ones((4, 8))
    every = tuple(range(len(tracing.trace(gated, *args).equations)))
    stages = (Stage(roots=every, kept=(), checkpointed=False),)
    _, planned, forward = rewritten(stages, gated, *args, platform=platform)
    gradient = jax.make_jaxpr(jax.grad(planned))(*args)
    assert barriers(forward) == barriers(gradient) == (1 if platform == "cuda" else 0)
    equations = internals.parts(forward)[3]
    for one in equations:
        if one.primitive.name == "custom_jvp_call":
            (read,) = one.invars
            (made,) = [e for e in equations if read in e.outvars]
            assert made.primitive.name == "add"
    found, plain = jax.grad(planned)(*args), jax.grad(gated)(*args)
    assert all(jnp.array_equal(one, other) for one, other in zip(found, plain, strict=True))
