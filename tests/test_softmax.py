"""Softmax in mixed precision: which ones are found, what a TPU stores, and what is made to wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt import _jax_internals as internals
from remat_opt import softmax, tracing
from remat_opt.device import get_device
from remat_opt.linearization import linearize
from remat_opt.materialization import materialize
from remat_opt.program import Program
from remat_opt.schedule import Stage
from remat_opt.transform import rewrite

BATCH, TOKENS, HEADS, DEPTH = 2, 8, 3, 4
SQUARE = (BATCH, HEADS, TOKENS, TOKENS)
X = jnp.zeros((BATCH, TOKENS, HEADS * DEPTH), jnp.bfloat16)
W = jnp.zeros((HEADS * DEPTH, 3 * HEADS * DEPTH), jnp.bfloat16)


def attention(w, x, *, dtype=jnp.bfloat16, mask=True, shifted=True):
    query, key, value = jnp.split((x @ w).reshape(BATCH, TOKENS, HEADS, 3 * DEPTH), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    if mask:
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    unnormalized = jnp.exp(scores)
    weights = unnormalized / jnp.sum(unnormalized, axis=-1, keepdims=True)
    if shifted:
        weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(dtype), value.astype(dtype))
    return mixed.reshape(x.shape)


def loss(w, x, **options):
    return jnp.sum(attention(w, x, **options).astype(jnp.float32))


def traced(fn, *args, **options) -> Program:
    return tracing.trace(lambda *given: fn(*given, **options), *args)


def graph(fn, *args, device, **options):
    program = traced(fn, *args, **options)
    return materialize(program, linearize(program), get_device(device))


@pytest.mark.parametrize("mask", [True, False])
def test_the_exponentials_and_what_the_product_reads_are_found(mask: bool) -> None:
    program = traced(loss, W, X, mask=mask)
    (found,) = softmax.rounded(program)
    maker = program.makers()
    assert program.equations[maker[found.exponentials]].operation.primitive == "exp"
    kinds = [program.types[value] for value in (found.exponentials, found.weights)]
    assert [kind.dtype for kind in kinds] == ["float32", "bfloat16"]
    assert {kind.shape for kind in kinds} == {SQUARE}
    product = program.equations[found.product]
    assert product.operation.primitive == "dot_general"
    assert found.weights in product.value_inputs


@pytest.mark.parametrize("options", [{"dtype": jnp.float32}, {"shifted": False}])
def test_weights_as_wide_as_the_exponentials_and_other_sums_are_not(options: Any) -> None:
    assert not list(softmax.rounded(traced(loss, W, X, **options)))


def test_a_log_softmax_that_no_product_reads_is_not() -> None:
    assert not list(
        softmax.rounded(traced(lambda x: jnp.sum(jax.nn.log_softmax(x)), X.astype(jnp.float32)))
    )


def squares(found) -> list[str]:
    return [label for label in found.labels if label.endswith(f"[{','.join(map(str, SQUARE))}]")]


def test_a_tpu_stores_scores_and_exponentials_and_the_gradient_of_the_weights() -> None:
    found = graph(loss, W, X, device="v5e")
    scores, exponentials = (found.labels.index(text) for text in squares(found))
    assert found.labels[exponentials].startswith("exp f32")
    assert found.graph.predecessors[exponentials].count(scores) == 1
    # The padding of a TPU hides the widths: what is compared is one array in two of them.
    assert found.graph.cotangent_bytes[scores] == 0
    assert 0 < found.graph.cotangent_bytes[exponentials] <= found.graph.bytes[exponentials]
    # Backward the exponentials are read, and the scores no more.
    read = {needed for needs in found.graph.needs for needed in needs}
    assert exponentials in read
    assert scores not in read


def test_for_nvidia_the_scores_stay_and_the_exponentials_are_no_array() -> None:
    found = graph(loss, W, X, device="h200")
    scores, weights = (found.labels.index(text) for text in squares(found))
    assert found.labels[scores].startswith("dot_general f32")
    assert found.labels[weights].startswith("convert_element_type bf16")
    assert scores in found.graph.needs[weights]


def waiting(jaxpr: Any) -> Iterator[Any]:
    """The equations that make values wait for each other, in regions too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            yield equation
        for _, inner in internals.inner_jaxprs(equation.params):
            yield from waiting(getattr(inner, "jaxpr", inner))


def rewritten(fn, platform, *args):
    """The function as one region under a checkpoint."""
    program = tracing.trace(fn, *args)
    roots = tuple(index for index, _ in enumerate(program.equations))
    run = rewrite(program, [Stage(roots=roots, kept=(), checkpointed=True)], platform)
    return lambda *given: run([], jax.tree.leaves(given))[0]


def waits(fn, platform, *args) -> bool:
    """Whether something waits for an array of exponentials."""
    jaxpr = jax.make_jaxpr(rewritten(fn, platform, *args))(*args).jaxpr
    return any(
        any(atom.aval.shape == SQUARE for atom in equation.invars) for equation in waiting(jaxpr)
    )


def with_a_nonlinear_end(w, x):
    return jnp.sum(jnp.tanh(attention(w, x)).astype(jnp.float32))


def with_a_square_at_the_end(w, x):
    mixed = attention(w, x).astype(jnp.float32)
    return jnp.sum(mixed * mixed)


def with_dropout_and_a_residual(w, x):
    dropped = jnp.where(jnp.arange(x.shape[1])[:, None] % 2 > 0, attention(w, x) * 2, 0)
    return jnp.sum((dropped + x).astype(jnp.float32))


def test_values_wait_for_the_exponentials_where_the_cotangent_comes_early() -> None:
    assert waits(loss, "tpu", W, X)
    assert not waits(loss, "cuda", W, X)
    assert waits(with_dropout_and_a_residual, "tpu", W, X)
    # The cotangent of the attention is itself computed from what is recomputed.
    assert not waits(with_a_nonlinear_end, "tpu", W, X)
    assert not waits(with_a_square_at_the_end, "tpu", W, X)


def test_what_is_kept_behind_the_product_ends_the_wait_for_it() -> None:
    program = traced(with_a_nonlinear_end, W, X)
    (one,) = softmax.rounded(program)
    equations = range(len(program.equations))
    assert not softmax.comes_early(program, one, equations, frozenset())
    (tanh,) = (
        index
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive == "tanh"
    )
    assert softmax.comes_early(program, one, equations, frozenset(range(one.product + 1, tanh)))


def test_waiting_changes_no_gradient() -> None:
    keys = jax.random.split(jax.random.key(0))
    w, x = (
        jax.random.normal(key, like.shape, like.dtype)
        for key, like in zip(keys, (W, X), strict=True)
    )
    expected = np.asarray(jax.grad(loss)(w, x), "float32")
    found = np.asarray(jax.grad(rewritten(loss, "tpu", w, x))(w, x), "float32")
    # A CPU rounds to bfloat16 where it fuses, and fuses otherwise under a checkpoint.
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())
