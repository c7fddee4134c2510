"""The zeros that XLA for CPU adds gradients of rows to, and what it reads them from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers.lookups import beside, zeros
from remat_opt.compilers.model import Model
from remat_opt.gradients import Gradients
from remat_opt.program import tracing
from tests.compiler_graphs import model_of, names, storage_of, wide_zeros
from tests.programs import ones

TABLE, TOKENS, W = ones(64, 8), jnp.arange(16), ones(8, 8)
NARROW = TABLE.astype(jnp.bfloat16)


def after(rows: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.sin(rows) @ W.astype(rows.dtype)).astype(jnp.float32))


def looked_up(table, tokens):
    return after(table[tokens])


def twice(table, tokens):
    return after(table[tokens]) + after(table[tokens + 1])


def tied(table, tokens):
    return after(table[tokens]) + jnp.sum(jnp.sin(W.astype(table.dtype) @ table.T))


def converted(table, tokens):
    return looked_up(table.astype(jnp.bfloat16), tokens)


def converted_and_tied(table, tokens):
    return tied(table.astype(jnp.bfloat16), tokens)


def scaled(table, tokens):
    return looked_up(table * 2, tokens)


def of_rows(fn: Callable[..., Any], table: jax.Array, fate: Gradients, device: str) -> Model:
    return model_of(tracing.trace(fn, table, TOKENS), device, gradients=fate)


def wide(size: int) -> int:
    """Bytes of bfloat16 zeros."""
    return 2 * size if wide_zeros(1) else size


@pytest.mark.parametrize(
    ("fn", "begins"),
    [
        (looked_up, True),
        (twice, True),
        (scaled, True),
        # Rows are added to the gradient that the product writes.
        (tied, False),
    ],
)
def test_gradients_of_rows_begin_as_zeros_on_a_cpu(fn: Callable[..., Any], begins: bool) -> None:
    found = of_rows(fn, TABLE, Gradients.CONSUMED, "cpu")
    assert found.gradient_bytes[-1] == (TABLE.nbytes if begins else 0)
    assert found.gradient_bytes[names(found.graph).index("gather")] == TABLE.nbytes
    # They are there in the forward pass too, unless they lie in a result.
    assert found.early == (TABLE.nbytes,) * begins
    assert of_rows(fn, TABLE, Gradients.RESULTS, "cpu").early == ()
    elsewhere = of_rows(fn, TABLE, Gradients.CONSUMED, "h200")
    assert elsewhere.gradient_bytes[-1] == 0
    assert elsewhere.early == ()


def test_only_rows_of_a_converted_table_are_converted_on_a_cpu() -> None:
    for fn in (converted, scaled):
        stored = {
            device: names(of_rows(fn, TABLE, Gradients.RESULTS, device).graph)
            for device in ("cpu", "v5e")
        }
        primitive = "mul" if fn is scaled else "convert_element_type"
        assert primitive in stored["v5e"]
        assert stored["v5e"].index("gather") > stored["v5e"].index(primitive)
        first = stored["cpu"].index("gather")
        assert primitive not in stored["cpu"][:first]


def test_expensive_functions_are_computed_for_the_whole_table() -> None:
    found = of_rows(
        lambda table, tokens: looked_up(jnp.tanh(table), tokens), TABLE, Gradients.RESULTS, "cpu"
    )
    assert names(found.graph)[0] == "tanh"


def test_a_table_that_is_converted_for_more_than_a_lookup_is_stored() -> None:
    for fn in (converted_and_tied, lambda table, tokens: twice(table.astype("bfloat16"), tokens)):
        found = of_rows(fn, TABLE, Gradients.RESULTS, "cpu")
        assert found.graph.bytes[names(found.graph).index("convert_element_type")] == TABLE.nbytes


def test_zeros_for_rows_of_a_converted_table_are_beside_the_gradient() -> None:
    size = wide(NARROW.nbytes)
    for fate in (Gradients.RESULTS, Gradients.CONSUMED):
        found = of_rows(converted, TABLE, fate, "cpu")
        gather = names(found.graph).index("gather")
        if wide_zeros(1):
            # They are float32, and so the gradient itself.
            assert found.gradient_bytes[gather] == (fate is Gradients.CONSUMED) * size
        else:
            # The update converts what it reads of them.
            assert found.gradient_bytes[gather] == 0
            assert found.graph.workspace_bytes[gather] >= size
            assert found.early == (size,)
    waiting = of_rows(converted, TABLE, Gradients.TOGETHER, "cpu")
    assert waiting.gradient_bytes[0] == TABLE.nbytes


def test_narrow_rows_are_not_added_to_other_gradients() -> None:
    for fn, table, lookups in (
        (tied, TABLE, 0),
        (twice, TABLE, 1),
        (tied, NARROW, 1),
        (twice, NARROW, 2),
        (converted_and_tied, TABLE, 1),
    ):
        found = zeros(storage_of(tracing.trace(fn, table, TOKENS), "cpu"))
        assert len(found.begun) + len(found.beside) == lookups, fn
        assert all(size == wide(NARROW.nbytes) for size, _ in found.beside)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_looked_up_in_results_has_zeros_too(dynamic: bool) -> None:
    def routed(w, x):
        for _ in range(3):
            y = x @ w
            y = lax.dynamic_slice_in_dim(y, TOKENS[3], 16) if dynamic else y[TOKENS]
            x = jnp.tanh(jnp.tile(y, (2, 1)))
        return jnp.sum(x)

    x = jnp.ones((32, 8))
    storage = storage_of(tracing.trace(routed, W, x), "cpu")
    found = zeros(storage)
    products = [
        vertex
        for vertex, root in enumerate(storage.roots)
        if storage.flow.program.equations[root].operation.primitive == "dot_general"
    ]
    assert not found.begun
    assert [size for size, _ in found.beside] == [x.nbytes] * 3
    # From the lookup's own step on they are the product's cotangent.
    for (_, until), product in zip(found.beside, products, strict=True):
        assert until > product
    assert zeros(storage_of(tracing.trace(routed, W, x), "h200")).beside == ()


def added_up(x, rows):
    """Rows, summed where they go: into as many as ``x`` has."""
    return jax.ops.segment_sum(rows, TOKENS, num_segments=len(x))


@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        # The only sum over places begins with zeros that become it.
        (lambda x: jnp.sin(x[TOKENS]), 0),
        # The segment sum begins with the same zeros as the gradient of the lookup.
        (lambda x: jnp.sin(added_up(x, jnp.sin(x[TOKENS]))), 1),
        # Two gradients of lookups do, and one waits for the other.
        (lambda x: jnp.sin(x[TOKENS] * x[TOKENS + 1]), 2),
    ],
)
def test_gradients_of_rows_begin_with_the_same_zeros_on_nvidia(
    fn: Callable[[jax.Array], jax.Array], arrays: int
) -> None:
    program = tracing.trace(lambda w, x: jnp.sum(fn(x @ w)), W, TABLE)
    assert sum(size for _, size in beside(storage_of(program))) == arrays * TABLE.nbytes
    assert not list(beside(storage_of(program, "v5e")))


def test_rows_of_a_parameter_are_added_to_its_gradient_in_place_on_nvidia() -> None:
    program = tracing.trace(lambda x: jnp.sum(jnp.sin(x[TOKENS] * x[TOKENS + 1])), TABLE)
    assert not list(beside(storage_of(program)))
