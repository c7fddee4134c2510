"""What runs before or after its turn, and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.compilers import scheduling
from remat_opt.compilers.cotangents import Cotangents
from remat_opt.compilers.rules import IN_ORDER
from remat_opt.compilers.scheduling import Update, waits
from remat_opt.compilers.vertices import vertices
from remat_opt.device import get_device
from remat_opt.gradients import Gradients, Wait
from remat_opt.program import tracing
from tests.compiler_graphs import InStep, model_of, names, storage_of
from tests.devices import needs_cuda_plugin

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


def update(ready: int, allocated: int, *reads: str) -> Update:
    return Update(ready=ready, allocated_bytes=allocated, reads=frozenset(reads))


def test_an_update_waits_for_something_that_allocates_more() -> None:
    """It allocates 9 and frees 4, so steps that allocate up to 5 come first."""
    found = waits([update(7, 9, "a")], {"a": (4, 7)}, [1, 1, 6, 5, 5, 5, 4, 4])
    assert list(found) == [Wait(first=3, last=6, bytes=4)]


def test_what_several_updates_read_is_freed_by_the_last_of_them() -> None:
    """Each alone frees nothing, so both wait; where the first has run, the second frees more."""
    both = [update(3, 9, "a"), update(3, 9, "a")]
    assert list(waits(both, {"a": (8, 3)}, [1, 10, 2, 2])) == [Wait(first=2, last=2, bytes=8)]
    assert list(waits(both, {"a": (8, 3)}, [1, 9, 2, 2])) == [Wait(first=0, last=2, bytes=8)]
    assert not list(waits(both[:1], {"a": (8, 3)}, [1, 2, 2, 2]))


def test_what_others_read_later_does_not_wait_for_updates_alone() -> None:
    assert not list(waits([update(3, 9, "a")], {"a": (4, 0)}, [1, 1, 1, 1]))
    late = waits([update(3, 9, "a")], {"a": (4, 1)}, [1, 1, 1, 1])
    assert list(late) == [Wait(first=0, last=0, bytes=4)]


def gated(weights, x):
    """Layers with a gate."""
    for gate, up, down in weights:
        x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
    return jnp.sum(x)


def gated_arguments(rows: int):
    wide, narrow = (jax.ShapeDtypeStruct(s, "float32") for s in ((1024, 4096), (4096, 1024)))
    return [(wide, wide, narrow)] * 3, jax.ShapeDtypeStruct((rows, 1024), "float32")


def noted(rows: int, options: Mapping[str, str] = MappingProxyType({}), device: str = "v5e") -> str:
    """What a plan of gated layers says for a step that consumes gradients."""
    told = get_device(device).told(options)
    return " ".join(remat_opt.make_plan(gated, *gated_arguments(rows), device=told).notes)


def test_a_plan_warns_where_updates_may_be_put_off() -> None:
    """Own layers on v5e take up to three times what is predicted then, and do not if told so."""
    assert "compiler_options={'xla_memory_scheduler': 'bfs'}" in noted(2048)
    assert "updates" not in noted(16384)
    assert "updates" not in noted(2048, IN_ORDER)
    assert "updates" not in noted(2048, device="h200")


def test_and_so_does_the_error_where_no_plan_compiles_to_a_budget() -> None:
    program = tracing.trace(gated, *gated_arguments(2048))
    for fate in Gradients:
        said = model_of(program, "v5e", gradients=fate).what_to_do()
        assert ("xla_memory_scheduler" in said) is (fate is Gradients.CONSUMED)


def test_long_chains_without_cotangent_arrays_are_followed_once() -> None:
    """Two readers at each step: as many paths as two to the power of their number."""
    count = 3000
    found = Cotangents(
        bytes=(*[1] * (count - 1), 8),
        sizes=(8,) * count,
        held_until_own_step=frozenset(),
        in_value={},
        later={},
        sooner={},
        handed_in_bytes={},
        arguments={},
        in_pieces={},
        sources={v: [v + 1, min(v + 2, count - 1)] for v in range(count - 1)},
        factors={},
    )
    assert found.read_for(0) == {count - 1}
    assert found.read_for(count - 1) == {count - 1}


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


def language_model(weights: Any, tokens: jax.Array) -> jax.Array:
    """Layers four times as wide inside; the logits come from another weight, or from the table."""
    table, layers, head = weights
    x = table[tokens]
    for into, out in layers:
        x = x + jnp.tanh(x @ into) @ out
    return jnp.mean(jax.nn.logsumexp(x @ (table.T if head is None else head), -1))


def shapes_of_language_model(words: int, rows: int, *, tied: bool) -> Any:
    shape = jax.ShapeDtypeStruct
    layers = [(shape((256, 1024), "float32"), shape((1024, 256), "float32"))] * 4
    head = None if tied else shape((256, 512), "float32")
    return (shape((words, 256), "float32"), layers, head), shape((rows,), "int32")


def test_zeros_for_a_tables_gradient_are_made_before_what_allocates_more() -> None:
    def steps(words: int, *, tied: bool = False, device: str = "h200") -> list[int]:
        args = shapes_of_language_model(words, 4096, tied=tied)
        program = tracing.trace(language_model, *args)
        storage = storage_of(program, device)
        graph = vertices(storage).graph
        sizes = graph.bytes, graph.cotangent_bytes, graph.predecessors
        return list(scheduling.tables(storage, *sizes).values())

    # An inner product has 16 MiB, and what it reads is still needed.
    assert steps(8192) == steps(15_000)
    assert len(steps(15_000)) == 1
    assert steps(20_000) == []
    # The logits have a gradient with respect to the table, to which rows are added.
    assert steps(8192, tied=True) == []
    assert steps(8192, device="v5e") == steps(8192, device="cpu") == []


@pytest.mark.slow
@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize("words", [15_000, 60_000])
def test_a_language_model_takes_what_is_expected(words: int) -> None:
    """With a table smaller, and larger, than what its layers allocate."""
    step = InStep(language_model, *shapes_of_language_model(words, 16_384, tied=False))
    expected = step.problem.unchanged.peak_bytes
    assert step.unplanned_bytes() == pytest.approx(expected, rel=0.02)
    plan = step.plan()
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.05)
