"""The decorated function against the undecorated one: same values, same derivatives, same types.

Every program of ``programs.EXAMPLES`` is judged in float64, for plans that the planner makes
and for chains of regions that no sane planner would make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import remat_opt
from remat_opt import _jax_internals as internals
from remat_opt.compilers.model import computes_nothing
from remat_opt.program import tracing
from remat_opt.program.record import Program
from remat_opt.schedule import Stage
from remat_opt.transform import rewriting
from tests.compiler_graphs import model_of
from tests.programs import DEAR, EXAMPLES, Example, array
from tests.rewritten import always_rewritten

pytestmark = pytest.mark.usefixtures("quick_search")

ONLY_FORWARD = {"loop_differentiated_forward"}


@pytest.fixture(autouse=True)
def _rewritten() -> Iterator[None]:
    with always_rewritten():
        yield


#: One for each thing that can go wrong, for tests that compile much.
CORE = {
    *("branches", "closure_constants", "custom_jvp", "custom_vjp", "identity"),
    *("inner_checkpoint", "integer_and_boolean_outputs", "keyword_arguments", "mlp"),
    *("outputs_that_are_arguments_constants_reshapes", "recurrent_scan", "several_argnums"),
    *("stopped_gradient", "weak_types"),
}
#: Those of them that take longest.
LOOPS = {"branches", "inner_checkpoint", "recurrent_scan"}


def examples(names: Iterable[str], *, fast: Set[str], versions: bool = False) -> list[Any]:
    """Names to go through, most of them marked slow; if asked, each JAX takes all of them."""
    slow = [pytest.mark.slow, *[pytest.mark.versions] * versions]
    return [name if name in fast else pytest.param(name, marks=slow) for name in names]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@contextlib.contextmanager
def remat3(value: bool) -> Iterator[None]:
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has no jax_remat3")
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", value)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def assert_same(
    expected: Any, found: Any, tolerance: float, *, compare_weak_types: bool = True
) -> None:
    """Same tree, shapes, dtypes and weak types, and values within the tolerance."""
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    found_leaves, found_tree = jax.tree.flatten(found)
    assert found_tree == expected_tree
    for one, other in zip(expected_leaves, found_leaves, strict=True):
        kinds = jax.typeof(one), jax.typeof(other)
        if not compare_weak_types:
            kinds = tuple(kind.strip_weak_type() for kind in kinds)
        assert kinds[1] == kinds[0]
        if isinstance(one, bool | int | float | complex):
            assert type(other) is type(one)
            one, other = np.asarray(one), np.asarray(other)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if one.dtype == jax.dtypes.float0:
            continue
        if jnp.issubdtype(one.dtype, jnp.inexact):
            one, other = np.asarray(one, np.complex128), np.asarray(other, np.complex128)
            limit = tolerance * max(1.0, np.abs(one).max(initial=0.0))
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=limit)
        else:
            np.testing.assert_array_equal(np.asarray(other), np.asarray(one))


def decorated(example: Example, **objective: Any) -> Any:
    return remat_opt.optimal_remat(example.fn, device="cpu", **example.options, **objective)


def jitted(example: Example, make: Callable[..., Any], fn: Callable[..., Any]) -> Any:
    """``make(fn)``, jitted, at the example's arguments."""
    static = {key: example.options.get(key) for key in ("static_argnums", "static_argnames")}
    return jax.jit(make(fn), **static)(*example.args, **example.kwargs)


@functools.cache
def made(name: str) -> Example:
    return EXAMPLES[name]()


@functools.cache
def plain(name: str) -> Any:
    """Values and gradients of the undecorated function, compiled once for all tests."""
    return jitted(made(name), value_and_grad(made(name)), made(name).fn)


def value_and_grad(example: Example) -> Callable[..., Any]:
    if example.fn.__qualname__.split(".")[0] in ONLY_FORWARD:
        return lambda fn: fn
    return functools.partial(jax.value_and_grad, argnums=example.argnums, has_aux=example.has_aux)


