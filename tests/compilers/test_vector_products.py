"""Products with vectors, compared with what was seen compiled for a TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from remat_opt.compilers.vector_products import as_compiled, as_written
from remat_opt.costs import OUTER_PRODUCT, VECTOR_PRODUCT
from remat_opt.program import tracing
from tests.compiler_graphs import InStep, compiler_of, graph_of
from tests.devices import needs_libtpu
from tests.programs import ones


@pytest.mark.parametrize(
    ("formula", "shapes", "expected"),
    [
        ("td,de->te", [(6, 4), (4, 8)], "dot_general"),
        ("btd,bsd->bts", [(2, 6, 4), (2, 5, 4)], "dot_general"),
        ("td,d->t", [(6, 4), (4,)], VECTOR_PRODUCT),
        ("td,de->te", [(6, 4), (4, 1)], VECTOR_PRODUCT),
        ("td,de->te", [(1, 4), (4, 8)], VECTOR_PRODUCT),
        ("btdn,btn->btd", [(2, 6, 4, 3), (2, 6, 3)], VECTOR_PRODUCT),
        ("btd,btd->bt", [(2, 6, 4), (2, 6, 4)], VECTOR_PRODUCT),
        ("btd,btn->btdn", [(2, 6, 4), (2, 6, 3)], OUTER_PRODUCT),
        ("td,de->te", [(6, 1), (1, 8)], OUTER_PRODUCT),
    ],
)
def test_which_products_are_none_of_matrices(
    formula: str, shapes: list[tuple[int, ...]], expected: str
) -> None:
    one, other = (ones(*shape) for shape in shapes)
    program = tracing.trace(lambda x, y: jnp.sum(jnp.einsum(formula, x, y)), one, other)
    found = as_compiled(program, compiler_of("v5e"))
    (product,) = (
        after.operation
        for before, after in zip(program.equations, found.equations, strict=True)
        if before.operation.primitive == "dot_general"
    )
    assert product.primitive == expected
    assert as_written(product) == "dot_general"
    for device in ("h200", "cpu"):
        assert as_compiled(program, compiler_of(device)) is program


def scored(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers that are multiplied by a score for each row."""
    for w in weights:
        h = jnp.tanh(x @ w)
        x = x + (h @ w[0])[:, None] * h
    return jnp.mean(x**2)


def spread(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers with states that are outer products."""
    for w in weights:
        x = x + jnp.sum(jnp.tanh(jnp.einsum("td,tn->tdn", x @ w, x[:, :4])), -1)
    return jnp.mean(x**2)


def test_what_they_make_is_no_array_unless_it_is_summed() -> None:
    square, rows = ones(128, 128), ones(256, 128)
    _, found, _ = graph_of(spread, [square], rows, device="v5e")
    assert not any("256,128,4" in label for label in found.labels)
    _, found, _ = graph_of(scored, [square], rows, device="v5e")
    assert "dot_general f32[256]" in found.labels


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(("fn", "within"), [(scored, 0.1), (spread, 0.2)])
def test_layers_with_them_take_what_was_predicted_on_a_tpu(fn: Any, within: float) -> None:
    shape = jax.ShapeDtypeStruct
    weights, x = [shape((512, 512), "float32")] * 3, shape((65536, 512), "float32")
    step = InStep(fn, weights, x, device="v5e")
    assert step.unplanned_bytes() == pytest.approx(step.problem.unchanged.peak_bytes, rel=within)
