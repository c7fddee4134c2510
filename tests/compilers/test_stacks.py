"""What an iteration of a loop holds of the stacks that it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat_opt import _jax_internals as internals
from remat_opt import loops
from remat_opt.compilers.model import Model
from remat_opt.compilers.stacks import Beside, Read, beside_stacks, counted_around_bytes, stacks
from remat_opt.program import bodies, tracing
from remat_opt.schedule import Region, Schedule
from tests.compiler_graphs import InStep, compiler_of, names
from tests.devices import needs_cuda_plugin

LENGTH, ROWS, WIDTH = 6, 4096, 256
#: Bytes of what is carried, and of one entry of the weights.
CARRIED, WEIGHT = ROWS * WIDTH * 4, WIDTH * WIDTH * 4


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def body_of(
    layer: Callable[..., Any], device: str = "h200", rows: int = ROWS, off: Collection[str] = ()
) -> tuple[Model, Read, Callable[..., Beside]]:
    """The model of a body, what it reads of stacks, and what it takes beside them."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda h, w: (layer(h, w), None), x, w)[0])

    program = tracing.trace(loss, floats(LENGTH, WIDTH, WIDTH), floats(rows, WIDTH))
    (equation,) = (one for one in program.equations if one.operation.primitive == "scan")
    scan = internals.scan_of(equation.jax_equation)
    body = bodies.body_of(equation, bodies.varying(program))
    _, found = loops.body_model(body, compiler_of(device, off))
    split = scan.constants + scan.carries
    read = stacks(body, body.arguments[scan.constants : split], body.arguments[split:], found)

    def beside(*kept: str) -> Beside:
        told = names(found.graph)
        vertices = tuple(range(len(told)))
        chosen = tuple(v for v in vertices if told[v] in kept)
        region = Region(vertices=vertices, kept=chosen)
        return beside_stacks(found, Schedule(regions=(region,)), read, region.inside)

    return found, read, beside


COPYING = {"entries_taken"}


def test_what_products_read_is_copied() -> None:
    found, read, _ = body_of(lambda h, w: jnp.cos(jnp.sin(h) @ w), off=COPYING)
    told = names(found.graph)
    product = told.index("dot_general")
    assert read.stacks.slicing is not None
    assert [told[v] for v in np.flatnonzero(read.stacks.slicing)] == ["dot_general"]
    # The sine reads what is carried, where it lies.
    assert read.stacks.inputs == [(WEIGHT, (product,), False)]
    assert read.stacks.carried_bytes == CARRIED
    assert [told[v] for v in np.flatnonzero(read.stacks.handed_out)] == ["cos"]
    _, read, _ = body_of(lambda h, w: jnp.cos(h @ w), off=COPYING)
    assert [size for size, *_ in read.stacks.inputs] == [CARRIED, WEIGHT]


@pytest.mark.parametrize(("device", "workspace"), [("h200", 2**25), ("a100", 2**22)])
def test_products_of_the_library_take_entries_from_their_stack(device: str, workspace: int) -> None:
    found, read, _ = body_of(lambda h, w: jnp.cos(jnp.sin(h) @ w), device)
    product = names(found.graph).index("dot_general")
    assert read.stacks.inputs == []
    library = read.stacks.library
    assert library is not None
    assert (library.inputs, library.workspace_bytes) == ([(WEIGHT, (product,))], workspace)
    assert np.flatnonzero(library.vertices).tolist() == [product]
    assert read.stacks.gradients == [(WEIGHT, product)]
    assert library.forward == [product]
    # What is carried is an array in the forward pass.
    _, read, _ = body_of(lambda h, w: jnp.cos(h @ h.T) @ h, device)
    assert read.stacks.library is not None
    assert read.stacks.library.forward == []


def test_gradients_of_converted_entries_are_no_arrays() -> None:
    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.cos(h.astype("bfloat16") @ w.astype("bfloat16")).astype("float32")

    _, read, _ = body_of(layer)
    assert read.stacks.gradients == []


def test_what_runs_again_does_so_when_it_is_read() -> None:
    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack([jnp.tanh(h @ (w + n)) @ w for n in range(4)]), axis=0)

    assert body_of(layer)[2]().whole_bytes < body_of(layer, off={"runs_when_read"})[2]().whole_bytes