def loss_alone(example: Example, fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The loss as a function of its differentiated arguments, and those."""
    numbers = (example.argnums,) if isinstance(example.argnums, int) else example.argnums

    def loss(*varying: Any) -> Any:
        args = list(example.args)
        for number, value in zip(numbers, varying, strict=True):
            args[number] = value
        result = fn(*args, **example.kwargs)
        return result[0] if example.has_aux else result

    return loss, [example.args[number] for number in numbers]


def everything(example: Example, fn: Callable[..., Any]) -> dict[str, Any]:
    """The results of all transformations that JAX can take of the example."""
    loss, primals = loss_alone(example, fn)
    primals = jax.tree.map(jnp.asarray, primals)
    directions = jax.tree.map(
        lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape).astype(leaf.dtype), primals
    )
    reverse = example.fn.__qualname__.split(".")[0] not in ONLY_FORWARD
    results = {}
    if reverse:
        value, pullback = jax.vjp(loss, *primals)
        results["vjp"] = pullback(jnp.full(value.shape, 1.5, value.dtype))
        gradient = jax.grad(loss, argnums=tuple(range(len(primals))))
    if example.forward_mode:
        results["jvp"] = jax.jvp(loss, primals, directions)
        value, tangent = jax.linearize(loss, *primals)
        results["linearize"] = value, tangent(*directions)
    if reverse and example.twice and example.forward_mode:
        results["forward over reverse"] = jax.jvp(gradient, primals, directions)
    elif reverse and example.twice:

        def along(*points: Any) -> Any:
            slopes = zip(
                jax.tree.leaves(gradient(*points)), jax.tree.leaves(directions), strict=True
            )
            return sum(jnp.vdot(slope, direction).real for slope, direction in slopes)

        results["reverse over reverse"] = jax.grad(along)(*primals)
    if example.batched:
        stacked = jax.tree.map(lambda p, d: jnp.stack([p, p + 0.1 * d, p]), primals, directions)
        results["vmap"] = jax.vmap(loss)(*stacked)
        if reverse:
            results["vmap of gradient"] = jax.vmap(gradient)(*stacked)
    return results


# --- The planner's plans ------------------------------------------------------------------

OBJECTIVES: dict[str, dict[str, Any]] = {
    "least memory": {},
    "budget": {"budget": 0.8},
    "max_overhead": {"max_overhead": 0.1},
    "flops": {"overhead": "flops"},
}


def check_value_and_gradient(name: str, objectives: Iterable[dict[str, Any]]) -> None:
    example, expected = made(name), plain(name)
    stages_seen = set()
    for objective in objectives:
        fn = decorated(example, **objective)
        try:
            stages = fn.plan(*example.args, **example.kwargs).stages
        except remat_opt.BudgetError:
            continue  # not every tiny program has a plan within 80 %
        if stages not in stages_seen:
            stages_seen.add(stages)
            found = jitted(example, value_and_grad(example), fn)
            assert_same(expected, found, example.tolerance)


@pytest.mark.parametrize("name", examples(EXAMPLES, fast=CORE - LOOPS, versions=True))
def test_value_and_gradient_for_every_objective(name: str) -> None:
    check_value_and_gradient(name, OBJECTIVES.values())


@pytest.mark.parametrize("name", sorted((EXAMPLES.keys() - DEAR - CORE) | LOOPS))
def test_value_and_gradient_for_least_memory(name: str) -> None:
    check_value_and_gradient(name, [OBJECTIVES["least memory"]])


@pytest.mark.parametrize(
    "name",
    [
        *examples(sorted(EXAMPLES.keys() - LOOPS), fast=CORE),
        *examples(sorted(LOOPS), fast=set(), versions=True),
    ],
)
def test_all_transformations(name: str) -> None:
    example = made(name)
    expected = jax.jit(lambda: everything(example, example.fn))()
    found = jax.jit(lambda: everything(example, decorated(example)))()
    # A tangent's weak type is that of jax.jit(loss): it can differ where nothing is traced.
    assert_same(expected, found, 10 * example.tolerance, compare_weak_types=False)


# If nothing is jitted, every operation is compiled by itself.
@pytest.mark.parametrize(
    "name",
    examples(
        sorted(CORE), fast={"closure_constants", "custom_vjp", "keyword_arguments", "weak_types"}
    ),
)
def test_without_jit(name: str) -> None:
    example = made(name)
    expected = value_and_grad(example)(example.fn)(*example.args, **example.kwargs)
    fn = decorated(example)
    found = value_and_grad(example)(fn)(*example.args, **example.kwargs)
    assert_same(expected, found, example.tolerance)
    expected = jax.tree.map(jnp.asarray, example.fn(*example.args, **example.kwargs))
    assert_same(expected, fn(*example.args, **example.kwargs), example.tolerance)


# --- Plans that no planner would make -----------------------------------------------------


def program_of(example: Example) -> tuple[Program, tracing.Call]:
    signature = remat_opt.options.signature_of(**example.options)
    call = tracing.bind_static(example.fn, signature, example.args, dict(example.kwargs))
    return tracing.trace_call(call, has_aux=signature.has_aux), call


def staged(example: Example, choose: Callable[[Program], Sequence[Stage]]) -> Example:
    """The example with its loss rewritten by hand-made stages, traced again at every call."""

    def fn(*args: Any, **kwargs: Any) -> Any:
        signature = remat_opt.options.signature_of(**example.options)
        call = tracing.bind_static(example.fn, signature, args, kwargs)
        program = tracing.trace_call(call, has_aux=signature.has_aux)
        run = rewriting.rewrite(program, choose(program), "cuda")
        flat = run(program.constant_values, jax.tree.leaves((call.args, call.kwargs)))
        return jax.tree.unflatten(program.output_tree, flat)

    return dataclasses.replace(example, fn=functools.wraps(example.fn)(fn))


def chain(
    program: Program, roots: Sequence[int], ends: Sequence[bool], kept: Sequence[bool]
) -> list[Stage]:
    """Roots in order; a region ends where ``ends`` says so, and around each side effect."""
    stages, current = [], []

    def close() -> None:
        if current:
            roots_here = tuple(root for root, _ in current)
            names = tuple(root for root, keep in current if keep)
            stages.append(Stage(roots=roots_here, kept=names, checkpointed=True))
            current.clear()

    for root, end, keep in zip(roots, ends, kept, strict=True):
        if program.equations[root].effects:
            close()
            stages.append(Stage(roots=(root,), kept=(), checkpointed=False))
            continue
        current.append((root, keep))
        if end:
            close()
    close()
    return stages


def roots_of(program: Program) -> tuple[int, ...]:
    if computes_nothing(program):
        return ()
    return model_of(program, "cpu").roots


def each_alone(program: Program) -> list[Stage]:
    """Every vertex its own region, nothing kept."""
    roots = roots_of(program)
    return chain(program, roots, [True] * len(roots), [False] * len(roots))


def all_together(program: Program) -> list[Stage]:
    """One checkpoint around everything, each equation a vertex, every third kept."""
    roots = range(len(program.equations))
    return chain(program, roots, [False] * len(roots), [root % 3 == 0 for root in roots])


def nested(program: Program) -> list[Stage]:
    """The first half in one region with regions inside, and so on in each of them."""
    return list(
        itertools.chain.from_iterable(
            [one] if not one.checkpointed else halves(one.roots) for one in all_together(program)
        )
    )


def halves(roots: Sequence[int]) -> list[Stage]:
    if len(roots) < 4:
        return [Stage(roots=tuple(roots), kept=(), checkpointed=False)]
    middle = len(roots) // 2
    first = Stage(
        roots=tuple(roots[:middle]),
        kept=tuple(roots[:middle:3]),
        checkpointed=True,
        inside=tuple(halves(roots[:middle])),
    )
    return [first, *halves(roots[middle:])]


@pytest.mark.parametrize(
    "choose", [each_alone, pytest.param(all_together, marks=pytest.mark.slow), nested]
)
@pytest.mark.parametrize("name", examples(EXAMPLES, fast=CORE))
def test_hand_made_regions(name: str, choose: Callable[[Program], list[Stage]]) -> None:
    example = made(name)
    rewritten = staged(example, choose)
    found = jitted(rewritten, value_and_grad(example), rewritten.fn)
    assert_same(plain(name), found, example.tolerance)


SMALL = [
    "mlp",
    "dense_blocks",
    "embedding_lookup",
    "recurrent_scan",
    "stopped_gradient",
    "custom_vjp",
    "integer_and_boolean_outputs",
    "dropout_typed_key",
    "outputs_that_are_arguments_constants_reshapes",
    "branches",
    "inner_checkpoint",
]


@pytest.mark.parametrize("name", examples(SMALL, fast={"custom_vjp", "mlp"}))
@settings(max_examples=4)
@given(data=st.data())
def test_random_regions(name: str, data: st.DataObject) -> None:
    with jax.enable_x64(True):
        example = made(name)
        program, _ = program_of(example)
        # Any equation may be a vertex: one that is not is recomputed where it is read.
        count = len(program.equations)
        chosen = data.draw(st.sets(st.integers(0, count - 1)))
        effects = {n for n, equation in enumerate(program.equations) if equation.effects}
        roots = sorted(chosen | effects)
        flags = st.lists(st.booleans(), min_size=len(roots), max_size=len(roots))
        stages = chain(program, roots, data.draw(flags), data.draw(flags))
        rewritten = staged(example, lambda _: stages)
        found = jitted(rewritten, value_and_grad(example), rewritten.fn)
        assert_same(plain(name), found, example.tolerance)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    "name",
    examples(
        [*SMALL, "cnn_batch_norm", "attention", "scanned_layers"],
        fast={"custom_vjp", "inner_checkpoint"},
        versions=True,
    ),
)
def test_with_and_without_the_coming_remat(name: str, value: bool) -> None:
    with remat3(value):
        example = made(name)
        expected = jitted(example, value_and_grad(example), example.fn)
        for fn in (decorated(example), staged(example, each_alone).fn):
            assert_same(expected, jitted(example, value_and_grad(example), fn), example.tolerance)


# --- Drawn programs -----------------------------------------------------------------------

UNARY = [
    jnp.sin,
    jnp.tanh,
    jnp.exp,
    jax.nn.sigmoid,
    jax.nn.relu,
    jnp.square,
    lax.stop_gradient,
    jnp.floor,
    lambda a: a[::-1],
    lambda a: a * 0.5 + 1.0,
    lambda a: jnp.where(a > 0, a, -a),
    lambda a: a - jnp.mean(a, axis=-1, keepdims=True),
    lambda a: jnp.cumsum(a, axis=0),
    lambda a: a.reshape(-1).reshape(a.shape),
    lambda a: a.T.T,
    lambda a: jnp.sort(a, axis=-1),
    lambda a: a.astype(jnp.float32).astype(a.dtype),
    lambda a: a * jnp.sum(a),
    lambda a: jax.nn.softmax(a, axis=-1),
    jax.jit(lambda a: jnp.cos(a) * a),
    lambda a: a @ jnp.ones((a.shape[1], a.shape[1]), a.dtype) / 3,
]
BINARY = [
    jnp.add,
    jnp.multiply,
    jnp.subtract,
    jnp.maximum,
    jnp.arctan2,
    lambda a, b: a @ b.T @ b / 9,
    lambda a, b: jnp.concatenate([a, b])[: a.shape[0]],
    lambda a, b: jnp.where(a > b, a, b * 2.0),
    lambda a, b: a * jnp.max(b, axis=0),
    lambda a, b: lax.cond(jnp.sum(b) > 0, lambda x, y: x + y, lambda x, y: x * y, a, b),
]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("unary"), st.sampled_from(UNARY), st.integers(0, 99)),
        st.tuples(
            st.just("binary"), st.sampled_from(BINARY), st.integers(0, 99), st.integers(0, 99)
        ),
    ),
    min_size=1,
    max_size=12,
)


def drawn_loss(steps: Sequence[tuple[Any, ...]]) -> Callable[..., Any]:
    def loss(params, x):
        values = [*params, x]
        for _, function, *operands in steps:
            # Recent values are likelier, so that the programs grow deep.
            values.append(function(*(values[-1 - (n % min(len(values), 5))] for n in operands)))
        return jnp.sum(jnp.sin(values[-1])) + jnp.mean(values[len(values) // 2])

    return loss


def check_drawn(steps: Any, jit: bool, data: st.DataObject) -> None:
    with jax.enable_x64(True):
        params = [array(f"p{i}", 3, 4) for i in range(2)]
        example = Example(fn=drawn_loss(steps), args=(params, array("x", 3, 4)))
        wrap = jax.jit if jit else lambda fn: fn
        expected = wrap(jax.value_and_grad(example.fn))(*example.args)
        program, _ = program_of(example)
        roots = roots_of(program)
        flags = st.lists(st.booleans(), min_size=len(roots), max_size=len(roots))
        stages = chain(program, roots, data.draw(flags), data.draw(flags))
        for fn in (decorated(example), staged(example, lambda _: stages).fn):
            # Sums of up to 1e5 cancel in some programs: that is rounding, not a fault.
            assert_same(expected, wrap(jax.value_and_grad(fn))(*example.args), 1e-9)


@settings(max_examples=4)
@given(steps=steps, data=st.data())
def test_drawn_programs(steps: Any, data: st.DataObject) -> None:
    check_drawn(steps, True, data)


@pytest.mark.slow
@pytest.mark.versions
@settings(max_examples=30)
@given(steps=steps, jit=st.booleans(), data=st.data())
def test_many_drawn_programs(steps: Any, jit: bool, data: st.DataObject) -> None:
    check_drawn(steps, jit, data)


# --- Side effects -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nested",
    [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.versions])],
    ids=["plain", "inside jit"],
)
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda fn: jax.jit(jax.grad(fn))])
def test_side_effects_happen_once_and_in_order(
    transform: Callable[..., Any], ordered: bool, nested: bool
) -> None:
    seen: list[int] = []

    def loss(weights, x):
        for number, weight in enumerate(weights):
            x = jnp.tanh(x @ weight) + x
            if number % 2:
                jax.debug.callback(
                    lambda _, number=number: seen.append(number), jnp.sum(x), ordered=ordered
                )
        return jnp.sum(x**2)

    weights, x = [array(f"w{i}", 8, 8) for i in range(5)], array("x", 64, 8)
    fn = remat_opt.optimal_remat(jax.jit(loss) if nested else loss, device="cpu")
    assert sum(stage.checkpointed for stage in fn.plan(weights, x).stages) > 1
    found = transform(fn)(weights, x)
    jax.effects_barrier()
    assert seen == [1, 3]
    assert_same(transform(loss)(weights, x), found, 1e-12)


def test_prints_are_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    def loss(w):
        y = jnp.tanh(w)
        jax.debug.print("sum {}", jnp.sum(y))
        return jnp.sum(y * y)

    jax.block_until_ready(jax.jit(jax.grad(remat_opt.optimal_remat(loss)))(jnp.zeros(3)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 0.0\n"


def test_mutable_array() -> None:
    if not hasattr(jax, "new_ref"):
        pytest.skip("this JAX has no mutable arrays")

    def loss(w, seen):
        seen[...] = seen[...] + lax.stop_gradient(jnp.sum(w))
        total = jax.new_ref(jnp.zeros(3))
        total[...] += jnp.sin(w)
        return jnp.sum(total[...] ** 2)

    seen = jax.new_ref(jnp.asarray(0.0))
    w = array("w", 3)
    found = jax.jit(jax.grad(remat_opt.optimal_remat(loss)))(w, seen)
    assert_same(jax.grad(lambda w: jnp.sum(jnp.sin(w) ** 2))(w), found, 1e-12)
    assert seen[...] == jnp.sum(w)


# --- Surroundings -------------------------------------------------------------------------


def layers(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight) + x
    return jnp.sum(x**2)


def layers_example() -> Example:
    return Example(fn=layers, args=([array(f"w{i}", 4, 4) for i in range(6)], array("x", 8, 4)))


# While checking for leaks, JAX recompiles every operation that runs by itself.
@pytest.mark.parametrize(
    "run",
    [jax.jit, pytest.param(lambda fn: fn, marks=[pytest.mark.slow, pytest.mark.versions])],
    ids=["jit", "no jit"],
)
def test_closed_over_tracers_get_their_gradient_and_do_not_leak(run: Callable[..., Any]) -> None:
    def outer(decorate: Callable[..., Any], closed: jax.Array, w: jax.Array) -> jax.Array:
        @decorate
        def loss(w):
            for _ in range(2):
                w = jnp.tanh(jnp.sin(closed) @ w)
            return jnp.sum(w)

        return loss(w) + jnp.sum(jax.grad(loss)(w) ** 2)

    args = array("c", 3, 3), array("w", 3, 2)
    plain = functools.partial(outer, lambda fn: fn)
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(*args)
    ours = functools.partial(outer, remat_opt.optimal_remat)
    with jax.checking_leaks():
        assert_same(expected, run(jax.grad(ours, argnums=(0, 1)))(*args), 1e-12)


@pytest.mark.parametrize(
    "surround",
    [
        lambda fn: remat_opt.optimal_remat(remat_opt.optimal_remat(fn)),
        lambda fn: jax.checkpoint(remat_opt.optimal_remat(fn)),
        lambda fn: jax.jit(remat_opt.optimal_remat(jax.jit(fn))),
        lambda fn: remat_opt.optimal_remat(jax.checkpoint(fn)),
    ],
    ids=["twice", "in a checkpoint", "between jits", "of a checkpoint"],
)
def test_surrounded(surround: Callable[..., Any]) -> None:
    example = layers_example()
    found = jax.jit(jax.value_and_grad(surround(layers)))(*example.args)
    assert_same(jax.jit(jax.value_and_grad(layers))(*example.args), found, 1e-12)


def test_in_a_training_loop_under_scan() -> None:
    example = layers_example()
    weights, x = example.args

    def train(loss: Callable[..., Any]) -> Any:
        def step(weights, _):
            value, gradient = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient), value

        return lax.scan(step, weights, None, length=3)

    assert_same(
        jax.jit(lambda: train(layers))(),
        jax.jit(lambda: train(remat_opt.optimal_remat(layers)))(),
        1e-12,
    )


def test_without_staging() -> None:
    example = layers_example()
    with jax.disable_jit():
        found = jax.grad(decorated(example))(*example.args)
    assert_same(jax.grad(layers)(*example.args), found, 1e-12)


def test_collective_of_a_vmapped_axis() -> None:
    def loss(w, x):
        return jnp.sum(lax.pmean(jnp.tanh(w @ x), "batch") ** 2)

    def mapped(fn: Callable[..., Any]) -> Any:
        return jax.vmap(jax.grad(fn), in_axes=(None, 0), axis_name="batch")(
            array("w", 4, 4), array("x", 3, 4)
        )

    assert_same(mapped(loss), mapped(remat_opt.optimal_remat(loss)), 1e-12)


SHARDED = """
    import warnings
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import remat_opt

    def layers(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight) + x
        return jnp.sum(x**2)

    def same(one, other):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5)
            assert a.sharding == b.sharding, (a.sharding, b.sharding)

    # Under jax.jit JAX does not say how arguments are split.
    warnings.filterwarnings("ignore", message=".* runs on a mesh of 2 devices")
    weights = [jnp.eye(4) * 0.3] * 6
    x = jnp.arange(32.0).reshape(8, 4) / 32
    assert len(jax.devices()) == 2
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        sharded = jax.device_put(x, NamedSharding(mesh, P("data", None)))
        whole = jax.device_put(weights, NamedSharding(mesh, P(None, None)))
        ours = remat_opt.optimal_remat(layers)
        same(jax.jit(jax.grad(layers))(whole, sharded), jax.jit(jax.grad(ours))(whole, sharded))
        assert any(stage.checkpointed for stage in ours.plan(whole, sharded).stages)
        (note,) = ours.plan(whole, sharded).notes
        assert note.startswith("All figures are for one of the 2 devices of the mesh")

        def constrained(weights, x):
            x = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("data", None)))
            return layers(weights, x)

        if kind is AxisType.Auto:
            same(jax.jit(jax.grad(constrained))(whole, sharded),
                 jax.jit(jax.grad(remat_opt.optimal_remat(constrained)))(whole, sharded))

        for check in (True, False):
            def mapped(fn):
                return jax.jit(jax.shard_map(jax.value_and_grad(fn), mesh=mesh,
                    in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=check))

            def summed(weights, x):
                return lax.psum(layers(weights, x), "data")

            plans = []

            @remat_opt.optimal_remat
            def ours(weights, x):
                return summed(weights, x)

            def noted(weights, x):
                plans.append(ours.plan(weights, x))
                return ours(weights, x)

            same(mapped(summed)(whole, sharded), mapped(noted)(whole, sharded))
            assert all("communicate with other devices: psum" in note for note in plans[0].notes)
            assert any(stage.checkpointed for stage in plans[0].stages)
