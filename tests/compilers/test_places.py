"""What kernels read at several places, compared with what was seen compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.program import tracing
from tests.compiler_graphs import InStep, graph_of, storage_of
from tests.devices import needs_cuda_plugin, needs_libtpu

Moved = Callable[[jax.Array], jax.Array]


def halves(z: jax.Array) -> jax.Array:
    return z[: len(z) // 2] * z[len(z) // 2 :]


def reversed_too(z: jax.Array) -> jax.Array:
    return z[::-1] * z


def split_in_two(z: jax.Array) -> jax.Array:
    one, other = jnp.split(z, 2)
    return one * other


def one_half(z: jax.Array) -> jax.Array:
    return z[: len(z) // 2]


def both_apart(z: jax.Array) -> jax.Array:
    """Its sum reads each half in a kernel of its own."""
    return jnp.stack([jnp.sum(z[: len(z) // 2] * 2.0), jnp.sum(z[len(z) // 2 :] * 3.0)])


def stored(moved: Moved, function: Moved, device: str) -> list[tuple[str, tuple[int, ...]]]:
    """What is stored of something that is much larger than what it is computed from."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(moved(function(x[:, None] * jnp.arange(1.0, 9.0)[:, None])))

    program = tracing.trace(loss, jnp.ones((16, 128)))
    storage = storage_of(program, device)
    maker = program.makers()
    return [
        (program.equations[maker[value]].operation.primitive, program.types[value].shape)
        for value in sorted(storage.stored)
        if value in maker and program.types[value].shape
    ]


def added(z: jax.Array) -> jax.Array:
    return z + 1.0


@pytest.mark.parametrize(
    ("moved", "function", "expected"),
    [
        (halves, added, [("add", (16, 8, 128))]),
        (halves, jax.nn.sigmoid, [("logistic", (16, 8, 128))]),
        (split_in_two, added, [("add", (16, 8, 128))]),
        (reversed_too, added, [("add", (16, 8, 128))]),
        (both_apart, added, [("add", (16, 8, 128))]),
        (one_half, jax.nn.sigmoid, []),
    ],
)
def test_for_tpu_what_is_read_at_two_places_is_stored(
    moved: Moved, function: Moved, expected: Any
) -> None:
    assert stored(moved, function, "v5e")[:1] == expected


@pytest.mark.parametrize(
    ("moved", "function", "expected"),
    [
        (halves, added, []),
        (halves, jax.nn.sigmoid, [("slice", (8, 8, 128))]),
        (split_in_two, jax.nn.sigmoid, [("split", (8, 8, 128))]),
        (reversed_too, jax.nn.sigmoid, [("rev", (16, 8, 128))]),
        (both_apart, jax.nn.sigmoid, []),
        (one_half, jax.nn.sigmoid, []),
        # The product of two exponentials is that of the sum of their exponents.
        (halves, jnp.exp, []),
    ],
)
def test_for_nvidia_one_of_two_places_of_an_expensive_function_is_stored(
    moved: Moved, function: Moved, expected: Any
) -> None:
    assert stored(moved, function, "h200") == expected


def multiplied(function: Moved) -> Callable[[list[jax.Array], jax.Array], jax.Array]:
    """Layers whose hidden states are sixteen times as large as what they are computed from."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            z = function((x @ w)[:, None] * jnp.arange(1.0, 17.0)[:, None])
            x = x + jnp.tile(jnp.sum(halves(z), 1), (2, 1)) @ w
        return jnp.mean(x**2)

    return loss


def rotated(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers that turn pairs of neighbouring channels."""
    for w in weights:
        y = x @ w
        even, odd = y[:, ::2], y[:, 1::2]
        x = x + jnp.concatenate([even * odd, even * jnp.sin(odd)], 1) @ w
    return jnp.mean(x**2)


