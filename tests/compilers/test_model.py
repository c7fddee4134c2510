"""The room's interface: what a program, and a schedule of it, is expected to take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.compilers.heap import laid_out_bytes, vector_memory_bytes
from remat_opt.compilers.model import computes_nothing, model
from remat_opt.compilers.rules import RULES
from remat_opt.gradients import Gradients
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Program
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import simulate
from remat_opt.spans import spans
from tests.compiler_graphs import (
    W,
    X,
    changed,
    compiler_of,
    graph_of,
    held_bytes,
    model_of,
    two_layers,
    whole,
)


def test_what_is_assumed_or_estimated_is_told() -> None:
    def loss(w, x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x * w[0])
        return jnp.sum(y)

    _, found, _ = graph_of(loss, W, X)
    assert found.assumed == ("pure_callback",)
    assert found.estimated_flops_share > 0


def test_programs_that_compute_nothing_are_recognised() -> None:
    def trace(fn: Callable[..., Any]) -> Program:
        return tracing.trace(fn, jnp.ones((1, 1)))

    assert computes_nothing(trace(lambda x: x))
    assert computes_nothing(trace(lambda x: x.reshape(()).T))
    assert not computes_nothing(trace(jnp.sin))


@pytest.mark.parametrize("device", ["h200", "v5e", "cpu"])
def test_a_peak_is_the_heap_and_what_is_held_beside(device: str) -> None:
    program = tracing.trace(two_layers, [jnp.ones((2048, 2048))] * 3, jnp.ones((2048, 2048)))
    found = model_of(program, device, ["results_lend"])
    for schedule in (plain(found.graph), whole(found.graph)):
        changed_graph = found.graph_of(schedule)
        assert changed_graph == changed(found, schedule)
        assert found.held_bytes(schedule) == held_bytes(found, schedule)
        heap_bytes = laid_out_bytes(spans(changed_graph, schedule), compiler_of(device))
        assert found.peak_bytes(schedule) == heap_bytes + found.held_bytes(schedule)
        assert found.admitted(schedule) == schedule
    # Nothing here is rewritten in a way that changes what is stored.
    assert found.as_it_is is None
    assert found.unchanged_peak_bytes() == found.peak_bytes(plain(found.graph))
    assert (found.held_bytes(plain(found.graph)) > 0) == (device == "v5e")
    assert len(found.graph) == len(found.roots) == len(found.labels)


def test_small_arrays_are_beside_the_heap_unless_everything_fits_there() -> None:
    def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def found(rows: int, device: str, off: list[str]) -> tuple[int, int]:
        shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
        program = tracing.trace(layers, [shape((256, 256))] * 6, shape((rows, 256)))
        with_it = model_of(program, device, off).with_vector_memory()
        return with_it.vector_bytes, with_it.unchanged_peak_bytes()

    room = vector_memory_bytes(compiler_of("v5e"))
    assert found(16 * 1024, "v5e", [])[0] == room
    # Six values of 8 MiB.
    assert found(8 * 1024, "v5e", [])[0] == 0
    for device, off in (("v5e", ["vector_memory"]), ("h200", [])):
        assert found(16 * 1024, device, off)[0] == 0
    without, with_it = (found(16 * 1024, "v5e", off)[1] for off in (["vector_memory"], []))
    assert without - room <= with_it < without


def test_with_no_rule_a_peak_is_what_is_alive() -> None:
    program = tracing.trace(two_layers, [W] * 3, X)
    found = model_of(program, "h200", RULES)
    assert found.effects == ()
    for schedule in (plain(found.graph), whole(found.graph)):
        assert found.graph_of(schedule) is found.graph
        assert found.peak_bytes(schedule) == simulate(found.graph, schedule).peak_bytes


@pytest.mark.parametrize("fate", [Gradients.CONSUMED, Gradients.TOGETHER])
def test_gradients_that_are_no_results_are_temporaries(fate: Gradients) -> None:
    # So many rows that no update waits.
    program = tracing.trace(two_layers, [W] * 3, jnp.ones((24, 8)))
    linearization, compiler = linearize(program), compiler_of("h200")
    results = model(program, linearization, compiler, Gradients.RESULTS)
    assert model(program, linearization, compiler).graph == results.graph
    found = model(program, linearization, compiler, fate)
    more = np.subtract(found.graph.workspace_bytes, results.graph.workspace_bytes)
    most = 3 if fate is Gradients.TOGETHER else 1
    assert min(more) >= 0
    assert max(more) == most * W.nbytes
    assert found.unchanged_peak_bytes() > results.unchanged_peak_bytes()


def test_stages_are_regions_in_terms_of_equations() -> None:
    program = tracing.trace(two_layers, [W] * 2, X)
    found = model_of(program)
    every = tuple(range(len(found.graph)))
    inside = Region(vertices=every[:2], kept=(0,)), Region(vertices=every[2:3])
    regions = (
        Region(vertices=every[:3], kept=(1,), inside=inside),
        Region(vertices=every[3:], checkpointed=False),
    )
    first, second = found.stages(Schedule(regions=regions))
    assert first.roots == found.roots[:3]
    assert first.kept == found.roots[1:2]
    assert [(one.roots, one.kept) for one in first.inside] == [
        (found.roots[:2], found.roots[:1]),
        (found.roots[2:3], ()),
    ]
    assert (second.roots, second.checkpointed, second.inside) == (found.roots[3:], False, ())


def test_notes_come_from_effects() -> None:
    def recurrent(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    found = model_of(tracing.trace(recurrent, W, X))
    (note,) = found.notes(plain(found.graph))
    assert note.startswith("Several products read the same weights.")
    found = model_of(tracing.trace(two_layers, [W] * 2, X))
    assert list(found.notes(plain(found.graph))) == []


@pytest.mark.parametrize(("device", "lends"), [("h200", True), ("v5e", False), ("cpu", True)])
def test_what_lies_in_results_is_no_temporary(device: str, lends: bool) -> None:
    program = tracing.trace(two_layers, [jnp.ones((2048, 2048))] * 3, jnp.ones((2048, 2048)))
    found, apart = model_of(program, device), model_of(program, device, ["results_lend"])
    schedule = plain(found.graph)
    assert (found.peak_bytes(schedule) < apart.peak_bytes(schedule)) is lends
    consumed = model(program, linearize(program), compiler_of(device), Gradients.CONSUMED)
    assert consumed.results == ()