"""


@pytest.mark.slow
@pytest.mark.versions
def test_two_devices() -> None:
    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SHARDED)],
        check=True,
        cwd=root,
        env=os.environ
        | {
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
        },
    )


# --- The rewritten program ----------------------------------------------------------------


@pytest.mark.parametrize("name", examples(EXAMPLES, fast=CORE))
def test_rewritten_program_is_well_formed(name: str) -> None:
    example = made(name)
    program, call = program_of(example)
    for stages in (
        decorated(example).plan(*example.args, **example.kwargs).stages,
        each_alone(program),
        all_together(program),
    ):
        run = rewriting.rewrite(program, stages, "cuda")
        leaves = jax.tree.leaves((call.args, call.kwargs))
        closed, _ = internals.make_jaxpr(run, list(program.constant_values), leaves)
        internals.check(closed)


def test_full_hessian_and_gradient_of_a_vmap() -> None:
    def loss(w, x):
        for _ in range(2):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    w, x = array("w", 3, 3), array("x", 2, 3)
    fn = remat_opt.optimal_remat(loss, device="cpu")
    for twice in (
        jax.hessian,
        lambda f: jax.jacrev(jax.grad(f)),
        lambda f: jax.jacfwd(jax.grad(f)),
    ):
        assert_same(jax.jit(twice(loss))(w, x), jax.jit(twice(fn))(w, x), 1e-11)

    def mean(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda w, xs: jnp.mean(jax.vmap(fn, in_axes=(None, 0))(w, xs)))

    assert_same(mean(loss)(w, x[:, None]), mean(fn)(w, x[:, None]), 1e-12)