def filtered(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers that weigh the frequencies of the channels."""
    for w in weights:
        y = jnp.fft.rfft(x @ w) * w[0, : x.shape[-1] // 2 + 1]
        x = x + jnp.tanh(jnp.fft.irfft(y, n=x.shape[-1])) @ w
    return jnp.mean(x**2)


def mixed(taps: int) -> Callable[[list[jax.Array], jax.Array], jax.Array]:
    """Layers with a short convolution over rows: a sum of shifted ones."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            padded = jnp.pad(x @ w, ((taps - 1, 0), (0, 0)))
            y = sum(
                (padded[i : i + len(x)] * w[i] for i in range(1, taps)), padded[: len(x)] * w[0]
            )
            x = x + jax.nn.silu(y) @ w
        return jnp.mean(jnp.square(x @ weights[0]))

    return loss


@pytest.mark.parametrize(("taps", "sums"), [(2, 0), (4, 3)])
def test_for_tpu_a_sum_of_many_shifted_arrays_is_stored(taps: int, sums: int) -> None:
    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            padded = jnp.pad(x @ w, ((taps - 1, 0), (0, 0)))
            x = jax.nn.silu(sum(padded[i : i + len(x)] * w[i] for i in range(taps))) @ w
        return jnp.mean(x)

    program = tracing.trace(loss, [jnp.ones((128, 128))] * 3, jnp.ones((256, 128)))
    maker = program.makers()
    found = [
        program.equations[maker[value]].operation.primitive
        for value in storage_of(program, "v5e").stored
        if value in maker and program.types[value].shape == (256, 128)
    ]
    assert found.count("add") == sums


@pytest.mark.parametrize("device", ["h200", "v5e"])
def test_masks_are_not_stored_though_what_they_are_of_is_larger(device: str) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.sum(jnp.where(y > 0, y, 0.1 * y) @ w)

    program = tracing.trace(loss, jnp.ones((128, 128)), jnp.ones((256, 128)))
    stored = storage_of(program, device).stored
    assert all(program.types[value].dtype != "bool" for value in stored)


@pytest.mark.parametrize(("slices", "pieces"), [(2, 2), (4, 4)])
def test_for_tpu_slices_that_overlap_have_cotangents_of_their_own(slices: int, pieces: int) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        padded = jnp.pad(x @ w, ((slices - 1, 0), (0, 0)))
        return jnp.sum(sum(padded[i : i + len(x)] * w[i] for i in range(slices)) @ w)

    *_, found = graph_of(loss, jnp.ones((128, 128)), jnp.ones((4096, 128)), device="v5e")
    assert max(found.cotangent_bytes) // (4096 * 128 * 4) == pieces


def test_for_tpu_slices_that_are_only_added_up_have_one_cotangent() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        padded = jnp.pad(x @ w, ((3, 0), (0, 0)))
        return jnp.sum(sum(padded[i : i + len(x)] for i in range(4)) @ w)

    *_, found = graph_of(loss, jnp.ones((128, 128)), jnp.ones((4096, 128)), device="v5e")
    assert max(found.cotangent_bytes) // (4096 * 128 * 4) == 1


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "width", "within"),
    [
        (multiplied(added), 256, 0.3),
        (rotated, 1024, 0.15),
        (filtered, 1024, 0.25),
        (mixed(4), 1024, 0.1),
    ],
)
def test_unchanged_for_tpu_they_are_predicted(fn: Any, width: int, within: float) -> None:
    shape = jax.ShapeDtypeStruct
    weights, x = [shape((width, width), "float32")] * 3, shape((16384, width), "float32")
    step = InStep(fn, weights, x, device="v5e")
    assert step.unplanned_bytes() == pytest.approx(step.problem.unchanged.peak_bytes, rel=within)


@needs_cuda_plugin
@pytest.mark.cuda
@pytest.mark.parametrize(("function", "within"), [(added, 0.1), (jax.nn.sigmoid, 0.2)])
def test_unchanged_for_nvidia_they_are_predicted(function: Moved, within: float) -> None:
    shape = jax.ShapeDtypeStruct
    step = InStep(
        multiplied(function), [shape((256, 256), "float32")] * 3, shape((4096, 256), "float32")
    )
    assert step.unplanned_bytes() == pytest.approx(step.problem.unchanged.peak_bytes, rel=within)


def test_a_slice_with_strides_within_tiles_is_an_array_on_tpu() -> None:
    def loss(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)
        along = [lax.slice(y, (0, 0, 0), y.shape, stride) for stride in ((2, 1, 1), (1, 2, 1))]
        return jnp.sum(along[0]) + jnp.sum(jnp.cos(along[1]))

    program = tracing.trace(loss, jnp.ones((8, 8, 128)))
    for device, expected in (("v5e", {(8, 4, 128)}), ("h200", set())):
        found = storage_of(program, device).stored
        slices = {
            program.types[one.outputs[0]].shape
            for one in program.equations
            if one.operation.primitive == "slice" and one.outputs[0] in found
        }
        assert slices == expected