def test_what_elementwise_readers_read_lies_in_the_stack() -> None:
    # Of so many rows that the library's workspace does not count.
    _, _, beside = body_of(lambda h, w: jnp.sin(jnp.cos(h @ w) * jnp.exp(h @ w)), rows=2**16)
    kept = "dot_general", "cos", "exp"
    assert beside(*kept).whole_bytes < beside().whole_bytes
    # Alone, what is kept is there, but counted with the stacks.
    assert beside(*kept).alone_bytes < beside().alone_bytes


def test_in_parts_weights_are_copied_at_once() -> None:
    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.cos(h @ w[:, :WIDTH]))

    _, _, beside = body_of(layer)
    found = beside("dot_general")
    assert found.whole_bytes <= found.part_bytes


def test_checkpoints_inside_an_iteration_read_copies() -> None:
    found, read, _ = body_of(lambda h, w: jnp.cos(jnp.sin(h) @ w))
    told = names(found.graph)
    sine, product = told.index("sin"), told.index("dot_general")
    every = tuple(range(len(told)))
    inside = Region(vertices=every[: product + 1]), Region(vertices=every[product + 1 :])
    # What is carried is copied for the sine, too.
    assert read.under(inside).inputs == [(WEIGHT, (product,), True), (CARRIED, (sine,), True)]
    assert read.under(inside[1:]) == read.under(()) == read.stacks


def test_an_iteration_starts_from_a_cotangent_that_is_counted_around_it() -> None:
    for device, expected in (("h200", 3), ("v5e", 0), ("cpu", 0)):
        assert counted_around_bytes(3, 4, compiler_of(device)) == expected
        assert counted_around_bytes(4, 3, compiler_of(device)) == expected


def wider(h: jax.Array, w: Any) -> jax.Array:
    return jnp.cos(jnp.sin(h @ w) @ w)


def test_on_a_tpu_what_is_kept_is_read_in_its_place() -> None:
    _, _, beside = body_of(wider, "v5e", rows=2**17)
    assert beside().whole_bytes <= beside().part_bytes
    assert beside("dot_general").whole_bytes < beside("dot_general").part_bytes


def test_of_other_compilers_nothing_is_known() -> None:
    found, read, beside = body_of(lambda h, w: jnp.cos(jnp.sin(h) @ w), "cpu")
    region = Region(vertices=tuple(range(len(found.graph))))
    peak_bytes = found.peak_bytes(Schedule(regions=(region,)))
    assert beside() == Beside(
        whole_bytes=peak_bytes + read.stacks.carried_bytes,
        part_bytes=peak_bytes + read.stacks.carried_bytes,
        alone_bytes=peak_bytes,
    )


def mlp(h: jax.Array, w: Any) -> jax.Array:
    return h + jax.nn.gelu(norm(h) @ w[0]) @ w[1]


def gated(h: jax.Array, w: Any) -> jax.Array:
    z = norm(h)
    return h + (jax.nn.silu(z @ w[0]) * (z @ w[2])) @ w[1]


def norm(h: jax.Array) -> jax.Array:
    return h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize(("layer", "within"), [(mlp, 0.08), (gated, 0.18)])
def test_the_compiler_agrees(layer: Callable[..., jax.Array], within: float) -> None:
    """With little memory, and with much."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), x, w)[0] ** 2)

    wide = 4 * WIDTH
    shapes = (WIDTH, wide), (wide, WIDTH), (WIDTH, wide)
    arguments = tuple(floats(LENGTH, *shape) for shape in shapes), floats(ROWS, WIDTH)
    step = InStep(loss, *arguments)

    opened = [one for one in step.problem.candidates if one.schedule.loops]
    opened.sort(key=lambda one: one.peak_bytes)
    for chosen in (opened[0], opened[len(opened) // 2], opened[-1]):
        compiled = step.compiled_bytes(step.plan(chosen))
        assert chosen.peak_bytes == pytest.approx(compiled, rel=within)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.cuda
@needs_cuda_plugin
@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
@pytest.mark.parametrize("layer", [mlp, gated])
def test_the_compiler_agrees_on_checkpoints_by_hand(
    layer: Callable[..., jax.Array], policy: str
) -> None:
    body = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy), prevent_cse=False)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(lambda h, w: (body(h, w), None), x, w)[0] ** 2)

    wide = 4 * WIDTH
    shapes = (WIDTH, wide), (wide, WIDTH), (WIDTH, wide)
    arguments = tuple(floats(LENGTH, *shape) for shape in shapes), floats(4 * ROWS, WIDTH)
    step = InStep(loss, *arguments)
    compiled = step.compiled_bytes(step.plan(step.problem.unchanged))
    assert step.problem.unchanged.peak_bytes == pytest.approx(compiled, rel=0.03)
