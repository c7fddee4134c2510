"""What runs before or after its turn, and what does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from remat_opt.gradients import Gradients
from remat_opt.program import tracing
from tests.compiler_graphs import model_of, names

SIDE, LAYERS = 256, 6
SIZE = 4 * SIDE * SIDE
IDS = jnp.zeros((32, 4), int)


def losses(narrow: bool = False):
    """Layers with skips; in bfloat16 with float32 weights if ``narrow``."""

    def loss(weights, x):
        for w in weights:
            w = w.astype(x.dtype)
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x.astype("float32"))

    return loss, "bfloat16" if narrow else "float32"


def gradient_bytes(rows: int, *, narrow: bool = False, device: str = "h200") -> int:
    """What gradients take at the end of the backward pass."""
    loss, dtype = losses(narrow)
    weights = [jax.ShapeDtypeStruct((SIDE, SIDE), "float32")] * LAYERS
    program = tracing.trace(loss, weights, jax.ShapeDtypeStruct((rows, SIDE), dtype))
    return model_of(program, device, gradients=Gradients.CONSUMED).gradient_bytes[0]


def test_updates_wait_where_they_write_more_than_activations_take() -> None:
    """An update writes three arrays and frees the gradient."""
    assert gradient_bytes(2 * SIDE) == LAYERS * SIZE
    assert gradient_bytes(2 * SIDE + 8) == SIZE


def test_narrow_gradients_wait_narrow() -> None:
    """They free half as much, and activations are half as large."""
    assert gradient_bytes(5 * SIDE, narrow=True) == SIZE + (LAYERS - 1) * SIZE // 2
    assert gradient_bytes(5 * SIDE + 8, narrow=True) == SIZE


@pytest.mark.parametrize("device", ["cpu", "v5e"])
def test_elsewhere_they_come_at_once(device: str) -> None:
    assert gradient_bytes(SIDE, device=device) <= SIZE


def test_results_do_not_wait() -> None:
    loss, _ = losses()
    weights = [jax.ShapeDtypeStruct((SIDE, SIDE), "float32")] * LAYERS
    program = tracing.trace(loss, weights, jax.ShapeDtypeStruct((8, SIDE), "float32"))
    assert not any(model_of(program, gradients=Gradients.RESULTS).gradient_bytes)


def converted(rows: int, *, device: str = "h200", narrow: bool = True):
    """Where converted weights are there before their turn, and their bytes."""
    loss, dtype = losses(narrow)
    weights = [jax.ShapeDtypeStruct((SIDE, SIDE), "float32")] * LAYERS
    program = tracing.trace(loss, weights, jax.ShapeDtypeStruct((rows, SIDE), dtype))
    found = model_of(program, device)
    turns = [v for v, label in enumerate(found.labels) if label.startswith("convert_element")]
    return found.converted, turns[: len(weights)]


def test_weights_are_converted_before_what_is_larger_than_they() -> None:
    found, turns = converted(SIDE + 8)
    # The first one's own turn comes before anything large.
    first = turns[0] + 1
    assert found == tuple((first, turn - 1, SIZE // 2) for turn in turns[1:])


def test_weights_are_converted_in_turn_where_nothing_is_larger() -> None:
    assert converted(SIDE)[0] == ()


@pytest.mark.parametrize("device", ["cpu", "v5e"])
def test_elsewhere_weights_are_converted_in_turn(device: str) -> None:
    assert converted(SIDE + 8, device=device)[0] == ()


def test_where_nothing_is_converted_nothing_is_early() -> None:
    assert converted(SIDE + 8, narrow=False)[0] == ()


def test_a_cpu_starts_with_what_no_product_leads_to() -> None:
    """Rows that are looked up for later layers are there before the first product."""

    def loss(weights: list[jax.Array], tables: list[jax.Array], x: jax.Array) -> jax.Array:
        for w, table in zip(weights, tables, strict=True):
            x = jnp.sin(x @ w + jnp.sum(table[IDS], axis=1))
        return jnp.sum(x)

    weights, tables = [jnp.ones((8, 8))] * 3, [jnp.ones((16, 8))] * 3
    program = tracing.trace(loss, weights, tables, jnp.ones((32, 8)))
    found = model_of(program, "cpu")
    assert found.as_it_is is not None
    rows, sums = 32 * 4 * 8 * 4, 32 * 8 * 4
    first = [one for one in found.as_it_is.converted if one[2] in (rows, sums)]
    gathers, totals = (
        [v for v, name in enumerate(names(found.graph)) if name == kind][:3]
        for kind in ("gather", "reduce_sum")
    )
    # The sums wait for their layers; the rows are gone once they are summed.
    assert sorted(first) == sorted(
        [(0, 0, rows) for _ in gathers] + [(0, vertex - 1, sums) for vertex in totals]
    )
    assert found.converted == ()
    for device, off in (("h200", []), ("cpu", ["starts_first"])):
        assert model_of(program, device, off).as_it_is is None
